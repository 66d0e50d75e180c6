//! What a tier is.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderMap;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::BoxFuture;
use crate::alarm::{Alarm, Alarms};
use crate::engine::Engine;
use crate::facts::{Facts, Request};
use crate::lease::Outcome;
use crate::mask::Mask;
use crate::metrics::{Counter, Gauge, Registry};
use crate::queue::Ticket;
use crate::random::Random;
use crate::schema::Field;
use crate::state::{Services, StateStore};

/// What part of a request an endpoint serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// All of it.
    #[default]
    Any,
    /// The prompt.
    Prefill,
    /// The answer's tokens.
    Decode,
}

impl Role {
    /// All of them.
    pub const ALL: [Role; 3] = [Self::Any, Self::Prefill, Self::Decode];

    /// Its name in rules, records and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A rule's view of an engine.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The engine.
    pub engine: Arc<Engine>,
    /// What it serves in this rule.
    pub role: Role,
    /// Its share of the load beside its siblings', 1 or more.
    pub weight: u32,
    /// `ep_idx`: the number it is known by outside, kept over reloads.
    pub index: usize,
}

impl Endpoint {
    /// Its share of the load at this time, in hundredths of a weight: its weight, by as much as an operator or a
    /// controller has its engine taken for, and less soon after the engine was back.
    pub fn share(&self, now: Instant) -> u64 {
        u64::from(self.weight.max(1)).saturating_mul(self.engine.share_pct(now))
    }
}

/// Why a tier passed. Every tier declares its own in [`TierKind::misses`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct Miss(pub &'static str);

impl Miss {
    /// The tier's `prepare` took longer than the ladder allows.
    pub const DEADLINE: Miss = Miss("deadline");
    /// Nobody is eligible: all that a tier can say against a request that takes any.
    pub const NO_ENDPOINT: Miss = Miss("no_endpoint");
}

/// A miss that a tier may give, documented.
#[derive(Clone, Copy, Debug)]
pub struct MissKind {
    /// The reason, as it stands in metrics and decision records.
    pub reason: &'static str,
    /// When it is given.
    pub doc: &'static str,
}

impl MissKind {
    /// [`Miss::NO_ENDPOINT`].
    pub const NO_ENDPOINT: MissKind =
        MissKind { reason: Miss::NO_ENDPOINT.0, doc: "No endpoint is eligible." };
}

/// An endpoint as a tier scored it: kept in the decision record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// Its position in [`Routing::endpoints`]; in the decision record its `ep_idx`.
    pub endpoint: usize,
    /// How much of the prompt it already holds, or is about to: tokens, but bytes of text where `radix-trie` scored
    /// it.
    pub overlap: u64,
    /// Requests in flight on it; with those that it has queued where `min-load` scored it.
    pub load: u64,
    /// What it can hold, in the unit of its siblings: see [`Routing::capacities`].
    pub capacity: u64,
    /// Requests in flight from which on it is passed over, where the law has such a cap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cap: Option<u64>,
}

impl Candidate {
    /// Whether it carries less than its cap, or has none.
    pub fn has_room(&self) -> bool {
        self.cap.is_none_or(|cap| self.load < cap)
    }
}

/// A tier's choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// A position in [`Routing::endpoints`].
    pub endpoint: usize,
    /// The choice holds only while fewer than this many requests are in flight on the engine; else the ladder
    /// runs again.
    pub limit: Option<u64>,
    /// A word on why, where the tier has several ways to choose: stands in the decision record, and comes back
    /// in [`Dispatch::why`].
    pub why: Option<&'static str>,
}

impl Choice {
    /// For [`Choice::why`], in every tier that bounds load: the endpoint with the best claim was passed over for its
    /// load.
    pub const SPILL: &'static str = "spill";

    /// This endpoint, however loaded.
    pub fn of(endpoint: usize) -> Self {
        Self { endpoint, ..Self::default() }
    }
}

/// An answer in place of a choice. Only admission may give one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The HTTP status.
    pub status: u16,
    /// The stable error code.
    pub code: &'static str,
    /// What the client reads.
    pub detail: String,
    /// Seconds for `Retry-After`.
    pub retry_after: Option<u32>,
}

/// What a tier says of a request.
#[derive(Debug)]
pub enum Verdict {
    /// Let the next tier decide.
    Pass(Miss),
    /// Let the next tiers decide among these only. A mask that leaves nobody eligible counts as a miss and
    /// keeps the wider choice.
    Narrow(Mask, Miss),
    /// This endpoint.
    Pick(Choice),
    /// Wait for a place.
    Hold(Hold),
    /// Answer the client.
    Reject(Refusal),
}

/// A request that has to wait.
#[derive(Debug)]
pub struct Hold {
    /// Its place in the queue.
    pub ticket: Ticket,
    /// How long it may wait, all its waiting for this choice together.
    pub wait: Duration,
    /// What the client is answered after that.
    pub late: Refusal,
}

/// How waiting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// A place was handed over.
    Granted,
    /// It took too long.
    Late,
    /// There is no engine left to wait for.
    NoEndpoint,
}

/// One decision under way: what a tier sees in [`Tier::decide`].
pub struct Routing<'a> {
    /// The rule's name.
    pub rule: &'a str,
    /// The role an endpoint is sought for.
    pub role: Role,
    /// The rule's endpoints. Positions into this slice are what masks, choices and candidates hold.
    pub endpoints: &'a [Endpoint],
    /// Those that may be chosen: right role, healthy, in service, not yet tried, not narrowed away.
    pub eligible: Mask,
    /// Those a session pinned to them may keep: as eligible, with the draining ones.
    pub pinnable: Mask,
    /// Those already tried in vain for this request.
    pub tried: &'a Mask,
    /// No endpoint may have more in flight than this, whichever tier chooses. Set by admission; the ladder sees to it
    /// that it holds under concurrency.
    pub cap: Option<u64>,
    /// What is known of the request.
    pub facts: &'a Facts,
    /// The time.
    pub now: Instant,
    /// Randomness, seeded.
    pub random: Random,
    /// Where the prefill runs, when decode is being chosen.
    pub prefill: Option<usize>,
    /// The endpoint a place was handed over on, after a [`Verdict::Hold`]: the choice of it needs no other place.
    pub granted: Option<usize>,
    /// What the tier scored, for the decision record.
    pub candidates: Vec<Candidate>,
}

impl Routing<'_> {
    /// The request.
    pub fn request(&self) -> &Request {
        &self.facts.request
    }

    /// The eligible endpoints with their positions.
    pub fn eligible_endpoints(&self) -> impl Iterator<Item = (usize, &Endpoint)> {
        self.endpoints.iter().enumerate().filter(|(at, _)| self.eligible.contains(*at))
    }

    /// Requests that each engine has queued, by position, as it last told. One whose word is out of date, or that does
    /// not say, is taken to have the mean of the eligible that do, so that silence neither draws requests nor turns
    /// them away.
    pub fn waiting(&self) -> Vec<u64> {
        let queued = |e: &Endpoint| e.engine.telemetry(self.now).and_then(|told| told.waiting);
        let told: Vec<_> = self.endpoints.iter().map(queued).collect();
        let known = self.eligible.iter().filter_map(|at| told.get(at).copied().flatten());
        let (sum, count) = known.fold((0u128, 0u128), |(sum, count), n| (sum + u128::from(n), count + 1));
        let mean = u64::try_from((sum + count / 2).checked_div(count).unwrap_or(0)).unwrap_or(u64::MAX);
        told.into_iter().map(|queued| queued.unwrap_or(mean)).collect()
    }

    /// What each endpoint can hold, by position, 1 or more: its engine's KV blocks times its weight where those
    /// of every eligible endpoint are known, else its weight alone, because the two cannot be compared. In hundredths
    /// while one of them is taken for more or less than it is ([`Endpoint::share`]).
    pub fn capacities(&self) -> Vec<u64> {
        let plain = self.endpoints.iter().all(|e| e.engine.share_pct(self.now) == 100);
        let own = |e: &Endpoint| if plain { u64::from(e.weight.max(1)) } else { e.share(self.now) };
        let mut capacities: Vec<u64> = self.endpoints.iter().map(own).collect();
        let blocks = |e: &Endpoint| e.engine.telemetry(self.now).and_then(|t| t.blocks);
        let told: Vec<_> = self.endpoints.iter().map(blocks).collect();
        let known = |at: usize| told.get(at).is_some_and(Option::is_some);
        if self.eligible.iter().all(known) {
            let both = capacities.iter_mut().zip(told);
            both.for_each(|(capacity, blocks)| {
                *capacity = capacity.saturating_mul(blocks.unwrap_or(1).max(1))
            });
        }
        capacities
    }
}

/// An attempt that is about to be made, or is being answered.
#[derive(Debug)]
pub struct Dispatch<'a> {
    /// The rule's name.
    pub rule: &'a str,
    /// The role of this leg.
    pub role: Role,
    /// The endpoint chosen.
    pub endpoint: &'a Endpoint,
    /// The tier that chose it.
    pub tier: &'static str,
    /// Why, if the tier said so: [`Choice::why`].
    pub why: Option<&'static str>,
    /// What is known of the request.
    pub facts: &'a Facts,
    /// The time.
    pub now: Instant,
}

/// A leg that is over.
#[derive(Debug)]
pub struct Completion<'a> {
    /// The leg.
    pub dispatch: Dispatch<'a>,
    /// How it ended.
    pub outcome: Outcome,
}

/// A step of the ladder.
///
/// Whatever goes wrong inside a tier is a miss: routing never costs availability.
pub trait Tier: Send + Sync {
    /// Gets the facts that [`Tier::decide`] needs: the only place where a tier may wait. `None` if it needs
    /// none. The ladder puts a deadline round it; running out is the miss [`Miss::DEADLINE`].
    fn prepare<'a>(&'a self, _facts: &'a Facts) -> Option<BoxFuture<'a, Result<(), Miss>>> {
        None
    }

    /// Decides. No input or output, short locks of its own only.
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict;

    /// The tier passed. Called once for each miss that is counted.
    fn on_miss(&self, _miss: Miss) {}

    /// A request that this tier held waits no longer. Not told of one whose client left.
    fn on_waited(&self, _role: Role, _waited: Duration, _end: WaitEnd) {}

    /// An endpoint was chosen, by this tier or another, and is about to be asked. Called on every attempt,
    /// for both legs.
    fn on_dispatch(&self, _dispatch: &Dispatch<'_>) {}

    /// The endpoint began to answer, with these headers: the choice is final. Called before the client sees a
    /// byte of it.
    fn on_answer(&self, _dispatch: &Dispatch<'_>, _headers: &HeaderMap) {}

    /// An attempt is over.
    fn on_complete(&self, _completion: &Completion<'_>) {}
}

/// Makes a tier from its keys.
pub type Build = fn(&TierConfig, &mut BuildContext<'_>) -> Result<Arc<dyn Tier>, BuildError>;

/// A kind of tier: the row of the table it is known by.
#[derive(Clone, Copy)]
pub struct TierKind {
    /// Its name in `tiers = […]` and in metrics.
    pub name: &'static str,
    /// What it does, in a sentence or two.
    pub doc: &'static str,
    /// The misses it may give.
    pub misses: &'static [MissKind],
    /// The keys of its table `[tier.<name>]`.
    pub schema: &'static [Field],
    /// Makes one from its keys, defaults filled in.
    pub build: Build,
}

impl std::fmt::Debug for TierKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TierKind({})", self.name)
    }
}

/// A tier could not be built from values that are each valid by themselves.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {message}")]
pub struct BuildError {
    /// The key at fault, as in [`Field::key`].
    pub key: String,
    /// What is wrong with it and what would be right.
    pub message: String,
}

/// The keys of a tier's table, validated against its schema, defaults filled in.
#[derive(Debug, Clone, Default)]
pub struct TierConfig(pub serde_json::Map<String, serde_json::Value>);

impl TierConfig {
    /// The keys as a struct of the tier's own.
    ///
    /// # Errors
    /// When the struct and the schema do not agree.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, BuildError> {
        serde_json::from_value(serde_json::Value::Object(self.0.clone()))
            .map_err(|e| BuildError { key: String::new(), message: e.to_string() })
    }
}

/// What a tier is built with.
pub struct BuildContext<'a> {
    /// The rule's name: the label `service` of metrics.
    pub rule: &'a str,
    /// The rule's endpoints.
    pub endpoints: &'a [Endpoint],
    /// State that outlives the plan.
    pub store: &'a StateStore,
    /// The counters and gauges of the process.
    pub registry: &'a Registry,
    /// The alarms of the process.
    pub alarms: &'a Alarms,
    /// What the gateway offers: the inventory, say.
    pub services: &'a Services,
    /// Tasks to run for as long as the plan is in force, by name.
    pub tasks: Vec<(String, BoxFuture<'static, ()>)>,
}

impl BuildContext<'_> {
    /// State kept over reloads: same key and shape, same state. The key is the tier's own within its rule.
    pub fn state<S: std::any::Any + Send + Sync>(
        &self,
        key: &str,
        shape: &str,
        init: impl FnOnce() -> S,
    ) -> Arc<S> {
        self.store.get(&format!("{}/{key}", self.rule), shape, init)
    }

    /// A counter. Its series exists from now on and vanishes with its last holder.
    pub fn counter(&self, name: &str, help: &str, labels: &[(&str, &str)]) -> Arc<Counter> {
        self.registry.counter(name, help, labels)
    }

    /// A gauge. Its series exists from now on and vanishes with its last holder.
    pub fn gauge(&self, name: &str, help: &str, labels: &[(&str, &str)]) -> Arc<Gauge> {
        self.registry.gauge(name, help, labels)
    }

    /// An alarm of this rule, off at first.
    pub fn alarm(&self, name: &'static str) -> Arc<Alarm> {
        self.alarms.get(self.rule, name)
    }

    /// Runs `task` while the plan is in force.
    pub fn spawn(&mut self, name: &str, task: BoxFuture<'static, ()>) {
        self.tasks.push((name.to_owned(), task));
    }
}
