//! Readers while the ingest thread churns, clears, grows and compacts.
#![allow(clippy::unwrap_used)]

use kvgate_kv::inventory::{CacheId, Config, Ingest, Inventory};
use kvgate_kv::own::{ROOT, mix};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

/// Rounds of the writer, growing and shrinking in turns, and lookups that all readers together make at least.
const ROUNDS: u64 = 70;
const TURN: u64 = 32;
const LOOKUPS: u64 = 2000;

fn tokens(seed: u64, n: usize) -> Vec<u64> {
    (0..n as u64).map(|i| mix(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15), i + 1)).collect()
}

fn text(i: u64) -> Vec<u64> {
    tokens(i, 300)
}

fn chain(tokens: &[u64]) -> Vec<u64> {
    let mut key = ROOT;
    let link = |t: &u64| {
        key = mix(key, *t);
        key
    };
    tokens.iter().map(link).collect()
}

fn store(ingest: &mut Ingest, id: CacheId, tokens: &[u64]) {
    ingest.stored(id, None, tokens, tokens);
}

/// Text 1 is only the still cache's, and whole; texts 2 and 3 only a's and b's.
fn read(inventory: &Inventory, [still, a, b]: [CacheId; 3], seed: u64, stop: &AtomicBool, asked: &AtomicU64) {
    let chains: Vec<Vec<u64>> = (1..4).map(|i| chain(&text(i))).collect();
    let mut out = vec![];
    let mut n = seed;
    while !stop.load(Relaxed) {
        n += 1;
        let which = n as usize % 3;
        inventory.overlap(&chains[which], n.is_multiple_of(16), &mut out);
        let of = |c: CacheId| out.iter().find(|o| o.0 == c).map_or(0, |o| o.1);
        match which {
            0 => assert_eq!(out, [(still, 300)]),
            1 => assert_eq!(of(still) + of(b), 0),
            _ => assert_eq!(of(still) + of(a), 0),
        }
        assert!(out.iter().all(|o| [still, a, b].contains(&o.0)), "{out:?}");
        asked.fetch_add(1, Relaxed);
    }
}

/// One cache never changes, two take turns being cleared and refilled with texts of their own, the rest churn.
fn run(max_caches: u16, churners: usize, burst: u64) {
    let (mut ingest, inventory) = Ingest::new(Config { max_caches, max_orphans: 100 });
    let mut add = || ingest.add_cache(0, usize::MAX).unwrap();
    let few = [add(), add(), add()];
    let [still, a, b] = few;
    let others: Vec<CacheId> = (0..churners).map(|_| add()).collect();
    store(&mut ingest, still, &text(1));
    let (stop, asked) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| {
        let readers: Vec<_> = (0..3)
            .map(|seed| {
                let (inventory, stop, asked) = (inventory.clone(), &stop, &asked);
                s.spawn(move || read(&inventory, few, seed, stop, asked))
            })
            .collect();
        let mut n = 0;
        while (n < ROUNDS || asked.load(Relaxed) < LOOKUPS) && readers.iter().all(|r| !r.is_finished()) {
            n += 1;
            for (c, t) in [(a, 2), (b, 3)] {
                store(&mut ingest, c, &text(t));
                ingest.cleared(c);
            }
            // Grows, shrinks and clears in turn, so that chunks, index and rows come and go. Shared text too.
            let shrinks = n / TURN % 2 == 1;
            for (i, c) in others.iter().enumerate() {
                for k in 0..if shrinks { 1 } else { burst } {
                    let t = tokens(100 + (n * burst + k) * if i % 2 == 0 { 1 } else { 1000 + i as u64 }, 64);
                    store(&mut ingest, *c, &t);
                    if shrinks {
                        ingest.removed(*c, &t);
                        ingest.upkeep(4096);
                    }
                }
                if shrinks && n % TURN == i as u64 % TURN {
                    ingest.cleared(*c);
                }
            }
        }
        stop.store(true, Relaxed);
    });
    assert!(asked.load(Relaxed) >= LOOKUPS);
    assert!(ingest.stats().compactions > 0, "{:?}", ingest.stats());
    for c in others.iter().chain(&few) {
        ingest.remove_cache(*c);
    }
    while ingest.upkeep(10_000) {}
    assert_eq!(ingest.stats().blocks, 0);
}

#[test]
fn narrow() {
    run(12, 9, 30);
}

#[test]
fn narrow_without_spare() {
    run(63, 60, 5);
}

#[test]
fn wide() {
    run(200, 40, 7);
}
