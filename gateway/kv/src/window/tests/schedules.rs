//! Random schedules: without replays against a model of a few lines, with replays against a simulated engine.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn cases() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(10_000) }
}

#[derive(Clone, Debug)]
enum Plain {
    Live(u64, u64),
    Cut,
    Dropped(u64),
}

fn plain() -> impl Strategy<Value = Plain> {
    let seq = prop_oneof![4 => 0..8_u64, 1 => 60..140_u64];
    prop_oneof![
        12 => (0..2_u64, seq).prop_map(|(life, seq)| Plain::Live(life, seq)),
        1 => Just(Plain::Cut),
        1 => prop_oneof![Just(64), Just(65)].prop_map(Plain::Dropped),
    ]
}

proptest! {
    #![proptest_config(cases())]

    /// The rules for numbers, spelt out: every action and every count.
    #[test]
    fn without_replay(schedule in prop::collection::vec(plain(), 1..40)) {
        let mut window = Window::new(Config { replay: false, ..Config::default() });
        let (mut last, mut fresh, mut want, mut counts) = (None::<Batch>, true, Vec::new(), Counts::default());
        let (mut said, now) = (Vec::new(), Instant::now());
        window.handle(now, Input::Connected, &mut said);
        // the highest live number, which a clear for dropped batches does not forget
        let mut live = None;
        // what the next number of this life would be, and why nothing is held
        let (mut next, mut why, mut published) = (None, Loss::Hole, 0);
        for step in schedule {
            match step {
                Plain::Live(life, seq) => {
                    let payload = Batch { life, seq };
                    window.handle(now, Input::Live { seq, payload }, &mut said);
                    let highest = last.map(|b| b.seq).max(live);
                    let same = highest == Some(seq) && (!fresh || last == Some(payload));
                    let before = highest.filter(|_| !same);
                    let restart = before.is_some_and(|b| seq <= b);
                    let gap = before.map_or(0, |b| seq.saturating_sub(b + 1));
                    fresh = false;
                    if same {
                        counts.duplicates += 1;
                        live = Some(seq);
                        continue;
                    }
                    let far = last.is_some_and(|l| l.seq + 64 < seq);
                    if restart {
                        (counts.restarts, counts.clears[0]) = (counts.restarts + 1, counts.clears[0] + 1);
                        want.push(Action::Clear(Cause::Restart));
                        (next, why) = (Some(0), Loss::Restart);
                    } else if far {
                        counts.clears[1] += 1;
                        want.push(Action::Clear(Cause::Gap));
                        why = Loss::Gap;
                    }
                    counts.gaps += u64::from(gap > 0);
                    counts.applied += 1;
                    let expected = next.unwrap_or(seq);
                    if seq < expected {
                        counts.again += 1;
                    } else {
                        counts.lost[std::mem::replace(&mut why, Loss::Hole) as usize] += seq - expected;
                        published += seq + 1 - expected;
                        next = Some(seq + 1);
                    }
                    why = Loss::Hole;
                    (last, live) = (Some(payload), Some(seq));
                    want.push(Action::Apply(payload));
                }
                Plain::Cut => {
                    window.handle(now, Input::Disconnected, &mut said);
                    window.handle(now, Input::Connected, &mut said);
                    (fresh, live) = (true, None);
                }
                Plain::Dropped(dropped) => {
                    window.handle(now, Input::Overflow { dropped }, &mut said);
                    counts.dropped += dropped;
                    if dropped > 64 && last.take().is_some() {
                        why = Loss::Overflow;
                        counts.clears[2] += 1;
                        want.push(Action::Clear(Cause::Overflow));
                    }
                }
            }
        }
        prop_assert_eq!(said, want);
        prop_assert_eq!(window.counts(), counts);
        prop_assert_eq!(published, counts.applied - counts.again + counts.lost.iter().sum::<u64>());
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// The engine publishes so many; the live feed has them queued.
    Publish(u64),
    /// The same, but they get lost on the way.
    Lose(u64),
    /// So many queued batches reach the window.
    Deliver(usize),
    /// The latest live batch comes once more.
    Again,
    /// So many queued batches are dropped on our side.
    Drop(usize),
    /// So many answers of the replay arrive.
    Answer(usize),
    Fail,
    Distrust,
    Cut,
    Connect,
    Restart,
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..5_u64).prop_map(Step::Publish),
        2 => prop_oneof![3 => 1..5_u64, 1 => 60..70_u64].prop_map(Step::Lose),
        6 => (1..6_usize).prop_map(Step::Deliver),
        1 => Just(Step::Again),
        1 => (1..4_usize).prop_map(Step::Drop),
        6 => (1..40_usize).prop_map(Step::Answer),
        1 => Just(Step::Fail),
        1 => Just(Step::Distrust),
        1 => Just(Step::Cut),
        2 => Just(Step::Connect),
        1 => Just(Step::Restart),
        2 => (1..400_u64).prop_map(Step::Wait),
    ]
}

/// An engine, its network, and what a subscriber who does as the window says ends up with.
struct World {
    window: Window<Batch>,
    now: Instant,
    life: u64,
    /// Batches published in this life, and how many of the latest it remembers.
    published: u64,
    buffer: u64,
    connected: bool,
    pipe: std::collections::VecDeque<Batch>,
    latest: Option<Batch>,
    /// The next number the replay answers with.
    replay: Option<u64>,
    /// Applied since the last clear.
    applied: Vec<Batch>,
    /// Put in live, not yet heard of again.
    waiting: Vec<Batch>,
    /// Something kept the window from knowing better: numbers alone decided.
    blind: bool,
    /// A replay was not to be had, or cut short.
    hindered: bool,
    /// Batches of another life were applied, and nothing was held by which they could have been told from those before.
    confused: bool,
    /// The life that the window takes it to be.
    taken_for: Option<u64>,
    /// The same engine was taken for another one: it had forgotten what would have proven it.
    mistaken: bool,
    /// What was put in, live or replayed.
    came: u64,
    /// By life, how many batches it has published, as far as the window can know.
    told: BTreeMap<u64, u64>,
    /// The first batch ever applied.
    first: Option<Batch>,
    want: Counts,
}

impl World {
    fn put(&mut self, input: Input<Batch>) -> Vec<Action<Batch>> {
        let mut out = Vec::new();
        self.came += u64::from(matches!(input, Input::Live { .. } | Input::Replayed { .. }));
        self.window.handle(self.now, input, &mut out);
        for action in &out {
            match *action {
                Action::Clear(cause) => {
                    let same = self.applied.last().is_some_and(|b| b.life == self.life);
                    if cause == Cause::Restart {
                        self.mistaken |= same;
                        self.taken_for = Some(self.life);
                    }
                    self.applied.clear();
                    self.want.clears[cause as usize] += 1;
                    self.want.restarts += u64::from(cause == Cause::Restart);
                    self.blind &= cause != Cause::Restart;
                }
                Action::Apply(batch) => {
                    if let Some(last) = self.applied.last() {
                        assert!(
                            batch.seq > last.seq && batch.seq <= last.seq + 64,
                            "{last:?} then {batch:?}"
                        );
                        assert!(self.blind || batch.life == last.life, "{last:?} then {batch:?}");
                    }
                    self.applied.push(batch);
                    self.waiting.retain(|b| *b != batch);
                    self.want.applied += 1;
                    self.first = self.first.or(Some(batch));
                    self.confused |= self.taken_for.is_some_and(|life| life != batch.life);
                    self.taken_for = Some(batch.life);
                    self.tell(batch);
                }
                Action::AskReplay { from } => {
                    self.replay = Some(from.max(self.published.saturating_sub(self.buffer)));
                    self.want.replays += 1;
                }
                Action::StopReplay => {
                    assert!(self.replay.take().is_some(), "one runs");
                    self.blind |= self.connected;
                }
            }
        }
        out
    }

    fn tell(&mut self, Batch { life, seq }: Batch) {
        let told = self.told.entry(life).or_default();
        *told = (*told).max(seq + 1);
    }

    /// What came live counts once it is known of which engine it is.
    fn tell_live(&mut self) {
        if let Some(latest) = self.latest.filter(|_| self.first.is_some() && !self.window.proving()) {
            self.tell(latest);
        }
    }

    /// Nothing that came is unaccounted for.
    fn account(&mut self) {
        self.tell_live();
        let Counts { applied, again, duplicates, abandoned, replayed_ignored, .. } = self.window.counts();
        let held = self.window.held() as u64;
        assert_eq!(self.came, applied + duplicates + replayed_ignored + abandoned + held);
        assert!(applied >= again);
    }

    /// Nor, once all is calm, is anything that was published, unless it could not be known by which engine.
    fn account_published(&self) {
        let unclear = self.hindered || self.mistaken || self.confused;
        let Some(first) = self.first.filter(|_| !unclear) else { return };
        let Counts { applied, again, lost, .. } = self.window.counts();
        let published: u64 = self.told.range(first.life..).map(|(_, told)| told).sum();
        assert_eq!(published - first.seq, applied - again + lost.iter().sum::<u64>());
    }

    fn asked(out: &[Action<Batch>]) -> bool {
        out.iter().any(|a| matches!(a, Action::AskReplay { .. }))
    }

    fn live(&mut self, payload: Batch) {
        let seq = payload.seq;
        // a replay from too small a buffer may pass over what we have queued
        let passed = self.latest.is_some() && self.applied.last().is_some_and(|b| seq <= b.seq);
        let known = passed || self.latest == Some(payload) || self.applied.contains(&payload);
        let before = self.applied.last().map(|b| b.seq).max(self.latest.map(|b| b.seq));
        if known {
            self.want.duplicates += 1;
        } else {
            self.waiting.push(payload);
        }
        let restarts = self.want.restarts;
        let out = self.put(Input::Live { seq, payload });
        if self.want.restarts > restarts {
            self.waiting.retain(|b| *b == payload);
            if !out.contains(&Action::Apply(payload)) {
                assert_eq!(self.waiting, [payload]);
            }
        } else if !known {
            self.want.gaps += u64::from(before.is_some_and(|b| seq > b + 1));
        }
        self.latest = Some(payload);
        self.tell_live();
        if out.contains(&Action::StopReplay) && self.want.restarts == restarts {
            self.gave_up();
        }
    }

    fn gave_up(&mut self) {
        self.want.replays_failed += 1;
        (self.blind, self.hindered) = (true, true);
    }

    fn answer(&mut self) {
        let Some(seq) = self.replay else { return };
        if seq >= self.published {
            self.replay = None;
            self.put(Input::ReplayEnd);
            return;
        }
        self.replay = Some(seq + 1);
        let payload = Batch { life: self.life, seq };
        // in a hole: neither applied, nor held, nor passed over
        let restarts = self.want.restarts;
        let unless_cleared = self.applied.last().is_none_or(|b| seq > b.seq);
        let held = self.waiting.contains(&payload);
        let out = self.put(Input::Replayed { seq, payload });
        self.tell_live();
        let cleared = self.want.restarts > restarts;
        match (unless_cleared || cleared) && !held && !(cleared && Self::asked(&out)) {
            true => self.want.replayed += 1,
            false => self.want.replayed_ignored += 1,
        }
    }

    fn cut(&mut self) {
        self.pipe.clear();
        self.waiting.clear();
        (self.connected, self.latest) = (false, None);
        self.put(Input::Disconnected);
        assert!(self.replay.is_none(), "nothing runs without a connection");
    }

    fn connect(&mut self) {
        self.connected = true;
        let out = self.put(Input::Connected);
        assert!(self.replay.is_some() || !Self::asked(&out));
        if !Self::asked(&out) {
            (self.blind, self.hindered) = (true, true);
        }
    }

    fn tick(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
        let out = self.put(Input::Tick);
        if out.contains(&Action::StopReplay) {
            self.gave_up();
        }
        let waits = self.window.deadline().is_none_or(|at| at > self.now);
        assert!(waits, "a deadline that has passed is dealt with");
        assert!(self.waiting.is_empty() || self.replay.is_some(), "held for no reason");
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Publish(n) | Step::Lose(n) => {
                let new = (self.published..self.published + n).map(|seq| Batch { life: self.life, seq });
                if self.connected && matches!(step, Step::Publish(_)) {
                    self.pipe.extend(new);
                }
                self.published += n;
            }
            Step::Deliver(n) => {
                for batch in self.pipe.drain(..n.min(self.pipe.len())).collect::<Vec<_>>() {
                    self.live(batch);
                }
            }
            Step::Again => {
                if let Some(latest) = self.latest {
                    self.live(latest);
                }
            }
            Step::Drop(n) => {
                let dropped = self.pipe.drain(..n.min(self.pipe.len())).count() as u64;
                if dropped > 0 {
                    self.want.dropped += dropped;
                    self.put(Input::Overflow { dropped });
                }
            }
            Step::Answer(n) => (0..n).for_each(|_| self.answer()),
            Step::Fail => {
                if self.replay.take().is_some() {
                    self.blind = true;
                    self.put(Input::ReplayFailed);
                    self.gave_up();
                }
            }
            Step::Distrust => drop(self.put(Input::Distrust)),
            Step::Cut if self.connected => self.cut(),
            Step::Connect if !self.connected => self.connect(),
            Step::Restart => {
                (self.life, self.published) = (self.life + 1, 0);
                if self.connected {
                    self.cut();
                }
            }
            Step::Wait(ms) => self.tick(ms),
            Step::Cut | Step::Connect => {}
        }
    }

    /// Everything arrives that is on its way.
    fn calm(&mut self) {
        self.step(Step::Connect);
        for _ in 0..4 {
            self.step(Step::Publish(1));
            self.step(Step::Deliver(usize::MAX));
            while self.replay.is_some() {
                self.answer();
            }
        }
    }
}

proptest! {
    #![proptest_config(cases())]

    /// However batches are lost, held, repeated and replayed: each is applied once, in order, of one life; and if no
    /// replay was denied, what is applied is all that the engine has published.
    #[test]
    fn with_replay(
        schedule in prop::collection::vec(step(), 1..80),
        buffer in prop_oneof![1 => 0..80_u64, 1 => Just(u64::MAX)],
        burst in prop_oneof![Just(2), Just(1000)],
        held_batches in prop_oneof![Just(4), Just(1000)],
    ) {
        let mut world = World {
            window: Window::new(Config { burst, held_batches, ..Config::default() }),
            now: Instant::now(),
            life: 0,
            published: 0,
            buffer,
            connected: false,
            pipe: Default::default(),
            latest: None,
            replay: None,
            applied: Vec::new(),
            waiting: Vec::new(),
            blind: false,
            hindered: false,
            confused: false,
            taken_for: None,
            mistaken: false,
            came: 0,
            told: BTreeMap::new(),
            first: None,
            want: Counts::default(),
        };
        for step in schedule {
            world.step(step);
            let Counts { again, abandoned, lost, .. } = world.window.counts();
            world.want = Counts { again, abandoned, lost, ..world.want };
            prop_assert_eq!(world.window.counts(), world.want);
            world.account();
        }
        world.calm();
        world.account();
        world.account_published();
        prop_assert!(world.waiting.is_empty());
        let published = |seq| Batch { life: world.life, seq };
        if buffer == u64::MAX && burst == 1000 && !world.hindered {
            prop_assert_eq!(world.applied, (0..world.published).map(published).collect::<Vec<_>>());
        } else {
            prop_assert_eq!(world.applied.last().copied(), Some(published(world.published - 1)));
        }
    }
}
