//! A fleet, and a ladder on it that is asked as the gateway asks it.

use std::time::Instant;

use futures::executor::block_on;
use kvgate_core::conformance::{self, Ground, Known};
use kvgate_core::*;
use serde_json::Value;

/// Endpoints, and what outlives a plan.
pub struct Fleet {
    engines: Engines,
    pub endpoints: Vec<Endpoint>,
    ground: Ground,
    pub now: Instant,
}

/// What became of a request.
#[derive(Debug)]
pub struct Answered {
    /// `ep_idx`.
    pub endpoint: usize,
    pub tier: &'static str,
    pub record: Attempt,
    _lease: Lease,
}

impl Answered {
    /// The miss of this tier.
    pub fn miss(&self, tier: &str) -> &'static str {
        let step = self.record.steps.iter().find(|step| step.tier == tier).unwrap();
        step.miss.map_or("none", |miss| miss.0)
    }
}

impl Fleet {
    /// Of endpoints with these weights.
    pub fn new(weights: &[u32]) -> Self {
        let engines = Engines::default();
        let endpoints = conformance::endpoints(&engines, weights);
        Self { engines, endpoints, ground: Ground::default(), now: Instant::now() }
    }

    /// Endpoint number `index`.
    pub fn endpoint(&self, index: usize, role: Role, weight: u32) -> Endpoint {
        conformance::endpoint(&self.engines, index, role, weight)
    }

    /// A ladder of these tiers, with these keys in place of the defaults.
    pub fn ladder(&self, tiers: &[(&str, Value)]) -> Ladder {
        conformance::ladder(tiers.iter().map(|(name, keys)| self.rung(name, keys).unwrap()).collect())
    }

    pub fn rung(&self, name: &str, keys: &Value) -> Result<Rung, BuildError> {
        let kind = kvgate_tiers::TIERS.iter().find(|kind| kind.name == name).unwrap();
        self.ground.rung(kind, &conformance::keys(kind, keys), &self.endpoints)
    }

    /// A metric now.
    pub fn metric(&self, name: &str) -> u64 {
        self.ground.metric(name, &[]).unwrap()
    }

    /// Chooses for a request with this prompt; nothing is answered yet.
    pub fn choose(&self, ladder: &Ladder, request: Request, prompt: Option<&str>, role: Role) -> Answered {
        self.ask(ladder, request, prompt, role, None)
    }

    /// Chooses and answers with these headers; the request stays in flight as long as what is returned.
    pub fn answer(
        &self,
        ladder: &Ladder,
        request: Request,
        prompt: Option<&str>,
        headers: &HeaderMap,
    ) -> Answered {
        self.ask(ladder, request, prompt, Role::Any, Some(headers))
    }

    /// Chooses among those that were not tried; nothing is answered yet.
    pub fn past(&self, ladder: &Ladder, request: Request, tried: &Mask) -> Answered {
        self.try_past(ladder, self.facts(request), tried, Role::Any, None)
    }

    /// A request of whose prompt nothing is known.
    pub fn facts(&self, request: Request) -> Facts {
        Known::default().facts(request)
    }

    pub fn ask(
        &self,
        ladder: &Ladder,
        request: Request,
        prompt: Option<&str>,
        role: Role,
        headers: Option<&HeaderMap>,
    ) -> Answered {
        let facts = prompt.map_or_else(Known::default, Known::of_text).facts(request);
        self.try_past(ladder, facts, &Mask::none(), role, headers)
    }

    fn try_past(
        &self,
        ladder: &Ladder,
        facts: Facts,
        tried: &Mask,
        role: Role,
        headers: Option<&HeaderMap>,
    ) -> Answered {
        let selection =
            Selection { role, now: self.now, ..conformance::selection(&self.endpoints, tried, &facts) };
        let mut record = Attempt::default();
        let chosen = block_on(ladder.choose(&selection, &mut record)).unwrap();
        let endpoint = &self.endpoints[chosen.endpoint];
        let dispatch = conformance::dispatch(endpoint, &chosen, &facts, self.now);
        ladder.on_dispatch(&dispatch);
        if let Some(headers) = headers {
            ladder.on_answer(&dispatch, headers);
        }
        Answered { endpoint: endpoint.index, tier: chosen.tier, record, _lease: chosen.lease }
    }
}
