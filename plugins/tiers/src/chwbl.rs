//! `chwbl`: consistent hashing with bounded loads; also what `wrr-hash` is made of.

use std::sync::Arc;

use kvgate_core::schema::{Field, Kind};
use kvgate_core::{
    BoxFuture, BuildContext, BuildError, Candidate, Choice, Completion, Dispatch, Endpoint, Facts, Miss,
    MissKind, Routing, Tier, TierConfig, TierKind, Verdict,
};
use serde::Deserialize;

use crate::choose::{by_share, fleet};
use crate::key::{self, Key, KeyConfig, Keys};
use crate::ring::Ring;

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "chwbl",
    doc: "Sends requests whose prompts begin alike to one endpoint, by consistent hashing with bounded loads: an \
          endpoint that has more than its share of what is in flight is passed over for the one that has least, and \
          one that comes or goes moves few requests but its own. In the decision record `why` is what a request went \
          by, or `spill` where it was passed on.",
    misses: MISSES,
    schema: SCHEMA,
    build: |config, context| build(KIND.name, config, context, |_| 1),
};

/// Key: how much more than its share an endpoint may have.
pub const FACTOR: Field = Field {
    key: "load_factor_pct",
    kind: Kind::Int { min: 100, max: 1000 },
    default: "140",
    doc: "The most that an endpoint may have in flight, in percent of its share of what is in flight on all that may be \
          chosen; one request it may always have. Less spreads the load better, more keeps more requests where their \
          prefix is.",
};

const REPLICATION: Field = Field {
    key: "replication",
    kind: Kind::Int { min: 1, max: 1024 },
    default: "256",
    doc: "The points that an endpoint has on the ring: with more of them the endpoints' parts of it differ less. Where \
          endpoints have weights of their own, those of the one with the most.",
};

pub(crate) const SCHEMA: &[Field] = &[FACTOR, REPLICATION, key::LEVEL, key::BYTES, key::CONVERSATION];

pub(crate) const MISSES: &[MissKind] = &[MissKind::NO_ENDPOINT];

#[derive(Deserialize)]
struct Config {
    load_factor_pct: u64,
    replication: u64,
    #[serde(flatten)]
    key: KeyConfig,
}

/// Bounded loads on a ring.
struct Chwbl {
    keys: Keys,
    ring: Ring,
    /// What each endpoint takes beside the others, by position.
    shares: Vec<u64>,
    factor_pct: u64,
}

/// A tier of this name, for which an endpoint counts as much as `share` says, 1 or more.
pub(crate) fn build(
    name: &'static str,
    config: &TierConfig,
    context: &mut BuildContext<'_>,
    share: fn(&Endpoint) -> u64,
) -> Result<Arc<dyn Tier>, BuildError> {
    let config: Config = config.parse()?;
    let shares: Vec<u64> = context.endpoints.iter().map(share).collect();
    let most = shares.iter().copied().max().unwrap_or(1).max(1);
    // relative to the largest, so that a change of another's share moves its own points only
    let points = |e: &Endpoint| (config.replication * share(e) + most / 2) / most;
    Ok(Arc::new(Chwbl {
        keys: Keys::new(name, &config.key, context)?,
        ring: Ring::new(context.endpoints, points),
        shares,
        factor_pct: config.load_factor_pct,
    }))
}

impl Tier for Chwbl {
    fn prepare<'a>(&'a self, facts: &'a Facts) -> Option<BoxFuture<'a, Result<(), Miss>>> {
        Some(self.keys.prepare(facts))
    }

    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let fleet = fleet(routing, |at| self.share(at));
        let bound = |at| fleet.cap(self.factor_pct, self.share(at));
        let owner = |hash| self.ring.walk(hash, &routing.eligible).next();
        let key = self.keys.of(routing, |hash| owner(hash).map_or(1, bound));
        let mut met = Vec::new();
        let choice = match key {
            Key::Prefix(hash) | Key::Conversation(hash) => {
                self.place(routing, bound, key, self.ring.walk(hash, &routing.eligible), &mut met)
            }
            Key::Turn(turn) => self.place(routing, bound, key, self.in_turn(routing, turn), &mut met),
        };
        routing.candidates = met;
        choice.map_or(Verdict::Pass(Miss::NO_ENDPOINT), Verdict::Pick)
    }

    fn on_dispatch(&self, dispatch: &Dispatch<'_>) {
        self.keys.on_dispatch(dispatch);
    }

    fn on_complete(&self, completion: &Completion<'_>) {
        self.keys.on_complete(completion);
    }
}

/// By what is in flight for the share.
fn lighter(a: &&Candidate, b: &&Candidate) -> std::cmp::Ordering {
    by_share((a.load, a.capacity), (b.load, b.capacity))
}

impl Chwbl {
    fn share(&self, at: usize) -> u64 {
        self.shares.get(at).copied().unwrap_or(1)
    }

    /// The first while it is under its bound, else the least loaded of those that are; the least loaded of all where none
    /// is, which takes a factor of 100 or a race. Those
    /// looked at are added to `met`.
    fn place(
        &self,
        routing: &Routing<'_>,
        bound: impl Fn(usize) -> u64,
        key: Key,
        order: impl Iterator<Item = usize>,
        met: &mut Vec<Candidate>,
    ) -> Option<Choice> {
        for endpoint in order {
            let load = routing.endpoints.get(endpoint).map_or(0, |e| e.engine.in_flight());
            let (capacity, bound) = (self.share(endpoint), bound(endpoint));
            met.push(Candidate { endpoint, overlap: 0, load, capacity, cap: Some(bound) });
            if met.len() == 1 && load < bound {
                return Some(Choice { endpoint, limit: Some(bound), why: Some(key.kind()) });
            }
        }
        if let Some(least) = met.iter().filter(|c| c.has_room()).min_by(lighter) {
            return Some(Choice { endpoint: least.endpoint, limit: least.cap, why: Some(Choice::SPILL) });
        }
        let least = met.iter().min_by(lighter)?;
        Some(Choice { endpoint: least.endpoint, limit: Some(least.load + 1), why: Some("saturated") })
    }

    /// The eligible endpoints from the one on whose turn it is, as often as their shares say.
    fn in_turn<'a>(&self, routing: &'a Routing<'_>, turn: u64) -> impl Iterator<Item = usize> + 'a {
        let eligible = &routing.eligible;
        let all: u64 = eligible.iter().map(|at| self.share(at)).sum();
        let even = all == eligible.count() as u64;
        let mut point = if even { turn % all.max(1) } else { spread(turn, all) };
        let first = eligible.iter().position(|at| {
            let here = point < self.share(at);
            point = point.saturating_sub(self.share(at));
            here
        });
        let first = first.unwrap_or(0);
        eligible.iter().skip(first).chain(eligible.iter().take(first))
    }
}

/// A point below `all` for each turn, evenly spread however many turns there were: multiples of the golden ratio.
fn spread(turn: u64, all: u64) -> u64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let fraction = turn.wrapping_mul(GOLDEN);
    ((u128::from(fraction) * u128::from(all)) >> 64) as u64
}
