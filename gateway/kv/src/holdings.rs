//! What routing reads: the inventory, the caches of each engine, and the hasher that prompts share with events.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::inventory::Inventory;
use crate::mirror::CacheInfo;
use crate::own::OwnHasher;

type Caches = HashMap<u64, Arc<[CacheInfo]>>;

/// The readers' side of the event plane. The writer replaces an engine's caches when they change in kind; the
/// blocks in them change all the time, in the inventory.
pub struct Holdings {
    inventory: Inventory,
    hasher: OwnHasher,
    caches: ArcSwap<Caches>,
}

impl Holdings {
    /// No engine yet.
    pub fn new(inventory: Inventory, hasher: OwnHasher) -> Self {
        Self { inventory, hasher, caches: ArcSwap::default() }
    }

    /// Where chains are looked up.
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// What own hashes are computed with.
    pub fn hasher(&self) -> &OwnHasher {
        &self.hasher
    }

    /// The caches of an engine, by the number it is followed under; none before its first event. Their block
    /// counts are those of the moment they were last replaced.
    pub fn caches(&self, engine: u64) -> Arc<[CacheInfo]> {
        self.caches.load().get(&engine).cloned().unwrap_or_default()
    }

    /// Replaces the caches of an engine; none to forget it.
    pub fn replace(&self, engine: u64, caches: &[CacheInfo]) {
        self.caches.rcu(|all| {
            let mut all = Caches::clone(all);
            match caches {
                [] => all.remove(&engine),
                some => all.insert(engine, some.into()),
            };
            all
        });
    }
}
