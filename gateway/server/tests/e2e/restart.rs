//! Engines that start anew, and connections that merely break.

use kvgate_sim::ReplayFrames;

use crate::support::{
    Gateway, MODEL, Request, Rule, Setup, completion, engine_with, engines, fetch, prompt, served, until,
};

const CONNECTED: &str = "loxilb_kv_subscriber_connected";
const RECONNECTS: &str = "loxilb_kv_subscriber_reconnect_total";
const CLEARS: &str = "kvgate_feed_clears_total";
const HITS: &str = "loxilb_pd_kv_tier15_hits_total";

/// The number of the endpoint that holds this prompt after a cold request, and how it is labelled.
async fn warmed(gateway: &Gateway, engines: &[kvgate_sim::Sim], seed: u32) -> (usize, String) {
    let cold = gateway.complete(&prompt(seed, 64)).await;
    let holder = engines.iter().position(|e| e.address().to_string() == cold.endpoint()).unwrap();
    until("the prompt is held", async || gateway.held("words", holder).await.len() >= 4).await;
    (holder, format!("ep=\"{}\"", cold.endpoint()))
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_a_restarted_engine_held_is_credited() {
    let mut engines = engines(2).await;
    // time enough for requests while it is unknown what became of the engine
    let setup = Setup::new(&[Rule::kv("words").engines(&engines)]).backoff("400ms");
    let gateway = setup.start().await;
    for round in 0..4 {
        let (holder, ep) = warmed(&gateway, &engines, 10 + round).await;
        let index = format!("ep_idx=\"{holder}\"");
        let before = gateway.metric(HITS, &[&index]).await;
        let reconnects = gateway.metric(RECONNECTS, &[&ep]).await;
        engines[holder].restart().await.unwrap();
        until("the gateway has noticed", async || {
            let metrics = gateway.metrics().await;
            metrics.get(CONNECTED, &[&ep]) == 0.0 || metrics.get(RECONNECTS, &[&ep]) > reconnects
        })
        .await;
        let next = gateway.complete(&prompt(10 + round, 64)).await;
        assert_eq!(next.tier(), "round-robin", "round {round}");
        assert_eq!(gateway.metric(HITS, &[&index]).await, before);
        gateway.until_metric(RECONNECTS, &[&ep], reconnects + 1.0).await;
        // what it has computed since counts again
        let (holder, _) = warmed(&gateway, &engines, 20 + round).await;
        until("hits go on", async || {
            let warm = gateway.complete(&prompt(20 + round, 70)).await;
            warm.tier() == "kv-exact" && warm.endpoint() == engines[holder].address().to_string()
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_event_connection_breaks_keeps_its_credit() {
    let engines = engines(2).await;
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    let (holder, ep) = warmed(&gateway, &engines, 1).await;
    let held = gateway.held("words", holder).await;
    for round in 1..=3 {
        engines[holder].cut_events().await;
        gateway.until_metric(RECONNECTS, &[&ep], f64::from(round)).await;
        assert_eq!(gateway.held("words", holder).await, held);
        until("hits go on", async || {
            let warm = gateway.complete(&prompt(1, 70)).await;
            warm.tier() == "kv-exact" && served(&engines[holder], warm.id()).is_some()
        })
        .await;
        assert_eq!(gateway.metrics().await.sum(CLEARS, &[]), 0.0);
    }
    // and goes on to be followed
    engines[holder].cut_events().await;
    let body = completion(MODEL, &prompt(99, 48));
    let direct = fetch(engines[holder].address(), &Request::json("/v1/completions", &body)).await;
    assert_eq!(direct.status, 200);
    until("what was computed meanwhile is learnt", async || {
        gateway.held("words", holder).await.len() >= held.len() + 3
    })
    .await;
}

/// A gateway that starts after its engines, or again, learns what they hold from their replay.
#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_comes_late_learns_what_is_held() {
    let mut engines = Vec::new();
    for (frames, seed) in [(ReplayFrames::Old, 0), (ReplayFrames::New, 1)] {
        let engine = engine_with(|c| c.replay_frames = frames).await;
        for more in 0..3 {
            let ask = Request::json("/v1/completions", &completion(MODEL, &prompt(seed + 10 * more, 64)));
            assert_eq!(fetch(engine.address(), &ask).await.status, 200);
        }
        engines.push(engine);
    }
    for _ in 0..2 {
        let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
        for (holder, seed) in [(0, 0), (1, 1)] {
            gateway.until_blocks("words", holder, 12).await;
            let warm = gateway.complete(&prompt(seed + 20, 64)).await;
            assert_eq!((warm.tier(), warm.endpoint()), ("kv-exact", &*engines[holder].address().to_string()));
        }
    }
}
