//! The demo's words.

use std::fmt::Write;

use serde_json::{Value, json};

use super::Shown;
use super::fleet::{Fleet, MODEL};
use super::talk::Talk;

pub const OPENING: &str = "\
Three simulated engines and a gateway start on loopback ports. Seven conversations, each with a
system prompt of its own, ask five questions each: first routed by kv-exact, then, on fresh
engines, by round-robin.
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
    line(format_args!("Where kv-exact sent each question, and why:\n"));
    line(format_args!(
        "  conversation  question  engine           chosen by  prompt  held there  first token"
    ));
    for turn in &shown.exact.turns {
        let a = &turn.answer;
        line(format_args!(
            "  {:>12}  {:>8}  {:<15}  {:<9}  {:>6}  {:>10}  {:>8.1} ms",
            turn.conversation + 1,
            turn.turn + 1,
            a.endpoint,
            a.tier,
            a.prompt_tokens,
            a.cached_tokens,
            a.ttft.as_secs_f64() * 1e3
        ));
    }
    line(format_args!(
        "\nA cold prompt is held by nobody: kv-exact passes, min-load chooses. A warm one goes to the engine that\n\
         announced its blocks. Both policies, side by side:\n"
    ));
    line(format_args!("  {:<28}  {:>10}  {:>12}", "", "kv-exact", "round-robin"));
    let (exact, robin) = (&shown.exact, &shown.robin);
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
        line(format_args!("  {name:<28}  {exact:>10}  {robin:>12}"));
    }
    for error in [&exact.first_error, &robin.first_error].into_iter().flatten() {
        line(format_args!("\nThe first error: {error}"));
    }
    line(format_args!("\n{}", verdict(won)));
    text
}

fn verdict(won: bool) -> &'static str {
    if won {
        "kv-exact found at least 1.5 times as much in the engines' caches, and answered sooner."
    } else {
        "Not won: kv-exact should find at least 1.5 times as much in the engines' caches, and answer sooner."
    }
}

/// How to go on by hand.
pub fn serving(fleet: &Fleet) -> String {
    format!(
        "The gateway stays at http://{0}, its admin surface at http://{1}. Ctrl-C ends it.\n\n  \
         curl -si http://{0}/v1/chat/completions -H 'content-type: application/json' -H 'x-kvgate-explain: 1' \\\n    \
         -d '{{\"model\": \"{MODEL}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Hello\"}}]}}'\n  \
         curl -s http://{1}/metrics | grep tier15\n",
        fleet.gateway, fleet.admin
    )
}
