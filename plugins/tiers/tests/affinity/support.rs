//! A fleet, and a ladder on it that is asked as the gateway asks it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::executor::block_on;
use kvgate_core::*;
use serde_json::{Value, json};

struct Prompt(Option<String>);

impl FactSource for Prompt {
    fn text<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<str>, Miss>> {
        async { self.0.as_deref().map(Arc::from).ok_or(Miss("text_empty")) }.boxed()
    }
    fn tokens<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<Tokens>, Miss>> {
        async { Err(Miss("tokenize")) }.boxed()
    }
}

struct Never;

impl Timer for Never {
    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        futures::future::pending().boxed()
    }
}

/// Endpoints, and what outlives a plan.
pub struct Fleet {
    engines: Engines,
    pub endpoints: Vec<Endpoint>,
    store: StateStore,
    registry: Registry,
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
        let mut fleet = Self {
            engines: Engines::default(),
            endpoints: Vec::new(),
            store: StateStore::default(),
            registry: Registry::default(),
            now: Instant::now(),
        };
        fleet.endpoints =
            weights.iter().enumerate().map(|(at, w)| fleet.endpoint(at, Role::Any, *w)).collect();
        fleet
    }

    /// Endpoint number `index`.
    pub fn endpoint(&self, index: usize, role: Role, weight: u32) -> Endpoint {
        let identity = Identity { address: format!("10.0.0.{index}:8000"), tls: None };
        Endpoint { engine: self.engines.get(&identity), role, weight, index }
    }

    /// A ladder of these tiers, with these keys in place of the defaults.
    pub fn ladder(&self, tiers: &[(&str, Value)]) -> Ladder {
        let rungs = tiers.iter().map(|(name, keys)| self.rung(name, keys).unwrap()).collect();
        Ladder::new(rungs, Duration::from_secs(1))
    }

    pub fn rung(&self, name: &str, keys: &Value) -> Result<Rung, BuildError> {
        let kind = kvgate_tiers::TIERS.iter().find(|kind| kind.name == name).unwrap();
        let mut all = json!({});
        for field in kind.schema.iter().filter(|field| !field.default.is_empty()) {
            all[field.key] = serde_json::from_str(field.default).unwrap();
        }
        for (key, value) in keys.as_object().unwrap() {
            all[key] = value.clone();
        }
        let Value::Object(all) = all else { unreachable!() };
        let mut context = BuildContext {
            rule: "qwen3",
            endpoints: &self.endpoints,
            store: &self.store,
            registry: &self.registry,
            alarms: &Alarms::default(),
            services: &Services::default(),
            tasks: Vec::new(),
        };
        let tier = (kind.build)(&TierConfig(all), &mut context)?;
        Ok(Rung { name: kind.name, tier, misses: Vec::new(), picks: Arc::default() })
    }

    /// A metric now.
    pub fn metric(&self, name: &str) -> u64 {
        let families = self.registry.gather();
        families.iter().find(|family| family.name == name).unwrap().samples[0].value
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
        Facts::new(Arc::new(request), Arc::new(Prompt(None)))
    }

    pub fn ask(
        &self,
        ladder: &Ladder,
        request: Request,
        prompt: Option<&str>,
        role: Role,
        headers: Option<&HeaderMap>,
    ) -> Answered {
        let facts = Facts::new(Arc::new(request), Arc::new(Prompt(prompt.map(str::to_owned))));
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
        let selection = Selection {
            rule: "qwen3",
            role,
            endpoints: &self.endpoints,
            tried,
            facts: &facts,
            prefill: None,
            seed: 0,
            now: self.now,
            timer: &Never,
        };
        let mut record = Attempt::default();
        let Chosen { endpoint, tier, why, lease } = block_on(ladder.choose(&selection, &mut record)).unwrap();
        let endpoint = &self.endpoints[endpoint];
        let dispatch = Dispatch { rule: "qwen3", role, endpoint, tier, why, facts: &facts, now: self.now };
        ladder.on_dispatch(&dispatch);
        if let Some(headers) = headers {
            ladder.on_answer(&dispatch, headers);
        }
        Answered { endpoint: endpoint.index, tier, record, _lease: lease }
    }
}
