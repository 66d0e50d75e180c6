//! What tests of tiers stand on: a fleet, facts that are known beforehand, a timer that never ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use serde_json::{Map, Value};

use crate::BoxFuture;
use crate::alarm::Alarms;
use crate::engine::{Engines, Identity};
use crate::facts::{FactSource, Facts, Opening, Request, Tokens};
use crate::ladder::{Chosen, Ladder, Rung, Selection, Timer};
use crate::mask::Mask;
use crate::metrics::{Registry, Sample};
use crate::state::{Services, StateStore};
use crate::tier::{BuildContext, BuildError, Dispatch, Endpoint, Miss, Role, TierConfig, TierKind};

/// The name of the rule that tiers are built for here.
pub const RULE: &str = "rule";

/// No deadline ever runs out.
#[derive(Debug, Clone, Copy, Default)]
pub struct Never;

impl Timer for Never {
    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        futures::future::pending().boxed()
    }
}

/// What is known of a request, whatever the request; by default nothing is.
#[derive(Debug, Clone)]
pub struct Known {
    /// Its text.
    pub text: Result<Arc<str>, Miss>,
    /// How it begins.
    pub opening: Result<Arc<Opening>, Miss>,
    /// Its tokens.
    pub tokens: Result<Arc<Tokens>, Miss>,
}

impl Default for Known {
    fn default() -> Self {
        let empty = Miss("text_empty");
        Self { text: Err(empty), opening: Err(empty), tokens: Err(Miss("tokenize")) }
    }
}

impl Known {
    /// A text, and how it begins.
    pub fn of_text(text: &str) -> Self {
        Self { text: Ok(text.into()), opening: Ok(Arc::new(Opening::of_text(text))), ..Self::default() }
    }

    /// The tokens of these sequences.
    pub fn of_tokens(sequences: &[Vec<u32>]) -> Self {
        let sequences = sequences.iter().map(|sequence| sequence.as_slice().into()).collect();
        Self { tokens: Ok(Arc::new(Tokens { sequences })), ..Self::default() }
    }

    /// The facts of this request.
    pub fn facts(self, request: Request) -> Facts {
        Facts::new(Arc::new(request), Arc::new(self))
    }
}

fn told<T: Clone + Send + 'static>(known: &Result<T, Miss>) -> BoxFuture<'static, Result<T, Miss>> {
    futures::future::ready(known.clone()).boxed()
}

impl FactSource for Known {
    fn text<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<str>, Miss>> {
        told(&self.text)
    }

    fn opening<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<Opening>, Miss>> {
        told(&self.opening)
    }

    fn tokens<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<Tokens>, Miss>> {
        told(&self.tokens)
    }
}

/// Endpoint number `index`, on an engine of its own.
pub fn endpoint(engines: &Engines, index: usize, role: Role, weight: u32) -> Endpoint {
    let address = format!("10.0.{}.{}:8000", index / 256, index % 256);
    Endpoint { engine: engines.get(&Identity { address, tls: None }), role, weight, index }
}

/// An endpoint for each of these weights.
pub fn endpoints(engines: &Engines, weights: &[u32]) -> Vec<Endpoint> {
    weights.iter().enumerate().map(|(index, weight)| endpoint(engines, index, Role::Any, *weight)).collect()
}

/// A tier's keys as the gateway fills them in, with those of `over`, a table or null, in their place.
///
/// # Panics
/// When a default cannot be read.
#[allow(clippy::panic)]
pub fn keys(kind: &TierKind, over: &Value) -> TierConfig {
    let mut keys = Value::Object(Map::new());
    for field in kind.schema.iter().filter(|field| !field.default.is_empty()) {
        let default = serde_json::from_str(field.default);
        let default = default.unwrap_or_else(|e| panic!("{}: the default of {}: {e}", kind.name, field.key));
        let table = |value, part: &str| Value::Object([(part.to_owned(), value)].into_iter().collect());
        lay(&mut keys, &field.key.rsplit('.').fold(default, table));
    }
    if !over.is_null() {
        lay(&mut keys, over);
    }
    match keys {
        Value::Object(keys) => TierConfig(keys),
        _ => panic!("{}: these keys are no table: {over}", kind.name),
    }
}

fn lay(under: &mut Value, over: &Value) {
    match (under, over) {
        (Value::Object(under), Value::Object(over)) => {
            over.iter().for_each(|(key, value)| lay(under.entry(key).or_insert(Value::Null), value));
        }
        (under, over) => *under = over.clone(),
    }
}

/// What tiers are built on.
#[derive(Debug, Default)]
pub struct Ground {
    /// State that outlives a plan.
    pub store: StateStore,
    /// Counters and gauges.
    pub registry: Registry,
    /// Alarms.
    pub alarms: Alarms,
    /// Services.
    pub services: Services,
}

impl Ground {
    /// A tier of this kind for the rule [`RULE`], in its place in a ladder.
    ///
    /// # Errors
    /// The tier's own.
    pub fn rung(
        &self,
        kind: &TierKind,
        config: &TierConfig,
        endpoints: &[Endpoint],
    ) -> Result<Rung, BuildError> {
        self.rung_of(RULE, kind, config, endpoints)
    }

    /// The same for a rule of this name.
    ///
    /// # Errors
    /// The tier's own.
    pub fn rung_of(
        &self,
        rule: &str,
        kind: &TierKind,
        config: &TierConfig,
        endpoints: &[Endpoint],
    ) -> Result<Rung, BuildError> {
        let mut context = BuildContext {
            rule,
            endpoints,
            store: &self.store,
            registry: &self.registry,
            alarms: &self.alarms,
            services: &self.services,
            tasks: Vec::new(),
        };
        let tier = (kind.build)(config, &mut context)?;
        Ok(Rung { name: kind.name, tier, misses: Vec::new(), picks: Arc::default() })
    }

    /// The value of a metric: of the first series whose labels have all of these values.
    pub fn metric(&self, name: &str, values: &[&str]) -> Option<u64> {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name == name)?;
        let has = |sample: &Sample, value: &str| sample.labels.iter().any(|(_, v)| v == value);
        let sample = family.samples.iter().find(|sample| values.iter().all(|value| has(sample, value)));
        sample.map(|sample| sample.value)
    }
}

/// A ladder of these tiers, which have a second to get their facts.
pub fn ladder(rungs: Vec<Rung>) -> Ladder {
    Ladder::new(rungs, Duration::from_secs(1))
}

/// A choice among all endpoints but those tried.
pub fn selection<'a>(endpoints: &'a [Endpoint], tried: &'a Mask, facts: &'a Facts) -> Selection<'a> {
    Selection {
        rule: RULE,
        role: Role::Any,
        endpoints,
        tried,
        facts,
        prefill: None,
        seed: 0,
        now: Instant::now(),
        timer: &Never,
    }
}

/// What tiers are told of a choice that was made at `now`.
pub fn dispatch<'a>(endpoint: &'a Endpoint, chosen: &Chosen, facts: &'a Facts, now: Instant) -> Dispatch<'a> {
    let (tier, why) = (chosen.tier, chosen.why);
    Dispatch { rule: RULE, role: endpoint.role, endpoint, tier, why, facts, now }
}
