//! Naive models of what an inventory and a mirror do: maps, and a walk for every question.
#![allow(dead_code, clippy::unwrap_used)]

pub mod mirror;

use kvgate_kv::inventory::{CacheId, Effect, Inventory, Row};
use kvgate_kv::own::{ROOT, mix};
use std::collections::{BTreeMap, HashMap, HashSet};

/// One cache of one view.
#[derive(Clone)]
pub struct NaiveCache {
    pub published: bool,
    pub bound: usize,
    pub max_orphans: usize,
    /// Engine hash -> (key, copies).
    pub held: HashMap<u64, (u64, u32)>,
    /// Engine hash -> (parent, token hash, copies).
    pub orphans: HashMap<u64, (u64, u64, u32)>,
    /// Key -> the chain that leads to it.
    paths: HashMap<u64, Vec<u64>>,
}

impl NaiveCache {
    pub fn new(published: bool, bound: usize, max_orphans: usize) -> Self {
        let (held, orphans, paths) = Default::default();
        NaiveCache { published, bound, max_orphans, held, orphans, paths }
    }

    pub fn clear(&mut self) {
        *self = NaiveCache::new(self.published, self.bound, self.max_orphans);
    }

    /// What a dump says, sorted.
    pub fn rows(&self) -> Vec<Row> {
        let held = self.held.iter().map(|(e, h)| Row { engine_hash: *e, copies: h.1, orphan: false });
        let orphans = self.orphans.iter().map(|(e, o)| Row { engine_hash: *e, copies: o.2, orphan: true });
        let mut rows: Vec<Row> = held.chain(orphans).collect();
        rows.sort();
        rows
    }

    /// Blocks of an engine hash and a token hash each.
    pub fn stored(&mut self, parent: Option<u64>, blocks: &[(u64, u64)]) -> Effect {
        if self.held.len() + self.orphans.len() + blocks.len() > self.bound {
            self.clear();
            return Effect::Overflow;
        }
        if self.published {
            self.stored_published(parent, blocks);
            return Effect::Applied { missed: 0 };
        }
        let mut missed = 0;
        let mut before = match parent {
            None => Ok(ROOT),
            Some(p) => self.held.get(&p).map(|h| h.0).ok_or(p),
        };
        for &(e, t) in blocks {
            before = match (self.held.get_mut(&e), before) {
                (Some(h), _) => {
                    h.1 += 1;
                    Ok(h.0)
                }
                (None, Ok(key)) => {
                    let waiting = self.orphans.remove(&e).map_or(0, |o| o.2);
                    Ok(self.credit(e, t, key, waiting + 1))
                }
                (None, Err(p)) => {
                    if let Some(o) = self.orphans.get_mut(&e) {
                        o.2 += 1;
                    } else if self.orphans.len() < self.max_orphans {
                        self.orphans.insert(e, (p, t, 1));
                    } else {
                        missed += 1;
                    }
                    Err(e)
                }
            };
        }
        Effect::Applied { missed }
    }

    fn stored_published(&mut self, parent: Option<u64>, blocks: &[(u64, u64)]) {
        let mut before = parent.unwrap_or_default().max(1);
        for &(e, _) in blocks {
            let key = e.max(1);
            self.held.entry(e).or_insert((key, 0)).1 += 1;
            self.path(before, key);
            before = key;
        }
    }

    fn credit(&mut self, e: u64, t: u64, parent: u64, copies: u32) -> u64 {
        let key = mix(parent, t);
        self.path(parent, key);
        self.held.insert(e, (key, copies));
        let waiting: Vec<_> = self.orphans.iter().filter(|(_, o)| o.0 == e).map(|(k, o)| (*k, *o)).collect();
        for (k, _) in &waiting {
            self.orphans.remove(k);
        }
        for (k, (_, t, n)) in waiting {
            self.credit(k, t, key, n);
        }
        key
    }

    fn path(&mut self, parent: u64, key: u64) {
        let mut path = self.paths.get(&parent).cloned().unwrap_or_default();
        path.push(key);
        self.paths.insert(key, path);
    }

    pub fn removed(&mut self, engine: &[u64]) -> Effect {
        let mut missed = 0;
        for e in engine {
            if let Some(h) = self.held.get_mut(e) {
                h.1 -= 1;
                if h.1 == 0 {
                    self.held.remove(e);
                }
            } else if let Some(o) = self.orphans.get_mut(e) {
                o.2 -= 1;
                if o.2 == 0 {
                    self.orphans.remove(e);
                }
            } else {
                missed += 1;
            }
        }
        Effect::Applied { missed }
    }

    /// For every block it holds, the chain that leads to it, and three blocks that may follow.
    pub fn chains(&self) -> Vec<Vec<u64>> {
        let longer = |held: &(u64, u32)| {
            let mut chain = self.paths[&held.0].clone();
            for t in 0..3 {
                chain.push(mix(*chain.last().unwrap(), t));
            }
            chain
        };
        self.held.values().map(longer).collect()
    }
}

/// The longest prefix that is held, and whether nothing is held beyond it.
fn overlap(held: &HashSet<u64>, chain: &[u64]) -> (u32, bool) {
    let n = chain.iter().take_while(|key| held.contains(key)).count();
    (n as u32, chain[n..].iter().all(|key| !held.contains(key)))
}

/// Who holds how much of a chain; each cache once.
pub fn ask(inventory: &Inventory, chain: &[u64], audit: bool) -> BTreeMap<CacheId, u32> {
    let mut out = vec![(CacheId(9999), 7)];
    inventory.overlap(chain, audit, &mut out);
    let map: BTreeMap<CacheId, u32> = out.iter().copied().collect();
    assert_eq!(map.len(), out.len(), "a cache twice");
    map
}

/// Asks for every chain of every cache, by bisection, audited, and after the audit. Returns the caches that an
/// audit must have flagged.
pub fn compare(inventory: &Inventory, caches: &[(CacheId, &NaiveCache)]) -> HashSet<CacheId> {
    let mut chains: Vec<Vec<u64>> = caches.iter().flat_map(|(_, c)| c.chains()).collect();
    chains.sort();
    chains.dedup();
    let keys = |c: &NaiveCache| c.held.values().map(|h| h.0).collect();
    let held: Vec<(CacheId, HashSet<u64>)> = caches.iter().map(|(id, c)| (*id, keys(c))).collect();
    let mut flagged = HashSet::new();
    for chain in chains {
        let want = held.iter().map(|(id, held)| (*id, overlap(held, &chain))).filter(|(_, (n, _))| *n > 0);
        let want: BTreeMap<CacheId, (u32, bool)> = want.collect();
        let exact: BTreeMap<CacheId, u32> = want.iter().map(|(id, n)| (*id, n.0)).collect();
        let first = ask(inventory, &chain, false);
        for (id, (n, closed)) in &want {
            assert!(!closed || first.get(id) == Some(n), "bisection: {first:?} want {want:?}");
            if first.get(id) != Some(n) {
                flagged.insert(*id);
            }
        }
        assert_eq!(first.len(), want.len());
        assert_eq!(ask(inventory, &chain, true), exact, "audited");
        assert_eq!(ask(inventory, &chain, false), exact, "after the audit");
    }
    assert!(ask(inventory, &[], true).is_empty());
    flagged
}
