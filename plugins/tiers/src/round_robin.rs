//! `round-robin`: the endpoints in turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvgate_core::{Choice, Miss, MissKind, Routing, Tier, TierKind, Verdict};

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "round-robin",
    doc: "Picks the eligible endpoints in turn, whatever their load or weight.",
    misses: &[MissKind::NO_ENDPOINT],
    schema: &[],
    build: |_, context| {
        Ok(Arc::new(RoundRobin { last: context.state("round-robin", "", || AtomicUsize::new(usize::MAX)) }))
    },
};

/// Remembers the position it chose last, so that an endpoint that drops out does not shift the turn of the
/// others.
struct RoundRobin {
    last: Arc<AtomicUsize>,
}

impl Tier for RoundRobin {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let after = |last: usize| {
            let next = last.wrapping_add(1);
            let later = routing.eligible.iter().find(|at| *at >= next);
            later.or_else(|| routing.eligible.iter().next())
        };
        let chosen = self.last.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
        match chosen.ok().and_then(after) {
            Some(endpoint) => Verdict::Pick(Choice::of(endpoint)),
            None => Verdict::Pass(Miss::NO_ENDPOINT),
        }
    }
}
