//! Chaos for minutes: load of every kind, faults of every kind, reloads; and what must hold through all of it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::Result;
use crate::board::Board;
use crate::client::{Answer, Client, completion, get, post};
use crate::engine::{Engine, Script, numbers};
use crate::gateway::{Gateway, Setup, free};
use crate::proxy::{Plan, Proxy, mixed};

/// Between two reloads.
const RELOAD: Duration = Duration::from_secs(10);
/// Between two engines that bounce.
const BOUNCE: Duration = Duration::from_secs(20);
/// What a fault proxy does, of its connections.
const FAULTY: u64 = 10;
/// Clients at a time, of each kind.
const CLIENTS: u64 = 4;

/// What clients do.
const KINDS: &[&str] = &["short", "stream", "pair", "websocket", "leaving", "odd", "probe"];

/// What became of the requests.
#[derive(Default)]
struct Tally {
    sent: AtomicU64,
    lost: Mutex<Vec<String>>,
    ends: Mutex<BTreeMap<String, u64>>,
    disordered: AtomicU64,
    cut: AtomicU64,
    /// WebSockets that were opened, and those of them on which what was sent came back.
    opened: AtomicU64,
    echoed: AtomicU64,
}

/// The gateway's codes for what an engine did: of requests that count as `engine_failed`.
const ENGINE: &[&str] = &[
    "engine_error",
    "engine_timeout",
    "engine_unreachable",
    "pd_pool_unavailable",
    "pd_prefill_failed",
    "pd_prefill_timeout",
    "pd_decode_backend_died",
    "pd_decode_stream_timeout",
    "pd_decode_timeout",
];

impl Tally {
    fn add(&self, kind: &str, answer: &Answer) {
        let end = match answer.error() {
            Some(code) if answer.whole => format!("{kind} {} {code}", answer.status),
            _ if answer.kept() => format!("{kind} {}", answer.status),
            // an answer of a told length that its engine did not finish: the client sees that it is cut, or closed
            _ if !answer.streams() && !answer.whole && (200..300).contains(&answer.status) => {
                self.cut.fetch_add(1, Relaxed);
                format!("{kind} cut")
            }
            _ => {
                let body: String = String::from_utf8_lossy(&answer.body).chars().rev().take(80).collect();
                let body: String = body.chars().rev().collect();
                let text = format!("{kind}: status {}, whole {}, …{body:?}", answer.status, answer.whole);
                self.lost.lock().unwrap_or_else(PoisonError::into_inner).push(text);
                format!("{kind} lost")
            }
        };
        *self.ends.lock().unwrap_or_else(PoisonError::into_inner).entry(end).or_default() += 1;
        let came = numbers(&answer.body);
        if came.iter().enumerate().any(|(wanted, number)| wanted != *number) {
            self.disordered.fetch_add(1, Relaxed);
        }
    }

    fn sent(&self) {
        self.sent.fetch_add(1, Relaxed);
    }
}

/// An engine of a pair: `kvgate sim`.
struct Sim(Child);

impl Drop for Sim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn sim(kvgate: &Path, address: SocketAddr, role: &str) -> Result<Sim> {
    let child = Command::new(kvgate)
        .args([
            "sim",
            "--model",
            "tiny-words",
            "--events",
            "false",
            "--role",
            role,
            "--address",
            &address.to_string(),
        ])
        .arg("--tokenizers")
        .arg(kvgate_tests::tokenizers())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    Ok(Sim(child))
}

/// The gateway and everything it is set up with.
struct Scene {
    gateway: Gateway,
    engines: Vec<Engine>,
    proxies: Vec<Proxy>,
    pair: Vec<(SocketAddr, &'static str)>,
    _sims: Vec<Sim>,
}

impl Scene {
    async fn new(kvgate: &Path, seed: u64) -> Result<Self> {
        let (mut engines, mut proxies) = (Vec::new(), Vec::new());
        for number in 0..8 {
            let script = Script { pace: Duration::from_millis(5), ..Script::default() };
            let engine = Engine::start(&format!("e{number}"), script).await?;
            let plan = Plan::Random { seed: seed + number, percent: FAULTY };
            let at = SocketAddr::from(([127, 0, 0, 1], 0));
            proxies.push(Proxy::start(at, engine.address, plan).await?);
            engines.push(engine);
        }
        let (mut pair, mut sims) = (Vec::new(), Vec::new());
        for role in ["prefill", "prefill", "decode", "decode"] {
            let address = free()?;
            sims.push(sim(kvgate, address, role)?);
            let start = Instant::now();
            while tokio::net::TcpStream::connect(address).await.is_err() {
                if start.elapsed() > Duration::from_secs(30) {
                    return Err("a simulated engine does not start".into());
                }
                sleep(Duration::from_millis(20)).await;
            }
            pair.push((address, role));
        }
        let setup = Setup::new(kvgate)?;
        rules(&setup, &proxies, &pair, 0)?;
        Ok(Self { gateway: setup.start().await?, engines, proxies, pair, _sims: sims })
    }
}

/// Writes the rules; `turn` makes a difference.
fn rules(setup: &Setup, proxies: &[Proxy], pair: &[(SocketAddr, &str)], turn: u64) -> Result {
    let mut pool = format!(
        "name = \"pool\"\ntiers = [\"admission\", \"session\", \"radix-trie\", \"least-connections\"]\n\
         [match]\nmodels = [\"pool\"]\n[retry]\nattempts = {}\n[timeouts]\nidle = \"1s\"\nfirst_byte = \"5s\"\n\
         [tier.admission]\nmax_in_flight = 16\nqueue_depth = 32\nqueue_wait = \"2s\"\n",
        3 + turn % 2
    );
    for proxy in proxies {
        pool.push_str(&format!("[[endpoint]]\naddress = \"{}\"\n", proxy.address));
    }
    let mut pairs = format!(
        "name = \"pairs\"\nshape = \"prefill-decode\"\n[match]\nmodels = [\"tiny-words\"]\n[events]\nport = 0\n\
         [retry]\nattempts = {}\n[tier.session]\nttl = \"{}s\"\n",
        3 + turn % 2,
        100 + turn % 2
    );
    for (address, role) in pair {
        pairs.push_str(&format!("[[endpoint]]\naddress = \"{address}\"\nrole = \"{role}\"\n"));
    }
    setup.rule("pool", &pool)?;
    setup.rule("pairs", &pairs)
}

/// What drifts: memory in bytes and open descriptors, at rest.
async fn rest(gateway: &Gateway, board: &mut Board, accepted: Option<u64>) -> Result<(f64, f64)> {
    gateway.settle(board, accepted).await;
    // what is kept of connections and memory by design is let go by now
    sleep(Duration::from_secs(2)).await;
    Ok((gateway.memory("VmRSS"), gateway.descriptors()))
}

/// Runs for so long and reports to the board.
///
/// # Errors
/// Something cannot be started.
pub async fn run(kvgate: &Path, time: Duration, board: &mut Board) -> Result {
    let seed = 5;
    let mut scene = Scene::new(kvgate, seed).await?;
    let tally = Arc::new(Tally::default());
    // as much as a run has at a time, so that what grows once has grown
    let warm = time.div_f64(5.0).clamp(Duration::from_secs(3), Duration::from_secs(60));
    act(&mut scene, warm, seed, &tally).await?;
    let baseline = rest(&scene.gateway, board, Some(tally.sent.load(Relaxed))).await?;
    act(&mut scene, time, seed + 1, &tally).await?;
    let end = rest(&scene.gateway, board, Some(tally.sent.load(Relaxed))).await?;
    for (kind, count) in tally.ends.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        eprintln!("{count:>8} {kind}");
    }
    let lost = tally.lost.lock().unwrap_or_else(PoisonError::into_inner).clone();
    lost.iter().take(20).for_each(|text| eprintln!("lost: {text}"));
    let harmed: usize = scene.proxies.iter().map(Proxy::harmed).sum();
    board.least("requests", tally.sent.load(Relaxed) as f64, "", 100.0);
    board.least("connections to engines that were harmed", harmed as f64, "", 10.0);
    board.exactly("requests lost", lost.len() as f64, 0.0);
    board.exactly(
        "streams with events lost, doubled or out of order",
        tally.disordered.load(Relaxed) as f64,
        0.0,
    );
    // each is one that the gateway counts as failed by its engine, and could not tell of
    let metrics = scene.gateway.metrics().await;
    let failed = metrics.sum("kvgate_requests_total", &["outcome=\"engine_failed\""]);
    let told = |code: &&str| metrics.sum("kvgate_errors_total", &[&format!("code=\"{code}\"")]);
    // some that were told of ended otherwise: their client had left, say
    let untold = (failed - ENGINE.iter().map(told).sum::<f64>()).max(0.0);
    let cut = tally.cut.load(Relaxed) as f64;
    board.most("answers cut by their engine amid a told length, as the client sees", cut, "", untold);
    let (opened, echoed) = (tally.opened.load(Relaxed) as f64, tally.echoed.load(Relaxed) as f64);
    // an engine or a proxy that breaks ends one: a tunnel has no way to say so
    board.least("WebSockets on which what was sent came back", echoed / opened * 100.0, "%", 90.0);
    // a short run has not had yet at a time what it will have
    let drift = if time >= Duration::from_secs(300) { 105.0 } else { 125.0 };
    board.most("memory, of what it was after the first fifth", end.0 / baseline.0 * 100.0, "%", drift);
    board.within("descriptors, more than then", end.1 - baseline.1, "", -1000.0, 5.0);
    board.exactly("ready at the end", f64::from(scene.gateway.page("/readyz").await.status), 200.0);
    Ok(())
}

/// Load, faults and reloads for so long, then quiet.
async fn act(scene: &mut Scene, time: Duration, seed: u64, tally: &Arc<Tally>) -> Result {
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for (number, kind) in (0..CLIENTS).flat_map(|n| KINDS.iter().map(move |kind| (n, *kind))) {
        let (address, stop, tally) = (scene.gateway.address, stop.clone(), tally.clone());
        let seed = mixed(seed ^ mixed(number) ^ kind.len() as u64);
        clients.spawn(async move { client(kind, address, seed, &stop, &tally).await });
    }
    let start = Instant::now();
    let (mut reload, mut bounce, mut turn) = (RELOAD.min(time / 4), BOUNCE.min(time / 3), 0u64);
    let (reload_every, bounce_every) = (reload, bounce);
    while start.elapsed() < time {
        sleep(Duration::from_millis(100)).await;
        if start.elapsed() >= reload {
            reload += reload_every;
            turn += 1;
            rules(&scene.gateway.setup, &scene.proxies, &scene.pair, turn)?;
        }
        if start.elapsed() >= bounce {
            bounce += bounce_every;
            let at = usize::try_from(turn)? % scene.engines.len();
            if let Some(engine) = scene.engines.get_mut(at) {
                engine.stop().await;
                sleep(Duration::from_millis(500)).await;
                engine.restart().await?;
            }
        }
    }
    stop.store(true, Relaxed);
    clients.join_all().await;
    Ok(())
}

/// A client that asks again and again, on connections that it keeps where it may.
async fn client(kind: &'static str, address: SocketAddr, mut draw: u64, stop: &AtomicBool, tally: &Tally) {
    let odd = kvgate_tests::json_cases();
    let mut open = None::<Client>;
    while !stop.load(Relaxed) {
        draw = mixed(draw);
        let prompt = format!("one two three {}", draw % 100);
        let tokens = usize::try_from(draw >> 8).unwrap_or(0) % 60 + 1;
        let wire = match kind {
            "short" => completion("pool", &prompt, false, tokens),
            "stream" | "leaving" => completion("pool", &prompt, true, tokens + 20),
            "pair" => completion("tiny-words", &prompt, draw.is_multiple_of(2), 5),
            "odd" => {
                let case = usize::try_from(draw).unwrap_or(0) % odd.len();
                post("/v1/completions", "X-Model: pool\r\n", odd.get(case).map_or(&[], |case| &case.text))
            }
            "websocket" => b"GET /v1/realtime HTTP/1.1\r\nHost: g\r\nX-Model: pool\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".to_vec(),
            _ => get("/v1/models"),
        };
        match kind {
            "leaving" => leave(address, &wire, draw, tally).await,
            "websocket" => websocket(address, &wire, tally).await,
            _ => {
                let answer = ask(&mut open, address, &wire, tally).await;
                tally.add(kind, &answer);
            }
        }
        sleep(Duration::from_millis(draw >> 16 & 31)).await;
    }
}

async fn ask(open: &mut Option<Client>, address: SocketAddr, wire: &[u8], tally: &Tally) -> Answer {
    tally.sent();
    crate::load::send(open, address, wire).await
}

/// Leaves at any time: while it sends, while it waits, or while it is answered.
async fn leave(address: SocketAddr, wire: &[u8], draw: u64, tally: &Tally) {
    let Ok(mut client) = Client::connect(address).await else {
        return tally.add("leaving", &Answer::default());
    };
    // no request before its head is whole
    let head = memchr::memmem::find(wire, b"\r\n\r\n").map_or(wire.len(), |at| at + 4);
    let part = head + usize::try_from(draw >> 24).unwrap_or(0) % (wire.len() - head + 1);
    let part = if draw.is_multiple_of(3) { part } else { wire.len() };
    if client.send(wire.get(..part).unwrap_or(wire)).await.is_ok() {
        tally.sent();
        sleep(Duration::from_millis(20 + (draw >> 40) % 200)).await;
    }
}

/// Sends something and wants it back.
async fn websocket(address: SocketAddr, wire: &[u8], tally: &Tally) {
    let Ok(mut client) = Client::connect(address).await else {
        return tally.add("websocket", &Answer::default());
    };
    tally.sent();
    let answer = client.ask(wire).await;
    if answer.status == 101 {
        let mut stream = client.into_stream();
        let mut back = [0; 5];
        tally.opened.fetch_add(1, Relaxed);
        if stream.write_all(b"hello").await.is_ok() {
            let read = tokio::time::timeout(Duration::from_secs(3), stream.read_exact(&mut back)).await;
            let came = matches!(read, Ok(Ok(_))) && back == *b"hello";
            tally.echoed.fetch_add(u64::from(came), Relaxed);
        }
    }
    tally.add("websocket", &answer);
}
