//! The inventory beside a hash set per cache walked block by block: blocks stored and prompts looked up per second,
//! and bytes per (block, cache) pair, at 8, 64 and 256 engines. CPU time of the thread.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::HashSet;

use kvgate_bench::{Samples, resident_bytes};
use kvgate_core::Random;
use kvgate_kv::inventory::{CacheId, Config, Ingest, Inventory};
use kvgate_kv::own::{ROOT, mix};

/// Engines, and blocks in the cache of each.
const FLEETS: [(usize, usize); 3] = [(8, 100_000), (64, 20_000), (256, 10_000)];
/// Prompts that many share begin with so many blocks.
const SHARED: usize = 64;
/// The longest prompt in blocks: 32,768 tokens of 16 each.
const LONGEST: usize = 2048;
const PREFIXES: usize = 16;
const LOOKUPS: usize = 4000;

/// Blocks that an engine says it stored, in one event.
struct Event {
    cache: usize,
    parent: Option<u64>,
    names: Vec<u64>,
    tokens: Vec<u64>,
    own: Vec<u64>,
}

/// A prompt, by own hashes, and who holds how much of it at least.
struct Prompt {
    owner: usize,
    own: Vec<u64>,
}

/// What the caches of a fleet hold: shared prefixes everywhere, tails of its own on each.
struct Work {
    events: Vec<Event>,
    prompts: Vec<Prompt>,
    pairs: usize,
}

/// An engine's name of a block: another in every engine, as with an unset seed.
fn name(own: u64, cache: usize) -> u64 {
    (own ^ ((cache as u64 + 1) << 3)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31)
}

fn chain(tokens: &[u64]) -> Vec<u64> {
    let next = |own: &mut u64, token: &u64| {
        *own = mix(*own, *token);
        Some(*own)
    };
    tokens.iter().scan(ROOT, next).collect()
}

impl Work {
    fn new(caches: usize, blocks: usize) -> Self {
        let mut random = Random::new(12_345);
        let mut many = |count: usize| (0..count).map(|_| random.next_u64()).collect::<Vec<u64>>();
        let prefixes: Vec<Vec<u64>> = (0..PREFIXES).map(|_| many(SHARED)).collect();
        let mut work = Self { events: Vec::new(), prompts: Vec::new(), pairs: caches * blocks };
        let mut order = Random::new(54_321);
        let mut turns: Vec<(usize, Event)> = Vec::new();
        for cache in 0..caches {
            let mut mine: Vec<Event> =
                prefixes.iter().map(|p| event(cache, p, &chain(p), 0, SHARED)).collect();
            let mut left = blocks - PREFIXES * SHARED;
            while left > 0 {
                let long = order.below(4) == 0;
                let length = if long { LONGEST - SHARED } else { 64 + order.below(900) }.min(left);
                let mut tokens = prefixes[order.below(PREFIXES)].clone();
                tokens.extend(many(length));
                let own = chain(&tokens);
                let starts = (SHARED..own.len()).step_by(64);
                mine.extend(starts.map(|at| event(cache, &tokens, &own, at, (at + 64).min(own.len()))));
                work.prompts.push(Prompt { owner: cache, own });
                left -= length;
            }
            turns.extend(mine.into_iter().enumerate());
        }
        // engines take turns, each in its own order
        turns.sort_by_key(|(turn, event)| (*turn, event.cache));
        work.events = turns.into_iter().map(|(_, event)| event).collect();
        work
    }
}

fn event(cache: usize, tokens: &[u64], own: &[u64], from: usize, to: usize) -> Event {
    Event {
        cache,
        parent: from.checked_sub(1).map(|before| name(own[before], cache)),
        names: own[from..to].iter().map(|h| name(*h, cache)).collect(),
        tokens: tokens[from..to].to_vec(),
        own: own[from..to].to_vec(),
    }
}

trait Subject {
    const NAME: &'static str;
    fn new(caches: usize) -> Self;
    fn store(&mut self, event: &Event);
    /// How many blocks of the prompt each cache that holds any holds.
    fn look_up(&self, own: &[u64], out: &mut Vec<(CacheId, u32)>);
    /// Bytes of its tables.
    fn bytes(&self) -> usize;
}

struct Ours {
    ingest: Ingest,
    inventory: Inventory,
    caches: Vec<CacheId>,
}

impl Subject for Ours {
    const NAME: &'static str = "inventory";

    fn new(caches: usize) -> Self {
        let (mut ingest, inventory) = Ingest::new(Config { max_caches: caches as u16, max_orphans: 4096 });
        let caches = (0..caches).map(|_| ingest.add_cache(0, usize::MAX).unwrap()).collect();
        Self { ingest, inventory, caches }
    }

    fn store(&mut self, event: &Event) {
        self.ingest.stored(self.caches[event.cache], event.parent, &event.names, &event.tokens);
    }

    fn look_up(&self, own: &[u64], out: &mut Vec<(CacheId, u32)>) {
        self.inventory.overlap(own, false, out);
    }

    fn bytes(&self) -> usize {
        self.ingest.stats().bytes
    }
}

struct Sets(Vec<HashSet<u64>>);

impl Subject for Sets {
    const NAME: &'static str = "set per cache, linear";

    fn new(caches: usize) -> Self {
        Self(vec![HashSet::new(); caches])
    }

    fn store(&mut self, event: &Event) {
        self.0[event.cache].extend(&event.own);
    }

    fn look_up(&self, own: &[u64], out: &mut Vec<(CacheId, u32)>) {
        out.clear();
        let held = self.0.iter().map(|set| own.iter().take_while(|h| set.contains(h)).count());
        let some = held.enumerate().filter(|(_, blocks)| *blocks > 0);
        out.extend(some.map(|(at, blocks)| (CacheId(at as u16), blocks as u32)));
    }

    fn bytes(&self) -> usize {
        // the standard table: a power of two places, at most seven in eight taken, each a key and a byte
        self.0.iter().map(|set| (set.capacity() * 8 / 7).next_power_of_two() * 9).sum()
    }
}

struct Figures {
    stores: f64,
    lookup: Samples,
    bytes: f64,
    resident: f64,
    answers: Vec<Vec<(CacheId, u32)>>,
}

fn measure<S: Subject>(caches: usize, work: &Work) -> Figures {
    let before = resident_bytes();
    let mut subject = S::new(caches);
    let mut filling = Samples::default();
    filling.time(|| work.events.iter().for_each(|event| subject.store(event)));
    let resident = resident_bytes().saturating_sub(before);
    let (mut lookup, mut answers, mut out) = (Samples::default(), Vec::new(), Vec::new());
    let mut random = Random::new(99);
    for _ in 0..LOOKUPS {
        let prompt = &work.prompts[random.below(work.prompts.len())];
        lookup.time(|| subject.look_up(&prompt.own, &mut out));
        out.sort_unstable();
        assert!(out.contains(&(CacheId(prompt.owner as u16), prompt.own.len() as u32)), "the owner holds it");
        answers.push(out.clone());
    }
    let pairs = work.pairs as f64;
    Figures {
        stores: pairs / filling.median(),
        lookup,
        bytes: subject.bytes() as f64 / pairs,
        resident: resident as f64 / pairs,
        answers,
    }
}

fn print<S: Subject>(figures: &Figures) {
    let Figures { stores, lookup, bytes, .. } = figures;
    let (p50, p99, rate) = (lookup.median(), lookup.micros(99), 1e6 / lookup.mean());
    println!("  {:<24} {stores:>10.1} {p50:>9.2} {p99:>9.2} {rate:>10.0} {bytes:>9.1}", S::NAME);
}

fn main() {
    for (caches, blocks) in FLEETS {
        let work = Work::new(caches, blocks);
        println!("\n{caches} engines x {blocks} blocks; prompts of 128 to {LONGEST} blocks");
        println!(
            "  {:<24} {:>10} {:>9} {:>9} {:>10} {:>9}",
            "", "M stores/s", "p50 us", "p99 us", "lookups/s", "B/pair"
        );
        let ours = measure::<Ours>(caches, &work);
        print::<Ours>(&ours);
        let sets = measure::<Sets>(caches, &work);
        print::<Sets>(&sets);
        assert!(ours.answers == sets.answers, "both hold the same, both must find the same");
        println!(
            "  a lookup takes {:.1}x as long in sets; the process grew by {:.1} B/pair for the inventory",
            sets.lookup.mean() / ours.lookup.mean(),
            ours.resident
        );
    }
}
