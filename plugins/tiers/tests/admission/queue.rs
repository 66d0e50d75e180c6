use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvgate_core::*;
use serde_json::{Value, json};

use crate::support::*;

const LENGTH: &str = "kvgate_admission_queue_length";
const WAITS: &str = "kvgate_admission_waits_total";

fn queued(more: Value) -> Value {
    let mut keys = json!({"max_in_flight": 1, "queue_depth": 4, "queue_wait": "10s"});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    keys
}

#[tokio::test(start_paused = true)]
async fn requests_wait_in_the_order_of_their_arrival() {
    let world = World::default();
    let rule = world.pool(2, queued(json!({})));
    assert_eq!(world.metric("kvgate_admission_queue_depth", &["rule", "any"]), 4);
    let mut under_way: std::collections::VecDeque<_> =
        [rule.ask().await.unwrap(), rule.ask().await.unwrap()].into();
    let mut waiting = std::collections::VecDeque::new();
    for _ in 0..4 {
        waiting.push_back(rule.park(&[]).await);
    }
    assert_eq!(world.metric(LENGTH, &[]), 4);
    assert_eq!(refusal(rule.ask().await).status, 429);
    while let Some(first) = waiting.pop_front() {
        tokio::time::advance(seconds(2)).await;
        let ended = under_way.pop_front().unwrap();
        let endpoint = ended.endpoint;
        drop(ended);
        if !waiting.is_empty() {
            // the place is taken before a newcomer looks
            assert_eq!(world.metric(LENGTH, &[]), waiting.len() as u64);
        }
        let next = first.await.unwrap().unwrap();
        assert_eq!((next.endpoint, next.admission()), (endpoint, "granted"));
        assert!(waiting.iter().all(|task| !task.is_finished()));
        assert_eq!(world.in_flight(), 2);
        assert_eq!(next.record.waited_us, (4 - waiting.len() as u64) * 2_000_000);
        under_way.push_back(next);
    }
    // 2, 4, 6 and 8 seconds
    let refused = {
        let _full: Vec<_> =
            vec![rule.park(&[]).await, rule.park(&[]).await, rule.park(&[]).await, rule.park(&[]).await];
        refusal(rule.ask().await)
    };
    assert_eq!(refused.retry_after, Some(5));
    assert_eq!(world.metric("loxilb_pd_admission_queued_total", &["rule", "any"]), 8);
    assert_eq!(world.metric("loxilb_pd_admission_shed_total", &["rule", "any"]), 2);
    assert_eq!(world.metric(WAITS, &["granted"]), 4);
    assert_eq!(world.metric("kvgate_admission_wait_milliseconds_total", &[]), 20_000);
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_too_long_is_told_and_measures_the_wait() {
    let world = World::default();
    let rule = world.pool(1, queued(json!({"queue_depth": 1})));
    let _busy = rule.ask().await.unwrap();
    let start = tokio::time::Instant::now();
    let late = rule.park(&[]).await;
    let refused = refusal(late.await.unwrap());
    assert_eq!(start.elapsed().as_millis(), 10_000);
    assert_eq!((refused.status, refused.code), (504, "pd_admission_park_timeout"));
    assert_eq!(refused.detail, "no endpoint had room within 10s");
    assert_eq!((world.metric(WAITS, &["late"]), world.metric(LENGTH, &[])), (1, 0));
    let _waits = rule.park(&[]).await;
    assert_eq!(refusal(rule.ask().await).retry_after, Some(10));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_frees_its_place() {
    let world = World::default();
    let rule = world.pool(1, queued(json!({"queue_depth": 1})));
    let busy = rule.ask().await.unwrap();
    let leaves = rule.park(&[]).await;
    assert_eq!(refusal(rule.ask().await).status, 429);
    leaves.abort();
    assert!(leaves.await.unwrap_err().is_cancelled());
    assert_eq!(world.metric(LENGTH, &[]), 0);
    let stays = rule.park(&[]).await;
    drop(busy);
    drop(stays.await.unwrap().unwrap());
    assert_eq!(world.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn tenants_take_their_share_of_the_queue_and_no_more() {
    let world = World::default();
    let keys = json!({"tenant_header": "X-Tenant", "tenant_share_pct": 30, "queue_depth": 4});
    let rule = world.pool(1, queued(keys));
    let _busy = rule.ask().await.unwrap();
    let untried = Mask::none();
    let of = |tenant| rule.choose(facts(&[("x-tenant", tenant)]), Role::Any, &untried);
    // 30 % of 4, rounded up
    let a = [rule.park(&[("x-tenant", "a")]).await, rule.park(&[("x-tenant", "a")]).await];
    let refused = refusal(of("a").await);
    assert_eq!((refused.status, refused.code), (429, "admission_tenant_share"));
    let _nobody = rule.park(&[]).await;
    let _b = rule.park(&[("x-tenant", "b")]).await;
    assert_eq!(refusal(of("c").await).code, "pd_overloaded", "the queue is full");
    a.into_iter().for_each(|task| task.abort());
    settle().await;
    let again = rule.park(&[("x-tenant", "a")]).await;
    assert!(!again.is_finished());
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_for_engines_that_are_gone_and_those_back_are_noticed() {
    let world = World::default();
    let rule = world.pool(2, queued(json!({})));
    rule.endpoints[1].engine.set_healthy(false);
    let busy = rule.ask().await.unwrap();
    let waits = rule.park(&[]).await;
    let behind = rule.park(&[]).await;
    rule.endpoints[1].engine.set_healthy(true);
    let newcomer = rule.park(&[]).await;
    settle().await;
    assert!(waits.is_finished() && !behind.is_finished() && !newcomer.is_finished(), "served by who comes");
    let _granted = waits.await.unwrap().unwrap();
    for endpoint in &rule.endpoints {
        endpoint.engine.set_admin(Admin::Draining);
    }
    for task in [behind, newcomer] {
        assert_eq!(task.await.unwrap().unwrap_err(), Refused::NoEndpoint);
    }
    assert_eq!(world.metric(WAITS, &["no_endpoint"]), 2);
    drop(busy);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_is_back_is_noticed_without_anyone_coming() {
    let world = World::default();
    let rule = world.pool(2, queued(json!({})));
    rule.endpoints[1].engine.set_admin(Admin::Disabled);
    let _busy = rule.ask().await.unwrap();
    let waits = rule.park(&[]).await;
    rule.endpoints[1].engine.set_admin(Admin::Active);
    let granted = waits.await.unwrap().unwrap();
    assert_eq!(granted.endpoint, 1);
    assert!(granted.record.waited_us <= 250_000);
}

/// Who waits is let through to see whether an engine is back, be the others full, or gone.
#[tokio::test(start_paused = true)]
async fn the_place_of_a_half_open_breaker_goes_to_the_first() {
    for others_go in [false, true] {
        let world = World::default();
        let rule = world.pool(2, queued(json!({})));
        let [full, back] = [0, 1].map(|at| rule.endpoints[at].engine.clone());
        back.set_admin(Admin::Disabled);
        let busy = rule.ask().await.unwrap();
        let waits = [rule.park(&[]).await, rule.park(&[]).await];
        back.set_breaker_policy(BreakerPolicy { failures: 1, ..BreakerPolicy::OFF });
        let broken = Outcome { phase: Phase::Connect, status: None, cause: Cause::EngineBroken };
        assert_eq!(Lease::try_take(&back, None).unwrap().end(broken), Some(Change::Opened));
        full.set_healthy(!others_go);
        back.set_admin(Admin::Active);
        let [first, second] = waits;
        let first = first.await.unwrap().unwrap();
        assert_eq!((first.endpoint, first.admission(), back.in_flight()), (1, "granted", 1));
        if others_go {
            assert_eq!(second.await.unwrap().unwrap_err(), Refused::NoEndpoint);
            continue;
        }
        settle().await;
        assert!(!second.is_finished(), "one at a time");
        drop(first);
        let second = second.await.unwrap().unwrap();
        assert_eq!((second.endpoint, second.admission()), (1, "granted"));
        drop((second, busy));
        assert_eq!(world.in_flight(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn another_attempt_waits_only_for_endpoints_it_has_not_tried() {
    let world = World::default();
    let rule = world.pool(2, queued(json!({})));
    let (first, second) = (rule.ask().await.unwrap(), rule.ask().await.unwrap());
    let retried = {
        let rule = rule.clone();
        tokio::spawn(async move { rule.choose(facts(&[]), Role::Any, &[0].into_iter().collect()).await })
    };
    settle().await;
    let behind = rule.park(&[]).await;
    drop(first);
    assert_eq!(behind.await.unwrap().unwrap().endpoint, 0);
    assert!(!retried.is_finished());
    drop(second);
    assert_eq!(retried.await.unwrap().unwrap().endpoint, 1);
}

/// Leaves one endpoint, this one.
struct Only(AtomicUsize);

impl Tier for Only {
    fn decide(&self, _: &mut Routing<'_>) -> Verdict {
        Verdict::Narrow([self.0.load(Ordering::SeqCst)].into_iter().collect(), Miss("only"))
    }
}

/// What an earlier tier leaves out is not waited for: its place would be handed over and given back without end.
#[tokio::test(start_paused = true)]
async fn nobody_waits_for_what_an_earlier_tier_leaves_out() {
    let world = World::default();
    let only = Arc::new(Only(AtomicUsize::new(0)));
    let rule = world.behind(only.clone(), &queued(json!({})));
    let goes = |at| only.0.store(at, Ordering::SeqCst);
    let first = rule.ask().await.unwrap();
    goes(1);
    let second = rule.ask().await.unwrap();
    let waits = rule.park(&[]).await;
    drop(first);
    settle().await;
    assert!(!waits.is_finished());
    goes(0);
    let first = rule.ask().await.unwrap();
    assert_eq!((first.endpoint, second.endpoint), (0, 1), "a place that nobody waits for is free");
    // it is handed a place where it is no longer to go
    drop(second);
    settle().await;
    assert!(!waits.is_finished());
    assert_eq!((rule.endpoints[1].engine.in_flight(), world.metric(LENGTH, &[])), (0, 1));
    drop(first);
    let waited = waits.await.unwrap().unwrap();
    assert_eq!((waited.endpoint, world.in_flight()), (0, 1));
}

/// Whoever waits for the one that an earlier tier left chooses anew when that goes out of service.
#[tokio::test(start_paused = true)]
async fn a_wait_for_the_one_that_is_left_ends_with_it() {
    let world = World::default();
    let only = Arc::new(Only(AtomicUsize::new(0)));
    let rule = world.behind(only.clone(), &queued(json!({})));
    let _busy = rule.ask().await.unwrap();
    let waits = rule.park(&[]).await;
    rule.endpoints[0].engine.set_healthy(false);
    only.0.store(1, Ordering::SeqCst);
    assert_eq!(waits.await.unwrap().unwrap().endpoint, 1);
}

#[tokio::test(start_paused = true)]
async fn a_second_prefill_is_not_waited_for() {
    let world = World::default();
    let endpoints = [(0, Role::Prefill), (1, Role::Prefill), (2, Role::Decode)];
    let rule = world.rule_of("pair", &endpoints, &queued(json!({})), &[]);
    let tried: Mask = [0].into_iter().collect();
    let busy = rule.choose(facts(&[]), Role::Prefill, &tried).await.unwrap();
    assert_eq!(refusal(rule.choose(facts(&[]), Role::Prefill, &tried).await).code, "pd_overloaded");
    assert_eq!(world.metric("loxilb_pd_admission_shed_total", &["prefill"]), 0, "the client is not refused");
    drop(busy);
    assert_eq!(rule.choose(facts(&[]), Role::Prefill, &tried).await.unwrap().endpoint, 1);
}

#[tokio::test(start_paused = true)]
async fn a_reload_keeps_the_queue_and_its_order() {
    let world = World::default();
    let before = world.pool(1, queued(json!({})));
    let busy = before.ask().await.unwrap();
    let waits = before.park(&[]).await;
    let after = world.pool(2, queued(json!({"max_in_flight": 2, "queue_depth": 1})));
    assert_eq!(world.metric(LENGTH, &[]), 1);
    // the second place of the old engine is for whoever waits: the new cap goes for all
    let new = [after.ask().await.unwrap(), after.ask().await.unwrap()];
    let granted = waits.await.unwrap().unwrap();
    assert_eq!((granted.endpoint, [new[0].endpoint, new[1].endpoint]), (0, [1, 1]));
    let third = after.park(&[]).await;
    assert_eq!(refusal(after.ask().await).status, 429, "the queue is as deep as the new rule says");
    drop(busy);
    let third = third.await.unwrap().unwrap();
    assert_eq!(third.endpoint, 0);
    drop((before, granted, third, new));
    assert_eq!(world.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_reload_with_less_room_goes_for_those_who_wait() {
    let world = World::default();
    let before = world.pool(1, queued(json!({"max_in_flight": 2})));
    let mut busy = vec![before.ask().await.unwrap(), before.ask().await.unwrap()];
    let waits = before.park(&[]).await;
    let after = world.pool(1, queued(json!({"max_in_flight": 1})));
    let next = after.park(&[]).await;
    busy.pop();
    assert_eq!((world.metric(LENGTH, &[]), world.in_flight()), (2, 1), "one is as many as it may have");
    busy.pop();
    let first = waits.await.unwrap().unwrap();
    assert_eq!(world.metric(LENGTH, &[]), 1);
    drop(first);
    let last = next.await.unwrap().unwrap();
    drop((before, after, last));
    assert_eq!(world.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn rules_that_share_an_engine_take_turns_by_arrival() {
    let world = World::default();
    let [one, other] =
        ["one", "other"].map(|name| world.rule_of(name, &[(0, Role::Any)], &queued(json!({})), &[]));
    let mut busy = Some(one.ask().await.unwrap());
    let waiting = [other.park(&[]).await, one.park(&[]).await, other.park(&[]).await];
    for task in waiting {
        drop(busy.take());
        busy = Some(task.await.unwrap().unwrap());
    }
    drop(busy);
    assert_eq!(world.in_flight(), 0);
}
