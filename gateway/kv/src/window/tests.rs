use super::*;
use std::time::Instant;

mod schedules;

/// A batch is known by the life of the engine that made it and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Batch {
    life: u64,
    seq: u64,
}

impl Payload for Batch {
    fn fingerprint(&self) -> u64 {
        self.life << 40 | self.seq
    }
    fn size(&self) -> usize {
        100
    }
}

/// So many, all for one reason.
fn lost(why: Loss, numbers: u64) -> [u64; 5] {
    Loss::ALL.map(|loss| if loss == why { numbers } else { 0 })
}

/// A window, its clock, and what it said.
struct Rig {
    window: Window<Batch>,
    now: Instant,
}

impl Rig {
    fn new(config: Config) -> Self {
        Rig { window: Window::new(config), now: Instant::now() }
    }

    /// A window that has applied 0 to `last` of life 0, live, with nothing under way.
    fn at(last: u64, config: Config) -> Self {
        let mut rig = Rig::new(config);
        rig.put(Input::Connected);
        rig.put(Input::ReplayEnd);
        (0..=last).for_each(|seq| assert_eq!(rig.live(seq), format!("apply 0.{seq}")));
        rig
    }

    fn put(&mut self, input: Input<Batch>) -> String {
        let mut out = Vec::new();
        self.window.handle(self.now, input, &mut out);
        let said = out.iter().map(|action| match action {
            Action::Clear(cause) => format!("clear {}", cause.name()),
            Action::Apply(Batch { life, seq }) => format!("apply {life}.{seq}"),
            Action::AskReplay { from } => format!("ask {from}"),
            Action::StopReplay => "stop".to_owned(),
        });
        said.collect::<Vec<_>>().join(", ")
    }

    fn live(&mut self, seq: u64) -> String {
        self.put(Input::Live { seq, payload: Batch { life: 0, seq } })
    }

    fn live_of(&mut self, life: u64, seq: u64) -> String {
        self.put(Input::Live { seq, payload: Batch { life, seq } })
    }

    fn replayed(&mut self, seq: u64) -> String {
        self.replayed_of(0, seq)
    }

    fn replayed_of(&mut self, life: u64, seq: u64) -> String {
        self.put(Input::Replayed { seq, payload: Batch { life, seq } })
    }

    /// Lets time pass, and the deadline come if it does within.
    fn wait(&mut self, ms: u64) -> String {
        self.now += Duration::from_millis(ms);
        self.put(Input::Tick)
    }
}

fn without_replay() -> Config {
    Config { replay: false, ..Config::default() }
}

#[test]
fn the_first_subscription_asks_for_everything() {
    let mut rig = Rig::new(Config::default());
    assert_eq!(rig.put(Input::Connected), "ask 0");
    assert_eq!(rig.live(7), "", "held");
    assert_eq!(rig.replayed(0), "apply 0.0");
    (1..6).for_each(|seq| assert_eq!(rig.replayed(seq), format!("apply 0.{seq}")));
    assert_eq!(rig.replayed(6), "apply 0.6, apply 0.7");
    assert_eq!(rig.replayed(7), "");
    assert_eq!(rig.live(8), "apply 0.8", "what follows at once waits for nothing");
    assert_eq!(rig.replayed(8), "");
    assert_eq!(rig.put(Input::ReplayEnd), "");
    let counts = Counts { applied: 9, replays: 1, replayed: 7, replayed_ignored: 2, ..Counts::default() };
    assert_eq!(rig.window.counts(), counts);
}

#[test]
fn a_buffer_that_starts_late_is_a_clean_start() {
    let mut rig = Rig::new(Config::default());
    rig.put(Input::Connected);
    assert_eq!(rig.replayed(500), "apply 0.500");
    assert_eq!(rig.replayed(501), "apply 0.501");
    assert_eq!(rig.put(Input::ReplayEnd), "");
    assert_eq!(rig.window.counts().lost, [0; 5], "nobody followed it before");
}

#[test]
fn a_hole_is_filled_in_order() {
    let mut rig = Rig::at(2, Config::default());
    assert_eq!(rig.live(5), "ask 3");
    assert_eq!(rig.live(6), "");
    assert_eq!(rig.live(9), "");
    assert_eq!(rig.replayed(3), "apply 0.3");
    assert_eq!(rig.replayed(3), "", "once");
    assert_eq!(rig.replayed(4), "apply 0.4, apply 0.5, apply 0.6");
    assert_eq!(rig.replayed(5), "");
    assert_eq!(rig.replayed(8), "apply 0.8, apply 0.9", "7 is lost");
    assert_eq!(rig.put(Input::ReplayEnd), "");
    assert_eq!(rig.replayed(10), "", "nothing was asked for");
    let Counts { gaps, lost, replayed, replayed_ignored, .. } = rig.window.counts();
    assert_eq!((gaps, lost, replayed, replayed_ignored), (2, self::lost(Loss::Hole, 1), 3, 3));
}

#[test]
fn without_a_replay_nothing_waits() {
    let mut rig = Rig::at(2, without_replay());
    assert_eq!(rig.live(5), "apply 0.5");
    assert_eq!(rig.live(69), "apply 0.69", "64 on");
    assert_eq!(rig.live(134), "clear gap, apply 0.134", "65 on");
    assert_eq!(rig.live(134), "");
    assert_eq!(rig.live_of(1, 0), "clear restart, apply 1.0");
    let Counts { gaps, lost, restarts, clears, duplicates, .. } = rig.window.counts();
    assert_eq!((gaps, restarts, clears, duplicates), (3, 1, [1, 1, 0, 0], 1));
    assert_eq!(lost, [65, 0, 64, 0, 0], "holes, and what the clear passed over");
    assert_eq!(rig.window.deadline(), None);
}

#[test]
fn beyond_the_window_everything_is_asked_for() {
    let mut rig = Rig::at(2, Config::default());
    assert_eq!(rig.live(67), "clear gap, ask 0");
    assert_eq!(rig.replayed(60), "apply 0.60");
    assert_eq!(rig.put(Input::ReplayEnd), "apply 0.67");
    assert_eq!(rig.window.counts().lost, [6, 0, 57, 0, 0], "61 to 66, and 3 to 59");
    assert_eq!(rig.live_of(1, 3), "clear restart, ask 0");
    assert_eq!(rig.replayed_of(1, 0), "apply 1.0");
    assert_eq!(rig.put(Input::ReplayEnd), "apply 1.3");
}

#[test]
fn a_slow_replay_delays_no_live_batch_for_long() {
    let mut rig = Rig::at(2, Config::default());
    assert_eq!(rig.live(5), "ask 3");
    assert_eq!(rig.wait(199), "");
    assert_eq!(rig.wait(1), "stop, apply 0.5");
    assert_eq!(rig.live(8), "apply 0.8", "no other is asked for at once");
    rig.wait(5000);
    assert_eq!(rig.live(10), "ask 9");
    for ms in [190; 10] {
        assert_eq!(rig.wait(ms), "");
        assert_eq!(rig.replayed(8), "", "never gets to the hole");
    }
    assert_eq!(rig.wait(100), "stop, apply 0.10", "not even while it gets on");
    assert_eq!(rig.window.counts().replays_failed, 2);
}

#[test]
fn a_replay_that_fails_or_stalls_is_done_without() {
    let mut rig = Rig::at(2, Config { held_batches: 3, ..Config::default() });
    rig.live(5);
    assert_eq!(rig.put(Input::ReplayFailed), "apply 0.5");
    rig.wait(5000);
    rig.live(7);
    assert_eq!(rig.live(8), "");
    assert_eq!(rig.live(9), "stop, apply 0.7, apply 0.8, apply 0.9", "the buffer is full");
    rig.wait(5000);
    rig.live(11);
    assert_eq!(rig.live(200), "");
    assert_eq!(rig.put(Input::ReplayFailed), "apply 0.11, clear gap, apply 0.200");
}

#[test]
fn the_same_batch_proves_the_same_engine() {
    let mut rig = Rig::at(5, Config::default());
    rig.put(Input::Disconnected);
    assert!(!rig.window.settled());
    assert_eq!(rig.put(Input::Connected), "ask 5");
    assert_eq!(rig.live(6), "", "not before it is known whose it is");
    assert_eq!(rig.replayed(5), "apply 0.6");
    assert_eq!(rig.put(Input::ReplayEnd), "");
    assert!(rig.window.settled());
    assert_eq!(rig.window.counts().restarts, 0);

    rig.put(Input::Disconnected);
    assert_eq!(rig.put(Input::Connected), "ask 6");
    assert_eq!(rig.live_of(1, 7), "");
    assert_eq!(rig.replayed_of(1, 6), "clear restart, ask 0");
    (0..6).for_each(|seq| assert_eq!(rig.replayed_of(1, seq), format!("apply 1.{seq}")));
    assert_eq!(rig.replayed_of(1, 6), "apply 1.6, apply 1.7");

    rig.put(Input::Disconnected);
    assert_eq!(rig.put(Input::Connected), "ask 7");
    assert_eq!(rig.put(Input::ReplayEnd), "clear restart, ask 0", "an engine that has not come that far");
    assert_eq!(rig.replayed_of(2, 0), "apply 2.0");
    assert_eq!(rig.put(Input::ReplayEnd), "");

    rig.put(Input::Disconnected);
    assert_eq!(rig.put(Input::Connected), "ask 0");
    assert_eq!(rig.replayed_of(2, 50), "clear restart, apply 2.50", "nothing proves it");
}

#[test]
fn a_live_batch_may_decide_first() {
    let mut rig = Rig::at(5, Config::default());
    rig.put(Input::Connected);
    assert_eq!(rig.live_of(1, 5), "stop, clear restart, ask 0", "the number is ours, the batch is not");
    assert_eq!(rig.put(Input::ReplayEnd), "apply 1.5");
    rig.put(Input::Connected);
    assert_eq!(rig.live_of(2, 0), "stop, clear restart, apply 2.0");
    rig.put(Input::Connected);
    assert_eq!(rig.put(Input::ReplayFailed), "");
    assert_eq!(rig.live_of(2, 2), "apply 2.2", "without an answer the rules for numbers decide");
    rig.wait(5000);
    assert_eq!(rig.window.deadline(), None);
}

#[test]
fn a_restart_drops_what_was_held() {
    let mut rig = Rig::at(2, Config::default());
    assert_eq!(rig.live(5), "ask 3");
    assert_eq!(rig.live_of(1, 0), "stop, clear restart, apply 1.0");
    let Counts { abandoned, lost, .. } = rig.window.counts();
    assert_eq!((abandoned, lost), (1, self::lost(Loss::Restart, 3)), "3 to 5 are not coming");
    assert_eq!(rig.live_of(1, 2), "ask 1");
    assert_eq!(rig.put(Input::ReplayEnd), "apply 1.2");
    rig.put(Input::Connected);
    assert_eq!(rig.live_of(1, 4), "");
    assert_eq!(rig.put(Input::ReplayFailed), "apply 1.4");
    assert_eq!(rig.window.deadline(), None, "settled");
    assert_eq!(rig.put(Input::Connected), "ask 4", "a new connection is a new chance");
}

#[test]
fn the_first_batch_of_another_life_is_asked_for_once() {
    let mut rig = Rig::at(0, Config::default());
    rig.put(Input::Connected);
    assert_eq!(rig.replayed_of(1, 0), "clear restart, apply 1.0");
    assert_eq!(rig.replayed_of(1, 1), "apply 1.1");
}

#[test]
fn what_is_held_is_bounded_in_bytes() {
    let mut rig = Rig::at(0, Config { held_bytes: 300, ..Config::default() });
    rig.live(2);
    assert_eq!(rig.live(3), "");
    assert_eq!(rig.replayed(1), "apply 0.1, apply 0.2, apply 0.3");
    rig.put(Input::ReplayEnd);
    rig.live(5);
    assert_eq!(rig.live(6), "");
    assert_eq!(rig.live(7), "stop, apply 0.5, apply 0.6, apply 0.7");
}

#[test]
fn an_idle_engine_is_asked_until_it_answers() {
    let mut rig = Rig::at(5, Config::default());
    rig.put(Input::Connected);
    for pause in [250, 500, 1000, 2000, 4000, 5000, 5000] {
        assert_eq!(rig.put(Input::ReplayFailed), "");
        assert_eq!(rig.wait(pause - 1), "");
        assert_eq!(rig.wait(1), "ask 5");
    }
    assert_eq!(rig.replayed(5), "");
    assert_eq!(rig.put(Input::ReplayEnd), "");
    assert_eq!(rig.window.deadline(), None);
    rig.put(Input::Connected);
    rig.put(Input::ReplayFailed);
    assert_eq!(rig.wait(250), "ask 5", "an answer gives confidence");
}

#[test]
fn the_live_feed_repeats_what_was_replayed() {
    let mut rig = Rig::new(Config::default());
    rig.put(Input::Connected);
    (0..10).for_each(|seq| drop(rig.replayed(seq)));
    rig.put(Input::ReplayEnd);
    assert_eq!(rig.live(8), "");
    assert_eq!(rig.live(9), "");
    assert_eq!(rig.live(10), "apply 0.10");
    assert_eq!(rig.live_of(1, 0), "clear restart, apply 1.0", "an older one was never live");
    let mut rig = Rig::new(Config::default());
    rig.put(Input::Connected);
    (0..10).for_each(|seq| drop(rig.replayed(seq)));
    assert_eq!(rig.live_of(1, 9), "stop, clear restart, ask 0");
}

#[test]
fn what_we_dropped_is_asked_for() {
    let mut rig = Rig::at(5, Config::default());
    assert_eq!(rig.put(Input::Overflow { dropped: 100 }), "ask 6");
    assert_eq!(rig.put(Input::Overflow { dropped: 2 }), "", "while it runs");
    (6..106).for_each(|seq| assert_eq!(rig.replayed(seq), format!("apply 0.{seq}")));
    assert_eq!(rig.put(Input::ReplayEnd), "ask 106", "for those dropped since");
    assert_eq!(rig.put(Input::ReplayEnd), "");

    let mut rig = Rig::at(5, without_replay());
    assert_eq!(rig.put(Input::Overflow { dropped: 64 }), "");
    assert_eq!(rig.live(70), "clear gap, apply 0.70");
    assert_eq!(rig.put(Input::Overflow { dropped: 65 }), "clear overflow", "the next number would clear");
    assert_eq!(rig.live(136), "apply 0.136");
    assert_eq!(rig.window.counts().dropped, 129);
    assert_eq!(rig.window.counts().lost, [0, 0, 64, 65, 0]);
}

#[test]
fn what_is_distrusted_is_learnt_anew() {
    let mut rig = Rig::at(5, Config::default());
    assert_eq!(rig.live(7), "ask 6");
    assert_eq!(rig.put(Input::Distrust), "clear distrust, ask 0");
    assert_eq!(rig.replayed(3), "apply 0.3");
    assert_eq!(rig.put(Input::ReplayEnd), "apply 0.7");
    assert_eq!(rig.live(8), "apply 0.8");
    let Counts { applied, again, lost, .. } = rig.window.counts();
    assert_eq!((applied, again, lost), (9, 1, self::lost(Loss::Hole, 1)), "3 twice, 6 never");

    let mut rig = Rig::at(5, Config { burst: 2, ..Config::default() });
    assert_eq!(rig.put(Input::Connected), "ask 5");
    assert_eq!(rig.put(Input::Distrust), "clear distrust", "with the replay that runs already");
    assert_eq!(rig.replayed(5), "apply 0.5");
}

#[test]
fn replays_are_asked_for_in_moderation() {
    let mut rig = Rig::at(0, Config { burst: 3, ..Config::default() });
    let mut asked = 0;
    for seq in 1..100 {
        asked += usize::from(rig.live(2 * seq).starts_with("ask"));
        rig.put(Input::ReplayEnd);
        rig.wait(50);
    }
    assert_eq!(asked, 2 + 4, "the rest of the burst, and one a second");
}

#[test]
fn numbers_at_the_end_of_the_world() {
    let mut rig = Rig::at(0, Config::default());
    assert_eq!(rig.live(u64::MAX), "");
    assert_eq!(rig.live(MAX_SEQ), "clear gap, ask 0");
    assert_eq!(rig.replayed(u64::MAX), "");
    assert_eq!(rig.replayed(MAX_SEQ), format!("apply 0.{MAX_SEQ}"));
    assert_eq!(rig.live_of(1, 0), "stop, clear restart, apply 1.0");
}
