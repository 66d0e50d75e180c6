//! Key -> slab entry. Open addressing over cache lines of twelve.
//!
//! The top bits of a key choose one of 256 segments, which grow on their own. In a segment, a bucket is one
//! line: twelve one-byte tags (0: empty), a count of the entries that wanted this bucket and went on to a
//! later one, and twelve entry numbers with six more tag bits on top. Nothing ever moves, so readers need no
//! lock, and the counts end a search, so there are no tombstones.
use super::slab::{Chunk, Entry, NUMBER_BITS, Slab, entry};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};

const SLOTS: usize = 12;
const ONES: u64 = 0x0101_0101_0101_0101;
const HIGHS: u64 = 0x8080_8080_8080_8080;

const SEGMENT_BITS: u32 = 8;
const SEGMENTS: usize = 1 << SEGMENT_BITS;

/// Slots that a segment grows to at least, so that small ones do not grow often.
const LEAST: usize = 256;

/// Buckets handled together in a rebuild, so that their cache misses overlap.
const GROUP: usize = 8;

/// Words 0 and 1: tags, and in the upper half of word 1 the count. Words 2 to 7: pairs of numbers.
#[repr(align(64))]
#[derive(Default)]
pub(crate) struct Bucket([AtomicU64; 8]);

pub(crate) type Segment = Arc<[Bucket]>;
pub(crate) type Segments = [Segment; SEGMENTS];

#[inline(always)]
fn tag(key: u64) -> u8 {
    (key as u8).max(1)
}

/// An entry number under six tag bits.
#[inline(always)]
fn tagged(key: u64, number: u32) -> u32 {
    ((key as u32) >> 8 << NUMBER_BITS) | number
}

#[inline(always)]
fn number_of(tagged: u32) -> u32 {
    tagged & ((1 << NUMBER_BITS) - 1)
}

/// The high bit of every byte that equals `tag`; above a true one there may be false ones.
#[inline(always)]
fn equal(word: u64, tag: u8) -> u64 {
    let x = word ^ (u64::from(tag) * ONES);
    x.wrapping_sub(ONES) & !x & HIGHS
}

#[inline(always)]
fn segment_of(key: u64) -> usize {
    (key >> (64 - SEGMENT_BITS)) as usize
}

/// The bucket of a segment where the search for `key` begins. Order-preserving, so a rebuild reads and writes
/// in order.
#[inline(always)]
fn home(key: u64, buckets: usize) -> usize {
    ((u128::from(key << SEGMENT_BITS) * buckets as u128) >> 64) as usize
}

#[inline(always)]
fn next(b: usize, buckets: usize) -> usize {
    if b + 1 == buckets { 0 } else { b + 1 }
}

fn empty_segment(slots: usize) -> Segment {
    (0..(slots / SLOTS + 1).max(2)).map(|_| Bucket::default()).collect()
}

/// Entries a segment may hold: 85 % of its slots.
fn limit(segment: &[Bucket]) -> usize {
    segment.len() * SLOTS * 85 / 100
}

impl Bucket {
    #[inline(always)]
    fn tagged(&self, slot: usize) -> u32 {
        (self.0[2 + slot / 2].load(Acquire) >> (32 * (slot % 2))) as u32
    }

    fn write(&self, slot: usize, tag: u8, tagged: u32) {
        let w = &self.0[2 + slot / 2];
        let shift = 32 * (slot % 2);
        w.store(w.load(Relaxed) & !(0xFFFF_FFFF << shift) | u64::from(tagged) << shift, Release);
        self.write_tag(slot, tag);
    }

    fn write_tag(&self, slot: usize, tag: u8) {
        let w = &self.0[slot / 8];
        let shift = 8 * (slot % 8);
        w.store(w.load(Relaxed) & !(0xFF << shift) | u64::from(tag) << shift, Release);
    }

    /// Slots that may hold `tag`, as high bits of the twelve tag bytes; and whether entries went on from here.
    #[inline(always)]
    fn candidates(&self, tag: u8) -> (u128, bool) {
        let lo = self.0[0].load(Acquire);
        let hi = self.0[1].load(Acquire);
        let upper = equal(hi, tag) & 0xFFFF_FFFF;
        (u128::from(equal(lo, tag)) | u128::from(upper) << 64, hi >> 32 != 0)
    }

    fn count(&self, up: bool) {
        let w = &self.0[1];
        let v = w.load(Relaxed);
        w.store(if up { v + (1 << 32) } else { v - (1 << 32) }, Release);
    }

    /// Appends the numbers of all entries in it.
    fn numbers(&self, out: &mut Vec<u32>) {
        let tags = u128::from(self.0[0].load(Relaxed)) | u128::from(self.0[1].load(Relaxed)) << 64;
        out.extend((0..SLOTS).filter(|s| tags >> (8 * s) & 0xFF != 0).map(|s| number_of(self.tagged(s))));
    }
}

/// Starts loading the line where `key` would be.
#[inline(always)]
pub(crate) fn touch(segments: &Segments, key: u64) -> u64 {
    let segment = &segments[segment_of(key)];
    segment[home(key, segment.len())].0[0].load(Relaxed)
}

/// Starts loading the entry that `key` most likely has; its bucket should be near by now.
#[inline(always)]
pub(crate) fn touch_entry(segments: &Segments, chunks: &[Chunk], key: u64) -> u64 {
    let segment = &segments[segment_of(key)];
    let bucket = &segment[home(key, segment.len())];
    let (slots, _) = bucket.candidates(tag(key));
    if slots == 0 {
        return 0;
    }
    let number = number_of(bucket.tagged(slots.trailing_zeros() as usize / 8));
    entry(chunks, number).map_or(0, |e| e.key.load(Relaxed))
}

pub(crate) enum Found<'a> {
    Entry(&'a Entry),
    Absent,
    /// The index is newer than the chunks.
    Stale,
}

#[inline(always)]
pub(crate) fn find<'a>(segments: &Segments, chunks: &'a [Chunk], key: u64) -> Found<'a> {
    let (tag, tagged_key) = (tag(key), tagged(key, 0));
    let segment = &segments[segment_of(key)];
    let mut b = home(key, segment.len());
    for _ in 0..segment.len() {
        let bucket = &segment[b];
        let (mut slots, more) = bucket.candidates(tag);
        while slots != 0 {
            let tagged = bucket.tagged(slots.trailing_zeros() as usize / 8);
            slots &= slots - 1;
            if tagged ^ tagged_key >= 1 << NUMBER_BITS {
                continue;
            }
            let Some(e) = entry(chunks, number_of(tagged)) else { return Found::Stale };
            if e.key.load(Acquire) == key {
                return Found::Entry(e);
            }
        }
        if !more {
            return Found::Absent;
        }
        b = next(b, segment.len());
    }
    Found::Absent
}

/// The ingest thread's side.
pub(crate) struct Index {
    pub segments: Arc<Segments>,
    lens: [usize; SEGMENTS],
}

impl Index {
    pub fn with_room(entries: usize) -> Self {
        let segments = Arc::new(std::array::from_fn(|_| empty_segment(entries / SEGMENTS)));
        Index { segments, lens: [0; SEGMENTS] }
    }

    /// One over everything in the slab.
    pub fn over(entries: usize, slab: &Slab) -> Self {
        let mut index = Self::with_room(entries);
        let mut all = slab.iter().map(|(i, e)| (e.key.load(Relaxed), i)).peekable();
        while all.peek().is_some() {
            // In groups, so that their cache misses overlap.
            let mut group = [(0, 0); 32];
            let n = group.iter_mut().zip(&mut all).map(|(to, from)| *to = from).count();
            black_box(group[..n].iter().fold(0, |sum, (key, _)| sum ^ touch(&index.segments, *key)));
            for (key, number) in &group[..n] {
                index.make_room(*key, slab);
                index.insert(*key, *number);
            }
        }
        index
    }

    pub fn len(&self) -> usize {
        self.lens.iter().sum()
    }

    pub fn bytes(&self) -> usize {
        self.segments.iter().map(|s| size_of_val(&**s)).sum()
    }

    /// Sees to it that `key` can be inserted. True when that took a new segment, which readers must see before the entry is.
    #[inline(always)]
    pub fn make_room(&mut self, key: u64, slab: &Slab) -> bool {
        let s = segment_of(key);
        let full = self.lens[s] >= limit(&self.segments[s]);
        if full {
            self.grow(s, slab);
        }
        full
    }

    #[cold]
    fn grow(&mut self, s: usize, slab: &Slab) {
        let old = &self.segments[s];
        let segment = empty_segment((limit(old) * 2).max(LEAST));
        let (mut numbers, mut keys) = (Vec::new(), Vec::new());
        for buckets in old.chunks(GROUP) {
            numbers.clear();
            buckets.iter().for_each(|b| b.numbers(&mut numbers));
            keys.clear();
            keys.extend(numbers.iter().map(|n| slab.get(*n).key.load(Relaxed)));
            keys.iter().zip(&numbers).for_each(|(key, number)| put(&segment, *key, *number));
        }
        let mut segments = Segments::clone(&self.segments);
        segments[s] = segment;
        self.segments = Arc::new(segments);
    }

    /// Needs [`Index::make_room`], and `key` absent.
    pub fn insert(&mut self, key: u64, number: u32) {
        let s = segment_of(key);
        put(&self.segments[s], key, number);
        self.lens[s] += 1;
    }

    /// Buckets passed on the way to an entry.
    pub fn steps(&self, key: u64, number: u32) -> Option<usize> {
        let n = self.segments[segment_of(key)].len();
        Some((self.locate(key, |n| n == number)?.0 + n - home(key, n)) % n)
    }

    /// What all buckets count.
    pub fn passed(&self) -> usize {
        let buckets = self.segments.iter().flat_map(|s| s.iter());
        buckets.map(|b| (b.0[1].load(Relaxed) >> 32) as usize).sum()
    }

    #[inline(always)]
    pub fn find(&self, slab: &Slab, key: u64) -> Option<u32> {
        self.locate(key, |n| slab.get(n).key.load(Relaxed) == key).map(|(_, _, n)| n)
    }

    pub fn remove(&mut self, key: u64, number: u32) {
        let Some((b, slot, _)) = self.locate(key, |n| n == number) else { return };
        let s = segment_of(key);
        let segment = &self.segments[s];
        segment[b].write_tag(slot, 0);
        let mut passed = home(key, segment.len());
        while passed != b {
            segment[passed].count(false);
            passed = next(passed, segment.len());
        }
        self.lens[s] -= 1;
    }

    #[inline(always)]
    fn locate(&self, key: u64, hit: impl Fn(u32) -> bool) -> Option<(usize, usize, u32)> {
        let (tag, tagged_key) = (tag(key), tagged(key, 0));
        let segment = &self.segments[segment_of(key)];
        let mut b = home(key, segment.len());
        for _ in 0..segment.len() {
            let bucket = &segment[b];
            let (mut slots, more) = bucket.candidates(tag);
            while slots != 0 {
                let slot = slots.trailing_zeros() as usize / 8;
                let tagged = bucket.tagged(slot);
                if tagged ^ tagged_key < 1 << NUMBER_BITS && hit(number_of(tagged)) {
                    return Some((b, slot, number_of(tagged)));
                }
                slots &= slots - 1;
            }
            if !more {
                return None;
            }
            b = next(b, segment.len());
        }
        None
    }
}

/// Needs a free slot, and `key` absent.
fn put(segment: &[Bucket], key: u64, number: u32) {
    let mut b = home(key, segment.len());
    loop {
        let (empty, _) = segment[b].candidates(0);
        if empty != 0 {
            let slot = empty.trailing_zeros() as usize / 8;
            return segment[b].write(slot, tag(key), tagged(key, number));
        }
        segment[b].count(true);
        b = next(b, segment.len());
    }
}
