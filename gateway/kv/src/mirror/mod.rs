//! One engine's events, applied to the inventory.
//!
//! A [`Mirror`] knows what the events of its engine mean: one pair of caches per data-parallel rank, made when
//! the rank is first heard of. The *own* view is looked up by own hashes, whatever algorithm and seed the engine
//! hashes with; the *published* view by the engine's hashes themselves, where a contract pins those.
//!
//! Only blocks in the engine's own GPU memory count. Of a hybrid model, whose groups of layers cache apart, only
//! the first full-attention group counts: its blocks are held back to the start of a prompt, which is what a
//! prefix means; where the engine does not say what kind a group is (vLLM before 0.22) the first group heard of.

mod report;

pub use report::{Reason, Report};

use crate::event::{Batch, Event, Removed, Stored};
use crate::inventory::{CacheId, Counts, Effect, Ingest, Row};
use crate::own::OwnHasher;

/// What a mirror keeps of its engine.
#[derive(Clone, Debug)]
pub struct MirrorConfig {
    /// Keep the own view.
    pub own: bool,
    /// Keep the published view.
    pub published: bool,
    /// Blocks the engine has, per rank, when known.
    pub engine_blocks: Option<usize>,
    /// Blocks that a cache may hold at most, orphans included. The bound is twice what the engine has where that
    /// is known and less: one more block than the engine can hold proves that removals were lost.
    pub max_blocks: usize,
    /// Ranks kept at most.
    pub max_ranks: usize,
}

impl MirrorConfig {
    fn bound(&self) -> usize {
        match self.engine_blocks {
            Some(blocks) if blocks > 0 => blocks.saturating_mul(2).min(self.max_blocks),
            _ => self.max_blocks,
        }
    }
}

/// What the blocks of a cache are looked up by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum View {
    /// Own hashes, see [`own`](crate::own).
    Own,
    /// The hashes that the engine publishes, 0 as 1.
    Published,
}

/// One cache of the engine, as of the last batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheInfo {
    /// The data-parallel rank.
    pub rank: u32,
    /// What to look it up by.
    pub view: View,
    /// What lookups call it.
    pub id: CacheId,
    /// Tokens per block; `None` until a store said so.
    pub block_size: Option<u32>,
    /// Blocks it holds.
    pub blocks: usize,
    /// Blocks heard of whose parent is unknown, so that they do not count.
    pub orphans: usize,
    /// It was caught with a gap in a prefix: lookups scan it.
    pub gaps: bool,
}

#[derive(Clone, Copy)]
struct Rank {
    rank: u32,
    own: Option<CacheId>,
    published: Option<CacheId>,
    block_size: Option<u32>,
    /// The group of layers that counts.
    group: Option<u32>,
}

impl Rank {
    fn ids(&self) -> impl Iterator<Item = (View, CacheId)> {
        let own = self.own.map(|id| (View::Own, id));
        own.into_iter().chain(self.published.map(|id| (View::Published, id)))
    }

    fn clear(&self, ingest: &mut Ingest) {
        self.ids().for_each(|(_, id)| {
            ingest.cleared(id);
        });
    }

    /// Is it about the group that counts? A group is chosen by the first store, and stays.
    fn chosen(&self, group: Option<u32>) -> bool {
        self.group.is_none() || group.is_none() || self.group == group
    }
}

/// The caches of one engine. Its methods want the [`Ingest`] that it was first given.
pub struct Mirror {
    config: MirrorConfig,
    hasher: OwnHasher,
    ranks: Vec<Rank>,
    caches: Vec<CacheInfo>,
}

impl Mirror {
    /// A mirror without caches. `hasher` is the one that prompts are hashed with.
    pub fn new(config: MirrorConfig, hasher: OwnHasher) -> Self {
        Mirror { config, hasher, ranks: Vec::new(), caches: Vec::new() }
    }

    /// Applies what an engine said, in order.
    pub fn apply(&mut self, ingest: &mut Ingest, batch: &Batch<'_>) -> Report {
        let mut report = Report::default();
        report.add(Reason::UnknownEvent, batch.unknown_events as usize);
        report.add(Reason::BadEvent, batch.bad_events.len());
        if batch.events.is_empty() {
            return report;
        }
        let rank = batch.rank.unwrap_or(0);
        match self.rank(ingest, rank) {
            Ok(at) => {
                for event in &batch.events {
                    self.event(ingest, at, event, &mut report);
                }
                self.refresh(ingest);
            }
            Err(reason) => report.add(reason, batch.events.len()),
        }
        report
    }

    /// Forgets what the engine holds, but not its ranks: after a restart, or before a resync.
    pub fn clear(&mut self, ingest: &mut Ingest) {
        for rank in &mut self.ranks {
            rank.clear(ingest);
            (rank.block_size, rank.group) = (None, None);
        }
        self.refresh(ingest);
    }

    /// Gives the caches back; those of a later batch are new ones.
    pub fn close(&mut self, ingest: &mut Ingest) {
        for rank in self.ranks.drain(..) {
            rank.ids().for_each(|(_, id)| ingest.remove_cache(id));
        }
        self.caches.clear();
    }

    /// Says how many blocks the engine has, per rank, once that is known or has changed.
    pub fn set_engine_blocks(&mut self, ingest: &mut Ingest, blocks: Option<usize>) {
        self.config.engine_blocks = blocks;
        for (_, id) in self.ranks.iter().flat_map(Rank::ids) {
            ingest.set_bound(id, self.config.bound());
        }
    }

    /// The caches, by rank in order of appearance, each as of the last batch.
    pub fn caches(&self) -> &[CacheInfo] {
        &self.caches
    }

    /// What a rank holds, block by block, in no order: of its own view where that is kept, else of the published
    /// one, which knows no orphans. Empty for a rank not heard of.
    pub fn dump(&self, ingest: &Ingest, rank: u32) -> Vec<Row> {
        let of = self.ranks.iter().find(|r| r.rank == rank).and_then(|r| r.ids().next());
        of.map(|(_, id)| ingest.dump(id)).unwrap_or_default()
    }

    /// Where the rank's caches are; makes them when it is new.
    fn rank(&mut self, ingest: &mut Ingest, rank: u32) -> Result<usize, Reason> {
        if let Some(at) = self.ranks.iter().position(|r| r.rank == rank) {
            return Ok(at);
        }
        if self.ranks.len() >= self.config.max_ranks {
            return Err(Reason::RankRefused);
        }
        let MirrorConfig { own, published, engine_blocks, .. } = self.config;
        let bound = self.config.bound();
        let mut add = || ingest.add_cache(engine_blocks.unwrap_or(0), bound);
        let own = if own { Some(add().ok_or(Reason::InventoryFull)?) } else { None };
        let published = if published { add() } else { None };
        if published.is_none() && self.config.published {
            own.into_iter().for_each(|id| ingest.remove_cache(id));
            return Err(Reason::InventoryFull);
        }
        self.ranks.push(Rank { rank, own, published, block_size: None, group: None });
        Ok(self.ranks.len() - 1)
    }

    fn event(&mut self, ingest: &mut Ingest, at: usize, event: &Event<'_>, report: &mut Report) {
        let Some(rank) = self.ranks.get_mut(at) else { return };
        match event {
            Event::Cleared => {
                report.add(Reason::Cleared, 1);
                rank.clear(ingest);
            }
            Event::Removed(removed) => apply_removed(ingest, rank, removed, report),
            Event::Stored(stored) => apply_stored(ingest, rank, &self.hasher, stored, report),
        }
    }

    /// Brings [`Mirror::caches`] up to date.
    fn refresh(&mut self, ingest: &Ingest) {
        let ids = self.ranks.iter().flat_map(|rank| rank.ids().map(move |(view, id)| (rank, view, id)));
        let caches = ids.map(|(rank, view, id)| {
            let Counts { blocks, orphans, gaps } = ingest.counts(id).unwrap_or_default();
            CacheInfo { rank: rank.rank, view, id, block_size: rank.block_size, blocks, orphans, gaps }
        });
        self.caches.clear();
        self.caches.extend(caches);
    }
}

/// Is it in the engine's own GPU memory? Engines that do not say have no other.
fn is_local_gpu(medium: Option<&str>, locality: Option<&str>) -> bool {
    medium.is_none_or(|m| m.eq_ignore_ascii_case("gpu"))
        && locality.is_none_or(|l| !l.eq_ignore_ascii_case("remote"))
}

/// Does a group of this kind keep whole prefixes? vLLM names variants of full attention apart.
fn keeps_prefixes(kind: Option<&str>) -> bool {
    kind.is_none_or(|k| matches!(k, "full_attention" | "mla_attention" | "sink_full_attention"))
}

fn apply_stored(
    ingest: &mut Ingest,
    rank: &mut Rank,
    hasher: &OwnHasher,
    stored: &Stored<'_>,
    report: &mut Report,
) {
    if !is_local_gpu(stored.medium, stored.locality) {
        return report.add(Reason::IgnoredMedium, 1);
    }
    if !keeps_prefixes(stored.kind) || !rank.chosen(stored.group_idx) {
        return report.add(Reason::IgnoredGroup, 1);
    }
    if stored.block_size == 0 {
        return report.add(Reason::BadBlockSize, 1);
    }
    rank.group = rank.group.or(stored.group_idx);
    if rank.block_size.replace(stored.block_size).is_some_and(|size| size != stored.block_size) {
        report.add(Reason::BlockSizeChanged, 1);
        rank.clear(ingest);
    }
    let mut effects = [None, None];
    if let Some(id) = rank.own {
        match hasher.of_event(stored) {
            Some(tokens) => effects[0] = Some(ingest.stored(id, stored.parent, &stored.hashes, &tokens)),
            None if stored.tokens.is_none() => report.add(Reason::NoTokens, 1),
            None => report.add(Reason::TokenCount, 1),
        }
    }
    if let Some(id) = rank.published {
        effects[1] = Some(ingest.stored_published(id, &stored.hashes));
    }
    if effects.contains(&Some(Effect::Overflow)) {
        // the views of a rank stand for one cache: a resync fills both anew
        rank.clear(ingest);
        return report.add(Reason::Overflow, 1);
    }
    report.add(Reason::InventoryFull, usize::from(effects.contains(&Some(Effect::Refused))));
    let missed = effects.into_iter().flatten().filter_map(missed);
    report.add(Reason::OrphanRefused, missed.clone().max().unwrap_or(0));
    if missed.count() > 0 {
        report.add(Reason::Stored, stored.hashes.len());
    }
}

fn apply_removed(ingest: &mut Ingest, rank: &Rank, removed: &Removed<'_>, report: &mut Report) {
    if !is_local_gpu(removed.medium, removed.locality) {
        return report.add(Reason::IgnoredMedium, 1);
    }
    if !rank.chosen(removed.group_idx) {
        return report.add(Reason::IgnoredGroup, 1);
    }
    let effects = rank.ids().map(|(_, id)| ingest.removed(id, &removed.hashes));
    // a block that one view had to do without is no stranger
    let absent = effects.filter_map(missed).min();
    report.add(Reason::AbsentRemoval, absent.unwrap_or(0));
    report.add(Reason::Removed, removed.hashes.len());
}

/// Blocks without effect, of an event that was applied.
fn missed(effect: Effect) -> Option<usize> {
    match effect {
        Effect::Applied { missed } => Some(missed),
        Effect::Overflow | Effect::Refused => None,
    }
}
