//! Encoded pieces of text, kept by content.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::Shared;
use lru::LruCache;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::TokenizeError;

/// Independent parts, so that threads seldom wait for each other.
const SHARDS: usize = 16;

/// Bytes that an entry takes beside its text and ids.
const OVERHEAD: usize = 160;

/// The ids of a piece.
pub(super) type Ids = Result<Arc<[u32]>, TokenizeError>;

/// What the cache of encoded pieces did, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Pieces found, or being tokenised for another request.
    pub hits: u64,
    /// Pieces that had to be tokenised.
    pub misses: u64,
    /// Bytes held now.
    pub bytes: u64,
    /// Most bytes that may be held; 0 where the cache is not in use for this tokenizer.
    pub capacity: u64,
}

/// Ids by text, least recently used out first. The text itself is compared: prompts are untrusted and a hash is not.
pub(super) struct Cache {
    shards: Vec<Mutex<Shard>>,
    seed: u64,
    /// Most bytes per shard.
    room: usize,
    hits: AtomicU64,
    misses: AtomicU64,
}

struct Shard {
    entries: LruCache<u64, Arc<Entry>>,
    bytes: usize,
    /// Pieces being tokenised: as many as threads are at it.
    flights: HashMap<u64, Flight>,
}

struct Entry {
    text: Box<str>,
    ids: Arc<[u32]>,
}

/// A piece that a thread tokenises. Whoever else needs it waits for that, without a thread.
struct Flight {
    text: Box<str>,
    landing: Shared<oneshot::Receiver<Ids>>,
}

/// Whose turn it is to tokenise a piece.
enum Turn {
    /// Nobody's.
    Known(Arc<[u32]>),
    /// The caller's, for all.
    Ours(oneshot::Sender<Ids>),
    /// Another's.
    Theirs(Shared<oneshot::Receiver<Ids>>),
    /// The caller's, for itself: another text of the same hash is being tokenised.
    Alone,
}

/// Ends the flight when dropped, by a panic too: those who wait then do it themselves.
struct Pilot<'c> {
    cache: &'c Cache,
    hash: u64,
    landed: Option<oneshot::Sender<Ids>>,
}

impl Pilot<'_> {
    fn land(mut self, ids: Ids) {
        // nobody may wait
        let _ = self.landed.take().map(|landed| landed.send(ids));
    }
}

impl Drop for Pilot<'_> {
    fn drop(&mut self) {
        if let Some(mut shard) = self.cache.shard(self.hash) {
            shard.flights.remove(&self.hash);
        }
    }
}

impl Shard {
    fn find(&mut self, hash: u64, text: &str) -> Option<Arc<[u32]>> {
        self.entries.get(&hash).filter(|entry| *entry.text == *text).map(|entry| entry.ids.clone())
    }

    fn turn(&mut self, hash: u64, text: &str) -> Turn {
        if let Some(ids) = self.find(hash, text) {
            return Turn::Known(ids);
        }
        match self.flights.get(&hash) {
            Some(flight) if *flight.text == *text => Turn::Theirs(flight.landing.clone()),
            Some(_) => Turn::Alone,
            None => {
                let (landed, landing) = oneshot::channel();
                self.flights.insert(hash, Flight { text: text.into(), landing: landing.shared() });
                Turn::Ours(landed)
            }
        }
    }
}

impl Entry {
    fn bytes(&self) -> usize {
        self.text.len() + self.ids.len() * size_of::<u32>() + OVERHEAD
    }
}

impl Cache {
    /// A cache of at most `bytes` bytes; `seed` makes its hashes unforeseeable.
    pub fn new(bytes: usize, seed: u64) -> Self {
        let empty = || Shard { entries: LruCache::unbounded(), bytes: 0, flights: HashMap::new() };
        let shard = || Mutex::new(empty());
        let shards = (0..SHARDS).map(|_| shard()).collect();
        Self { shards, seed, room: bytes / SHARDS, hits: AtomicU64::new(0), misses: AtomicU64::new(0) }
    }

    fn shard(&self, hash: u64) -> Option<MutexGuard<'_, Shard>> {
        let at = usize::try_from(hash >> 32).unwrap_or(0) % SHARDS;
        self.shards.get(at).map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn hash(&self, text: &str) -> u64 {
        xxh3_64_with_seed(text.as_bytes(), self.seed)
    }

    /// The ids of `text`, made by `encode` if they are not there. Waits for nobody.
    pub fn get_or(&self, text: &str, encode: impl FnOnce() -> Ids) -> Ids {
        let hash = self.hash(text);
        let found = self.shard(hash).and_then(|mut shard| shard.find(hash, text));
        if let Some(ids) = found {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(ids);
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        let ids = encode()?;
        self.insert(hash, Entry { text: text.into(), ids: ids.clone() });
        Ok(ids)
    }

    /// As [`get_or`](Self::get_or), but while another task makes them by this the ids are waited for.
    pub async fn get_or_wait(&self, text: &str, encode: impl FnOnce() -> Ids) -> Ids {
        let hash = self.hash(text);
        let turn = self.shard(hash).map_or(Turn::Alone, |mut shard| shard.turn(hash, text));
        let pilot = match turn {
            Turn::Known(ids) => {
                self.hits.fetch_add(1, Ordering::Relaxed);
                return Ok(ids);
            }
            Turn::Theirs(landing) => match landing.await {
                Ok(ids) => {
                    self.hits.fetch_add(1, Ordering::Relaxed);
                    return ids;
                }
                // it panicked
                Err(oneshot::Canceled) => None,
            },
            Turn::Ours(landed) => Some(Pilot { cache: self, hash, landed: Some(landed) }),
            Turn::Alone => None,
        };
        self.misses.fetch_add(1, Ordering::Relaxed);
        let ids = encode();
        if let Ok(ids) = &ids {
            // before the flight ends, so that nobody finds neither
            self.insert(hash, Entry { text: text.into(), ids: ids.clone() });
        }
        if let Some(pilot) = pilot {
            pilot.land(ids.clone());
        }
        ids
    }

    fn insert(&self, hash: u64, entry: Entry) {
        let bytes = entry.bytes();
        if bytes > self.room / 4 {
            return; // one giant must not drive everything else out
        }
        let Some(mut shard) = self.shard(hash) else { return };
        shard.bytes += bytes;
        if let Some(old) = shard.entries.put(hash, Arc::new(entry)) {
            shard.bytes -= old.bytes();
        }
        while shard.bytes > self.room {
            let Some((_, oldest)) = shard.entries.pop_lru() else { break };
            shard.bytes -= oldest.bytes();
        }
    }

    pub fn stats(&self) -> CacheStats {
        let bytes = |shard: &Mutex<Shard>| shard.lock().unwrap_or_else(PoisonError::into_inner).bytes as u64;
        CacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            bytes: self.shards.iter().map(bytes).sum(),
            capacity: (self.room * SHARDS) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(n: u32) -> Ids {
        Ok(vec![n; 100].into())
    }

    fn never() -> Ids {
        panic!("it is there, or another makes it")
    }

    #[test]
    fn finds_what_it_holds_and_stays_within_bounds() {
        let cache = Cache::new(1 << 20, 7);
        for n in 0..10_000_u32 {
            assert_eq!(cache.get_or(&format!("text {n}"), || ids(n)).unwrap()[0], n);
            assert_eq!(cache.get_or(&format!("text {n}"), never).unwrap()[0], n);
        }
        let stats = cache.stats();
        assert_eq!((stats.hits, stats.misses), (10_000, 10_000));
        assert!(stats.bytes <= stats.capacity && stats.bytes > stats.capacity / 2, "{stats:?}");
    }

    #[test]
    fn keeps_what_is_used() {
        let cache = Cache::new(1 << 20, 7);
        cache.get_or("hot", || ids(1)).unwrap();
        for n in 0..10_000_u32 {
            cache.get_or(&format!("text {n}"), || ids(n)).unwrap();
            cache.get_or("hot", never).unwrap();
        }
    }

    #[test]
    fn giants_and_failures_are_not_kept() {
        let cache = Cache::new(1 << 20, 7);
        let giant = "x".repeat(1 << 20);
        cache.get_or(&giant, || ids(1)).unwrap();
        assert_eq!(cache.stats().bytes, 0);
        assert_eq!(cache.get_or("a", || Err("no".into())), Err("no".into()));
        assert_eq!(cache.stats().bytes, 0);
        let off = Cache::new(0, 7);
        off.get_or("a", || ids(1)).unwrap();
        assert_eq!(off.stats().bytes, 0);
    }

    /// While a piece is made, so many ask for it; what they get.
    fn asked_amid(cache: &Cache, text: &str, made: fn() -> Ids) -> (Ids, Vec<Ids>) {
        let mut waiting: Vec<_> = (0..3).map(|_| Box::pin(cache.get_or_wait(text, || ids(2)))).collect();
        let first = cache.get_or_wait(text, || {
            assert!(
                waiting.iter_mut().all(|asked| asked.now_or_never().is_none()),
                "they wait, on no thread"
            );
            // other pieces do not wait for it
            assert_eq!(cache.get_or_wait("other", || ids(3)).now_or_never(), Some(ids(3)));
            made()
        });
        let first = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| first.now_or_never()));
        let first = first.map_or_else(|_| Err("panicked".into()), |first| first.unwrap());
        (first, waiting.iter_mut().map(|asked| asked.now_or_never().unwrap()).collect())
    }

    #[test]
    fn a_piece_is_made_once_for_all_who_ask_meanwhile() {
        let cache = Cache::new(1 << 20, 7);
        assert_eq!(asked_amid(&cache, "text", || ids(1)), (ids(1), vec![ids(1); 3]));
        assert_eq!((cache.stats().hits, cache.stats().misses), (3, 2), "with the other one");
        assert_eq!(cache.get_or_wait("text", never).now_or_never(), Some(ids(1)), "it is kept");
        let giant = "x".repeat(1 << 20);
        assert_eq!(asked_amid(&cache, &giant, || ids(1)), (ids(1), vec![ids(1); 3]));
        assert_eq!(cache.get_or_wait(&giant, || ids(4)).now_or_never(), Some(ids(4)), "it is not");
    }

    #[test]
    fn a_piece_that_cannot_be_made_keeps_nobody() {
        let cache = Cache::new(1 << 20, 7);
        let no = || Ids::Err("no".into());
        assert_eq!(asked_amid(&cache, "text", || Err("no".into())), (no(), vec![no(); 3]));
        assert_eq!(
            asked_amid(&cache, "text", || panic!("a defect")),
            (Err("panicked".into()), vec![ids(2); 3])
        );
        assert_eq!(cache.get_or_wait("text", never).now_or_never(), Some(ids(2)));
        assert!(cache.shards.iter().all(|shard| shard.lock().unwrap().flights.is_empty()));
    }

    #[test]
    fn who_stops_waiting_leaves_nothing_behind() {
        let cache = Cache::new(1 << 20, 7);
        let made = cache.get_or_wait("text", || {
            drop(cache.get_or_wait("text", never).now_or_never());
            ids(1)
        });
        assert_eq!(made.now_or_never(), Some(ids(1)));
        assert!(cache.shards.iter().all(|shard| shard.lock().unwrap().flights.is_empty()));
    }
}
