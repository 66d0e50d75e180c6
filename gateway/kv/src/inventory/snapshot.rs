//! What readers see: swapped whole when a chunk, the index or the slots change; holders change in place.
use super::holders::RowChunk;
use super::index::Segments;
use super::slab::Chunk;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

pub(crate) const MAX_WORDS: usize = 16;
pub(crate) const NOBODY: u16 = u16::MAX;

pub(crate) struct Snapshot {
    pub chunks: Vec<Chunk>,
    pub rows: Vec<RowChunk>,
    pub segments: Arc<Segments>,
    pub slots: Slots,
    /// Slots that readers caught breaking prefix closure: scanned, not bisected.
    pub uneven: Arc<[AtomicU64]>,
}

/// Which slot is whose. A slot that is not live has nobody, whatever the holder sets say.
#[derive(Clone)]
pub(crate) struct Slots {
    pub words: usize,
    pub live: [u64; MAX_WORDS],
    pub cache: Vec<u16>,
}

impl Slots {
    pub fn new(words: usize) -> Self {
        Slots { words, live: [0; MAX_WORDS], cache: vec![NOBODY; words * 64] }
    }

    pub fn assign(&mut self, slot: u16, cache: u16) {
        self.live[slot as usize / 64] |= 1 << (slot % 64);
        self.cache[slot as usize] = cache;
    }

    pub fn retire(&mut self, slot: u16) {
        self.live[slot as usize / 64] &= !(1 << (slot % 64));
        self.cache[slot as usize] = NOBODY;
    }
}
