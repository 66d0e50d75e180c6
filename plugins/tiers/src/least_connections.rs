//! `least-connections`: the least loaded endpoint for its weight.

use std::sync::Arc;

use kvgate_core::{Choice, Miss, MissKind, Routing, Tier, TierKind, Verdict};

use crate::choose::{Turns, lightest};

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "least-connections",
    doc: "Picks the endpoint with the fewest requests in flight for its weight, in turn among equals.",
    misses: &[MissKind::NO_ENDPOINT],
    schema: &[],
    build: |_, context| {
        Ok(Arc::new(LeastConnections { turns: context.state("least-connections", "", Turns::default) }))
    },
};

/// Remembers the position it chose last: among equals the next one is in turn.
struct LeastConnections {
    turns: Arc<Turns>,
}

impl Tier for LeastConnections {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let equals = lightest(routing, routing.eligible.iter());
        let from = |first: usize| equals.iter().find(|at| **at >= first).or_else(|| equals.first()).copied();
        match self.turns.next(routing.role, from) {
            Some(endpoint) => Verdict::Pick(Choice::of(endpoint)),
            None => Verdict::Pass(Miss::NO_ENDPOINT),
        }
    }
}
