//! Block entries, shared by all caches, in chunks that never move while a snapshot names them.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

/// A megabyte a chunk, so that the chunk list stays in the nearest cache.
const BITS: u32 = 16;
const CHUNK: usize = 1 << BITS;
/// Entry numbers have 26 bits: 67 million different blocks.
pub(crate) const NUMBER_BITS: u32 = 26;
const MAX_CHUNKS: usize = 1 << (NUMBER_BITS - BITS);

/// One block. `key == 0`: free, and then `holders` is the number of the next free entry.
///
/// Every store is a release and `key` changes before `holders` is reused, so a reader that finds the
/// same `key` before and after an acquiring load of `holders` has that block's holders.
#[derive(Default)]
pub(crate) struct Entry {
    pub key: AtomicU64,
    pub holders: AtomicU64,
}

pub(crate) type Chunk = Arc<[Entry; CHUNK]>;

#[inline(always)]
pub(crate) fn entry(chunks: &[Chunk], i: u32) -> Option<&Entry> {
    Some(&chunks.get((i >> BITS) as usize)?[i as usize & (CHUNK - 1)])
}

/// The ingest thread's side of the slab.
pub(crate) struct Slab {
    pub chunks: Vec<Chunk>,
    free_head: u32,
    free: usize,
    /// Entries from here on were never used. Entry 0 is never used at all.
    bump: u32,
    live: usize,
}

impl Slab {
    pub fn new() -> Self {
        Slab { chunks: Vec::new(), free_head: 0, free: 0, bump: 1, live: 0 }
    }

    pub fn live(&self) -> usize {
        self.live
    }

    pub fn capacity(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    pub fn bytes(&self) -> usize {
        self.capacity() * size_of::<Entry>()
    }

    pub fn sparse(&self) -> bool {
        self.chunks.len() > 4 && self.live * 2 < self.capacity()
    }

    pub fn room(&self) -> usize {
        self.free + self.capacity().saturating_sub(self.bump as usize)
    }

    /// False when entry numbers run out.
    pub fn grow(&mut self) -> bool {
        if self.chunks.len() == MAX_CHUNKS {
            return false;
        }
        let fresh: Arc<[Entry]> = (0..CHUNK).map(|_| Entry::default()).collect();
        if let Ok(chunk) = fresh.try_into() {
            self.chunks.push(chunk);
        }
        true
    }

    #[inline(always)]
    pub fn get(&self, i: u32) -> &Entry {
        &self.chunks[(i >> BITS) as usize][i as usize & (CHUNK - 1)]
    }

    /// Needs [`Slab::room`].
    pub fn alloc(&mut self, key: u64, holders: u64) -> u32 {
        self.live += 1;
        let i = if self.free_head != 0 {
            let i = self.free_head;
            self.free_head = self.get(i).holders.load(Relaxed) as u32;
            self.free -= 1;
            i
        } else {
            self.bump += 1;
            self.bump - 1
        };
        let e = self.get(i);
        e.holders.store(holders, Release);
        e.key.store(key, Release);
        i
    }

    pub fn release(&mut self, i: u32) {
        let head = u64::from(self.free_head);
        let e = self.get(i);
        e.key.store(0, Release);
        e.holders.store(head, Release);
        self.free_head = i;
        self.free += 1;
        self.live -= 1;
    }

    /// All entries in use, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Entry)> {
        (1..self.bump).map(|i| (i, self.get(i))).filter(|(_, e)| e.key.load(Relaxed) != 0)
    }
}
