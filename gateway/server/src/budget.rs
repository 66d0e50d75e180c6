//! How much all requests together may be asked again.
//!
//! The rule is that of Finagle's and Linkerd's retry budgets: a share of the requests of the last ten seconds, and a
//! number per second beside, without which a gateway with little traffic would never ask again.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::config::BudgetConfig;

/// Seconds that are looked back upon.
const WINDOW: usize = 10;

/// Counts requests and retries of the last seconds.
#[derive(Debug)]
pub struct Budget {
    start: Instant,
    seconds: Mutex<[Second; WINDOW]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Second {
    /// Which one, from the start.
    number: u64,
    requests: u64,
    retries: u64,
}

impl Second {
    /// How many more may be asked again, by the sum of all seconds.
    fn left(&self, limits: BudgetConfig) -> u64 {
        let share = self.requests.saturating_mul(limits.percent) / 100;
        let all = limits.floor.saturating_mul(WINDOW as u64).saturating_add(share);
        all.saturating_sub(self.retries)
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self { start: Instant::now(), seconds: Mutex::default() }
    }
}

impl Budget {
    /// One more request.
    pub fn request(&self, now: Instant) {
        self.with(now, |_, second| second.requests += 1);
    }

    /// How many retries are left.
    pub fn left(&self, now: Instant, limits: BudgetConfig) -> u64 {
        self.with(now, |sum, _| sum.left(limits))
    }

    /// Takes a retry, if there is one left.
    pub fn retry(&self, now: Instant, limits: BudgetConfig) -> bool {
        self.with(now, |sum, second| {
            let left = sum.left(limits) > 0;
            second.retries += u64::from(left);
            left
        })
    }

    /// Looks at the sum of the seconds that count now, and the present one.
    fn with<T>(&self, now: Instant, look: impl FnOnce(Second, &mut Second) -> T) -> T {
        let number = now.saturating_duration_since(self.start).as_secs();
        let mut seconds = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sum = Second { number, ..Second::default() };
        for second in seconds.iter_mut() {
            if second.number + (WINDOW as u64) <= number {
                *second = Second::default();
            }
            sum.requests += second.requests;
            sum.retries += second.retries;
        }
        // as many as there are, one after the other
        let at = usize::try_from(number % WINDOW as u64).unwrap_or(0);
        match seconds.get_mut(at) {
            Some(second) => {
                second.number = number;
                look(sum, second)
            }
            None => look(sum, &mut Second::default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const LIMITS: BudgetConfig = BudgetConfig { percent: 20, floor: 1 };

    fn taken(budget: &Budget, now: Instant, limits: BudgetConfig) -> usize {
        (0..1000).filter(|_| budget.retry(now, limits)).count()
    }

    #[test]
    fn a_share_of_the_requests_and_a_floor() {
        let budget = Budget::default();
        let at = |ms| budget.start + Duration::from_millis(ms);
        assert_eq!(taken(&budget, at(0), LIMITS), 10, "the floor of ten seconds");
        (0..100).for_each(|_| budget.request(at(500)));
        assert_eq!(budget.left(at(900), LIMITS), 20);
        assert_eq!(taken(&budget, at(900), LIMITS), 20);
        assert_eq!(budget.left(at(900), LIMITS), 0);
        assert_eq!(taken(&budget, at(9_999), LIMITS), 0);
        assert_eq!(taken(&budget, at(10_000), LIMITS), 10, "what is ten seconds old does not count any more");
        assert_eq!(taken(&budget, at(60_000), LIMITS), 10, "after a time without requests");
    }

    #[test]
    fn each_second_counts_for_itself() {
        let budget = Budget::default();
        let at = |ms| budget.start + Duration::from_millis(ms);
        let none = BudgetConfig { percent: 100, floor: 0 };
        for second in 0..20 {
            budget.request(at(second * 1000 + 1));
            assert_eq!(taken(&budget, at(second * 1000 + 2), none), 1, "{second}");
        }
        // those of the seconds 10 to 19 are known, and were all answered with a retry
        assert_eq!(taken(&budget, at(19_500), none), 0);
        // of ten requests and retries one of each is forgotten
        assert_eq!(taken(&budget, at(20_500), BudgetConfig { percent: 200, floor: 0 }), 9);
    }

    #[test]
    fn nothing_is_nothing() {
        let budget = Budget::default();
        budget.request(budget.start);
        assert_eq!(taken(&budget, budget.start, BudgetConfig { percent: 0, floor: 0 }), 0);
        assert_eq!(taken(&budget, budget.start, BudgetConfig { percent: 99, floor: 0 }), 0);
        assert_eq!(taken(&budget, budget.start, BudgetConfig { percent: u64::MAX, floor: u64::MAX }), 1000);
    }
}
