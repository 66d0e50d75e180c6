//! How asking an engine goes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvgate_engines::metrics::Reading;

use super::page::Failure;

/// Why an engine was asked in vain: the label `reason` of `kvgate_telemetry_errors_total`.
pub(super) const REASONS: [&str; 6] = ["connect", "timeout", "status", "size", "broken", "garbage"];

/// How asking one engine goes; updated in place.
#[derive(Debug)]
pub struct Status {
    /// In the order of [`REASONS`].
    errors: [AtomicU64; REASONS.len()],
    latest: Mutex<Latest>,
}

#[derive(Debug)]
struct Latest {
    /// When it last told; before, when it was first to be asked.
    since: Instant,
    reading: Option<Reading>,
    /// Why it did not tell since.
    problem: Option<Failure>,
}

impl Status {
    pub(super) fn new(now: Instant) -> Self {
        let latest = Latest { since: now, reading: None, problem: None };
        Self { errors: Default::default(), latest: Mutex::new(latest) }
    }

    fn latest(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn told(&self, reading: Reading, now: Instant) {
        *self.latest() = Latest { since: now, reading: Some(reading), problem: None };
    }

    pub(super) fn failed(&self, failure: Failure) {
        let counter = REASONS.iter().position(|reason| *reason == failure.reason());
        if let Some(counter) = counter.and_then(|at| self.errors.get(at)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        self.latest().problem = Some(failure);
    }

    /// Times that it was asked in vain, by reason.
    pub fn errors(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        REASONS.into_iter().zip(self.errors.iter().map(|n| n.load(Ordering::Relaxed)))
    }

    /// How long ago it last told; while it never did, how long it has been asked.
    pub fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.latest().since)
    }

    /// What it last told, however old.
    pub fn reading(&self) -> Option<Reading> {
        self.latest().reading
    }

    /// Why it has not told since: one of the reasons of the metric.
    pub fn reason(&self) -> Option<&'static str> {
        self.latest().problem.as_ref().map(Failure::reason)
    }

    /// The same in words.
    pub fn problem(&self) -> Option<String> {
        self.latest().problem.as_ref().map(ToString::to_string)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_is_counted_and_the_last_is_told() {
        let start = Instant::now();
        let status = Status::new(start);
        let after = |seconds| start + Duration::from_secs(seconds);
        let failures = [
            Failure::Connect("refused".into()),
            Failure::Timeout(Duration::from_secs(5)),
            Failure::Status(404),
            Failure::Size(1 << 20),
            Failure::Broken("reset".into()),
            Failure::Garbage("what it sends is not a metrics page"),
        ];
        for (n, failure) in failures.into_iter().enumerate() {
            let text = failure.to_string();
            status.failed(failure);
            assert_eq!(status.problem(), Some(text));
            assert_eq!(status.errors().filter(|(_, count)| *count == 1).count(), n + 1);
        }
        assert_eq!((status.reading(), status.age(after(3))), (None, Duration::from_secs(3)));
        let reading = Reading { blocks: Some(7), ..Reading::default() };
        status.told(reading, after(5));
        assert_eq!((status.problem(), status.reading()), (None, Some(reading)));
        status.failed(Failure::Status(503));
        assert_eq!((status.age(after(6)), status.reading()), (Duration::from_secs(1), Some(reading)));
        assert!(status.errors().any(|counted| counted == ("status", 2)));
    }
}
