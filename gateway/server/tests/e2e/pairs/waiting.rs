//! Requests for which there is no room at first.

use kvgate_sim::{Fault, Sim};

use super::{Pair, body, request, rule, set, stream};
use crate::support::{Connection, Rule, until};

const LENGTH: &str = "kvgate_admission_queue_length";
const QUEUED: &str = "loxilb_pd_admission_queued_total";
const SHED: &str = "loxilb_pd_admission_shed_total";
const WAITS: &str = "kvgate_admission_waits_total";
const PREFILL: &str = "role=\"prefill\"";
const DECODE: &str = "role=\"decode\"";

fn admission(lines: &str) -> Rule {
    rule(&["admission"]).table("tier.admission", lines)
}

fn stalls(engine: &Sim) {
    engine.fault(Fault { delay_ms: 600_000, ..Fault::default() }, 1);
}

/// A request of this name, on a connection of its own.
async fn ask(pair: &Pair, name: &str) -> Connection {
    let mut client = Connection::open(pair.gateway.address).await;
    client.send(&request(&body(1)).field("x-request-id", name)).await;
    client
}

/// The same, once it is one of so many who wait.
async fn park(pair: &Pair, name: &str, role: &str, waiting: f64) -> Connection {
    let client = ask(pair, name).await;
    pair.gateway.until_metric(LENGTH, &[role], waiting).await;
    client
}

fn names(engine: &Sim) -> Vec<String> {
    engine.log().into_iter().filter_map(|served| served.request_id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_wait_in_order_and_whoever_leaves_gives_up_its_place() {
    let keys = "prefill_max_in_flight = 1\nqueue_depth = 3\nqueue_wait = \"60s\"";
    let pair = Pair::new(1, 1, admission(keys)).await;
    stalls(&pair.prefill[0]);
    let first = ask(&pair, "first").await;
    until("the first is under way", async || names(&pair.prefill[0]) == ["first"]).await;
    let mut second = park(&pair, "second", PREFILL, 1.0).await;
    let third = park(&pair, "third", PREFILL, 2.0).await;
    let mut fourth = park(&pair, "fourth", PREFILL, 3.0).await;

    let refused = pair.send(&body(1)).await;
    assert_eq!((refused.status, &*refused.code()), (429, "pd_overloaded"));
    assert_eq!(refused.field("retry-after"), Some("1"));
    assert_eq!(refused.json()["error"]["message"], "all prefill endpoints at in-flight capacity");
    drop(third);
    pair.gateway.until_metric(LENGTH, &[PREFILL], 2.0).await;
    // the place goes to the second, not to who comes now
    let mut fifth = park(&pair, "fifth", PREFILL, 3.0).await;
    drop(first);
    for client in [&mut second, &mut fourth, &mut fifth] {
        assert_eq!(client.answer().await.status, 200);
    }
    pair.is_idle().await;
    assert_eq!(names(&pair.prefill[0]), ["first", "second", "fourth", "fifth"]);
    let metrics = pair.gateway.metrics().await;
    assert_eq!((metrics.get(QUEUED, &[PREFILL]), metrics.get(SHED, &[PREFILL])), (4.0, 1.0));
    assert_eq!(metrics.get(WAITS, &[PREFILL, "end=\"granted\""]), 3.0);
    assert_eq!(metrics.get(LENGTH, &[PREFILL]), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_for_decode_is_taken_until_the_stream_ends() {
    let pair = Pair::new(1, 1, admission("decode_max_in_flight = 1")).await;
    pair.decode[0].fault(Fault { stall_after: Some(2), ..Fault::default() }, 1);
    let mut client = Connection::open(pair.gateway.address).await;
    client.send(&request(&stream(1))).await;
    assert_eq!(client.head().await.unwrap().status, 200);
    assert!(client.piece().await.unwrap().is_some());
    let refused = pair.send(&body(2)).await;
    assert_eq!((refused.status, &*refused.code()), (429, "pd_overloaded"));
    assert_eq!(refused.json()["error"]["message"], "all decode endpoints at in-flight capacity");
    assert_eq!(pair.prefill[0].log().len(), 1, "no prompt is computed for nobody");
    assert_eq!(pair.gateway.metric(SHED, &[DECODE]).await, 1.0);
    drop(client);
    pair.is_idle().await;
    assert_eq!(pair.send(&body(2)).await.status, 200);
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_has_an_end() {
    let keys = "max_in_flight = 1\nqueue_depth = 9\nqueue_wait = \"100ms\"";
    let pair = Pair::new(1, 1, admission(keys)).await;
    stalls(&pair.prefill[0]);
    let busy = ask(&pair, "busy").await;
    until("it is under way", async || names(&pair.prefill[0]) == ["busy"]).await;
    let late = pair.send(&body(1)).await;
    assert_eq!((late.status, &*late.code()), (504, "pd_admission_park_timeout"));
    assert_eq!(pair.gateway.metric(WAITS, &[PREFILL, "end=\"late\""]).await, 1.0);
    drop(busy);
    pair.is_idle().await;
    assert_eq!(names(&pair.prefill[0]), ["busy"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_waits_for_engines_that_are_gone() {
    let keys = "max_in_flight = 1\nqueue_depth = 9\nqueue_wait = \"60s\"";
    let pair = Pair::new(1, 1, admission(keys)).await;
    stalls(&pair.prefill[0]);
    let busy = ask(&pair, "busy").await;
    until("it is under way", async || names(&pair.prefill[0]) == ["busy"]).await;
    let mut waits = park(&pair, "waits", PREFILL, 1.0).await;
    set(&pair.gateway, &pair.prefill[0], "disabled").await;
    let refused = waits.answer().await;
    assert_eq!((refused.status, &*refused.code()), (503, "pd_pool_unavailable"));
    assert_eq!(pair.gateway.metric(WAITS, &[PREFILL, "end=\"no_endpoint\""]).await, 1.0);
    drop(busy);
    pair.is_idle().await;
}
