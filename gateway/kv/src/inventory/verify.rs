//! A recount of everything, for tests.
use super::blocks::Blocks;
use super::cache::Cache;
use std::sync::atomic::Ordering::Relaxed;

impl Blocks {
    /// Says what does not add up.
    pub fn verify<'a>(&self, caches: impl Iterator<Item = &'a Cache>) -> Result<(), &'static str> {
        let Blocks { slab, index, holders, .. } = self;
        let (mut rows, mut steps, mut held) = (0, 0, vec![0; self.slots.cache.len()]);
        for (i, e) in slab.iter() {
            let (key, word) = (e.key.load(Relaxed), e.holders.load(Relaxed));
            steps += index.steps(key, i).ok_or("a block that the index does not lead to")?;
            rows += usize::from(holders.is_row(word));
            let slots = holders.slots(word);
            slots.iter().for_each(|slot| held[usize::from(*slot)] += 1);
            if slots.is_empty() {
                return Err("a block that nobody holds");
            }
        }
        for cache in caches {
            let cells: Vec<u32> = cache.table.iter().map(|(_, word)| word >> 2).collect();
            if cells.iter().any(|i| !holders.contains(slab.get(*i).holders.load(Relaxed), cache.slot)) {
                return Err("a cell whose block does not have the slot");
            }
            let aliases: usize = cache.aliases.values().map(|n| *n as usize).sum();
            if cells.len() != cache.table.len() || held[usize::from(cache.slot)] + aliases != cells.len() {
                return Err("cells and holders differ");
            }
        }
        match () {
            _ if index.len() != slab.live() || slab.iter().count() != slab.live() => {
                Err("index and slab differ")
            }
            _ if steps != index.passed() => Err("counts of passed buckets"),
            _ if rows != holders.rows_used() => Err("a lost row"),
            _ => Ok(()),
        }
    }
}
