//! The tier that ends every ladder.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::tier::{Candidate, Choice, Miss, Routing, Tier, Verdict};

/// Fewest requests in flight and queued on the engine; round robin among true equals only.
///
/// What is queued is what the engine itself last told. An engine whose word is out of date, or that does not say, is
/// taken to have the mean of those that do, so that silence neither draws requests nor turns them away.
#[derive(Debug, Default)]
pub struct MinLoad {
    turn: AtomicUsize,
}

impl Tier for MinLoad {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let queued = |engine: &crate::Engine| engine.telemetry(routing.now).and_then(|told| told.waiting);
        let told: Vec<_> = routing.eligible_endpoints().map(|(at, e)| (at, e, queued(&e.engine))).collect();
        let mean = mean(told.iter().filter_map(|(.., queued)| *queued));
        let candidates: Vec<_> = told
            .into_iter()
            .map(|(endpoint, e, queued)| Candidate {
                endpoint,
                load: e.engine.in_flight().saturating_add(queued.unwrap_or(mean)),
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

/// The mean, rounded; 0 of none.
fn mean(values: impl Iterator<Item = u64>) -> u64 {
    let (sum, count) = values.fold((0u128, 0u128), |(sum, count), v| (sum + u128::from(v), count + 1));
    u64::try_from((sum + count / 2).checked_div(count).unwrap_or(0)).unwrap_or(u64::MAX)
}
