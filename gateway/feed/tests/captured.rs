//! Streams captured from real engines, sent again frame for frame.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use kvgate_feed::plane::{Plane, PlaneConfig};
use kvgate_kv::event;
use kvgate_kv::inventory::{Ingest, Row};
use kvgate_kv::mirror::Mirror;
use support::engine::{Engine, Form, config, until_true};
use support::*;

const ENGINE: u64 = 3;

/// What an engine holds after these payloads, applied one by one.
fn applied<'a>(payloads: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<Row> {
    let PlaneConfig { inventory, hasher, .. } = config();
    let (mut ingest, _) = Ingest::new(inventory);
    let mut mirror = Mirror::new(engine::source("tcp://h:1".parse().unwrap()).mirror, hasher);
    for payload in payloads {
        mirror.apply(&mut ingest, &event::decode(payload).unwrap());
    }
    let mut rows = mirror.dump(&ingest, 0);
    rows.sort();
    rows
}

/// Waits until just this is held.
async fn until_dumped(plane: &Plane, want: Vec<Row>) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    loop {
        let dump = plane.dump(ENGINE, None).await;
        let mut rows: Vec<Row> = dump.into_iter().flat_map(|(_, rows)| rows).collect();
        rows.sort();
        if rows == want {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "{rows:?} instead of {want:?}");
        tokio::time::sleep(ms(5)).await;
    }
}

fn seq(frames: &[Vec<u8>]) -> u64 {
    u64::from_be_bytes(frames[frames.len() - 2].as_slice().try_into().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn live() {
    for (name, batches, blocks) in [
        ("bs16_sha256cbor_seed0_int", 165, 0),
        ("evict_24blocks_topic", 16, 22),
        ("real_v0.28.0_bs16_sha256cbor_seed0", 8, 8),
        ("v_sha256pickle_s0", 7, 19),
        ("v_shacbor_s0_bytes", 7, 19),
    ] {
        let records = capture(name);
        // an engine that starts again is another one
        let restarts = records.windows(2).filter(|pair| seq(&pair[1]) <= seq(&pair[0])).count() as u64;
        let life = records.windows(2).rposition(|pair| seq(&pair[1]) <= seq(&pair[0])).map_or(0, |at| at + 1);
        let engine = Engine::start(Form::New).await;
        let plane = Plane::start(config()).unwrap();
        let feed = plane.follow(ENGINE, engine.source(false)).unwrap();
        engine.subscribed().await;
        for frames in &records {
            engine.send(&message(&frames.iter().map(Vec::as_slice).collect::<Vec<_>>()));
        }
        let status = feed.status();
        until_true(name, || status.last_seq.get() == seq(records.last().unwrap())).await;
        let want = applied(records[life..].iter().map(|frames| &frames[2]));
        assert_eq!((records.len(), want.len()), (batches, blocks), "{name}");
        until_dumped(&plane, want).await;
        assert_eq!(status.messages_total.get(), records.len() as u64, "{name}");
        assert_eq!(status.decode_errors().map(|(_, n)| n).sum::<u64>(), 0, "{name}");
        assert_eq!((status.restarts_total.get(), status.gaps_total.get()), (restarts, 0), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replayed() {
    for (name, form, count) in [
        ("replay_from_0", Form::New, 81),
        ("replay_from_70", Form::New, 11),
        ("replay_from_100000", Form::New, 0),
        ("replay_v0.28.0", Form::Old, 8),
    ] {
        let mut records = capture(name);
        records.pop(); // the end marker
        let batches: BTreeMap<u64, Vec<u8>> =
            records.iter().map(|frames| (seq(frames), frames.last().unwrap().clone())).collect();
        assert_eq!(batches.len(), count, "{name}");
        let engine = Engine::start(form).await;
        batches.iter().for_each(|(seq, payload)| engine.record(*seq, payload.clone()));
        let plane = Plane::start(config()).unwrap();
        let feed = plane.follow(ENGINE, engine.source(true)).unwrap();
        until_true(name, || feed.status().settled.get()).await;
        until_dumped(&plane, applied(batches.values())).await;
        assert_eq!(feed.status().replayed_total.get(), count as u64, "{name}");
    }
}
