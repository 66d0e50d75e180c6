//! The demo's words.

use std::collections::BTreeSet;
use std::fmt::Write;

use kvgate_tiers::kv_exact;
use serde_json::{Value, json};

use super::Shown;
use super::fleet::{Fleet, MODEL};
use super::talk::Talk;

pub const OPENING: &str = "\
Three simulated engines and a gateway start on loopback ports. Seven conversations, each
with a system prompt of its own, ask four questions each, one after the other: first
routed by kv-exact, then, on fresh engines, by round-robin.
";

/// The result as JSON.
pub fn json(shown: &Shown) -> Value {
    let policy = |talk: &Talk| {
        json!({
            "hit_rate": talk.hit_rate(),
            "ttft_ms": {"p50": talk.ttft_ms(50), "p99": talk.ttft_ms(99)},
            "per_endpoint": talk.per_endpoint(),
        })
    };
    let requests = |talk: &Talk| talk.turns.len() + talk.errors;
    json!({
        "requests": requests(&shown.exact) + requests(&shown.robin),
        "errors": shown.exact.errors + shown.robin.errors,
        "policies": {"kv-exact": policy(&shown.exact), "round-robin": policy(&shown.robin)},
    })
}

/// The result for a reader.
pub fn text(shown: &Shown, won: bool) -> String {
    let mut text = String::new();
    let mut line = |words: std::fmt::Arguments<'_>| {
        let _ = writeln!(text, "{words}");
    };
    let (exact, robin) = (&shown.exact, &shown.robin);
    line(format_args!("\nWhere kv-exact sent each question, and why:\n"));
    line(format_args!(
        "  talk  question  {:<15}  {:<20}  prompt  cached  first token",
        "engine", "chosen by"
    ));
    for turn in &exact.turns {
        let a = &turn.answer;
        let why = a.miss.as_ref().map_or_else(|| a.tier.clone(), |miss| format!("{} ({miss})", a.tier));
        line(format_args!(
            "  {:>4}  {:>8}  {:<15}  {why:<20}  {:>6}  {:>6}  {:>8.1} ms",
            turn.conversation + 1,
            turn.turn + 1,
            a.endpoint,
            a.prompt_tokens,
            a.cached_tokens,
            a.ttft.as_secs_f64() * 1e3
        ));
    }
    line(format_args!(
        "\n  prompt, cached: tokens, and those of them that the engine still had in its KV cache"
    ));
    line(format_args!("  kv-exact: the engine that announced the longest part of the prompt"));
    line(format_args!("  min-load: kv-exact passed, so the least loaded engine"));
    let missed: BTreeSet<_> = exact.turns.iter().filter_map(|t| t.answer.miss.as_deref()).collect();
    for miss in kv_exact::KIND.misses.iter().filter(|m| missed.contains(m.reason)) {
        line(format_args!("  {}: {}", miss.reason, miss.doc));
    }
    line(format_args!("\nBoth policies, side by side:\n"));
    line(format_args!("  {:<28}  {:>12}  {:>12}", "", "kv-exact", "round-robin"));
    let percent = |talk: &Talk| format!("{:.1} %", talk.hit_rate() * 100.0);
    let millis = |talk: &Talk, p| format!("{:.1} ms", talk.ttft_ms(p));
    let requests =
        |talk: &Talk| talk.per_endpoint().values().map(ToString::to_string).collect::<Vec<_>>().join(" / ");
    for (name, exact, robin) in [
        ("prompt tokens found cached", percent(exact), percent(robin)),
        ("time to first token, p50", millis(exact, 50), millis(robin, 50)),
        ("time to first token, p99", millis(exact, 99), millis(robin, 99)),
        ("requests per engine", requests(exact), requests(robin)),
        ("errors", exact.errors.to_string(), robin.errors.to_string()),
    ] {
        line(format_args!("  {name:<28}  {exact:>12}  {robin:>12}"));
    }
    for error in [&exact.first_error, &robin.first_error].into_iter().flatten() {
        line(format_args!("\nThe first error: {error}"));
    }
    line(format_args!("\n{}", verdict(won)));
    text
}

fn verdict(won: bool) -> &'static str {
    if won {
        "Won: kv-exact found at least 1.5 times as much in the engines' caches, and answered\nsooner."
    } else {
        "Not won: kv-exact should find at least 1.5 times as much in the engines' caches, and\nanswer sooner."
    }
}

/// How to go on by hand.
pub fn serving(fleet: &Fleet, pair: bool) -> String {
    let (then, count) = match pair {
        true => (
            "the engines of the first answer are chosen for the next: by the text they were given",
            "loxilb_ai_pd",
        ),
        false => ("the engine that answered\nfirst is chosen for what it holds", "tier15"),
    };
    format!(
        "\nThe gateway stays at http://{0}, its admin surface at\nhttp://{1}. Ctrl-C ends it. Ask twice, and {then}:\n\n  \
         curl -si http://{0}/v1/chat/completions -H 'content-type: application/json' \\\n    \
         -H 'x-kvgate-explain: 1' -d '{{\"model\": \"{MODEL}\", \"messages\": [{{\"role\": \"user\",\n    \
         \"content\": \"Say in a few words why a prefix cache makes answers come sooner.\"}}]}}'\n  \
         curl -s http://{1}/metrics | grep {count}\n",
        fleet.gateway, fleet.admin
    )
}
