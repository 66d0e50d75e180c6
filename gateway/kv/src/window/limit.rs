//! When a replay may be asked for.

use std::time::{Duration, Instant};

const REFILL: Duration = Duration::from_secs(1);
/// The pause after a first failure; the next ones double it.
const PAUSE: Duration = Duration::from_millis(250);

/// A burst, then one a second; none for a while after a failure.
pub(super) struct Limit {
    burst: u32,
    left: u32,
    /// When `left` last grew, or was last full.
    refilled: Option<Instant>,
    blocked: Option<Instant>,
    /// After the next failure.
    pause: Duration,
}

impl Limit {
    pub(super) fn new(burst: u32) -> Self {
        Limit { burst, left: burst, refilled: None, blocked: None, pause: PAUSE }
    }

    /// Takes a permit if there is one.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        if self.blocked.is_some_and(|until| now < until) {
            return false;
        }
        let mut refilled = self.refilled.unwrap_or(now);
        while self.left < self.burst && now >= refilled + REFILL {
            (self.left, refilled) = (self.left + 1, refilled + REFILL);
        }
        self.refilled = Some(if self.left == self.burst { now } else { refilled });
        let granted = self.left > 0;
        self.left = self.left.saturating_sub(1);
        granted
    }

    /// No permit for a while, `most` at most.
    pub(super) fn failed(&mut self, now: Instant, most: Duration) {
        self.blocked = Some(now + self.pause.min(most));
        self.pause = (self.pause * 2).min(most);
    }

    pub(super) fn succeeded(&mut self) {
        self.pause = PAUSE;
    }

    pub(super) fn unblock(&mut self) {
        self.blocked = None;
    }

    /// From when on there is a permit; `None`: at once.
    pub(super) fn next(&self) -> Option<Instant> {
        let grown = self.refilled.filter(|_| self.left == 0).map(|at| at + REFILL);
        self.blocked.max(grown)
    }
}
