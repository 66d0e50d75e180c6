//! The tier that ends every ladder.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::tier::{Candidate, Choice, Miss, Routing, Tier, Verdict};

/// Fewest requests in flight and queued on the engine ([`Routing::waiting`]); round robin among true equals only.
#[derive(Debug, Default)]
pub struct MinLoad {
    turn: AtomicUsize,
}

impl Tier for MinLoad {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let waiting = routing.waiting();
        let candidates: Vec<_> = routing
            .eligible_endpoints()
            .map(|(endpoint, e)| Candidate {
                endpoint,
                load: e.engine.in_flight().saturating_add(waiting.get(endpoint).copied().unwrap_or(0)),
                capacity: 1,
                ..Candidate::default()
            })
            .collect();
        let least = candidates.iter().map(|c| c.load).min();
        let equals: Vec<_> = candidates.iter().filter(|c| Some(c.load) == least).collect();
        let choice = match equals.as_slice() {
            [] => return Verdict::Pass(Miss::NO_ENDPOINT),
            [only] => only.endpoint,
            many => {
                let turn = self.turn.fetch_add(1, Ordering::Relaxed);
                many.get(turn % many.len()).map_or(0, |c| c.endpoint)
            }
        };
        routing.candidates = candidates;
        Verdict::Pick(Choice::of(choice))
    }
}
