//! The event sockets, with other people's subscribers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use bytes::Bytes;
use common::{complete, eventually, start};
use futures::StreamExt;
use kvgate_kv::event::{Event, decode};
use kvgate_kv::hash::Namespace;
use kvgate_sim::{EventEncoding, HashForm, ReplayFrames, Sim, SimConfig};
use std::process::Command;
use std::time::Duration;
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket, SocketEvent, SocketRecv, SocketSend, SubSocket, ZmqMessage};

const LONG: Duration = Duration::from_secs(20);
const END: [u8; 8] = [0xff; 8];

async fn subscribe(sim: &Sim, topic: &str) -> SubSocket {
    let mut socket = SubSocket::new();
    socket.subscribe(topic).await.unwrap();
    socket.connect(&sim.events_endpoint().unwrap()).await.unwrap();
    socket
}

async fn receive(socket: &mut SubSocket) -> Vec<Bytes> {
    timeout(LONG, socket.recv()).await.expect("a batch").unwrap().into_vec()
}

/// Completes prompts of one block until the subscription is known to work; returns the first batch that came.
async fn warm_up(sim: &Sim, socket: &mut SubSocket) -> Vec<Bytes> {
    for start in (100_000..).step_by(16).take(200) {
        complete(sim.address(), start, 16).await;
        if let Ok(batch) = timeout(Duration::from_millis(50), socket.recv()).await {
            return batch.unwrap().into_vec();
        }
    }
    panic!("no batch came");
}

fn seq(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame.try_into().unwrap())
}

/// What a DEALER gets for a replay from `start`, without the end marker.
async fn replay(sim: &Sim, start: u64) -> Vec<Vec<Bytes>> {
    let mut socket = DealerSocket::new();
    socket.connect(&sim.replay_endpoint().unwrap()).await.unwrap();
    let mut request = ZmqMessage::from(Bytes::new());
    request.push_back(Bytes::copy_from_slice(&start.to_be_bytes()));
    socket.send(request).await.unwrap();
    let mut batches = Vec::new();
    loop {
        let frames = timeout(LONG, socket.recv()).await.expect("a reply").unwrap().into_vec();
        assert!(frames[0].is_empty());
        if frames[frames.len() - 2] == END[..] {
            assert!(frames[frames.len() - 1].is_empty());
            return batches;
        }
        batches.push(frames);
    }
}

#[tokio::test]
async fn batches_are_published_and_replayed() {
    let topic = "kv@engine-1@tiny-qwen3";
    for frames in [ReplayFrames::New, ReplayFrames::Old] {
        let sim =
            start(SimConfig { topic: topic.into(), replay_frames: frames, ..SimConfig::default() }).await;
        let mut socket = subscribe(&sim, "kv@").await;
        let mut live = vec![warm_up(&sim, &mut socket).await];
        for start in [1000, 2000, 3000] {
            complete(sim.address(), start, 40).await;
        }
        let tokens: Vec<u32> = (3000..3040).collect();
        let expected = sim.config().contract().hasher().unwrap().blocks(&tokens, &Namespace::default());
        loop {
            live.push(receive(&mut socket).await);
            let batch = decode(&live.last().unwrap()[2]).unwrap();
            assert_eq!((batch.rank, batch.bad_events.len(), batch.unknown_events), (Some(0), 0, 0));
            let [Event::Stored(stored)] = batch.events.as_slice() else { panic!("{batch:?}") };
            if stored.tokens.as_deref() == Some(&tokens[..32]) {
                assert_eq!(stored.hashes, expected.iter().map(|hash| hash.u64()).collect::<Vec<_>>());
                assert_eq!((stored.parent, stored.block_size, stored.medium), (None, 16, Some("GPU")));
                break;
            }
        }
        let first = seq(&live[0][1]);
        for (batch, expected) in live.iter().zip(first..) {
            assert_eq!((batch.len(), &batch[0][..], seq(&batch[1])), (3, topic.as_bytes(), expected));
        }
        let replayed = replay(&sim, first).await;
        let as_live: Vec<Vec<Bytes>> = replayed
            .iter()
            .map(|reply| match frames {
                ReplayFrames::New => reply[1..].to_vec(),
                ReplayFrames::Old => {
                    [vec![Bytes::from_static(topic.as_bytes())], reply[1..].to_vec()].concat()
                }
            })
            .collect();
        assert_eq!(as_live, live);
        assert_eq!(replay(&sim, 0).await.len() as u64, first + live.len() as u64);
        assert!(replay(&sim, 100_000).await.is_empty());
    }
}

#[tokio::test]
async fn only_the_last_batches_can_be_replayed() {
    let sim = start(SimConfig { buffer_steps: 3, ..SimConfig::default() }).await;
    for start in (0..80).step_by(16) {
        complete(sim.address(), start, 16).await;
    }
    let seqs: Vec<u64> = replay(&sim, 0).await.iter().map(|reply| seq(&reply[2])).collect();
    assert_eq!(seqs, [2, 3, 4]);
}

#[tokio::test]
async fn both_encodings_and_hash_forms_decode_to_the_same() {
    let mut decoded = Vec::new();
    for (event_encoding, hash_form) in [
        (EventEncoding::Map, HashForm::Int),
        (EventEncoding::Map, HashForm::Bytes),
        (EventEncoding::Array, HashForm::Int),
        (EventEncoding::Array, HashForm::Bytes),
    ] {
        let sim =
            start(SimConfig { event_encoding, hash_form, cache_blocks: 4, ..SimConfig::default() }).await;
        complete(sim.address(), 0, 32).await;
        complete(sim.address(), 500, 32).await;
        assert!(sim.reset_prefix_cache().await);
        complete(sim.address(), 0, 3).await;
        let replayed = replay(&sim, 0).await;
        let events = replayed.iter().flat_map(|reply| decode(&reply[3]).unwrap().events);
        decoded.push(events.map(|event| format!("{event:?}")).collect::<Vec<_>>());
    }
    assert_eq!(
        decoded[0].iter().map(|event| &event[..6]).collect::<Vec<_>>(),
        ["Stored", "Remove", "Stored", "Cleare"]
    );
    assert!(decoded.iter().all(|events| *events == decoded[0]), "{decoded:?}");
}

#[tokio::test]
async fn a_restart_begins_again_at_0_and_publishes_nothing_at_first() {
    let mut sim = start(SimConfig::default()).await;
    let endpoints = (sim.events_endpoint(), sim.replay_endpoint());
    let mut socket = subscribe(&sim, "").await;
    let before = warm_up(&sim, &mut socket).await;
    complete(sim.address(), 0, 32).await;
    let last = receive(&mut socket).await;
    assert_eq!(seq(&last[1]), seq(&before[1]) + 1);

    sim.restart().await.unwrap();
    assert_eq!((sim.events_endpoint(), sim.replay_endpoint()), endpoints);
    assert!(replay(&sim, 0).await.is_empty());
    complete(sim.address(), 0, 32).await;
    let replayed = replay(&sim, 0).await;
    assert_eq!(replayed.iter().map(|reply| seq(&reply[2])).collect::<Vec<_>>(), [0]);
    let mut socket = subscribe(&sim, "").await;
    warm_up(&sim, &mut socket).await;
}

#[tokio::test]
async fn cut_connections_come_back_to_a_sequence_that_went_on() {
    let sim = start(SimConfig::default()).await;
    let mut socket = subscribe(&sim, "").await;
    let mut monitor = socket.monitor();
    let before = seq(&warm_up(&sim, &mut socket).await[1]);
    sim.cut_events().await;
    let cut = async {
        loop {
            // it notices only while it receives
            tokio::select! {
                event = monitor.next() => if matches!(event, Some(SocketEvent::Disconnected(_))) { return },
                _ = socket.recv() => {}
            }
        }
    };
    timeout(LONG, cut).await.expect("the subscriber to lose its connection");
    let mut socket = subscribe(&sim, "").await;
    let after = seq(&warm_up(&sim, &mut socket).await[1]);
    assert!(after > before);
    let answer = complete(sim.address(), 100_000, 17).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 16);
    assert_eq!(replay(&sim, 0).await.len() as u64, after + 1);
}

/// A subscriber that reads nothing must not hold the engine up, nor other subscribers.
#[tokio::test(flavor = "multi_thread")]
async fn a_subscriber_that_reads_nothing_blocks_nobody() {
    let sim =
        start(SimConfig { cache_blocks: 300, hash_form: HashForm::Bytes, ..SimConfig::default() }).await;
    let deaf = subscribe(&sim, "").await;
    let mut socket = subscribe(&sim, "").await;
    warm_up(&sim, &mut socket).await;
    let reader = tokio::spawn(async move {
        let mut bytes = 0;
        while let Ok(Ok(batch)) = timeout(LONG, socket.recv()).await {
            let batch = batch.into_vec();
            bytes += batch[2].len();
            let events = decode(&batch[2]).unwrap();
            let last =
                events.events.iter().any(|event| matches!(event, Event::Stored(s) if s.hashes.len() == 3));
            if last {
                return bytes;
            }
        }
        panic!("the last batch never came");
    });
    for start in 0..400 {
        complete(sim.address(), start, 2048).await;
    }
    complete(sim.address(), 50_000, 48).await;
    assert!(timeout(LONG, reader).await.expect("the reader to end").unwrap() > 8 << 20);
    drop(deaf);
}

const SUBSCRIBER: &str = r#"
import sys, zmq
events, replay, topic = sys.argv[1:4]
context = zmq.Context()
sub = context.socket(zmq.SUB)
sub.setsockopt(zmq.LINGER, 0)
sub.setsockopt_string(zmq.SUBSCRIBE, topic)
sub.connect(events)
dealer = context.socket(zmq.DEALER)
dealer.setsockopt(zmq.LINGER, 0)
dealer.connect(replay)
print("ready", flush=True)
while True:
    if not sub.poll(20000):
        sys.exit("no batch")
    frames = sub.recv_multipart()
    print("live", *[frame.hex() or "-" for frame in frames], flush=True)
    if len(frames[2]) > 500:
        break
dealer.send_multipart([b"", (0).to_bytes(8, "big")])
while True:
    if not dealer.poll(20000):
        sys.exit("no reply")
    frames = dealer.recv_multipart()
    print("replay", *[frame.hex() or "-" for frame in frames], flush=True)
    if frames[-2] == b"\xff" * 8:
        break
context.destroy(0)
"#;

/// The reference implementation of ZeroMQ, through pyzmq where it is installed.
#[tokio::test]
async fn libzmq_understands_us() {
    let python = std::env::var("KVGATE_PYTHON").unwrap_or_else(|_| "python3".into());
    if !Command::new(&python).args(["-c", "import zmq"]).output().is_ok_and(|output| output.status.success())
    {
        eprintln!("skipped: {python} has no zmq module (KVGATE_PYTHON names another)");
        return;
    }
    let sim = start(SimConfig { topic: "kv".into(), ..SimConfig::default() }).await;
    let (events, replay) = (sim.events_endpoint().unwrap(), sim.replay_endpoint().unwrap());
    let script = std::thread::spawn(move || {
        Command::new(python).args(["-c", SUBSCRIBER, &events, &replay, "kv"]).output().unwrap()
    });
    let mut start = 0;
    eventually("the script is done", async || {
        // batches of one block until it has subscribed, and one of many blocks, on which it turns to the replay
        let count = if start > 20 { 320 } else { 16 };
        complete(sim.address(), start * 1000, count).await;
        start += 1;
        script.is_finished()
    })
    .await;
    let output = script.join().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines = |kind: &str| {
        let lines = text.lines().filter_map(|line| line.strip_prefix(kind));
        lines.map(|line| line.split(' ').map(str::to_owned).collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    let (live, replayed) = (lines("live "), lines("replay "));
    let (marker, replayed) = replayed.split_last().unwrap();
    assert_eq!(marker, &["-", "-", "ffffffffffffffff", "-"]);
    assert!(!live.is_empty() && replayed.len() >= live.len(), "{text}");
    for batch in &live {
        assert_eq!(batch[0], "6b76");
        let seq = u64::from_str_radix(&batch[1], 16).unwrap() as usize;
        assert_eq!(replayed[seq][1..], batch[..]);
    }
}
