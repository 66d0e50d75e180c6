//! How slow an engine is, changed while it runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// By how much every step takes longer.
#[derive(Clone, Debug)]
pub(crate) struct Pace(Arc<AtomicU64>);

impl Default for Pace {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(1.0_f64.to_bits())))
    }
}

impl Pace {
    /// From the next step on. What is no number above 0 is 1.
    pub fn set(&self, factor: f64) {
        let factor = if factor.is_finite() && factor > 0.0 { factor } else { 1.0 };
        self.0.store(factor.to_bits(), Ordering::Relaxed);
    }

    /// The time of a step that takes so long by itself.
    pub fn times(&self, step: Duration) -> Duration {
        let seconds = step.as_secs_f64() * f64::from_bits(self.0.load(Ordering::Relaxed));
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_and_nothing_odd() {
        let (pace, second) = (Pace::default(), Duration::from_secs(1));
        assert_eq!(pace.times(second), second);
        pace.set(2.5);
        assert_eq!(pace.clone().times(second), Duration::from_millis(2500));
        for odd in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            pace.set(odd);
            assert_eq!(pace.times(second), second, "{odd}");
        }
    }
}
