//! Scripted peers and process counters.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

pub mod engine;

use std::{
    future::Future,
    net::SocketAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bytes::BytesMut;
use kvgate_feed::zmtp::{Backoff, Endpoint, Event, Options, SubscriptionOptions, wire, wire::Limits};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
};

/// Runs one test at a time, runtimes included: descriptors and memory are counted per process.
pub fn alone(test: impl Future<Output = ()>) {
    static LOCK: Mutex<()> = Mutex::new(());
    let _lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

pub const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// For tests in which time runs out.
pub fn quick() -> Options {
    Options {
        connect_timeout: ms(400),
        handshake_timeout: ms(400),
        ping_after: ms(200),
        dead_after: ms(300),
        reply_timeout: ms(1000),
        limits: Limits { frame: 4 << 20, message: 4 << 20, parts: 8 },
        ..Options::default()
    }
}

/// For tests in which it must not, however busy the machine; PINGs often all the same.
pub fn patient() -> Options {
    let long = Duration::from_secs(30);
    Options {
        connect_timeout: long,
        handshake_timeout: long,
        dead_after: long,
        reply_timeout: long,
        ..quick()
    }
}

/// A subscription that tries again at once.
pub fn eager(connection: Options) -> SubscriptionOptions {
    SubscriptionOptions {
        connection,
        backoff: Backoff { first: ms(2), max: ms(10) },
        ..SubscriptionOptions::default()
    }
}

/// A peer that runs `script(connection number, socket)` for each connection.
pub struct Peer {
    pub at: SocketAddr,
    pub to: Endpoint,
    task: JoinHandle<()>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub async fn peer<F, R>(script: F) -> Peer
where
    F: Fn(usize, TcpStream) -> R + Send + 'static,
    R: Future<Output = std::io::Result<()>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let task = tokio::spawn(async move {
        let mut running = tokio::task::JoinSet::new();
        for n in 1.. {
            let (socket, _) = listener.accept().await.unwrap();
            running.spawn(script(n, socket));
            while running.try_join_next().is_some() {}
        }
    });
    Peer { at, to: format!("tcp://{at}").parse().unwrap(), task }
}

pub fn greeting(minor: u8, mechanism: &str) -> [u8; 64] {
    let mut g = wire::greeting(minor);
    g[12..32].fill(0);
    g[12..12 + mechanism.len()].copy_from_slice(mechanism.as_bytes());
    g
}

pub fn ready(kind: &str) -> BytesMut {
    let mut out = BytesMut::new();
    wire::put_ready(&mut out, kind);
    out
}

pub async fn frame(s: &mut TcpStream) -> std::io::Result<(u8, Vec<u8>)> {
    let (flags, size) = (s.read_u8().await?, s.read_u8().await?);
    let mut body = vec![0; size as usize];
    s.read_exact(&mut body).await?;
    Ok((flags, body))
}

/// The handshake of a `kind` socket, and the subscription if it is a publisher.
pub async fn shake(s: &mut TcpStream, minor: u8, kind: &str) -> std::io::Result<(u8, Vec<u8>)> {
    s.write_all(&greeting(minor, "NULL")).await?;
    s.read_exact(&mut [0; 64]).await?;
    s.write_all(&ready(kind)).await?;
    frame(s).await?;
    if kind == "PUB" { frame(s).await } else { Ok((0, vec![])) }
}

pub fn message(parts: &[&[u8]]) -> BytesMut {
    let mut out = BytesMut::new();
    wire::put_message(&mut out, parts);
    out
}

pub fn numbered(seq: u64, size: usize) -> BytesMut {
    message(&[b"", &seq.to_be_bytes(), &vec![b'x'; size]])
}

/// Closes with RST.
pub fn reset(s: TcpStream) -> std::io::Result<()> {
    socket2::SockRef::from(&s).set_linger(Some(Duration::ZERO))
}

pub async fn for_ever() -> std::io::Result<()> {
    std::future::pending().await
}

/// The next event that `pick` accepts; panics after `secs`.
pub async fn until<T>(
    events: &mut mpsc::Receiver<Event>,
    secs: u64,
    mut pick: impl FnMut(&Event) -> Option<T>,
) -> T {
    let wait = async {
        loop {
            if let Some(found) = pick(&events.recv().await.expect("the task lives")) {
                return found;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(secs), wait).await.expect("no such event in time")
}

/// A port nobody listens on, outside the range of outgoing connections. Tests run as processes with numbers one
/// after the other: each looks in a part of the range of its own.
pub fn free() -> String {
    const PART: u32 = 40;
    let first = std::process::id().wrapping_mul(PART);
    let port = (0..20_000).map(|i| 12_000 + (first.wrapping_add(i) % 20_000) as u16).find(|p| {
        static USED: std::sync::Mutex<Vec<u16>> = std::sync::Mutex::new(Vec::new());
        let mut used = USED.lock().unwrap();
        let fresh = !used.contains(p) && std::net::TcpListener::bind(("127.0.0.1", *p)).is_ok();
        used.push(*p);
        fresh
    });
    format!("tcp://127.0.0.1:{}", port.unwrap())
}

pub fn fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

pub fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

pub fn rss_mb() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() / 1024
}

/// The frames of each record of a captured stream: `KVCAP1\n`, then time u64 | frames u32 | (size u32 | bytes)*,
/// all big-endian.
pub fn capture(name: &str) -> Vec<Vec<Vec<u8>>> {
    let bytes = kvgate_tests::fixture(&format!("vllm/streams/{name}.bin"));
    let mut rest = bytes.strip_prefix(b"KVCAP1\n").expect("a capture");
    let mut take = |n: usize| {
        let (head, tail) = rest.split_at(n);
        rest = tail;
        (head, tail.is_empty())
    };
    let mut records = Vec::new();
    loop {
        take(8);
        let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
        let (mut frames, mut end) = (Vec::new(), false);
        for _ in 0..number(take(4).0) {
            let size = number(take(4).0);
            let (frame, last) = take(size as usize);
            frames.push(frame.to_vec());
            end = last;
        }
        records.push(frames);
        if end {
            return records;
        }
    }
}
