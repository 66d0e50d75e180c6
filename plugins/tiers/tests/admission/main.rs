//! `admission` in real ladders: caps, queues, refusals.
#![allow(clippy::unwrap_used, clippy::panic)]

mod queue;
mod support;
mod threads;

use kvgate_core::*;
use serde_json::json;
use support::*;

const SHED: &str = "loxilb_pd_admission_shed_total";
const OBSERVED: &str = "kvgate_admission_observed_total";

#[tokio::test(start_paused = true)]
async fn without_caps_everything_passes() {
    let world = World::default();
    let rule = world.pool(1, json!({}));
    let flights: Vec<_> = futures::future::join_all((0..50).map(|_| rule.ask())).await;
    assert!(flights.iter().all(|flight| flight.as_ref().unwrap().admission() == "off"));
    assert_eq!(world.in_flight(), 50);
}

#[tokio::test(start_paused = true)]
async fn full_endpoints_are_left_out_and_then_requests_are_refused() {
    let world = World::default();
    let rule = world.pool(2, json!({"max_in_flight": 2}));
    assert_eq!(world.metric(SHED, &["rule", "any"]), 0, "there from the start");
    let mut flights = Vec::new();
    for (endpoint, admission) in [(0, "room"), (1, "room"), (1, "room"), (0, "narrowed")] {
        let flight = rule.ask().await.unwrap();
        assert_eq!((flight.endpoint, flight.admission()), (endpoint, admission));
        flights.push(flight);
    }
    let refused = refusal(rule.ask().await);
    assert_eq!((refused.status, refused.code, refused.retry_after), (429, "pd_overloaded", Some(1)));
    assert_eq!(refused.detail, "all endpoints at in-flight capacity");
    assert_eq!(world.metric(SHED, &["rule", "any"]), 1);
    flights.remove(1);
    assert_eq!(rule.ask().await.unwrap().endpoint, 1);
    drop(flights);
    assert_eq!(world.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn roles_have_caps_and_words_of_their_own() {
    let world = World::default();
    let keys = json!({"max_in_flight": 1, "decode_max_in_flight": 2});
    let rule = world.rule_of("pair", &[(0, Role::Prefill), (1, Role::Decode)], &keys, &[]);
    let ask = |role| {
        let rule = &rule;
        async move { rule.choose(facts(&[]), role, &Mask::none()).await }
    };
    let _prefill = ask(Role::Prefill).await.unwrap();
    assert_eq!(refusal(ask(Role::Prefill).await).detail, "all prefill endpoints at in-flight capacity");
    let _decode = (ask(Role::Decode).await.unwrap(), ask(Role::Decode).await.unwrap());
    assert_eq!(refusal(ask(Role::Decode).await).detail, "all decode endpoints at in-flight capacity");
    for role in ["prefill", "decode"] {
        assert_eq!(world.metric(SHED, &["pair", role]), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn what_other_rules_have_in_flight_counts() {
    let world = World::default();
    let capped = world.pool(1, json!({"max_in_flight": 2}));
    let free = world.rule_of("free", &[(0, Role::Any)], &json!({}), &[]);
    let _others = [free.ask().await.unwrap(), free.ask().await.unwrap(), free.ask().await.unwrap()];
    assert_eq!(refusal(capped.ask().await).status, 429);
    assert!(free.ask().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn pins_go_no_further_than_the_cap_and_draining_keeps_them() {
    let world = World::default();
    let keys = json!({"by": "header", "name": "x-key"});
    let rule = world.rule_of(
        "rule",
        &[(0, Role::Any), (1, Role::Any)],
        &json!({"max_in_flight": 1}),
        &[("persist", keys)],
    );
    let ask = || async { rule.choose(facts(&[("x-key", "k")]), Role::Any, &Mask::none()).await };
    let first = ask().await.unwrap();
    let second = ask().await.unwrap();
    assert_eq!((first.tier, second.tier), ("persist", "persist"));
    assert_ne!(first.endpoint, second.endpoint);
    assert_eq!(refusal(ask().await).status, 429);
}

#[tokio::test(start_paused = true)]
async fn the_valve_counts_requests_from_the_first_choice_to_the_end() {
    let world = World::default();
    let keys = json!({"max_total": 2, "max_in_flight": 9});
    let endpoints = [(0, Role::Prefill), (1, Role::Prefill), (2, Role::Decode)];
    let [one, other] = [(); 2].map(|()| world.rule_of("pair", &endpoints, &keys, &[]));
    let first = one.choose(facts(&[]), Role::Prefill, &Mask::none()).await.unwrap();
    let second = one.choose(facts(&[]), Role::Prefill, &Mask::none()).await.unwrap();
    let refused = refusal(one.choose(facts(&[]), Role::Prefill, &Mask::none()).await);
    assert_eq!((refused.status, refused.code, refused.retry_after), (429, "pd_overloaded", Some(1)));
    assert_eq!(refused.detail, "too many requests are under way");
    assert_eq!(world.metric(SHED, &["prefill"]), 1);
    // another attempt, and the other leg, of the rule's other ladder
    let tried: Mask = [first.endpoint].into_iter().collect();
    let first = one.choose(first.facts, Role::Prefill, &tried).await.unwrap();
    let first = other.choose(first.facts, Role::Decode, &tried).await.unwrap();
    assert!(other.choose(facts(&[]), Role::Decode, &Mask::none()).await.is_err(), "one for both ladders");
    drop(first);
    assert!(other.choose(facts(&[]), Role::Decode, &Mask::none()).await.is_ok());
    drop(second);
}

#[tokio::test(start_paused = true)]
async fn observing_counts_and_holds_nothing_back() {
    let world = World::default();
    let shed = world.pool(1, json!({"mode": "observe", "max_in_flight": 1}));
    let flights = [shed.ask().await.unwrap(), shed.ask().await.unwrap()];
    assert_eq!([flights[0].admission(), flights[1].admission()], ["room", "observed"]);
    assert_eq!(world.metric(OBSERVED, &["shed"]), 1);
    let queue = world.pool(1, json!({"mode": "observe", "max_in_flight": 1, "queue_depth": 1}));
    let _third = queue.ask().await.unwrap();
    assert_eq!([world.metric(OBSERVED, &["shed"]), world.metric(OBSERVED, &["queue"])], [1, 1]);
    let valve = world.pool(1, json!({"mode": "observe", "max_total": 1}));
    let total = [valve.ask().await.unwrap(), valve.ask().await.unwrap()];
    assert_eq!([total[0].admission(), total[1].admission()], ["room", "observed"]);
    assert_eq!(world.metric(OBSERVED, &["shed"]), 2);
    drop(total);
    assert_eq!(valve.ask().await.unwrap().admission(), "room");
    assert_eq!([world.metric(SHED, &[]), world.metric("loxilb_pd_admission_queued_total", &[])], [0, 0]);
}
