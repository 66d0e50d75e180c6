//! The event plane: follows engines and keeps one inventory of what they hold.
//!
//! Each engine has a *feed*: a supervised subscription and, where the engine has one, a replay. The feed runs as
//! two tasks on a tokio runtime, one for the socket and one that decodes and keeps the sequence window. A single
//! *ingest* thread owns the inventory.
//!
//! Between them stand two bounded queues per engine. The first is filled by the socket; when it is full, batches
//! are dropped, counted, and treated as a gap, so that lag stays bounded and the engine never has to queue for
//! us. The second, a *lane*, hands over to the ingest thread, which serves lanes in turn, a slice of each.
//!
//! Decoding happens in the feed's own task, before anything is queued for the ingest thread: garbage costs the
//! task that received it, which yields to others after a message, and no more. The ingest thread sees only
//! sound batches. Since a decoded batch borrows from its bytes, it decodes them a second time: some 130 ns per
//! block of 16 tokens are the price.

mod drive;
mod ingest;
mod lane;
mod status;

pub use status::{Count, FeedStatus, Flag, Warmth};

use crate::zmtp::{Backoff, Endpoint, Options};
use bytes::Bytes;
use kvgate_kv::holdings::Holdings;
use kvgate_kv::inventory::{self, Row};
use kvgate_kv::mirror::MirrorConfig;
use kvgate_kv::own::OwnHasher;
use kvgate_kv::window;
use lane::{Board, Lane};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::Handle;

/// What all feeds share.
#[derive(Clone, Debug)]
pub struct PlaneConfig {
    /// How large the inventory may become.
    pub inventory: inventory::Config,
    /// Hashes the blocks of events; prompts must be hashed with the same.
    pub hasher: OwnHasher,
    /// The sequence window of each feed; `replay` is set by each [`Source`].
    pub window: window::Config,
    /// Deadlines and limits of each connection.
    pub connection: Options,
    /// Between attempts to connect.
    pub backoff: Backoff,
    /// Messages queued per feed at most, before any more are dropped.
    pub queue_messages: usize,
    /// Bytes queued per feed at most, some 256 added for each message.
    pub queue_bytes: u32,
    /// Bytes handed over per feed that the ingest thread has not dealt with.
    pub lane_bytes: u32,
    /// An engine that was learnt anew because a cache outgrew its bound is not learnt anew again for so long.
    pub distrust_pause: Duration,
}

impl Default for PlaneConfig {
    fn default() -> Self {
        PlaneConfig {
            inventory: inventory::Config { max_caches: 319, max_orphans: 100_000 },
            hasher: OwnHasher::new(),
            window: window::Config::default(),
            connection: Options::default(),
            backoff: Backoff { first: Duration::from_millis(200), max: Duration::from_secs(5) },
            queue_messages: 8192,
            queue_bytes: 32 << 20,
            lane_bytes: 1 << 20,
            distrust_pause: Duration::from_secs(60),
        }
    }
}

/// Where and how to follow one engine.
#[derive(Clone, Debug)]
pub struct Source {
    /// What logs call the engine: its address.
    pub name: String,
    /// The engine's publisher.
    pub events: Endpoint,
    /// The engine's replay socket, if it has one.
    pub replay: Option<Endpoint>,
    /// Topics wanted: those that begin so. Empty: all.
    pub topic: Bytes,
    /// What to keep of it.
    pub mirror: MirrorConfig,
}

/// Why an engine is not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FollowError {
    /// Its key is in use.
    #[error("engine {0} is followed already")]
    Followed(u64),
    /// There is no tokio runtime to follow it on.
    #[error("not within a tokio runtime")]
    NoRuntime,
}

/// The inventory of all engines followed, and the thread that writes it. Dropping it ends the thread; feeds end
/// with their handles.
pub struct Plane {
    config: PlaneConfig,
    holdings: Arc<Holdings>,
    board: Arc<Board>,
    thread: Option<JoinHandle<()>>,
}

impl Plane {
    /// Starts the ingest thread.
    ///
    /// # Errors
    /// The system has no thread to give.
    pub fn start(config: PlaneConfig) -> std::io::Result<Plane> {
        let (ingest, inventory) = inventory::Ingest::new(config.inventory.clone());
        let board = Arc::new(Board::default());
        let holdings = Arc::new(Holdings::new(inventory, config.hasher.clone()));
        let worker = ingest::Worker::new(ingest, board.clone(), holdings.clone());
        let thread = std::thread::Builder::new().name("kv-ingest".to_owned()).spawn(move || worker.run())?;
        Ok(Plane { config, holdings, board, thread: Some(thread) })
    }

    /// What is held, for lookups from any thread, without a lock.
    pub fn holdings(&self) -> Arc<Holdings> {
        self.holdings.clone()
    }

    /// Follows an engine, on the current tokio runtime, from now until the handle is dropped. The engine need not
    /// exist yet. `key` is the caller's name for it.
    ///
    /// # Errors
    /// The key is in use, or there is no runtime.
    pub fn follow(&self, key: u64, source: Source) -> Result<FeedHandle, FollowError> {
        let runtime = Handle::try_current().map_err(|_| FollowError::NoRuntime)?;
        let mut window = self.config.window.clone();
        window.replay = source.replay.is_some();
        let lane = Lane::new(key, source.mirror.clone(), self.config.lane_bytes);
        if !self.board.register(&lane) {
            return Err(FollowError::Followed(key));
        }
        let feed = drive::Feed::new(lane.clone(), self.board.clone(), source, window, &self.config);
        let task = runtime.spawn(feed.run());
        Ok(FeedHandle { lane, board: self.board.clone(), task })
    }

    /// Says how many blocks an engine has, per rank, once that is known or has changed: a cache never holds more
    /// than twice as many. Without effect if the engine is not followed.
    pub fn set_bound(&self, key: u64, blocks: Option<usize>) {
        if let Some(lane) = self.board.lane(key) {
            lane.set_bound(blocks);
            self.board.schedule(&lane);
        }
    }

    /// What an engine holds, block by block, in no order: each of its ranks, or the one asked for. Empty if the
    /// engine is not followed or has said nothing yet.
    pub async fn dump(&self, key: u64, rank: Option<u32>) -> Vec<(u32, Vec<Row>)> {
        match self.board.lane(key) {
            Some(lane) => self.board.dump(&lane, rank).await,
            None => Vec::new(),
        }
    }

    /// Totals of the inventory, as of the last batch.
    pub fn stats(&self) -> inventory::Stats {
        self.board.stats()
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.board.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// An engine being followed. Dropping it ends the subscription and the replay, and gives the engine's caches back.
#[derive(Debug)]
pub struct FeedHandle {
    lane: Arc<Lane>,
    board: Arc<Board>,
    task: tokio::task::JoinHandle<()>,
}

impl FeedHandle {
    /// How the feed is doing; the same object at each call, updated in place, and kept as it was at the end.
    pub fn status(&self) -> Arc<FeedStatus> {
        self.lane.status.clone()
    }
}

impl Drop for FeedHandle {
    fn drop(&mut self) {
        self.task.abort();
        self.board.remove(&self.lane);
    }
}
