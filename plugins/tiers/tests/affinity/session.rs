use std::time::Duration;

use kvgate_core::*;
use serde_json::{Value, json};

use crate::support::{Answered, Fleet};

const SESSION: &str = "session";

/// Two prefill endpoints and three for decode.
fn split() -> Fleet {
    let mut fleet = Fleet::new(&[]);
    let roles = [Role::Prefill, Role::Decode, Role::Prefill, Role::Decode, Role::Decode];
    fleet.endpoints = roles.iter().enumerate().map(|(at, role)| fleet.endpoint(at, *role, 1)).collect();
    fleet
}

fn ladder(fleet: &Fleet, keys: Value) -> Ladder {
    fleet.ladder(&[(SESSION, keys), ("round-robin", json!({}))])
}

fn carrying(headers: &[(&str, &str)], user: Option<&str>) -> Request {
    let header = |(name, value): &(&str, &str)| (name.parse().unwrap(), value.parse().unwrap());
    Request {
        headers: headers.iter().map(header).collect(),
        user: user.map(Into::into),
        ..Request::default()
    }
}

fn conversation(id: &str) -> Request {
    carrying(&[("X-Conversation-Id", id)], None)
}

fn answer(fleet: &Fleet, ladder: &Ladder, request: Request, role: Role) -> Answered {
    fleet.ask(ladder, request, None, role, Some(&HeaderMap::new()))
}

/// Where a request went, and why it was not the session's place.
fn went(answered: &Answered) -> (usize, &'static str) {
    (answered.endpoint, answered.miss(SESSION))
}

#[test]
fn both_ladders_of_a_rule_keep_the_pair() {
    let fleet = split();
    let [prefill, decode] = [(); 2].map(|()| fleet.ladder(&[(SESSION, json!({}))]));
    for round in 0..5 {
        for (id, at) in [("a", (0, 1)), ("b", (2, 3)), ("c", (0, 4))] {
            let first = answer(&fleet, &prefill, conversation(id), Role::Prefill);
            let second = answer(&fleet, &decode, conversation(id), Role::Decode);
            assert_eq!((first.endpoint, second.endpoint), at, "{id}, round {round}");
            let tier = if round == 0 { "min-load" } else { SESSION };
            assert_eq!((first.tier, second.tier), (tier, tier));
        }
    }
    assert_eq!(fleet.metric("loxilb_pd_sessions_active"), 3);
    assert_eq!(fleet.metric("kvgate_session_evictions_total"), 0);
}

#[test]
fn the_header_comes_first_then_the_user_and_no_id_of_a_request() {
    let fleet = Fleet::new(&[1; 3]);
    let all = ladder(&fleet, json!({}));
    let own = |headers: &[(&str, &str)], user: Option<&str>| {
        let first = answer(&fleet, &all, carrying(headers, user), Role::Any);
        let other = answer(&fleet, &all, carrying(&[("x-conversation-id", "else")], None), Role::Any);
        let again = answer(&fleet, &all, carrying(headers, user), Role::Any);
        drop(other);
        (first.miss(SESSION), again.tier, first.endpoint == again.endpoint)
    };
    assert_eq!(own(&[("x-conversation-id", "7")], None), ("unknown", SESSION, true));
    assert_eq!(own(&[], Some("7")), ("unknown", SESSION, true), "not the conversation of that id");
    assert_eq!(own(&[("x-conversation-id", "7")], Some("8")).1, SESSION);
    assert_eq!(own(&[], Some("8")).0, "unknown", "the header was taken");
    assert_eq!(own(&[("x-conversation-id", "auto-1")], Some("9")), ("unknown", SESSION, true));
    assert_eq!(own(&[("x-conversation-id", "auto-2")], Some("9")).0, "none", "known by its user");
    for (headers, user) in [
        (&[][..], None),
        (&[("x-conversation-id", "")], None),
        (&[("x-conversation-id", "auto-1")], Some("auto-1")),
        (&[("x-conversation-id-2", "1"), ("conversation-id", "1"), ("x-request-id", "1")], Some("")),
    ] {
        let answered = answer(&fleet, &all, carrying(headers, user), Role::Any);
        assert_eq!(answered.miss(SESSION), "no_key", "{headers:?} {user:?}");
    }
}

#[test]
fn headers_that_name_requests_are_refused() {
    let fleet = Fleet::new(&[1]);
    let build = |header: &str| fleet.rung(SESSION, &json!({"header": header})).err().map(|e| e.key);
    assert_eq!(build("X-Session"), None);
    for header in ["X-Request-ID", "traceparent", "a b"] {
        assert_eq!(build(header).as_deref(), Some("header"), "{header}");
    }
}

#[test]
fn draining_keeps_pins_and_what_is_down_or_gone_loses_them() {
    let mut fleet = Fleet::new(&[1; 3]);
    let all = ladder(&fleet, json!({}));
    let ask = |fleet: &Fleet| went(&answer(fleet, &all, conversation("a"), Role::Any));
    assert_eq!(ask(&fleet), (0, "unknown"));
    fleet.endpoints[0].engine.set_admin(Admin::Draining);
    assert_eq!(ask(&fleet), (0, "none"));
    fleet.endpoints[0].engine.set_healthy(false);
    assert_eq!(ask(&fleet), (1, "pin_lost"));
    fleet.endpoints[0].engine.set_healthy(true);
    fleet.endpoints[0].engine.set_admin(Admin::Active);
    assert_eq!(ask(&fleet), (1, "none"), "it stays with the one that took over");
    fleet.endpoints[1].engine.set_admin(Admin::Disabled);
    assert_eq!(ask(&fleet), (2, "pin_lost"));
    fleet.endpoints.truncate(2);
    assert_eq!(ask(&fleet), (0, "pin_lost"));
    // nobody answers: the conversation is let go once, and new after that
    fleet.endpoints[0].engine.set_healthy(false);
    fleet.endpoints[1].engine.set_admin(Admin::Active);
    for miss in ["pin_lost", "unknown"] {
        assert_eq!(fleet.choose(&all, conversation("a"), None, Role::Any).miss(SESSION), miss);
    }
}

#[test]
fn another_tier_or_a_failed_attempt_pass_a_pin_over_without_ending_it() {
    let fleet = Fleet::new(&[1; 2]);
    let all = ladder(&fleet, json!({}));
    assert_eq!(went(&answer(&fleet, &all, conversation("a"), Role::Any)).0, 0);
    let tried: Mask = [0].into_iter().collect();
    let tried = fleet.past(&all, conversation("a"), &tried);
    assert_eq!(went(&tried), (1, "pin_busy"));
    assert_eq!(went(&answer(&fleet, &all, conversation("a"), Role::Any)), (0, "none"));
}

fn complete(fleet: &Fleet, ladder: &Ladder, at: usize, outcome: Outcome) {
    let facts = fleet.facts(conversation("a"));
    let endpoint = &fleet.endpoints[at];
    let (role, tier, now) = (Role::Any, SESSION, fleet.now);
    let dispatch = Dispatch { rule: "qwen3", role, endpoint, tier, why: None, facts: &facts, now };
    ladder.on_complete(&Completion { dispatch, outcome });
}

#[test]
fn whoever_breaks_off_or_fails_loses_the_conversation() {
    let fleet = Fleet::new(&[1; 2]);
    let all = ladder(&fleet, json!({}));
    let broken = |status| Outcome { phase: Phase::Answer, status, cause: Cause::EngineBroken };
    for (outcome, lost) in [
        (Outcome::complete(200), false),
        (Outcome::complete(404), false),
        (Outcome { phase: Phase::Answer, status: Some(200), cause: Cause::ClientGone }, false),
        (Outcome::complete(500), true),
        (broken(Some(200)), true),
        (broken(None), true),
        // one that hangs would hold every turn up
        (Outcome { phase: Phase::FirstByte, status: None, cause: Cause::Deadline }, true),
    ] {
        let at = answer(&fleet, &all, conversation("a"), Role::Any).endpoint;
        complete(&fleet, &all, 1 - at, outcome); // of another attempt
        assert_eq!(fleet.choose(&all, conversation("a"), None, Role::Any).miss(SESSION), "none");
        complete(&fleet, &all, at, outcome);
        let miss = fleet.choose(&all, conversation("a"), None, Role::Any).miss(SESSION);
        assert_eq!(miss, if lost { "unknown" } else { "none" }, "{outcome:?}");
    }
}

#[test]
fn a_conversation_that_rests_runs_out_and_one_that_is_answered_does_not() {
    let mut fleet = Fleet::new(&[1; 2]);
    let all = ladder(&fleet, json!({"ttl": "10s"}));
    let ask = |fleet: &Fleet| went(&answer(fleet, &all, conversation("a"), Role::Any));
    let first = ask(&fleet).0;
    for _ in 0..3 {
        fleet.now += Duration::from_secs(9);
        assert_eq!(ask(&fleet), (first, "none"));
    }
    fleet.now += Duration::from_secs(10);
    assert_eq!(ask(&fleet), (1 - first, "unknown"));
    // an answer of a quarter of an hour ends: what was computed for it is fresh
    fleet.now += Duration::from_secs(900);
    complete(&fleet, &all, 1 - first, Outcome::complete(200));
    fleet.now += Duration::from_secs(9);
    assert_eq!(ask(&fleet), (1 - first, "none"));
}

#[test]
fn the_least_recently_used_give_way_and_a_reload_keeps_the_rest() {
    let fleet = Fleet::new(&[1; 2]);
    let all = ladder(&fleet, json!({"max_sessions": 3}));
    for id in ["a", "b", "c", "a", "d"] {
        answer(&fleet, &all, conversation(id), Role::Any);
    }
    assert_eq!(fleet.metric("loxilb_pd_sessions_active"), 3);
    assert_eq!(fleet.metric("kvgate_session_evictions_total"), 1);
    let reloaded = ladder(&fleet, json!({"max_sessions": 9, "ttl": "1h"}));
    drop(all);
    let miss = |id| fleet.choose(&reloaded, conversation(id), None, Role::Any).miss(SESSION);
    assert_eq!(["a", "b", "c", "d"].map(miss), ["none", "unknown", "none", "none"]);
}
