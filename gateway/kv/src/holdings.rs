//! What routing reads: the inventory, the caches of each engine, and the hasher that prompts share with events.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::{ArcSwap, Guard};

use crate::inventory::{CacheId, Inventory};
use crate::mirror::View;
use crate::own::OwnHasher;

/// A cache that can be looked up, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// The engine, by the number it is followed under.
    pub key: u64,
    /// The data-parallel rank.
    pub rank: u32,
    /// What prompts must be hashed with to look it up.
    pub view: View,
    /// What lookups call it.
    pub id: CacheId,
    /// Tokens per block; `None` while nothing is known to be held.
    pub block_size: Option<u32>,
}

/// Whether what is held of an engine stands for the engine as it is now. Not while its events are not followed, nor
/// after that until the engine has proved to be the one it was: it may have restarted, and hold nothing.
#[derive(Clone, Debug, Default)]
pub struct Trust(Arc<AtomicBool>);

impl Trust {
    /// Says so.
    pub fn set(&self, trusted: bool) {
        self.0.store(trusted, Ordering::Release);
    }

    /// As of now.
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// The caches of all engines followed, at one moment.
#[derive(Clone, Debug, Default)]
pub struct Caches(HashMap<u64, (Vec<Cache>, Trust)>);

impl Caches {
    /// The caches of an engine: one for each rank heard of and view kept.
    pub fn of(&self, key: u64) -> &[Cache] {
        self.0.get(&key).map_or(&[], |(caches, _)| caches)
    }

    /// The same, while they can be trusted; else none.
    pub fn trusted(&self, key: u64) -> &[Cache] {
        self.0.get(&key).filter(|(_, trust)| trust.get()).map_or(&[], |(caches, _)| caches)
    }

    /// Sets the caches of an engine; none to forget it.
    pub fn set(&mut self, key: u64, caches: Vec<Cache>, trust: &Trust) {
        if caches.is_empty() {
            self.0.remove(&key);
        } else {
            self.0.insert(key, (caches, trust.clone()));
        }
    }
}

/// The readers' side of the event plane; nothing in it takes a lock. Which caches there are changes when one comes,
/// goes or is cleared; what is in them changes all the time, in the inventory.
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

    /// Which caches there are now.
    pub fn caches(&self) -> Guard<Arc<Caches>> {
        self.caches.load()
    }

    /// Replaces them: for the one writer.
    pub fn publish(&self, caches: Caches) {
        self.caches.store(Arc::new(caches));
    }
}
