//! Growth, compaction and giving memory back, at a size where they happen.
#![allow(clippy::unwrap_used)]

use kvgate_kv::inventory::{CacheId, Config, Ingest, Inventory};
use kvgate_kv::own::{ROOT, mix};

const LEN: usize = 500;
const SHARED: usize = 50;

fn text(cache: usize, n: usize) -> Vec<u64> {
    let seed = cache as u64 * 1_000_003 + n as u64;
    (0..LEN as u64).map(|i| if i < SHARED as u64 { i + 1 } else { mix(seed, i) }).collect()
}

fn chain(cache: usize, n: usize) -> Vec<u64> {
    let mut key = ROOT;
    let link = |t| {
        key = mix(key, t);
        key
    };
    text(cache, n).into_iter().map(link).collect()
}

/// Engine hashes: the same for the same block in one cache, other ones in another.
fn engine(cache: usize, n: usize) -> Vec<u64> {
    chain(cache, n).iter().map(|h| h.rotate_left(cache as u32 + 1)).collect()
}

fn check(inventory: &Inventory, ids: &[CacheId], cache: usize, n: usize, want: usize, shared_by: usize) {
    let mut out = vec![];
    inventory.overlap(&chain(cache, n), n.is_multiple_of(7), &mut out);
    assert_eq!(out.iter().find(|o| o.0 == ids[cache]).map_or(0, |o| o.1 as usize), want);
    assert_eq!(out.len(), shared_by);
    assert!(out.iter().all(|o| o.0 == ids[cache] || o.1 as usize == SHARED));
}

fn fill(ingest: &mut Ingest, ids: &[CacheId], chains: usize) {
    for n in 0..chains {
        for (c, id) in ids.iter().enumerate() {
            ingest.stored(*id, None, &engine(c, n), &text(c, n));
        }
    }
}

fn run(max_caches: u16, caches: usize, chains: usize) {
    let (mut ingest, inventory) = Ingest::new(Config { max_caches, max_orphans: 100 });
    let ids: Vec<CacheId> = (0..caches).map(|_| ingest.add_cache(0, usize::MAX).unwrap()).collect();
    fill(&mut ingest, &ids, chains);
    let full = ingest.stats();
    assert_eq!(ingest.verify(), Ok(()));
    assert_eq!(full.pairs, caches * (SHARED + chains * (LEN - SHARED)));
    assert!(full.bytes / full.pairs < 50, "{} bytes per pair", full.bytes / full.pairs);
    for c in 0..caches {
        for n in 0..chains {
            check(&inventory, &ids, c, n, LEN, caches);
        }
    }
    // All but the last are cleared: forgotten at once, swept later, the memory given back.
    for id in &ids[..caches - 1] {
        ingest.cleared(*id);
    }
    check(&inventory, &ids, 0, 0, 0, 1);
    while ingest.upkeep(5000) {}
    let small = ingest.stats();
    assert_eq!(ingest.verify(), Ok(()));
    assert!(small.compactions > 0);
    assert!(small.bytes < full.bytes / 2, "{} of {}", small.bytes, full.bytes);
    for n in 0..chains {
        check(&inventory, &ids, caches - 1, n, LEN, 1);
    }
    // Removals still find their blocks after the move; a shared prefix goes with its last copy.
    for n in 0..chains {
        let mut e = engine(caches - 1, n);
        e.reverse();
        ingest.removed(ids[caches - 1], &e);
        let left = n + 1 < chains;
        check(&inventory, &ids, caches - 1, n, if left { SHARED } else { 0 }, usize::from(left));
    }
    let empty = ingest.stats();
    assert_eq!((empty.pairs, empty.blocks, empty.absent_removals), (0, 0, 0));
    assert_eq!(ingest.verify(), Ok(()));
    fill(&mut ingest, &ids, chains);
    check(&inventory, &ids, 1, chains - 1, LEN, caches);
}

#[test]
fn narrow() {
    run(8, 8, 200);
}

#[test]
fn wide() {
    run(100, 80, 20);
}
