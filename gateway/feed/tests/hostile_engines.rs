//! Engines that lie, flood or say nothing sensible: what it costs, and that it costs nobody else.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::time::Instant;

use kvgate_feed::plane::{Plane, PlaneConfig};
use kvgate_feed::zmtp::Backoff;
use kvgate_kv::event;
use support::engine::{Engine, Form, config, held, holds, source, stored, until_true};
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test(flavor = "multi_thread")]
async fn no_engine_behind_the_port() {
    for (name, kind) in [
        ("hang", "handshake_timeout"),
        ("half", "handshake_timeout"),
        ("http", "not_zmtp"),
        ("closes", "handshake_closed"),
        ("mute", "silent"),
    ] {
        let p = peer(move |_, mut s| async move {
            match name {
                "half" => s.write_all(&greeting(1, "NULL")[..20]).await?,
                "http" => s.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n").await?,
                "closes" => return s.read_u8().await.map(drop),
                "mute" => drop(shake(&mut s, 1, "PUB").await?),
                _ => {}
            }
            for_ever().await
        })
        .await;
        let backoff = Backoff { first: ms(20), max: ms(40) };
        let plane = Plane::start(PlaneConfig { backoff, connection: quick(), ..config() }).unwrap();
        let start = Instant::now();
        let feed = plane.follow(1, source(p.to.clone())).unwrap();
        let status = feed.status();
        let failures = || status.connect_errors().chain(status.receive_errors()).filter(|(_, n)| *n > 0);
        until_true(name, || failures().map(|(_, n)| n).sum::<u64>() >= 5).await;
        assert!(failures().all(|(found, _)| found == kind), "{name}: {:?}", failures().collect::<Vec<_>>());
        // each waits half its backoff at least: a busy loop would have made thousands
        let attempts = failures().map(|(_, n)| n).sum::<u64>() as u128;
        assert!(attempts <= start.elapsed().as_millis() / 10 + 2, "{name}: {attempts}");
        // and an engine beside it is followed all the same
        let engine = Engine::start(Form::New).await;
        let _other = plane.follow(2, engine.source(true)).unwrap();
        engine.subscribed().await;
        engine.publish(0, stored(0));
        until_true("the other one", || holds(&plane, 2, 0)).await;
    }
}

/// Payloads that are no batch, or hold an event that is none.
fn garbage() -> Vec<Vec<u8>> {
    let (good, mut x) = (stored(1), 88172645463325252u64);
    let mut random = move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    };
    let mut all: Vec<Vec<u8>> = (0..good.len()).map(|n| good[..n].to_vec()).collect();
    let claim = |marker: u8, size: u32| [&[marker][..], &size.to_be_bytes(), b"x"].concat();
    for marker in [0xdd, 0xdf, 0xdb, 0xc6, 0xc9] {
        all.push(claim(marker, 1 << 30));
        all.push([b"\x93\xca\0\0\0\0", claim(marker, 1 << 30).as_slice()].concat());
        all.push([b"\x93\xca\0\0\0\0\x91", claim(marker, u32::MAX).as_slice()].concat());
    }
    all.push([b"\x93\xca\0\0\0\0".as_slice(), &[0x91; 10_000]].concat());
    all.push([&[0x91; 10_000][..], b"\xc0"].concat());
    all.push([&[0x81; 10_000][..], b"\xc0"].concat());
    while all.len() < 1000 {
        let mut mutant = good.clone();
        for _ in 0..1 + random() % 4 {
            let at = random() as usize % mutant.len();
            mutant[at] = random() as u8;
        }
        all.push(mutant);
    }
    all.retain(|payload| event::decode(payload).map_or(true, |batch| !batch.bad_events.is_empty()));
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_pieces_of_garbage() {
    let engine = Engine::start(Form::New).await;
    let plane = Plane::start(config()).unwrap();
    let feed = plane.follow(1, engine.source(true)).unwrap();
    engine.subscribed().await;
    engine.publish(0, stored(0));
    until_true("good", || holds(&plane, 1, 0)).await;
    let (garbage, status) = (garbage(), feed.status());
    assert!(garbage.len() > 500);
    let errors = || status.decode_errors().map(|(_, n)| n).sum::<u64>();
    let (before, mut sent, mut seq) = (rss_mb(), 0u64, 0u64);
    for piece in garbage.iter().cycle() {
        let bytes = match sent % 10 {
            8 => message(&[piece]),                                    // no number
            9 => message(&[b"", &piece[..7.min(piece.len())], piece]), // not a number
            _ if event::decode(piece).is_err() => message(&[b"", &(sent % 200).to_be_bytes(), piece]),
            _ => {
                seq += 1; // a batch, though with a damaged event
                message(&[b"", &seq.to_be_bytes(), piece])
            }
        };
        engine.send(&bytes);
        sent += 1;
        if sent % 2000 == 0 {
            until_true("refused", || errors() == sent).await; // no more at a time than the queue takes
        }
        if sent == 100_000 {
            break;
        }
    }
    assert_eq!((errors(), status.messages_total.get()), (100_000, 100_001));
    assert!(rss_mb() <= before + 20, "{before} -> {} MB", rss_mb());
    let reasons = status.decode_errors().filter(|(_, n)| *n > 0).count();
    assert!(reasons >= 7, "all but a few reasons occur: {:?}", status.decode_errors().collect::<Vec<_>>());
    engine.publish(seq + 1, stored(1));
    until_true("good again", || held(&plane, 1, 9) == [0, 1]).await;
    let odd = [&status.poisoned_total, &status.restarts_total, &status.gaps_total].map(|count| count.get());
    assert_eq!(odd, [0; 3]);
    assert_eq!(status.batches_total.get(), seq + 2, "garbage moves no number");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_starves_nobody_and_ends_in_truth() {
    for replay in [false, true] {
        let config =
            PlaneConfig { queue_messages: 64, queue_bytes: 64 << 10, lane_bytes: 4 << 10, ..config() };
        let plane = Plane::start(config).unwrap();
        let (noisy, quiet) = (Engine::start(Form::New).await, Engine::start(Form::New).await);
        let flooded = plane.follow(1, noisy.source(replay)).unwrap();
        let _calm = plane.follow(2, quiet.source(replay)).unwrap();
        noisy.subscribed().await;
        quiet.subscribed().await;
        // 200 different blocks, stored and removed over and over
        let flood: Vec<_> = (0..200).flat_map(|n| [stored(n), support::engine::removed(n)]).collect();
        let rounds = 200;
        let mut seq = 0;
        for round in 0..rounds {
            for payload in &flood {
                noisy.publish(seq, payload.clone());
                seq += 1;
            }
            if round % 4 == 0 {
                quiet.publish(round / 4, stored(round / 4));
                until_true("heard through the noise", || holds(&plane, 2, round / 4)).await;
            }
        }
        let status = flooded.status();
        until_true("through", || status.messages_total.get() + status.dropped_total.get() == seq).await;
        eprintln!(
            "replay {replay}: {seq} messages, {} dropped, {} gaps, clears {:?}",
            status.dropped_total.get(),
            status.gaps_total.get(),
            status.clears().collect::<Vec<_>>()
        );
        assert_eq!(status.poisoned_total.get(), 0);
        // what was lost may be held for true, but not for ever: the next clear is the truth again
        noisy.publish(seq, support::engine::cleared());
        noisy.publish(seq + 1, stored(5));
        until_true("truth", || held(&plane, 1, 200) == [5]).await;
        assert_eq!(held(&plane, 2, 200).len(), 50);
    }
}
