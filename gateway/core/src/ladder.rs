//! The ladder: tiers in order, until one decides.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{Either, select};
use http::HeaderMap;

use crate::BoxFuture;
use crate::decision::{Attempt, LeftOut, Step, Winner};
use crate::engine::{Availability, Engine};
use crate::facts::Facts;
use crate::lease::Lease;
use crate::mask::Mask;
use crate::metrics::Counter;
use crate::min_load::MinLoad;
use crate::queue::Grant;
use crate::random::Random;
use crate::tier::{
    Candidate, Choice, Completion, Dispatch, Endpoint, Hold, Miss, Refusal, Role, Routing, Tier, Verdict,
    WaitEnd,
};

/// How often a choice lost to concurrent requests is made again before load alone decides.
const RACES: u32 = 64;
/// Candidates kept in the record of an attempt.
const RECORDED: usize = 32;

/// How often a request that waits looks whether there is still something to wait for.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// Sleeps, and tells how long: all that the ladder needs of a runtime.
pub trait Timer: Send + Sync {
    /// The time, by the clock that [`Timer::sleep`] goes by.
    fn now(&self) -> Instant {
        Instant::now()
    }

    /// Ends after `duration`.
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()>;
}

/// A tier in its place in a ladder, with what counts its misses.
pub struct Rung {
    /// The tier's name.
    pub name: &'static str,
    /// The tier.
    pub tier: Arc<dyn Tier>,
    /// A counter for every miss it may give.
    pub misses: Vec<(&'static str, Arc<Counter>)>,
    /// Counts its choices.
    pub picks: Arc<Counter>,
}

impl Rung {
    fn missed(&self, miss: Miss) {
        self.tier.on_miss(miss);
        if let Some((_, counter)) = self.misses.iter().find(|(reason, _)| *reason == miss.0) {
            counter.inc();
        }
    }
}

/// The ordered tiers of a rule. Ends with an implicit `min-load`.
pub struct Ladder {
    rungs: Vec<Rung>,
    last: MinLoad,
    prepare: Duration,
}

/// What a choice is made for.
pub struct Selection<'a> {
    /// The rule's name.
    pub rule: &'a str,
    /// The role sought.
    pub role: Role,
    /// The rule's endpoints.
    pub endpoints: &'a [Endpoint],
    /// Those already tried in vain.
    pub tried: &'a Mask,
    /// What is known of the request.
    pub facts: &'a Facts,
    /// Where the prefill runs, when decode is chosen.
    pub prefill: Option<usize>,
    /// Seeds the tiers' randomness.
    pub seed: u64,
    /// The time.
    pub now: Instant,
    /// Sleeps.
    pub timer: &'a dyn Timer,
}

/// A choice with its claim.
#[derive(Debug)]
pub struct Chosen {
    /// The position in the rule's endpoints.
    pub endpoint: usize,
    /// The tier that chose.
    pub tier: &'static str,
    /// Why, if the tier said so.
    pub why: Option<&'static str>,
    /// The claim on the engine.
    pub lease: Lease,
}

/// No choice was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// Nobody is eligible.
    NoEndpoint,
    /// A tier answers the client.
    Tier(Refusal),
}

enum Descent {
    /// With the cap that holds whichever tier chose.
    Pick(&'static str, Choice, Option<u64>),
    Hold(usize, Hold),
    Refused(Refused),
}

impl Ladder {
    /// A ladder of these tiers; each may take `prepare` to get its facts.
    pub fn new(rungs: Vec<Rung>, prepare: Duration) -> Self {
        Self { rungs, last: MinLoad::default(), prepare }
    }

    /// Whether a tier of this name is in it.
    pub fn has(&self, name: &str) -> bool {
        self.rungs.iter().any(|rung| rung.name == name)
    }

    /// Chooses an endpoint and claims a place on it. What happened on the way is written to `record`.
    ///
    /// # Errors
    /// When nobody is eligible, or a tier refuses.
    pub async fn choose(&self, selection: &Selection<'_>, record: &mut Attempt) -> Result<Chosen, Refused> {
        record.role = selection.role;
        let (mut grant, mut now, mut waited): (Option<Grant>, _, _) = (None, selection.now, Duration::ZERO);
        loop {
            // a place on an engine that failed since, say, is nobody's
            grant = grant.filter(|grant| grant.lease().availability(now) == Availability::Free);
            let granted = grant.as_ref().and_then(|g| position(selection, g.lease().engine()?));
            let (tier, choice, cap) = match self.descend(selection, granted, now, record).await {
                Descent::Pick(tier, choice, cap) => (tier, choice, cap),
                Descent::Refused(refused) => {
                    self.count(record);
                    return Err(refused);
                }
                Descent::Hold(rung, hold) => {
                    // whoever waits holds nothing others wait for
                    drop(grant.take());
                    match self.wait(rung, hold, selection, &mut waited).await {
                        Ok(slot) => grant = slot,
                        Err(refused) => {
                            record.waited_us = micros(waited);
                            self.count(record);
                            return Err(refused);
                        }
                    }
                    (now, record.waited_us) = (selection.timer.now(), micros(waited));
                    continue;
                }
            };
            let Some(endpoint) = selection.endpoints.get(choice.endpoint) else {
                return Err(Refused::NoEndpoint);
            };
            let limit = match cap {
                Some(cap) => Some(choice.limit.map_or(cap, |limit| limit.min(cap))),
                None => choice.limit,
            };
            let lease = match grant.take() {
                Some(slot) if granted == Some(choice.endpoint) => Some(slot.into_lease()),
                _ => Lease::try_take(&endpoint.engine, limit),
            };
            if let Some(lease) = lease {
                record.winner = Some(Winner {
                    endpoint: endpoint.index,
                    address: endpoint.engine.address().to_owned(),
                    tier,
                    why: choice.why,
                });
                self.count(record);
                return Ok(Chosen { endpoint: choice.endpoint, tier, why: choice.why, lease });
            }
            record.raced += 1;
        }
    }

    /// Waits for the place that a tier wants the request to have; adds to what it has waited.
    async fn wait(
        &self,
        rung: usize,
        hold: Hold,
        selection: &Selection<'_>,
        waited: &mut Duration,
    ) -> Result<Option<Grant>, Refused> {
        let (start, mut ticket) = (selection.timer.now(), hold.ticket);
        let mut left = hold.wait.saturating_sub(*waited);
        let end = loop {
            if left.is_zero() {
                break Err((WaitEnd::Late, Refused::Tier(hold.late)));
            }
            let nap = left.min(LOOK_AGAIN);
            match select(&mut ticket, selection.timer.sleep(nap)).await {
                Either::Left((grant, _)) => break Ok(grant),
                Either::Right(_) => left -= nap,
            }
            let (now, mut all) = (selection.timer.now(), selection.endpoints.iter().enumerate());
            if !all.any(|(at, e)| sought(selection, at, e) && e.engine.takes_new(now)) {
                // unless its own place is the last: a half-open breaker lets nobody else through
                break (&mut ticket).now_or_never().ok_or((WaitEnd::NoEndpoint, Refused::NoEndpoint));
            }
            if !ticket.is_of_use(now) {
                // those it may be served by are out of service, and others are not: the tiers are to choose anew
                break Ok(None);
            }
            ticket.look_again();
        };
        let this = selection.timer.now().saturating_duration_since(start);
        *waited += this;
        if let Some(rung) = self.rungs.get(rung) {
            let how = end.as_ref().map_or_else(|(how, _)| *how, |_| WaitEnd::Granted);
            rung.tier.on_waited(selection.role, this, how);
        }
        end.map_err(|(_, refused)| refused)
    }

    /// Counts what the tiers said, once it stands: choices lost to a race are not counted.
    fn count(&self, record: &Attempt) {
        for step in &record.steps {
            let Some(rung) = self.rungs.iter().find(|rung| rung.name == step.tier) else { continue };
            match step.miss {
                Some(miss) => rung.missed(miss),
                None if record.winner.is_some() => rung.picks.inc(),
                None => {} // it refused
            }
        }
    }

    /// Asks the tiers in order.
    async fn descend(
        &self,
        selection: &Selection<'_>,
        granted: Option<usize>,
        now: Instant,
        record: &mut Attempt,
    ) -> Descent {
        let (mut routing, left_out) = routing(selection, granted, now);
        record.left_out = left_out;
        record.steps.clear();
        record.candidates.clear();
        if routing.eligible.is_empty() && routing.pinnable.is_empty() {
            return Descent::Refused(Refused::NoEndpoint);
        }
        let load_alone = record.raced > RACES;
        for (at, rung) in self.rungs.iter().enumerate() {
            routing.candidates.clear();
            let verdict = match self.ready(rung, selection).await {
                Ok(()) => rung.tier.decide(&mut routing),
                Err(miss) => Verdict::Pass(miss),
            };
            let miss = match verdict {
                Verdict::Pass(miss) => miss,
                Verdict::Narrow(mut mask, miss) => {
                    mask.intersect(&routing.eligible);
                    if !mask.is_empty() {
                        routing.eligible = mask;
                    }
                    miss
                }
                // the others keep their say
                Verdict::Pick(_) if load_alone => continue,
                Verdict::Pick(choice) if allowed(&routing, choice.endpoint) => {
                    record.steps.push(Step { tier: rung.name, miss: None });
                    record.candidates = numbered(routing.candidates, selection, Some(choice.endpoint));
                    return Descent::Pick(rung.name, choice, routing.cap);
                }
                Verdict::Pick(_) => Miss("not_eligible"),
                Verdict::Hold(hold) => {
                    record.steps.push(Step { tier: rung.name, miss: None });
                    return Descent::Hold(at, hold);
                }
                Verdict::Reject(refusal) => {
                    record.steps.push(Step { tier: rung.name, miss: None });
                    return Descent::Refused(Refused::Tier(refusal));
                }
            };
            if !routing.candidates.is_empty() {
                record.candidates = numbered(std::mem::take(&mut routing.candidates), selection, None);
            }
            record.steps.push(Step { tier: rung.name, miss: Some(miss) });
        }
        match self.last.decide(&mut routing) {
            Verdict::Pick(choice) => {
                record.steps.push(Step { tier: "min-load", miss: None });
                if record.candidates.is_empty() {
                    record.candidates = numbered(routing.candidates, selection, Some(choice.endpoint));
                }
                Descent::Pick("min-load", choice, routing.cap)
            }
            _ => Descent::Refused(Refused::NoEndpoint),
        }
    }

    /// Waits for the tier's facts, but not for ever.
    async fn ready(&self, rung: &Rung, selection: &Selection<'_>) -> Result<(), Miss> {
        let Some(facts) = rung.tier.prepare(selection.facts) else { return Ok(()) };
        match select(facts, selection.timer.sleep(self.prepare)).await {
            Either::Left((ready, _)) => ready,
            Either::Right(_) => Err(Miss::DEADLINE),
        }
    }

    /// Tells every tier that a chosen endpoint is about to be asked.
    pub fn on_dispatch(&self, dispatch: &Dispatch<'_>) {
        self.rungs.iter().for_each(|rung| rung.tier.on_dispatch(dispatch));
    }

    /// Tells every tier that the endpoint answers, with these headers.
    pub fn on_answer(&self, dispatch: &Dispatch<'_>, headers: &HeaderMap) {
        self.rungs.iter().for_each(|rung| rung.tier.on_answer(dispatch, headers));
    }

    /// Tells every tier that an attempt is over.
    pub fn on_complete(&self, completion: &Completion<'_>) {
        self.rungs.iter().for_each(|rung| rung.tier.on_complete(completion));
    }
}

fn sought(selection: &Selection<'_>, at: usize, endpoint: &Endpoint) -> bool {
    endpoint.role == selection.role && !selection.tried.contains(at)
}

fn routing<'a>(selection: &Selection<'a>, granted: Option<usize>, now: Instant) -> (Routing<'a>, LeftOut) {
    let (mut eligible, mut pinnable, mut left_out) = (Mask::none(), Mask::none(), LeftOut::default());
    for (at, endpoint) in selection.endpoints.iter().enumerate().filter(|(_, e)| e.role == selection.role) {
        if selection.tried.contains(at) {
            left_out.tried += 1;
            continue;
        }
        let availability = match granted {
            // its place is its own: the breaker may let nobody else through
            Some(granted) if granted == at => Availability::Free,
            _ => endpoint.engine.availability(now),
        };
        left_out.count(availability);
        if matches!(availability, Availability::Free | Availability::Draining) {
            pinnable.insert(at);
        }
        if availability == Availability::Free {
            eligible.insert(at);
        }
    }
    let routing = Routing {
        rule: selection.rule,
        role: selection.role,
        endpoints: selection.endpoints,
        eligible,
        pinnable,
        tried: selection.tried,
        cap: None,
        facts: selection.facts,
        now,
        random: Random::new(selection.seed),
        prefill: selection.prefill,
        granted,
        candidates: Vec::new(),
    };
    (routing, left_out)
}

/// Candidates as the record holds them: by `ep_idx`, as everything an operator sees; the winner, then the best.
fn numbered(
    mut candidates: Vec<Candidate>,
    selection: &Selection<'_>,
    winner: Option<usize>,
) -> Vec<Candidate> {
    candidates.sort_by_key(|c| (Some(c.endpoint) != winner, Reverse(c.overlap), c.load, c.endpoint));
    candidates.truncate(RECORDED);
    for candidate in &mut candidates {
        let endpoint = selection.endpoints.get(candidate.endpoint);
        candidate.endpoint = endpoint.map_or(candidate.endpoint, |e| e.index);
    }
    candidates
}

fn allowed(routing: &Routing<'_>, endpoint: usize) -> bool {
    routing.eligible.contains(endpoint) || routing.pinnable.contains(endpoint)
}

fn position(selection: &Selection<'_>, engine: &Arc<Engine>) -> Option<usize> {
    selection.endpoints.iter().position(|e| Arc::ptr_eq(&e.engine, engine))
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
