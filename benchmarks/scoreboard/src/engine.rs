//! Engines that do as they are told: answer late, at a pace, with an error, or break off, and tell what they saw.
//!
//! Every event of a stream carries its number, so that a client sees what was lost, doubled or out of order; every
//! answer carries a digest of the request's body, so that a client sees whether its bytes arrived.

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvgate_rig::http::{framing, header};
use memchr::memmem;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::Result;

/// How a stream breaks off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Break {
    /// With a reset.
    Reset,
    /// With an end, as when a process is killed.
    Close,
    /// Nothing more comes.
    Stall,
}

/// How an engine behaves.
#[derive(Clone, Copy, Debug)]
pub struct Script {
    /// Before the head.
    pub delay: Duration,
    /// Between two events of a stream.
    pub pace: Duration,
    /// Of every answer.
    pub status: u16,
    /// Of answers that are no success, in seconds.
    pub retry_after: Option<u64>,
    /// After so many events; none of them: before the head.
    pub breaks: Option<(usize, Break)>,
    /// Notes every request in [`Seen::heard`].
    pub notes: bool,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            pace: Duration::ZERO,
            status: 200,
            retry_after: None,
            breaks: None,
            notes: false,
        }
    }
}

/// What an engine counts.
#[derive(Default)]
pub struct Seen {
    /// Requests, but for those that ask how it is.
    pub requests: AtomicUsize,
    /// Requests it works on now.
    pub running: AtomicUsize,
    /// The most at a time.
    pub peak: AtomicUsize,
    /// Connections it has now.
    pub connections: AtomicUsize,
    /// When clients left amid an answer.
    pub left: Mutex<Vec<Instant>>,
    /// When it broke a stream off.
    pub broke: Mutex<Vec<Instant>>,
    /// When requests came, and their method, target and body; only where that is asked for.
    pub heard: Mutex<Vec<(Instant, String)>>,
}

struct Shared {
    name: String,
    script: Mutex<Script>,
    seen: Seen,
}

/// An engine, until it is dropped.
pub struct Engine {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    serving: JoinSet<()>,
}

impl Engine {
    /// One of this name on a free port.
    ///
    /// # Errors
    /// There is none.
    pub async fn start(name: &str, script: Script) -> Result<Self> {
        Self::at(([127, 0, 0, 1], 0).into(), name, script).await
    }

    /// One at this address.
    ///
    /// # Errors
    /// It is taken.
    pub async fn at(address: SocketAddr, name: &str, script: Script) -> Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let shared =
            Arc::new(Shared { name: name.into(), script: Mutex::new(script), seen: Seen::default() });
        let mut engine = Self { address: listener.local_addr()?, shared, serving: JoinSet::new() };
        engine.serve(listener);
        Ok(engine)
    }

    fn serve(&mut self, listener: TcpListener) {
        let shared = self.shared.clone();
        self.serving.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let Ok((stream, _)) = listener.accept().await else { return };
                let shared = shared.clone();
                connections.spawn(async move {
                    let _counted = Counted::new(&shared.seen.connections);
                    let _ = connection(stream, &shared).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
    }

    /// Behaves like this from the next request on.
    pub fn script(&self, script: Script) {
        *self.shared.script.lock().unwrap_or_else(PoisonError::into_inner) = script;
    }

    /// What it saw.
    pub fn seen(&self) -> &Seen {
        &self.shared.seen
    }

    /// Is gone: its port refuses, its connections are closed.
    pub async fn stop(&mut self) {
        self.serving.shutdown().await;
    }

    /// Is back at its address.
    ///
    /// # Errors
    /// Somebody else took it.
    pub async fn restart(&mut self) -> Result {
        self.serve(TcpListener::bind(self.address).await?);
        Ok(())
    }
}

/// A list that grows while engines run.
pub fn times(list: &Mutex<Vec<Instant>>) -> Vec<Instant> {
    list.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// What an engine heard since it was asked last.
pub fn heard(engine: &Engine) -> Vec<(Instant, String)> {
    std::mem::take(&mut *engine.seen().heard.lock().unwrap_or_else(PoisonError::into_inner))
}

fn note(list: &Mutex<Vec<Instant>>) {
    list.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
}

/// Counts until dropped.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(counter: &'a AtomicUsize) -> Self {
        counter.fetch_add(1, Relaxed);
        Self(counter)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// A request's head, as far as it matters.
struct Asked {
    /// Asks how the engine is.
    probes: bool,
    method: String,
    target: String,
    upgrades: bool,
    closes: bool,
    body: Vec<u8>,
}

async fn connection(mut stream: TcpStream, shared: &Shared) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(4096);
    while let Some(asked) = request(&mut stream, &mut buffer).await? {
        if asked.probes {
            let text = format!("HTTP/1.1 200 OK\r\nX-Backend: {}\r\nContent-Length: 0\r\n\r\n", shared.name);
            stream.write_all(text.as_bytes()).await?;
            continue;
        }
        let script = *shared.script.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = &shared.seen;
        seen.requests.fetch_add(1, Relaxed);
        if script.notes {
            let heard = format!("{} {} {}", asked.method, asked.target, String::from_utf8_lossy(&asked.body));
            seen.heard.lock().unwrap_or_else(PoisonError::into_inner).push((Instant::now(), heard));
        }
        let running = Counted::new(&seen.running);
        seen.peak.fetch_max(seen.running.load(Relaxed), Relaxed);
        if asked.upgrades {
            return echo(stream).await;
        }
        // what comes meanwhile is the client's leaving: there is no pipelining towards engines
        let mut ahead = [0; 1];
        let (mut from, mut to) = stream.split();
        let left = tokio::select! {
            biased;
            done = answer(&mut to, shared, script, &asked) => done.map(|()| false),
            gone = from.read(&mut ahead) => gone.map(|_| true).or(Ok(true)),
        };
        drop(running);
        match left {
            Ok(true) => {
                note(&seen.left);
                return Ok(());
            }
            Ok(false) if asked.closes => return Ok(()),
            Ok(false) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
                note(&seen.broke);
                return Ok(());
            }
            Err(_) => {
                note(&seen.broke);
                return Ok(());
            }
        }
    }
    Ok(())
}

/// The next request, whole; `None` when there is none any more.
async fn request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> std::io::Result<Option<Asked>> {
    let broken = |_| std::io::Error::from(std::io::ErrorKind::InvalidData);
    let (mut asked, mut body, length) = loop {
        let mut slots = [httparse::EMPTY_HEADER; 300];
        let mut parsed = httparse::Request::new(&mut slots);
        if let httparse::Status::Complete(length) =
            parsed.parse(buffer).map_err(|_| std::io::Error::from(std::io::ErrorKind::InvalidData))?
        {
            let says = |name, word: &[u8]| {
                header(parsed.headers, name).is_some_and(|v| v.eq_ignore_ascii_case(word))
            };
            let asked = Asked {
                probes: parsed.method == Some("GET")
                    && matches!(parsed.path, Some("/health" | "/metrics" | "/probe")),
                method: parsed.method.unwrap_or_default().to_owned(),
                target: parsed.path.unwrap_or_default().to_owned(),
                upgrades: says("upgrade", b"websocket"),
                closes: says("connection", b"close"),
                body: Vec::new(),
            };
            break (asked, framing(parsed.headers, true).map_err(broken)?, length);
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    buffer.drain(..length);
    loop {
        let taken = body.feed(buffer, |piece| asked.body.extend_from_slice(piece)).map_err(broken)?;
        buffer.drain(..taken);
        if body.done() {
            return Ok(Some(asked));
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}

/// # Errors
/// `ConnectionReset`: break off with a reset; others: with an end.
async fn answer(
    to: &mut (impl AsyncWriteExt + Unpin),
    shared: &Shared,
    script: Script,
    asked: &Asked,
) -> std::io::Result<()> {
    if !script.delay.is_zero() {
        sleep(script.delay).await;
    }
    if let Some((0, how)) = script.breaks {
        return broken(how).await;
    }
    let name = &shared.name;
    let said = digest(&asked.body);
    if script.status != 200 {
        let after = script.retry_after.map(|s| format!("Retry-After: {s}\r\n")).unwrap_or_default();
        let body = r#"{"error":{"message":"asked for","type":"engine","code":"engine_said_so"}}"#;
        let text = format!(
            "HTTP/1.1 {} Engine\r\nContent-Type: application/json\r\nX-Backend: {name}\r\n{after}Content-Length: {}\r\n\r\n{body}",
            script.status,
            body.len()
        );
        return to.write_all(text.as_bytes()).await;
    }
    if memmem::find(&asked.body, br#""stream":true"#).is_none() {
        let body = format!(
            r#"{{"id":"cmpl-0","object":"text_completion","choices":[{{"index":0,"text":" word","finish_reason":"stop"}}],"system_fingerprint":"{name}"}}"#
        );
        let sent = if asked.method == "HEAD" { "" } else { body.as_str() };
        let text = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Backend: {name}\r\nX-Body: {said}\r\nContent-Length: {}\r\n\r\n{sent}",
            body.len()
        );
        return to.write_all(text.as_bytes()).await;
    }
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Backend: {name}\r\nX-Body: {said}\r\nTransfer-Encoding: chunked\r\n\r\n"
    );
    to.write_all(head.as_bytes()).await?;
    let mut next = tokio::time::interval(script.pace.max(Duration::from_micros(1)));
    for number in 0..tokens(&asked.body) {
        if let Some((after, how)) = script.breaks
            && number >= after
        {
            return broken(how).await;
        }
        if !script.pace.is_zero() {
            next.tick().await;
        }
        to.write_all(&chunk(&format!(
            r#"data: {{"seq":{number},"choices":[{{"index":0,"text":" word","finish_reason":null}}]}}"#
        )))
        .await?;
    }
    let last = [chunk("data: [DONE]"), b"0\r\n\r\n".to_vec()].concat();
    to.write_all(&last).await
}

async fn broken(how: Break) -> std::io::Result<()> {
    match how {
        Break::Stall => std::future::pending().await,
        // what was written before is on its way: a reset takes what is not
        Break::Reset => {
            sleep(Duration::from_millis(5)).await;
            Err(std::io::ErrorKind::ConnectionReset.into())
        }
        Break::Close => Err(std::io::ErrorKind::ConnectionAborted.into()),
    }
}

/// A WebSocket, as far as a gateway sees it: whatever comes goes back.
async fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    let head = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
    stream.write_all(head).await?;
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece).await? {
            0 => return Ok(()),
            read => stream.write_all(piece.get(..read).unwrap_or_default()).await?,
        }
    }
}

fn chunk(event: &str) -> Vec<u8> {
    format!("{:x}\r\n{event}\n\n\r\n", event.len() + 2).into_bytes()
}

/// How many tokens the request asks for.
fn tokens(body: &[u8]) -> usize {
    const NAME: &[u8] = br#""max_tokens":"#;
    let digits = memmem::find(body, NAME).and_then(|at| body.get(at + NAME.len()..)).unwrap_or_default();
    let digits = digits.iter().take_while(|b| b.is_ascii_digit()).take(6);
    digits.fold(0, |n, b| n * 10 + usize::from(b - b'0')).max(1)
}

/// Tells bodies apart: their length and a hash.
pub fn digest(body: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    hasher.write(body);
    format!("{}-{:016x}", body.len(), hasher.finish())
}

/// The numbers of the events of a stream, in order, and whether it ended with its mark.
pub fn numbers(body: &[u8]) -> Vec<usize> {
    const NAME: &[u8] = br#"data: {"seq":"#;
    memmem::find_iter(body, NAME)
        .map(|at| {
            let digits = body.get(at + NAME.len()..).unwrap_or_default();
            digits.iter().take_while(|b| b.is_ascii_digit()).fold(0, |n, b| n * 10 + usize::from(b - b'0'))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Client, completion, once};

    #[tokio::test]
    async fn it_answers_streams_and_breaks_off_as_told() {
        let engine = Engine::start("a", Script::default()).await.unwrap();
        let wire = completion("m", "p", true, 3);
        let whole = once(engine.address, &wire).await;
        assert!(whole.kept() && whole.status == 200, "{whole:?}");
        assert_eq!(numbers(&whole.body), [0, 1, 2]);
        for how in [Break::Reset, Break::Close] {
            engine.script(Script { breaks: Some((1, how)), ..Script::default() });
            let cut = once(engine.address, &wire).await;
            assert!(!cut.whole && numbers(&cut.body) == [0], "{cut:?}");
        }
        engine.script(Script { status: 429, retry_after: Some(7), ..Script::default() });
        let busy = once(engine.address, &wire).await;
        assert_eq!((busy.status, busy.header("retry-after")), (429, Some("7")));
        assert_eq!(times(&engine.seen().broke).len(), 2);
    }

    #[tokio::test]
    async fn it_sees_who_leaves_and_tells_what_it_read() {
        let engine =
            Engine::start("a", Script { delay: Duration::from_secs(60), ..Script::default() }).await.unwrap();
        let mut client = Client::connect(engine.address).await.unwrap();
        client.send(&completion("m", "p", false, 1)).await.unwrap();
        while engine.seen().running.load(Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        drop(client);
        while times(&engine.seen().left).is_empty() {
            tokio::task::yield_now().await;
        }
        engine.script(Script::default());
        let body = br#"{"model":"m"}"#;
        let answer = once(engine.address, &crate::client::post("/v1/completions", "", body)).await;
        assert_eq!(answer.header("x-body"), Some(digest(body).as_str()));
    }
}
