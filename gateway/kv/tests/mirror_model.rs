//! Mirrors of several engines under random event streams, against naive models.
#![allow(clippy::unwrap_used)]

mod common;

use common::mirror::{NaiveMirror, assert_counted, check};
use kvgate_kv::event::{Batch, DecodeError, Event, Removed, Stored};
use kvgate_kv::inventory::{Config, Ingest};
use kvgate_kv::mirror::{Mirror, MirrorConfig};
use kvgate_kv::own::OwnHasher;
use proptest::prelude::*;

const ENGINES: usize = 3;
const MAX_ORPHANS: usize = 12;

#[derive(Clone, Debug)]
enum Op {
    Batch(usize, Batch<'static>),
    /// The engine was restarted, which shows in its sequence numbers.
    Restart(usize),
    EngineBlocks(usize, usize),
    Close(usize),
    Upkeep(usize),
}

/// Mostly GPU, mostly local.
fn medium() -> impl Strategy<Value = (Option<&'static str>, Option<&'static str>)> {
    prop_oneof![
        6 => Just((Some("GPU"), None)),
        2 => Just((None, None)),
        1 => Just((Some("gpu"), Some("LOCAL"))),
        1 => Just((Some("CPU_PINNED"), Some("LOCAL"))),
        1 => Just((Some("GPU"), Some("REMOTE"))),
    ]
}

fn kind() -> impl Strategy<Value = (Option<u32>, Option<&'static str>)> {
    prop_oneof![
        6 => Just((Some(0), Some("full_attention"))),
        2 => Just((None, None)),
        1 => Just((Some(1), Some("sliding_window"))),
        1 => Just((Some(1), Some("mla_attention"))),
        1 => Just((Some(1), None)),
    ]
}

/// Few different hashes and tokens, so that everything meets everything.
fn stored() -> impl Strategy<Value = Stored<'static>> {
    let hashes = prop::collection::vec(0..40u64, 0..7);
    let size = prop_oneof![12 => Just(2u32), 1 => Just(3), 1 => Just(0)];
    // how many tokens are missing, if the event tells them
    let tokens = prop_oneof![12 => Just(Some(0)), 1 => Just(None), 1 => Just(Some(1))];
    let lora = prop_oneof![4 => Just(None), 1 => Just(Some("sql"))];
    let basics = (hashes, prop::option::of(0..40u64), size, tokens);
    (basics, medium(), kind(), lora, 0..3u32).prop_map(
        |((hashes, parent, block_size, missing), (medium, locality), (group_idx, kind), lora_name, seed)| {
            let whole = hashes.iter().flat_map(|h| (0..block_size).map(move |i| *h as u32 % 3 + seed + i));
            let tokens = missing.map(|n| whole.skip(n).collect());
            let stored = Stored { hashes, parent, tokens, block_size, lora_name, ..Stored::default() };
            Stored { medium, locality, group_idx, kind, ..stored }
        },
    )
}

fn removed() -> impl Strategy<Value = Removed<'static>> {
    (prop::collection::vec(0..40u64, 1..6), medium(), kind()).prop_map(
        |(hashes, (medium, locality), (group_idx, _))| Removed { hashes, medium, group_idx, locality },
    )
}

fn batch() -> impl Strategy<Value = Batch<'static>> {
    let event = prop_oneof![
        10 => stored().prop_map(|s| Event::Stored(Box::new(s))),
        8 => removed().prop_map(Event::Removed),
        1 => Just(Event::Cleared),
    ];
    let rank = prop_oneof![3 => Just(None), 3 => (0..3u32).prop_map(Some), 1 => Just(Some(7))];
    let bad = prop_oneof![5 => Just(vec![]), 1 => Just(vec![DecodeError::Hash])];
    (rank, prop::collection::vec(event, 0..6), bad, 0..2u32).prop_map(
        |(rank, events, bad_events, unknown_events)| Batch {
            rank,
            events,
            bad_events,
            unknown_events,
            ..Batch::default()
        },
    )
}

fn op() -> impl Strategy<Value = Op> {
    let engine = 0..ENGINES;
    prop_oneof![
        20 => (engine.clone(), batch()).prop_map(|(e, b)| Op::Batch(e, b)),
        1 => engine.clone().prop_map(Op::Restart),
        1 => (engine.clone(), 5..60usize).prop_map(|(e, n)| Op::EngineBlocks(e, n)),
        1 => engine.prop_map(Op::Close),
        1 => (0..40usize).prop_map(Op::Upkeep),
    ]
}

fn run(max_caches: u16, views: [(bool, bool); ENGINES], ops: Vec<Op>) {
    let hasher = OwnHasher::new();
    let (mut ingest, inventory) = Ingest::new(Config { max_caches, max_orphans: MAX_ORPHANS });
    let mut engines: Vec<(NaiveMirror, Mirror)> = views
        .into_iter()
        .map(|(own, published)| MirrorConfig {
            own,
            published,
            engine_blocks: None,
            max_blocks: 50,
            max_ranks: 3,
        })
        .map(|config| {
            let model = NaiveMirror::new(config.clone(), hasher.clone(), MAX_ORPHANS);
            (model, Mirror::new(config, hasher.clone()))
        })
        .collect();
    for op in ops {
        match op {
            Op::Batch(e, batch) => {
                let (model, mirror) = &mut engines[e];
                assert_counted(&mirror.apply(&mut ingest, &batch), &model.apply(&batch));
            }
            Op::Restart(e) => {
                engines[e].1.clear(&mut ingest);
                engines[e].0.clear();
            }
            Op::EngineBlocks(e, n) => {
                engines[e].1.set_engine_blocks(&mut ingest, Some(n));
                engines[e].0.set_engine_blocks(n);
            }
            Op::Close(e) => {
                engines[e].1.close(&mut ingest);
                engines[e].0.ranks.clear();
            }
            Op::Upkeep(n) => {
                ingest.upkeep(n);
            }
        }
        check(&engines, &ingest, &inventory);
        assert_eq!(ingest.verify(), Ok(()));
    }
    engines.iter_mut().for_each(|(_, mirror)| mirror.close(&mut ingest));
    while ingest.upkeep(1000) {}
    assert_eq!((ingest.stats().blocks, ingest.stats().caches), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn narrow(ops in prop::collection::vec(op(), 1..80)) {
        run(18, [(true, true), (true, false), (false, true)], ops);
    }
    #[test]
    fn wide(ops in prop::collection::vec(op(), 1..80)) {
        run(300, [(true, true), (true, true), (true, true)], ops);
    }
}
