//! What a rule counts. Everything derives from decision records.

mod pair;

use std::sync::Arc;

use kvgate_core::{Attempt, Cause, Counter, Decision, Endpoint, Outcome, Phase, Registry};
use kvgate_tiers::{admission, kv_exact};
use prometheus::{Histogram, HistogramOpts};

use crate::config::RuleConfig;
use crate::relay::codes;
use crate::world::World;
use pair::PairCounts;

/// How a request ended, as its label says.
const OUTCOMES: [&str; 9] =
    ["1xx", "2xx", "3xx", "4xx", "5xx", "refused", "engine_failed", "timed_out", "client_gone"];

/// Why another endpoint was asked, as its label says.
const RETRIES: [&str; 5] = ["connect", "upload", "reset", "timeout", "refused"];

/// The codes of tiers that are not built in.
const OTHER: &str = "other";

/// Seconds; from a cache hit to a long cold prompt.
const TTFT: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
const DECISION: [f64; 11] =
    [0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.1];

/// The histograms of a rule, kept over reloads.
pub struct Times {
    /// From arrival to the first byte of the answer.
    pub first_byte: Histogram,
    /// From the whole request to the choice of an endpoint.
    pub decision: Histogram,
}

impl Times {
    fn new(rule: &str) -> Option<Self> {
        let labels = [("service", rule)];
        Some(Self {
            first_byte: histogram(
                "kvgate_first_byte_seconds",
                "From a request's arrival to the first byte of its answer: TTFT, as the gateway sees it.",
                &labels,
                &TTFT,
            )?,
            decision: histogram(
                "kvgate_decision_seconds",
                "From a request being whole to an endpoint being chosen for it, the first time.",
                &labels,
                &DECISION,
            )?,
        })
    }
}

fn histogram(name: &str, help: &str, labels: &[(&str, &str)], buckets: &[f64]) -> Option<Histogram> {
    let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
    let opts = labels.iter().fold(opts, |opts, (label, value)| opts.const_label(*label, *value));
    Histogram::with_opts(opts).ok()
}

/// The counter of the errors of this code that clients of a rule got; of no rule, if its name is empty.
pub fn errors(registry: &Registry, rule: &str, code: &str) -> Arc<Counter> {
    let help = "Requests that the gateway itself answered with an error, or whose event stream it ended with one, by \
                its code; without a service those that no rule took.";
    registry.counter("kvgate_errors_total", help, &[("service", rule), ("code", code)])
}

/// Why another endpoint may be asked after an attempt that ended so.
pub fn retry_reason(outcome: Outcome) -> Option<&'static str> {
    match (outcome.phase, outcome.cause) {
        (Phase::Connect, Cause::EngineBroken | Cause::Deadline) => Some("connect"),
        (Phase::Upload, Cause::EngineBroken | Cause::Deadline) => Some("upload"),
        (_, Cause::EngineBroken) => Some("reset"),
        (_, Cause::Deadline) => Some("timeout"),
        (_, Cause::Refused | Cause::BlocksLost) => Some("refused"),
        // a prefill's answer, which is not the client's
        (_, Cause::Complete) if outcome.status.is_some_and(|status| status >= 500) => Some("refused"),
        _ => None,
    }
}

/// The counters of an endpoint of a rule.
struct EndpointCounts {
    /// `ep_idx`.
    index: usize,
    attempts: Arc<Counter>,
    failures: Arc<Counter>,
    cold: Arc<Counter>,
}

/// The counters of a rule.
pub struct RuleCounts {
    outcomes: Vec<Arc<Counter>>,
    endpoints: Vec<EndpointCounts>,
    /// Its histograms; absent only if the metrics library refuses them.
    times: Arc<Option<Times>>,
    /// What a pair counts beside.
    pair: Option<PairCounts>,
    /// And a pool.
    session_hits: Option<Arc<Counter>>,
    /// Requests that an endpoint was chosen for.
    pub chosen: Arc<Counter>,
    /// Retries, by reason.
    retries: Vec<(&'static str, Arc<Counter>)>,
    /// Retries that the budget did not allow.
    over_budget: Arc<Counter>,
    /// Errors that clients got, by code.
    errors: Vec<(&'static str, Arc<Counter>)>,
    /// Event streams that ended in order, and too early.
    unfinished: Arc<Counter>,
}

impl RuleCounts {
    /// The counters of a rule, all series at 0 if they are new.
    pub fn new(config: &RuleConfig, endpoints: &[Endpoint], world: &World) -> Self {
        let rule = config.name.as_str();
        let outcome = |outcome: &str| {
            let help = "Requests by how they ended: the status class of the answer, refused by a tier or for \
                        want of an endpoint, or of the gateway's own descriptors, failed by the engine, or left by the client.";
            world.registry.counter("kvgate_requests_total", help, &[("service", rule), ("outcome", outcome)])
        };
        let endpoint = |e: &Endpoint| {
            let index = e.index.to_string();
            let labels = [("service", rule), ("ep_idx", index.as_str()), ("ep", e.engine.address())];
            let counter = |name: &str, help: &str| world.registry.counter(name, help, &labels);
            EndpointCounts {
                index: e.index,
                attempts: counter("kvgate_endpoint_attempts_total", "Attempts made on an endpoint."),
                failures: counter(
                    "kvgate_endpoint_failures_total",
                    "Attempts on an endpoint that failed by its fault: no connection, an answer that breaks off or stalls, \
                     or a 5xx that asks for no pause.",
                ),
                cold: counter(
                    "kvgate_endpoint_cold_total",
                    "Requests that an endpoint answered with success although nobody held any of their prompt: each \
                     that fills a block should make it announce one.",
                ),
            }
        };
        let count = |name: &str, help: &str| world.registry.counter(name, help, &[("service", rule)]);
        let retry = |reason: &'static str| {
            let help = "Endpoints asked because the one before failed, by how that did.";
            let labels = [("service", rule), ("reason", reason)];
            (reason, world.registry.counter("kvgate_retries_total", help, &labels))
        };
        let ours = codes::ALL.iter().filter(|code| !codes::BEFORE.contains(code)).map(|code| code.name);
        let codes = ours.chain(admission::REFUSALS).chain([OTHER]);
        Self {
            retries: RETRIES.map(retry).into(),
            over_budget: count(
                "kvgate_retry_budget_exhausted_total",
                "Requests that were not asked of another endpoint because the retry budget was used up.",
            ),
            errors: codes.map(|code| (code, errors(&world.registry, rule, code))).collect(),
            unfinished: count(
                "kvgate_unfinished_streams_total",
                "Event streams that their engine ended in order without saying that the answer is complete.",
            ),
            outcomes: OUTCOMES.iter().map(|o| outcome(o)).collect(),
            endpoints: endpoints.iter().map(endpoint).collect(),
            times: world.store.get(&format!("{rule}/times"), "", || Times::new(rule)),
            session_hits: config.pair.is_none().then(|| {
                let help = "Requests of pools that went to the endpoint of their session.";
                world.registry.counter("loxilb_ai_normal_session_hits_total", help, &[("service", rule)])
            }),
            pair: config.pair.as_ref().map(|_| PairCounts::new(rule, &config.matches.models, world)),
            chosen: count("kvgate_routed_total", "Requests that an endpoint was chosen for."),
        }
    }

    /// Its histograms.
    pub fn histograms(&self) -> impl Iterator<Item = &Histogram> {
        let own = self.times.as_ref().iter().flat_map(|times| [&times.first_byte, &times.decision]);
        let pair = self.pair.iter().flat_map(PairCounts::times);
        own.chain(pair.flat_map(|times| [&times.prefill, &times.decode]))
    }

    fn endpoint(&self, index: usize) -> Option<&EndpointCounts> {
        self.endpoints.iter().find(|counts| counts.index == index)
    }

    /// How many requests the endpoint of this number answered of whose prompts it held nothing.
    pub fn cold(&self, index: usize) -> u64 {
        self.endpoint(index).map_or(0, |counts| counts.cold.get())
    }

    /// A request is over.
    pub fn record(&self, decision: &Decision) {
        let outcome = outcome(decision);
        if let Some((_, counter)) = OUTCOMES.iter().zip(&self.outcomes).find(|(o, _)| **o == outcome) {
            counter.inc();
        }
        for attempt in &decision.attempts {
            let Some(winner) = attempt.asked() else { continue };
            let Some(counts) = self.endpoint(winner.endpoint) else { continue };
            counts.attempts.inc();
            if attempt.failed {
                counts.failures.inc();
            }
            let well = matches!(
                attempt.outcome,
                Some(Outcome { cause: Cause::Complete, status: Some(200..=299), .. })
            );
            if well && attempt.steps.iter().any(kv_exact::none_held) {
                counts.cold.inc();
            }
        }
        for (at, attempt) in decision.attempts.iter().enumerate() {
            let reason =
                attempt.outcome.and_then(retry_reason).filter(|_| asked_again(decision, at, attempt));
            inc(&self.retries, reason);
        }
        let known = |code: &&str| self.errors.iter().any(|(name, _)| name == code);
        inc(&self.errors, decision.error.map(|code| Some(code).filter(known).unwrap_or(OTHER)));
        if decision.unfinished {
            self.unfinished.inc();
        }
        if decision.over_budget {
            self.over_budget.inc();
        }
        if let Some(pair) = &self.pair {
            pair.record(decision);
        }
        if let Some(hits) = &self.session_hits
            && decision.winner().is_some_and(|winner| winner.tier == "session")
        {
            hits.inc();
        }
        if let Some(times) = self.times.as_ref() {
            if decision.decided_us > 0 {
                times.decision.observe(decision.decided_us as f64 / 1e6);
            }
            if let Some(first) = decision.first_byte_us {
                times.first_byte.observe(first as f64 / 1e6);
            }
        }
        if decision.winner().is_some() {
            self.chosen.inc();
        }
    }
}

/// One more of these.
fn inc(counters: &[(&'static str, Arc<Counter>)], label: Option<&str>) {
    if let Some((_, counter)) = counters.iter().find(|(name, _)| Some(*name) == label) {
        counter.inc();
    }
}

/// Whether another endpoint was asked for the part of the request that this attempt was for.
fn asked_again(decision: &Decision, at: usize, attempt: &Attempt) -> bool {
    let later = decision.attempts.iter().skip(at + 1);
    attempt.asked().is_some()
        && later.filter(|next| next.role == attempt.role).any(|next| next.asked().is_some())
}

fn outcome(decision: &Decision) -> &'static str {
    match decision.outcome.map(|o| o.cause) {
        Some(Cause::ClientGone | Cause::Dropped | Cause::Unused) => "client_gone",
        Some(Cause::EngineBroken | Cause::Deadline | Cause::Stale | Cause::BlocksLost | Cause::TooLarge) => {
            "engine_failed"
        }
        Some(Cause::OutOfTime) => "timed_out",
        // its own words, passed on, are an answer
        Some(Cause::Refused) if decision.error.is_some() => "engine_failed",
        Some(Cause::Exhausted | Cause::Stopped) => "refused",
        None if decision.error.is_some() => "refused",
        _ => match decision.status / 100 {
            1 => "1xx",
            2 => "2xx",
            3 => "3xx",
            4 => "4xx",
            _ => "5xx",
        },
    }
}
