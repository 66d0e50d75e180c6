//! The state machine.

use super::limit::Limit;
use super::{Action, Cause, Config, Counts, Input, Loss, MAX_SEQ, Payload};
use std::collections::VecDeque;
use std::time::Instant;

/// Fingerprints remembered of batches that were replayed before they came live.
const AHEAD: usize = 1024;

struct Held<P> {
    since: Instant,
    seq: u64,
    payload: P,
}

/// A replay that runs.
struct Replay {
    /// It began with the last batch applied, which has not come yet.
    proving: bool,
    /// When it last got on.
    at: Instant,
}

/// The state of one feed.
pub struct Window<P> {
    config: Config,
    connected: bool,
    /// Since the connection stands nothing has told what the engine holds.
    unsettled: bool,
    /// The highest number applied, in this life of the engine.
    last: Option<u64>,
    /// Numbers below are applied or lost, in this life of the engine; none before the first batch ever applied.
    reached: Option<u64>,
    /// Numbers below have been given out in this life of the engine, as live batches before this connection told.
    known: u64,
    /// Why nothing is held, until something is again.
    cleared: Option<Cause>,
    /// The highest number that came live over this connection.
    live: Option<u64>,
    /// Number and fingerprint of the last batch applied, and before it of those that the live feed may yet repeat.
    prints: VecDeque<(u64, u64)>,
    replay: Option<Replay>,
    held: VecDeque<Held<P>>,
    held_bytes: usize,
    /// Dropped on our side while a replay ran, with nothing live since.
    overflow: u64,
    limit: Limit,
    counts: Counts,
}

impl<P: Payload> Window<P> {
    /// The window of a feed that is not connected yet.
    pub fn new(config: Config) -> Self {
        Window {
            limit: Limit::new(config.burst),
            config,
            connected: false,
            unsettled: false,
            last: None,
            reached: None,
            known: 0,
            cleared: None,
            live: None,
            prints: VecDeque::new(),
            replay: None,
            held: VecDeque::new(),
            held_bytes: 0,
            overflow: 0,
            counts: Counts::default(),
        }
    }

    /// What was seen and done so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The highest number applied, in this life of the engine.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// Whether what is held stands for the engine that is connected: false from a reconnect on until a replay or a
    /// live batch has shown it.
    pub fn settled(&self) -> bool {
        self.connected && !self.unsettled
    }

    /// Live batches that wait for a replay.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Whether a replay runs: more of what the engine holds is about to come.
    pub fn replaying(&self) -> bool {
        self.replay.is_some()
    }

    /// When to put in [`Input::Tick`], unless something else comes first.
    pub fn deadline(&self) -> Option<Instant> {
        match (&self.replay, self.held.front()) {
            (Some(replay), Some(held)) => {
                let stalled = replay.at.max(held.since) + self.config.hold;
                Some(stalled.min(held.since + self.config.hold_most))
            }
            (None, _) if self.connected && self.unsettled && self.config.replay => self.limit.next(),
            _ => None,
        }
    }

    /// Takes an input; appends what to do, in order. `now` never goes back.
    pub fn handle(&mut self, now: Instant, input: Input<P>, out: &mut Vec<Action<P>>) {
        match input {
            Input::Connected => self.on_connected(now, out),
            Input::Disconnected => self.on_disconnected(out),
            Input::Live { seq, .. } | Input::Replayed { seq, .. } if seq > MAX_SEQ => {}
            Input::Live { seq, payload } => self.on_live(now, seq, payload, out),
            Input::Overflow { dropped } => {
                self.counts.dropped += dropped;
                self.on_overflow(now, dropped, out);
            }
            Input::Replayed { seq, payload } => self.on_replayed(now, seq, payload, out),
            Input::ReplayEnd => self.on_replay_end(now, out),
            Input::ReplayFailed if self.replay.is_some() => self.go_on(now, out),
            Input::ReplayFailed => {}
            Input::Distrust => self.on_distrust(now, out),
            Input::Tick => self.on_tick(now, out),
        }
    }

    fn on_connected(&mut self, now: Instant, out: &mut Vec<Action<P>>) {
        self.on_disconnected(out);
        (self.connected, self.unsettled) = (true, true);
        self.limit.unblock();
        self.settle(now, out);
    }

    /// What was held is not lost: it lies beyond the last batch applied, from which the next replay starts.
    fn on_disconnected(&mut self, out: &mut Vec<Action<P>>) {
        self.forget_live();
        (self.connected, self.overflow) = (false, 0);
        self.drop_held();
        if self.replay.take().is_some() {
            out.push(Action::StopReplay);
        }
    }

    /// Asks what the engine has done up to now.
    fn settle(&mut self, now: Instant, out: &mut Vec<Action<P>>) {
        let proving = self.last.is_some();
        self.ask(now, self.last.unwrap_or(0), proving, out);
    }

    fn on_live(&mut self, now: Instant, seq: u64, payload: P, out: &mut Vec<Action<P>>) {
        if self.live == Some(seq) {
            self.counts.duplicates += 1;
            return;
        }
        let applied = self.last.is_some_and(|last| seq <= last);
        // over one connection numbers only grow, so one that we forgot is an old one
        let repeated = self.repeats(seq, &payload).unwrap_or(self.live.is_some());
        if self.live.is_some_and(|live| seq < live) || (applied && !repeated) {
            self.forget_live();
            if self.replay.take().is_some() {
                out.push(Action::StopReplay);
            }
            self.drop_held();
            self.restarted(out);
        } else if applied {
            self.counts.duplicates += 1;
            (self.live, self.unsettled, self.overflow) = (Some(seq), false, 0);
            if let Some(replay) = &mut self.replay {
                replay.proving = false;
            }
            return;
        }
        let before = self.live.max(self.last);
        self.counts.gaps += u64::from(before.is_some_and(|before| seq - before > 1));
        (self.live, self.overflow) = (Some(seq), 0);
        match &self.replay {
            Some(_) if self.proving() || seq != self.next() => self.hold(now, seq, payload, out),
            Some(_) => self.apply(seq, payload, out),
            None => self.arrive(now, seq, payload, out),
        }
    }

    /// A live batch that is neither old nor to wait for a replay that runs.
    fn arrive(&mut self, now: Instant, seq: u64, payload: P, out: &mut Vec<Action<P>>) {
        self.unsettled = false;
        let missing = match self.last {
            _ if seq == self.next() => None,
            Some(last) if seq - last <= self.config.keep => Some(last + 1),
            Some(_) => {
                self.clear(Cause::Gap, out);
                Some(0)
            }
            None => Some(0),
        };
        match missing {
            Some(from) if self.ask(now, from, false, out) => self.hold(now, seq, payload, out),
            _ => self.apply(seq, payload, out),
        }
    }

    fn on_overflow(&mut self, now: Instant, dropped: u64, out: &mut Vec<Action<P>>) {
        if self.replay.is_some() {
            self.overflow += dropped;
        } else if !self.ask(now, self.next(), false, out) && dropped > self.config.keep && self.last.is_some()
        {
            self.clear(Cause::Overflow, out);
        }
    }

    fn on_replayed(&mut self, now: Instant, seq: u64, payload: P, out: &mut Vec<Action<P>>) {
        let Some(replay) = &mut self.replay else {
            self.counts.replayed_ignored += 1;
            return;
        };
        replay.at = now;
        if std::mem::take(&mut replay.proving) {
            self.unsettled = false;
            if self.repeats(seq, &payload) != Some(true) {
                let first = seq == 0 || self.last.is_some_and(|last| seq > last);
                self.restarted(out);
                // what the engine remembers starts here, or at 0
                if !first && self.ask(now, 0, false, out) {
                    self.counts.replayed_ignored += 1;
                    return;
                }
            }
        }
        self.fill(seq, payload, out);
    }

    /// Applies a replayed batch if its number lies in a hole, and what is held around it.
    fn fill(&mut self, seq: u64, payload: P, out: &mut Vec<Action<P>>) {
        self.release(seq, out);
        if self.last.is_some_and(|last| seq <= last) || self.held.front().is_some_and(|held| held.seq == seq)
        {
            self.counts.replayed_ignored += 1;
        } else {
            self.counts.replayed += 1;
            self.apply(seq, payload, out);
        }
        while self.held.front().is_some_and(|held| held.seq <= self.next().max(seq)) {
            self.release(self.next().max(seq) + 1, out);
        }
    }

    fn on_replay_end(&mut self, now: Instant, out: &mut Vec<Action<P>>) {
        let Some(replay) = self.replay.take() else { return };
        self.limit.succeeded();
        self.unsettled = false;
        if replay.proving {
            // it has not come as far as the engine that we knew
            self.restarted(out);
            if self.ask(now, 0, false, out) {
                return;
            }
        }
        self.release(u64::MAX, out);
        match std::mem::take(&mut self.overflow) {
            0 => {}
            dropped => self.on_overflow(now, dropped, out),
        }
    }

    /// Starts over, from what the engine remembers.
    fn on_distrust(&mut self, now: Instant, out: &mut Vec<Action<P>>) {
        self.clear(Cause::Distrust, out);
        if !self.ask(now, 0, false, out)
            && let Some(replay) = &mut self.replay
        {
            replay.proving = false; // there is nothing left to prove
        }
    }

    fn on_tick(&mut self, now: Instant, out: &mut Vec<Action<P>>) {
        if self.deadline().is_none_or(|at| now < at) {
            return;
        }
        if self.replay.is_some() {
            out.push(Action::StopReplay);
            self.go_on(now, out);
        } else {
            self.settle(now, out);
        }
    }

    /// Goes on without the replay.
    fn go_on(&mut self, now: Instant, out: &mut Vec<Action<P>>) {
        self.replay = None;
        self.counts.replays_failed += 1;
        self.limit.failed(now, self.config.retry);
        self.unsettled &= self.held.is_empty();
        self.release(u64::MAX, out);
        match std::mem::take(&mut self.overflow) {
            0 => {}
            dropped => self.on_overflow(now, dropped, out),
        }
    }

    /// Asks for a replay, if one may be had now.
    fn ask(&mut self, now: Instant, from: u64, proving: bool, out: &mut Vec<Action<P>>) -> bool {
        if !self.connected || !self.config.replay || !self.limit.take(now) {
            return false;
        }
        self.counts.replays += 1;
        self.replay = Some(Replay { proving, at: now });
        out.push(Action::AskReplay { from });
        true
    }

    fn hold(&mut self, now: Instant, seq: u64, payload: P, out: &mut Vec<Action<P>>) {
        self.held_bytes += payload.size();
        self.held.push_back(Held { since: now, seq, payload });
        if self.held.len() >= self.config.held_batches || self.held_bytes >= self.config.held_bytes {
            out.push(Action::StopReplay);
            self.go_on(now, out);
        }
    }

    fn drop_held(&mut self) {
        self.counts.abandoned += self.held.len() as u64;
        self.held.clear();
        self.held_bytes = 0;
    }

    /// Applies what is held below `end`.
    fn release(&mut self, end: u64, out: &mut Vec<Action<P>>) {
        while let Some(held) = self.held.pop_front_if(|held| held.seq < end) {
            self.held_bytes -= held.payload.size();
            // a replay may have brought it
            if self.last.is_none_or(|last| held.seq > last) {
                self.apply(held.seq, held.payload, out);
            } else {
                self.counts.duplicates += 1;
            }
        }
    }

    /// Applies the next batch; those that are missing before it are lost.
    fn apply(&mut self, seq: u64, payload: P, out: &mut Vec<Action<P>>) {
        if self.last.is_some_and(|last| seq - last > self.config.keep) {
            self.clear(Cause::Gap, out);
        }
        let why = self.cleared.take().map_or(Loss::Hole, Loss::from);
        self.reach(seq, why);
        match self.reached {
            Some(reached) if seq < reached => self.counts.again += 1,
            _ => self.reached = Some(seq + 1),
        }
        self.prints.push_back((seq, payload.fingerprint()));
        self.last = Some(seq);
        while self.prints.len() > AHEAD
            || self.prints.get(1).is_some_and(|_| self.prints.front().map(|p| p.0) <= self.live)
        {
            self.prints.pop_front();
        }
        self.counts.applied += 1;
        out.push(Action::Apply(payload));
    }

    /// Whether the batch applied with this number is the same one; `None` if we do not remember it.
    fn repeats(&self, seq: u64, payload: &P) -> Option<bool> {
        let found = self.prints.binary_search_by_key(&seq, |print| print.0).ok()?;
        self.prints.get(found).map(|print| print.1 == payload.fingerprint())
    }

    /// Those before `end` that were not reached are not coming.
    fn reach(&mut self, end: u64, why: Loss) {
        let passed = self.reached.map_or(0, |reached| end.saturating_sub(reached));
        self.counts.lost[why as usize] += passed;
    }

    /// What comes live next is of another connection, or another engine.
    fn forget_live(&mut self) {
        let live = self.live.take().filter(|_| self.reached.is_some() && !self.proving());
        self.known = live.map_or(self.known, |live| self.known.max(live + 1));
    }

    /// Whether it is still open which engine is connected.
    pub(super) fn proving(&self) -> bool {
        self.replay.as_ref().is_some_and(|replay| replay.proving)
    }

    fn restarted(&mut self, out: &mut Vec<Action<P>>) {
        self.counts.restarts += 1;
        self.reach(self.known, Loss::Restart);
        (self.reached, self.known) = (Some(0), 0);
        self.clear(Cause::Restart, out);
    }

    fn clear(&mut self, cause: Cause, out: &mut Vec<Action<P>>) {
        self.counts.clears[cause as usize] += 1;
        self.cleared = Some(cause);
        self.last = None;
        self.prints.clear();
        out.push(Action::Clear(cause));
    }

    /// The number that follows the last one applied.
    fn next(&self) -> u64 {
        self.last.map_or(0, |last| last + 1)
    }
}
