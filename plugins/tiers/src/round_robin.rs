//! `round-robin`: the endpoints in turn.

use std::sync::Arc;

use kvgate_core::{Choice, Miss, MissKind, Routing, Tier, TierKind, Verdict};

use crate::choose::Turns;

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "round-robin",
    doc: "Picks the eligible endpoints in turn, whatever their load or weight.",
    misses: &[MissKind::NO_ENDPOINT],
    schema: &[],
    build: |_, context| Ok(Arc::new(RoundRobin { turns: context.state("round-robin", "", Turns::default) })),
};

/// Remembers the position it chose last, so that an endpoint that drops out does not shift the turn of the
/// others.
struct RoundRobin {
    turns: Arc<Turns>,
}

impl Tier for RoundRobin {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let eligible = || routing.eligible.iter();
        let from = |first: usize| eligible().find(|at| *at >= first).or_else(|| eligible().next());
        match self.turns.next(routing.role, from) {
            Some(endpoint) => Verdict::Pick(Choice::of(endpoint)),
            None => Verdict::Pass(Miss::NO_ENDPOINT),
        }
    }
}
