//! Blocks that are about to be held: what a request makes its engine compute is there before the events say so.
//!
//! A [`Credit`] stands for a request under way: while it lives, and not beyond its expiry, its engine is taken to
//! hold the request's blocks. Engines do not evict the blocks of a request they run, so this errs only for as long as
//! the request waits there, or is lost. Requests for the same blocks on one engine share an entry, which ends with the
//! last of them and expires with the latest. Of a chain only some blocks are kept, ever fewer with depth: a shorter prefix
//! in common is found to within a fifth.
//!
//! The table has a fixed size: buckets of eight under a short lock each. The entry that would expire first gives way.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Entries per bucket: one line of keys.
const WAYS: usize = 8;
/// Blocks kept of a chain between two powers of two.
const STEPS: usize = 4;

/// Which engines are about to hold which blocks.
#[derive(Debug)]
pub struct Speculative {
    buckets: Box<[Mutex<Bucket>]>,
    live: AtomicUsize,
    tickets: AtomicU32,
}

#[derive(Debug, Default)]
struct Bucket {
    /// Apart from the entries, so that looking through them reads one line. Of a free entry it means nothing.
    keys: [u64; WAYS],
    entries: [Option<Entry>; WAYS],
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    engine: u64,
    until: Instant,
    /// Of the credit that made it: who shares it knows it by that, and tells it from a later one in its place.
    ticket: u32,
    /// Credits that share it.
    claims: u32,
}

impl Bucket {
    fn of(&self, key: u64) -> impl Iterator<Item = (usize, &Entry)> {
        let same = move |(_, k): &(usize, &u64)| **k == key;
        self.keys.iter().enumerate().filter(same).filter_map(|(at, _)| Some((at, self.entries[at].as_ref()?)))
    }

    /// Where the entry for this block and engine is, or may be put.
    fn place(&self, key: u64, engine: u64) -> usize {
        let known = self.of(key).find(|(_, entry)| entry.engine == engine).map(|(at, _)| at);
        let first = || (0..WAYS).min_by_key(|at| self.entries[*at].map(|entry| entry.until));
        known.or_else(first).unwrap_or(0)
    }
}

impl Speculative {
    /// A table of at least so many entries, of 41 bytes each.
    pub fn new(entries: usize) -> Self {
        let buckets = entries.div_ceil(WAYS).next_power_of_two();
        Self {
            buckets: (0..buckets).map(|_| Mutex::default()).collect(),
            live: AtomicUsize::new(0),
            tickets: AtomicU32::new(0),
        }
    }

    /// Entries in use, expired ones among them.
    pub fn len(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `engine` is about to hold the blocks of `chain`, the first `held` of which it has already.
    pub fn enter(
        self: &Arc<Self>,
        chain: &[u64],
        held: usize,
        engine: u64,
        now: Instant,
        until: Instant,
    ) -> Credit {
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        let depths = depths(chain.len()).take_while(|depth| *depth > held);
        let keys = depths.filter_map(|depth| chain.get(depth - 1).copied());
        let mut evicted = 0;
        let mut claim = |key: u64| {
            let mut bucket = self.bucket(key)?;
            let at = bucket.place(key, engine);
            let mut entry = Entry { engine, until, ticket, claims: 1 };
            match bucket.entries[at] {
                None => drop(self.live.fetch_add(1, Ordering::Relaxed)),
                Some(old) if old.until <= now => {}
                Some(old) if bucket.keys[at] == key && old.engine == engine => {
                    entry =
                        Entry { until: until.max(old.until), claims: old.claims.saturating_add(1), ..old };
                }
                Some(_) => evicted += 1,
            }
            (bucket.keys[at], bucket.entries[at]) = (key, Some(entry));
            Some((key, entry.ticket))
        };
        let claims = keys.filter_map(&mut claim).collect();
        Credit { table: self.clone(), claims, evicted }
    }

    /// Fills `out` with every engine that is about to hold a prefix of `chain`, and how many blocks of it. In no
    /// order.
    pub fn longest(&self, chain: &[u64], now: Instant, out: &mut Vec<(u64, u32)>) {
        out.clear();
        if self.is_empty() {
            return;
        }
        for depth in depths(chain.len()) {
            let Some(key) = chain.get(depth - 1) else { continue };
            let Some(bucket) = self.bucket(*key) else { continue };
            for (_, entry) in bucket.of(*key) {
                if entry.until > now && !out.iter().any(|(engine, _)| *engine == entry.engine) {
                    out.push((entry.engine, u32::try_from(depth).unwrap_or(u32::MAX)));
                }
            }
        }
    }

    fn bucket(&self, key: u64) -> Option<MutexGuard<'_, Bucket>> {
        let at = (key ^ (key >> 32)) as usize & (self.buckets.len() - 1);
        Some(self.buckets.get(at)?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The depths of a chain of `len` blocks that are kept, the deepest first: the end, and a few for each power of two.
fn depths(len: usize) -> impl Iterator<Item = usize> {
    let below = |depth: &usize| {
        let next = depth.checked_sub(1)?;
        let step = next.checked_ilog2().map_or(1, |log| ((1_usize << log) / STEPS).max(1));
        Some(next - next % step)
    };
    std::iter::successors(Some(len), below).take_while(|depth| *depth > 0)
}

/// What an engine is expected to hold for one request. Ends when it is dropped.
#[derive(Debug)]
pub struct Credit {
    table: Arc<Speculative>,
    /// Each key with the ticket of its entry.
    claims: Vec<(u64, u32)>,
    evicted: usize,
}

impl Credit {
    /// Blocks entered.
    pub fn entered(&self) -> usize {
        self.claims.len()
    }

    /// Entries of others, not yet expired, that had to give way.
    pub fn evicted(&self) -> usize {
        self.evicted
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        for (key, ticket) in &self.claims {
            let Some(mut bucket) = self.table.bucket(*key) else { continue };
            // it may have given way to another
            let own = bucket.of(*key).find(|(_, entry)| entry.ticket == *ticket).map(|(at, _)| at);
            let Some(place) = own.and_then(|at| bucket.entries.get_mut(at)) else { continue };
            *place = place.filter(|entry| entry.claims > 1).map(|e| Entry { claims: e.claims - 1, ..e });
            if place.is_none() {
                self.table.live.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Lora, Namespace};
    use crate::own::OwnHasher;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};
    use std::time::Duration;

    fn longest(table: &Speculative, chain: &[u64], now: Instant) -> BTreeMap<u64, u32> {
        let mut out = Vec::new();
        table.longest(chain, now, &mut out);
        let found: BTreeMap<_, _> = out.iter().copied().collect();
        assert_eq!(found.len(), out.len(), "an engine stands twice");
        found
    }

    #[test]
    fn depths_are_few_and_the_same_for_all() {
        assert_eq!(depths(0).count(), 0);
        assert_eq!(depths(5).collect::<Vec<_>>(), [5, 4, 3, 2, 1]);
        assert_eq!(depths(21).collect::<Vec<_>>(), [21, 20, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1]);
        for len in 1..3000 {
            let all: Vec<_> = depths(len).collect();
            let round: Vec<_> = depths(4096).filter(|depth| *depth <= len).collect();
            assert_eq!(
                all.strip_prefix(&[len]).unwrap_or(&all),
                round.strip_prefix(&[len]).unwrap_or(&round)
            );
            assert!(all.len() <= 8 + STEPS * len.ilog2() as usize);
            assert!(all.windows(2).all(|w| w[1] < w[0] && (w[1] + 1) * 5 >= w[0] * 4), "{all:?}");
        }
    }

    #[test]
    fn a_credit_lasts_until_it_is_dropped_or_expires() {
        let (table, now) = (Arc::new(Speculative::new(1024)), Instant::now());
        let chain: Vec<u64> = (1..=100_u64).map(|n| n.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
        let later = |s| now + Duration::from_secs(s);
        let first = table.enter(&chain, 0, 7, now, later(10));
        let second = table.enter(&chain[..40], 0, 8, now, later(5));
        assert_eq!(longest(&table, &chain, now), [(7, 100), (8, 40)].into());
        assert_eq!(longest(&table, &chain[..79], now), [(7, 64), (8, 40)].into());
        assert_eq!(longest(&table, &chain, later(5)), [(7, 100)].into());
        assert_eq!(longest(&table, &chain, later(10)), [].into());
        // a later request for the same blocks shares them: the end of neither is the end of the other
        let third = table.enter(&chain, 0, 7, later(1), later(11));
        let fourth = table.enter(&chain[..50], 0, 7, later(1), later(4));
        drop(first);
        assert_eq!(longest(&table, &chain, later(10)), [(7, 100)].into());
        let fifth = table.enter(&chain, 0, 7, later(2), later(3));
        drop((third, fourth));
        assert_eq!(longest(&table, &chain, later(10)), [(7, 100)].into(), "until the latest of them all");
        // one that has expired shares nothing with those that come
        let sixth = table.enter(&chain, 0, 7, later(11), later(12));
        drop(sixth);
        assert_eq!(longest(&table, &chain, later(11)), [].into());
        drop((second, fifth));
        assert!(table.is_empty());
        assert_eq!(longest(&table, &chain, now), [].into());
    }

    #[test]
    fn what_is_held_already_takes_no_room() {
        let (table, now) = (Arc::new(Speculative::new(1024)), Instant::now());
        let chain: Vec<u64> = (1..=100).collect();
        let credit = table.enter(&chain, 90, 7, now, now + Duration::from_secs(1));
        assert_eq!(credit.entered(), 2, "100 and 96");
        assert_eq!(longest(&table, &chain[..98], now), [(7, 96)].into());
        assert_eq!(longest(&table, &chain[..90], now), [].into());
        assert_eq!(table.enter(&chain, 100, 7, now, now).entered(), 0);
    }

    #[test]
    fn a_full_table_lets_go_of_what_expires_first() {
        let (table, now) = (Arc::new(Speculative::new(1)), Instant::now());
        let later = |s: u64| now + Duration::from_secs(s);
        let credits: Vec<_> = (1..=WAYS as u64).map(|n| table.enter(&[n], 0, n, now, later(n))).collect();
        assert!(credits.iter().all(|credit| credit.evicted() == 0));
        assert_eq!(table.enter(&[100], 0, 1, later(1), later(9)).evicted(), 0, "the first had expired");
        let more: Vec<_> = (0..2).map(|n| table.enter(&[200 + n], 0, 1, now, later(9))).collect();
        assert_eq!(more.iter().map(Credit::evicted).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(table.len(), WAYS);
        assert_eq!(longest(&table, &[2], now), [].into());
        assert_eq!(longest(&table, &[3], now), [(3, 1)].into());
        drop((credits, more));
        assert!(table.is_empty());
    }

    #[test]
    fn adapters_and_salts_are_worlds_of_their_own() {
        let (table, now) = (Arc::new(Speculative::new(1024)), Instant::now());
        let hasher = OwnHasher::with_key(1);
        let tokens: Vec<u32> = (0..64).collect();
        let lora = |name: &str| Some(Lora { name: name.into(), path: "/a".into() });
        let spaces =
            [(None, None), (lora("a"), None), (lora("b"), None), (None, Some("s")), (None, Some("t"))];
        let chains = spaces.map(|(lora, salt)| {
            hasher.chain(&tokens, 16, &Namespace { lora, cache_salt: salt.map(str::to_owned) })
        });
        let until = now + Duration::from_secs(1);
        let _credits: Vec<_> =
            (0..).zip(&chains).map(|(engine, chain)| table.enter(chain, 0, engine, now, until)).collect();
        for (engine, chain) in (0..).zip(&chains) {
            assert_eq!(longest(&table, chain, now), [(engine, 4)].into());
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Expect { family: u64, len: usize, engine: u64, secs: u64 },
        End(prop::sample::Index),
        Pass(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..3_u64, 0..40_usize, 0..4_u64, 1..20_u64)
                .prop_map(|(family, len, engine, secs)| Step::Expect { family, len, engine, secs }),
            3 => any::<prop::sample::Index>().prop_map(Step::End),
            1 => (1..5_u64).prop_map(Step::Pass),
        ]
    }

    /// A chain of its family: all of them begin alike.
    fn chain(family: u64, len: usize) -> Vec<u64> {
        (0..len as u64).map(|n| (family * 1000 + n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect()
    }

    proptest! {
        /// Against a map without bounds, in which all credits for a block and engine own it.
        #[test]
        fn agrees_with_a_naive_model(steps in prop::collection::vec(step(), 0..80)) {
            let table = Arc::new(Speculative::new(4096));
            let mut now = Instant::now();
            let mut model: BTreeMap<(u64, u64), (Instant, BTreeSet<usize>)> = BTreeMap::new();
            let mut credits: Vec<(usize, Credit)> = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Expect { family, len, engine, secs } => {
                        let (chain, until) = (chain(family, len), now + Duration::from_secs(secs));
                        let credit = table.enter(&chain, 0, engine, now, until);
                        prop_assert_eq!(credit.evicted(), 0, "the table is large enough");
                        credits.push((number, credit));
                        for depth in depths(len) {
                            let fresh = || (until, BTreeSet::new());
                            let known = model.entry((chain[depth - 1], engine)).or_insert_with(fresh);
                            if known.0 <= now {
                                *known = fresh();
                            }
                            known.0 = known.0.max(until);
                            known.1.insert(number);
                        }
                    }
                    Step::End(_) if credits.is_empty() => {}
                    Step::End(which) => {
                        let (number, credit) = credits.swap_remove(which.index(credits.len()));
                        drop(credit);
                        model.retain(|_, (_, owners)| !owners.remove(&number) || !owners.is_empty());
                    }
                    Step::Pass(secs) => now += Duration::from_secs(secs),
                }
                prop_assert_eq!(table.len(), model.len());
                let asked = chain(1, 33);
                let mut expected = BTreeMap::new();
                for depth in 1..=33 {
                    for ((key, engine), (until, _)) in &model {
                        if *key == asked[depth - 1] && *until > now && depths(33).any(|d| d == depth) {
                            expected.insert(*engine, depth as u32);
                        }
                    }
                }
                prop_assert_eq!(longest(&table, &asked, now), expected);
            }
        }
    }
}
