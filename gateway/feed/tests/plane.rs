//! The whole way, from an engine's sockets to lookups.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use kvgate_feed::plane::{FeedHandle, FeedStatus, FollowError, Plane, PlaneConfig};
use kvgate_feed::zmtp::Endpoint;
use kvgate_kv::window;
use support::engine::{
    Answers, Engine, Form, cleared, config, held, holds, removed, source, stored, trusted, until_true,
};
use support::*;
use zeromq::{Socket, SocketSend};

const ENGINE: u64 = 42;

/// An engine, and a plane that follows it.
struct Lab {
    engine: Engine,
    plane: Plane,
    feed: FeedHandle,
}

impl Lab {
    async fn new(replay: bool, form: Form) -> Lab {
        Lab::after(Engine::start(form).await, replay).await
    }

    async fn after(engine: Engine, replay: bool) -> Lab {
        Lab::with(config(), engine, replay).await
    }

    async fn with(config: PlaneConfig, engine: Engine, replay: bool) -> Lab {
        let plane = Plane::start(config).unwrap();
        let feed = plane.follow(ENGINE, engine.source(replay)).unwrap();
        engine.subscribed().await;
        Lab { engine, plane, feed }
    }

    /// Waits until exactly these of the first 200 blocks are credited.
    async fn holds(&self, want: impl IntoIterator<Item = u64>) {
        let want: Vec<u64> = want.into_iter().collect();
        until_true(&format!("{want:?} held"), || held(&self.plane, ENGINE, 200) == want).await;
    }

    fn clears(&self, cause: &str) -> u64 {
        self.feed.status().clears().find(|(name, _)| *name == cause).unwrap().1
    }
}

fn lost(status: &FeedStatus) -> u64 {
    status.lost().map(|(_, n)| n).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hole_is_filled_by_a_replay() {
    for form in [Form::Old, Form::New] {
        let lab = Lab::new(true, form).await;
        for seq in [1, 2] {
            lab.engine.record(seq, stored(seq));
            lab.engine.send(&message(&[b"", &seq.to_be_bytes(), &stored(seq)]));
        }
        lab.holds([1, 2]).await;
        (3..5).for_each(|seq| lab.engine.record(seq, stored(seq)));
        lab.engine.publish(5, stored(5));
        lab.holds(1..6).await;
        let status = lab.feed.status();
        until_true("told", || status.last_seq.get() == 5).await;
        assert_eq!((status.gaps_total.get(), lost(&status)), (1, 0));
        assert_eq!(status.decode_errors().map(|(_, n)| n).sum::<u64>(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_joins_late_learns_what_was() {
    for form in [Form::Old, Form::New] {
        let engine = Engine::start(form).await;
        (0..4).for_each(|seq| engine.record(seq, stored(seq)));
        let lab = Lab::after(engine, true).await;
        lab.holds(0..4).await;
        (4..7).for_each(|seq| lab.engine.record(seq, stored(seq)));
        lab.engine.publish(7, stored(7));
        lab.holds(0..8).await;
    }
    // the first word of an engine is batch 7, and the replay socket has the rest
    let lab = Lab::new(true, Form::New).await;
    until_true("nothing to replay", || lab.feed.status().settled.get()).await;
    (1..7).for_each(|seq| lab.engine.record(seq, stored(seq)));
    lab.engine.publish(7, stored(7));
    lab.holds(1..8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_replay_gaps_are_counted_and_large_ones_clear() {
    let lab = Lab::new(false, Form::New).await;
    for seq in [1, 2, 5, 69] {
        lab.engine.publish(seq, stored(seq));
    }
    lab.holds([1, 2, 5, 69]).await;
    lab.engine.publish(134, stored(134));
    lab.holds([134]).await;
    let status = lab.feed.status();
    until_true("told", || status.last_seq.get() == 134).await;
    assert_eq!((status.gaps_total.get(), lab.clears("gap")), (3, 1));
    until_true("all applied", || status.batches_total.get() == 5).await;
    lab.engine.publish(134, stored(3));
    lab.engine.publish(135, stored(4));
    lab.holds([4, 134]).await;
    assert_eq!(status.duplicates_total.get(), 1, "the same number again is ignored");
}

/// However numbers jump, and however many batches a clear overtakes on their way to the inventory.
#[tokio::test(flavor = "multi_thread")]
async fn every_batch_is_told_of() {
    let lab = Lab::new(false, Form::New).await;
    let (first, mut seq, mut published) = (3, 3_u64, 0);
    for step in 0..2000_u64 {
        lab.engine.publish(seq, stored(step % 200));
        published += 1;
        seq += if step % 50 == 7 { 66 } else { [1, 1, 2, 1, 9][(step % 5) as usize] };
        if step % 100 == 99 {
            // the same once more
            lab.engine.publish(seq, stored(1));
            lab.engine.publish(seq, stored(1));
            published += 2;
            seq += 1;
        }
    }
    lab.engine.publish(seq, stored(0));
    let status = lab.feed.status();
    until_true("all is done", || status.last_seq.get() == seq && !status.behind.get()).await;
    let ignored = |wanted: &[&str]| -> u64 {
        status.ignored().iter().filter(|(reason, _)| wanted.contains(reason)).map(|(_, n)| n).sum()
    };
    let applied = status.batches_total.get();
    assert_eq!(ignored(&["duplicate"]), 20);
    assert_eq!(status.messages_total.get(), published + 1);
    assert_eq!(published + 1, applied + ignored(&["duplicate", "overtaken"]));
    assert_eq!(ignored(&["replayed", "abandoned", "poisoned"]), 0);
    assert_eq!(seq + 1 - first, applied + ignored(&["overtaken"]) - status.again_total.get() + lost(&status));
    let by: Vec<_> = status.lost().filter(|(_, n)| *n > 0).map(|(reason, _)| reason).collect();
    assert_eq!(by, ["hole", "gap"]);
}

/// The first batch of an engine settles what is held, and is not seen before that is so.
#[tokio::test(flavor = "multi_thread")]
async fn what_shows_is_credited() {
    for _ in 0..40 {
        let lab = Lab::new(false, Form::New).await;
        lab.engine.publish(3, stored(1));
        while lab.plane.dump(ENGINE, None).await.iter().all(|(_, rows)| rows.is_empty()) {}
        assert!(trusted(&lab.plane, ENGINE));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_forgets_everything_before() {
    for replay in [false, true] {
        let lab = Lab::new(replay, Form::New).await;
        (0..5).for_each(|seq| lab.engine.publish(seq, stored(seq)));
        lab.holds(0..5).await;
        // over the same connection
        lab.engine.publish(0, stored(7));
        lab.holds([7]).await;
        assert_eq!(lab.clears("restart"), 1);
        // as processes do
        lab.engine.restart();
        lab.engine.subscribed().await;
        lab.engine.publish(0, stored(9));
        lab.holds([9]).await;
    }
    // a restarted engine that says nothing is found out by its replay socket
    let lab = Lab::new(true, Form::New).await;
    (0..5).for_each(|seq| lab.engine.publish(seq, stored(seq)));
    lab.holds(0..5).await;
    lab.engine.restart();
    lab.holds([]).await;
    until_true("asked for all", || lab.engine.asked().ends_with(&[4, 0])).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_connection_forgets_nothing_if_the_engine_is_the_same() {
    for replay in [false, true] {
        let lab = Lab::new(replay, Form::Old).await;
        (0..5).for_each(|seq| lab.engine.publish(seq, stored(seq)));
        lab.holds(0..5).await;
        lab.engine.cut();
        until_true("reconnected", || lab.feed.status().connects_total.get() == 2).await;
        lab.engine.subscribed().await;
        assert_eq!(held(&lab.plane, ENGINE, 9), [0, 1, 2, 3, 4]);
        if replay {
            until_true("proved", || trusted(&lab.plane, ENGINE)).await;
            lab.engine.record(5, stored(5)); // missed
        }
        // without a replay nothing has proved yet that it is the same engine
        assert_eq!(trusted(&lab.plane, ENGINE), replay);
        lab.engine.publish(6, stored(6));
        until_true("credited", || trusted(&lab.plane, ENGINE)).await;
        lab.holds(if replay { vec![0, 1, 2, 3, 4, 5, 6] } else { vec![0, 1, 2, 3, 4, 6] }).await;
        assert_eq!(lab.feed.status().restarts_total.get(), 0);
    }
    // another engine, as far as the last: only its batches tell
    let lab = Lab::new(true, Form::Old).await;
    (0..5).for_each(|seq| lab.engine.publish(seq, stored(seq)));
    lab.holds(0..5).await;
    lab.engine.restart();
    (0..6).for_each(|seq| lab.engine.record(seq, stored(seq + 10)));
    lab.holds(10..16).await;
    assert_eq!(lab.clears("restart"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn order_is_kept_where_it_matters() {
    let lab = Lab::new(true, Form::New).await;
    until_true("nothing to replay", || lab.feed.status().settled.get()).await;
    lab.engine.publish(0, stored(0));
    lab.holds([0]).await;
    lab.engine.record(1, stored(1)); // lost on the way
    lab.engine.publish(2, removed(1)); // to be held until it is here
    lab.engine.publish(3, stored(3));
    lab.holds([0, 3]).await;
    lab.engine.publish(4, cleared());
    lab.engine.publish(5, stored(5));
    lab.holds([5]).await;
    let status = lab.feed.status();
    assert!(status.replayed_total.get() >= 1, "1 was stored, then removed");
    assert_eq!(status.reasons().filter(|(_, n)| *n > 0).count(), 3, "stored, removed, cleared");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_replay_socket_delays_nothing_for_long() {
    for answers in [Answers::Stall(0), Answers::Stall(3), Answers::Close] {
        let engine = Engine::start(Form::New).await;
        engine.set_answers(answers);
        let impatient = PlaneConfig { window: window::Config::default(), ..config() };
        let lab = Lab::with(impatient, engine, true).await;
        (0..9).filter(|seq| *seq != 1).for_each(|seq| lab.engine.publish(seq, stored(seq)));
        lab.holds([0, 2, 3, 4, 5, 6, 7, 8]).await;
        until_true("given up", || lab.feed.status().replays_failed_total.get() > 0).await;
    }
    // none at all
    let engine = Engine::start(Form::New).await;
    let plane = Plane::start(config()).unwrap();
    let mut nowhere = engine.source(true);
    nowhere.replay = Some("tcp://127.0.0.1:1".parse().unwrap());
    let feed = plane.follow(ENGINE, nowhere).unwrap();
    engine.subscribed().await;
    engine.publish(3, stored(3));
    until_true("applied", || holds(&plane, ENGINE, 3)).await;
    assert!(feed.status().replay_errors().any(|(kind, n)| kind == "connect" && n > 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_engine_holds_is_bounded() {
    let lab = Lab::new(true, Form::New).await;
    lab.plane.set_bound(ENGINE, Some(4));
    (0..8).for_each(|seq| lab.engine.publish(seq, stored(seq)));
    lab.holds(0..8).await;
    // removals were lost: the engine has four blocks, and twice as many are the most
    lab.engine.publish(8, stored(8));
    until_true("learnt anew", || lab.clears("distrust") == 1).await;
    lab.engine.publish(9, cleared());
    lab.engine.publish(10, stored(10));
    lab.holds([10]).await;
    until_true("told", || lab.feed.status().blocks.get() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_engine_holds_can_be_dumped() {
    let lab = Lab::new(false, Form::New).await;
    assert!(lab.plane.dump(ENGINE, None).await.is_empty());
    for (seq, block) in [7, 8, 8].into_iter().enumerate() {
        lab.engine.publish(seq as u64, stored(block));
    }
    let status = lab.feed.status();
    until_true("applied", || status.batches_total.get() == 3).await;
    let dump = lab.plane.dump(ENGINE, None).await;
    let [(0, rows)] = dump.as_slice() else { panic!("{dump:?}") };
    let mut rows: Vec<_> = rows.iter().map(|row| (row.engine_hash, row.copies, row.orphan)).collect();
    rows.sort();
    assert_eq!(rows, [(70_007, 1, false), (70_008, 2, false)]);
    assert_eq!(lab.plane.dump(ENGINE, Some(0)).await.len(), 1);
    assert!(lab.plane.dump(ENGINE, Some(1)).await.is_empty());
    assert!(lab.plane.dump(1, None).await.is_empty());
    until_true("told", || status.blocks.get() == 2).await;
    assert_eq!((status.block_size.get(), status.ranks.get(), status.events_total.get()), (16, 1, 3));
    assert!(status.last_event_ms.get() > 0);
    until_true("totals", || lab.plane.stats().blocks == 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_feed_takes_its_caches_along() {
    let Lab { engine, plane, feed } = Lab::new(false, Form::New).await;
    assert_eq!(plane.follow(ENGINE, engine.source(false)).unwrap_err(), FollowError::Followed(ENGINE));
    let other = Engine::start(Form::New).await;
    let _other = plane.follow(7, other.source(false)).unwrap();
    other.subscribed().await;
    engine.publish(0, stored(0));
    other.publish(0, stored(0));
    until_true("both", || holds(&plane, ENGINE, 0) && holds(&plane, 7, 0)).await;
    let status = feed.status();
    drop(feed);
    until_true("gone", || plane.holdings().caches().of(ENGINE).is_empty() && !holds(&plane, ENGINE, 0)).await;
    until_true("given back", || plane.stats().caches == 1).await;
    assert!(holds(&plane, 7, 0));
    assert_eq!((status.blocks.get(), status.batches_total.get()), (0, 1), "counts stay");
    // the key is free again at once, and the connection is gone
    let again = plane.follow(ENGINE, engine.source(false)).unwrap();
    until_true("connected", || again.status().connected.get()).await;
    assert!(!holds(&plane, ENGINE, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn followed_before_it_exists() {
    let to: Endpoint = free().parse().unwrap();
    let plane = Plane::start(config()).unwrap();
    let feed = plane.follow(ENGINE, source(to.clone())).unwrap();
    let status = feed.status();
    let refused = || status.connect_errors().find(|(kind, _)| *kind == "connect").unwrap().1;
    until_true("tried", || refused() >= 3).await;
    let mut publisher = zeromq::PubSocket::new();
    publisher.bind(&to.to_string()).await.unwrap();
    until_true("connected", || status.connected.get()).await;
    for seq in 0u64.. {
        let parts: Vec<bytes::Bytes> =
            vec!["".into(), seq.to_be_bytes().to_vec().into(), stored(seq % 100).into()];
        publisher.send(parts.try_into().unwrap()).await.unwrap();
        if status.batches_total.get() > 3 {
            break;
        }
        tokio::time::sleep(ms(5)).await;
    }
    until_true("held", || !held(&plane, ENGINE, 100).is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_plane_ends_its_thread() {
    let named = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        tasks.filter_map(|t| std::fs::read_to_string(t.path().join("comm")).ok()).any(|c| c == "kv-ingest\n")
    };
    let lab = Lab::new(true, Form::New).await;
    lab.engine.publish(0, stored(0));
    lab.holds([0]).await;
    assert!(named());
    let Lab { engine, plane, feed } = lab;
    drop(plane);
    until_true("ended", || !named()).await;
    engine.publish(1, stored(1)); // nobody is there to apply it
    until_true("received", || feed.status().messages_total.get() == 2).await;
}

#[test]
fn following_needs_a_runtime() {
    let plane = Plane::start(config()).unwrap();
    let to = "tcp://127.0.0.1:1".parse().unwrap();
    assert_eq!(plane.follow(ENGINE, source(to)).unwrap_err(), FollowError::NoRuntime);
}
