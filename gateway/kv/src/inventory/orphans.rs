//! Blocks whose parent is unknown: remembered, not credited, adopted when the parent turns up. Bounded.
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};

pub(crate) struct Orphan {
    pub parent: u64,
    pub tokens: u64,
    pub copies: u32,
}

#[derive(Default)]
pub(crate) struct Orphans {
    by_hash: HashMap<u64, Orphan>,
    /// (parent, orphan).
    waiting: BTreeSet<(u64, u64)>,
}

impl Orphans {
    pub fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// One more copy of an orphan. False: there is no room for it.
    pub fn add(&mut self, engine: u64, parent: u64, tokens: u64, limit: usize) -> bool {
        let full = self.by_hash.len() >= limit;
        match self.by_hash.entry(engine) {
            Entry::Occupied(mut o) => o.get_mut().copies = o.get().copies.saturating_add(1),
            Entry::Vacant(_) if full => return false,
            Entry::Vacant(v) => {
                v.insert(Orphan { parent, tokens, copies: 1 });
                self.waiting.insert((parent, engine));
            }
        }
        true
    }

    /// Drops one copy. False: no such orphan.
    pub fn drop_copy(&mut self, engine: u64) -> bool {
        let Some(o) = self.by_hash.get_mut(&engine) else { return false };
        o.copies -= 1;
        if o.copies == 0 {
            self.take(engine);
        }
        true
    }

    pub fn take(&mut self, engine: u64) -> Option<Orphan> {
        let o = self.by_hash.remove(&engine)?;
        self.waiting.remove(&(o.parent, engine));
        Some(o)
    }

    /// Takes out the orphans that waited for `parent`.
    pub fn waiting_for(&mut self, parent: u64) -> Vec<(u64, Orphan)> {
        let children: Vec<u64> = self.waiting.range((parent, 0)..=(parent, u64::MAX)).map(|c| c.1).collect();
        children.into_iter().filter_map(|e| Some((e, self.take(e)?))).collect()
    }

    /// Engine hash and copies of each.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        self.by_hash.iter().map(|(engine, o)| (*engine, o.copies))
    }
}
