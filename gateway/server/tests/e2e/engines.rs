//! Engines that are drained, disabled and weighed by hand.

use kvgate_sim::Sim;
use serde_json::{Value, json};

use crate::support::{Answer, Gateway, Request, Rule, Setup, engines, fetch, prompt, until};

async fn put(gateway: &Gateway, address: &str, body: &Value) -> Answer {
    fetch(gateway.admin, &Request::put(&format!("/engines/{address}"), body)).await
}

/// How many of so many requests each engine served.
async fn shares(gateway: &Gateway, engines: &[Sim], requests: u32) -> Vec<usize> {
    let before: Vec<_> = engines.iter().map(|engine| engine.log().len()).collect();
    for seed in 0..requests {
        gateway.complete(&prompt(seed, 5)).await;
    }
    engines.iter().zip(before).map(|(engine, before)| engine.log().len() - before).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn states_and_weights_act_at_once_and_stay_over_reloads() {
    let engines = engines(2).await;
    let rule = Rule::new("words", &["weighted-round-robin"]).engines(&engines);
    let gateway = Setup::new(std::slice::from_ref(&rule)).spawn().await;
    let address = engines[0].address().to_string();
    assert_eq!(shares(&gateway, &engines, 4).await, [2, 2]);
    for state in ["draining", "disabled"] {
        assert_eq!(put(&gateway, &address, &json!({"state": state})).await.json()[0]["state"], state);
        assert_eq!(shares(&gateway, &engines, 3).await, [0, 3], "{state}");
    }
    let set = put(&gateway, &address, &json!({"state": "active", "weight_pct": 300})).await;
    assert_eq!((set.status, &set.json()[0]["weight_pct"]), (200, &json!(300)));
    assert_eq!(shares(&gateway, &engines, 8).await, [6, 2]);
    let reloads = async || gateway.metric("kvgate_config_reloads_total", &["result=\"good\""]).await;
    let before = reloads().await;
    gateway.setup.write(&rule.clone().top("explain = true"));
    until("the rule is read anew", async || reloads().await > before).await;
    assert_eq!(shares(&gateway, &engines, 8).await, [6, 2]);
    let listed = gateway.ask("/engines").await.json();
    let first = json!({
        "engine": address, "state": "active", "weight_pct": 300, "available": "free",
        "healthy": true, "breaker": "closed", "in_flight": 0
    });
    assert_eq!((listed.as_array().unwrap().len(), &listed[0]), (2, &first));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_set_changes_nothing() {
    let engines = engines(1).await;
    let gateway = Setup::new(&[Rule::new("words", &["round-robin"]).engines(&engines)]).start().await;
    let address = engines[0].address().to_string();
    for (body, says) in [
        (json!({"state": "off"}), "unknown variant `off`"),
        (json!({"weight_pct": 0}), "1 to 1000"),
        (json!({"weight_pct": 1001}), "1 to 1000"),
        (json!({"weight": 5}), "unknown field `weight`"),
        (json!([]), "invalid"),
    ] {
        let answer = put(&gateway, &address, &body).await;
        assert_eq!(answer.status, 400, "{body}");
        assert!(answer.json()["error"].as_str().unwrap().contains(says), "{answer:?}");
    }
    assert_eq!(put(&gateway, "10.0.0.1:1", &json!({"state": "active"})).await.status, 404);
    assert_eq!(fetch(gateway.admin, &Request::put("/engines", &json!({}))).await.status, 405);
    let listed = gateway.ask("/engines").await.json();
    assert_eq!((&listed[0]["state"], &listed[0]["weight_pct"]), (&json!("active"), &json!(100)));
}
