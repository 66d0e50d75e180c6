//! Ways to choose among endpoints that several tiers have in common.

use std::cmp::Ordering;
use std::sync::atomic::{self, AtomicUsize};
use std::time::Instant;

use kvgate_core::law::Fleet;
use kvgate_core::{Endpoint, Role, Routing};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Compares loads, each for the share beside it.
pub fn by_share<N: Into<u128>>(a: (N, N), b: (N, N)) -> Ordering {
    let of = |load: N, share: N| load.into().saturating_mul(share.into());
    of(a.0, b.1).cmp(&of(b.0, a.1))
}

/// The bounded loads of the eligible endpoints; `share` is what each can bear beside the others.
pub fn fleet(routing: &Routing<'_>, share: impl Fn(usize) -> u64) -> Fleet {
    Fleet::of(routing.eligible_endpoints().map(|(at, e)| (e.engine.in_flight(), share(at))))
}

/// The position chosen last, for each role apart: the ladders of a rule have one between them.
#[derive(Debug)]
pub struct Turns([AtomicUsize; 3]);

impl Default for Turns {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicUsize::new(usize::MAX)))
    }
}

impl Turns {
    /// The next one, as `from` tells it: the first candidate from a position on, else the first of all.
    pub fn next(&self, role: Role, from: impl Fn(usize) -> Option<usize>) -> Option<usize> {
        let last = self.0.get(role as usize)?;
        let after = |last: usize| from(last.wrapping_add(1));
        let before = last.fetch_update(atomic::Ordering::Relaxed, atomic::Ordering::Relaxed, after);
        before.ok().and_then(after)
    }
}

/// Those of `positions` with the fewest requests in flight for their weight, in the order given.
pub fn lightest(routing: &Routing<'_>, positions: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut least: Option<(u64, u64)> = None;
    let mut all = Vec::new();
    for at in positions {
        let Some(endpoint) = routing.endpoints.get(at) else { continue };
        let (load, weight) = (endpoint.engine.in_flight(), endpoint.share(routing.now));
        match least.map(|least| by_share((load, weight), least)) {
            Some(Ordering::Greater) => continue,
            Some(Ordering::Equal) => {}
            Some(Ordering::Less) | None => {
                all.clear();
                least = Some((load, weight));
            }
        }
        all.push(at);
    }
    all
}

/// The one of `positions` that the key belongs to. Each has its share of all keys by weight, wherever it stands in the
/// list; when one leaves, its keys and no others move. `None` if there is none.
///
/// Rendezvous hashing (Thaler, Ravishankar 1998) with weights as in Schindelhauer and Schomaker, Weighted Distributed
/// Hash Tables, 2005: the least of `-ln(u) / weight`, `u` uniform in (0, 1) by key and engine.
pub fn rendezvous(
    routing: &Routing<'_>,
    positions: impl Iterator<Item = usize>,
    key: &[u8],
) -> Option<usize> {
    let key = xxh3_64_with_seed(key, 0);
    let scored =
        positions.filter_map(|at| Some((distance(key, routing.endpoints.get(at)?, routing.now), at)));
    scored.min_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, at)| at)
}

fn distance(key: u64, endpoint: &Endpoint, now: Instant) -> f64 {
    let identity = endpoint.engine.identity();
    let mut seed = xxh3_64_with_seed(identity.address.as_bytes(), key);
    if let Some(tls) = &identity.tls {
        seed = xxh3_64_with_seed(tls.as_bytes(), seed);
    }
    // the upper 53 bits, in the middle of their interval: neither 0 nor 1
    let uniform = ((seed >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    -uniform.ln() / endpoint.share(now) as f64
}
