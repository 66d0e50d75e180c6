//! Encoded pieces of text, kept by content.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Independent parts, so that threads seldom wait for each other.
const SHARDS: usize = 16;

/// Bytes that an entry takes beside its text and ids.
const OVERHEAD: usize = 160;

/// What the cache of encoded pieces did, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Pieces found.
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
}

struct Entry {
    text: Box<str>,
    ids: Arc<[u32]>,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.text.len() + self.ids.len() * size_of::<u32>() + OVERHEAD
    }
}

impl Cache {
    /// A cache of at most `bytes` bytes; `seed` makes its hashes unforeseeable.
    pub fn new(bytes: usize, seed: u64) -> Self {
        let shard = || Mutex::new(Shard { entries: LruCache::unbounded(), bytes: 0 });
        let shards = (0..SHARDS).map(|_| shard()).collect();
        Self { shards, seed, room: bytes / SHARDS, hits: AtomicU64::new(0), misses: AtomicU64::new(0) }
    }

    fn shard(&self, hash: u64) -> Option<MutexGuard<'_, Shard>> {
        let at = usize::try_from(hash >> 32).unwrap_or(0) % SHARDS;
        self.shards.get(at).map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The ids of `text`, made by `encode` if they are not there.
    pub fn get_or<E>(
        &self,
        text: &str,
        encode: impl FnOnce() -> Result<Arc<[u32]>, E>,
    ) -> Result<Arc<[u32]>, E> {
        let hash = xxh3_64_with_seed(text.as_bytes(), self.seed);
        let found = self.shard(hash).and_then(|mut shard| shard.entries.get(&hash).cloned());
        if let Some(entry) = found.filter(|entry| *entry.text == *text) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(entry.ids.clone());
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        let ids = encode()?;
        self.insert(hash, Entry { text: text.into(), ids: ids.clone() });
        Ok(ids)
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

    fn ids(n: u32) -> Result<Arc<[u32]>, ()> {
        Ok(vec![n; 100].into())
    }

    #[test]
    fn finds_what_it_holds_and_stays_within_bounds() {
        let cache = Cache::new(1 << 20, 7);
        for n in 0..10_000_u32 {
            assert_eq!(cache.get_or(&format!("text {n}"), || ids(n)).unwrap()[0], n);
            assert_eq!(cache.get_or::<()>(&format!("text {n}"), || panic!("just put there")).unwrap()[0], n);
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
            cache.get_or::<()>("hot", || panic!("used all along")).unwrap();
        }
    }

    #[test]
    fn giants_and_failures_are_not_kept() {
        let cache = Cache::new(1 << 20, 7);
        let giant = "x".repeat(1 << 20);
        cache.get_or(&giant, || ids(1)).unwrap();
        assert_eq!(cache.stats().bytes, 0);
        assert_eq!(cache.get_or("a", || Err("no")), Err("no"));
        assert_eq!(cache.stats().bytes, 0);
        let off = Cache::new(0, 7);
        off.get_or("a", || ids(1)).unwrap();
        assert_eq!(off.stats().bytes, 0);
    }
}
