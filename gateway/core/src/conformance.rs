//! The suite every tier has to pass, built-in or custom.
//!
//! ```no_run
//! # fn kind() -> kvgate_core::TierKind { unimplemented!() }
//! kvgate_core::conformance::check(&kind(), &Default::default(), &Default::default());
//! ```

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;

use crate::alarm::Alarms;
use crate::decision::Attempt;
use crate::engine::{Admin, Engines, Identity};
use crate::facts::{FactSource, Facts, Request, Tokens};
use crate::ladder::{Ladder, Rung, Selection, Timer};
use crate::mask::Mask;
use crate::metrics::Registry;
use crate::state::{Services, StateStore};
use crate::tier::{BuildContext, Endpoint, Miss, Role, Routing, Tier, TierConfig, TierKind, Verdict};
use crate::{BoxFuture, Random};

/// Facts made up: a text and ten tokens for every request.
struct MadeUp;

impl FactSource for MadeUp {
    fn text<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<str>, Miss>> {
        async { Ok(Arc::from("You are a helpful assistant.")) }.boxed()
    }

    fn tokens<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<Tokens>, Miss>> {
        async { Ok(Arc::new(Tokens { sequences: vec![(0..64).collect::<Vec<u32>>().into()] })) }.boxed()
    }
}

struct Never;

impl Timer for Never {
    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        futures::future::pending().boxed()
    }
}

/// Builds the tier and tries it.
///
/// It must pick only among the eligible, on an empty fleet and on one of 300; give only misses it declares;
/// decide the same for the same state, facts and seed; and take part in a ladder whose every endpoint is tried
/// in turn.
///
/// # Panics
/// When the tier breaks one of these: the suite is for tests.
#[allow(clippy::panic)]
pub fn check(kind: &TierKind, config: &TierConfig, services: &Services) {
    for fleet in [0, 1, 3, 300] {
        let engines = Engines::default();
        let endpoints = endpoints(&engines, fleet);
        let run = || decisions(kind, config, services, &endpoints);
        assert_eq!(run(), run(), "{}: same state, facts and seed, other decisions", kind.name);
        every_endpoint_in_turn(kind, config, services, &endpoints);
    }
}

fn endpoints(engines: &Engines, count: usize) -> Vec<Endpoint> {
    let one = |index| Endpoint {
        engine: engines.get(&Identity { address: format!("127.0.0.1:{}", 10_000 + index), tls: None }),
        role: Role::Any,
        weight: 1,
        index,
    };
    (0..count).map(one).collect()
}

fn build(kind: &TierKind, config: &TierConfig, services: &Services, endpoints: &[Endpoint]) -> Arc<dyn Tier> {
    let (store, registry, alarms) = (StateStore::default(), Registry::default(), Alarms::default());
    let mut context = BuildContext {
        rule: "conformance",
        endpoints,
        store: &store,
        registry: &registry,
        alarms: &alarms,
        services,
        tasks: Vec::new(),
    };
    match (kind.build)(config, &mut context) {
        Ok(tier) => tier,
        Err(e) => unreachable_build(kind, &e.to_string()),
    }
}

#[allow(clippy::panic)]
fn unreachable_build(kind: &TierKind, why: &str) -> ! {
    panic!("{}: cannot be built from the given configuration: {why}", kind.name)
}

fn facts(number: u64) -> Facts {
    let request = Request {
        id: format!("request-{number}"),
        path: "/v1/completions".into(),
        model: Some(Arc::from("model")),
        is_json: true,
        ..Request::default()
    };
    Facts::new(Arc::new(request), Arc::new(MadeUp))
}

/// What the tier says over a run of requests with changing masks.
fn decisions(
    kind: &TierKind,
    config: &TierConfig,
    services: &Services,
    endpoints: &[Endpoint],
) -> Vec<String> {
    let tier = build(kind, config, services, endpoints);
    let mut dice = Random::new(7);
    let mut said = Vec::new();
    let now = std::time::Instant::now();
    for number in 0..50 {
        let eligible: Mask = (0..endpoints.len()).filter(|_| dice.below(3) > 0).collect();
        let facts = facts(number);
        let prepared = match tier.prepare(&facts) {
            None => Ok(()),
            Some(wait) => wait.now_or_never().unwrap_or(Err(Miss::DEADLINE)),
        };
        let mut routing = Routing {
            rule: "conformance",
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
            }
            Verdict::Hold(_) | Verdict::Reject(_) => {}
        }
        for candidate in &routing.candidates {
            assert!(candidate.endpoint < endpoints.len(), "{}: a candidate that is no endpoint", kind.name);
        }
        said.push(match verdict {
            Verdict::Hold(_) => "hold".into(),
            other => format!("{other:?}"),
        });
    }
    said
}

/// Runs the tier in a ladder, failing every choice, until nobody is left: each endpoint is chosen once.
fn every_endpoint_in_turn(kind: &TierKind, config: &TierConfig, services: &Services, endpoints: &[Endpoint]) {
    let rung = Rung {
        name: kind.name,
        tier: build(kind, config, services, endpoints),
        misses: Vec::new(),
        picks: Arc::default(),
    };
    let ladder = Ladder::new(vec![rung], Duration::from_secs(1));
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

fn selection<'a>(endpoints: &'a [Endpoint], tried: &'a Mask, facts: &'a Facts) -> Selection<'a> {
    Selection {
        rule: "conformance",
        role: Role::Any,
        endpoints,
        tried,
        facts,
        prefill: None,
        seed: 0,
        now: std::time::Instant::now(),
        timer: &Never,
    }
}
