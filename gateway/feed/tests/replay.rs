//! Replay answers, in the frame forms of all engine generations.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::time::Duration;

use bytes::BytesMut;
use kvgate_feed::zmtp::Replay;
use support::*;
use tokio::{io::AsyncWriteExt, sync::mpsc};

#[test]
fn replay_forms() {
    alone(async {
        for topic in [false, true] {
            let p = peer(move |_, mut s| async move {
                shake(&mut s, 1, "ROUTER").await?;
                assert_eq!(frame(&mut s).await?, (1, vec![]));
                assert_eq!(frame(&mut s).await?, (0, 5u64.to_be_bytes().to_vec()));
                for seq in 5..9u64 {
                    let seq = seq.to_be_bytes();
                    s.write_all(&if topic {
                        message(&[b"", b"kv", &seq, b"p"])
                    } else {
                        message(&[b"", &seq, b"p"])
                    })
                    .await?;
                }
                s.write_all(&message(&[b"", &u64::MAX.to_be_bytes(), b""])).await?;
                for_ever().await
            })
            .await;
            let mut replay = Replay::request(&p.to, 5, &patient()).await.unwrap();
            let mut seqs = Vec::new();
            while let Some(reply) = replay.next().await.unwrap() {
                assert_eq!(&reply.payload[..], b"p");
                seqs.push(reply.seq);
            }
            assert_eq!(seqs, [5, 6, 7, 8]);
            assert!(replay.next().await.unwrap().is_none(), "stays ended");
        }
        let p = peer(|_, mut s| async move {
            shake(&mut s, 0, "ROUTER").await?;
            for_ever().await
        })
        .await;
        let mut replay = Replay::request(&p.to, 0, &quick()).await.unwrap();
        assert_eq!(replay.next().await.unwrap_err().kind(), "reply_timeout");
    });
}

#[test]
fn replay_asks_again_for_what_a_router_dropped() {
    alone(async {
        let (tell, mut told) = mpsc::unbounded_channel();
        let p = peer(move |_, mut s| {
            let tell = tell.clone();
            async move {
                shake(&mut s, 1, "ROUTER").await?;
                frame(&mut s).await?;
                let start = u64::from_be_bytes(frame(&mut s).await?.1.try_into().unwrap());
                tell.send(start).unwrap();
                let (seqs, end): (Vec<u64>, bool) = match start {
                    0 => ((7..1100).chain(1200..1300).collect(), true), // dropped in the middle
                    1100 => ((1100..2500).collect(), false),            // dropped the end marker too
                    2500 => ((2500..3500).collect(), true),             // perhaps dropped just before it
                    _ => ((start..3510).collect(), true),
                };
                for seq in seqs.into_iter().chain(end.then_some(u64::MAX)) {
                    s.write_all(&message(&[b"", b"kv", &seq.to_be_bytes(), b"p"])).await?;
                    if let Ok(Ok((4, _))) = tokio::time::timeout(Duration::ZERO, frame(&mut s)).await {
                        s.write_all(b"\x04\x05\x04PONG").await?;
                    }
                }
                while let Ok((4, _)) = frame(&mut s).await {
                    s.write_all(b"\x04\x05\x04PONG").await?;
                }
                Ok(())
            }
        })
        .await;
        let mut replay = Replay::request(&p.to, 0, &patient()).await.unwrap();
        let mut seqs = Vec::new();
        while let Some(reply) = replay.next().await.unwrap() {
            seqs.push(reply.seq);
        }
        assert_eq!(
            seqs,
            (7..3510).collect::<Vec<_>>(),
            "the first may be later than asked for; no other gap"
        );
        let asked: Vec<u64> = std::iter::from_fn(|| told.try_recv().ok()).collect();
        assert!(asked.starts_with(&[0, 1100]) && asked.is_sorted(), "{asked:?}");
    });
}

/// Serves what a DEALER once received from a real engine, frame for frame.
#[test]
fn captured_streams() {
    alone(async {
        for (name, start, count) in [
            ("replay_from_0", 0, 81),
            ("replay_from_70", 70, 11),
            ("replay_from_100000", 100_000, 0),
            ("replay_v0.28.0", 0, 8),
        ] {
            let records = capture(name);
            let mut served = BytesMut::new();
            for frames in &records {
                served.extend(message(&frames.iter().map(Vec::as_slice).collect::<Vec<_>>()));
            }
            let p = peer(move |_, mut s| {
                let served = served.clone();
                async move {
                    shake(&mut s, 1, "ROUTER").await?;
                    frame(&mut s).await?;
                    assert_eq!(frame(&mut s).await?.1, u64::to_be_bytes(start));
                    s.write_all(&served).await?;
                    for_ever().await
                }
            })
            .await;
            let mut replay = Replay::request(&p.to, start, &patient()).await.unwrap();
            let mut replies = Vec::new();
            while let Some(reply) = replay.next().await.unwrap() {
                replies.push((reply.seq.to_be_bytes().to_vec(), reply.payload.to_vec()));
            }
            let (end, batches) = records.split_last().unwrap();
            assert_eq!(end[end.len() - 2..], [vec![0xff; 8], vec![]], "{name}: the end marker");
            let want = batches.iter().map(|f| (f[f.len() - 2].clone(), f[f.len() - 1].clone()));
            assert_eq!(replies, want.collect::<Vec<_>>(), "{name}");
            assert_eq!(replies.len(), count, "{name}");
        }
    });
}
