//! Engines that die, are drained or disabled while requests wait for them.

use super::{LENGTH, WAITS, asks, capped, ids, is_served, of, takes_a_place, waiting};
use crate::pairs::{Pair, set};
use crate::support::{Connection, until};

const KEYS: &str = "decode_max_in_flight = 1\nqueue_depth = 8\nqueue_wait = \"60s\"";

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_an_engine_that_dies_waits_for_the_other() {
    let mut pair = Pair::new(1, 2, capped(KEYS)).await;
    let (mut first, second) = takes_both(&pair).await;
    let head = first.head().await.unwrap();
    let mut waits = Vec::new();
    for n in 0..3 {
        waits.push(asks(&pair.gateway, &format!("{n}")).await);
        waiting(&pair.gateway, "decode", n + 1).await;
    }
    // gone and back, and with a place free then
    pair.decode[0].restart().await.unwrap();
    let broken = first.rest(head).await;
    assert!(String::from_utf8_lossy(&broken.body).contains("pd_decode_backend_died"), "{broken:?}");
    drop(second);
    for client in waits {
        is_served(client).await;
    }
    pair.is_idle().await;
    let served: usize = pair.decode.iter().map(|engine| engine.log().len()).sum();
    assert_eq!(served, 5, "each once");
    assert_eq!(pair.counter("loxilb_pd_decode_ep_died_total").await, 1.0);
}

/// A request at each of both decode endpoints.
async fn takes_both(pair: &Pair) -> (Connection, Connection) {
    let [first, second] = &pair.decode[..] else { panic!("two") };
    set(&pair.gateway, second, "disabled").await;
    let at_first = takes_a_place(&pair.gateway, first, "first").await;
    set(&pair.gateway, second, "active").await;
    (at_first, takes_a_place(&pair.gateway, second, "second").await)
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_when_nobody_is_left_is_told() {
    for (role, state) in [("prefill", "disabled"), ("decode", "disabled"), ("decode", "draining")] {
        let keys = format!("{role}_max_in_flight = 1\nqueue_depth = 8\nqueue_wait = \"60s\"");
        let rule = capped(&keys).table("legs", "without_prefill = \"refuse\"");
        let pair = Pair::new(1, 1, rule).await;
        let engine = if role == "prefill" { &pair.prefill[0] } else { &pair.decode[0] };
        let first = takes_a_place(&pair.gateway, engine, "first").await;
        let mut waits = Vec::new();
        for n in 0..2 {
            waits.push(asks(&pair.gateway, &format!("{n}")).await);
            waiting(&pair.gateway, role, n + 1).await;
        }
        set(&pair.gateway, engine, state).await;
        for mut client in waits {
            let answer = client.answer().await;
            assert_eq!((answer.status, &*answer.code()), (503, "pd_pool_unavailable"), "{state}: {answer:?}");
        }
        assert_eq!(of(&pair.gateway, LENGTH, role).await, 0.0);
        let label = format!("role={role:?}");
        assert_eq!(pair.gateway.metric(WAITS, &[&label, "end=\"no_endpoint\""]).await, 2.0);
        // it is back
        set(&pair.gateway, engine, "active").await;
        let next = asks(&pair.gateway, "next").await;
        waiting(&pair.gateway, role, 1).await;
        drop(first);
        is_served(next).await;
        assert_eq!(ids(engine), ["first", "next"], "{role} {state}");
        pair.is_idle().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn places_are_those_of_engines_in_service() {
    for state in ["disabled", "draining"] {
        nobody_waits_for_what_is_out_of_service(state).await;
    }
}

async fn nobody_waits_for_what_is_out_of_service(state: &str) {
    let pair = Pair::new(1, 2, capped(KEYS)).await;
    let (first, second) = takes_both(&pair).await;
    let mut waits = Vec::new();
    for n in 0..2 {
        waits.push(asks(&pair.gateway, &format!("{n}")).await);
        waiting(&pair.gateway, "decode", n + 1).await;
    }
    // a place that comes free at one that is out of service is nobody's
    set(&pair.gateway, &pair.decode[0], state).await;
    drop(first);
    let label = format!("ep=\"{}\"", pair.decode[0].address());
    pair.gateway.until_metric("kvgate_endpoint_in_flight", &[&label], 0.0).await;
    assert_eq!(of(&pair.gateway, LENGTH, "decode").await, 2.0);
    // until it is back, though no request ends at that moment
    set(&pair.gateway, &pair.decode[0], "active").await;
    for client in waits {
        is_served(client).await;
    }
    assert_eq!(ids(&pair.decode[0]), ["first", "0", "1"]);
    assert_eq!(ids(&pair.decode[1]), ["second"]);
    drop(second);
    pair.is_idle().await;
}

/// The one that was granted a place at an engine that takes no connection any more goes on to the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_place_at_an_engine_that_is_gone_is_another_s_too() {
    let mut pair = Pair::new(1, 2, capped(KEYS)).await;
    let (first, second) = takes_both(&pair).await;
    let waits = asks(&pair.gateway, "waits").await;
    waiting(&pair.gateway, "decode", 1).await;
    // close() lets answers under way end; what is new is refused
    pair.decode[0].refuse(true).await.unwrap();
    drop(first);
    waiting(&pair.gateway, "decode", 1).await;
    until("it has tried the one", async || {
        pair.gateway.metric(WAITS, &["role=\"decode\"", "end=\"granted\""]).await == 1.0
    })
    .await;
    waiting(&pair.gateway, "decode", 1).await;
    drop(second);
    is_served(waits).await;
    assert_eq!(ids(&pair.decode[1]), ["second", "waits"]);
    pair.is_idle().await;
}
