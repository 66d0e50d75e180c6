//! The in-flight claim on an engine.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use crate::breaker::{Change, Pass, Sign};
use crate::engine::{Admin, Availability, Engine};

/// How far a request had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// No connection yet.
    Connect,
    /// Sending the request.
    Upload,
    /// Waiting for the answer's head.
    FirstByte,
    /// Passing the answer on.
    Answer,
}

/// Why a request on an engine ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// The answer was passed on whole.
    Complete,
    /// The client left.
    ClientGone,
    /// The engine refused, closed, reset, or did not speak HTTP.
    EngineBroken,
    /// A limit of the engine's ran out: it did not take the connection or the request, did not begin, or stalled.
    Deadline,
    /// The time of the whole request ran out.
    OutOfTime,
    /// A kept connection broke at once, as one does that the engine had given up, and the request could not be sent again.
    Stale,
    /// The gateway had no descriptor, port or memory left to connect with.
    Exhausted,
    /// The engine answered with a status that counts as its failure.
    Refused,
    /// Decode could not fetch the prompt's blocks: whose fault that is, the prefill's, the network's or its own, it does
    /// not say.
    BlocksLost,
    /// The answer was longer than is kept: what the client asked for makes it so.
    TooLarge,
    /// It was chosen ahead of its turn, for decode, and never asked.
    Unused,
    /// The gateway stopped, and the request's time was over.
    Stopped,
    /// The claim was dropped without a word: the request's task ended early.
    Dropped,
}

/// For the log: the words of records and of the admin surface.
macro_rules! shown_as_serialized {
    ($($kind:ty),*) => {$(
        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.serialize(f)
            }
        }
    )*};
}
shown_as_serialized!(Phase, Cause, Admin);

/// How a request on an engine ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// How far it had come.
    pub phase: Phase,
    /// The answer's status, if one arrived.
    pub status: Option<u16>,
    /// Why it ended.
    pub cause: Cause,
}

impl Outcome {
    /// The request never came to its turn.
    pub const UNUSED: Self = Self { phase: Phase::Connect, status: None, cause: Cause::Unused };

    /// The answer was passed on whole.
    pub fn complete(status: u16) -> Self {
        Self { phase: Phase::Answer, status: Some(status), cause: Cause::Complete }
    }

    /// What it says of the engine. An engine that lets the client wait beyond `first_byte` counts as broken: those whose
    /// queue is long answer others meanwhile, and every success starts the count anew; one that hangs does not.
    pub fn sign(&self) -> Sign {
        match (self.cause, self.status) {
            (Cause::EngineBroken | Cause::Deadline, _) => Sign::Broken,
            (Cause::Complete | Cause::Refused, Some(500..)) => Sign::OriginError,
            (Cause::Complete, Some(..400)) => Sign::Success,
            (Cause::Complete | Cause::Refused, Some(400..500)) => Sign::Rejected,
            _ => Sign::Neutral,
        }
    }

    /// Whether the engine is to blame: it broke off, stalled, or answered with a 5xx.
    pub fn engine_failed(&self) -> bool {
        self.sign().is_failure()
    }
}

/// One request's claim on an engine, counted in its in-flight from the choice until [`Lease::end`], or
/// until it is dropped. The freed slot goes to whoever has waited longest for it in the engine's queues.
#[derive(Debug)]
pub struct Lease {
    held: Option<(Arc<Engine>, Pass)>,
    cooled: bool,
}

impl Lease {
    /// Claims a place on `engine` if fewer than `limit` are taken, and its breaker lets the request through; `None` as
    /// limit is no limit. Exact under concurrency.
    pub fn try_take(engine: &Arc<Engine>, limit: Option<u64>) -> Option<Self> {
        let pass = engine.try_enter(limit)?;
        Some(Self { held: Some((engine.clone(), pass)), cooled: false })
    }

    /// The engine.
    pub fn engine(&self) -> Option<&Arc<Engine>> {
        self.held.as_ref().map(|(engine, _)| engine)
    }

    /// Whether the request may still be sent to the engine, where it has not been yet, and if not, why. Unlike others it
    /// has its place of a half-open breaker already, but none of one that has opened since.
    pub fn availability(&self, now: Instant) -> Availability {
        let gone = Availability::Disabled;
        self.held.as_ref().map_or(gone, |(engine, pass)| engine.availability_for(*pass, now))
    }

    /// The engine answered with this status, and with the wish to be left alone until then. That is no failure of its,
    /// however the request ends.
    pub fn cool(&mut self, until: Instant, status: u16) {
        if let Some((engine, _)) = &self.held {
            engine.cool(until, status);
            self.cooled = true;
        }
    }

    /// What the request says of the engine if it ends like this.
    pub fn sign(&self, outcome: Outcome) -> Sign {
        match outcome.sign() {
            Sign::OriginError if self.cooled => Sign::Rejected,
            Sign::Broken if self.cooled => Sign::Neutral,
            sign => sign,
        }
    }

    /// Ends the claim. The engine's breaker hears of it: what that changed is told.
    pub fn end(mut self, outcome: Outcome) -> Option<Change> {
        let sign = self.sign(outcome);
        self.finish(sign)
    }

    fn finish(&mut self, sign: Sign) -> Option<Change> {
        let (engine, pass) = self.held.take()?;
        let change = engine.leave(pass, sign);
        let mut queues = engine.queues();
        if queues.len() > 1 {
            queues.sort_by_cached_key(|queue| queue.oldest());
        }
        queues.iter().for_each(|queue| queue.serve(&engine));
        change
    }

    /// Gives the place back without serving those who wait for it.
    pub(crate) fn undo(mut self) {
        if let Some((engine, pass)) = self.held.take() {
            engine.leave(pass, Sign::Neutral);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.finish(Sign::Neutral);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::breaker::{BreakerPolicy, BreakerState};
    use crate::engine::{Engines, Identity};
    use std::time::Duration;

    #[test]
    fn logs_have_the_words_of_records() {
        assert_eq!(
            format!("{} {} {}", Phase::FirstByte, Cause::EngineBroken, Admin::Draining),
            "first-byte engine-broken draining"
        );
    }

    #[test]
    fn what_an_ending_says_of_the_engine() {
        for (cause, status, sign) in [
            (Cause::Complete, Some(200), Sign::Success),
            (Cause::Complete, Some(304), Sign::Success),
            (Cause::Complete, Some(400), Sign::Rejected),
            (Cause::Complete, Some(429), Sign::Rejected),
            (Cause::Complete, Some(500), Sign::OriginError),
            (Cause::Refused, Some(503), Sign::OriginError),
            (Cause::Refused, Some(429), Sign::Rejected),
            (Cause::EngineBroken, None, Sign::Broken),
            (Cause::EngineBroken, Some(200), Sign::Broken),
            (Cause::Deadline, Some(200), Sign::Broken),
            (Cause::Deadline, None, Sign::Broken),
            (Cause::OutOfTime, Some(200), Sign::Neutral),
            (Cause::Stale, None, Sign::Neutral),
            (Cause::Exhausted, None, Sign::Neutral),
            (Cause::ClientGone, Some(500), Sign::Neutral),
            (Cause::BlocksLost, Some(500), Sign::Neutral),
            (Cause::TooLarge, Some(200), Sign::Neutral),
            (Cause::Unused, None, Sign::Neutral),
            (Cause::Dropped, None, Sign::Neutral),
        ] {
            assert_eq!(Outcome { phase: Phase::Answer, status, cause }.sign(), sign, "{cause:?} {status:?}");
        }
    }

    #[test]
    fn a_place_of_a_half_open_breaker_comes_back_with_its_lease() {
        let engine = Engines::default().get(&Identity { address: "a:1".into(), tls: None });
        let policy = BreakerPolicy { failures: 1, origin_errors: 1, ..BreakerPolicy::OFF };
        engine.set_breaker_policy(policy);
        let broken = Outcome { phase: Phase::Connect, status: None, cause: Cause::EngineBroken };
        let open = Lease::try_take(&engine, None).unwrap().end(broken);
        assert_eq!((open, engine.breaker(Instant::now())), (Some(Change::Opened), BreakerState::HalfOpen));
        let trial = Lease::try_take(&engine, None).unwrap();
        assert!(Lease::try_take(&engine, None).is_none() && !engine.takes_new(Instant::now()));
        drop(trial);
        let full = Lease::try_take(&engine, Some(0));
        assert!(full.is_none() && engine.takes_new(Instant::now()), "its place is free again");
        Lease::try_take(&engine, None).unwrap().undo();
        let closed = Lease::try_take(&engine, None).unwrap().end(Outcome::complete(200));
        assert_eq!((closed, engine.breaker(Instant::now())), (Some(Change::Closed), BreakerState::Closed));
    }

    #[test]
    fn a_place_stands_while_its_engine_is_as_it_was() {
        let engine = Engines::default().get(&Identity { address: "a:1".into(), tls: None });
        engine.set_breaker_policy(BreakerPolicy { failures: 1, ..BreakerPolicy::OFF });
        let now = Instant::now();
        let before = Lease::try_take(&engine, None).unwrap();
        let broken = Outcome { phase: Phase::Connect, status: None, cause: Cause::EngineBroken };
        assert_eq!(before.availability(now), Availability::Free);
        Lease::try_take(&engine, None).unwrap().end(broken);
        let trial = Lease::try_take(&engine, None).unwrap();
        assert_eq!(engine.availability(now), Availability::Open);
        assert_eq!(trial.availability(now), Availability::Free, "its own place is its own");
        assert_eq!(before.availability(now), Availability::Open, "it would be one more than is let through");
        engine.cool(now + Duration::from_secs(1), 429);
        assert_eq!(trial.availability(now), Availability::Cooling);
        engine.set_healthy(false);
        assert_eq!(trial.availability(now), Availability::Down);
    }

    #[test]
    fn whoever_asks_to_be_left_alone_does_not_fail() {
        let engine = Engines::default().get(&Identity { address: "a:1".into(), tls: None });
        engine.set_breaker_policy(BreakerPolicy { failures: 1, origin_errors: 1, ..BreakerPolicy::OFF });
        let (now, mut lease) = (Instant::now(), Lease::try_take(&engine, None).unwrap());
        lease.cool(now + Duration::from_secs(60), 503);
        assert_eq!(lease.end(Outcome::complete(503)), None);
        assert_eq!(engine.breaker(now), BreakerState::Closed);
        assert!(!engine.takes_new(now));
    }
}
