//! Everything shared with readers, from the ingest thread's side.
use super::cache::Cache;
use super::holders::Holders;
use super::index::{Index, touch};
use super::slab::Slab;
use super::snapshot::{Slots, Snapshot};
use super::table::Table;
use crate::own::{ROOT, mix};
use arc_swap::ArcSwap;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

/// Blocks handled together, so that their cache misses overlap.
pub(crate) const GROUP: usize = 32;

/// What a block's predecessor in its chain is known by.
#[derive(Clone, Copy)]
pub(crate) enum Before {
    Key(u64),
    Engine(u64),
}

pub(crate) struct Blocks {
    pub(super) slab: Slab,
    pub(super) index: Index,
    pub(super) holders: Holders,
    pub(super) slots: Slots,
    uneven: Arc<[AtomicU64]>,
    pub published: Arc<ArcSwap<Snapshot>>,
    /// Superseded snapshots that a reader still had, by number.
    old: Vec<(u64, Arc<Snapshot>)>,
    seq: u64,
}

impl Blocks {
    pub fn new(words: usize) -> Self {
        let (slab, index, holders) = (Slab::new(), Index::with_room(0), Holders::new(words));
        let (slots, uneven) = (Slots::new(words), (0..words).map(|_| AtomicU64::new(0)).collect());
        let first = Self::snapshot(&slab, &index, &holders, &slots, &uneven);
        let published = Arc::new(ArcSwap::from_pointee(first));
        Blocks { slab, index, holders, slots, uneven, published, old: Vec::new(), seq: 0 }
    }

    fn snapshot(
        slab: &Slab,
        index: &Index,
        holders: &Holders,
        slots: &Slots,
        uneven: &Arc<[AtomicU64]>,
    ) -> Snapshot {
        Snapshot {
            chunks: slab.chunks.clone(),
            rows: holders.rows.clone(),
            segments: index.segments.clone(),
            slots: slots.clone(),
            uneven: uneven.clone(),
        }
    }

    /// Returns the number of the snapshot it replaced.
    pub fn publish(&mut self) -> u64 {
        let new = Self::snapshot(&self.slab, &self.index, &self.holders, &self.slots, &self.uneven);
        let old = self.published.swap(Arc::new(new));
        self.old.push((self.seq, old));
        self.release_old();
        self.seq += 1;
        self.seq - 1
    }

    /// Drops the superseded snapshots that no reader has any more.
    pub fn release_old(&mut self) {
        self.old.retain_mut(|(_, s)| Arc::get_mut(s).is_none());
    }

    /// No reader can still be looking at snapshot `seq` or an older one.
    pub fn quiescent(&mut self, seq: u64) -> bool {
        self.release_old();
        self.old.iter().all(|(n, _)| *n > seq)
    }

    pub fn assign(&mut self, slot: u16, cache: u16) {
        self.uneven[slot as usize / 64].fetch_and(!(1 << (slot % 64)), Relaxed);
        self.slots.assign(slot, cache);
    }

    pub fn retire(&mut self, slot: u16) {
        self.slots.retire(slot);
    }

    /// Readers caught the slot breaking prefix closure.
    pub fn uneven(&self, slot: u16) -> bool {
        self.uneven[slot as usize / 64].load(Relaxed) >> (slot % 64) & 1 == 1
    }

    pub fn live(&self) -> usize {
        self.slab.live()
    }

    /// Memory of blocks, index and holder sets.
    pub fn bytes(&self) -> usize {
        self.slab.bytes() + self.index.bytes() + self.holders.bytes()
    }

    #[inline(always)]
    pub fn key(&self, entry: u32) -> u64 {
        self.slab.get(entry).key.load(Relaxed)
    }

    pub fn before(&self, table: &Table, parent: Option<u64>) -> Before {
        match parent {
            None => Before::Key(ROOT),
            Some(p) => table.get(p).map_or(Before::Engine(p), |w| Before::Key(self.key(w >> 2))),
        }
    }

    /// Room for `n` more blocks, visible to readers before any of them is. False: out of numbers.
    pub fn reserve(&mut self, n: usize) -> bool {
        let mut grown = false;
        while self.slab.room() < n {
            if !self.slab.grow() {
                return false;
            }
            grown = true;
        }
        while self.holders.room() < n {
            self.holders.grow();
            grown = true;
        }
        if grown {
            self.publish();
        }
        true
    }

    /// Starts loading what crediting these blocks will need, all at once.
    pub fn touch_chain(&self, table: &Table, mut key: u64, engine: &[u64], tokens: &[u64]) {
        let mut sum = 0;
        for (e, t) in engine.iter().zip(tokens) {
            key = mix(key, *t);
            sum ^= touch(&self.index.segments, key) ^ u64::from(table.touch(*e));
        }
        black_box(sum);
    }

    /// The same where the keys are the engine hashes.
    pub fn touch_keys(&self, table: &Table, engine: &[u64]) {
        let touch = |e: &u64| touch(&self.index.segments, *e) ^ u64::from(table.touch(*e));
        black_box(engine.iter().fold(0, |sum, e| sum ^ touch(e)));
    }

    /// The same for removals: cells first, then entries, then buckets.
    pub fn touch_entries(&self, table: &Table, engine: &[u64]) {
        black_box(engine.iter().fold(0, |sum, e| sum ^ table.touch(*e)));
        let mut entries = [0; GROUP];
        for (entry, e) in entries.iter_mut().zip(engine) {
            *entry = table.get(*e).map_or(0, |w| w >> 2);
        }
        self.touch_held(&entries);
    }

    /// Entries, 0 for none, then their buckets.
    pub fn touch_held(&self, entries: &[u32]) {
        let mut keys = [0; GROUP];
        for (key, entry) in keys.iter_mut().zip(entries).filter(|(_, entry)| **entry != 0) {
            *key = self.key(*entry);
        }
        black_box(keys.iter().fold(0, |sum, key| sum ^ touch(&self.index.segments, *key)));
    }

    /// Puts a new engine hash into the cache's table, and the cache among the block's holders. Needs
    /// [`Blocks::reserve`].
    #[inline(always)]
    pub fn credit(&mut self, cache: &mut Cache, cell: usize, engine: u64, key: u64, copies: u32) {
        let entry = match self.index.find(&self.slab, key) {
            Some(entry) => {
                let e = self.slab.get(entry);
                let word = e.holders.load(Relaxed);
                if self.holders.contains(word, cache.slot) {
                    *cache.aliases.entry(entry).or_default() += 1;
                } else {
                    e.holders.store(self.holders.insert(word, cache.slot), Release);
                }
                entry
            }
            None => {
                if self.index.make_room(key, &self.slab) {
                    self.publish();
                }
                let entry = self.slab.alloc(key, self.holders.only(cache.slot));
                self.index.insert(key, entry);
                entry
            }
        };
        cache.table.put(cell, engine, entry << 2);
        if copies > 1 {
            cache.more(engine, entry << 2, copies - 1);
        }
    }

    /// Credits every orphan that descends from `engine`. False: out of numbers.
    pub fn adopt(&mut self, cache: &mut Cache, engine: u64, key: u64) -> bool {
        let mut parents = vec![(engine, key)];
        while let Some((parent, key)) = parents.pop() {
            for (engine, orphan) in cache.orphans.waiting_for(parent) {
                if !self.reserve(GROUP) {
                    return false;
                }
                cache.table.reserve(1);
                let key = mix(key, orphan.tokens);
                if let Err(cell) = cache.table.look(engine) {
                    self.credit(cache, cell, engine, key, orphan.copies);
                }
                parents.push((engine, key));
            }
        }
        cache.table.reserve(GROUP);
        self.reserve(GROUP)
    }

    /// An engine hash of this cache no longer leads to `entry`.
    pub fn forget(&mut self, cache: &mut Cache, entry: u32) {
        if !cache.aliases.is_empty()
            && let Some(n) = cache.aliases.get_mut(&entry)
        {
            *n -= 1;
            if *n == 0 {
                cache.aliases.remove(&entry);
            }
            return;
        }
        self.uncredit(entry, cache.slot);
    }

    /// Takes a slot from the holders of `entry`, and the entry back when it was the last.
    pub fn uncredit(&mut self, entry: u32, slot: u16) {
        if entry == 0 {
            return;
        }
        let e = self.slab.get(entry);
        let key = e.key.load(Relaxed);
        let before = e.holders.load(Relaxed);
        if key == 0 || !self.holders.contains(before, slot) {
            return;
        }
        let after = self.holders.remove(before, slot);
        if after == 0 {
            self.index.remove(key, entry);
            self.slab.release(entry);
        } else {
            e.holders.store(after, Release);
        }
        self.holders.retire_row(before, after);
    }

    /// More than half of the memory holds nothing.
    pub fn sparse(&self) -> bool {
        self.slab.sparse() || self.holders.sparse()
    }

    /// Moves every block to a fresh slab, index and rows, in order.
    pub fn compact<'a>(
        &mut self,
        caches: impl Iterator<Item = &'a mut Cache>,
        retired: impl Iterator<Item = &'a mut Table>,
    ) {
        let mut slab = Slab::new();
        let mut holders = Holders::new(self.slots.words);
        let mut to = vec![0; self.slab.capacity()];
        for (i, e) in self.slab.iter() {
            if slab.room() == 0 {
                slab.grow();
            }
            let word = holders.copy(e.holders.load(Relaxed), &self.holders);
            to[i as usize] = slab.alloc(e.key.load(Relaxed), word);
        }
        let index = Index::over(slab.live() * 100 / 65, &slab);
        for cache in caches {
            cache.table.renumber(&to);
            cache.aliases = cache.aliases.drain().map(|(e, n)| (to[e as usize], n)).collect();
        }
        for table in retired {
            table.renumber(&to);
        }
        (self.slab, self.index, self.holders) = (slab, index, holders);
        self.publish();
    }
}
