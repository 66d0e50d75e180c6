//! When an engine is left alone: after failures in a row, and while it asks for it.
//!
//! A circuit breaker after Nygard, Release It!, 2007: closed, it lets everything through and counts failures in a row;
//! open, it lets nothing through for a while; then it is half open, and lets a few real requests through, whose ends
//! decide. Looking at it never changes it: the places of a half-open breaker are claimed with the lease, and given back
//! by its end.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

/// How long an engine that fails now and then is not spoken of again.
const SAY_AGAIN: Duration = Duration::from_secs(30);
/// How long a request that was let through to see keeps the next one waiting, at least.
const TRIAL: Duration = Duration::from_secs(10);

/// When a breaker opens, and how it closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerPolicy {
    /// Failures in a row that open it: connections not taken, answers broken off or stalled. 0: they never do.
    pub failures: u32,
    /// Answers with a 5xx in a row that open it; 0: they never do, and any answer closes it when it is half open. Where both kinds come, each uses up its share: half
    /// of the one and half of the other open it too.
    pub origin_errors: u32,
    /// How long it is open before it is half open.
    pub open_for: Duration,
    /// Requests that are let through at once while it is half open; 1 or more. One that has gone on for longer than
    /// `open_for`, and for 10 seconds, no longer counts among them: a long answer does not keep its engine out of service.
    pub half_open: u32,
    /// How long an engine that is back takes to have its whole share; zero is at once.
    pub slow_start: Duration,
}

impl BreakerPolicy {
    /// It never opens.
    pub const OFF: Self = Self {
        failures: 0,
        origin_errors: 0,
        open_for: Duration::ZERO,
        half_open: 1,
        slow_start: Duration::ZERO,
    };

    /// What holds for an engine of two rules: of every part the stricter.
    #[must_use]
    pub fn strictest(self, other: Self) -> Self {
        let fewest = |a: u32, b: u32| if a == 0 || b == 0 { a.max(b) } else { a.min(b) };
        Self {
            failures: fewest(self.failures, other.failures),
            origin_errors: fewest(self.origin_errors, other.origin_errors),
            open_for: self.open_for.max(other.open_for),
            half_open: self.half_open.min(other.half_open),
            slow_start: self.slow_start.max(other.slow_start),
        }
    }

    /// Whether so many failures and 5xx in a row are too many.
    fn opens(&self, broken: u32, errors: u32) -> bool {
        let [broken, errors] = [broken, errors].map(u64::from);
        match [self.failures, self.origin_errors].map(u64::from) {
            [0, 0] => false,
            [most, 0] => broken >= most,
            [0, most] => errors >= most,
            [failures, origin] => broken * origin + errors * failures >= failures * origin,
        }
    }
}

/// What the end of a request says of its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// It answered, and did not say no.
    Success,
    /// It answered with a 4xx, or asked for a pause: it is there, and whether it is well remains to be seen.
    Rejected,
    /// Nothing: the client left, or it was our fault.
    Neutral,
    /// It took no connection, broke off, or stalled.
    Broken,
    /// It answered with a 5xx.
    OriginError,
}

impl Sign {
    /// Whether the engine is to blame: it broke off, stalled, or answered with a 5xx.
    pub fn is_failure(self) -> bool {
        matches!(self, Self::Broken | Self::OriginError)
    }
}

/// Where a breaker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BreakerState {
    /// Everything is let through.
    Closed,
    /// Nothing is let through.
    Open,
    /// A few are let through, to see.
    HalfOpen,
}

/// What the end of a request changed: worth a line in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The first failure after success; told at most twice a minute.
    Failing,
    /// Too many failures in a row: nothing is let through from now on.
    Opened,
    /// A request that was let through to see failed: open again.
    Reopened,
    /// A request that was let through to see succeeded: as before.
    Closed,
}

/// The breaker of one engine, and how long it wants to be left alone.
#[derive(Debug)]
pub(crate) struct Breaker {
    /// Closed, and nothing is remembered that a success would change or that a reader must know. Saves the lock.
    calm: AtomicBool,
    /// Times it opened or closed.
    flips: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    policy: BreakerPolicy,
    /// Failures in a row, and 5xx.
    broken: u32,
    errors: u32,
    opened: Option<Opened>,
    /// Tells requests let through since it last opened from those before.
    round: u64,
    /// When it was back.
    back: Option<Instant>,
    /// Asked to be left alone, and by which status.
    cooling: Option<(Instant, u16)>,
    said: Option<Instant>,
}

#[derive(Debug)]
struct Opened {
    until: Instant,
    /// When the requests under way began that were let through to see.
    trials: Vec<Instant>,
}

/// Let through: as one of the few while the breaker is half open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pass(Option<Trial>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Trial {
    round: u64,
    began: Instant,
}

impl Default for Breaker {
    fn default() -> Self {
        Self {
            calm: AtomicBool::new(true),
            flips: AtomicU64::new(0),
            state: Mutex::new(State {
                policy: BreakerPolicy::OFF,
                broken: 0,
                errors: 0,
                opened: None,
                round: 0,
                back: None,
                cooling: None,
                said: None,
            }),
        }
    }
}

impl Breaker {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks, and finds nothing where there is nothing to be found.
    fn look<T>(&self, calm: T, look: impl FnOnce(&State) -> T) -> T {
        if self.calm.load(Ordering::Acquire) { calm } else { look(&self.lock()) }
    }

    fn change<T>(&self, now: Instant, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let done = change(&mut state);
        self.calm.store(state.is_calm(now), Ordering::Release);
        done
    }

    pub fn policy(&self) -> BreakerPolicy {
        self.lock().policy
    }

    /// From now on this holds. What was counted so far stands, but where nothing opens it any more: then it closes, and
    /// whether it had to is told.
    pub fn set_policy(&self, policy: BreakerPolicy, now: Instant) -> bool {
        let closed = self.change(now, |state| {
            state.policy = policy;
            let closes = (policy.failures, policy.origin_errors) == (0, 0) && state.opened.is_some();
            if closes {
                state.close(now);
            }
            closes
        });
        self.flips.fetch_add(u64::from(closed), Ordering::Relaxed);
        closed
    }

    pub fn state(&self, now: Instant) -> BreakerState {
        self.look(BreakerState::Closed, |state| match &state.opened {
            None => BreakerState::Closed,
            Some(opened) if now < opened.until => BreakerState::Open,
            Some(_) => BreakerState::HalfOpen,
        })
    }

    /// Failures in a row, 5xx among them: those that opened it, while it is not closed.
    pub fn failures(&self) -> u32 {
        self.look(0, |state| state.broken.saturating_add(state.errors))
    }

    pub fn flips(&self) -> u64 {
        self.flips.load(Ordering::Relaxed)
    }

    /// Whether a request would be let through.
    pub fn lets_through(&self, now: Instant) -> bool {
        self.look(true, |state| state.lets_through(now))
    }

    /// Whether a request that was let through still is: it has not opened since.
    pub fn honours(&self, pass: Pass) -> bool {
        self.look(true, |state| state.honours(pass))
    }

    /// Until when the engine asked to be left alone, if that is to come, and by which status.
    pub fn cooling(&self, now: Instant) -> Option<(Instant, u16)> {
        self.look(None, |state| state.cooling.filter(|(until, _)| now < *until))
    }

    /// The engine is left alone until then; never shorter than it was to be.
    pub fn cool(&self, until: Instant, status: u16, now: Instant) {
        self.change(now, |state| {
            if state.cooling.is_none_or(|(before, _)| before < until) {
                state.cooling = Some((until, status));
            }
        });
    }

    /// When requests may be let through that are not now, as far as that is known.
    pub fn returns(&self, now: Instant) -> Option<Instant> {
        let of = |state: &State| {
            let opened = state.opened.as_ref().map(|opened| opened.until);
            let cooling = state.cooling.map(|(until, _)| until);
            opened.max(cooling).filter(|until| now < *until)
        };
        self.look(None, of)
    }

    /// How much of its share the engine has, in percent, 1 at least: all of it but soon after it was back.
    pub fn share_pct(&self, now: Instant) -> u32 {
        self.look(100, |state| state.share_pct(now))
    }

    /// The engine is back, for another reason than this breaker's closing.
    pub fn back(&self, now: Instant) {
        self.change(now, |state| state.back = Some(now));
    }

    /// A request wants through.
    pub fn enter(&self, now: Instant) -> Option<Pass> {
        if self.calm.load(Ordering::Acquire) {
            return Some(Pass(None));
        }
        let mut state = self.lock();
        if !state.lets_through(now) {
            return None;
        }
        let round = state.round;
        let trial = state.opened.as_mut().map(|opened| {
            opened.trials.push(now);
            Trial { round, began: now }
        });
        Some(Pass(trial))
    }

    /// A request that was let through is over.
    pub fn leave(&self, pass: Pass, sign: Sign, now: Instant) -> Option<Change> {
        let idle = pass.0.is_none() && matches!(sign, Sign::Success | Sign::Rejected | Sign::Neutral);
        if idle && self.calm.load(Ordering::Acquire) {
            return None;
        }
        let change = self.change(now, |state| state.leave(pass, sign, now));
        if matches!(change, Some(Change::Opened | Change::Reopened | Change::Closed)) {
            self.flips.fetch_add(1, Ordering::Relaxed);
        }
        change
    }
}

impl State {
    fn is_calm(&self, now: Instant) -> bool {
        self.opened.is_none()
            && (self.broken, self.errors) == (0, 0)
            && self.cooling.is_none_or(|(until, _)| until <= now)
            && self.share_pct(now) == 100
    }

    fn lets_through(&self, now: Instant) -> bool {
        let Some(opened) = &self.opened else { return true };
        let hold = self.policy.open_for.max(TRIAL);
        let recent = opened.trials.iter().filter(|began| now.saturating_duration_since(**began) < hold);
        now >= opened.until && recent.count() < self.policy.half_open.max(1) as usize
    }

    fn honours(&self, pass: Pass) -> bool {
        self.opened.is_none() || pass.0.is_some_and(|trial| trial.round == self.round)
    }

    fn share_pct(&self, now: Instant) -> u32 {
        let Some(back) = self.back else { return 100 };
        let (since, whole) =
            (now.saturating_duration_since(back).as_millis(), self.policy.slow_start.as_millis());
        if since >= whole {
            return 100;
        }
        u32::try_from(since * 100 / whole).unwrap_or(100).max(1)
    }

    fn leave(&mut self, pass: Pass, sign: Sign, now: Instant) -> Option<Change> {
        let failed = match sign {
            Sign::Broken => true,
            Sign::OriginError => self.policy.origin_errors > 0,
            Sign::Success | Sign::Rejected | Sign::Neutral => false,
        };
        // where its answers are not judged, to be reached is all that is asked of it
        let reached = self.policy.origin_errors == 0 && matches!(sign, Sign::Rejected | Sign::OriginError);
        if let Some(opened) = &mut self.opened {
            // what began before it opened last says nothing of how the engine is since
            let trial = pass.0.filter(|trial| trial.round == self.round)?;
            if let Some(at) = opened.trials.iter().position(|began| *began == trial.began) {
                opened.trials.swap_remove(at);
            }
            if sign == Sign::Success || reached {
                self.close(now);
                return Some(Change::Closed);
            }
            return failed.then(|| {
                self.open(now);
                Change::Reopened
            });
        }
        if sign == Sign::Success {
            (self.broken, self.errors) = (0, 0);
        }
        if !failed {
            return None;
        }
        let first = (self.broken, self.errors) == (0, 0);
        let counter = if sign == Sign::Broken { &mut self.broken } else { &mut self.errors };
        *counter = counter.saturating_add(1);
        if self.policy.opens(self.broken, self.errors) {
            self.open(now);
            return Some(Change::Opened);
        }
        let silent = self.said.is_none_or(|said| now.saturating_duration_since(said) >= SAY_AGAIN);
        (first && silent).then(|| {
            self.said = Some(now);
            Change::Failing
        })
    }

    fn open(&mut self, now: Instant) {
        self.round += 1;
        self.opened = Some(Opened { until: now + self.policy.open_for, trials: Vec::new() });
    }

    fn close(&mut self, now: Instant) {
        (self.opened, self.back) = (None, Some(now));
        (self.broken, self.errors) = (0, 0);
    }
}

#[cfg(test)]
mod tests;
