//! The set of slots that hold a block, in one word.
//!
//! Narrow (up to 64 slots): the word is the set. Wide: up to six slots inline, ten bits each, compact from
//! the low end, 0 for none; beyond that the word names a row of bits, until three are left.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

pub(crate) type RowChunk = Arc<[AtomicU64]>;

const ROWS_PER_CHUNK: usize = 1024;
const ROW: u64 = 1 << 63;
const INLINE: u32 = 6;
const BACK_TO_INLINE: u32 = 3;
const ID: u64 = 0x3FF;

/// The words of a row, or nothing when the snapshot is older than the row.
#[inline(always)]
pub(crate) fn row(chunks: &[RowChunk], words: usize, r: u32) -> Option<&[AtomicU64]> {
    let at = (r as usize % ROWS_PER_CHUNK) * words;
    chunks.get(r as usize / ROWS_PER_CHUNK)?.get(at..at + words)
}

#[inline(always)]
pub(crate) fn is_row<const W: usize>(word: u64) -> bool {
    W > 1 && word & ROW != 0
}

/// The set as a mask; None when the snapshot is older than the row.
#[inline(always)]
pub(crate) fn mask<const W: usize>(word: u64, rows: &[RowChunk]) -> Option<[u64; W]> {
    let mut m = [0; W];
    if W == 1 {
        m[0] = word;
    } else if word & ROW != 0 {
        for (m, w) in m.iter_mut().zip(row(rows, W, word as u32)?) {
            *m = w.load(Acquire);
        }
    } else {
        let mut rest = word;
        while rest != 0 {
            let slot = ((rest & ID) - 1) as usize;
            if let Some(m) = m.get_mut(slot / 64) {
                *m |= 1 << (slot % 64);
            }
            rest >>= 10;
        }
    }
    Some(m)
}

/// The ingest thread's side: changes words, owns the rows.
pub(crate) struct Holders {
    words: usize,
    pub rows: Vec<RowChunk>,
    free: Vec<u32>,
}

impl Holders {
    pub fn new(words: usize) -> Self {
        Holders { words, rows: Vec::new(), free: Vec::new() }
    }

    pub fn narrow(&self) -> bool {
        self.words == 1
    }

    pub fn room(&self) -> usize {
        if self.narrow() { usize::MAX } else { self.free.len() }
    }

    pub fn grow(&mut self) {
        let first = (self.rows.len() * ROWS_PER_CHUNK) as u32;
        self.rows.push((0..ROWS_PER_CHUNK * self.words).map(|_| AtomicU64::new(0)).collect());
        self.free.extend((first..first + ROWS_PER_CHUNK as u32).rev());
    }

    pub fn is_row(&self, word: u64) -> bool {
        !self.narrow() && word & ROW != 0
    }

    pub fn rows_used(&self) -> usize {
        self.rows.len() * ROWS_PER_CHUNK - self.free.len()
    }

    pub fn bytes(&self) -> usize {
        self.rows.iter().map(|r| size_of_val(&**r)).sum()
    }

    pub fn sparse(&self) -> bool {
        self.rows.len() > 4 && self.free.len() * 2 > self.rows.len() * ROWS_PER_CHUNK
    }

    /// The same set as `word` among `from`, in rows of our own.
    pub fn copy(&mut self, word: u64, from: &Holders) -> u64 {
        if self.narrow() || word & ROW == 0 {
            return word;
        }
        if self.free.is_empty() {
            self.grow();
        }
        let bits = row(&from.rows, from.words, word as u32).unwrap_or(&[]);
        let Some(r) = self.free.pop() else { return 0 };
        for (to, w) in row(&self.rows, self.words, r).unwrap_or(&[]).iter().zip(bits) {
            to.store(w.load(Relaxed), Relaxed);
        }
        ROW | u64::from(r)
    }

    pub fn only(&self, slot: u16) -> u64 {
        if self.narrow() { 1 << slot } else { u64::from(slot) + 1 }
    }

    /// Every slot of the set.
    pub fn slots(&self, word: u64) -> Vec<u16> {
        if self.narrow() {
            return set_bits(&[AtomicU64::new(word)]).collect();
        }
        if word & ROW != 0 {
            return set_bits(row(&self.rows, self.words, word as u32).unwrap_or(&[])).collect();
        }
        inline(word).collect()
    }

    pub fn contains(&self, word: u64, slot: u16) -> bool {
        if self.narrow() {
            return word >> slot & 1 == 1;
        }
        if word & ROW != 0 {
            let w = row(&self.rows, self.words, word as u32).and_then(|r| r.get(slot as usize / 64));
            return w.is_some_and(|w| w.load(Relaxed) >> (slot % 64) & 1 == 1);
        }
        inline(word).any(|s| s == slot)
    }

    /// The word with `slot` added; it was absent. Needs a free row.
    pub fn insert(&mut self, word: u64, slot: u16) -> u64 {
        if self.narrow() {
            return word | 1 << slot;
        }
        if word & ROW != 0 {
            self.set(word as u32, slot);
            return word;
        }
        let n = inline(word).count() as u32;
        if n < INLINE {
            return word | (u64::from(slot) + 1) << (10 * n);
        }
        let Some(r) = self.free.pop() else { return word };
        for s in inline(word) {
            self.set(r, s);
        }
        self.set(r, slot);
        ROW | u64::from(r)
    }

    /// The word with `slot` taken out; it was present. 0 when nobody is left.
    /// A row it no longer names must be given back with [`Holders::retire_row`] once the word is stored.
    pub fn remove(&mut self, word: u64, slot: u16) -> u64 {
        if self.narrow() {
            return word & !(1 << slot);
        }
        if word & ROW == 0 {
            return pack(inline(word).filter(|s| *s != slot));
        }
        let Some(bits) = row(&self.rows, self.words, word as u32) else { return 0 };
        if let Some(w) = bits.get(slot as usize / 64) {
            w.store(w.load(Relaxed) & !(1 << (slot % 64)), Release);
        }
        if bits.iter().map(|w| w.load(Relaxed).count_ones()).sum::<u32>() > BACK_TO_INLINE {
            return word;
        }
        pack(set_bits(bits))
    }

    pub fn retire_row(&mut self, before: u64, after: u64) {
        if self.narrow() || before & ROW == 0 || after & ROW != 0 {
            return;
        }
        for w in row(&self.rows, self.words, before as u32).unwrap_or(&[]) {
            w.store(0, Release);
        }
        self.free.push(before as u32);
    }

    fn set(&self, r: u32, slot: u16) {
        if let Some(w) = row(&self.rows, self.words, r).and_then(|r| r.get(slot as usize / 64)) {
            w.store(w.load(Relaxed) | 1 << (slot % 64), Release);
        }
    }
}

fn inline(mut word: u64) -> impl Iterator<Item = u16> {
    std::iter::from_fn(move || {
        let id = (word & ID) as u16;
        word >>= 10;
        id.checked_sub(1)
    })
}

/// An inline word of up to six slots.
fn pack(slots: impl Iterator<Item = u16>) -> u64 {
    slots.enumerate().fold(0, |word, (n, slot)| word | (u64::from(slot) + 1) << (10 * n))
}

fn set_bits(row: &[AtomicU64]) -> impl Iterator<Item = u16> {
    row.iter().enumerate().flat_map(|(i, w)| {
        let mut w = w.load(Relaxed);
        std::iter::from_fn(move || {
            let bit = (w != 0).then(|| (i * 64) as u16 + w.trailing_zeros() as u16)?;
            w &= w - 1;
            Some(bit)
        })
    })
}
