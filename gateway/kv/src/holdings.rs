//! What routing reads: the inventory, the caches of each engine, and the hasher that prompts share with events.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

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

/// What is known of all that an engine holds: written by those who follow it, for any number of readers.
#[derive(Clone, Debug, Default)]
pub struct Standing(Arc<State>);

#[derive(Debug, Default)]
struct State {
    trusted: AtomicBool,
    blocks: AtomicUsize,
}

impl Standing {
    /// Says whether what is held stands for the engine as it is now. Not while its events are not followed, nor
    /// after that until the engine has proved to be the one it was: it may have restarted, and hold nothing.
    pub fn set_trusted(&self, trusted: bool) {
        self.0.trusted.store(trusted, Ordering::Release);
    }

    /// As of now.
    pub fn trusted(&self) -> bool {
        self.0.trusted.load(Ordering::Acquire)
    }

    /// Says how many blocks it holds, those of all ranks together.
    pub fn set_blocks(&self, blocks: usize) {
        self.0.blocks.store(blocks, Ordering::Relaxed);
    }

    /// As of the last batch.
    pub fn blocks(&self) -> usize {
        self.0.blocks.load(Ordering::Relaxed)
    }
}

/// The caches of all engines followed, at one moment.
#[derive(Clone, Debug, Default)]
pub struct Caches(HashMap<u64, (Vec<Cache>, Standing)>);

impl Caches {
    /// The caches of an engine: one for each rank heard of and view kept.
    pub fn of(&self, key: u64) -> &[Cache] {
        self.0.get(&key).map_or(&[], |(caches, _)| caches)
    }

    /// The same, while they can be trusted; else none.
    pub fn trusted(&self, key: u64) -> &[Cache] {
        self.0.get(&key).filter(|(_, standing)| standing.trusted()).map_or(&[], |(caches, _)| caches)
    }

    /// Blocks that an engine holds, trusted or not; 0 for one that was never heard of.
    pub fn blocks(&self, key: u64) -> usize {
        self.0.get(&key).map_or(0, |(_, standing)| standing.blocks())
    }

    /// Sets the caches of an engine; none to forget it.
    pub fn set(&mut self, key: u64, caches: Vec<Cache>, standing: &Standing) {
        if caches.is_empty() {
            self.0.remove(&key);
        } else {
            self.0.insert(key, (caches, standing.clone()));
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
