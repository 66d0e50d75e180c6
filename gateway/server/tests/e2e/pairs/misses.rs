//! Every reason for which a tier passes, as it is counted.

use kvgate_sim::{Ended, Fault, Role, Sim};
use serde_json::{Value, json};

use super::{Pair, body, request, rule};
use crate::support::{Connection, MODEL, Request, Rule, Setup, engine_with, fetch, prompt, until};

const KV_MISSES: &str = "loxilb_pd_kv_tier15_miss_reason_total";
const STALLED: Fault = super::limits::STALLED;

/// A request that a tier passes on once for this reason; answered with this status.
async fn passes(pair: &Pair, tier: &str, reason: &str, ask: &Request, status: u16) {
    let before = pair.misses(tier, reason).await;
    let answer = pair.gateway.send(ask).await;
    assert_eq!(answer.status, status, "{tier} {reason}: {answer:?}");
    pair.is_idle().await;
    until(reason, async || pair.misses(tier, reason).await > before).await;
    assert_eq!(pair.misses(tier, reason).await, before + 1.0, "{tier} {reason}");
}

fn without(mut body: Value, member: &str) -> Value {
    body.as_object_mut().unwrap().remove(member);
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn of_radix_trie() {
    let pair = Pair::new(2, 1, rule(&["radix-trie"])).await;
    let text = |prompt: &str| request(&json!({"model": MODEL, "prompt": prompt, "max_tokens": 2}));
    let known = "known words ".repeat(20);
    let of = async |reason, ask: Request| passes(&pair, "radix-trie", reason, &ask, 200).await;
    of("unseen", text(&known)).await;
    passes(&pair, "radix-trie", "text_empty", &request(&without(body(1), "prompt")), 400).await;
    of("shallow", text(&format!("{}{}", &known[..40], "z".repeat(400)))).await;
    let home = pair.went(&text(&known)).await;
    assert_eq!(home.tiers[0], "radix-trie");
    super::set(&pair.gateway, &pair.prefill[home.prefill], "disabled").await;
    of("excluded", text(&known)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_kv_exact() {
    let pair = with_a_model_unknown().await;
    let counted = async |reason: &str| pair.gateway.metric(KV_MISSES, &[&format!("reason={reason:?}")]).await;
    let of = async |reason: &str, ask: Request, status| {
        let before = counted(reason).await;
        passes(&pair, "kv-exact", reason, &ask, status).await;
        assert_eq!(counted(reason).await, before + 1.0, "{reason}");
    };
    of("no_worker", request(&body(1)), 200).await;
    pair.gateway.until_blocks("pair", 0, 4).await;
    of("shallow", request(&json!({"model": MODEL, "prompt": prompt(2, 15), "max_tokens": 2})), 200).await;
    of("text_empty", request(&without(body(2), "prompt")), 400).await;
    of("model_empty", request(&without(body(2), "model")), 200).await;
    let mut unstaged = body(2);
    unstaged["model"] = "unstaged".into();
    of("tokenize", request(&unstaged), 200).await;
    super::set(&pair.gateway, &pair.prefill[0], "disabled").await;
    of("excluded", request(&body(1)), 200).await;
    assert_eq!(counted("mode_off").await, 0.0);

    let pair = Pair::small().await;
    assert_eq!(pair.send(&body(1)).await.status, 200);
    pair.gateway.until_metric(KV_MISSES, &["reason=\"mode_off\""], 1.0).await;
}

/// Two and one that serve a model without a tokenizer beside the usual one.
async fn with_a_model_unknown() -> Pair {
    let models = [MODEL, "unstaged"];
    let engine = async |role| {
        engine_with(|config| (config.role, config.models) = (role, models.map(str::to_owned).into())).await
    };
    let prefill = vec![engine(Role::Prefill).await, engine(Role::Prefill).await];
    let decode = vec![engine(Role::Decode).await];
    let rule = Rule::new("pair", &["kv-exact"]).top("shape = \"prefill-decode\"");
    let rule = super::with_parts(rule.matching(&format!("models = {models:?}")), &prefill, &decode);
    let gateway = Setup::new(&[rule]).start_unready().await;
    until("the engines are followed", async || {
        gateway.ready().await["feeds"].as_array().unwrap().iter().all(|feed| feed["connected"] == true)
    })
    .await;
    Pair { prefill, decode, positions: vec![0, 1], gateway }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_session_and_min_load() {
    let pair = Pair::new(2, 1, rule(&["session"]).top("decode_tiers = [\"min-load\"]")).await;
    let talk = request(&body(1)).field("x-conversation-id", "talk");
    let of = async |reason, ask: &Request| passes(&pair, "session", reason, ask, 200).await;
    of("no_key", &request(&body(1))).await;
    of("unknown", &talk).await;
    let home = pair.went(&talk).await.prefill;
    // tried in vain, and not yet let go
    pair.prefill[home].fault(Fault { status: Some(500), ..Fault::default() }, 1);
    of("unknown", &talk).await;
    let home = pair.went(&talk).await.prefill;
    super::set(&pair.gateway, &pair.prefill[home], "disabled").await;
    of("pin_lost", &talk).await;
    // those that are left take no more than what is pinned to them
    super::set(&pair.gateway, &pair.prefill[1 - home], "draining").await;
    assert_eq!(pair.went(&talk).await.tiers[0], "session");
    passes(&pair, "min-load", "no_endpoint", &request(&body(1)), 200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_admission() {
    let keys = "prefill_max_in_flight = 1\nqueue_depth = 4\nqueue_wait = \"60s\"";
    let rule = rule(&["admission", "session"]).top("decode_tiers = [\"admission\"]");
    let pair = Pair::new(2, 1, rule.clone().table("tier.admission", keys)).await;
    let talk = request(&body(1)).field("x-conversation-id", "talk");
    let of = async |tier, reason, ask: &Request| passes(&pair, tier, reason, ask, 200).await;
    of("admission", "room", &talk).await;
    of("admission", "off", &talk).await;
    let home = pair.went(&talk).await.prefill;
    // one full endpoint: whoever is pinned to it goes elsewhere
    pair.prefill[home].fault(STALLED, 1);
    let mut held = Vec::new();
    let hold = async |n: usize| {
        let mut client = Connection::open(pair.gateway.address).await;
        client.send(&talk).await;
        until("it is held", async || {
            pair.prefill.iter().flat_map(Sim::log).filter(|served| served.ended == Ended::Open).count() == n
        })
        .await;
        client
    };
    held.push(hold(1).await);
    let before = pair.misses("session", "pin_busy").await;
    assert_eq!(pair.went(&talk).await.prefill, 1 - home);
    assert_eq!(pair.misses("admission", "narrowed").await, 1.0);
    assert_eq!(pair.misses("session", "pin_busy").await, before + 1.0);
    // both: it waits, and is granted the place that comes free
    pair.prefill[1 - home].fault(STALLED, 1);
    held.push(hold(2).await);
    let mut waits = Connection::open(pair.gateway.address).await;
    waits.send(&talk).await;
    pair.gateway.until_metric("kvgate_admission_queue_length", &["role=\"prefill\""], 1.0).await;
    drop(held);
    assert_eq!(waits.answer().await.status, 200);
    assert_eq!(pair.misses("admission", "granted").await, 1.0);
    pair.is_idle().await;
    for engine in &pair.prefill {
        super::set(&pair.gateway, engine, "draining").await;
    }
    passes(&pair, "admission", "no_endpoint", &request(&body(1)), 200).await;

    let pair =
        Pair::new(1, 1, rule.table("tier.admission", "mode = \"observe\"\nprefill_max_in_flight = 1")).await;
    pair.prefill[0].fault(STALLED, 1);
    let mut held = Connection::open(pair.gateway.address).await;
    held.send(&talk).await;
    until("it is held", async || pair.prefill[0].log().len() == 1).await;
    let answer = fetch(pair.gateway.address, &request(&body(1))).await;
    assert_eq!((answer.status, pair.misses("admission", "observed").await), (200, 1.0));
    drop(held);
    pair.is_idle().await;
}
