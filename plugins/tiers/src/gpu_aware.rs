//! `gpu-aware`: by the prefix while that engine has room, else by what the engines can do and have to do.

use std::sync::Arc;

use kvgate_core::schema::Field;
use kvgate_core::{
    BoxFuture, BuildContext, BuildError, Candidate, Choice, Completion, Dispatch, Facts, Mask, Miss,
    MissKind, Routing, Tier, TierConfig, TierKind, Verdict,
};
use serde::Deserialize;

use crate::choose::{by_share, fleet};
use crate::chwbl::FACTOR;
use crate::key::{self, Key, KeyConfig, Keys};

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "gpu-aware",
    doc: "Sends requests whose prompts begin alike to one endpoint: the hash of the prefix modulo the eligible \
          endpoints, in the order of their addresses. Where that one has more in flight than its capacity allows, it \
          picks the lowest `(20 * in flight + 50 * waiting) / capacity` of those that have not (`why` is `spill`). \
          Capacity is the engine's KV blocks times the endpoint's weight, or the weight alone where some engine does \
          not tell its blocks; waiting is what the engine tells of its queue, the others' mean where it does not.",
    misses: &[MissKind::NO_ENDPOINT],
    schema: SCHEMA,
    build,
};

const SCHEMA: &[Field] = &[FACTOR, key::LEVEL, key::BYTES, key::CONVERSATION];
/// What a request in flight weighs, and what one that waits in the engine's queue weighs on top.
const IN_FLIGHT: u64 = 20;
const WAITING: u64 = 50;

#[derive(Deserialize)]
struct Config {
    load_factor_pct: u64,
    #[serde(flatten)]
    key: KeyConfig,
}

struct GpuAware {
    keys: Keys,
    factor_pct: u64,
    /// Positions of the endpoints in the order of their addresses: that of the file may change.
    order: Vec<usize>,
}

fn build(config: &TierConfig, context: &mut BuildContext<'_>) -> Result<Arc<dyn Tier>, BuildError> {
    let config: Config = config.parse()?;
    let mut order: Vec<usize> = (0..context.endpoints.len()).collect();
    order.sort_by_key(|at| context.endpoints.get(*at).map(|e| e.engine.address()));
    Ok(Arc::new(GpuAware {
        keys: Keys::new(KIND.name, &config.key, context)?,
        factor_pct: config.load_factor_pct,
        order,
    }))
}

impl Tier for GpuAware {
    fn prepare<'a>(&'a self, facts: &'a Facts) -> Option<BoxFuture<'a, Result<(), Miss>>> {
        Some(self.keys.prepare(facts))
    }

    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let capacities = routing.capacities();
        let capacity = |at: usize| capacities.get(at).copied().unwrap_or(1);
        let fleet = fleet(routing, capacity);
        let bound = |at: usize| fleet.cap(self.factor_pct, capacity(at));
        let count = routing.eligible.count() as u64;
        let owner = |n: u64| self.eligible(&routing.eligible).nth(n.checked_rem(count)? as usize);
        let key = self.keys.of(routing, |prefix| owner(prefix).map_or(1, bound));
        let (Key::Prefix(n) | Key::Conversation(n) | Key::Turn(n)) = key;
        let Some(owner) = owner(n) else { return Verdict::Pass(Miss::NO_ENDPOINT) };
        let candidate = |endpoint: usize| {
            let load = routing.endpoints.get(endpoint).map_or(0, |e| e.engine.in_flight());
            Candidate { endpoint, overlap: 0, load, capacity: capacity(endpoint), cap: Some(bound(endpoint)) }
        };
        let first = candidate(owner);
        if first.has_room() {
            routing.candidates.push(first);
            return Verdict::Pick(Choice { endpoint: owner, limit: first.cap, why: Some(key.kind()) });
        }
        let all: Vec<_> = self.eligible(&routing.eligible).map(candidate).collect();
        let waiting = routing.waiting();
        let score = |c: &Candidate| {
            let waiting = waiting.get(c.endpoint).copied().unwrap_or(0);
            let work = u128::from(c.load) * u128::from(IN_FLIGHT) + u128::from(waiting) * u128::from(WAITING);
            (work, u128::from(c.capacity))
        };
        let lowest = |open: fn(&Candidate) -> bool| {
            all.iter().filter(|c| open(c)).min_by(|a, b| by_share(score(a), score(b))).copied()
        };
        let (chosen, limit, why) = match lowest(Candidate::has_room) {
            Some(open) => (open, open.cap, Choice::SPILL),
            // takes a factor of 100, or a race
            None => {
                let lowest = lowest(|_| true).unwrap_or(first);
                (lowest, Some(lowest.load + 1), "saturated")
            }
        };
        routing.candidates = all;
        Verdict::Pick(Choice { endpoint: chosen.endpoint, limit, why: Some(why) })
    }

    fn on_dispatch(&self, dispatch: &Dispatch<'_>) {
        self.keys.on_dispatch(dispatch);
    }

    fn on_complete(&self, completion: &Completion<'_>) {
        self.keys.on_complete(completion);
    }
}

impl GpuAware {
    fn eligible(&self, eligible: &Mask) -> impl Iterator<Item = usize> {
        self.order.iter().copied().filter(|at| eligible.contains(*at))
    }
}
