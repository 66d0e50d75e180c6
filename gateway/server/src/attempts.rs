//! The attempts of one request: the ladder's side of the relay, and the request's decision record.

use std::sync::Arc;
use std::time::Instant;

use kvgate_core::{
    Attempt, Cause, Completion, Decision, Dispatch, Facts, Lease, Mask, Outcome, Phase, Refused, Request,
    Selection,
};
use pingora_core::upstreams::peer::HttpPeer;
use pingora_http::ResponseHeader;

use crate::plan::Rule;
use crate::proxy::{shown, value};
use crate::relay::{Deadlines, LegError, Limits, Route};
use crate::world::{TokioTimer, World, unix_millis};

/// `1` asks for the decision, where the rule allows it.
const EXPLAIN: &str = "x-kvgate-explain";
/// What clients commonly take as one header.
const MOST_EXPLAINED: usize = 6 * 1024;

/// The attempt under way.
struct Current {
    position: usize,
    tier: &'static str,
    lease: Lease,
}

/// Chooses endpoints for one request and writes down what became of them.
pub struct Attempts {
    world: Arc<World>,
    rule: Arc<Rule>,
    facts: Facts,
    decision: Decision,
    arrived: Instant,
    /// When its body was in.
    whole: Instant,
    tried: Mask,
    current: Option<Current>,
    /// Answers say which endpoint and tier they come from.
    exposes: bool,
    /// The answer carries the decision.
    explains: bool,
}

impl Attempts {
    /// Of a request that is whole now.
    pub fn new(
        world: Arc<World>,
        rule: Arc<Rule>,
        request: Request,
        arrived: Instant,
        exposes: bool,
    ) -> Self {
        let decision = Decision {
            request: request.id.clone(),
            rule: rule.config.name.clone(),
            path: request.path.clone(),
            model: request.model.as_deref().map(|m| shown(Some(m)).to_owned()),
            at_ms: unix_millis(),
            ..Decision::default()
        };
        let explains = rule.config.explain && request.header(EXPLAIN) == Some("1");
        let facts = Facts::new(Arc::new(request), rule.facts.clone());
        let whole = Instant::now();
        let (tried, current) = (Mask::none(), None);
        Self { world, rule, facts, decision, arrived, whole, tried, current, exposes, explains }
    }

    /// How long the request may take, and how often it may be tried.
    pub fn limits(&self) -> Limits {
        let timeouts = &self.rule.config.timeouts;
        Limits {
            deadlines: Deadlines {
                connect: timeouts.connect,
                first_byte: timeouts.first_byte,
                idle: timeouts.idle,
                total: tokio::time::Instant::from_std(self.arrived + timeouts.total),
            },
            attempts: self.rule.config.limits.attempts,
            resend: false,
        }
    }

    /// The request's path.
    pub fn path(&self) -> &str {
        &self.facts.request.path
    }

    /// `x-request-id`.
    pub fn request_id(&self) -> &str {
        &self.facts.request.id
    }

    /// Ends the attempt under way: its lease, and its part in the record.
    pub fn end_attempt(&mut self, outcome: Outcome) {
        let Some(current) = self.current.take() else { return };
        self.tried.insert(current.position);
        current.lease.end(outcome);
        if let Some(attempt) = self.decision.attempts.last_mut() {
            attempt.outcome = Some(outcome);
        }
        if let Some(dispatch) = self.dispatch(current.position, current.tier) {
            self.rule.ladder.on_complete(&Completion { dispatch, outcome });
        }
    }

    /// The request is over: `status` is what the client was sent, 0 if nothing.
    pub fn finish(&mut self, status: u16, outcome: Option<Outcome>, error: Option<&'static str>) {
        if let Some(outcome) = outcome {
            self.end_attempt(outcome);
        }
        let mut decision = std::mem::take(&mut self.decision);
        (decision.status, decision.error) = (status, error);
        decision.total_us = micros(self.arrived);
        self.rule.counts.record(&decision);
        if self.rule.kv.is_none() {
            self.world.kv_misses.mode_off();
        }
        if tracing::enabled!(tracing::Level::DEBUG) {
            let record = serde_json::to_string(&decision).unwrap_or_default();
            tracing::debug!(target: "kvgate::decision", "{record}");
        }
        self.world.decisions.push(Arc::new(decision));
    }

    fn dispatch(&self, position: usize, tier: &'static str) -> Option<Dispatch<'_>> {
        Some(Dispatch {
            rule: &self.rule.config.name,
            role: self.rule.role(),
            endpoint: self.rule.endpoints.get(position)?,
            tier,
            facts: &self.facts,
        })
    }

    fn selection(&self) -> Selection<'_> {
        Selection {
            rule: &self.rule.config.name,
            role: self.rule.role(),
            endpoints: &self.rule.endpoints,
            tried: &self.tried,
            facts: &self.facts,
            prefill: None,
            seed: self.decision.at_ms,
            timer: &TokioTimer,
        }
    }
}

impl Route for Attempts {
    type Refused = Refused;

    async fn choose(&mut self) -> Result<HttpPeer, Refused> {
        loop {
            let mut attempt = Attempt::default();
            let chosen = self.rule.ladder.choose(&self.selection(), &mut attempt).await;
            self.decision.attempts.push(attempt);
            if self.decision.attempts.len() == 1 {
                self.decision.decided_us = micros(self.whole);
            }
            let chosen = chosen?;
            let (position, tier) = (chosen.endpoint, chosen.tier);
            self.current = Some(Current { position, tier, lease: chosen.lease });
            if let Some(dispatch) = self.dispatch(position, tier) {
                self.rule.ladder.on_dispatch(&dispatch);
            }
            match self.rule.peer(position).await {
                Some(peer) => return Ok(peer),
                // a name that cannot be resolved is an engine that cannot be reached
                None => self.end_attempt(Outcome {
                    phase: Phase::Connect,
                    status: None,
                    cause: Cause::EngineBroken,
                }),
            }
        }
    }

    fn answered(&mut self, head: &mut ResponseHeader) {
        if let Some(current) = &self.current
            && let Some(dispatch) = self.dispatch(current.position, current.tier)
        {
            self.rule.ladder.on_answer(&dispatch);
        }
        self.decision.first_byte_us = Some(micros(self.arrived));
        let mut add = |name: &'static str, text: &str| {
            if head.insert_header(name, value(text)).is_err() {
                tracing::debug!(name, "a header that cannot be sent");
            }
        };
        add("x-request-id", &self.facts.request.id);
        if self.exposes
            && let Some(winner) = self.decision.winner()
        {
            add("x-kvgate-endpoint", &winner.address);
            add("x-kvgate-tier", winner.tier);
        }
        if self.explains {
            let record = serde_json::to_string(&self.decision).unwrap_or_default();
            add("x-kvgate-decision", record.get(..MOST_EXPLAINED).unwrap_or(&record));
        }
    }

    fn failed(&mut self, error: &LegError) {
        self.end_attempt(error.outcome());
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
