//! The attempts of one request: the ladder's side of the relay, and the request's decision record.

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use kvgate_core::{
    Attempt, Availability, Cause, Completion, Decision, Dispatch, Facts, Lease, Mask, Miss, Outcome, Phase,
    Refused, Request, Role, Selection, Winner,
};
use kvgate_sim::trace::TARGET;
use pingora_core::upstreams::peer::{HttpPeer, Peer};
use pingora_core::{BError, ErrorType};
use pingora_http::{RequestHeader, ResponseHeader};

use crate::budget::Budget;
use crate::config::BudgetConfig;
use crate::counts::retry_reason;
use crate::health;
use crate::life::Stage;
use crate::plan::Rule;
use crate::prompt_record;
use crate::relay::{Deadlines, LegError, Limits, Refusals, Route};
use crate::told::{explained, shown, unique, value};
use crate::world::{TokioTimer, World, unix_millis};

/// `1` asks for the decision, where the rule allows it.
const EXPLAIN: &str = "x-kvgate-explain";
const STALE: Outcome = Outcome { phase: Phase::Connect, status: None, cause: Cause::Stale };

/// An endpoint that was chosen.
struct Current {
    /// Its attempt's place in the record.
    attempt: usize,
    role: Role,
    position: usize,
    /// When it was asked, or chosen.
    asked: Instant,
    /// Whether the tiers were told that it is about to be asked.
    dispatched: bool,
    /// Where it is connected to, once that is known.
    socket: Option<SocketAddr>,
    tier: &'static str,
    why: Option<&'static str>,
    /// Until it is over.
    lease: Option<Lease>,
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
    /// Seeds the tiers' randomness; each attempt draws anew.
    seed: u64,
    tried: Mask,
    /// The last of them.
    last_tried: Option<usize>,
    /// The part of the request that an endpoint is sought for.
    role: Role,
    /// Asking another for it costs the budget: the last one that was asked had a connection.
    again: bool,
    /// The attempt under way.
    current: Option<Current>,
    /// Who is to decode, while the prefill runs.
    reserved: Option<Current>,
    /// The id of both legs, where that is not the request's.
    leg_id: Option<String>,
    /// Answers say which endpoint and tier they come from.
    exposes: bool,
    /// `Strict-Transport-Security` of answers.
    hsts: Option<String>,
    finished: bool,
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
            path: shown(Some(&request.path)).to_owned(),
            model: request.model.as_deref().map(|m| shown(Some(m)).to_owned()),
            at_ms: unix_millis(),
            ..Decision::default()
        };
        world.budget.request(Instant::now());
        let explains = rule.config.explain && request.header(EXPLAIN) == Some("1");
        let facts = Facts::new(Arc::new(request), rule.facts.clone());
        let whole = Instant::now();
        Self {
            seed: RandomState::new().hash_one(0),
            role: rule.role(),
            world,
            rule,
            facts,
            decision,
            arrived,
            whole,
            tried: Mask::none(),
            last_tried: None,
            again: false,
            current: None,
            reserved: None,
            leg_id: None,
            exposes,
            hsts: None,
            finished: false,
            explains,
        }
    }

    /// Answers shall carry this `Strict-Transport-Security`.
    pub fn strict_transport(&mut self, hsts: Option<&str>) {
        self.hsts = hsts.map(str::to_owned);
    }

    /// How long the request may take, and how often it may be tried.
    pub fn limits(&self) -> Limits {
        let (timeouts, request) = (&self.rule.config.timeouts, &self.facts.request);
        Limits {
            deadlines: Deadlines {
                connect: timeouts.connect,
                first_byte: timeouts.first_byte,
                idle: timeouts.idle,
                client: timeouts.client_idle,
                total: tokio::time::Instant::from_std(self.arrived + timeouts.total),
            },
            attempts: self.rule.config.retry.attempts,
            // what changes nothing may run twice (RFC 9110 section 9.2.1)
            resend: request.method.is_safe()
                || self.rule.config.retry.resend && kvgate_engines::only_computes(&request.path),
        }
    }

    /// The answers upon which another endpoint is asked.
    pub fn refusals<'a>(rule: &'a Rule, request: &Request) -> Refusals<'a> {
        let (method, retry) = (&request.method, &rule.config.retry);
        let may_run_twice = method.is_safe() || kvgate_engines::only_computes(&request.path);
        Refusals { statuses: if may_run_twice { &retry.statuses } else { &[] }, busy: retry.busy, lost: None }
    }

    /// The request.
    pub fn request(&self) -> &Arc<Request> {
        &self.facts.request
    }

    /// Its rule.
    pub fn rule(&self) -> &Arc<Rule> {
        &self.rule
    }

    /// The part of it that is served, or was last.
    pub fn role(&self) -> Role {
        self.role
    }

    /// From now on endpoints are sought for this part of it, which is new: the first one that is asked costs no budget.
    pub fn begin(&mut self, role: Role) {
        self.again = false;
        self.seek(role);
    }

    /// From now on endpoints are sought for this part of it, in place of the one that failed.
    pub fn seek(&mut self, role: Role) {
        self.role = role;
        if role == Role::Any {
            self.end_reserved();
            if self.decision.transfer.is_some() {
                self.transferred(false);
            }
        }
    }

    /// Whoever was asked last may be asked again: it was its connection that broke.
    pub fn forgive(&mut self) {
        if let Some(position) = self.last_tried.take() {
            self.tried.remove(position);
        }
    }

    /// How many endpoints were asked for the answer, and took the connection.
    pub fn answerers(&self) -> u32 {
        let asked = self
            .decision
            .attempts
            .iter()
            .filter(|attempt| attempt.role != Role::Prefill && attempt.asked().is_some());
        let took = asked.filter(|attempt| {
            attempt.outcome.is_some_and(|o| o.phase != Phase::Connect && o.cause != Cause::Stale)
        });
        u32::try_from(took.count()).unwrap_or(u32::MAX)
    }

    /// Whether decode learns where the prompt's blocks are.
    pub fn transferred(&mut self, told: bool) {
        self.decision.transfer = Some(told);
        if !told {
            self.leg_id = None;
        }
    }

    /// Its engine ended the event stream without saying that the answer is complete.
    pub fn unfinished(&mut self) {
        self.decision.unfinished = true;
    }

    /// The client gets a head with this status, whatever follows.
    pub fn begins(&mut self, status: u16) {
        self.decision.status = status;
    }

    /// The client gets its first byte now: of an answer that was kept.
    pub fn first_byte(&mut self) {
        self.decision.first_byte_us = Some(micros(self.arrived));
    }

    /// `x-request-id`.
    pub fn request_id(&self) -> &str {
        &self.facts.request.id
    }

    /// Ends the attempt under way: its lease, and its part in the record.
    pub fn end_attempt(&mut self, outcome: Outcome) {
        let Some(mut current) = self.current.take() else { return };
        if !current.dispatched {
            // chosen, and there was no time to ask it
            return self.release(&mut current, Outcome::UNUSED);
        }
        self.tried.insert(current.position);
        self.last_tried = Some(current.position);
        self.again = retry_reason(outcome).is_some_and(|reason| reason != "connect");
        if let (Phase::Connect, Cause::EngineBroken | Cause::Deadline, Some(socket)) =
            (outcome.phase, outcome.cause, current.socket)
        {
            self.rule.unreachable(current.position, socket);
        }
        self.warms(&current, outcome);
        self.release(&mut current, outcome);
        if let Some(dispatch) = self.dispatch(&current) {
            self.rule.ladder(current.role).on_complete(&Completion { dispatch, outcome });
        }
    }

    /// An engine that answered a generation has something to tell on its metrics page.
    fn warms(&self, current: &Current, outcome: Outcome) {
        if matches!(outcome, Outcome { cause: Cause::Complete, status: Some(200..=299), .. })
            && kvgate_engines::pd::generates(&self.facts.request.path)
            && let Some(endpoint) = self.rule.endpoints.get(current.position)
            && let Some(status) = self.world.scraper(endpoint.engine.id())
        {
            status.answered();
        }
    }

    /// Whoever was chosen ahead is not needed.
    pub fn end_reserved(&mut self) {
        if let Some(mut reserved) = self.reserved.take() {
            self.release(&mut reserved, Outcome::UNUSED);
        }
    }

    fn release(&mut self, current: &mut Current, outcome: Outcome) {
        let lease = current.lease.take();
        let failed = lease.as_ref().is_some_and(|lease| lease.sign(outcome).is_failure());
        if let Some(change) = lease.and_then(|lease| lease.end(outcome)) {
            health::changed(&self.rule, current.position, change, outcome);
        }
        if let Some(attempt) = self.decision.attempts.get_mut(current.attempt) {
            (attempt.outcome, attempt.failed) = (Some(outcome), failed);
            attempt.total_us = micros(current.asked);
        }
    }

    /// The request is over: `status` is what the client was sent, 0 if nothing. What is said later is not heard.
    pub fn finish(&mut self, status: u16, outcome: Option<Outcome>, error: Option<&'static str>) {
        if std::mem::replace(&mut self.finished, true) {
            return;
        }
        if let Some(outcome) = outcome {
            self.end_attempt(outcome);
        }
        self.end_reserved();
        let mut decision = std::mem::take(&mut self.decision);
        decision.outcome = outcome;
        (decision.status, decision.error) = (status, error);
        decision.total_us = micros(self.arrived);
        self.rule.counts.record(&decision);
        if self.rule.kv.is_none() {
            self.world.kv_misses.mode_off();
        }
        if tracing::enabled!(target: TARGET, tracing::Level::DEBUG) {
            let record = serde_json::to_string(&decision).unwrap_or_default();
            tracing::debug!(target: TARGET, "{record}");
        }
        self.world.decisions.push(Arc::new(decision));
    }

    /// Keeps what a replay needs of the prompt, where that is wanted. Not when a tier has waited for its tokens in vain.
    async fn record_prompt(&mut self) {
        let late = |attempt: &Attempt| attempt.steps.iter().any(|step| step.miss == Some(Miss::DEADLINE));
        if self.world.decisions.prompt_hashes > 0 && !self.decision.attempts.iter().any(late) {
            let wait = self.rule.config.timeouts.prepare;
            self.decision.prompt = prompt_record::of(&self.facts, &self.world, wait).await;
        }
    }

    /// Whoever is asked, as the record has it.
    fn winner(&self) -> Option<&Winner> {
        self.decision.attempts.get(self.current.as_ref()?.attempt)?.winner.as_ref()
    }

    fn dispatch(&self, current: &Current) -> Option<Dispatch<'_>> {
        Some(Dispatch {
            rule: &self.rule.config.name,
            role: current.role,
            endpoint: self.rule.endpoints.get(current.position)?,
            tier: current.tier,
            why: current.why,
            facts: &self.facts,
            now: Instant::now(),
        })
    }

    fn selection(&self, role: Role) -> Selection<'_> {
        Selection {
            rule: &self.rule.config.name,
            role,
            endpoints: &self.rule.endpoints,
            tried: &self.tried,
            facts: &self.facts,
            prefill: self.current.as_ref().map(|current| current.position),
            seed: self.seed.wrapping_add(self.decision.attempts.len() as u64),
            now: Instant::now(),
            timer: &TokioTimer,
        }
    }

    /// The id of both legs, for engines that find each other by it.
    fn pair_id(&self) -> Option<String> {
        let rule = &self.rule.config;
        let flow = rule.pair.as_ref()?.connector.flow;
        let endpoint = |current: &Option<Current>| rule.endpoints.get(current.as_ref()?.position);
        let (prefill, decode) = (endpoint(&self.current)?, endpoint(&self.reserved)?);
        flow.request_id(&prefill.transfer_address(), &decode.transfer_address(), unique())
    }

    /// Descends the ladder of this part.
    async fn descend(&mut self, role: Role) -> Result<Current, Refused> {
        let mut attempt = Attempt::default();
        let chosen = self.rule.ladder(role).choose(&self.selection(role), &mut attempt).await;
        let place = self.decision.attempts.len();
        self.decision.attempts.push(attempt);
        if place == 0 {
            self.decision.decided_us = micros(self.whole).max(1);
        }
        let chosen = chosen?;
        Ok(Current {
            attempt: place,
            role,
            position: chosen.endpoint,
            asked: Instant::now(),
            dispatched: false,
            socket: None,
            tier: chosen.tier,
            why: chosen.why,
            lease: Some(chosen.lease),
        })
    }

    /// Who was chosen ahead, if it may still be asked.
    fn take_reserved(&mut self) -> Option<Current> {
        let reserved = self.reserved.as_ref().filter(|_| self.role == Role::Decode)?;
        let stands = reserved.lease.as_ref().map(|lease| lease.availability(Instant::now()));
        if !matches!(stands, Some(Availability::Free | Availability::Draining)) {
            self.end_reserved();
        }
        self.reserved.take()
    }

    /// Whether the budget allows what is to be done, where it is not the request's first attempt.
    fn afforded(&mut self, by: fn(&Budget, Instant, BudgetConfig) -> bool) -> Result<(), Refused> {
        let limits = self.world.plan.load().gateway.retry_budget;
        if !self.again || by(&self.world.budget, Instant::now(), limits) {
            return Ok(());
        }
        self.decision.over_budget = true;
        Err(Refused::NoEndpoint)
    }

    fn end_unused(&mut self) {
        if let Some(mut unused) = self.current.take() {
            self.release(&mut unused, Outcome::UNUSED);
        }
    }

    /// Chooses who is to decode what the current endpoint prefills: a prompt is not computed for nobody.
    async fn reserve(&mut self) -> Result<(), Refused> {
        if self.role != Role::Prefill {
            return Ok(());
        }
        match self.descend(Role::Decode).await {
            Ok(reserved) => self.reserved = Some(reserved),
            Err(refused) => {
                self.end_unused();
                return Err(refused);
            }
        }
        Ok(())
    }
}

impl Route for Attempts {
    type Refused = Refused;

    async fn choose(&mut self) -> Result<HttpPeer, Refused> {
        if self.current.is_some() {
            // the proxy library tries again by itself when a pooled connection turns out dead
            self.end_attempt(STALE);
            self.forgive();
        }
        if self.role == Role::Prefill {
            // chosen for a prefill that failed
            self.end_reserved();
        }
        // nobody waits for a place to be told then that it is too much
        self.afforded(|budget, now, limits| budget.left(now, limits) > 0)?;
        let current = match self.take_reserved() {
            Some(reserved) => reserved,
            None => self.descend(self.role).await?,
        };
        let (position, first) = (current.position, current.attempt == 0);
        self.current = Some(current);
        self.reserve().await?;
        if let Err(refused) = self.afforded(Budget::retry) {
            self.end_reserved();
            self.end_unused();
            return Err(refused);
        }
        self.again = false;
        if self.role == Role::Prefill {
            self.leg_id = self.pair_id();
        }
        if first {
            self.record_prompt().await;
        }
        let peer = self.rule.peer(position).await;
        if let Some(current) = &mut self.current {
            (current.asked, current.dispatched) = (Instant::now(), true);
            current.socket = peer.as_ref().and_then(|peer| peer.address().as_inet().copied());
        }
        if let Some(dispatch) = self.current.as_ref().and_then(|current| self.dispatch(current)) {
            self.rule.ladder(dispatch.role).on_dispatch(&dispatch);
        }
        // a name that cannot be resolved is an engine that cannot be reached: nobody listens at port 0
        Ok(peer.unwrap_or_else(|| HttpPeer::new(("127.0.0.1", 0), false, String::new())))
    }

    fn address(&self, head: &mut RequestHeader) {
        let id = self.leg_id.as_deref().unwrap_or(&self.facts.request.id);
        if head.insert_header("x-request-id", value(id)).is_err() {
            tracing::debug!(id, "an id that cannot be sent");
        }
    }

    fn answered(&mut self, head: &mut ResponseHeader) {
        if let Some(current) = &mut self.current
            && let Some(lease) = &mut current.lease
        {
            health::answered(lease, head, self.rule.config.breaker.cooling);
        }
        if let Some(current) = &self.current {
            if let Some(dispatch) = self.dispatch(current) {
                self.rule.ladder(dispatch.role).on_answer(&dispatch, &head.headers);
            }
            if let Some(attempt) = self.decision.attempts.get_mut(current.attempt) {
                attempt.first_byte_us = Some(micros(current.asked));
            }
        }
        // what a prefill answers is not the answer
        self.decision.first_byte_us = (self.role != Role::Prefill).then(|| micros(self.arrived));
        let mut add = |name: &'static str, text: &str| {
            if head.insert_header(name, value(text)).is_err() {
                tracing::debug!(name, "a header that cannot be sent");
            }
        };
        add("x-request-id", &self.facts.request.id);
        if let Some(hsts) = &self.hsts {
            add("strict-transport-security", hsts);
        }
        if self.exposes
            && let Some(winner) = self.winner()
        {
            add("x-kvgate-endpoint", &winner.address);
            add("x-kvgate-tier", winner.tier);
        }
        if self.exposes
            && let Some(prefill) = self.decision.served(Role::Prefill)
        {
            add("x-kvgate-prefill-endpoint", &prefill.address);
            add("x-kvgate-prefill-tier", prefill.tier);
        }
        if self.explains {
            add("x-kvgate-decision", &explained(&self.decision));
        }
    }

    fn ended(&mut self, status: u16) {
        self.end_attempt(Outcome::complete(status));
    }

    fn failed(&mut self, error: &LegError) {
        let distrusts =
            |e: &&BError| matches!(e.etype(), ErrorType::TLSHandshakeFailure | ErrorType::InvalidCert);
        if let (Some(current), Some(source)) = (&self.current, error.source.as_ref().filter(distrusts)) {
            self.rule.distrusted(current.position, source);
        }
        self.end_attempt(error.outcome());
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

impl Drop for Attempts {
    /// Whoever did not come to an end in order (a panic, the end of the process) is recorded all the same.
    fn drop(&mut self) {
        let stopped = self.world.life.stage() == Stage::Ending;
        let status = Some(self.decision.status).filter(|status| *status > 0);
        let outcome = Outcome {
            phase: if status.is_some() { Phase::Answer } else { Phase::Connect },
            status,
            cause: if stopped { Cause::Stopped } else { Cause::Dropped },
        };
        self.finish(status.unwrap_or(0), Some(outcome), None);
    }
}
