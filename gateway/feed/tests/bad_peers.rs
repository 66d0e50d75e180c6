//! Peers that lie, stall, flood and vanish.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::time::Duration;

use bytes::BytesMut;
use kvgate_feed::zmtp::{
    Backoff, Connection, Endpoint, Error, Event, Options, Subscription, SubscriptionOptions,
};
use support::*;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::mpsc,
};

async fn subscribe(to: &Endpoint) -> Result<Connection, Error> {
    Connection::subscriber(to, b"", &quick()).await
}

/// How a subscriber ends that meets a peer sending `bytes` in place of a handshake.
async fn greeted_with(bytes: impl Into<Vec<u8>>) -> Error {
    let bytes = bytes.into();
    let p = peer(move |_, mut s| {
        let bytes = bytes.clone();
        async move {
            s.write_all(&bytes).await?;
            let _ = s.read_exact(&mut [0; 64]).await;
            for_ever().await
        }
    })
    .await;
    subscribe(&p.to).await.expect_err("a bad handshake")
}

/// How a good connection ends when the peer goes on with `bytes`.
async fn followed_by(bytes: impl Into<Vec<u8>>) -> Error {
    let bytes = bytes.into();
    let p = peer(move |_, mut s| {
        let bytes = bytes.clone();
        async move {
            shake(&mut s, 1, "PUB").await?;
            let _ = s.write_all(&bytes).await;
            for_ever().await
        }
    })
    .await;
    let mut c = subscribe(&p.to).await.unwrap();
    loop {
        if let Err(e) = c.recv().await {
            assert!(matches!(c.recv().await, Err(Error::Closed)), "an ended connection stays ended");
            return e;
        }
    }
}

#[test]
fn handshakes() {
    alone(async {
        assert_eq!(greeted_with(*b"").await.to_string(), "connected, but no ZMTP handshake within 400ms");
        assert_eq!(greeted_with(greeting(1, "NULL")).await.kind(), "handshake_timeout");
        assert_eq!(
            greeted_with(*b"HTTP/1.1 400 Bad Request\r\n\r\n").await.to_string(),
            r#"not a ZMTP peer: it began with "HTTP/1.1 400 Bad""#
        );
        assert_eq!(greeted_with(*b"SSH-2.0-x\r\n").await.kind(), "not_zmtp");
        assert_eq!(
            greeted_with(greeting(1, "CURVE")).await.to_string(),
            "peer requires mechanism CURVE, only NULL is supported"
        );
        assert_eq!(greeted_with(greeting(0, "PLAIN")).await.kind(), "mechanism");
        assert_eq!(greeted_with(*b"\xff\0\0\0\0\0\0\0\x01\x7f\x01").await.kind(), "version");
        let then = |more: &[u8]| [&greeting(1, "NULL"), more].concat();
        assert_eq!(
            greeted_with(then(&ready("PUSH"))).await.to_string(),
            r#"peer is a "PUSH" socket, which cannot serve this role"#
        );
        assert_eq!(greeted_with(then(b"\x04\x0a\x05ERROR\x03no!")).await.to_string(), "peer refused: no!");
        assert_eq!(greeted_with(then(b"\x04\x06\x05READY")).await.kind(), "socket_type");
        assert_eq!(greeted_with(then(b"\x04\x09\x05READY\x0bSo")).await.kind(), "protocol");
        assert_eq!(
            greeted_with(then(b"\0\x01x")).await.to_string(),
            "protocol violation: message before READY"
        );
        assert_eq!(greeted_with(then(b"\x06\xff\xff\xff\xff\xff\xff\xff\xff")).await.kind(), "too_big");
        let p = peer(|_, s| async {
            drop(s);
            Ok(())
        })
        .await;
        assert_eq!(subscribe(&p.to).await.unwrap_err().kind(), "handshake_closed");
    });
}

#[test]
fn dialling() {
    alone(async {
        let refused = "tcp://127.0.0.1:1".parse().unwrap();
        assert_eq!(subscribe(&refused).await.unwrap_err().kind(), "connect");
        let nowhere = "tcp://no-such-host.invalid:5557".parse().unwrap();
        assert!(matches!(subscribe(&nowhere).await.unwrap_err().kind(), "resolve" | "connect_timeout"));
        assert_eq!(subscribe(&"ipc:///nonexistent/x".parse().unwrap()).await.unwrap_err().kind(), "connect");
        // A listener whose queue is full answers no SYN.
        let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        full.bind(&"127.0.0.1:0".parse::<std::net::SocketAddr>().unwrap().into()).unwrap();
        full.listen(0).unwrap();
        let at = full.local_addr().unwrap().as_socket().unwrap();
        let _fill: Vec<_> = (0..3).map(|_| std::net::TcpStream::connect_timeout(&at, ms(100))).collect();
        let error = subscribe(&format!("tcp://{at}").parse().unwrap()).await.unwrap_err();
        assert!(matches!(error.kind(), "connect" | "connect_timeout"), "{error}");
    });
}

/// TCP lets a socket connect to itself where outgoing ports are taken from; then the real peer cannot bind.
#[test]
fn never_connected_to_ourselves() {
    alone(async {
        let to: Endpoint = "tcp://127.0.0.1:40960".parse().unwrap();
        let mut ourselves = 0;
        for _ in 0..20_000 {
            let error = subscribe(&to).await.expect_err("nobody listens");
            assert_eq!(error.kind(), "connect", "{error}");
            ourselves += usize::from(error.to_string().contains("ourselves"));
        }
        eprintln!("connected to ourselves {ourselves} times in 20000");
        while std::net::TcpListener::bind("127.0.0.1:40960").is_err() {
            tokio::time::sleep(ms(10)).await; // somebody else's outgoing connection may have it for a while
        }
    });
}

#[test]
fn lies_about_size_cost_nothing() {
    alone(async {
        let before = rss_mb();
        for size in [1u64 << 33, 1 << 40, 1 << 62, u64::MAX] {
            let e = followed_by([&[2u8][..], &size.to_be_bytes()].concat()).await;
            assert!(matches!(e, Error::FrameTooBig { size: s, .. } if s == size), "{e}");
        }
        let mega = [&[3u8][..], &(1u64 << 20).to_be_bytes(), &[0; 1 << 20]].concat();
        assert_eq!(followed_by(mega.repeat(64)).await.kind(), "too_big");
        assert_eq!(
            followed_by([1u8, 0].repeat(1_000_000)).await.to_string(),
            "message exceeds the limit of 8 parts"
        );
        // 200 peers announce the largest frame allowed and send 1 KB of it.
        let p = peer(|_, mut s| async move {
            shake(&mut s, 1, "PUB").await?;
            s.write_all(&[&[2u8][..], &(4u64 << 20).to_be_bytes(), &[0; 1024]].concat()).await?;
            for_ever().await
        })
        .await;
        let mut stuck = Vec::new();
        for _ in 0..200 {
            let mut c = subscribe(&p.to).await.unwrap();
            assert!(tokio::time::timeout(ms(2), c.recv()).await.is_err());
            stuck.push(c);
        }
        assert!(rss_mb() - before < 40, "{} -> {} MB", before, rss_mb());
    });
}

#[test]
fn garbage() {
    alone(async {
        let mut x = 88172645463325252u64;
        for round in 0..60 {
            let noise: Vec<u8> = std::iter::repeat_with(|| {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                x as u8
            })
            .take(4096)
            .collect();
            let kind =
                if round % 2 == 0 { followed_by(noise).await } else { greeted_with(noise).await }.kind();
            // Noise may look like an unfinished frame: then silence ends it.
            assert!(
                ["protocol", "too_big", "silent", "not_zmtp", "handshake_timeout"].contains(&kind),
                "{kind}"
            );
        }
        assert_eq!(followed_by(*b"\x04\x00").await.to_string(), "protocol violation: empty command");
        assert_eq!(
            followed_by(*b"\x04\x05\x04PING").await.to_string(),
            "protocol violation: PING without TTL"
        );
        assert_eq!(followed_by(*b"\x04\x05\x04WHAT").await.kind(), "silent", "an unknown command is ignored");
    });
}

#[test]
fn one_byte_at_a_time_and_cancelled_all_the_time() {
    alone(async {
        let p = peer(|_, mut s| async move {
            s.set_nodelay(true)?;
            let mut all = greeting(1, "NULL").to_vec();
            all.extend(ready("PUB"));
            for seq in 0..40 {
                all.extend(numbered(seq, if seq % 10 == 9 { 600 } else { 3 }));
                all.extend(b"\x04\x09\x04PING\0\0ab");
            }
            for byte in all {
                s.write_all(&[byte]).await?;
                tokio::task::yield_now().await;
            }
            for_ever().await
        })
        .await;
        let mut c = Connection::subscriber(&p.to, b"", &patient()).await.unwrap();
        let (mut want, mut cancelled) = (0u64, 0);
        while want < 40 {
            match tokio::time::timeout(Duration::from_micros(50), c.recv()).await {
                Ok(parts) => {
                    let parts = parts.unwrap();
                    assert_eq!((parts.len(), &parts[1][..]), (3, &want.to_be_bytes()[..]));
                    want += 1;
                }
                Err(_) => cancelled += 1,
            }
        }
        assert!(cancelled > 0, "the test cancels");
    });
}

#[test]
fn subscribe_forms_and_ping() {
    alone(async {
        for (theirs, ours, want) in [
            (1, 1, (4, b"\x09SUBSCRIBEkv@".to_vec())),
            (0, 1, (0, b"\x01kv@".to_vec())),
            (1, 0, (0, b"\x01kv@".to_vec())),
        ] {
            let (tell, mut told) = mpsc::unbounded_channel();
            let p = peer(move |_, mut s| {
                let tell = tell.clone();
                async move {
                    let sub = shake(&mut s, theirs, "PUB").await?;
                    s.write_all(b"\x04\x1a\x04PING\0\x050123456789abcdefXYZ").await?;
                    let pong = frame(&mut s).await?;
                    let ping = tokio::time::timeout(ms(500), frame(&mut s)).await;
                    tell.send((sub, pong, ping.map(Result::unwrap).ok())).unwrap();
                    for_ever().await
                }
            })
            .await;
            let mut c =
                Connection::subscriber(&p.to, b"kv@", &Options { minor: ours, ..quick() }).await.unwrap();
            let end = tokio::time::timeout(ms(900), c.recv()).await;
            let (sub, pong, ping) = told.recv().await.unwrap();
            assert_eq!(sub, want);
            assert_eq!(
                pong,
                (4, b"\x04PONG0123456789abcdef".to_vec()),
                "at most 16 bytes of context come back"
            );
            if c.minor() >= 1 {
                assert_eq!(ping, Some((4, b"\x04PING\0\0".to_vec())));
                assert!(matches!(end, Ok(Err(Error::Silent(_)))), "a peer that never answers is dead");
            } else {
                assert_eq!(ping, None, "3.0 knows no PING");
                assert!(end.is_err(), "and silence is no fault");
            }
        }
    });
}

#[test]
fn a_peer_that_pings_but_does_not_read() {
    alone(async {
        let before = rss_mb();
        let p = peer(|_, mut s| async move {
            shake(&mut s, 1, "PUB").await?;
            let pings = b"\x04\x17\x04PING\0\x050123456789abcdef".repeat(4000);
            while s.write_all(&pings).await.is_ok() {}
            Ok(())
        })
        .await;
        let mut c = subscribe(&p.to).await.unwrap();
        let e = tokio::time::timeout(Duration::from_secs(10), c.recv()).await.unwrap().unwrap_err();
        assert_eq!(e.kind(), "backlog");
        assert!(rss_mb() - before < 20);
    });
}

#[test]
fn a_stalled_consumer_kills_no_healthy_peer() {
    alone(async {
        let p = peer(|_, mut s| async move {
            shake(&mut s, 1, "PUB").await?;
            for seq in 0.. {
                s.write_all(&numbered(seq, 10)).await?;
                if let Ok(Ok((_, ping))) = tokio::time::timeout(ms(20), frame(&mut s)).await {
                    assert!(ping.starts_with(b"\x04PING"));
                    s.write_all(b"\x04\x05\x04PONG").await?;
                }
            }
            Ok(())
        })
        .await;
        let mut c = subscribe(&p.to).await.unwrap();
        for _ in 0..3 {
            c.recv().await.unwrap();
            std::thread::sleep(ms(700)); // the whole runtime, longer than ping_after + dead_after
            c.recv().await.unwrap();
            tokio::time::sleep(ms(700)).await; // only this task
        }
    });
}

#[test]
fn flaps_resets_and_hangs_then_good() {
    alone(async {
        let (fds0, tasks0) = (fds(), tasks());
        for (name, flaps) in
            [("fin", 200), ("rst", 200), ("rst_in_handshake", 200), ("hang", 4), ("half", 4), ("mute", 3)]
        {
            let p = peer(move |n, mut s| async move {
                if n > flaps {
                    shake(&mut s, 1, "PUB").await?;
                    s.write_all(&numbered(7, 5)).await?;
                    return for_ever().await;
                }
                match name {
                    "fin" => shake(&mut s, 1, "PUB").await.map(drop),
                    "rst" => {
                        s.write_all(&greeting(1, "NULL")).await?;
                        s.write_all(&ready("PUB")).await?;
                        s.read_exact(&mut [0; 100]).await?; // RST races with the subscription
                        reset(s)
                    }
                    "rst_in_handshake" => {
                        s.write_all(&greeting(1, "NULL")).await?;
                        reset(s)
                    }
                    "half" => {
                        s.write_all(&greeting(1, "NULL")[..20]).await?;
                        for_ever().await
                    }
                    "mute" => {
                        shake(&mut s, 1, "PUB").await?;
                        for_ever().await
                    }
                    _ => for_ever().await,
                }
            })
            .await;
            let (tx, mut rx) = mpsc::channel(64);
            let subscription = Subscription::spawn(
                p.to.clone(),
                eager(Options { handshake_timeout: ms(1000), ..quick() }),
                tx,
            );
            let (mut gone, mut up) = (0, 0);
            until(&mut rx, 30, |e| match e {
                Event::Disconnected { was_connected, .. } => {
                    gone += 1;
                    up -= i32::from(*was_connected);
                    None
                }
                Event::Connected { .. } => {
                    up += 1;
                    assert_eq!(up, 1, "{name}: one Connected per Disconnected");
                    None
                }
                Event::Message(m) => (m.parts[1][7] == 7).then_some(()),
                Event::Overflow { .. } => None,
            })
            .await;
            assert_eq!(gone, flaps, "{name}");
            subscription.stop().await;
        }
        tokio::time::sleep(ms(50)).await;
        assert!(
            fds() <= fds0 + 1 && tasks() <= tasks0,
            "fds {fds0} -> {}, tasks {tasks0} -> {}",
            fds(),
            tasks()
        );
    });
}

#[test]
fn stopping_anywhere_leaves_nothing() {
    alone(async {
        let p = peer(|n, mut s| async move {
            match n % 3 {
                0 => {}
                1 => s.write_all(&greeting(1, "NULL")).await?,
                _ => drop(shake(&mut s, 1, "PUB").await?),
            }
            let _ = s.read_to_end(&mut Vec::new()).await;
            Ok(())
        })
        .await;
        let (fds0, tasks0) = (fds(), tasks());
        for i in 0..60 {
            let (tx, rx) = mpsc::channel(4);
            let subscription = Subscription::spawn(p.to.clone(), eager(quick()), tx);
            tokio::time::sleep(ms(i % 7)).await;
            match i % 3 {
                0 => subscription.stop().await,
                1 => drop(subscription),
                _ => {
                    drop(rx); // the consumer leaves: the task ends by itself
                    tokio::time::sleep(ms(5)).await;
                    std::mem::forget(subscription);
                }
            }
        }
        tokio::time::sleep(ms(100)).await;
        assert!(fds() <= fds0 && tasks() <= tasks0, "fds {fds0} -> {}, tasks {tasks0} -> {}", fds(), tasks());
    });
}

#[test]
fn a_lagging_consumer_costs_messages_not_memory() {
    alone(async {
        let mut all = BytesMut::new();
        (0..2000).for_each(|seq| all.extend(numbered(seq, 20_000)));
        let all = all.freeze();
        let p = peer(move |_, mut s| {
            let all = all.clone();
            async move {
                shake(&mut s, 1, "PUB").await?;
                s.write_all(&all).await?; // never blocks for long: the task reads on
                tokio::time::sleep(ms(400)).await;
                s.write_all(&numbered(2000, 1)).await?;
                for_ever().await
            }
        })
        .await;
        for (queued_bytes, room) in [(400_000, 1024), (1 << 30, 8), (100, 1024)] {
            let before = rss_mb();
            let (tx, mut rx) = mpsc::channel(room);
            let subscription =
                Subscription::spawn(p.to.clone(), SubscriptionOptions { queued_bytes, ..eager(quick()) }, tx);
            tokio::time::sleep(ms(400)).await; // the consumer sleeps
            assert!(rss_mb() < before + 60);
            let (mut got, mut lost, mut next) = (0, 0, 0);
            until(&mut rx, 5, |e| match e {
                Event::Message(m) => {
                    got += 1;
                    let seq = u64::from_be_bytes(m.parts[1][..].try_into().unwrap());
                    assert!(seq >= next, "in order");
                    next = seq + 1;
                    (seq == 2000).then_some(())
                }
                Event::Overflow { dropped } => {
                    lost += dropped;
                    None
                }
                Event::Disconnected { reason, .. } => panic!("{reason}"),
                Event::Connected { .. } => None,
            })
            .await;
            assert_eq!(got + lost, 2001, "each message is delivered or counted");
            assert!(lost > 0 && got >= 2, "got {got} lost {lost}");
            subscription.stop().await;
        }
    });
}

/// A connection that stood long enough is made again at once; waits begin when that fails.
#[test]
fn what_stood_is_made_again_at_once() {
    alone(async {
        let peer = peer(|n, mut s| async move {
            shake(&mut s, 0, "PUB").await?;
            // the first one lives long, the second does not
            tokio::time::sleep(ms(if n == 1 { 80 } else { 0 })).await;
            Ok(())
        })
        .await;
        let (tx, mut rx) = mpsc::channel(8);
        let options =
            SubscriptionOptions { backoff: Backoff { first: ms(20), max: ms(60) }, ..eager(quick()) };
        let _subscription = Subscription::spawn(peer.to.clone(), options, tx);
        let mut wait = async || {
            until(&mut rx, 5, |event| match event {
                Event::Disconnected { retry_in, .. } => Some(*retry_in),
                _ => None,
            })
            .await
        };
        assert_eq!(wait().await, Duration::ZERO);
        assert!((ms(10)..=ms(20)).contains(&wait().await));
        assert!((ms(20)..=ms(40)).contains(&wait().await));
    });
}

#[test]
fn backoff_grows_and_is_jittered() {
    alone(async {
        let (tx, mut rx) = mpsc::channel(8);
        let options =
            SubscriptionOptions { backoff: Backoff { first: ms(8), max: ms(64) }, ..eager(quick()) };
        let _subscription = Subscription::spawn("tcp://127.0.0.1:1".parse().unwrap(), options, tx);
        let mut waits = Vec::new();
        while waits.len() < 12 {
            let event = rx.recv().await.unwrap();
            if let Event::Disconnected { retry_in, was_connected: false, .. } = event {
                waits.push(retry_in);
            }
        }
        for (i, wait) in waits.iter().enumerate() {
            let full = ms(8 << i.min(3));
            assert!((full / 2..=full).contains(wait), "attempt {i}: {wait:?}");
        }
        assert!(waits[4..].windows(2).any(|w| w[0] != w[1]), "jitter");
    });
}
