//! The clock and the figures taken from it.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// CPU time of this thread: what else runs on the machine does not count.
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Memory of this process that is in use, in bytes; 0 where `/proc` does not say.
pub fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let resident = pages.split(' ').nth(1).and_then(|n| n.parse::<usize>().ok()).unwrap_or(0);
    resident * rustix::param::page_size()
}

/// The times one piece of work took.
#[derive(Debug, Default, Clone)]
pub struct Samples(Vec<Duration>);

impl Samples {
    /// Runs `work` and keeps its time.
    pub fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = cpu_time();
        let result = std::hint::black_box(work());
        self.0.push(cpu_time().saturating_sub(start));
        result
    }

    /// The time that `percent` of the runs did not exceed, in microseconds; 0 without runs.
    pub fn micros(&self, percent: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
        sorted.get(at).map_or(0.0, |t| t.as_secs_f64() * 1e6)
    }

    /// The mean, in microseconds; not a number without runs.
    pub fn mean(&self) -> f64 {
        self.0.iter().map(Duration::as_secs_f64).sum::<f64>() * 1e6 / self.0.len() as f64
    }

    /// The median, in microseconds.
    pub fn median(&self) -> f64 {
        self.micros(50)
    }
}
