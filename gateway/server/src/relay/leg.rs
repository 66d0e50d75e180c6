//! What a leg is: one request to one engine, its limits, and how it ends.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use kvgate_core::{Cause, Outcome, Phase, Role};
use kvgate_engines::stream::Dialect;
use pingora_core::{BError, Error, ErrorType};
use pingora_http::{RequestHeader, ResponseHeader};
use tokio::time::Instant;

use super::brief::exhausted;
use super::busy::busy;
use super::ending::Ending;

/// How long the parts of an exchange may take. `total` is a point in time, so that it spans attempts and
/// legs; nothing lasts longer.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// Until a connection stands, TLS included.
    pub connect: Duration,
    /// From the end of the upload to the answer's head.
    pub first_byte: Duration,
    /// Between two pieces of the upload, or of the answer.
    pub idle: Duration,
    /// For the client to take a piece of its answer.
    pub client: Duration,
    /// For everything.
    pub total: Instant,
}

impl Deadlines {
    /// The moment `limit` from now, but not past the total.
    pub(super) fn after(&self, limit: Duration) -> Instant {
        (Instant::now() + limit).min(self.total)
    }
}

/// What the retry loop keeps to.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The limits of every attempt.
    pub deadlines: Deadlines,
    /// How many engines may be tried that take the connection; at least one is. Those that take none do not count.
    pub attempts: u32,
    /// Whether a request is sent again when an engine that may have read some of it broke off without an answer. It may
    /// then run twice.
    pub resend: bool,
}

/// One request to make, whoever is to answer it.
#[derive(Clone, Debug)]
pub struct Leg<'a> {
    /// The head for the engine, as [`to_engine`](super::to_engine) makes it.
    pub head: RequestHeader,
    /// The body: sent as it is.
    pub body: Bytes,
    /// Where the answer goes.
    pub sink: Sink,
    /// When it has to be given up because the process ends.
    pub ending: &'a Ending,
    /// Which answers count as the engine's refusal, and are tried elsewhere. The last one reaches the client when nobody
    /// else is left.
    pub refuse: Refusals<'a>,
    /// Whether it is sent once at most: what it names may be used up by an engine that had it, unless that one says that it
    /// did not act on it.
    pub once: bool,
    /// The part of the request it is: errors have codes of their own for each.
    pub role: Role,
    /// What event streams on its path look like.
    pub dialect: Dialect,
}

/// Answers that count as refusals.
#[derive(Clone, Copy, Debug, Default)]
pub struct Refusals<'a> {
    /// Those with these statuses.
    pub statuses: &'a [u16],
    /// Those that say for how long the engine is [`busy`].
    pub busy: bool,
    /// Those with this status, by which an engine says that it could not use what the request names.
    pub lost: Option<u16>,
}

impl Refusals<'_> {
    /// Whether an answer with this head is one.
    pub(super) fn has(&self, head: &ResponseHeader) -> bool {
        let status = head.status.as_u16();
        self.statuses.contains(&status) || self.lost == Some(status) || self.busy && busy(head).is_some()
    }

    /// The fault of such an answer.
    pub(super) fn fault(&self, status: u16) -> Fault {
        if self.lost == Some(status) { Fault::Lost } else { Fault::Status(status) }
    }
}

/// Where the answer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sink {
    /// To the client, piece by piece.
    Client,
    /// Kept for us, at most so many bytes.
    Memory(usize),
}

/// An answer kept in memory.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The engine's head.
    pub head: ResponseHeader,
    /// The whole body.
    pub body: Bytes,
}

/// A leg that ended in order.
#[derive(Debug)]
pub struct Relayed {
    /// The answer's status.
    pub status: u16,
    /// What [`Sink::Memory`] kept.
    pub kept: Option<Kept>,
    /// The engine itself told, in its event stream, that something went wrong.
    pub failed: bool,
    /// An event stream that ended in order without saying that the answer is complete.
    pub unfinished: bool,
}

impl Relayed {
    /// How the lease ends.
    pub fn outcome(&self) -> Outcome {
        let cause = if self.failed { Cause::Refused } else { Cause::Complete };
        Outcome { cause, ..Outcome::complete(self.status) }
    }
}

/// Whose fault it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// The client left, or does not take its answer.
    Client,
    /// The engine.
    Engine,
}

/// What went wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Closed, reset, refused, or not HTTP.
    Broken,
    /// A limit ran out.
    Deadline,
    /// The limit of the whole request ran out.
    Total,
    /// The process ends.
    Ending,
    /// An answer whose status counts as a refusal.
    Status(u16),
    /// An answer by which the engine says that it [could not use](Refusals::lost) what the request names.
    Lost,
    /// More than [`Sink::Memory`] holds.
    TooLarge,
    /// An event stream framed by the connection's end that ended without saying that the answer is complete.
    Unfinished,
}

/// A leg that did not end in order.
#[derive(Debug)]
pub struct LegError {
    /// Whose fault it was.
    pub side: Side,
    /// How far the leg had come.
    pub phase: Phase,
    /// What went wrong.
    pub fault: Fault,
    /// The answer's status, if its head had arrived.
    pub status: Option<u16>,
    /// Bytes of the answer's body the client was sent.
    pub bytes_sent: u64,
    /// The client has the answer's head.
    pub head_sent: bool,
    /// The client was told: by an error event and an orderly end, or by the engine's own refusal.
    pub told: bool,
    /// The engine was sent nothing of the request, or said that it did not act on it.
    pub unprocessed: bool,
    /// It broke as a kept connection does that the engine had given up.
    pub stale: bool,
    /// How long the engine asks to be left alone.
    pub busy: Option<Duration>,
    /// The refusal, whole, unless it was too long or too slow to keep.
    pub kept: Option<Box<Kept>>,
    /// What the proxy library says.
    pub source: Option<BError>,
}

impl fmt::Display for LegError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { cause, phase, status } = self.outcome();
        write!(f, "{cause} at {phase}")?;
        status.map_or(Ok(()), |status| write!(f, ", status {status}"))?;
        self.source.as_ref().map_or(Ok(()), |source| write!(f, ": {source}"))
    }
}

impl LegError {
    /// One of which nothing reached the client.
    pub(super) fn new(side: Side, phase: Phase, fault: Fault, source: Option<BError>) -> Self {
        Self {
            side,
            phase,
            fault,
            status: None,
            bytes_sent: 0,
            head_sent: false,
            told: false,
            unprocessed: false,
            stale: false,
            busy: None,
            kept: None,
            source,
        }
    }

    /// Whether another engine may be tried: nothing reached the client, the engine is at fault, and it either
    /// cannot have acted on the request or may have, and `resend` allows that. After a deadline it may still be
    /// at work, unless it has not taken all of the request.
    pub fn retryable(&self, resend: bool) -> bool {
        self.side == Side::Engine
            && !self.head_sent
            && match (self.phase, self.fault) {
                (_, Fault::Ending) => false,
                // as little as for this engine
                _ if self.outcome().cause == Cause::Exhausted => false,
                (Phase::Connect, _) | (_, Fault::Status(_) | Fault::Lost) => true,
                (Phase::Upload, _) | (_, Fault::Broken) => self.unprocessed || resend,
                _ => false,
            }
    }

    /// Whether nobody else is to be asked: there is no time.
    pub fn is_last(&self) -> bool {
        matches!(self.fault, Fault::Total | Fault::Ending)
    }

    /// How the lease ends.
    pub fn outcome(&self) -> Outcome {
        let cause = match (self.side, self.fault) {
            (Side::Client, _) => Cause::ClientGone,
            (Side::Engine, Fault::Ending) => Cause::Stopped,
            (Side::Engine, _) if self.stale => Cause::Stale,
            (Side::Engine, Fault::Broken)
                if self.phase == Phase::Connect && self.source.as_ref().is_some_and(|e| exhausted(e)) =>
            {
                Cause::Exhausted
            }
            (Side::Engine, Fault::Deadline) => Cause::Deadline,
            (Side::Engine, Fault::Total) => Cause::OutOfTime,
            (Side::Engine, Fault::Status(_)) => Cause::Refused,
            (Side::Engine, Fault::Lost) => Cause::BlocksLost,
            (Side::Engine, Fault::TooLarge) => Cause::TooLarge,
            (Side::Engine, Fault::Broken | Fault::Unfinished) => Cause::EngineBroken,
        };
        Outcome { phase: self.phase, status: self.status, cause }
    }

    /// To be returned from `request_filter` when the client's connection must be cut: an answer that stopped
    /// half way would else be ended in order.
    pub fn into_pingora(self) -> BError {
        let error = self.source.unwrap_or_else(|| Error::new(ErrorType::ConnectionClosed));
        match self.side {
            Side::Client => error.into_down(),
            Side::Engine => error.into_up(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(side: Side, phase: Phase, fault: Fault) -> LegError {
        LegError::new(side, phase, fault, None)
    }

    #[test]
    fn retries_what_cannot_have_run_and_the_rest_only_if_allowed() {
        use Fault::{Broken, Deadline, Status, TooLarge};
        for (phase, fault, always, if_allowed) in [
            (Phase::Connect, Broken, true, true),
            (Phase::Connect, Deadline, true, true),
            (Phase::Upload, Broken, false, true),
            (Phase::Upload, Deadline, false, true),
            (Phase::FirstByte, Status(503), true, true),
            (Phase::FirstByte, Broken, false, true),
            (Phase::FirstByte, Deadline, false, false),
            (Phase::Answer, Broken, false, true),
            (Phase::Answer, TooLarge, false, false),
            (Phase::Answer, Deadline, false, false),
        ] {
            let e = error(Side::Engine, phase, fault);
            assert_eq!((e.retryable(false), e.retryable(true)), (always, if_allowed), "{phase:?} {fault:?}");
            let sent = LegError { head_sent: true, ..error(Side::Engine, phase, fault) };
            assert!(!sent.retryable(true));
            assert!(!error(Side::Client, phase, fault).retryable(true));
        }
        for phase in [Phase::Upload, Phase::FirstByte] {
            assert!(LegError { unprocessed: true, ..error(Side::Engine, phase, Broken) }.retryable(false));
        }
    }

    #[test]
    fn every_error_has_its_outcome() {
        use Fault::{Broken, Deadline, Lost, Status, TooLarge, Total, Unfinished};
        for (side, fault, cause) in [
            (Side::Client, Broken, Cause::ClientGone),
            (Side::Client, Deadline, Cause::ClientGone),
            (Side::Engine, Broken, Cause::EngineBroken),
            (Side::Engine, Deadline, Cause::Deadline),
            (Side::Engine, Total, Cause::OutOfTime),
            (Side::Engine, Status(503), Cause::Refused),
            (Side::Engine, TooLarge, Cause::TooLarge),
            (Side::Engine, Lost, Cause::BlocksLost),
            (Side::Engine, Unfinished, Cause::EngineBroken),
        ] {
            let e = LegError { status: Some(200), ..error(side, Phase::Answer, fault) };
            assert_eq!(e.outcome(), Outcome { phase: Phase::Answer, status: Some(200), cause });
        }
    }
}
