//! The one thread that writes: what an event does to a cache.
use super::CacheId;
use super::blocks::{Before, Blocks, GROUP};
use super::cache::Cache;
use super::overlap::Inventory;
use super::table::Table;
use super::types::{Config, Counts, Effect, Row, SLOTS, Stats};
use crate::own::mix;
use std::collections::VecDeque;

/// Cells of retired caches swept with each event.
const SWEEP: usize = 256;

/// A cache that was cleared: nobody's any more, its bits not yet all gone.
struct Retired {
    slot: u16,
    table: Table,
    /// Snapshots up to this one still show the slot as live.
    seq: u64,
}

/// The writer's side of an inventory; one thread owns it.
pub struct Ingest {
    blocks: Blocks,
    caches: Vec<Option<Cache>>,
    retired: VecDeque<Retired>,
    free_slots: Vec<u16>,
    max_orphans: usize,
    stats: Stats,
}

impl Ingest {
    /// An empty inventory: its writer, and a first reader to clone.
    pub fn new(config: Config) -> (Ingest, Inventory) {
        let words: u16 = match config.max_caches {
            0..=63 => 1,
            64..=319 => 5,
            320..=575 => 9,
            _ => 16,
        };
        let slots = (words * 64).min(SLOTS);
        let blocks = Blocks::new(words.into());
        let inventory = Inventory { published: blocks.published.clone() };
        let ingest = Ingest {
            blocks,
            caches: (0..config.max_caches.min(slots - 1)).map(|_| None).collect(),
            retired: VecDeque::new(),
            free_slots: (0..slots).rev().collect(),
            max_orphans: config.max_orphans,
            stats: Stats::default(),
        };
        (ingest, inventory)
    }

    /// A cache that will likely hold `expected` blocks (0: unknown) and may hold `bound`, orphans included.
    /// None, and counted: too many caches.
    pub fn add_cache(&mut self, expected: usize, bound: usize) -> Option<CacheId> {
        let Some(id) = self.caches.iter().position(Option::is_none) else {
            self.stats.caches_refused += 1;
            return None;
        };
        let slot = self.take_slot();
        self.caches[id] = Some(Cache::new(slot, expected, bound));
        self.blocks.assign(slot, id as u16);
        self.blocks.publish();
        Some(CacheId(id as u16))
    }

    /// Forgets a cache and what it holds. Its id may be given to another one.
    pub fn remove_cache(&mut self, id: CacheId) {
        if let Some(cache) = self.caches.get_mut(usize::from(id.0)).and_then(Option::take) {
            self.blocks.retire(cache.slot);
            self.retire(cache);
        }
    }

    /// Sets how many blocks a cache may hold, orphans included; what it holds already stays until the next
    /// store.
    pub fn set_bound(&mut self, id: CacheId, bound: usize) {
        if let Some(cache) = self.cache_mut(id) {
            cache.bound = bound;
        }
    }

    /// Own view: blocks were stored, each the child of the one before it, the first the child of `parent`
    /// (None: the first of its chain). `tokens` are their token hashes, of the same length as `engine`.
    pub fn stored(&mut self, id: CacheId, parent: Option<u64>, engine: &[u64], tokens: &[u64]) -> Effect {
        let Some(Some(cache)) = self.caches.get_mut(usize::from(id.0)) else { return Effect::Refused };
        let count = engine.len().min(tokens.len());
        if cache.len().saturating_add(count) > cache.bound {
            return self.overflow(id);
        }
        let mut before = self.blocks.before(&cache.table, parent);
        let mut missed = 0;
        for (engine, tokens) in engine.chunks(GROUP).zip(tokens.chunks(GROUP)) {
            if !self.blocks.reserve(GROUP) {
                return Effect::Refused;
            }
            cache.table.reserve(engine.len());
            if let Before::Key(key) = before {
                self.blocks.touch_chain(&cache.table, key, engine, tokens);
            }
            for (&engine, &tokens) in engine.iter().zip(tokens) {
                before = match (cache.table.look(engine), before) {
                    (Ok(word), _) => {
                        cache.more(engine, word, 1);
                        Before::Key(self.blocks.key(word >> 2))
                    }
                    (Err(cell), Before::Key(key)) => {
                        let key = mix(key, tokens);
                        let copies = match cache.orphans.len() {
                            0 => 1,
                            _ => cache.orphans.take(engine).map_or(0, |o| o.copies).saturating_add(1),
                        };
                        self.blocks.credit(cache, cell, engine, key, copies);
                        if cache.orphans.len() != 0 && !self.blocks.adopt(cache, engine, key) {
                            return Effect::Refused;
                        }
                        Before::Key(key)
                    }
                    (Err(_), Before::Engine(parent)) => {
                        missed += usize::from(!cache.orphans.add(engine, parent, tokens, self.max_orphans));
                        Before::Engine(engine)
                    }
                };
            }
        }
        self.stats.orphans_refused += missed as u64;
        self.upkeep(SWEEP);
        Effect::Applied { missed }
    }

    /// Published view: blocks were stored, each looked up by its engine hash, 0 as 1. There are no orphans.
    pub fn stored_published(&mut self, id: CacheId, engine: &[u64]) -> Effect {
        let Some(Some(cache)) = self.caches.get_mut(usize::from(id.0)) else { return Effect::Refused };
        if cache.len().saturating_add(engine.len()) > cache.bound {
            return self.overflow(id);
        }
        for engine in engine.chunks(GROUP) {
            if !self.blocks.reserve(GROUP) {
                return Effect::Refused;
            }
            cache.table.reserve(engine.len());
            self.blocks.touch_keys(&cache.table, engine);
            for &engine in engine {
                match cache.table.look(engine) {
                    Ok(word) => cache.more(engine, word, 1),
                    Err(cell) => self.blocks.credit(cache, cell, engine, engine.max(1), 1),
                }
            }
        }
        self.upkeep(SWEEP);
        Effect::Applied { missed: 0 }
    }

    /// One copy of each block was evicted; either view.
    pub fn removed(&mut self, id: CacheId, engine: &[u64]) -> Effect {
        let Some(Some(cache)) = self.caches.get_mut(usize::from(id.0)) else { return Effect::Refused };
        let mut missed = 0;
        for engine in engine.chunks(GROUP) {
            if engine.len() > 1 {
                self.blocks.touch_entries(&cache.table, engine);
            }
            for &engine in engine {
                match cache.table.get(engine) {
                    Some(word) if cache.less(engine, word) => {
                        cache.table.remove(engine);
                        self.blocks.forget(cache, word >> 2);
                    }
                    Some(_) => {}
                    None => missed += usize::from(!cache.orphans.drop_copy(engine)),
                }
            }
        }
        cache.table.shrink();
        self.stats.absent_removals += missed as u64;
        self.upkeep(SWEEP);
        Effect::Applied { missed }
    }

    /// The cache holds nothing any more. Readers see it at once, however much it held.
    pub fn cleared(&mut self, id: CacheId) -> Effect {
        if self.cache(id).is_none() {
            return Effect::Refused;
        }
        self.clear(id);
        Effect::Applied { missed: 0 }
    }

    /// Sweeps up to `budget` cells of cleared caches; for idle moments. True when there is more to do.
    pub fn upkeep(&mut self, budget: usize) -> bool {
        self.blocks.release_old();
        if !self.retired.is_empty() {
            self.sweep(budget);
        }
        if self.blocks.sparse() {
            let tables = self.retired.iter_mut().map(|r| &mut r.table);
            self.blocks.compact(self.caches.iter_mut().flatten(), tables);
            self.stats.compactions += 1;
        }
        !self.retired.is_empty()
    }

    /// Totals; walks the caches, not the blocks.
    pub fn stats(&self) -> Stats {
        let caches = self.caches.iter().flatten();
        Stats {
            caches: caches.clone().count(),
            blocks: self.blocks.live(),
            pairs: caches.clone().map(|c| c.table.len()).sum(),
            bytes: self.blocks.bytes()
                + caches
                    .clone()
                    .map(|c| &c.table)
                    .chain(self.retired.iter().map(|r| &r.table))
                    .map(Table::bytes)
                    .sum::<usize>(),
            orphans: caches.map(|c| c.orphans.len()).sum(),
            ..self.stats
        }
    }

    /// What a cache holds, counted. None: no such cache.
    pub fn counts(&self, id: CacheId) -> Option<Counts> {
        let cache = self.cache(id)?;
        Some(Counts {
            blocks: cache.table.len(),
            orphans: cache.orphans.len(),
            gaps: self.blocks.uneven(cache.slot),
        })
    }

    /// What a cache holds, block by block, in no order; empty when there is no such cache.
    pub fn dump(&self, id: CacheId) -> Vec<Row> {
        let Some(cache) = self.cache(id) else { return Vec::new() };
        let held = cache.table.iter().map(|(engine_hash, word)| Row {
            engine_hash,
            copies: cache.copies(engine_hash, word),
            orphan: false,
        });
        let orphans =
            cache.orphans.iter().map(|(engine_hash, copies)| Row { engine_hash, copies, orphan: true });
        held.chain(orphans).collect()
    }

    /// Recounts everything; for tests.
    #[doc(hidden)]
    pub fn verify(&self) -> Result<(), &'static str> {
        self.blocks.verify(self.caches.iter().flatten())
    }

    fn cache(&self, id: CacheId) -> Option<&Cache> {
        self.caches.get(usize::from(id.0))?.as_ref()
    }

    fn cache_mut(&mut self, id: CacheId) -> Option<&mut Cache> {
        self.caches.get_mut(usize::from(id.0))?.as_mut()
    }

    fn overflow(&mut self, id: CacheId) -> Effect {
        self.stats.overflows += 1;
        self.clear(id);
        Effect::Overflow
    }

    fn clear(&mut self, id: CacheId) {
        if self.cache(id).is_none_or(|c| c.len() == 0) {
            return;
        }
        let slot = self.take_slot();
        let Some(cache) = self.cache_mut(id) else { return };
        let fresh = Cache::new(slot, cache.expected, cache.bound);
        let old = std::mem::replace(cache, fresh);
        self.blocks.retire(old.slot);
        self.blocks.assign(slot, id.0);
        self.retire(old);
    }

    fn retire(&mut self, cache: Cache) {
        let seq = self.blocks.publish();
        self.retired.push_back(Retired { slot: cache.slot, table: cache.table, seq });
    }

    fn sweep(&mut self, mut budget: usize) {
        while let Some(r) = self.retired.front_mut() {
            loop {
                let mut entries = [0; GROUP];
                let n = r.table.drain(&mut entries);
                if n == 0 {
                    break;
                }
                self.blocks.touch_held(&entries[..n]);
                entries[..n].iter().for_each(|entry| self.blocks.uncredit(*entry, r.slot));
                budget = budget.saturating_sub(n);
                if budget == 0 {
                    return;
                }
            }
            if !self.blocks.quiescent(r.seq) {
                return;
            }
            self.free_slots.push(r.slot);
            self.retired.pop_front();
        }
    }

    /// A slot that no holder set and no reader's snapshot knows. There is always one more than caches, so
    /// at worst this finishes a sweep and waits for a lookup to end.
    fn take_slot(&mut self) -> u16 {
        loop {
            if let Some(slot) = self.free_slots.pop() {
                return slot;
            }
            self.sweep(usize::MAX);
            if self.free_slots.is_empty() {
                std::thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader that loaded its snapshot before a clear still takes the slot for the cleared cache's.
    #[test]
    fn a_slot_is_not_given_again_while_a_reader_may_know_it() {
        let (mut ingest, inventory) = Ingest::new(Config { max_caches: 4, max_orphans: 0 });
        let [a, b] = [(); 2].map(|()| ingest.add_cache(0, 100).unwrap());
        ingest.stored(a, None, &[1, 2], &[1, 2]);
        let slot = ingest.cache(a).unwrap().slot;
        let reader = inventory.published.load_full();
        ingest.cleared(a);
        assert!(ingest.upkeep(usize::MAX), "swept, but not done");
        assert_eq!(ingest.stats().blocks, 0);
        for _ in 0..40 {
            ingest.stored(b, None, &[1, 2], &[3, 4]);
            ingest.cleared(b);
            assert_ne!(ingest.cache(b).unwrap().slot, slot);
        }
        drop(reader);
        assert!(!ingest.upkeep(usize::MAX));
        assert!(ingest.free_slots.contains(&slot));
    }
}
