//! Prompts in decision records, and what `kvgate replay` makes of them.

use std::process::Command;

use serde_json::Value;

use crate::support::{Gateway, MODEL, Request, Rule, Setup, completion, engines, prompt, until};

async fn decisions(gateway: &Gateway) -> Vec<Value> {
    let Value::Array(all) = gateway.ask("/decisions").await.json() else { unreachable!() };
    all
}

/// The last decisions about requests to a model, once there are so many: records come after answers.
async fn of_model(gateway: &Gateway, model: &str, count: usize) -> Vec<Value> {
    let mut found = Vec::new();
    until("the requests are recorded", async || {
        found = decisions(gateway).await;
        found.retain(|decision| decision["model"] == model);
        found.len() >= count
    })
    .await;
    found.split_off(found.len() - count)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_balances_blindly_learns_what_it_could_have_had() {
    let engines = engines(2).await;
    let rule = Rule::new("words", &["round-robin"]).top("explain = true").engines(&engines);
    let gateway = Setup::new(&[rule]).process("[decisions]\nprompt_hashes = 3\n").start().await;
    until("the tokenizer is loaded", async || {
        gateway.complete(&prompt(0, 8)).await;
        decisions(&gateway).await.iter().any(|decision| decision.get("prompt").is_some())
    })
    .await;
    let long = prompt(1, 1600);
    for _ in 0..4 {
        gateway.complete(&long).await;
    }
    let asked = Request::json("/v1/completions", &completion("other", &long)).field("x-kvgate-explain", "1");
    let other = gateway.send(&asked).await;
    assert!(!other.field("x-kvgate-decision").unwrap().contains("hashes"), "{other:?}");
    let other = of_model(&gateway, "other", 1).await;
    assert_eq!(other[0].get("prompt"), None, "a model without a tokenizer");
    let mut records = of_model(&gateway, MODEL, 4).await;
    let first = records[0]["prompt"].clone();
    assert!(records.iter().all(|record| record["prompt"] == first), "{records:?}");
    assert_eq!((&first["tokens"], &first["span"]), (&1600.into(), &512.into()));
    assert_eq!(first["hashes"].as_array().unwrap().len(), 3, "and no more");

    // as if each had come when the one before was long served
    records.iter_mut().zip(0u64..).for_each(|(record, n)| record["at_ms"] = (n * 10_000).into());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("decisions.json");
    std::fs::write(&file, Value::Array(records).to_string()).unwrap();
    let mut replay = Command::new(env!("CARGO_BIN_EXE_kvgate"));
    let done = replay.args(["replay", "--engines", "2", "--json"]).arg(&file).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let out = String::from_utf8(done.stdout).unwrap();
    let rows: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let hits = |policy: &str| {
        let row = rows.iter().find(|row| row["policy"] == policy).unwrap();
        row["hit_rate"].as_f64().unwrap()
    };
    assert!(hits("kv-exact-off") > hits("round-robin"), "{out}");
    assert!(hits("round-robin") > 0.0, "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_not_recorded_unless_that_is_wanted() {
    let engines = engines(1).await;
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    gateway.complete(&prompt(1, 600)).await;
    assert_eq!(of_model(&gateway, MODEL, 1).await[0].get("prompt"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_logged_where_only_they_are_asked_for() {
    let engines = engines(1).await;
    let setup = Setup::new(&[Rule::new("words", &["round-robin"]).engines(&engines)]);
    let gateway = setup.environment("RUST_LOG", "kvgate::decision=debug").spawn().await;
    gateway.complete(&prompt(1, 60)).await;
    until("the record is in the log", async || gateway.log().contains(r#""tier":"round-robin""#)).await;
}
