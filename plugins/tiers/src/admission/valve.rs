//! How many requests of a rule may be under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt;
use kvgate_core::{BuildContext, Facts};

/// Where a request's permit is kept: with its facts, which live as long as the request, over all attempts and legs.
const PERMIT: &str = "admission";

/// Counts requests from their first choice to their end.
pub struct Valve {
    most: Option<u64>,
    under_way: Arc<AtomicU64>,
}

struct Permit(Arc<AtomicU64>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Valve {
    /// One for all ladders of the rule.
    pub fn new(most: Option<u64>, context: &BuildContext<'_>) -> Self {
        Self { most, under_way: context.state("admission/valve", "", AtomicU64::default) }
    }

    /// Whether the request may go on: it is under way already, or there are fewer than the most. `at_any_rate` lets it
    /// go on all the same.
    pub fn passes(&self, facts: &Facts, at_any_rate: bool) -> bool {
        let Some(most) = self.most else { return true };
        if facts.known::<Permit>(PERMIT).is_some() {
            return true;
        }
        let enter = |n: u64| (at_any_rate || n < most).then_some(n + 1);
        let entered = self.under_way.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enter);
        if entered.is_ok() {
            let permit = Permit(self.under_way.clone());
            // ready at once
            let _ = facts.memo(PERMIT, async { Ok(permit) }).now_or_never();
        }
        entered.is_ok_and(|before| before < most)
    }
}
