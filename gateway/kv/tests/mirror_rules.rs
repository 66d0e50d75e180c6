//! What each rule of a mirror is for, one by one.

use kvgate_kv::event::{Batch, Event, Removed, Stored};
use kvgate_kv::hash::Namespace;
use kvgate_kv::inventory::{Config, Ingest, Inventory, Row};
use kvgate_kv::mirror::{CacheInfo, Mirror, MirrorConfig, Reason, Report, View};
use kvgate_kv::own::OwnHasher;
use std::collections::HashSet;

const CONFIG: MirrorConfig =
    MirrorConfig { own: true, published: true, engine_blocks: None, max_blocks: 1000, max_ranks: 2 };

struct Rig {
    ingest: Ingest,
    inventory: Inventory,
    hasher: OwnHasher,
    mirror: Mirror,
}

/// Blocks of two tokens each, named 100 and up, the tokens after their names.
fn stored(blocks: std::ops::Range<u64>) -> Stored<'static> {
    Stored {
        parent: (blocks.start > 100).then(|| blocks.start - 1),
        tokens: Some(tokens(blocks.clone())),
        hashes: blocks.collect(),
        block_size: 2,
        ..Stored::default()
    }
}

fn tokens(blocks: std::ops::Range<u64>) -> Vec<u32> {
    blocks.flat_map(|b| [b as u32, 7]).collect()
}

fn removed(hashes: &[u64]) -> Event<'static> {
    Event::Removed(Removed { hashes: hashes.to_vec(), ..Removed::default() })
}

impl Rig {
    fn new(config: MirrorConfig) -> Self {
        let (ingest, inventory) = Ingest::new(Config { max_caches: 5, max_orphans: 10 });
        let hasher = OwnHasher::new();
        let mirror = Mirror::new(config, hasher.clone());
        Rig { ingest, inventory, hasher, mirror }
    }

    fn apply(&mut self, rank: Option<u32>, events: Vec<Event<'static>>) -> Report {
        self.mirror.apply(&mut self.ingest, &Batch { rank, events, ..Batch::default() })
    }

    fn store(&mut self, stored: Stored<'static>) -> Report {
        self.apply(None, vec![Event::Stored(Box::new(stored))])
    }

    fn info(&self, rank: u32, view: View) -> CacheInfo {
        let found = self.mirror.caches().iter().find(|c| (c.rank, c.view) == (rank, view));
        *found.unwrap_or_else(|| panic!("no {view:?} of rank {rank}"))
    }

    /// Blocks of the prompt 100.. that each view of rank 0 holds.
    fn held(&self) -> [u32; 2] {
        let own = self.hasher.chain(&tokens(100..130), 2, &Namespace::default());
        let published: Vec<u64> = (100..130).collect();
        [(View::Own, own), (View::Published, published)].map(|(view, chain)| {
            let mut out = Vec::new();
            self.inventory.overlap(&chain, true, &mut out);
            out.iter().find(|(id, _)| *id == self.info(0, view).id).map_or(0, |(_, n)| *n)
        })
    }
}

fn only(report: &Report, counts: &[(Reason, u64)]) {
    let counted: Vec<(Reason, u64)> = report.iter().filter(|(_, n)| *n > 0).collect();
    assert_eq!(counted, counts);
}

#[test]
fn reasons_have_names_of_their_own() {
    let names: HashSet<&str> = Reason::ALL.iter().map(|r| r.name()).collect();
    assert_eq!(names.len(), Reason::ALL.len());
    for (i, reason) in Reason::ALL.into_iter().enumerate() {
        assert_eq!(reason as usize, i);
    }
}

#[test]
fn blocks_elsewhere_do_not_count() {
    let mut rig = Rig::new(CONFIG);
    rig.store(stored(100..104));
    for (medium, locality) in [("CPU", None), ("STORAGE", None), ("", None), ("GPU", Some("Remote"))] {
        let elsewhere = Stored { medium: Some(medium), locality, ..stored(104..106) };
        only(&rig.store(elsewhere), &[(Reason::IgnoredMedium, 1)]);
    }
    // offloaded: the copy elsewhere goes, ours stays
    let gone = Removed { hashes: vec![103], medium: Some("CPU_PINNED"), ..Removed::default() };
    only(&rig.apply(None, vec![Event::Removed(gone)]), &[(Reason::IgnoredMedium, 1)]);
    assert_eq!(rig.held(), [4, 4]);
    let here = Stored { medium: Some("Gpu"), locality: Some("LOCAL"), ..stored(104..106) };
    only(&rig.store(here), &[(Reason::Stored, 2)]);
    assert_eq!(rig.held(), [6, 6]);
}

#[test]
fn of_a_hybrid_model_the_full_attention_group_counts() {
    for kind in ["full_attention", "mla_attention", "sink_full_attention"] {
        let mut rig = Rig::new(CONFIG);
        let of = |group, kind, s| Stored { group_idx: Some(group), kind: Some(kind), ..s };
        // its block size differs, and must not clear the others
        let window = Stored { block_size: 4, ..of(0, "sliding_window", stored(100..102)) };
        only(&rig.store(window), &[(Reason::IgnoredGroup, 1)]);
        only(&rig.store(of(1, kind, stored(100..104))), &[(Reason::Stored, 4)]);
        only(&rig.store(of(0, "mamba", stored(100..104))), &[(Reason::IgnoredGroup, 1)]);
        // a second group of full attention holds the same blocks once more
        only(&rig.store(of(2, kind, stored(100..104))), &[(Reason::IgnoredGroup, 1)]);
        let evict = |group| Removed { hashes: vec![103], group_idx: Some(group), ..Removed::default() };
        only(&rig.apply(None, vec![Event::Removed(evict(0))]), &[(Reason::IgnoredGroup, 1)]);
        assert_eq!(rig.held(), [4, 4]);
        only(&rig.apply(None, vec![Event::Removed(evict(1))]), &[(Reason::Removed, 1)]);
        assert_eq!(rig.held(), [3, 3]);
    }
}

#[test]
fn without_a_kind_the_first_group_counts() {
    let mut rig = Rig::new(CONFIG);
    rig.store(Stored { group_idx: Some(3), ..stored(100..104) });
    only(&rig.store(Stored { group_idx: Some(0), ..stored(104..106) }), &[(Reason::IgnoredGroup, 1)]);
    rig.store(Stored { group_idx: Some(3), ..stored(104..105) });
    assert_eq!(rig.held(), [5, 5]);
    // after a restart it may be another one
    rig.mirror.clear(&mut rig.ingest);
    rig.store(Stored { group_idx: Some(0), ..stored(100..102) });
    assert_eq!(rig.held(), [2, 2]);
}

#[test]
fn another_block_size_clears() {
    let mut rig = Rig::new(CONFIG);
    rig.store(stored(100..104));
    let wider =
        Stored { block_size: 4, tokens: Some(tokens(100..102)), hashes: vec![200], ..stored(100..101) };
    only(&rig.store(wider), &[(Reason::Stored, 1), (Reason::BlockSizeChanged, 1)]);
    for view in [View::Own, View::Published] {
        let CacheInfo { blocks, block_size, .. } = rig.info(0, view);
        assert_eq!((blocks, block_size), (1, Some(4)));
    }
    assert_eq!(rig.held(), [0, 0]);
    only(&rig.store(Stored { block_size: 0, ..stored(100..104) }), &[(Reason::BadBlockSize, 1)]);
    assert_eq!(rig.info(0, View::Own).block_size, Some(4));
}

#[test]
fn stores_without_their_tokens_reach_the_published_view_alone() {
    let mut rig = Rig::new(CONFIG);
    rig.store(stored(100..102));
    let report = rig.store(Stored { tokens: None, ..stored(102..104) });
    only(&report, &[(Reason::Stored, 2), (Reason::NoTokens, 1)]);
    let report = rig.store(Stored { tokens: Some(vec![1, 2, 3]), ..stored(104..106) });
    only(&report, &[(Reason::Stored, 2), (Reason::TokenCount, 1)]);
    assert_eq!(rig.held(), [2, 6]);
    // its removal is nothing to wonder about
    only(&rig.apply(None, vec![removed(&[105])]), &[(Reason::Removed, 1)]);
    only(&rig.apply(None, vec![removed(&[105, 101])]), &[(Reason::Removed, 2), (Reason::AbsentRemoval, 1)]);
    assert_eq!(rig.held(), [1, 1]);
}

#[test]
fn without_the_published_view_such_stores_have_no_effect() {
    let mut rig = Rig::new(MirrorConfig { published: false, ..CONFIG });
    only(&rig.store(Stored { tokens: None, ..stored(100..102) }), &[(Reason::NoTokens, 1)]);
    assert_eq!((rig.mirror.caches().len(), rig.info(0, View::Own).blocks), (1, 0));
}

#[test]
fn copies_go_one_by_one() {
    let mut rig = Rig::new(CONFIG);
    rig.store(stored(100..104));
    rig.store(stored(103..104));
    let copies = |rig: &Rig| {
        let mut rows = rig.mirror.dump(&rig.ingest, 0);
        rows.sort();
        rows.iter().map(|r| r.copies).collect::<Vec<_>>()
    };
    assert_eq!(copies(&rig), [1, 1, 1, 2]);
    // the present one of a removal counts beside the absent one
    only(&rig.apply(None, vec![removed(&[999, 103])]), &[(Reason::Removed, 2), (Reason::AbsentRemoval, 1)]);
    assert_eq!((rig.held(), copies(&rig)), ([4, 4], vec![1, 1, 1, 1]));
    rig.apply(None, vec![removed(&[103])]);
    assert_eq!(rig.held(), [3, 3]);
}

#[test]
fn orphans_wait_for_their_parent() {
    let mut rig = Rig::new(CONFIG);
    rig.store(stored(102..104));
    rig.store(stored(104..106));
    // published hashes chain by themselves: held, though their prefix is not
    assert_eq!((rig.info(0, View::Own).orphans, rig.info(0, View::Published).blocks), (4, 4));
    let mut rows = rig.mirror.dump(&rig.ingest, 0);
    rows.sort();
    let orphan = |engine_hash| Row { engine_hash, copies: 1, orphan: true };
    assert_eq!(rows, [102, 103, 104, 105].map(orphan));
    // ten of them fit
    only(&rig.store(stored(200..207)), &[(Reason::Stored, 7), (Reason::OrphanRefused, 1)]);
    assert_eq!(rig.held(), [0, 0]);
    rig.store(stored(100..102));
    assert_eq!(rig.held(), [6, 6]);
    assert_eq!(rig.info(0, View::Own).orphans, 6);
}

#[test]
fn more_than_an_engine_can_hold_is_cleared() {
    let mut rig = Rig::new(MirrorConfig { engine_blocks: Some(5), ..CONFIG });
    rig.store(stored(100..110));
    assert_eq!(rig.held(), [10, 10]);
    let report = rig.store(stored(110..111));
    only(&report, &[(Reason::Overflow, 1)]);
    assert!(report.wants_resync());
    assert_eq!(rig.held(), [0, 0]);
    // and again: a cleared cache keeps its bound
    rig.store(stored(100..110));
    assert!(rig.store(stored(110..111)).wants_resync());
    rig.mirror.set_engine_blocks(&mut rig.ingest, Some(15));
    assert!(!rig.store(stored(100..130)).wants_resync());
    assert_eq!(rig.held(), [30, 30]);
    // whatever an engine claims to have, the configured maximum stays
    rig.mirror.set_engine_blocks(&mut rig.ingest, Some(usize::MAX));
    let report =
        rig.store(Stored { parent: None, tokens: None, hashes: (2000..2990).collect(), ..stored(100..101) });
    assert!(report.wants_resync());
    // one view past its bound clears the other
    assert_eq!(rig.held(), [0, 0]);
}

#[test]
fn ranks_are_caches_of_their_own() {
    let mut rig = Rig::new(CONFIG);
    let store = |n: u64| vec![Event::Stored(Box::new(stored(100..100 + n)))];
    rig.apply(None, store(3));
    rig.apply(Some(0), vec![Event::Stored(Box::new(stored(103..104)))]);
    rig.apply(Some(5), store(2));
    assert_eq!(rig.mirror.caches().len(), 4);
    assert_eq!([0, 5].map(|rank| rig.info(rank, View::Own).blocks), [4, 2]);
    // two ranks are configured
    only(&rig.apply(Some(6), store(2)), &[(Reason::RankRefused, 1)]);
    only(&rig.apply(Some(5), vec![Event::Cleared]), &[(Reason::Cleared, 1)]);
    assert_eq!([0, 5].map(|rank| rig.info(rank, View::Own).blocks), [4, 0]);
    rig.mirror.close(&mut rig.ingest);
    assert!(rig.mirror.caches().is_empty() && rig.mirror.dump(&rig.ingest, 0).is_empty());
    assert_eq!((rig.ingest.stats().caches, rig.ingest.stats().pairs), (0, 0));
}

#[test]
fn a_full_inventory_refuses_ranks_and_says_so() {
    let mut rig = Rig::new(MirrorConfig { max_ranks: 9, ..CONFIG });
    let store = || vec![Event::Stored(Box::new(stored(100..103)))];
    for rank in 0..2 {
        only(&rig.apply(Some(rank), store()), &[(Reason::Stored, 3)]);
    }
    // of five caches one is left, and a rank needs two
    for _ in 0..3 {
        only(&rig.apply(Some(2), store()), &[(Reason::InventoryFull, 1)]);
    }
    assert_eq!((rig.mirror.caches().len(), rig.ingest.stats().caches), (4, 4));
    assert_eq!(rig.held(), [3, 3]);
}

#[test]
fn a_gap_in_a_prefix_is_flagged() {
    let mut rig = Rig::new(CONFIG);
    rig.store(stored(100..110));
    // no engine evicts so, unless it publishes what it does not hold from the start
    rig.apply(None, vec![removed(&[103])]);
    assert_eq!(rig.held(), [3, 3]);
    rig.apply(None, vec![removed(&[109])]);
    assert!(rig.info(0, View::Own).gaps && rig.info(0, View::Published).gaps);
    rig.mirror.clear(&mut rig.ingest);
    assert!(!rig.info(0, View::Own).gaps);
}
