use std::collections::BTreeMap;
use std::time::Duration;

use kvgate_core::*;
use serde_json::{Value, json};

use crate::support::Fleet;

const PERSIST: &str = "persist";

fn by_header(more: Value) -> Value {
    let mut keys = json!({"by": "header", "name": "mcp-session-id"});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    keys
}

fn ladder(fleet: &Fleet, more: Value) -> Ladder {
    fleet.ladder(&[(PERSIST, by_header(more)), ("round-robin", json!({}))])
}

fn headers(session: &str) -> HeaderMap {
    [("mcp-session-id".parse().unwrap(), session.parse().unwrap())].into_iter().collect()
}

fn carrying(session: &str) -> Request {
    Request { headers: headers(session), ..Request::default() }
}

/// Where each of these sessions goes when nobody answers, and why.
fn hashed(fleet: &Fleet, ladder: &Ladder, sessions: usize) -> BTreeMap<usize, usize> {
    let ask = |session: usize| {
        let request = carrying(&format!("session-{session}"));
        let chosen = fleet.choose(ladder, request, None, Role::Any);
        assert_eq!(chosen.record.winner.as_ref().unwrap().why, Some("hashed"));
        (session, chosen.endpoint)
    };
    (0..sessions).map(ask).collect()
}

#[test]
fn what_an_answer_sets_belongs_to_the_one_that_set_it() {
    let fleet = Fleet::new(&[1; 4]);
    let ladder = ladder(&fleet, json!({}));
    for session in 0..20 {
        let session = format!("given-{session}");
        let first = fleet.answer(&ladder, Request::default(), None, &headers(&session));
        assert_eq!((first.miss(PERSIST), first.tier), ("no_key", "round-robin"));
        for _ in 0..2 {
            let next = fleet.answer(&ladder, carrying(&session), None, &HeaderMap::new());
            assert_eq!((next.tier, next.endpoint), (PERSIST, first.endpoint));
            assert_eq!(next.record.winner.unwrap().why, Some("bound"));
        }
    }
    assert_eq!(fleet.metric("kvgate_persist_bindings"), 20);
}

#[test]
fn an_unknown_key_goes_by_its_hash_and_few_move() {
    let mut fleet = Fleet::new(&[1; 5]);
    let full = hashed(&fleet, &ladder(&fleet, json!({})), 500);
    for endpoint in 0..5 {
        let own = full.values().filter(|at| **at == endpoint).count();
        assert!((60..140).contains(&own), "{own} of 500");
    }
    let gone = fleet.endpoints.remove(2).index;
    let less = hashed(&fleet, &ladder(&fleet, json!({})), 500);
    for (session, before) in &full {
        assert!(*before == gone || less[session] == *before, "{session} moved from {before}");
    }
    fleet.endpoints.reverse();
    assert_eq!(hashed(&fleet, &ladder(&fleet, json!({})), 500), less, "places in the file do not count");
    // one that is down for a while is as one that is gone
    let down = fleet.endpoints[0].index;
    fleet.endpoints[0].engine.set_healthy(false);
    for (session, at) in hashed(&fleet, &ladder(&fleet, json!({})), 500) {
        assert!(less[&session] == down || at == less[&session]);
    }
    let heavy = Fleet::new(&[3, 1]);
    let shares = hashed(&heavy, &ladder(&heavy, json!({})), 1000);
    let first = shares.values().filter(|at| **at == 0).count();
    assert!((690..810).contains(&first), "{first} of 1000 for three quarters of the weight");
}

#[test]
fn a_key_stays_while_drained_and_moves_for_good_when_it_must() {
    let fleet = Fleet::new(&[1; 3]);
    let ladder = ladder(&fleet, json!({}));
    let ask = |session: &str| fleet.answer(&ladder, carrying(session), None, &HeaderMap::new()).endpoint;
    let home = ask("a");
    let engine = &fleet.endpoints[home].engine;
    engine.set_admin(Admin::Draining);
    assert_eq!(ask("a"), home);
    let fresh: Vec<_> = (0..50).map(|n| ask(&format!("new-{n}"))).collect();
    assert!(!fresh.contains(&home), "no new key comes to one that drains");
    engine.set_admin(Admin::Disabled);
    let other = ask("a");
    assert_ne!(other, home);
    engine.set_admin(Admin::Active);
    assert_eq!(ask("a"), other, "its state is there now");
}

#[test]
fn bindings_run_out_are_bounded_and_outlive_reloads() {
    let mut fleet = Fleet::new(&[1; 4]);
    let first = ladder(&fleet, json!({"ttl": "10s", "max_bindings": 100}));
    // each belongs to another endpoint than its hash says
    let learn = |fleet: &Fleet, ladder: &Ladder, session: &str| {
        let hashed = fleet.choose(ladder, carrying(session), None, Role::Any).endpoint;
        loop {
            let given = fleet.answer(ladder, Request::default(), None, &headers(session));
            if given.endpoint != hashed {
                return given.endpoint;
            }
        }
    };
    let why = |fleet: &Fleet, ladder: &Ladder, session: &str| {
        fleet.choose(ladder, carrying(session), None, Role::Any).record.winner.unwrap().why.unwrap()
    };
    let home = learn(&fleet, &first, "a");
    let second = ladder(&fleet, json!({"ttl": "10s", "max_bindings": 100}));
    drop(first);
    fleet.now += Duration::from_secs(9);
    let next = fleet.answer(&second, carrying("a"), None, &HeaderMap::new());
    assert_eq!(next.endpoint, home);
    fleet.now += Duration::from_secs(9);
    assert_eq!(why(&fleet, &second, "a"), "bound", "every answer counts anew");
    fleet.now += Duration::from_secs(1);
    assert_eq!(why(&fleet, &second, "a"), "hashed");
    for n in 0..300 {
        learn(&fleet, &second, &format!("s-{n}"));
        assert!(fleet.metric("kvgate_persist_bindings") <= 100);
    }
    assert_eq!(why(&fleet, &second, "s-200"), "bound");
    assert_eq!(why(&fleet, &second, "s-199"), "hashed");
    // what has run out makes room by and by
    fleet.now += Duration::from_secs(60);
    for _ in 0..60 {
        fleet.answer(&second, carrying("b"), None, &HeaderMap::new());
    }
    assert_eq!(fleet.metric("kvgate_persist_bindings"), 1);
}

#[test]
fn cookies_queries_and_addresses() {
    let fleet = Fleet::new(&[1; 4]);
    let tier = |keys| fleet.ladder(&[(PERSIST, keys), ("round-robin", json!({}))]);
    let cookie = tier(json!({"by": "cookie", "name": "sid"}));
    let set: HeaderMap =
        [("set-cookie".parse().unwrap(), "sid=7; Path=/".parse().unwrap())].into_iter().collect();
    let first = fleet.answer(&cookie, Request::default(), None, &set);
    assert_eq!(first.miss(PERSIST), "no_key");
    let mut request = Request::default();
    request.headers.insert("cookie", "theme=dark; sid=7".parse().unwrap());
    let next = fleet.choose(&cookie, request, None, Role::Any);
    assert_eq!((next.tier, next.endpoint), (PERSIST, first.endpoint));
    let query = tier(json!({"by": "query", "name": "session"}));
    let address = tier(json!({"by": "client-ip"}));
    for n in 0..20 {
        let request = Request {
            query: Some(format!("a=b&session={n}")),
            client: format!("10.1.0.{n}").parse().ok(),
            ..Request::default()
        };
        for ladder in [&query, &address] {
            let first = fleet.answer(ladder, request.clone(), None, &HeaderMap::new());
            let next = fleet.choose(ladder, request.clone(), None, Role::Any);
            assert_eq!((next.tier, next.endpoint), (PERSIST, first.endpoint));
        }
    }
    assert_eq!(fleet.choose(&address, Request::default(), None, Role::Any).miss(PERSIST), "no_key");
}

#[test]
fn a_table_that_says_nothing_is_refused() {
    let fleet = Fleet::new(&[1]);
    for keys in [json!({"by": "header"}), json!({"by": "cookie", "name": "a b"}), json!({"name": "x"})] {
        let Err(error) = fleet.rung(PERSIST, &keys) else { unreachable!("{keys} is taken") };
        assert_eq!(error.key, "name");
    }
}
