//! The in-flight claim on an engine.

use std::sync::Arc;

use serde::Serialize;

use crate::engine::Engine;

/// How far a request had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// No connection yet, or a pooled one that had died before any byte of the answer.
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
    /// A limit ran out.
    Deadline,
    /// The engine answered with a status that counts as its failure.
    Refused,
    /// It was chosen ahead of its turn, for decode, and never asked.
    Unused,
    /// The claim was dropped without a word: the request's task ended early.
    Dropped,
}

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

    /// Whether the engine is to blame: it broke off, or answered with a 5xx.
    pub fn engine_failed(&self) -> bool {
        self.cause == Cause::EngineBroken || self.status.is_some_and(|status| status >= 500)
    }
}

/// One request's claim on an engine, counted in its in-flight from the choice until [`Lease::end`], or
/// until it is dropped. The freed slot goes to whoever has waited longest for it in the engine's queues.
#[derive(Debug)]
pub struct Lease {
    engine: Option<Arc<Engine>>,
}

impl Lease {
    /// Claims a place on `engine` if fewer than `limit` are taken; `None` as limit is no limit. Exact under
    /// concurrency.
    pub fn try_take(engine: &Arc<Engine>, limit: Option<u64>) -> Option<Self> {
        engine.try_enter(limit).then(|| Self { engine: Some(engine.clone()) })
    }

    /// The engine.
    pub fn engine(&self) -> Option<&Arc<Engine>> {
        self.engine.as_ref()
    }

    /// Ends the claim.
    pub fn end(mut self, outcome: Outcome) {
        self.finish(outcome);
    }

    fn finish(&mut self, _outcome: Outcome) {
        let Some(engine) = self.engine.take() else { return };
        engine.leave();
        let mut queues = engine.queues();
        if queues.len() > 1 {
            queues.sort_by_cached_key(|queue| queue.oldest());
        }
        queues.iter().for_each(|queue| queue.serve(&engine));
    }

    /// Gives the place back without serving those who wait for it.
    pub(crate) fn undo(mut self) {
        if let Some(engine) = self.engine.take() {
            engine.leave();
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.finish(Outcome { phase: Phase::Connect, status: None, cause: Cause::Dropped });
    }
}
