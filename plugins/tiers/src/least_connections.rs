//! `least-connections`: the least loaded endpoint for its weight.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvgate_core::{Choice, Miss, MissKind, Routing, Tier, TierKind, Verdict};

use crate::choose::lightest;

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "least-connections",
    doc: "Picks the endpoint with the fewest requests in flight for its weight, in turn among equals.",
    misses: &[MissKind::NO_ENDPOINT],
    schema: &[],
    build: |_, context| {
        let last = context.state("least-connections", "", || AtomicUsize::new(usize::MAX));
        Ok(Arc::new(LeastConnections { last }))
    },
};

/// Remembers the position it chose last: among equals the next one is in turn.
struct LeastConnections {
    last: Arc<AtomicUsize>,
}

impl Tier for LeastConnections {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let equals = lightest(routing, routing.eligible.iter());
        let after = |last: usize| {
            let next = last.wrapping_add(1);
            equals.iter().find(|at| **at >= next).or_else(|| equals.first()).copied()
        };
        let before = self.last.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
        match before.ok().and_then(after) {
            Some(endpoint) => Verdict::Pick(Choice::of(endpoint)),
            None => Verdict::Pass(Miss::NO_ENDPOINT),
        }
    }
}
