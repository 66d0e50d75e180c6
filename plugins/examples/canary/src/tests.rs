use kvgate_core::conformance::{Bench, Known, check, endpoint, endpoints, keys};
use kvgate_core::{Engines, Facts, Miss, Outcome, Request, Role};
use serde_json::json;

use crate::canary::KIND;

#[test]
fn conforms() {
    for percent in [0, 100] {
        let trial = json!({"endpoints": ["10.0.0.0:8000"], "percent": percent});
        check(&KIND, &keys(&KIND, &trial), &Default::default());
    }
}

fn says(text: &str) -> Facts {
    Known::of_text(text).facts(Request::default())
}

#[test]
fn a_trial_has_its_share_until_it_fails() {
    let fleet = endpoints(&Engines::default(), &[1; 4]);
    let last = fleet[3].engine.address().to_owned();
    let trial = |percent| json!({"endpoints": [last], "percent": percent, "max_failures": 2});
    let mut rule = Bench::new(&KIND, &trial(25), fleet).unwrap();
    let asked = |rule: &Bench| {
        let texts = (0..400).map(|n| format!("Hello {n}"));
        texts.filter(|text| rule.ask(says(text), Role::Any, None).endpoint == 3).count()
    };
    let share = asked(&rule);
    assert!((70..130).contains(&share), "{share} of 400");

    rule.reload(&trial(100)).unwrap();
    for failures in 1..=2 {
        let request = rule.ask(says("Hello"), Role::Any, None);
        assert_eq!((request.endpoint, request.miss()), (3, Some(Miss("trial"))));
        rule.end(request, Outcome::complete(503));
        assert_eq!(rule.ground.metric("canary_failures_total", &[]), Some(failures));
    }
    rule.reload(&trial(50)).unwrap();
    assert_eq!(rule.ask(says("Hello"), Role::Any, None).miss(), Some(Miss("stopped")));
    assert_eq!(asked(&rule), 0);
}

#[test]
fn decode_follows_prefill() {
    let engines = Engines::default();
    let roles = [Role::Prefill, Role::Decode, Role::Prefill, Role::Decode];
    let fleet: Vec<_> = (0..4).map(|at| endpoint(&engines, at, roles[at], 1)).collect();
    let trial: Vec<_> = fleet[2..].iter().map(|e| e.engine.address()).collect();
    let rule = Bench::new(&KIND, &json!({"endpoints": trial, "percent": 50}), fleet.clone()).unwrap();
    for prefill in [0, 2] {
        let decode = rule.ask(says("Hello"), Role::Decode, Some(prefill));
        assert_eq!((decode.endpoint, decode.miss()), (prefill + 1, Some(Miss("follows"))));
    }
}

#[test]
fn an_address_that_no_endpoint_has_is_refused() {
    let wrong = Bench::new(&KIND, &json!({"endpoints": ["nowhere:1"]}), Vec::new());
    assert_eq!(wrong.err().unwrap().key, "endpoints");
}
