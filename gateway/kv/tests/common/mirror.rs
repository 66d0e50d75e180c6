//! What a mirror makes of an engine's batches, the slow way.

use super::{NaiveCache, compare};
use kvgate_kv::event::{Batch, Event, Removed, Stored};
use kvgate_kv::inventory::{Effect, Ingest, Inventory};
use kvgate_kv::mirror::{CacheInfo, Mirror, MirrorConfig, Reason, Report, View};
use kvgate_kv::own::OwnHasher;
use std::collections::{BTreeMap, HashMap};

#[derive(Clone, Default)]
pub struct NaiveRank {
    pub own: Option<NaiveCache>,
    pub published: Option<NaiveCache>,
    block_size: Option<u32>,
    group: Option<u32>,
}

impl NaiveRank {
    fn views(&mut self) -> impl Iterator<Item = &mut NaiveCache> {
        self.own.iter_mut().chain(&mut self.published)
    }
}

pub type Counted = HashMap<Reason, u64>;

pub struct NaiveMirror {
    pub config: MirrorConfig,
    pub hasher: OwnHasher,
    pub max_orphans: usize,
    pub ranks: BTreeMap<u32, NaiveRank>,
}

impl NaiveMirror {
    pub fn new(config: MirrorConfig, hasher: OwnHasher, max_orphans: usize) -> Self {
        NaiveMirror { config, hasher, max_orphans, ranks: BTreeMap::new() }
    }

    fn bound(&self) -> usize {
        let twice = self.config.engine_blocks.map_or(usize::MAX, |n| 2 * n);
        twice.min(self.config.max_blocks)
    }

    pub fn apply(&mut self, batch: &Batch<'_>) -> Counted {
        let mut counted = Counted::new();
        let mut count = |reason, n: usize| *counted.entry(reason).or_default() += n as u64;
        count(Reason::UnknownEvent, batch.unknown_events as usize);
        count(Reason::BadEvent, batch.bad_events.len());
        let number = batch.rank.unwrap_or(0);
        let new = !self.ranks.contains_key(&number);
        if new && self.ranks.len() == self.config.max_ranks {
            count(Reason::RankRefused, batch.events.len());
            return counted;
        }
        if batch.events.is_empty() {
            return counted;
        }
        let cache = |published| NaiveCache::new(published, self.bound(), self.max_orphans);
        let rank = NaiveRank {
            own: self.config.own.then(|| cache(false)),
            published: self.config.published.then(|| cache(true)),
            ..NaiveRank::default()
        };
        let rank = self.ranks.entry(number).or_insert(rank);
        for event in &batch.events {
            match event {
                Event::Cleared => {
                    count(Reason::Cleared, 1);
                    rank.views().for_each(NaiveCache::clear);
                }
                Event::Removed(removed) => remove(rank, removed, &mut count),
                Event::Stored(stored) => store(rank, stored, &self.hasher, &mut count),
            }
        }
        counted
    }

    pub fn clear(&mut self) {
        for rank in self.ranks.values_mut() {
            rank.views().for_each(NaiveCache::clear);
            (rank.group, rank.block_size) = (None, None);
        }
    }

    pub fn set_engine_blocks(&mut self, blocks: usize) {
        self.config.engine_blocks = Some(blocks);
        let bound = self.bound();
        self.ranks.values_mut().flat_map(NaiveRank::views).for_each(|cache| cache.bound = bound);
    }

    /// The model's caches, beside what the mirror says of its own.
    pub fn beside<'a>(&'a self, mirror: &'a Mirror) -> Vec<(CacheInfo, &'a NaiveCache)> {
        let mut pairs = Vec::new();
        for info in mirror.caches() {
            let rank = &self.ranks[&info.rank];
            assert_eq!(info.block_size, rank.block_size);
            let cache = match info.view {
                View::Own => rank.own.as_ref(),
                View::Published => rank.published.as_ref(),
            };
            pairs.push((*info, cache.unwrap()));
        }
        let caches = self.ranks.values().map(|r| r.own.iter().chain(&r.published).count()).sum::<usize>();
        assert_eq!(pairs.len(), caches);
        pairs
    }

    /// Everything the mirror says and holds is what the model has.
    pub fn check(&self, mirror: &Mirror, ingest: &Ingest) {
        for (info, cache) in self.beside(mirror) {
            assert_eq!((info.blocks, info.orphans), (cache.held.len(), cache.orphans.len()));
            let mut rows = ingest.dump(info.id);
            rows.sort();
            assert_eq!(rows, cache.rows());
            if info.view == View::Own || !self.config.own {
                let mut rows = mirror.dump(ingest, info.rank);
                rows.sort();
                assert_eq!(rows, cache.rows());
            }
        }
    }
}

/// Checks several engines, lookups across all of them included.
pub fn check(engines: &[(NaiveMirror, Mirror)], ingest: &Ingest, inventory: &Inventory) {
    engines.iter().for_each(|(model, mirror)| model.check(mirror, ingest));
    let caches: Vec<_> = engines.iter().flat_map(|(model, mirror)| model.beside(mirror)).collect();
    let caches: Vec<_> = caches.iter().map(|(info, cache)| (info.id, *cache)).collect();
    for id in compare(inventory, &caches) {
        assert!(ingest.counts(id).unwrap().gaps);
    }
}

/// A report has what the model counted, and nothing else.
pub fn assert_counted(report: &Report, counted: &Counted) {
    for (reason, n) in report.iter() {
        assert_eq!(n, counted.get(&reason).copied().unwrap_or(0), "{}", reason.name());
    }
}

fn on_gpu(medium: Option<&str>, locality: Option<&str>) -> bool {
    medium.unwrap_or("GPU").to_lowercase() == "gpu" && locality.unwrap_or("LOCAL").to_lowercase() != "remote"
}

fn other_group(rank: &NaiveRank, group: Option<u32>) -> bool {
    matches!((rank.group, group), (Some(a), Some(b)) if a != b)
}

fn store(
    rank: &mut NaiveRank,
    stored: &Stored<'_>,
    hasher: &OwnHasher,
    count: &mut impl FnMut(Reason, usize),
) {
    let full = ["full_attention", "mla_attention", "sink_full_attention"];
    if !on_gpu(stored.medium, stored.locality) {
        return count(Reason::IgnoredMedium, 1);
    }
    if !full.contains(&stored.kind.unwrap_or(full[0])) || other_group(rank, stored.group_idx) {
        return count(Reason::IgnoredGroup, 1);
    }
    if stored.block_size == 0 {
        return count(Reason::BadBlockSize, 1);
    }
    if rank.group.is_none() {
        rank.group = stored.group_idx;
    }
    if rank.block_size.is_some() && rank.block_size != Some(stored.block_size) {
        count(Reason::BlockSizeChanged, 1);
        rank.views().for_each(NaiveCache::clear);
    }
    rank.block_size = Some(stored.block_size);
    let (mut applied, mut overflow) = (false, false);
    if let Some(own) = &mut rank.own {
        let enough = |t: &&Vec<u32>| t.len() == stored.hashes.len() * stored.block_size as usize;
        match &stored.tokens {
            None => count(Reason::NoTokens, 1),
            Some(tokens) if !enough(&tokens) => count(Reason::TokenCount, 1),
            Some(_) => {
                let tokens = hasher.of_event(stored).unwrap();
                let blocks: Vec<_> = stored.hashes.iter().copied().zip(tokens).collect();
                match own.stored(stored.parent, &blocks) {
                    Effect::Applied { missed } => {
                        applied = true;
                        count(Reason::OrphanRefused, missed);
                    }
                    effect => overflow = effect == Effect::Overflow,
                }
            }
        }
    }
    if let Some(published) = &mut rank.published
        && !overflow
    {
        let blocks: Vec<_> = stored.hashes.iter().map(|h| (*h, 0)).collect();
        overflow = published.stored(stored.parent, &blocks) == Effect::Overflow;
        applied = true;
    }
    if overflow {
        count(Reason::Overflow, 1);
        rank.views().for_each(NaiveCache::clear);
    } else if applied {
        count(Reason::Stored, stored.hashes.len());
    }
}

fn remove(rank: &mut NaiveRank, removed: &Removed<'_>, count: &mut impl FnMut(Reason, usize)) {
    if !on_gpu(removed.medium, removed.locality) {
        return count(Reason::IgnoredMedium, 1);
    }
    if other_group(rank, removed.group_idx) {
        return count(Reason::IgnoredGroup, 1);
    }
    let missed = rank.views().map(|cache| match cache.removed(&removed.hashes) {
        Effect::Applied { missed } => missed,
        _ => unreachable!(),
    });
    count(Reason::AbsentRemoval, missed.min().unwrap_or(0));
    count(Reason::Removed, removed.hashes.len());
}
