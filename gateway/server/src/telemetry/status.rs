//! How asking an engine goes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvgate_engines::metrics::{Family, Metrics, Reading};

use super::families::{FamilyState, Warmth, states};
use super::page::Failure;

/// Why an engine was asked in vain: the label `reason` of `kvgate_telemetry_errors_total`.
pub(super) const REASONS: [&str; 6] = ["connect", "timeout", "status", "size", "broken", "garbage"];

/// How asking one engine goes; updated in place.
#[derive(Debug)]
pub struct Status {
    /// In the order of [`REASONS`].
    errors: [AtomicU64; REASONS.len()],
    /// It answered a generation through the gateway since its last page.
    answered: AtomicBool,
    latest: Mutex<Latest>,
}

#[derive(Debug)]
struct Latest {
    /// When it last told; before, when it was first to be asked.
    since: Instant,
    reading: Option<Arc<Reading>>,
    /// How it stood with what is looked for on that page.
    families: Vec<(Family, FamilyState)>,
    warmth: Warmth,
    /// Why it did not tell since.
    problem: Option<Failure>,
}

impl Status {
    pub(super) fn new(now: Instant) -> Self {
        let latest = Latest {
            since: now,
            reading: None,
            families: Vec::new(),
            warmth: Warmth::default(),
            problem: None,
        };
        Self { errors: Default::default(), answered: false.into(), latest: Mutex::new(latest) }
    }

    fn latest(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It told; the families whose state is another now than it was, with both.
    pub(super) fn told(
        &self,
        metrics: &Metrics,
        reading: Reading,
        now: Instant,
    ) -> Vec<(Family, Option<FamilyState>, FamilyState)> {
        let answered = self.answered.swap(false, Ordering::Relaxed);
        let mut latest = self.latest();
        let Latest { since, reading: last, families, warmth, problem } = &mut *latest;
        let warm = warmth.before(&reading, last.as_deref(), answered);
        let before = std::mem::replace(families, states(metrics, &reading, warm));
        (*since, *last, *problem) = (now, Some(Arc::new(reading)), None);
        let was = |family| before.iter().find(|(known, _)| *known == family).map(|(_, state)| *state);
        let all = families.iter().map(|(family, state)| (*family, was(*family), *state));
        all.filter(|(_, was, is)| *was != Some(*is)).collect()
    }

    /// It answered a request for generated text.
    pub fn answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    pub(super) fn failed(&self, failure: Failure) {
        let counter = REASONS.iter().position(|reason| *reason == failure.reason());
        if let Some(counter) = counter.and_then(|at| self.errors.get(at)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        let mut latest = self.latest();
        if matches!(failure, Failure::Connect(_)) {
            self.answered.store(false, Ordering::Relaxed);
            latest.warmth.forget();
        }
        latest.problem = Some(failure);
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
    pub fn reading(&self) -> Option<Arc<Reading>> {
        self.latest().reading.clone()
    }

    /// How it stood, when it last told, with each family that such an engine has; nothing while it never told.
    pub fn families(&self) -> Vec<(Family, FamilyState)> {
        self.latest().families.clone()
    }

    /// How it stood with one.
    pub fn family(&self, family: Family) -> Option<FamilyState> {
        self.latest().families.iter().find(|(known, _)| *known == family).map(|(_, state)| *state)
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
    use kvgate_engines::EngineKind;

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
        let metrics = EngineKind::by_name("vllm").unwrap().metrics;
        let told = || status.told(&metrics, reading.clone(), after(5));
        assert_eq!(told().len(), Family::ALL.len(), "all are new");
        assert_eq!((status.problem(), status.reading()), (None, Some(Arc::new(reading.clone()))));
        status.failed(Failure::Status(503));
        assert_eq!(status.age(after(6)), Duration::from_secs(1));
        assert_eq!(status.reading(), Some(Arc::new(reading.clone())));
        assert_eq!(status.family(Family::Blocks), Some(FamilyState::Known));
        assert_eq!(status.family(Family::Ttft), Some(FamilyState::Cold));
        status.answered();
        assert_eq!((told(), told().len()), (vec![], 6));
        assert_eq!((told(), status.family(Family::Ttft)), (vec![], Some(FamilyState::Missing)));
        status.failed(Failure::Connect("refused".into()));
        assert_eq!((told().len(), status.family(Family::Ttft)), (6, Some(FamilyState::Cold)));
        assert!(status.errors().any(|counted| counted == ("status", 2)));
    }
}
