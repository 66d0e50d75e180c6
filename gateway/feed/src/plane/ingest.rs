//! The one thread that writes the inventory.

use super::lane::{Board, Dump, Job, Lane, Next, Work};
use kvgate_kv::event;
use kvgate_kv::holdings::{Cache, Caches, Holdings};
use kvgate_kv::inventory::Ingest;
use kvgate_kv::mirror::{CacheInfo, Mirror, View};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Bytes of batches that a lane is served before others have their turn.
const SLICE: usize = 64 * 1024;
/// Cells swept in an idle moment before looking for work again.
const SWEEP: usize = 4096;
/// Slices between two looks at the totals.
const STATS_EVERY: u32 = 64;

/// The state of the thread.
pub(super) struct Worker {
    ingest: Ingest,
    board: Arc<Board>,
    holdings: Arc<Holdings>,
    /// As published.
    caches: Caches,
    /// Whose word the caches of an engine are: its lane, by key.
    lanes: HashMap<u64, u64>,
    /// By lane.
    mirrors: HashMap<u64, Mirror>,
}

impl Worker {
    pub(super) fn new(ingest: Ingest, board: Arc<Board>, holdings: Arc<Holdings>) -> Worker {
        let (caches, lanes, mirrors) = (Caches::default(), HashMap::new(), HashMap::new());
        Worker { ingest, board, holdings, caches, lanes, mirrors }
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
                    let mirror = mirror
                        .or_insert_with(|| Mirror::new(lane.mirror.clone(), self.holdings.hasher().clone()));
                    mirror.set_engine_blocks(ingest, blocks);
                }
                Next::Job(job) => bytes += self.job(lane, job),
            }
        }
        let infos = self.mirrors.get(&lane.id).map_or(&[][..], Mirror::caches);
        let cache = |c: &CacheInfo| Cache {
            key: lane.key,
            rank: c.rank,
            view: c.view,
            id: c.id,
            block_size: c.block_size,
        };
        lane.standing.set_blocks(blocks(infos));
        if !infos.iter().map(cache).eq(self.caches.of(lane.key).iter().copied()) {
            self.caches.set(lane.key, infos.iter().map(cache).collect(), &lane.standing);
            self.lanes.insert(lane.key, lane.id);
            self.holdings.publish(self.caches.clone());
        }
        // last: whoever sees it in the status sees it credited
        lane.status.set_caches(self.mirrors.get(&lane.id).map_or(&[][..], Mirror::caches));
    }

    /// Does a job; returns its bytes. The inventory has no way to panic that we know of; should it have one all
    /// the same, the engine's caches are given back, and the thread goes on.
    fn job(&mut self, lane: &Lane, job: Job) -> usize {
        let ingest = &mut self.ingest;
        let mirror = self.mirrors.entry(lane.id);
        let mirror =
            mirror.or_insert_with(|| Mirror::new(lane.mirror.clone(), self.holdings.hasher().clone()));
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
            lane.distrust.notify_one();
        }
        bytes.len()
    }

    fn close(&mut self, lane: &Lane) {
        self.forget(lane);
        lane.status.set_caches(&[]);
        // the engine may be followed anew already
        if self.lanes.get(&lane.key) == Some(&lane.id) {
            self.lanes.remove(&lane.key);
            self.caches.set(lane.key, Vec::new(), &lane.standing);
            self.holdings.publish(self.caches.clone());
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

/// Blocks of all ranks. The views of a rank stand for one cache; one of them may have to do without some.
fn blocks(caches: &[CacheInfo]) -> usize {
    let of = |view: View| caches.iter().filter(move |c| c.view == view).map(|c| c.blocks).sum::<usize>();
    of(View::Own).max(of(View::Published))
}
