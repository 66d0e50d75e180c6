//! How much of a prompt each endpoint holds.

use kvgate_core::EngineId;
use kvgate_kv::holdings::{Cache, Holdings};
use kvgate_kv::mirror::View;

use super::query::{Basis, Query};

/// What a lookup found.
#[derive(Debug, PartialEq, Eq)]
pub struct Overlaps {
    /// By position of the endpoint. Tokens held: the longest held prefix of each sequence, added up, of the best of the
    /// endpoint's ranks. Nothing is expected yet.
    pub bases: Vec<Basis>,
    /// There were blocks to look up, and caches to look them up in.
    pub scored: bool,
}

impl Overlaps {
    /// Whether some endpoint holds some of it.
    pub fn any_held(&self) -> bool {
        self.bases.iter().any(|basis| basis.held > 0)
    }
}

/// The block sizes that the engines' caches use, ascending.
pub fn block_sizes(holdings: &Holdings, view: View, engines: &[EngineId]) -> Vec<u32> {
    let all = holdings.caches();
    let caches = engines.iter().flat_map(|engine| all.trusted(engine.0));
    let mut sizes: Vec<u32> = caches.filter(|c| c.view == view).filter_map(|c| c.block_size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Looks every chain up once and adds up what each cache holds.
pub fn overlaps(
    holdings: &Holdings,
    view: View,
    engines: &[EngineId],
    query: &Query,
    audit: bool,
) -> Overlaps {
    let mut found = Vec::new();
    // tokens by block size and cache number
    let mut held: Vec<(u32, Vec<u64>)> = Vec::new();
    for (size, chains) in &query.chains {
        let mut by_cache = Vec::new();
        for chain in chains.iter().filter(|chain| !chain.is_empty()) {
            holdings.inventory().overlap(chain, audit, &mut found);
            for (cache, blocks) in &found {
                let at = usize::from(cache.0);
                if by_cache.len() <= at {
                    by_cache.resize(at + 1, 0);
                }
                if let Some(tokens) = by_cache.get_mut(at) {
                    *tokens += u64::from(*blocks) * u64::from(*size);
                }
            }
        }
        held.push((*size, by_cache));
    }
    let to_look_up = query.chains.iter().any(|(_, chains)| chains.iter().any(|chain| !chain.is_empty()));
    let mut scored = false;
    let all = holdings.caches();
    let bases = engines.iter().map(|engine| {
        let of = |c: &Cache| {
            let (_, by_cache) = held.iter().find(|(size, _)| c.block_size == Some(*size))?;
            by_cache.get(usize::from(c.id.0)).copied()
        };
        let seen = all.trusted(engine.0).iter().filter(|c| c.view == view && c.block_size.is_some());
        let held = seen.inspect(|_| scored = to_look_up).filter_map(of).max().unwrap_or(0);
        Basis { held, expected: 0 }
    });
    Overlaps { bases: bases.collect(), scored }
}
