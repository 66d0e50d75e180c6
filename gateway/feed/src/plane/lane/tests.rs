use super::*;

fn lane(board: &Board, key: u64) -> Arc<Lane> {
    let mirror =
        MirrorConfig { own: true, published: false, engine_blocks: None, max_blocks: 10, max_ranks: 1 };
    let lane = Lane::new(key, mirror, 1000);
    assert!(board.register(&lane));
    lane
}

async fn apply(board: &Board, lane: &Arc<Lane>) {
    let batch = Bytes::from_static(b"batch");
    let room = lane.room(&batch).await.expect("open");
    lane.push(Job::Apply(batch, room));
    board.schedule(lane);
}

/// Whose turn it is; 0 for nobody's. Takes one thing of the lane.
fn turn(board: &Board) -> (u64, Next) {
    match board.work(false) {
        Work::Serve(lane) => {
            let (key, next) = (lane.key, lane.next());
            board.served(lane);
            (key, next)
        }
        _ => (0, Next::Nothing),
    }
}

#[tokio::test]
async fn lanes_take_turns() {
    let board = Board::default();
    let (a, b) = (lane(&board, 1), lane(&board, 2));
    for _ in 0..3 {
        apply(&board, &a).await; // as many as its budget allows
    }
    apply(&board, &b).await;
    let turns: Vec<u64> = std::iter::repeat_with(|| turn(&board).0).take_while(|key| *key > 0).collect();
    assert_eq!(turns, [1, 2, 1, 1]);
    assert!(!board.register(&a), "its key is in use");
    apply(&board, &a).await;
    b.push(Job::Clear);
    board.schedule_first(&b);
    assert!(matches!(turn(&board), (2, Next::Job(Job::Clear))));
}

#[tokio::test]
async fn trust_comes_after_what_led_to_it_and_is_never_missed() {
    let board = Board::default();
    let a = lane(&board, 1);
    a.push(Job::Clear);
    assert!(a.settle(true));
    board.schedule(&a);
    assert!(matches!(turn(&board), (1, Next::Job(Job::Clear))));
    assert!(!a.standing.trusted(), "the clear is not done yet");
    // the feed settles while the ingest thread has just found nothing more to do
    assert!(!a.settle(false));
    let Work::Serve(served) = board.work(false) else { panic!("the clear's lane has a turn left") };
    assert!(matches!(served.next(), Next::Nothing));
    assert!(a.settle(true));
    board.schedule(&a);
    board.served(served);
    assert!(matches!(turn(&board), (1, Next::Nothing)));
    assert!(a.standing.trusted());
    assert!(!a.settle(false));
    assert!(!a.standing.trusted(), "taken back at once");
}

#[tokio::test]
async fn a_full_lane_waits() {
    let board = Board::default();
    let a = lane(&board, 1);
    for _ in 0..3 {
        apply(&board, &a).await;
    }
    let batch = Bytes::from_static(b"batch");
    let full = tokio::time::timeout(std::time::Duration::ZERO, a.room(&batch)).await;
    assert!(full.is_err(), "three of 256 bytes and some");
    assert!(matches!(turn(&board), (1, Next::Job(Job::Apply(..)))));
    assert!(a.room(&batch).await.is_some(), "what is done makes room");
}

#[tokio::test]
async fn a_clear_makes_what_was_queued_moot() {
    let board = Board::default();
    let a = lane(&board, 1);
    apply(&board, &a).await;
    apply(&board, &a).await;
    a.push(Job::Clear);
    a.push(Job::Clear);
    apply(&board, &a).await;
    assert_eq!(a.status.overtaken_total.get(), 2, "it is told how many");
    assert!(matches!(turn(&board), (1, Next::Job(Job::Clear))));
    assert!(matches!(turn(&board), (1, Next::Job(Job::Apply(..)))));
    assert!(matches!(turn(&board), (0, _)));
}

#[tokio::test]
async fn a_removed_lane_is_closed_once() {
    let board = Board::default();
    let a = lane(&board, 1);
    apply(&board, &a).await;
    board.remove(&a);
    assert!(matches!(turn(&board), (1, Next::Close)), "nothing queued before counts");
    assert!(matches!(turn(&board), (0, _)), "and then no more turns");
    assert!(a.room(&Bytes::new()).await.is_none());
    a.push(Job::Clear);
    a.set_bound(None);
    board.schedule(&a);
    assert!(matches!(turn(&board), (1, Next::Nothing)));
    assert!(matches!(turn(&board), (0, _)));
    assert!(board.register(&a), "the key is free");
}

#[tokio::test]
async fn a_stopped_board_answers_no_more() {
    let board = Board::default();
    let a = lane(&board, 1);
    apply(&board, &a).await;
    board.stop();
    assert!(matches!(board.work(true), Work::Stop));
    assert!(board.dump(&a, None).await.is_empty());
    assert!(a.room(&Bytes::new()).await.is_none());
}
