//! What a `prefill-decode` rule counts, by the names of the LoxiLB inference gateway.

use std::sync::Arc;

use kvgate_core::{Attempt, Cause, Counter, Decision, Outcome, Phase, Registry, Role};
use prometheus::Histogram;

use super::{asked_again, histogram};
use crate::world::World;

/// Models that the rule does not name.
const OTHER: &str = "other";
const PHASES: [&str; 3] = ["prefill", "decode", "complete"];
const STATUSES: [&str; 3] = ["success", "timeout", "error"];

/// Seconds; from a cached prompt to a long one in a queue.
const PREFILL: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// The counters of a pair.
pub struct PairCounts {
    models: Vec<ModelCounts>,
    prefill_died: Arc<Counter>,
    decode_died: Arc<Counter>,
    decode_mute: Arc<Counter>,
    failovers: Arc<Counter>,
    rescued: Arc<Counter>,
}

/// Those of one of its models.
struct ModelCounts {
    name: String,
    /// By phase and status.
    legs: Vec<[Arc<Counter>; 3]>,
    found: Arc<Counter>,
    missing: Arc<Counter>,
    session_hits: Arc<Counter>,
    times: Arc<Option<PairTimes>>,
}

/// Histograms of a model, kept over reloads.
pub struct PairTimes {
    /// From a prefill being asked to its answer.
    pub prefill: Histogram,
    /// From decode being asked to its first byte.
    pub decode: Histogram,
}

impl PairTimes {
    fn new(rule: &str, model: &str) -> Option<Self> {
        let labels = [("service", rule), ("model", model)];
        Some(Self {
            prefill: histogram(
                "loxilb_ai_pd_prefill_duration_seconds",
                "From a prefill being asked to the whole of its answer.",
                &labels,
                &PREFILL,
            )?,
            decode: histogram(
                "loxilb_ai_pd_decode_ttft_seconds",
                "From decode being asked to the first byte of its answer.",
                &labels,
                &PREFILL,
            )?,
        })
    }
}

impl ModelCounts {
    fn new(rule: &str, model: &str, world: &World) -> Self {
        let registry = &world.registry;
        let counter =
            |name: &str, help: &str| registry.counter(name, help, &[("service", rule), ("model", model)]);
        let leg = |phase: &&str| {
            STATUSES.map(|status| {
                let labels = [("service", rule), ("model", model), ("phase", *phase), ("status", status)];
                let help = "Legs of prefill-decode requests, and the requests, by how they ended.";
                registry.counter("loxilb_ai_pd_requests_total", help, &labels)
            })
        };
        Self {
            name: model.to_owned(),
            legs: PHASES.iter().map(leg).collect(),
            found: counter(
                "loxilb_ai_pd_kv_params_found_total",
                "Prefills that said where decode finds the prompt's blocks.",
            ),
            missing: counter(
                "loxilb_ai_pd_kv_params_missing_total",
                "Requests whose decode had to compute the prompt itself.",
            ),
            session_hits: counter(
                "loxilb_ai_pd_session_hits_total",
                "Requests that went to the prefill endpoint of their session.",
            ),
            times: world.store.get(&format!("{rule}/pair/{model}"), "", || PairTimes::new(rule, model)),
        }
    }

    fn leg(&self, phase: usize, status: usize) {
        if let Some(counter) = self.legs.get(phase).and_then(|by_status| by_status.get(status)) {
            counter.inc();
        }
    }
}

/// The place of an ending in [`STATUSES`]; `None` where it says nothing of the engines.
fn status(outcome: Option<Outcome>) -> Option<usize> {
    match outcome?.cause {
        // an answer, though perhaps not the one hoped for
        Cause::Complete if outcome?.status.is_some_and(|status| matches!(status, 200..=299 | 400..=499)) => {
            Some(0)
        }
        Cause::Deadline | Cause::OutOfTime => Some(1),
        Cause::Complete
        | Cause::EngineBroken
        | Cause::Stale
        | Cause::Refused
        | Cause::BlocksLost
        | Cause::TooLarge => Some(2),
        Cause::ClientGone | Cause::Unused | Cause::Dropped | Cause::Exhausted | Cause::Stopped => None,
    }
}

fn died(attempt: &Attempt) -> bool {
    matches!(attempt.outcome, Some(Outcome { cause: Cause::EngineBroken, phase, .. }) if phase != Phase::Connect)
}

fn unreached(attempt: &Attempt) -> bool {
    matches!(
        attempt.outcome,
        Some(Outcome {
            phase: Phase::Connect,
            // stale: of upgrades only, whose kept connections the proxy library looks after
            cause: Cause::EngineBroken | Cause::Stale | Cause::Deadline,
            ..
        })
    )
}

impl PairCounts {
    /// The counters of a rule that names these models, all series at 0 if they are new.
    pub fn new(rule: &str, models: &[String], world: &World) -> Self {
        let registry: &Registry = &world.registry;
        let counter = |name: &str, help: &str| registry.counter(name, help, &[("service", rule)]);
        let models = models.iter().map(String::as_str).chain([OTHER]);
        Self {
            models: models.map(|model| ModelCounts::new(rule, model, world)).collect(),
            prefill_died: counter(
                "loxilb_pd_prefill_ep_died_total",
                "Prefills that their engine broke off after it took the connection.",
            ),
            decode_died: counter(
                "loxilb_pd_decode_ep_died_total",
                "Decodes that their engine broke off after it took the connection.",
            ),
            decode_mute: counter(
                "loxilb_pd_decode_zero_byte_eof_total",
                "Decodes that their engine broke off before the first byte of an answer.",
            ),
            failovers: counter(
                "loxilb_pd_connect_failover_total",
                "Attempts that went to another endpoint because one took no connection.",
            ),
            rescued: counter(
                "loxilb_pd_fallback_to_normal_total",
                "Requests that an endpoint of the role any was chosen to serve whole, for want of a pair.",
            ),
        }
    }

    /// The histograms.
    pub fn times(&self) -> impl Iterator<Item = &PairTimes> {
        self.models.iter().filter_map(|model| model.times.as_ref().as_ref())
    }

    /// A request is over.
    pub fn record(&self, decision: &Decision) {
        let named = |name: &str| self.models.iter().find(|model| model.name == name);
        let Some(model) = decision.model.as_deref().and_then(named).or_else(|| named(OTHER)) else { return };
        for attempt in decision.attempts.iter().filter(|attempt| attempt.asked().is_some()) {
            let phase = match attempt.role {
                Role::Prefill => 0,
                Role::Decode => 1,
                Role::Any => continue,
            };
            if let Some(status) = status(attempt.outcome) {
                model.leg(phase, status);
            }
            if let (Some(times), Some(Cause::Complete)) =
                (model.times.as_ref(), attempt.outcome.map(|o| o.cause))
            {
                match (attempt.role, attempt.first_byte_us) {
                    (Role::Prefill, _) => times.prefill.observe(attempt.total_us as f64 / 1e6),
                    (_, Some(first)) => times.decode.observe(first as f64 / 1e6),
                    (_, None) => {}
                }
            }
            if died(attempt) {
                let counter = if phase == 0 { &self.prefill_died } else { &self.decode_died };
                counter.inc();
            }
            if phase == 1 && died(attempt) && attempt.first_byte_us.is_none() {
                self.decode_mute.inc();
            }
        }
        if let Some(status) = status(decision.outcome).filter(|_| decision.transfer.is_some()) {
            model.leg(2, status);
        }
        match decision.transfer {
            Some(true) => model.found.inc(),
            Some(false) => model.missing.inc(),
            None => {}
        }
        if decision.winner_for(Role::Prefill).is_some_and(|winner| winner.tier == "session") {
            model.session_hits.inc();
        }
        let unreached = decision.attempts.iter().enumerate().filter(|(_, attempt)| unreached(attempt));
        let failovers = unreached.filter(|(at, attempt)| asked_again(decision, *at, attempt)).count();
        self.failovers.add(failovers as u64);
        if decision.winner_for(Role::Any).is_some() {
            self.rescued.inc();
        }
    }
}
