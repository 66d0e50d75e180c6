//! The suite every tier has to pass, built-in or custom.
//!
//! ```no_run
//! # fn kind() -> kvgate_core::TierKind { unimplemented!() }
//! use kvgate_core::conformance::{check, keys};
//! check(&kind(), &keys(&kind(), &Default::default()), &Default::default());
//! ```

mod bench;
mod ground;

use std::time::Instant;

use futures::FutureExt;
use http::HeaderMap;

use crate::Random;
use crate::decision::Attempt;
use crate::engine::{Admin, Engines};
use crate::facts::{Facts, Request};
use crate::ladder::Rung;
use crate::lease::{Cause, Outcome, Phase};
use crate::mask::Mask;
use crate::state::Services;
use crate::tier::{
    Choice, Completion, Dispatch, Endpoint, Miss, Role, Routing, Tier, TierConfig, TierKind, Verdict,
};

pub use bench::{Asked, Bench};
pub use ground::{Ground, Known, Never, RULE, dispatch, endpoint, endpoints, keys, ladder, selection};

/// Builds the tier and tries it. For how many of the requests it chose, all in all: a tier that can choose without
/// services should have done so.
///
/// It must pick only among the eligible, on an empty fleet and on one of 300, whose addresses are `10.0.0.0:8000`,
/// `10.0.0.1:8000` and so on; give only misses it declares; decide the same for the same state, facts and seed; and
/// take part in a ladder whose every endpoint is tried in turn.
///
/// Requests come from a few clients and users, hold a text and tokens, and are answered, if not by the endpoint that the
/// tier picked, by another: what a tier learns of answers counts.
///
/// # Panics
/// When the tier breaks one of these: the suite is for tests.
pub fn check(kind: &TierKind, config: &TierConfig, services: &Services) -> usize {
    let mut picks = 0;
    for fleet in [0, 1, 3, 300] {
        // no tier is built for a rule without endpoints: such a rule is refused
        let all = endpoints(&Engines::default(), &vec![1; fleet.max(1)]);
        let endpoints = all.get(..fleet).unwrap_or_default();
        let run = || decisions(kind, build(kind, config, services, &all).tier.as_ref(), endpoints);
        let said = run();
        assert_eq!(said, run(), "{}: same state, facts and seed, other decisions", kind.name);
        picks += said.iter().filter(|said| said.starts_with("Pick")).count();
        every_endpoint_in_turn(kind, build(kind, config, services, &all), endpoints);
    }
    picks
}

#[allow(clippy::panic)]
fn build(kind: &TierKind, config: &TierConfig, services: &Services, endpoints: &[Endpoint]) -> Rung {
    let ground = Ground { services: services.clone(), ..Ground::default() };
    match ground.rung(kind, config, endpoints) {
        Ok(rung) => rung,
        Err(e) => panic!("{}: cannot be built from the given configuration: {e}", kind.name),
    }
}

fn facts(number: u64) -> Facts {
    let request = Request {
        id: format!("request-{number}"),
        path: "/v1/completions".into(),
        client: Some([10, 1, 0, (number % 8) as u8].into()),
        user: Some(format!("user-{}", number % 8).into()),
        model: Some("model".into()),
        is_json: true,
        ..Request::default()
    };
    let tokens = Known::of_tokens(&[(0..64).collect()]).tokens;
    Known { tokens, ..Known::of_text("You are a helpful assistant.") }.facts(request)
}

/// What the tier says over a run of requests with changing masks.
fn decisions(kind: &TierKind, tier: &dyn Tier, endpoints: &[Endpoint]) -> Vec<String> {
    let mut dice = Random::new(7);
    let mut said = Vec::new();
    let now = Instant::now();
    for number in 0..50 {
        let eligible: Mask = (0..endpoints.len()).filter(|_| dice.below(3) > 0).collect();
        let facts = facts(number);
        let prepared = match tier.prepare(&facts) {
            None => Ok(()),
            Some(wait) => wait.now_or_never().unwrap_or(Err(Miss::DEADLINE)),
        };
        let mut routing = Routing {
            rule: RULE,
            role: Role::Any,
            endpoints,
            eligible: eligible.clone(),
            pinnable: eligible.clone(),
            tried: &Mask::none(),
            cap: None,
            facts: &facts,
            now,
            random: Random::new(number),
            prefill: None,
            granted: None,
            candidates: Vec::new(),
        };
        let verdict = match prepared {
            Ok(()) => tier.decide(&mut routing),
            Err(miss) => Verdict::Pass(miss),
        };
        match &verdict {
            Verdict::Pick(choice) => {
                assert!(eligible.contains(choice.endpoint), "{}: picked outside the mask", kind.name);
            }
            Verdict::Pass(miss) | Verdict::Narrow(_, miss) => {
                let declared = *miss == Miss::DEADLINE || kind.misses.iter().any(|m| m.reason == miss.0);
                assert!(declared, "{}: the miss {:?} is not declared", kind.name, miss.0);
                tier.on_miss(*miss);
            }
            Verdict::Hold(_) | Verdict::Reject(_) => {}
        }
        for candidate in &routing.candidates {
            assert!(candidate.endpoint < endpoints.len(), "{}: a candidate that is no endpoint", kind.name);
        }
        let next = || eligible.iter().next().map(|first| ("min-load", Choice::of(first)));
        let chosen = match &verdict {
            Verdict::Pick(choice) => Some((kind.name, choice.clone())),
            Verdict::Pass(_) | Verdict::Narrow(..) => next(),
            Verdict::Hold(_) | Verdict::Reject(_) => None,
        };
        if let Some((tier_name, choice)) = chosen
            && let Some(endpoint) = endpoints.get(choice.endpoint)
        {
            let (rule, role, why) = (RULE, Role::Any, choice.why);
            let dispatch = Dispatch { rule, role, endpoint, tier: tier_name, why, facts: &facts, now };
            tier.on_dispatch(&dispatch);
            tier.on_answer(&dispatch, &HeaderMap::new());
            tier.on_complete(&Completion { dispatch, outcome: Outcome::complete(200) });
        }
        said.push(match verdict {
            Verdict::Hold(_) => "hold".into(),
            other => format!("{other:?}"),
        });
    }
    said
}

/// Runs the tier in a ladder, failing every choice, until nobody is left: each endpoint is chosen once.
fn every_endpoint_in_turn(kind: &TierKind, rung: Rung, endpoints: &[Endpoint]) {
    let ladder = ladder(vec![rung]);
    let facts = facts(0);
    if let Some(first) = endpoints.first() {
        first.engine.set_admin(Admin::Disabled);
    }
    let mut tried = Mask::none();
    for _ in 1..endpoints.len() {
        let selection = selection(endpoints, &tried, &facts);
        let chosen = ladder.choose(&selection, &mut Attempt::default()).now_or_never();
        let Some(Ok(chosen)) = chosen else { break };
        assert!(chosen.endpoint != 0, "{}: chose a disabled endpoint", kind.name);
        assert!(!tried.contains(chosen.endpoint), "{}: chose one already tried", kind.name);
        let Some(endpoint) = endpoints.get(chosen.endpoint) else { break };
        let outcome = Outcome { phase: Phase::Connect, status: None, cause: Cause::EngineBroken };
        let dispatch = dispatch(endpoint, &chosen, &facts, selection.now);
        ladder.on_dispatch(&dispatch);
        ladder.on_complete(&Completion { dispatch, outcome });
        chosen.lease.end(outcome);
        tried.insert(chosen.endpoint);
    }
    let last = ladder.choose(&selection(endpoints, &tried, &facts), &mut Attempt::default()).now_or_never();
    let refused = matches!(last, Some(Err(_)) | None);
    assert!(refused, "{}: chose somebody when nobody was left", kind.name);
    assert!(endpoints.iter().all(|e| e.engine.in_flight() == 0), "{}: kept a lease", kind.name);
    if let Some(first) = endpoints.first() {
        first.engine.set_admin(Admin::Active);
    }
}
