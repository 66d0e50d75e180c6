//! Random event schedules against a naive model: maps, and a walk for every question. Both views.
#![allow(clippy::unwrap_used)]

use kvgate_kv::inventory::{CacheId, Config, Counts, Effect, Ingest, Inventory, Row};
use kvgate_kv::own::{ROOT, mix};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap, HashSet};

#[derive(Default)]
struct Cache {
    published: bool,
    /// Engine hash -> (key, copies).
    held: HashMap<u64, (u64, u32)>,
    /// Engine hash -> (parent, token hash, copies).
    orphans: HashMap<u64, (u64, u64, u32)>,
}

impl Cache {
    fn new(published: bool) -> Self {
        Cache { published, ..Cache::default() }
    }
    fn len(&self) -> usize {
        self.held.len() + self.orphans.len()
    }
    fn rows(&self) -> Vec<Row> {
        let held = self.held.iter().map(|(e, h)| Row { engine_hash: *e, copies: h.1, orphan: false });
        let orphans = self.orphans.iter().map(|(e, o)| Row { engine_hash: *e, copies: o.2, orphan: true });
        let mut rows: Vec<Row> = held.chain(orphans).collect();
        rows.sort();
        rows
    }
}

struct Model {
    caches: BTreeMap<u16, Cache>,
    /// Where each key stands in a chain, to ask about.
    paths: HashMap<u64, Vec<u64>>,
    bound: usize,
    max_orphans: usize,
}

impl Model {
    fn path(&mut self, parent: u64, key: u64) {
        let mut path = self.paths.get(&parent).cloned().unwrap_or_default();
        path.push(key);
        self.paths.insert(key, path);
    }
    fn cache(&mut self, c: u16) -> &mut Cache {
        self.caches.get_mut(&c).unwrap()
    }
    fn credit(&mut self, c: u16, e: u64, t: u64, parent: u64, copies: u32) -> u64 {
        let key = mix(parent, t);
        self.path(parent, key);
        let cache = self.cache(c);
        cache.held.insert(e, (key, copies));
        let waiting: Vec<_> = cache.orphans.iter().filter(|(_, o)| o.0 == e).map(|(k, o)| (*k, *o)).collect();
        for (k, _) in &waiting {
            cache.orphans.remove(k);
        }
        for (k, (_, t, n)) in waiting {
            self.credit(c, k, t, key, n);
        }
        key
    }
    fn stored(&mut self, c: u16, parent: Option<u64>, blocks: &[(u64, u64)]) -> Effect {
        let Some(cache) = self.caches.get_mut(&c) else { return Effect::Refused };
        if cache.len() + blocks.len() > self.bound {
            *cache = Cache::new(cache.published);
            return Effect::Overflow;
        }
        if cache.published {
            self.stored_published(c, parent, blocks);
            return Effect::Applied { missed: 0 };
        }
        let mut missed = 0;
        let mut before = match parent {
            None => Ok(ROOT),
            Some(p) => cache.held.get(&p).map(|h| h.0).ok_or(p),
        };
        for &(e, t) in blocks {
            let max_orphans = self.max_orphans;
            let cache = self.cache(c);
            before = if let Some(h) = cache.held.get_mut(&e) {
                h.1 += 1;
                Ok(h.0)
            } else {
                match before {
                    Ok(key) => {
                        let n = cache.orphans.remove(&e).map_or(0, |o| o.2) + 1;
                        Ok(self.credit(c, e, t, key, n))
                    }
                    Err(p) => {
                        if let Some(o) = cache.orphans.get_mut(&e) {
                            o.2 += 1;
                        } else if cache.orphans.len() < max_orphans {
                            cache.orphans.insert(e, (p, t, 1));
                        } else {
                            missed += 1;
                        }
                        Err(e)
                    }
                }
            };
        }
        Effect::Applied { missed }
    }
    fn stored_published(&mut self, c: u16, parent: Option<u64>, blocks: &[(u64, u64)]) {
        let mut before = parent.unwrap_or_default();
        for &(e, _) in blocks {
            let key = e.max(1);
            self.cache(c).held.entry(e).or_insert((key, 0)).1 += 1;
            self.path(before, key);
            before = key;
        }
    }
    fn removed(&mut self, c: u16, engine: &[u64]) -> Effect {
        let Some(cache) = self.caches.get_mut(&c) else { return Effect::Refused };
        let mut missed = 0;
        for e in engine {
            if let Some(h) = cache.held.get_mut(e) {
                h.1 -= 1;
                if h.1 == 0 {
                    cache.held.remove(e);
                }
            } else if let Some(o) = cache.orphans.get_mut(e) {
                o.2 -= 1;
                if o.2 == 0 {
                    cache.orphans.remove(e);
                }
            } else {
                missed += 1;
            }
        }
        Effect::Applied { missed }
    }
    /// Longest prefix per cache, and whether nothing is held beyond it.
    fn overlap(&self, chain: &[u64]) -> BTreeMap<u16, (u32, bool)> {
        let mut out = BTreeMap::new();
        for (id, c) in &self.caches {
            let held: HashSet<u64> = c.held.values().map(|h| h.0).collect();
            let n = chain.iter().take_while(|h| held.contains(h)).count();
            if n > 0 {
                out.insert(*id, (n as u32, chain[n..].iter().all(|h| !held.contains(h))));
            }
        }
        out
    }
}

#[derive(Clone, Debug)]
enum Op {
    Stored(u16, Option<u64>, Vec<(u64, u64)>),
    Grow(u16, u64, Vec<u64>),
    /// The same block so many times over.
    Again(u16, u64, usize),
    Removed(u16, Vec<u64>),
    Clear(u16),
    Drop(u16),
    Add(bool),
    Upkeep(usize),
}

fn op(c: std::ops::Range<u16>) -> impl Strategy<Value = Op> {
    let e = 0..48u64;
    let t = 0..4u64;
    let blocks = prop::collection::vec((e.clone(), t.clone()), 1..9);
    let tokens = prop::collection::vec(t, 1..9);
    let hashes = prop::collection::vec(e.clone(), 1..7);
    prop_oneof![
        8 => (c.clone(), prop::option::of(e.clone()), blocks).prop_map(|(c, p, b)| Op::Stored(c, p, b)),
        6 => (c.clone(), 0..1000u64, tokens).prop_map(|(c, p, b)| Op::Grow(c, p, b)),
        3 => (c.clone(), e.clone(), 1..9usize).prop_map(|(c, e, n)| Op::Again(c, e, n)),
        2 => (c.clone(), e.clone(), 1..9usize).prop_map(|(c, e, n)| Op::Removed(c, vec![e; n])),
        8 => (c.clone(), hashes).prop_map(|(c, h)| Op::Removed(c, h)),
        1 => c.clone().prop_map(Op::Clear),
        1 => c.prop_map(Op::Drop),
        1 => any::<bool>().prop_map(Op::Add),
        2 => (0..40usize).prop_map(Op::Upkeep),
    ]
}

fn ask(inventory: &Inventory, chain: &[u64], audit: bool) -> BTreeMap<u16, u32> {
    let mut out = vec![(CacheId(9999), 7)];
    inventory.overlap(chain, audit, &mut out);
    let map: BTreeMap<u16, u32> = out.iter().map(|(c, n)| (c.0, *n)).collect();
    assert_eq!(map.len(), out.len(), "a cache twice");
    map
}

struct Rig {
    model: Model,
    ingest: Ingest,
    inventory: Inventory,
    expected: usize,
}

impl Rig {
    fn new(max_caches: u16, start: u16, bound: usize, max_orphans: usize) -> Self {
        let (ingest, inventory) = Ingest::new(Config { max_caches, max_orphans });
        let model = Model { caches: BTreeMap::new(), paths: HashMap::new(), bound, max_orphans };
        let expected = if max_caches > 63 { 0 } else { 100 };
        let mut rig = Rig { model, ingest, inventory, expected };
        for i in 0..start {
            assert!(rig.add(i % 4 == 3));
        }
        rig
    }

    fn add(&mut self, published: bool) -> bool {
        let Some(id) = self.ingest.add_cache(self.expected, self.model.bound) else { return false };
        assert!(self.model.caches.insert(id.0, Cache::new(published)).is_none());
        true
    }

    fn stored(&mut self, c: u16, parent: Option<u64>, blocks: &[(u64, u64)]) {
        let (e, t): (Vec<u64>, Vec<u64>) = blocks.iter().copied().unzip();
        let effect = match self.model.caches.get(&c) {
            Some(cache) if cache.published => self.ingest.stored_published(CacheId(c), &e),
            _ => self.ingest.stored(CacheId(c), parent, &e, &t),
        };
        assert_eq!(effect, self.model.stored(c, parent, blocks));
    }

    fn apply(&mut self, op: Op, max_caches: u16) {
        match op {
            Op::Stored(c, parent, blocks) => self.stored(c, parent, &blocks),
            // A well-behaved engine: a continuation of a held block, with hashes of its own.
            Op::Grow(c, pick, tokens) => {
                let Some(cache) = self.model.caches.get(&c) else { return };
                let mut held: Vec<u64> = cache.held.keys().copied().collect();
                held.sort();
                let parent = (!held.is_empty()).then(|| held[pick as usize % held.len()]);
                let mut h = parent.unwrap_or(99) ^ u64::from(c) << 40;
                let block = |t: &u64| {
                    h = mix(h, *t);
                    (h, *t)
                };
                let blocks: Vec<(u64, u64)> = tokens.iter().map(block).collect();
                self.stored(c, parent, &blocks);
            }
            Op::Again(c, e, n) => (0..n).for_each(|_| self.stored(c, None, &[(e, 1)])),
            Op::Removed(c, e) => {
                assert_eq!(self.ingest.removed(CacheId(c), &e), self.model.removed(c, &e));
            }
            Op::Clear(c) => {
                let effect = self.ingest.cleared(CacheId(c));
                let Some(cache) = self.model.caches.get_mut(&c) else {
                    assert_eq!(effect, Effect::Refused);
                    return;
                };
                *cache = Cache::new(cache.published);
            }
            Op::Drop(c) => {
                self.ingest.remove_cache(CacheId(c));
                self.model.caches.remove(&c);
            }
            Op::Add(published) => {
                let refused = self.ingest.stats().caches_refused;
                if !self.add(published) {
                    assert_eq!(self.model.caches.len(), max_caches as usize);
                    assert_eq!(self.ingest.stats().caches_refused, refused + 1);
                }
            }
            Op::Upkeep(n) => {
                self.ingest.upkeep(n);
            }
        }
    }

    fn check(&self) {
        let Rig { model, ingest, inventory, .. } = self;
        assert_eq!(ingest.verify(), Ok(()));
        for (id, c) in &model.caches {
            let mut rows = ingest.dump(CacheId(*id));
            rows.sort();
            assert_eq!(rows, c.rows());
            let counts = ingest.counts(CacheId(*id)).map(|n| Counts { gaps: false, ..n });
            assert_eq!(counts, Some(Counts { blocks: c.held.len(), orphans: c.orphans.len(), gaps: false }));
        }
        let stats = ingest.stats();
        assert_eq!(stats.caches, model.caches.len());
        assert_eq!(stats.pairs, model.caches.values().map(|c| c.held.len()).sum::<usize>());
        assert_eq!(stats.orphans, model.caches.values().map(|c| c.orphans.len()).sum::<usize>());
        let held = model.caches.values().flat_map(|c| c.held.values());
        let mut asked: Vec<Vec<u64>> = held.map(|h| model.paths[&h.0].clone()).collect();
        asked.sort();
        asked.dedup();
        for mut chain in asked {
            for t in 0..3 {
                chain.push(mix(*chain.last().unwrap(), t));
            }
            let want = model.overlap(&chain);
            let exact: BTreeMap<u16, u32> = want.iter().map(|(c, n)| (*c, n.0)).collect();
            let first = ask(inventory, &chain, false);
            for (c, (n, closed)) in &want {
                assert!(!closed || first.get(c) == Some(n), "bisection: {first:?} want {want:?}");
            }
            assert_eq!(first.len(), want.len());
            assert_eq!(ask(inventory, &chain, true), exact, "audited");
            assert_eq!(ask(inventory, &chain, false), exact, "after the audit");
            for (c, (n, closed)) in &want {
                let gaps = ingest.counts(CacheId(*c)).unwrap().gaps;
                assert!(gaps || *closed || first.get(c) == Some(n), "a gap that an audit did not flag");
            }
        }
        assert!(ask(inventory, &[], true).is_empty());
        assert!(ask(inventory, &[77 << 50], false).is_empty());
    }
}

fn run(max_caches: u16, start: u16, bound: usize, max_orphans: usize, ops: Vec<Op>) {
    let mut rig = Rig::new(max_caches, start, bound, max_orphans);
    for op in ops {
        rig.apply(op, max_caches);
        rig.check();
    }
    // Everything forgotten: nothing may be left, not even in the sweep.
    for c in rig.model.caches.keys() {
        rig.ingest.remove_cache(CacheId(*c));
    }
    while rig.ingest.upkeep(1000) {}
    assert_eq!(rig.ingest.stats().blocks, 0);
}

fn cases(default: u32) -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|c| c.parse().ok()).unwrap_or(default);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(48))]
    #[test]
    fn narrow(ops in prop::collection::vec(op(0..4), 1..120)) { run(4, 3, 10_000, 10_000, ops); }
    #[test]
    fn narrow_full(ops in prop::collection::vec(op(0..63), 1..60)) { run(63, 63, 40, 8, ops); }
    #[test]
    fn wide(ops in prop::collection::vec(op(0..12), 1..120)) { run(300, 12, 10_000, 10_000, ops); }
    #[test]
    fn wider(ops in prop::collection::vec(op(0..20), 1..100)) { run(512, 20, 60, 10, ops); }
}

proptest! {
    #![proptest_config(cases(3))]
    #[test]
    fn widest(ops in prop::collection::vec(op(1002..1022), 40..60)) { run(1022, 1022, 60, 10, ops); }
}
