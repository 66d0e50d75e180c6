//! The inventory under random event schedules, against a naive model. Both views.
#![allow(clippy::unwrap_used)]

mod common;

use common::{NaiveCache, compare};
use kvgate_kv::inventory::{CacheId, Config, Counts, Effect, Ingest, Inventory};
use kvgate_kv::own::mix;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;

#[derive(Clone, Debug)]
enum Op {
    Stored(u16, Option<u64>, Vec<(u64, u64)>),
    Grow(u16, u64, Vec<u64>),
    /// The same block so many times over.
    Again(u16, u64, usize),
    /// The same for all caches but the first so many, as shared prompts are.
    Shared(usize, Vec<(u64, u64)>),
    Removed(u16, Vec<u64>),
    /// One block, of all caches but the first so many.
    RemovedShared(u64, usize),
    Clear(u16),
    Drop(u16),
    Add(bool),
    Bound(u16, usize),
    Upkeep(usize),
}

fn op(c: Range<u16>) -> impl Strategy<Value = Op> {
    let e = 0..48u64;
    let t = 0..4u64;
    let blocks = prop::collection::vec((e.clone(), t.clone()), 1..9);
    let shared = prop::collection::vec((0..4u64, t.clone()), 1..4);
    let tokens = prop::collection::vec(t, 1..9);
    let hashes = prop::collection::vec(e.clone(), 1..7);
    prop_oneof![
        8 => (c.clone(), prop::option::of(e.clone()), blocks).prop_map(|(c, p, b)| Op::Stored(c, p, b)),
        6 => (c.clone(), 0..1000u64, tokens).prop_map(|(c, p, b)| Op::Grow(c, p, b)),
        3 => (c.clone(), e.clone(), 1..9usize).prop_map(|(c, e, n)| Op::Again(c, e, n)),
        2 => (c.clone(), e.clone(), 1..9usize).prop_map(|(c, e, n)| Op::Removed(c, vec![e; n])),
        8 => (c.clone(), hashes).prop_map(|(c, h)| Op::Removed(c, h)),
        2 => (0..6usize, shared).prop_map(|(n, b)| Op::Shared(n, b)),
        2 => (0..4u64, 0..9usize).prop_map(|(e, n)| Op::RemovedShared(e, n)),
        1 => c.clone().prop_map(Op::Clear),
        1 => c.clone().prop_map(Op::Drop),
        1 => any::<bool>().prop_map(Op::Add),
        1 => (c, 20..10_000usize).prop_map(|(c, n)| Op::Bound(c, n)),
        2 => (0..40usize).prop_map(Op::Upkeep),
    ]
}

struct Rig {
    caches: BTreeMap<u16, NaiveCache>,
    ingest: Ingest,
    inventory: Inventory,
    max_caches: u16,
    bound: usize,
    max_orphans: usize,
}

impl Rig {
    fn new(max_caches: u16, start: u16, bound: usize, max_orphans: usize) -> Self {
        let (ingest, inventory) = Ingest::new(Config { max_caches, max_orphans });
        let mut rig = Rig { caches: BTreeMap::new(), ingest, inventory, max_caches, bound, max_orphans };
        for i in 0..start {
            assert!(rig.add(i % 4 == 3));
        }
        rig
    }

    fn add(&mut self, published: bool) -> bool {
        let expected = if self.max_caches > 63 { 0 } else { 100 };
        let Some(id) = self.ingest.add_cache(expected, self.bound) else { return false };
        let cache = NaiveCache::new(published, self.bound, self.max_orphans);
        assert!(self.caches.insert(id.0, cache).is_none());
        true
    }

    fn stored(&mut self, c: u16, parent: Option<u64>, blocks: &[(u64, u64)]) {
        let (e, t): (Vec<u64>, Vec<u64>) = blocks.iter().copied().unzip();
        let (got, want) = match self.caches.get_mut(&c) {
            Some(cache) if cache.published => {
                (self.ingest.stored_published(CacheId(c), &e), cache.stored(parent, blocks))
            }
            Some(cache) => (self.ingest.stored(CacheId(c), parent, &e, &t), cache.stored(parent, blocks)),
            None => (self.ingest.stored(CacheId(c), parent, &e, &t), Effect::Refused),
        };
        assert_eq!(got, want);
    }

    fn removed(&mut self, c: u16, e: &[u64]) {
        let want = self.caches.get_mut(&c).map_or(Effect::Refused, |cache| cache.removed(e));
        assert_eq!(self.ingest.removed(CacheId(c), e), want);
    }

    fn ids(&self) -> Vec<u16> {
        self.caches.keys().copied().collect()
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Stored(c, parent, blocks) => self.stored(c, parent, &blocks),
            // A well-behaved engine: a continuation of a held block, with hashes of its own.
            Op::Grow(c, pick, tokens) => {
                let Some(cache) = self.caches.get(&c) else { return };
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
            Op::Shared(n, blocks) => {
                self.ids().into_iter().skip(n).for_each(|c| self.stored(c, None, &blocks))
            }
            Op::Removed(c, e) => self.removed(c, &e),
            Op::RemovedShared(e, n) => self.ids().into_iter().skip(n).for_each(|c| self.removed(c, &[e])),
            Op::Clear(c) => {
                let known = self.caches.get_mut(&c).map(NaiveCache::clear).is_some();
                let want = if known { Effect::Applied { missed: 0 } } else { Effect::Refused };
                assert_eq!(self.ingest.cleared(CacheId(c)), want);
            }
            Op::Drop(c) => {
                self.ingest.remove_cache(CacheId(c));
                self.caches.remove(&c);
            }
            Op::Add(published) => {
                let refused = self.ingest.stats().caches_refused;
                if !self.add(published) {
                    assert_eq!(self.caches.len(), self.max_caches as usize);
                    assert_eq!(self.ingest.stats().caches_refused, refused + 1);
                }
            }
            Op::Bound(c, bound) => {
                self.ingest.set_bound(CacheId(c), bound);
                self.caches.get_mut(&c).into_iter().for_each(|cache| cache.bound = bound);
            }
            Op::Upkeep(n) => {
                self.ingest.upkeep(n);
            }
        }
    }

    fn check(&self) {
        let Rig { ingest, inventory, .. } = self;
        assert_eq!(ingest.verify(), Ok(()));
        for (id, c) in &self.caches {
            let mut rows = ingest.dump(CacheId(*id));
            rows.sort();
            assert_eq!(rows, c.rows());
            let counts = ingest.counts(CacheId(*id)).map(|n| Counts { gaps: false, ..n });
            let want = Counts { blocks: c.held.len(), orphans: c.orphans.len(), gaps: false };
            assert_eq!(counts, Some(want));
        }
        let stats = ingest.stats();
        assert_eq!(stats.caches, self.caches.len());
        assert_eq!(stats.pairs, self.caches.values().map(|c| c.held.len()).sum::<usize>());
        assert_eq!(stats.orphans, self.caches.values().map(|c| c.orphans.len()).sum::<usize>());
        let caches: Vec<_> = self.caches.iter().map(|(id, c)| (CacheId(*id), c)).collect();
        for id in compare(inventory, &caches) {
            assert!(ingest.counts(id).unwrap().gaps, "a gap that an audit did not flag");
        }
    }
}

fn run(max_caches: u16, start: u16, bound: usize, max_orphans: usize, ops: Vec<Op>) {
    let mut rig = Rig::new(max_caches, start, bound, max_orphans);
    for op in ops {
        rig.apply(op);
        rig.check();
    }
    // Everything forgotten: nothing may be left, not even in the sweep.
    for c in rig.caches.keys() {
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
    #![proptest_config(cases(24))]
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
    #![proptest_config(cases(2))]
    #[test]
    fn widest(ops in prop::collection::vec(op(1002..1022), 20..30)) { run(1022, 1022, 60, 10, ops); }
}
