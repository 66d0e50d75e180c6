//! What affinity may do to the load: many at once with one prompt.

use std::sync::Arc;

use kvgate_sim::Sim;
use serde_json::Value;

use crate::support::{
    Answer, Gateway, MODEL, Request, Rule, Setup, completion, engine, engines, prompt, until,
};

const SPILLS: &str = "loxilb_pd_kv_tier15_spills_total";
const SEEDS: &str = "loxilb_pd_kv_tier15_cold_seeds_total";

fn delayed(tokens: &[u32], ms: u32) -> Request {
    Request::json("/v1/completions", &completion(MODEL, tokens))
        .field("x-sim-fault", &format!("{{\"delay_ms\": {ms}}}"))
}

fn at(engines: &[Sim], answer: &Answer) -> usize {
    engines.iter().position(|e| e.address().to_string() == answer.endpoint()).unwrap()
}

/// Who answered how many of so many requests at once.
async fn herd(gateway: &Arc<Gateway>, engines: &[Sim], request: &Request, count: usize) -> Vec<usize> {
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..count {
        let (gateway, request) = (gateway.clone(), request.clone());
        clients.spawn(async move { gateway.send(&request).await });
    }
    let mut shares = vec![0; engines.len()];
    for answer in clients.join_all().await {
        assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
        shares[at(engines, &answer)] += 1;
    }
    gateway.until_idle().await;
    shares
}

#[tokio::test(flavor = "multi_thread")]
async fn a_herd_with_one_prefix_spreads_cold_and_warm() {
    let engines = engines(2).await;
    let gateway = Arc::new(Setup::new(&[Rule::kv("words").engines(&engines)]).start().await);
    // delays long enough that all are in flight before the first is answered
    let request = delayed(&prompt(1, 500), 3000);
    let cold = herd(&gateway, &engines, &request, 48).await;
    assert!(cold.iter().all(|share| *share <= 43), "{cold:?}");
    for holder in 0..2 {
        gateway.until_blocks("words", holder, 31).await;
    }
    let lone = gateway.complete(&prompt(2, 500)).await;
    let holder = at(&engines, &lone);
    gateway.until_blocks("words", holder, 62).await;
    let warm = herd(&gateway, &engines, &delayed(&prompt(2, 510), 3000), 48).await;
    assert!(warm.iter().all(|share| *share <= 43), "{warm:?}");
    let other = format!("ep_idx=\"{}\"", 1 - holder);
    assert!(gateway.metric(SPILLS, &[&other]).await >= 1.0);
    assert!(warm[1 - holder] >= 5, "{warm:?}");
}

/// A cold fleet, one prompt, all at once, before anybody announces a block; then the same on the warm fleet.
#[tokio::test(flavor = "multi_thread")]
async fn a_herd_on_a_fleet_of_eight() {
    const HERD: usize = 400;
    let engines = engines(8).await;
    let gateway = Arc::new(Setup::new(&[Rule::kv("words").engines(&engines)]).start().await);
    let request = delayed(&prompt(1, 500), 4000);
    let most = (175 * HERD).div_ceil(100 * engines.len()) + 1;
    for _ in 0..2 {
        let shares = herd(&gateway, &engines, &request, HERD).await;
        assert_eq!(shares.iter().sum::<usize>(), HERD);
        assert!(shares.iter().all(|share| *share <= most), "{shares:?}, {most} at most");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_request_does_not_wait_behind_a_slow_one() {
    let engines = engines(2).await;
    let gateway = Arc::new(Setup::new(&[Rule::kv("words").engines(&engines)]).start().await);
    let cold = gateway.complete(&prompt(1, 64)).await;
    let holder = at(&engines, &cold);
    gateway.until_blocks("words", holder, 4).await;
    let slow = tokio::spawn({
        let gateway = gateway.clone();
        async move { gateway.send(&delayed(&prompt(1, 64), 3000)).await }
    });
    until("the slow one is under way", async || {
        gateway.metrics().await.sum("kvgate_endpoint_in_flight", &[]) == 1.0
    })
    .await;
    let second = gateway.complete(&prompt(1, 64)).await;
    assert_eq!((second.tier(), at(&engines, &second)), ("kv-exact", 1 - holder));
    assert_eq!(at(&engines, &slow.await.unwrap()), holder);
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_engine_beside_warm_ones_is_warmed() {
    let mut engines = engines(2).await;
    for engine in &engines {
        let warm = Request::json("/v1/completions", &completion(MODEL, &prompt(1, 320)));
        assert_eq!(crate::support::fetch(engine.address(), &warm).await.status, 200);
    }
    engines.push(engine().await);
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    for holder in 0..2 {
        gateway.until_blocks("words", holder, 20).await;
    }
    for _ in 0..16 {
        gateway.complete(&prompt(1, 320)).await;
        // one whose answer has just ended may still count as in flight, and be relieved
        gateway.until_idle().await;
    }
    gateway.until_metric(SEEDS, &["ep_idx=\"2\""], 1.0).await;
    gateway.until_blocks("words", 2, 20).await;
    for _ in 0..32 {
        gateway.complete(&prompt(1, 320)).await;
    }
    assert_eq!(gateway.metric(SEEDS, &["ep_idx=\"2\""]).await, 1.0, "it is cold no more");
}

/// The decision record says what the law saw and why it chose.
#[tokio::test(flavor = "multi_thread")]
async fn the_record_shows_loads_caps_and_why() {
    let engines = engines(2).await;
    let rule = Rule::kv("words").top("explain = true").engines(&engines);
    let gateway = Arc::new(Setup::new(&[rule]).start().await);
    let holder = at(&engines, &gateway.complete(&prompt(1, 64)).await);
    gateway.until_blocks("words", holder, 4).await;
    let slow = tokio::spawn({
        let gateway = gateway.clone();
        async move { gateway.send(&delayed(&prompt(1, 64), 3000)).await }
    });
    until("the slow one is under way", async || {
        gateway.metrics().await.sum("kvgate_endpoint_in_flight", &[]) == 1.0
    })
    .await;
    let ask = Request::json("/v1/completions", &completion(MODEL, &prompt(1, 64)));
    let spilled = gateway.send(&ask.field("x-kvgate-explain", "1")).await;
    let record: Value = serde_json::from_str(spilled.field("x-kvgate-decision").unwrap()).unwrap();
    let attempt = &record["attempts"][0];
    assert_eq!(attempt["winner"]["why"], "spill");
    let candidates = attempt["candidates"].as_array().unwrap();
    let of = |endpoint: usize| candidates.iter().find(|c| c["endpoint"] == endpoint).unwrap();
    assert_eq!((&of(holder)["overlap"], &of(holder)["load"]), (&64.into(), &1.into()));
    assert_eq!((&of(holder)["cap"], &of(1 - holder)["load"]), (&1.into(), &0.into()));
    slow.await.unwrap();
}
