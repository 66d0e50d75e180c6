//! The readers' side: the longest held prefix per cache, without a lock.
use super::CacheId;
use super::holders::{RowChunk, is_row, mask};
use super::index::{Found, find, touch, touch_entry};
use super::slab::Entry;
use super::snapshot::{MAX_WORDS, Snapshot};
use arc_swap::ArcSwap;
use std::cell::Cell;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::Ordering::*;

/// A handle for any number of threads.
#[derive(Clone)]
pub struct Inventory {
    pub(crate) published: Arc<ArcSwap<Snapshot>>,
}

/// The lookup restarts when the writer published a chunk while it ran; twice is plenty.
const TRIES: usize = 3;
/// How far a scan loads ahead.
const AHEAD: usize = 8;
/// Parts that a search splits into: the more, the fewer rounds of cache misses, the more probes.
const WAYS: usize = 4;
/// Spans searched side by side.
const SPANS: usize = 4;

impl Inventory {
    /// Fills `out` with every cache that holds the first block of `chain`, and how many of the blocks from
    /// there on it holds without a gap. In no order.
    ///
    /// Holdings are nearly always prefix-closed, so this bisects. With `audit` (say one call in 512) it also
    /// scans, answers with the scan, and from then on scans for each cache it caught with a gap.
    pub fn overlap(&self, chain: &[u64], audit: bool, out: &mut Vec<(CacheId, u32)>) {
        for _ in 0..TRIES {
            out.clear();
            let snapshot = self.published.load();
            let fresh = match snapshot.slots.words {
                1 => Look::<1>::new(&snapshot, chain).run(audit, out),
                5 => Look::<5>::new(&snapshot, chain).run(audit, out),
                9 => Look::<9>::new(&snapshot, chain).run(audit, out),
                _ => Look::<MAX_WORDS>::new(&snapshot, chain).run(audit, out),
            };
            if fresh {
                return;
            }
        }
    }
}

type Mask<const W: usize> = [u64; W];

fn and<const W: usize>(a: Mask<W>, b: Mask<W>) -> Mask<W> {
    std::array::from_fn(|i| a[i] & b[i])
}
fn without<const W: usize>(a: Mask<W>, b: Mask<W>) -> Mask<W> {
    std::array::from_fn(|i| a[i] & !b[i])
}
#[inline(always)]
fn slots<const W: usize>(m: Mask<W>, mut f: impl FnMut(usize)) {
    for (i, mut w) in m.into_iter().enumerate() {
        while w != 0 {
            f(i * 64 + w.trailing_zeros() as usize);
            w &= w - 1;
        }
    }
}

/// `at_lo` hold block `lo`, `at_hi` (among them) hold block `hi` too; everybody else's prefix ends between.
#[derive(Clone, Copy)]
struct Span<const W: usize> {
    lo: usize,
    at_lo: Mask<W>,
    hi: usize,
    at_hi: Mask<W>,
}

impl<const W: usize> Span<W> {
    fn probes(&self) -> impl Iterator<Item = usize> + use<W> {
        let (lo, gap) = (self.lo, self.hi - self.lo);
        let step = gap.div_ceil(WAYS);
        (1..=(gap - 1) / step).map(move |k| lo + k * step)
    }
}

/// Loads that nobody waits for: the buckets of some blocks, then the entries those most likely name.
struct Loads {
    key: [u64; SPANS * (WAYS - 1)],
    count: usize,
    sum: u64,
}

impl Loads {
    fn new() -> Self {
        Loads { key: [0; SPANS * (WAYS - 1)], count: 0, sum: 0 }
    }
    #[inline(always)]
    fn bucket<const W: usize>(&mut self, look: &Look<W>, i: usize) {
        let key = look.chain[i];
        self.key[self.count] = key;
        self.count += 1;
        self.sum ^= touch(&look.snapshot.segments, key);
    }
    #[inline(always)]
    fn entries<const W: usize>(&self, look: &Look<W>) {
        let Snapshot { segments, chunks, .. } = look.snapshot;
        black_box(
            self.key[..self.count]
                .iter()
                .fold(self.sum, |sum, key| sum ^ touch_entry(segments, chunks, *key)),
        );
    }
}

/// Who holds the block `key`, whose entry this was a moment ago: the entry, or the row, may be given to another
/// block meanwhile. None: the rows are older than the entry.
#[inline(always)]
fn holders_of<const W: usize>(entry: &Entry, key: u64, rows: &[RowChunk]) -> Option<Mask<W>> {
    for _ in 0..TRIES {
        let word = entry.holders.load(Acquire);
        let held = mask::<W>(word, rows)?;
        if entry.key.load(Acquire) != key {
            break;
        }
        if !is_row::<W>(word) || entry.holders.load(Acquire) == word {
            return Some(held);
        }
    }
    Some([0; W])
}

struct Look<'a, const W: usize> {
    snapshot: &'a Snapshot,
    chain: &'a [u64],
    stale: Cell<bool>,
}

impl<'a, const W: usize> Look<'a, W> {
    fn new(snapshot: &'a Snapshot, chain: &'a [u64]) -> Self {
        Look { snapshot, chain, stale: Cell::new(false) }
    }

    /// False when the snapshot was too old.
    fn run(&self, audit: bool, out: &mut Vec<(CacheId, u32)>) -> bool {
        let Some(end) = self.chain.len().checked_sub(1) else { return true };
        let mut load = Loads::new();
        load.bucket(self, 0);
        load.bucket(self, end);
        load.entries(self);
        let live: Mask<W> = std::array::from_fn(|i| self.snapshot.slots.live[i]);
        let first = and(self.held(0), live);
        if first != [0; W] {
            let flagged: Mask<W> = std::array::from_fn(|i| self.snapshot.uneven[i].load(Relaxed));
            let even = without(first, flagged);
            let mut emit =
                |slot: usize, len: usize| out.push((CacheId(self.snapshot.slots.cache[slot]), len as u32));
            if audit {
                self.audit(even, &mut emit);
            } else {
                self.search(even, &mut emit);
            }
            self.scan(and(first, flagged), &mut emit);
        }
        !self.stale.get()
    }

    /// Who holds block `i`, retired slots included.
    #[inline(always)]
    fn held(&self, i: usize) -> Mask<W> {
        let key = self.chain[i];
        let entry = match find(&self.snapshot.segments, &self.snapshot.chunks, key) {
            Found::Entry(e) => e,
            Found::Absent => return [0; W],
            Found::Stale => return self.too_old(),
        };
        holders_of(entry, key, &self.snapshot.rows).unwrap_or_else(|| self.too_old())
    }

    #[cold]
    fn too_old(&self) -> Mask<W> {
        self.stale.set(true);
        [0; W]
    }

    /// Everybody's end, given who holds the first block. Whoever holds the last block is done.
    fn search(&self, first: Mask<W>, emit: &mut impl FnMut(usize, usize)) {
        let end = self.chain.len() - 1;
        let last = and(self.held(end), first);
        slots(last, |s| emit(s, end + 1));
        if end > 0 && first != last {
            self.narrow_down(Span { lo: 0, at_lo: first, hi: end, at_hi: last }, emit);
        }
    }

    /// Splits spans until they are one block long. Each round loads what it needs for all spans at once, so a
    /// lookup costs a few rounds of cache misses, not one miss after the other.
    fn narrow_down(&self, span: Span<W>, emit: &mut impl FnMut(usize, usize)) {
        let mut spans = [span; SPANS];
        let mut count = 1;
        while count > 0 {
            let mut load = Loads::new();
            for span in &spans[..count] {
                span.probes().for_each(|i| load.bucket(self, i));
            }
            load.entries(self);
            let (work, n) = (spans, count);
            count = 0;
            for span in &work[..n] {
                let mut left = *span;
                for mid in span.probes().chain([span.hi]) {
                    left.hi = mid;
                    left.at_hi = span.at_hi;
                    if mid < span.hi {
                        let m = self.held(mid);
                        left.at_hi = std::array::from_fn(|w| m[w] & left.at_lo[w] | span.at_hi[w]);
                    }
                    if left.at_lo != left.at_hi {
                        if mid - left.lo == 1 {
                            slots(without(left.at_lo, left.at_hi), |s| emit(s, mid));
                        } else if count < SPANS {
                            spans[count] = left;
                            count += 1;
                        } else {
                            self.later(left, emit);
                        }
                    }
                    (left.lo, left.at_lo) = (mid, left.at_hi);
                }
            }
        }
    }

    /// A span for which there was no room in the round.
    #[cold]
    fn later(&self, span: Span<W>, emit: &mut impl FnMut(usize, usize)) {
        self.narrow_down(span, emit);
    }

    fn scan(&self, mut alive: Mask<W>, emit: &mut impl FnMut(usize, usize)) {
        for i in 1..self.chain.len() {
            if alive == [0; W] {
                return;
            }
            if let Some(key) = self.chain.get(i + AHEAD) {
                black_box(touch(&self.snapshot.segments, *key));
            }
            let m = self.held(i);
            slots(without(alive, m), |s| emit(s, i));
            alive = and(alive, m);
        }
        slots(alive, |s| emit(s, self.chain.len()));
    }

    fn audit(&self, even: Mask<W>, emit: &mut impl FnMut(usize, usize)) {
        let mut bisected = vec![0; W * 64];
        self.search(even, &mut |s, len| bisected[s] = len);
        self.scan(even, &mut |s, len| {
            emit(s, len);
            // Blocks come and go while we look: only a gap seen on both sides of a held block counts.
            let holds = |i: usize| self.held(i)[s / 64] >> (s % 64) & 1 == 1;
            if len < bisected[s] && !holds(len) && holds(bisected[s] - 1) && !holds(len) && !self.stale.get()
            {
                self.snapshot.uneven[s / 64].fetch_or(1 << (s % 64), Relaxed);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_given_to_another_block_has_no_holders_for_this_one() {
        let entry = Entry::default();
        entry.key.store(5, Relaxed);
        entry.holders.store(0b110, Relaxed);
        assert_eq!(holders_of::<1>(&entry, 5, &[]), Some([0b110]));
        assert_eq!(holders_of::<1>(&entry, 6, &[]), Some([0]));
        // a row that the snapshot does not have yet
        entry.holders.store(1 << 63 | 4, Relaxed);
        assert_eq!(holders_of::<5>(&entry, 5, &[]), None);
    }
}
