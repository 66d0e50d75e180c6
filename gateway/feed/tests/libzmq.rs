//! Against libzmq, through pyzmq. `KVGATE_PYTHON` names a Python that has it (default: `python3`); without
//! one these tests say so and pass, unless `KVGATE_PYTHON` is set.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use kvgate_feed::zmtp::{Connection, Endpoint, Event, Options, Replay, Subscription};
use support::*;
use tokio::sync::mpsc;

struct Libzmq(Child);

impl Drop for Libzmq {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Libzmq {
    fn start(args: &[&str]) -> Option<Self> {
        let python = std::env::var("KVGATE_PYTHON");
        let exe = python.as_deref().unwrap_or("python3");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/peer.py");
        let child =
            Command::new(exe).arg(script).args(args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let started = child.ok().and_then(|mut child| {
            let mut line = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            let peer = Self(child);
            (line.trim() == "ready").then_some(peer)
        });
        if started.is_none() {
            assert!(python.is_err(), "{exe} did not start the peer {args:?}");
            eprintln!("skipped: no pyzmq; name a Python that has it in KVGATE_PYTHON");
        }
        started
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.0.id().to_string()]).status().unwrap().success());
    }
}

macro_rules! libzmq {
    ($($arg:expr),+) => {
        match Libzmq::start(&[$($arg.as_ref()),+]) { Some(peer) => peer, None => return }
    };
}

fn to(endpoint: &str) -> Endpoint {
    endpoint.parse().unwrap()
}

fn follow(endpoint: &str, options: Options) -> (Subscription, mpsc::Receiver<Event>) {
    let (tx, rx) = mpsc::channel(4096);
    (Subscription::spawn(to(endpoint), eager(options), tx), rx)
}

fn seq(e: &Event) -> Option<u64> {
    match e {
        Event::Message(m) => Some(u64::from_be_bytes(m.parts[m.parts.len() - 2][..].try_into().unwrap())),
        _ => None,
    }
}

#[test]
fn before_it_exists_and_restarts() {
    alone(async {
        let at = free();
        let (_feed, mut rx) = follow(&at, patient());
        until(&mut rx, 3, |e| matches!(e, Event::Disconnected { was_connected: false, .. }).then_some(()))
            .await;
        tokio::time::sleep(ms(300)).await;
        for round in 0..3 {
            let t = Instant::now();
            let peer = libzmq!("pub", &at, "rate=200", "quiet=1");
            let up = t.elapsed();
            until(&mut rx, 5, |e| matches!(e, Event::Connected { minor: 1 }).then_some(())).await;
            eprintln!("round {round}: publisher up after {up:?}, connected {:?} later", t.elapsed() - up);
            let first = until(&mut rx, 5, seq).await;
            assert_eq!(first, 0, "nothing of the new life is missed");
            drop(peer);
            until(&mut rx, 5, |e| matches!(e, Event::Disconnected { was_connected: true, .. }).then_some(()))
                .await;
        }
    });
}

#[test]
fn flaps() {
    alone(async {
        let at = free();
        let (fds0, tasks0) = (fds(), tasks());
        let (feed, mut rx) = follow(&at, patient());
        let flapping = tokio::task::spawn_blocking({
            let at = at.clone();
            move || Libzmq::start(&["flap", &at, "n=200", "up=0.02"])
        });
        let (mut ups, mut downs) = (0, 0);
        let mut peer = None;
        let mut wait = Box::pin(flapping);
        let t = Instant::now();
        loop {
            tokio::select! {
                p = &mut wait, if peer.is_none() => match p.unwrap() { Some(p) => peer = Some(p), None => return },
                e = rx.recv() => match e.unwrap() {
                    Event::Connected { .. } => ups += 1,
                    Event::Disconnected { was_connected: true, .. } => downs += 1,
                    Event::Message(m) if m.parts[2] == "good" => break,
                    _ => {}
                },
                () = tokio::time::sleep_until((t + Duration::from_secs(40)).into()) => panic!("wedged: {ups} ups, {downs} downs"),
            }
        }
        eprintln!("200 flaps: connected {ups} times in {:?}", t.elapsed());
        assert_eq!(ups, downs + 1);
        feed.stop().await;
        drop(peer);
        tokio::time::sleep(ms(50)).await;
        assert!(
            fds() <= fds0 + 2 && tasks() <= tasks0,
            "fds {fds0} -> {}, tasks {tasks0} -> {}",
            fds(),
            tasks()
        );
    });
}

#[test]
fn a_stopped_process_is_noticed_and_taken_back() {
    alone(async {
        let at = free();
        let peer = libzmq!("pub", &at, "rate=100");
        let (_feed, mut rx) = follow(&at, quick());
        until(&mut rx, 5, seq).await;
        peer.signal("-STOP");
        let t = Instant::now();
        let reason = until(&mut rx, 5, |e| match e {
            Event::Disconnected { reason, was_connected: true, .. } => Some(reason.kind()),
            _ => None,
        })
        .await;
        eprintln!("SIGSTOP noticed after {:?}", t.elapsed());
        assert_eq!(reason, "silent");
        let again = until(&mut rx, 5, |e| match e {
            Event::Disconnected { reason, was_connected: false, .. } => Some(reason.kind()),
            _ => None,
        });
        assert_eq!(again.await, "handshake_timeout", "the kernel still accepts for it");
        peer.signal("-CONT");
        let t = Instant::now();
        until(&mut rx, 5, seq).await;
        eprintln!("messages again {:?} after SIGCONT", t.elapsed());
    });
}

#[test]
fn silent_but_healthy_is_kept() {
    alone(async {
        for minor in [0, 1] {
            let at = free();
            let _peer = libzmq!("pub", &at, "rate=100", "quiet=4");
            let (tx, mut rx) = mpsc::channel(64);
            let connection = Options { minor, ..patient() };
            let _feed = Subscription::spawn(to(&at), eager(connection), tx);
            let first = until(&mut rx, 8, |e| match e {
                Event::Disconnected { reason, .. } => panic!("dropped a healthy peer: {reason}"),
                e => seq(e),
            });
            assert_eq!(first.await, 0);
        }
    });
}

#[test]
fn a_publisher_with_heartbeats() {
    alone(async {
        for (rate, quiet) in [("rate=300", "quiet=0.5"), ("rate=1", "quiet=2.5")] {
            let at = free();
            let _peer = libzmq!("pub", &at, rate, quiet, "hb=300");
            let (_feed, mut rx) = follow(&at, patient());
            let (t, mut next) = (Instant::now(), 0);
            while t.elapsed() < Duration::from_secs(4) {
                match tokio::time::timeout(ms(1500), rx.recv()).await {
                    Ok(Some(Event::Disconnected { reason, .. })) => panic!("{reason}"),
                    Ok(Some(e)) => {
                        if let Some(seq) = seq(&e) {
                            assert_eq!(seq, next, "no gap");
                            next += 1;
                        }
                    }
                    _ => {}
                }
            }
            assert!(next >= 2, "{next}");
        }
    });
}

#[test]
fn high_water_mark_drops_are_gaps() {
    alone(async {
        let at = free();
        let _peer = libzmq!("flood", &at, "n=60000", "size=2000", "hwm=100");
        let mut c = Connection::subscriber(&to(&at), b"", &patient()).await.unwrap();
        tokio::time::sleep(ms(2500)).await; // nobody reads: socket buffers, then the HWM
        let (mut got, mut gaps, mut next) = (0u64, 0u64, 0u64);
        while let Ok(m) = tokio::time::timeout(ms(700), c.recv()).await {
            let seq = u64::from_be_bytes(m.unwrap()[1][..].try_into().unwrap());
            gaps += u64::from(seq != next);
            (got, next) = (got + 1, seq + 1);
        }
        eprintln!("HWM 100: {got} of 60000 arrived, {gaps} gaps, last {}", next - 1);
        assert!(got < 60000 && (gaps > 0 || next < 60000));
    });
}

#[test]
fn addresses_topics_and_versions() {
    alone(async {
        let port = free().rsplit_once(':').unwrap().1.to_owned();
        let dir = std::env::temp_dir().join(format!("zmtp-{}", std::process::id()));
        let (v6, ipc) = (format!("tcp://[::1]:{port}"), format!("ipc://{}", dir.display()));
        let (any, dns) = (format!("tcp://127.0.0.1:{port}"), format!("tcp://localhost:{port}"));
        let name = format!("ipc://@zmtp-{}", std::process::id());
        for (bind, connect) in [(&v6, &v6), (&any, &dns), (&ipc, &ipc), (&name, &name)] {
            for minor in [0, 1] {
                let _peer = libzmq!("pub", bind, "topic=kv-events", "noise=1", "rate=200");
                let options = Options { minor, ..patient() };
                let mut c = Connection::subscriber(&to(connect), b"kv-", &options).await.expect(connect);
                assert_eq!(c.minor(), minor);
                for _ in 0..20 {
                    let m = tokio::time::timeout(ms(2000), c.recv()).await.expect(connect).unwrap();
                    assert_eq!((m.len(), &m[0][..]), (3, &b"kv-events"[..]), "the filter works");
                }
            }
        }
        let _ = std::fs::remove_file(dir);
    });
}

#[test]
fn other_mechanisms() {
    alone(async {
        for auth in ["auth=plain", "auth=curve"] {
            let at = free();
            let _peer = libzmq!("pub", &at, auth);
            let error = Connection::subscriber(&to(&at), b"", &patient()).await.unwrap_err();
            // libzmq compares mechanisms before it sends its own, and hangs up.
            assert!(matches!(error.kind(), "mechanism" | "handshake_closed"), "{error}");
            eprintln!("{auth}: {error}");
        }
    });
}

#[test]
fn wrong_role() {
    alone(async {
        let at = free();
        let _peer = libzmq!("router", &at, "n=1");
        let error = Connection::subscriber(&to(&at), b"", &patient()).await.unwrap_err();
        assert!(matches!(error.kind(), "socket_type" | "closed"), "{error}");
        eprintln!("SUB to ROUTER: {error}");
    });
}

#[test]
fn replay() {
    alone(async {
        for form in ["", "topic=kv"] {
            let at = free();
            let _peer = if form.is_empty() {
                libzmq!("router", &at, "n=10000")
            } else {
                libzmq!("router", &at, "n=10000", form)
            };
            for start in [0, 9_990, 20_000] {
                let t = Instant::now();
                let mut replay = Replay::request(&to(&at), start, &patient()).await.unwrap();
                let mut next = start;
                while let Some(reply) = replay.next().await.unwrap() {
                    assert_eq!((reply.seq, reply.payload.len()), (next, 200));
                    next += 1;
                }
                assert_eq!(next, start.max(10_000));
                eprintln!("replay {form:?} from {start}: {} in {:?}", next - start, t.elapsed());
            }
        }
    });
}

/// What engines do: the replay ROUTER keeps libzmq's default high-water mark of 1000.
#[test]
fn replay_survives_the_routers_high_water_mark() {
    alone(async {
        let at = free();
        let _peer = libzmq!("router", &at, "n=4000", "size=20000", "hwm=1000");
        let mut raw = Connection::dealer(&to(&at), &patient()).await.unwrap();
        raw.send(&[b"", &[0; 8]]).await.unwrap();
        let (mut got, mut end) = (0, false);
        while let (false, Ok(m)) = (end, tokio::time::timeout(ms(500), raw.recv()).await) {
            end = m.unwrap()[1][..] == [255; 8];
            got += u64::from(!end);
        }
        eprintln!("one plain request: {got} of 4000 arrived, end marker: {end}");
        for (name, slow) in [("fast", 0), ("slow", 100)] {
            let t = Instant::now();
            let mut replay = Replay::request(&to(&at), 0, &patient()).await.unwrap();
            let mut next = 0;
            while let Some(reply) = replay.next().await.unwrap() {
                assert_eq!(reply.seq, next);
                next += 1;
                if slow > 0 && next % 200 == 1 {
                    tokio::time::sleep(ms(slow)).await;
                }
            }
            assert_eq!(next, 4000, "whole, whatever was dropped");
            eprintln!("replay, {name} reader: {next} in {:?}", t.elapsed());
        }
    });
}

/// The other Rust implementation announces ZMTP 3.0 and knows no PING.
#[test]
fn the_zeromq_crate_as_publisher() {
    use zeromq::{Socket, SocketSend};
    alone(async {
        let mut publisher = zeromq::PubSocket::new();
        let at = publisher.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        for minor in [0, 1] {
            let mut c = Connection::subscriber(&to(&at), b"", &Options { minor, ..patient() }).await.unwrap();
            assert_eq!(c.minor(), 0);
            assert!(tokio::time::timeout(ms(1500), c.recv()).await.is_err(), "silence is kept");
            let message: Vec<bytes::Bytes> = vec!["".into(), "12345678".into(), "x".into()];
            publisher.send(message.try_into().unwrap()).await.unwrap();
            assert_eq!(c.recv().await.unwrap().len(), 3);
        }
    });
}

#[test]
fn three_hundred_publishers() {
    alone(async {
        let free: Vec<_> = (0..300).map(|_| free()).collect();
        let ports = free.join(",");
        let _peer = libzmq!("many", &ports, "rate=10", "quiet=1.5", "size=2000");
        let (fds0, tasks0, rss0) = (fds(), tasks(), rss_mb());
        let (feeds, receivers): (Vec<_>, Vec<_>) = free.iter().map(|at| follow(at, patient())).unzip();
        let readers = receivers.into_iter().enumerate().map(|(i, mut rx)| {
            tokio::spawn(async move {
                let mut next = 0;
                while next < 15 {
                    match rx.recv().await.unwrap() {
                        Event::Disconnected { reason, .. } => panic!("{i}: {reason}"),
                        Event::Overflow { .. } => panic!("{i}: overflow"),
                        Event::Connected { .. } => {}
                        event => {
                            assert_eq!(seq(&event), Some(next), "subscription {i}");
                            next += 1;
                        }
                    }
                }
            })
        });
        for reader in readers.collect::<Vec<_>>() {
            reader.await.unwrap();
        }
        eprintln!("300 subscriptions: +{} fds, +{} MB", fds() - fds0, rss_mb() - rss0);
        for feed in feeds {
            feed.stop().await;
        }
        assert!(fds() <= fds0 + 1 && tasks() <= tasks0);
    });
}
