//! How a feed is doing, readable at any time from any thread.

use crate::zmtp::Error;
use kvgate_kv::event;
use kvgate_kv::mirror::{self, CacheInfo, Reason, Report};
use kvgate_kv::window;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

/// A number kept up to date by the feed.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// As of now.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    pub(super) fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    pub(super) fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }
}

/// A yes or no kept up to date by the feed.
#[derive(Debug, Default)]
pub struct Flag(Count);

impl Flag {
    /// As of now.
    pub fn get(&self) -> bool {
        self.0.get() > 0
    }

    pub(super) fn set(&self, value: bool) {
        self.0.set(value.into());
    }
}

/// How far a feed has come with what its engine held before it was followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Warmth {
    /// The first attempt to connect is under way.
    Connecting,
    /// It has been connected to in vain.
    Unreachable,
    /// What it held is being replayed.
    Replaying,
    /// It has been asked for a replay in vain.
    Failed,
    /// All of it is in the inventory, or the engine has no replay.
    Warm,
}

impl Warmth {
    /// A stable short name.
    pub fn name(self) -> &'static str {
        ["connecting", "unreachable", "replaying", "failed", "warm"][self as usize]
    }

    /// Whether more will be known in a moment.
    pub fn is_coming(self) -> bool {
        matches!(self, Self::Connecting | Self::Replaying)
    }
}

/// One feed, in numbers. Those named `.._total` only grow while the feed lives.
#[derive(Debug)]
pub struct FeedStatus {
    /// The subscription stands.
    pub connected: Flag,
    /// What is held stands for the engine that is connected, see
    /// [`Window::settled`](kvgate_kv::window::Window::settled).
    pub settled: Flag,
    /// A replay can be asked for.
    pub replays: Flag,
    /// A replay runs.
    pub replaying: Flag,
    /// Something that was heard is not in the inventory yet.
    pub behind: Flag,
    /// Connections made, the first included.
    pub connects_total: Count,
    connect_errors: [Count; Error::KINDS.len()],
    receive_errors: [Count; Error::KINDS.len()],
    replay_errors: [Count; Error::KINDS.len()],
    decode_errors: [Count; FRAMES.len() + event::REASONS.len()],
    /// Messages received live, those dropped here not among them.
    pub messages_total: Count,
    /// Batches applied; those that a clear overtook are not.
    pub batches_total: Count,
    /// Events in batches applied.
    pub events_total: Count,
    /// Live batches ignored because their number had been applied.
    pub duplicates_total: Count,
    /// Times that live numbers jumped.
    pub gaps_total: Count,
    /// Batches applied whose number had been applied or passed over before what was held was forgotten; those that a
    /// clear overtook are among them.
    pub again_total: Count,
    /// Batches that were held when the connection broke or the engine turned out to be another one.
    pub abandoned_total: Count,
    /// Batches that were about to be applied when what was held was forgotten.
    pub overtaken_total: Count,
    lost: [Count; window::Loss::ALL.len()],
    /// Times that the engine was found to be another one, or started again.
    pub restarts_total: Count,
    clears: [Count; window::Cause::ALL.len()],
    /// Replays asked for.
    pub replays_total: Count,
    /// Replays that failed or were given up.
    pub replays_failed_total: Count,
    /// Batches applied from a replay.
    pub replayed_total: Count,
    /// Batches of a replay that were ignored because their number lay in no hole, or was asked for once more.
    pub replayed_ignored_total: Count,
    /// Messages waiting in the feed's queue.
    pub queued: Count,
    /// Live batches that wait for a replay.
    pub held: Count,
    /// Messages dropped because that queue was full.
    pub dropped_total: Count,
    reasons: [Count; Reason::ALL.len()],
    /// Batches at which the ingest thread gave up: a defect of ours.
    pub poisoned_total: Count,
    /// When the last live message came, in milliseconds since 1970; 0: never.
    pub last_event_ms: Count,
    /// The number of the last batch applied, or about to be; `u64::MAX`: none yet.
    pub last_seq: Count,
    /// Blocks held, over all ranks.
    pub blocks: Count,
    /// Blocks heard of whose parent is unknown, over all ranks.
    pub orphans: Count,
    /// Tokens per block; 0: not known yet.
    pub block_size: Count,
    /// Data-parallel ranks heard of.
    pub ranks: Count,
}

/// Why a message is refused before its payload is looked at.
const FRAMES: [&str; 2] = ["frames", "sequence"];

/// Why a message could not be used.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bad {
    /// It has no frames for a sequence number and a payload.
    Frames,
    /// The sequence number is not one.
    Sequence,
    Payload(event::DecodeError),
}

impl Default for FeedStatus {
    fn default() -> Self {
        let zero = || Count(AtomicU64::new(0));
        FeedStatus {
            connected: Flag::default(),
            settled: Flag::default(),
            replays: Flag::default(),
            replaying: Flag::default(),
            behind: Flag::default(),
            connects_total: zero(),
            connect_errors: std::array::from_fn(|_| zero()),
            receive_errors: std::array::from_fn(|_| zero()),
            replay_errors: std::array::from_fn(|_| zero()),
            decode_errors: std::array::from_fn(|_| zero()),
            messages_total: zero(),
            batches_total: zero(),
            events_total: zero(),
            duplicates_total: zero(),
            gaps_total: zero(),
            again_total: zero(),
            abandoned_total: zero(),
            overtaken_total: zero(),
            lost: std::array::from_fn(|_| zero()),
            restarts_total: zero(),
            clears: std::array::from_fn(|_| zero()),
            replays_total: zero(),
            replays_failed_total: zero(),
            replayed_total: zero(),
            replayed_ignored_total: zero(),
            queued: zero(),
            held: zero(),
            dropped_total: zero(),
            reasons: std::array::from_fn(|_| zero()),
            poisoned_total: zero(),
            last_event_ms: zero(),
            last_seq: Count(AtomicU64::new(u64::MAX)),
            blocks: zero(),
            orphans: zero(),
            block_size: zero(),
            ranks: zero(),
        }
    }
}

impl FeedStatus {
    /// How far it has come with what the engine held before it was followed.
    pub fn warmth(&self) -> Warmth {
        let never = self.connects_total.get() == 0;
        if !self.replays.get() {
            Warmth::Warm
        } else if never && self.connect_errors().any(|(_, n)| n > 0) {
            Warmth::Unreachable
        } else if never {
            Warmth::Connecting
        } else if self.settled.get() && !self.replaying.get() && !self.behind.get() {
            Warmth::Warm
        } else if self.replays_failed_total.get() > 0 && !self.replaying.get() {
            Warmth::Failed
        } else {
            Warmth::Replaying
        }
    }

    /// Attempts to connect that failed, by [`Error::kind`]; all kinds.
    pub fn connect_errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        named(Error::KINDS, &self.connect_errors)
    }

    /// Connections that ended, by [`Error::kind`]; all kinds.
    pub fn receive_errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        named(Error::KINDS, &self.receive_errors)
    }

    /// Replays that failed, by [`Error::kind`]; all kinds.
    pub fn replay_errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        named(Error::KINDS, &self.replay_errors)
    }

    /// Messages that could not be read, or not wholly, by the first reason found; all reasons.
    pub fn decode_errors(&self) -> impl Iterator<Item = (&'static str, u64)> {
        named(FRAMES.into_iter().chain(event::REASONS), &self.decode_errors)
    }

    /// Times that what is held was forgotten, by [`Cause`](window::Cause); all causes. What engines themselves say
    /// is [`Reason::Cleared`].
    pub fn clears(&self) -> impl Iterator<Item = (&'static str, u64)> {
        named(window::Cause::ALL.map(window::Cause::name), &self.clears)
    }

    /// Numbers passed over, by [`Loss`](window::Loss); all reasons.
    pub fn lost(&self) -> impl Iterator<Item = (&'static str, u64)> {
        named(window::Loss::ALL.map(window::Loss::name), &self.lost)
    }

    /// Batches that came and were not applied, by reason; all reasons. What came and could be read is among these or
    /// those applied, or waits.
    pub fn ignored(&self) -> [(&'static str, u64); 5] {
        [
            ("duplicate", &self.duplicates_total),
            ("replayed", &self.replayed_ignored_total),
            ("abandoned", &self.abandoned_total),
            ("overtaken", &self.overtaken_total),
            ("poisoned", &self.poisoned_total),
        ]
        .map(|(reason, count)| (reason, count.get()))
    }

    /// What became of the events, by [`Reason`]; all reasons.
    pub fn reasons(&self) -> impl Iterator<Item = (mirror::Reason, u64)> {
        named(Reason::ALL, &self.reasons)
    }

    pub(super) fn connect_failed(&self, error: &Error) {
        count(Error::KINDS, error.kind(), &self.connect_errors);
    }

    pub(super) fn connection_lost(&self, error: &Error) {
        count(Error::KINDS, error.kind(), &self.receive_errors);
    }

    pub(super) fn replay_failed(&self, error: &Error) {
        count(Error::KINDS, error.kind(), &self.replay_errors);
    }

    pub(super) fn undecodable(&self, bad: Bad) {
        let at = match bad {
            Bad::Frames => 0,
            Bad::Sequence => 1,
            Bad::Payload(error) => FRAMES.len() + error as usize,
        };
        self.decode_errors.iter().skip(at).take(1).for_each(|counter| counter.add(1));
    }

    pub(super) fn received(&self) {
        self.messages_total.add(1);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.last_event_ms.set(u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
    }

    pub(super) fn set_window<P: window::Payload>(&self, window: &window::Window<P>) {
        let counts = window.counts();
        for (counter, n) in [
            (&self.held, window.held() as u64),
            (&self.again_total, counts.again),
            (&self.abandoned_total, counts.abandoned),
            (&self.duplicates_total, counts.duplicates),
            (&self.gaps_total, counts.gaps),
            (&self.restarts_total, counts.restarts),
            (&self.dropped_total, counts.dropped),
            (&self.replays_total, counts.replays),
            (&self.replays_failed_total, counts.replays_failed),
            (&self.replayed_total, counts.replayed),
            (&self.replayed_ignored_total, counts.replayed_ignored),
        ] {
            counter.set(n);
        }
        self.clears.iter().zip(counts.clears).for_each(|(counter, n)| counter.set(n));
        self.lost.iter().zip(counts.lost).for_each(|(counter, n)| counter.set(n));
        self.last_seq.set(window.last().unwrap_or(u64::MAX));
    }

    pub(super) fn applied(&self, events: usize, report: &Report) {
        self.batches_total.add(1);
        self.events_total.add(events as u64);
        for (counter, (_, n)) in self.reasons.iter().zip(report.iter()) {
            if n > 0 {
                counter.add(n);
            }
        }
    }

    /// Blocks are counted in the view that each rank is dumped in: its own where that is kept.
    pub(super) fn set_caches(&self, caches: &[CacheInfo]) {
        let view = caches.first().map(|cache| cache.view);
        let counted = || caches.iter().filter(|cache| Some(cache.view) == view);
        self.blocks.set(counted().map(|cache| cache.blocks as u64).sum());
        self.orphans.set(counted().map(|cache| cache.orphans as u64).sum());
        self.ranks.set(counted().count() as u64);
        self.block_size
            .set(caches.iter().filter_map(|cache| cache.block_size).next_back().unwrap_or(0).into());
    }
}

fn named<N>(names: impl IntoIterator<Item = N>, counts: &[Count]) -> impl Iterator<Item = (N, u64)> {
    names.into_iter().zip(counts.iter().map(Count::get))
}

fn count<const N: usize>(names: [&'static str; N], name: &str, counts: &[Count]) {
    names.iter().zip(counts).filter(|(known, _)| **known == name).for_each(|(_, counter)| counter.add(1));
}
