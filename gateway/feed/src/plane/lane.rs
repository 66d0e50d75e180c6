//! Between the feeds and the ingest thread: a lane for each feed, and the board that says which have work.

use super::status::FeedStatus;
use bytes::Bytes;
use kvgate_kv::holdings::Standing;
use kvgate_kv::inventory::{Row, Stats};
use kvgate_kv::mirror::MirrorConfig;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};

/// What a job costs beside its bytes.
const OVERHEAD: usize = 256;
/// Dumps waiting at most; more callers wait for their turn.
const DUMPS: usize = 4;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a feed wants done.
#[derive(Debug)]
pub(super) enum Job {
    Clear,
    /// A batch that decodes. It counts against the lane's budget until it is dropped.
    Apply(Bytes, OwnedSemaphorePermit),
}

/// A feed's way to the ingest thread.
#[derive(Debug)]
pub(super) struct Lane {
    /// Told apart from an earlier lane with the same key.
    pub id: u64,
    pub key: u64,
    pub mirror: MirrorConfig,
    pub status: Arc<FeedStatus>,
    /// Set by the ingest thread, once it has done what led to it; taken back by the feed at once.
    pub standing: Standing,
    /// The ingest thread found that a cache has outgrown its bound.
    pub distrust: Notify,
    budget: Arc<Semaphore>,
    most: u32,
    inbox: Mutex<Inbox>,
}

#[derive(Debug, Default)]
struct Inbox {
    jobs: VecDeque<Job>,
    bound: Option<Option<usize>>,
    /// What will be held when the jobs are done stands for the engine as it is.
    settled: bool,
    /// On the board, or being served.
    scheduled: bool,
    /// Takes no more jobs.
    closed: bool,
    /// The caches are still to be given back.
    closing: bool,
}

/// The next thing a lane wants.
pub(super) enum Next {
    Job(Job),
    /// A new count of the engine's blocks.
    Bound(Option<usize>),
    Close,
    Nothing,
}

impl Lane {
    pub(super) fn new(key: u64, mirror: MirrorConfig, bytes: u32) -> Arc<Lane> {
        static IDS: AtomicU64 = AtomicU64::new(0);
        Arc::new(Lane {
            id: IDS.fetch_add(1, Relaxed),
            key,
            mirror,
            status: Arc::default(),
            standing: Standing::default(),
            distrust: Notify::new(),
            budget: Arc::new(Semaphore::new(bytes as usize)),
            most: bytes,
            inbox: Mutex::default(),
        })
    }

    /// Waits for room for a batch; `None` when the lane is closed.
    pub(super) async fn room(&self, batch: &Bytes) -> Option<OwnedSemaphorePermit> {
        let cost = u32::try_from(batch.len() + OVERHEAD).unwrap_or(u32::MAX).min(self.most); // one always fits
        self.budget.clone().acquire_many_owned(cost).await.ok()
    }

    /// Queues a job; [`Board::schedule`] must follow.
    pub(super) fn push(&self, job: Job) {
        let mut inbox = lock(&self.inbox);
        if matches!(job, Job::Clear) {
            // whatever they store, it is forgotten
            let overtaken = inbox.jobs.drain(..).filter(|job| matches!(job, Job::Apply(..))).count();
            self.status.overtaken_total.add(overtaken as u64);
        }
        if !inbox.closed {
            inbox.jobs.push_back(job);
            self.status.behind.set(true);
        }
    }

    /// Says whether what will be held is the engine's. True: it is, and the ingest thread has to see it;
    /// [`Board::schedule`] must follow.
    pub(super) fn settle(&self, settled: bool) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.settled = settled;
        if !settled {
            self.standing.set_trusted(false);
        }
        settled && !self.standing.trusted()
    }

    pub(super) fn set_bound(&self, blocks: Option<usize>) {
        let mut inbox = lock(&self.inbox);
        if !inbox.closed {
            inbox.bound = Some(blocks);
        }
    }

    pub(super) fn next(&self) -> Next {
        let mut inbox = lock(&self.inbox);
        if std::mem::take(&mut inbox.closing) {
            return Next::Close;
        }
        // the job before is done, and a clear is always the first to wait
        if !matches!(inbox.jobs.front(), Some(Job::Clear)) {
            self.standing.set_trusted(inbox.settled);
        }
        match inbox.bound.take() {
            Some(bound) => Next::Bound(bound),
            None => inbox.jobs.pop_front().map_or(Next::Nothing, Next::Job),
        }
    }

    fn close(&self) {
        let mut inbox = lock(&self.inbox);
        inbox.closing = !inbox.closed;
        inbox.closed = true;
        inbox.settled = false;
        self.standing.set_trusted(false);
        (inbox.bound, inbox.jobs) = (None, VecDeque::new());
        self.budget.close();
    }

    /// True once, until [`Lane::rest`].
    fn claim(&self) -> bool {
        !std::mem::replace(&mut lock(&self.inbox).scheduled, true)
    }

    /// The ingest thread is done with it for now. True: more has come, and it stays scheduled.
    fn rest(&self) -> bool {
        let mut inbox = lock(&self.inbox);
        self.status.behind.set(!inbox.jobs.is_empty());
        let settles = inbox.settled && !self.standing.trusted();
        inbox.scheduled = inbox.closing || inbox.bound.is_some() || !inbox.jobs.is_empty() || settles;
        inbox.scheduled
    }
}

/// A question to the ingest thread.
pub(super) struct Dump {
    pub lane: u64,
    pub rank: Option<u32>,
    pub answer: oneshot::Sender<Vec<(u32, Vec<Row>)>>,
}

/// What the ingest thread is to do next.
pub(super) enum Work {
    Serve(Arc<Lane>),
    Dump(Dump),
    /// Nothing is waiting.
    Idle,
    Stop,
}

/// Which lanes have work, in the order of their turns.
#[derive(Debug)]
pub(super) struct Board {
    state: Mutex<State>,
    wake: Condvar,
    dumps: Semaphore,
    stats: Mutex<Stats>,
}

#[derive(Debug, Default)]
struct State {
    lanes: HashMap<u64, Arc<Lane>>,
    ready: VecDeque<Arc<Lane>>,
    dumps: VecDeque<Dump>,
    stopped: bool,
}

impl std::fmt::Debug for Dump {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dump").field("lane", &self.lane).field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl Default for Board {
    fn default() -> Self {
        Board {
            state: Mutex::default(),
            wake: Condvar::new(),
            dumps: Semaphore::new(DUMPS),
            stats: Mutex::default(),
        }
    }
}

impl Board {
    /// Makes the lane known by its key; false if the key is in use.
    pub(super) fn register(&self, lane: &Arc<Lane>) -> bool {
        let mut state = lock(&self.state);
        if state.lanes.contains_key(&lane.key) {
            return false;
        }
        state.lanes.insert(lane.key, lane.clone());
        true
    }

    pub(super) fn lane(&self, key: u64) -> Option<Arc<Lane>> {
        lock(&self.state).lanes.get(&key).cloned()
    }

    /// Closes the lane and has its caches removed.
    pub(super) fn remove(&self, lane: &Arc<Lane>) {
        lane.close();
        lock(&self.state).lanes.retain(|_, l| l.id != lane.id);
        self.schedule_first(lane);
    }

    /// Gives the lane a turn, unless it has one coming.
    pub(super) fn schedule(&self, lane: &Arc<Lane>) {
        if lane.claim() {
            self.enqueue(lane.clone());
        }
    }

    /// Gives the lane the next turn, unless it has one coming: what is to be forgotten must not be looked up.
    pub(super) fn schedule_first(&self, lane: &Arc<Lane>) {
        if lane.claim() {
            lock(&self.state).ready.push_front(lane.clone());
            self.wake.notify_one();
        }
    }

    /// The ingest thread is done with the lane for this turn.
    pub(super) fn served(&self, lane: Arc<Lane>) {
        if lane.rest() {
            self.enqueue(lane);
        }
    }

    fn enqueue(&self, lane: Arc<Lane>) {
        lock(&self.state).ready.push_back(lane);
        self.wake.notify_one();
    }

    pub(super) async fn dump(&self, lane: &Lane, rank: Option<u32>) -> Vec<(u32, Vec<Row>)> {
        let Ok(_turn) = self.dumps.acquire().await else { return Vec::new() };
        let (answer, answered) = oneshot::channel();
        {
            let mut state = lock(&self.state);
            if state.stopped {
                return Vec::new();
            }
            state.dumps.push_back(Dump { lane: lane.id, rank, answer });
        }
        self.wake.notify_one();
        answered.await.unwrap_or_default()
    }

    /// What to do next. With `wait`, sleeps until there is something.
    pub(super) fn work(&self, wait: bool) -> Work {
        let mut state = lock(&self.state);
        loop {
            if state.stopped {
                return Work::Stop;
            }
            if let Some(dump) = state.dumps.pop_front() {
                return Work::Dump(dump);
            }
            if let Some(lane) = state.ready.pop_front() {
                return Work::Serve(lane);
            }
            if !wait {
                return Work::Idle;
            }
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the ingest thread, and with it every feed.
    pub(super) fn stop(&self) {
        let mut state = lock(&self.state);
        state.stopped = true;
        state.lanes.drain().for_each(|(_, lane)| lane.close());
        state.dumps.clear();
        state.ready.clear();
        self.wake.notify_one();
    }

    pub(super) fn set_stats(&self, stats: Stats) {
        *lock(&self.stats) = stats;
    }

    pub(super) fn stats(&self) -> Stats {
        *lock(&self.stats)
    }
}

#[cfg(test)]
mod tests;
