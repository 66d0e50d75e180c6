//! The sequence window of one engine's feed: what to apply, in which order, what to ask again, when to clear.
//!
//! Engines number their batches from 0, per process. Nothing else tells a subscriber that it missed some, or that
//! the engine is another one than before. The rules:
//!
//! - A live batch with the number of the one before it is ignored. A smaller number is a restart: clear, then
//!   apply. A number up to [`Config::keep`] beyond the last one keeps what is held, and the hole is asked for; a
//!   larger one clears, and everything is asked for.
//! - While a replay runs, live batches that do not follow at once are held, so that all are applied in order: a
//!   batch replayed after a newer one could store what was removed since. A replay that fails, stalls or cannot
//!   keep up is given up, and what is held goes on without it: no live batch waits longer than
//!   [`Config::hold_most`]. Where no replay can be asked for, none waits at all.
//! - A replayed batch is applied if its number lies in a hole, once, and ignored otherwise.
//! - After each reconnect the replay starts with the last batch we applied. The same batch proves the same engine;
//!   another one, or none, clears. Where no answer can be had, the next live batch decides.
//! - A replay may run ahead of the live feed, which then repeats what was replayed: the same batch is ignored,
//!   another one with its number is a restart.
//!
//! No clock and no socket: inputs carry the time, [`Window::deadline`] says when to call next.

mod limit;
mod state;
#[cfg(test)]
mod tests;

pub use state::Window;

use std::time::Duration;

/// A batch, as far as the window cares.
pub trait Payload {
    /// Tells two batches with one number apart, such as a hash of all bytes.
    fn fingerprint(&self) -> u64;
    /// Bytes it takes while it is held.
    fn size(&self) -> usize;
}

/// What a window may do.
#[derive(Clone, Debug)]
pub struct Config {
    /// Whether the engine has a replay socket.
    pub replay: bool,
    /// The furthest a number may jump without a clear.
    pub keep: u64,
    /// How long a live batch is held without the replay getting on.
    pub hold: Duration,
    /// How long a live batch is held at all.
    pub hold_most: Duration,
    /// Live batches held at most.
    pub held_batches: usize,
    /// Bytes of live batches held at most.
    pub held_bytes: usize,
    /// How long at most no replay is asked for after one that failed or was given up: from a quarter of a second,
    /// doubled with each failure.
    pub retry: Duration,
    /// Replays that may be asked for in quick succession; one more every second.
    pub burst: u32,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            replay: true,
            keep: 64,
            hold: Duration::from_millis(200),
            hold_most: Duration::from_secs(2),
            held_batches: 1024,
            held_bytes: 16 << 20,
            retry: Duration::from_secs(5),
            burst: 8,
        }
    }
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Input<P> {
    /// The subscription stands.
    Connected,
    /// The subscription broke.
    Disconnected,
    /// A batch came live.
    Live {
        /// Its number.
        seq: u64,
        /// The batch.
        payload: P,
    },
    /// So many live batches were dropped on our side, after the last one seen.
    Overflow {
        /// How many.
        dropped: u64,
    },
    /// A batch came as an answer to the replay asked for last.
    Replayed {
        /// Its number.
        seq: u64,
        /// The batch.
        payload: P,
    },
    /// The replay asked for last is complete.
    ReplayEnd,
    /// The replay asked for last broke, or could not begin.
    ReplayFailed,
    /// What is held has turned out wrong, such as more than the engine can hold.
    Distrust,
    /// [`Window::deadline`] has come.
    Tick,
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action<P> {
    /// Forget all blocks of the engine.
    Clear(Cause),
    /// Apply a batch.
    Apply(P),
    /// Ask for everything from this number on, instead of any replay that runs. Answers to an earlier one must not
    /// be put in any more.
    AskReplay {
        /// The first number wanted.
        from: u64,
    },
    /// Give up the replay that runs.
    StopReplay,
}

/// Why blocks were forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The engine is a new one, or started again.
    Restart,
    /// Too many batches are missing.
    Gap,
    /// Too many batches were dropped on our side.
    Overflow,
    /// What was held had turned out wrong.
    Distrust,
}

impl Cause {
    /// All, in the order of [`Counts::clears`].
    pub const ALL: [Cause; 4] = [Cause::Restart, Cause::Gap, Cause::Overflow, Cause::Distrust];

    /// A stable short name.
    pub fn name(self) -> &'static str {
        ["restart", "gap", "overflow", "distrust"][self as usize]
    }
}

/// What became of numbers that were passed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// They left a hole, and what was held was kept.
    Hole,
    /// They are those of a former engine that had not been applied, or the first ones of the engine that is it now.
    Restart,
    /// They were so many that what was held was forgotten.
    Gap,
    /// They came after so many were dropped on our side that what was held was forgotten.
    Overflow,
    /// They came after what was held had turned out wrong.
    Distrust,
}

impl Loss {
    /// All, in the order of [`Counts::lost`].
    pub const ALL: [Loss; 5] = [Loss::Hole, Loss::Restart, Loss::Gap, Loss::Overflow, Loss::Distrust];

    /// A stable short name.
    pub fn name(self) -> &'static str {
        ["hole", "restart", "gap", "overflow", "distrust"][self as usize]
    }
}

impl From<Cause> for Loss {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Restart => Loss::Restart,
            Cause::Gap => Loss::Gap,
            Cause::Overflow => Loss::Overflow,
            Cause::Distrust => Loss::Distrust,
        }
    }
}

/// What a window has seen and done, since it was made. Nothing goes missing between these:
///
/// - What comes, live or replayed, is applied, a duplicate, ignored, abandoned, or held now.
/// - Of the numbers that engines have given out since they are followed, as far as their batches are known of, each is
///   applied for the first time (`applied - again`), lost, or beyond those that were applied yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Batches applied.
    pub applied: u64,
    /// Of these, batches whose number had been applied or passed over before what was held was forgotten.
    pub again: u64,
    /// Live batches ignored because their number had been applied.
    pub duplicates: u64,
    /// Live batches that were held when the connection broke or the engine turned out to be another one.
    pub abandoned: u64,
    /// Times that live numbers jumped.
    pub gaps: u64,
    /// Numbers passed over, by [`Loss`]. Those before the first batch that was ever had are not among them.
    pub lost: [u64; 5],
    /// Times that the engine was found to be another one.
    pub restarts: u64,
    /// Clears, by [`Cause`].
    pub clears: [u64; 4],
    /// Live batches dropped on our side.
    pub dropped: u64,
    /// Replays asked for.
    pub replays: u64,
    /// Replays that failed or were given up.
    pub replays_failed: u64,
    /// Batches applied from a replay.
    pub replayed: u64,
    /// Batches of a replay that were ignored because their number lay in no hole, or asked for once more.
    pub replayed_ignored: u64,
}

/// The highest number a batch can have: -1 marks the end of a replay.
pub const MAX_SEQ: u64 = i64::MAX as u64;
