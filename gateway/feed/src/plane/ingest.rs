//! The one thread that writes the inventory.

use super::lane::{Board, Dump, Job, Lane, Next, Work};
use arc_swap::ArcSwap;
use kvgate_kv::event;
use kvgate_kv::inventory::{CacheId, Ingest};
use kvgate_kv::mirror::{CacheInfo, Mirror, View};
use kvgate_kv::own::OwnHasher;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Bytes of batches that a lane is served before others have their turn.
const SLICE: usize = 64 * 1024;
/// Cells swept in an idle moment before looking for work again.
const SWEEP: usize = 4096;
/// Slices between two looks at the totals.
const STATS_EVERY: u32 = 64;

/// A cache that can be looked up, and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// The engine, as named to [`Plane::follow`](super::Plane::follow).
    pub key: u64,
    /// The data-parallel rank.
    pub rank: u32,
    /// What prompts must be hashed with to look it up.
    pub view: View,
    /// What lookups call it.
    pub id: CacheId,
    /// Tokens per block; `None` while nothing is known to be held.
    pub block_size: Option<u32>,
}

/// The caches of all engines followed, at one moment.
#[derive(Clone, Debug, Default)]
pub struct Caches {
    engines: HashMap<u64, Engine>,
    ids: Vec<Option<Cache>>,
}

#[derive(Clone, Debug)]
struct Engine {
    lane: u64,
    caches: Vec<Cache>,
}

impl Caches {
    /// The caches of an engine: one for each rank heard of and view kept.
    pub fn of(&self, key: u64) -> &[Cache] {
        self.engines.get(&key).map_or(&[], |engine| &engine.caches)
    }

    /// The cache that a lookup found.
    pub fn get(&self, id: CacheId) -> Option<&Cache> {
        self.ids.get(usize::from(id.0))?.as_ref()
    }

    fn set(&mut self, key: u64, lane: u64, caches: Vec<Cache>) {
        self.engines.insert(key, Engine { lane, caches });
        self.index();
    }

    /// False if what is known of the key comes from another lane.
    fn remove(&mut self, key: u64, lane: u64) -> bool {
        if self.engines.get(&key).is_none_or(|engine| engine.lane != lane) {
            return false;
        }
        self.engines.remove(&key);
        self.index();
        true
    }

    fn index(&mut self) {
        self.ids.clear();
        for cache in self.engines.values().flat_map(|engine| &engine.caches) {
            let at = usize::from(cache.id.0);
            if self.ids.len() <= at {
                self.ids.resize(at + 1, None);
            }
            if let Some(entry) = self.ids.get_mut(at) {
                *entry = Some(*cache);
            }
        }
    }
}

/// The state of the thread.
pub(super) struct Worker {
    ingest: Ingest,
    hasher: OwnHasher,
    board: Arc<Board>,
    published: Arc<ArcSwap<Caches>>,
    caches: Caches,
    /// By lane.
    mirrors: HashMap<u64, Mirror>,
}

impl Worker {
    pub(super) fn new(
        ingest: Ingest,
        hasher: OwnHasher,
        board: Arc<Board>,
        published: Arc<ArcSwap<Caches>>,
    ) -> Worker {
        Worker { ingest, hasher, board, published, caches: Caches::default(), mirrors: HashMap::new() }
    }

    /// Works until the board is stopped.
    pub(super) fn run(mut self) {
        let (mut untidy, mut slices) = (false, 0_u32);
        loop {
            match self.board.work(!untidy) {
                Work::Stop => return,
                Work::Serve(lane) => {
                    self.serve(&lane);
                    self.board.served(lane);
                    (untidy, slices) = (true, slices + 1);
                    if slices >= STATS_EVERY {
                        slices = 0;
                        self.board.set_stats(self.ingest.stats());
                    }
                }
                Work::Dump(dump) => self.dump(dump),
                Work::Idle => {
                    untidy = self.ingest.upkeep(SWEEP);
                    slices = 0;
                    self.board.set_stats(self.ingest.stats());
                }
            }
        }
    }

    fn serve(&mut self, lane: &Lane) {
        let mut bytes = 0;
        while bytes < SLICE {
            match lane.next() {
                Next::Nothing => break,
                Next::Close => {
                    self.close(lane);
                    return;
                }
                Next::Bound(blocks) => {
                    let ingest = &mut self.ingest;
                    let mirror = self.mirrors.entry(lane.id);
                    let mirror =
                        mirror.or_insert_with(|| Mirror::new(lane.mirror.clone(), self.hasher.clone()));
                    mirror.set_engine_blocks(ingest, blocks);
                }
                Next::Job(job) => bytes += self.job(lane, job),
            }
        }
        let infos = self.mirrors.get(&lane.id).map_or(&[][..], Mirror::caches);
        lane.status.set_caches(infos);
        let cache = |c: &CacheInfo| Cache {
            key: lane.key,
            rank: c.rank,
            view: c.view,
            id: c.id,
            block_size: c.block_size,
        };
        if !infos.iter().map(cache).eq(self.caches.of(lane.key).iter().copied()) {
            self.caches.set(lane.key, lane.id, infos.iter().map(cache).collect());
            self.published.store(Arc::new(self.caches.clone()));
        }
    }

    /// Does a job; returns its bytes. The inventory has no way to panic that we know of; should it have one all
    /// the same, the engine's caches are given back, and the thread goes on.
    fn job(&mut self, lane: &Lane, job: Job) -> usize {
        let ingest = &mut self.ingest;
        let mirror = self.mirrors.entry(lane.id);
        let mirror = mirror.or_insert_with(|| Mirror::new(lane.mirror.clone(), self.hasher.clone()));
        let (bytes, _budget) = match job {
            Job::Clear => {
                mirror.clear(ingest);
                return 0;
            }
            Job::Apply(bytes, budget) => (bytes, budget),
        };
        let done = catch_unwind(AssertUnwindSafe(|| {
            let Ok(batch) = event::decode(&bytes) else { return }; // it was decoded before
            let report = mirror.apply(ingest, &batch);
            lane.status.applied(batch.events.len(), &report);
            if report.wants_resync() {
                lane.distrust.notify_one();
            }
        }));
        if done.is_err() {
            lane.status.poisoned_total.add(1);
            self.forget(lane);
        }
        bytes.len()
    }

    fn close(&mut self, lane: &Lane) {
        self.forget(lane);
        lane.status.set_caches(&[]);
        if self.caches.remove(lane.key, lane.id) {
            self.published.store(Arc::new(self.caches.clone()));
        }
    }

    fn forget(&mut self, lane: &Lane) {
        if let Some(mut mirror) = self.mirrors.remove(&lane.id) {
            let ingest = &mut self.ingest;
            let _ = catch_unwind(AssertUnwindSafe(|| mirror.close(ingest)));
        }
    }

    fn dump(&self, Dump { lane, rank, answer }: Dump) {
        let rows = self.mirrors.get(&lane).map(|mirror| {
            let mut ranks: Vec<u32> = mirror.caches().iter().map(|cache| cache.rank).collect();
            ranks.dedup();
            ranks.retain(|r| rank.is_none_or(|wanted| wanted == *r));
            ranks.into_iter().map(|r| (r, mirror.dump(&self.ingest, r))).collect()
        });
        let _ = answer.send(rows.unwrap_or_default());
    }
}
