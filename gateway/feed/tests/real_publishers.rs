//! Engines on other implementations of ZeroMQ: the zeromq crate, and libzmq through pyzmq (`KVGATE_PYTHON`).
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use kvgate_feed::plane::{FeedHandle, Plane, Source};
use kvgate_feed::zmtp::Endpoint;
use support::engine::{Form, config, held, source, stored, until_true};
use support::{free, ms};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

const ENGINE: u64 = 9;

type Log = Arc<Mutex<BTreeMap<u64, Vec<u8>>>>;

/// An engine process, on either implementation.
enum Real {
    Crate { tell: mpsc::UnboundedSender<(u64, Vec<u8>)>, log: Log, tasks: [JoinHandle<()>; 2] },
    Libzmq(Child),
}

impl Drop for Real {
    fn drop(&mut self) {
        match self {
            Real::Crate { tasks, .. } => tasks.iter().for_each(JoinHandle::abort),
            Real::Libzmq(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

fn multipart(parts: &[&[u8]]) -> ZmqMessage {
    let parts: Vec<bytes::Bytes> = parts.iter().map(|p| p.to_vec().into()).collect();
    parts.try_into().unwrap()
}

impl Real {
    async fn on_crate(events: &Endpoint, replay: &Endpoint, form: Form) -> Real {
        let (mut publisher, mut router) = (PubSocket::new(), RouterSocket::new());
        // the engine before may not be gone yet
        while router.bind(&replay.to_string()).await.is_err() {
            tokio::time::sleep(ms(5)).await;
        }
        while publisher.bind(&events.to_string()).await.is_err() {
            tokio::time::sleep(ms(5)).await;
        }
        let (tell, mut told) = mpsc::unbounded_channel::<(u64, Vec<u8>)>();
        let log = Log::default();
        let publishing = tokio::spawn(async move {
            while let Some((seq, payload)) = told.recv().await {
                publisher.send(multipart(&[b"kv", &seq.to_be_bytes(), &payload])).await.unwrap();
            }
        });
        let remembered = log.clone();
        let answering = tokio::spawn(async move {
            loop {
                let Ok(request) = router.recv().await else { continue };
                let [who, empty, start] = request.into_vec().try_into().unwrap();
                assert!(empty.is_empty());
                let start = u64::from_be_bytes(start[..].try_into().unwrap());
                let batches: Vec<_> =
                    remembered.lock().unwrap().range(start..).map(|(seq, p)| (*seq, p.clone())).collect();
                for (seq, payload) in batches.into_iter().chain([(u64::MAX, Vec::new())]) {
                    let seq = seq.to_be_bytes();
                    let answer = match form {
                        Form::Old => multipart(&[&who, b"", &seq, &payload]),
                        Form::New => multipart(&[&who, b"", b"kv", &seq, &payload]),
                    };
                    let _ = router.send(answer).await;
                }
            }
        });
        Real::Crate { tell, log, tasks: [publishing, answering] }
    }

    fn on_libzmq(events: &Endpoint, replay: &Endpoint, form: Form) -> Option<Real> {
        let python = std::env::var("KVGATE_PYTHON");
        let exe = python.as_deref().unwrap_or("python3");
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/engine.py");
        let form = if form == Form::Old { "old" } else { "new" };
        let child = Command::new(exe)
            .args([script, &events.to_string(), &replay.to_string(), form])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let started = child.ok().and_then(|mut child| {
            let mut line = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            let engine = Real::Libzmq(child);
            (line.trim() == "ready").then_some(engine)
        });
        if started.is_none() {
            assert!(python.is_err(), "{exe} did not start the engine");
            eprintln!("skipped: no pyzmq; name a Python that has it in KVGATE_PYTHON");
        }
        started
    }

    fn say(&mut self, command: &str, seq: u64, payload: &[u8]) {
        match self {
            Real::Crate { tell, log, .. } => {
                log.lock().unwrap().entry(seq).or_insert(payload.to_vec());
                if command == "publish" {
                    tell.send((seq, payload.to_vec())).unwrap();
                }
            }
            Real::Libzmq(child) => {
                let hex: String = payload.iter().map(|b| format!("{b:02x}")).collect();
                writeln!(child.stdin.as_mut().unwrap(), "{command} {seq} {hex}").unwrap();
            }
        }
    }

    fn publish(&mut self, seq: u64, block: u64) {
        self.say("publish", seq, &stored(block));
    }

    fn record(&mut self, seq: u64, block: u64) {
        self.say("record", seq, &stored(block));
    }
}

/// Forwards connections until they are cut.
struct Proxy {
    at: Endpoint,
    connections: Arc<Mutex<JoinSet<()>>>,
    task: JoinHandle<()>,
}

impl Proxy {
    async fn to(target: &Endpoint) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = format!("tcp://{}", listener.local_addr().unwrap()).parse().unwrap();
        let connections = Arc::new(Mutex::new(JoinSet::new()));
        let (target, accepted) = (target.to_string().replace("tcp://", ""), connections.clone());
        let task = tokio::spawn(async move {
            loop {
                let (mut inner, _) = listener.accept().await.unwrap();
                let target = target.clone();
                accepted.lock().unwrap().spawn(async move {
                    if let Ok(mut outer) = TcpStream::connect(target).await {
                        let _ = copy_bidirectional(&mut inner, &mut outer).await;
                    }
                });
            }
        });
        Proxy { at, connections, task }
    }

    fn cut(&self) {
        self.connections.lock().unwrap().abort_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Publishes batch `seq` until it is heard: a publisher tells nobody when it knows of a subscription.
async fn heard(engine: &Mutex<Real>, plane: &Plane, feed: &FeedHandle, seq: u64, block: u64) {
    let status = feed.status();
    let before = status.messages_total.get();
    until_true("heard", || {
        engine.lock().unwrap().publish(seq, block);
        status.messages_total.get() > before && held(plane, ENGINE, 200).contains(&block)
    })
    .await;
}

async fn holds(plane: &Plane, want: impl IntoIterator<Item = u64>) {
    let want: Vec<u64> = want.into_iter().collect();
    until_true(&format!("{want:?} held"), || held(plane, ENGINE, 200) == want).await;
}

/// Followed before it exists; gaps; the live connection cut; a restart.
async fn a_life(engine: impl AsyncFn(&Endpoint, &Endpoint) -> Option<Real>, replay: bool) {
    let (events, answers): (Endpoint, Endpoint) = (free().parse().unwrap(), free().parse().unwrap());
    let proxy = Proxy::to(&events).await;
    let plane = Plane::start(config()).unwrap();
    let followed = Source { replay: replay.then(|| answers.clone()), ..source(proxy.at.clone()) };
    let feed: FeedHandle = plane.follow(ENGINE, followed).unwrap();
    let status = feed.status();
    until_true("tried", || status.connect_errors().any(|(_, n)| n > 2)).await;
    let Some(first) = engine(&events, &answers).await else { return };
    let first = Mutex::new(first);
    heard(&first, &plane, &feed, 0, 0).await;
    let one = |seq| first.lock().unwrap().publish(seq, seq);
    (1..3).for_each(one);
    holds(&plane, 0..3).await;
    (3..5).for_each(|seq| first.lock().unwrap().record(seq, seq));
    one(5);
    let mut want = if replay { vec![0, 1, 2, 3, 4, 5] } else { vec![0, 1, 2, 5] };
    holds(&plane, want.clone()).await;
    let connects = status.connects_total.get();
    proxy.cut();
    until_true("reconnected", || status.connects_total.get() > connects).await;
    heard(&first, &plane, &feed, 6, 6).await;
    want.push(6);
    holds(&plane, want).await;
    assert_eq!((status.restarts_total.get(), status.gaps_total.get()), (0, 1));

    drop(first);
    until_true("gone", || !status.connected.get()).await;
    let second = Mutex::new(engine(&events, &answers).await.expect("as before"));
    heard(&second, &plane, &feed, 0, 100).await;
    holds(&plane, [100]).await;
    assert_eq!(status.restarts_total.get(), 1);
    (1..65).for_each(|seq| second.lock().unwrap().record(seq, 100 + seq));
    second.lock().unwrap().publish(65, 165);
    holds(&plane, if replay { 100..166 } else { 165..166 }).await;
    assert_eq!(status.clears().find(|(cause, _)| *cause == "gap"), Some(("gap", 1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_zeromq_crate() {
    for (form, replay) in [(Form::Old, true), (Form::New, true), (Form::New, false)] {
        a_life(async |events, answers| Some(Real::on_crate(events, answers, form).await), replay).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn libzmq() {
    for (form, replay) in [(Form::Old, true), (Form::New, true), (Form::New, false)] {
        a_life(async |events, answers| Real::on_libzmq(events, answers, form), replay).await;
    }
}
