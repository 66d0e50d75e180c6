//! A fake engine: a publisher and a replay socket that do as they are told, and the events it speaks of.

use std::{
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::BytesMut;
use kvgate_feed::plane::{Plane, PlaneConfig, Source};
use kvgate_feed::zmtp::{Backoff, Endpoint};
use kvgate_kv::hash::Namespace;
use kvgate_kv::mirror::{MirrorConfig, View};
use kvgate_kv::own::OwnHasher;
use kvgate_kv::window;
use tokio::{io::AsyncWriteExt, net::TcpStream, sync::mpsc};

use super::{Peer, for_ever, frame, message, ms, patient, peer, shake};

pub const BLOCK: u32 = 16;

/// How replay answers are framed: with the topic since vLLM 0.26, without before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    Old,
    New,
}

/// What the replay socket does when it is asked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Answers {
    All,
    /// So many, then nothing more.
    Stall(usize),
    /// Hangs up.
    Close,
}

#[derive(Default)]
struct Shared {
    log: Vec<(u64, Vec<u8>)>,
    subscribers: Vec<mpsc::UnboundedSender<BytesMut>>,
    asked: Vec<u64>,
}

pub struct Engine {
    shared: Arc<Mutex<Shared>>,
    answers: Arc<Mutex<Answers>>,
    publisher: Peer,
    router: Peer,
}

impl Engine {
    pub async fn start(form: Form) -> Engine {
        let (shared, answers) = (Arc::new(Mutex::new(Shared::default())), Arc::new(Mutex::new(Answers::All)));
        let publisher = peer({
            let shared = shared.clone();
            move |_, s| serve_live(s, shared.clone())
        });
        let router = peer({
            let (shared, answers) = (shared.clone(), answers.clone());
            move |_, s| serve_replay(s, form, shared.clone(), *answers.lock().unwrap())
        });
        Engine { publisher: publisher.await, router: router.await, shared, answers }
    }

    pub fn events(&self) -> Endpoint {
        self.publisher.to.clone()
    }

    pub fn replay(&self) -> Endpoint {
        self.router.to.clone()
    }

    pub fn source(&self, replay: bool) -> Source {
        Source { replay: replay.then(|| self.replay()), ..source(self.events()) }
    }

    /// Into the replay buffer, without anybody being told.
    pub fn record(&self, seq: u64, payload: Vec<u8>) {
        let log = &mut self.shared.lock().unwrap().log;
        if log.len() >= 1000 {
            log.remove(0);
        }
        log.push((seq, payload));
    }

    /// To the subscribers, and into the replay buffer.
    pub fn publish(&self, seq: u64, payload: Vec<u8>) {
        self.send(&message(&[b"", &seq.to_be_bytes(), &payload]));
        self.record(seq, payload);
    }

    /// To the subscribers, as it is.
    pub fn send(&self, bytes: &BytesMut) {
        let subscribers = &self.shared.lock().unwrap().subscribers;
        subscribers.iter().for_each(|s| drop(s.send(bytes.clone())));
    }

    /// Another process in its place: nothing is remembered, connections are gone.
    pub fn restart(&self) {
        self.shared.lock().unwrap().log.clear();
        self.cut();
    }

    /// Ends the live connections.
    pub fn cut(&self) {
        self.shared.lock().unwrap().subscribers.clear();
    }

    pub fn set_answers(&self, answers: Answers) {
        *self.answers.lock().unwrap() = answers;
    }

    pub fn asked(&self) -> Vec<u64> {
        self.shared.lock().unwrap().asked.clone()
    }

    pub async fn subscribed(&self) {
        until_true("subscribed", || !self.shared.lock().unwrap().subscribers.is_empty()).await;
    }
}

async fn serve_live(mut s: TcpStream, shared: Arc<Mutex<Shared>>) -> io::Result<()> {
    s.set_nodelay(true)?;
    shake(&mut s, 1, "PUB").await?;
    let (tell, mut told) = mpsc::unbounded_channel();
    shared.lock().unwrap().subscribers.push(tell);
    let (mut reads, mut writes) = s.into_split();
    loop {
        tokio::select! {
            biased;
            out = told.recv() => match out {
                Some(out) => writes.write_all(&out).await?,
                None => return Ok(()),
            },
            got = frame_of(&mut reads) => {
                if got?.1.starts_with(b"\x04PING") {
                    writes.write_all(b"\x04\x05\x04PONG").await?;
                }
            }
        }
    }
}

/// Not cancel-safe, but PINGs are the only frames, small ones, and rare.
async fn frame_of(s: &mut tokio::net::tcp::OwnedReadHalf) -> io::Result<(u8, Vec<u8>)> {
    use tokio::io::AsyncReadExt;
    let (flags, size) = (s.read_u8().await?, s.read_u8().await?);
    let mut body = vec![0; size as usize];
    s.read_exact(&mut body).await?;
    Ok((flags, body))
}

async fn serve_replay(
    mut s: TcpStream,
    form: Form,
    shared: Arc<Mutex<Shared>>,
    answers: Answers,
) -> io::Result<()> {
    shake(&mut s, 1, "ROUTER").await?;
    frame(&mut s).await?;
    let start = u64::from_be_bytes(frame(&mut s).await?.1.try_into().unwrap());
    let mut log = {
        let mut shared = shared.lock().unwrap();
        shared.asked.push(start);
        shared.log.clone()
    };
    log.retain(|(seq, _)| *seq >= start);
    let mut out = BytesMut::new();
    let mut put = |seq: u64, payload: &[u8]| match form {
        Form::Old => out.extend(message(&[b"", &seq.to_be_bytes(), payload])),
        Form::New => out.extend(message(&[b"", b"", &seq.to_be_bytes(), payload])),
    };
    let most = match answers {
        Answers::All => usize::MAX,
        Answers::Stall(n) => n,
        Answers::Close => return Ok(()),
    };
    log.iter().take(most).for_each(|(seq, payload)| put(*seq, payload));
    if answers == Answers::All {
        put(u64::MAX, b"");
    }
    s.write_all(&out).await?;
    for_ever().await
}

pub fn source(events: Endpoint) -> Source {
    let mirror = MirrorConfig {
        own: true,
        published: false,
        engine_blocks: None,
        max_blocks: 1_000_000,
        max_ranks: 8,
    };
    Source { name: events.to_string(), events, replay: None, topic: Default::default(), mirror }
}

/// A plane that reconnects at once and has patience with replays, however busy the machine.
pub fn config() -> PlaneConfig {
    PlaneConfig {
        window: window::Config { hold: ms(20_000), hold_most: ms(20_000), ..window::Config::default() },
        connection: patient(),
        backoff: Backoff { first: ms(2), max: ms(20) },
        hasher: OwnHasher::with_key(7),
        ..PlaneConfig::default()
    }
}

/// Waits until `condition` holds, for longer than any machine should need.
pub async fn until_true(what: &str, condition: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(tokio::time::Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(ms(5)).await;
    }
}

/// The tokens of a prompt of one block, different for each `n`.
fn tokens(n: u64) -> Vec<u32> {
    (0..BLOCK).map(|i| i + 1000 * n as u32).collect()
}

/// Whether the plane credits the engine with block `n`, which [`stored`] speaks of.
pub fn holds(plane: &Plane, key: u64, n: u64) -> bool {
    let chain = OwnHasher::with_key(7).chain(&tokens(n), BLOCK as usize, &Namespace::default());
    let mut found = Vec::new();
    let holdings = plane.holdings();
    holdings.inventory().overlap(&chain, false, &mut found);
    let caches = holdings.caches();
    let own = caches.of(key).iter().filter(|cache| cache.view == View::Own);
    own.into_iter().any(|cache| found.iter().any(|(id, _)| *id == cache.id))
}

/// Whether what is held of the engine is credited at all.
pub fn trusted(plane: &Plane, key: u64) -> bool {
    !plane.holdings().caches().trusted(key).is_empty()
}

/// Those of the first `n` blocks that the engine is credited with.
pub fn held(plane: &Plane, key: u64, n: u64) -> Vec<u64> {
    (0..n).filter(|n| holds(plane, key, *n)).collect()
}

/// A batch that stores block `n`, the first of a prompt of its own.
pub fn stored(n: u64) -> Vec<u8> {
    batch(|out| {
        text_map(out, 5);
        text(out, "type", "BlockStored");
        hashes(out, n);
        rmp::encode::write_str(out, "parent_block_hash").unwrap();
        rmp::encode::write_nil(out).unwrap();
        rmp::encode::write_str(out, "token_ids").unwrap();
        rmp::encode::write_array_len(out, BLOCK).unwrap();
        tokens(n).iter().for_each(|t| rmp::encode::write_u32(out, *t).unwrap());
        rmp::encode::write_str(out, "block_size").unwrap();
        rmp::encode::write_u32(out, BLOCK).unwrap();
    })
}

/// A batch that removes block `n`.
pub fn removed(n: u64) -> Vec<u8> {
    batch(|out| {
        text_map(out, 2);
        text(out, "type", "BlockRemoved");
        hashes(out, n);
    })
}

/// A batch that says that nothing is held.
pub fn cleared() -> Vec<u8> {
    batch(|out| {
        text_map(out, 1);
        text(out, "type", "AllBlocksCleared");
    })
}

fn batch(event: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    rmp::encode::write_array_len(&mut out, 3).unwrap();
    rmp::encode::write_f64(&mut out, 1.5).unwrap();
    rmp::encode::write_array_len(&mut out, 1).unwrap();
    event(&mut out);
    rmp::encode::write_u32(&mut out, 0).unwrap();
    out
}

fn text_map(out: &mut Vec<u8>, pairs: u32) {
    rmp::encode::write_map_len(out, pairs).unwrap();
}

fn text(out: &mut Vec<u8>, key: &str, value: &str) {
    rmp::encode::write_str(out, key).unwrap();
    rmp::encode::write_str(out, value).unwrap();
}

fn hashes(out: &mut Vec<u8>, n: u64) {
    rmp::encode::write_str(out, "block_hashes").unwrap();
    rmp::encode::write_array_len(out, 1).unwrap();
    rmp::encode::write_uint(out, 70_000 + n).unwrap();
}
