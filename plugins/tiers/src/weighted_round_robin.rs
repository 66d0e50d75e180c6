//! `weighted-round-robin`: the endpoints in turn, the heavier ones more often.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use kvgate_core::{Choice, EngineId, Miss, MissKind, Routing, Tier, TierKind, Verdict};

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "weighted-round-robin",
    doc: "Picks the eligible endpoints in turn, each as often as its weight says, the turns of a heavy one spread \
          evenly among the others'.",
    misses: &[MissKind::NO_ENDPOINT],
    schema: &[],
    build: |_, context| {
        let credit = context.state("weighted-round-robin", "", Mutex::default);
        Ok(Arc::new(WeightedRoundRobin { credit }))
    },
};

/// Smooth weighted round robin, as nginx has it (ngx_http_upstream_round_robin.c): with every turn each eligible
/// endpoint earns its weight, the one with the most credit is chosen, and pays what all have earned.
struct WeightedRoundRobin {
    credit: Arc<Mutex<HashMap<EngineId, i64>>>,
}

impl Tier for WeightedRoundRobin {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let mut credit = self.credit.lock().unwrap_or_else(PoisonError::into_inner);
        if credit.len() > routing.endpoints.len() {
            credit.retain(|engine, _| routing.endpoints.iter().any(|e| e.engine.id() == *engine));
        }
        let (mut earned, now) = (0, routing.now);
        let mut best: Option<(i64, usize, EngineId)> = None;
        for (at, endpoint) in routing.eligible_endpoints() {
            let (engine, weight) =
                (endpoint.engine.id(), i64::try_from(endpoint.share(now)).unwrap_or(i64::MAX / 2));
            let own = credit.entry(engine).or_default();
            *own += weight;
            earned += weight;
            if best.is_none_or(|(most, ..)| *own > most) {
                best = Some((*own, at, engine));
            }
        }
        let Some((_, endpoint, engine)) = best else { return Verdict::Pass(Miss::NO_ENDPOINT) };
        if let Some(own) = credit.get_mut(&engine) {
            *own -= earned;
        }
        Verdict::Pick(Choice::of(endpoint))
    }
}
