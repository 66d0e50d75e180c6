//! Engines, publishers, clients and gateways on loopback.

mod gateway;
mod http;
mod metrics;
mod publisher;
mod rule;

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use kvgate_prompt::{Model, State, Tokenizers, TokenizersConfig};
use kvgate_sim::{Served, Sim, SimConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub use gateway::{Gateway, Process, Setup};
pub use http::{Answer, Connection, Request, fetch};
pub use metrics::Metrics;
pub use publisher::{Publisher, Replay, batch, cleared, removed, stored};
pub use rule::Rule;

/// The model of most tests: its tokenizer loads in a moment.
pub const MODEL: &str = "tiny-words";
/// Tokens per block of the simulated engines.
pub const BLOCK: usize = 16;
/// Ids that a prompt may hold.
const VOCABULARY: u32 = 1200;
/// How long anything may take that a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The address of this process's servers: no other process takes a port of it while one is closed for a moment.
pub fn host() -> Ipv4Addr {
    if !cfg!(target_os = "linux") {
        return Ipv4Addr::LOCALHOST;
    }
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 1 + high, middle, low)
}

/// A port that nobody listens on, and that is given out once.
pub fn free_port() -> SocketAddr {
    static GIVEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let address = TcpListener::bind((host(), 0)).unwrap().local_addr().unwrap();
        if given.get_or_insert_default().insert(address.port()) {
            return address;
        }
    }
}

/// An engine that counts the requests it reads, and answers each by how many there were before; `None` breaks the
/// connection.
pub async fn counting(
    answer: impl Fn(usize) -> Option<&'static str> + Send + Sync + 'static,
) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = tokio::net::TcpListener::bind((host(), 0)).await.unwrap();
    let (address, read, answer) =
        (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)), Arc::new(answer));
    let requests = read.clone();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (requests, answer) = (requests.clone(), answer.clone());
            tokio::spawn(async move {
                loop {
                    let mut request = Vec::new();
                    while !is_whole(&request) {
                        if !stream.read_buf(&mut request).await.is_ok_and(|n| n > 0) {
                            return;
                        }
                    }
                    let Some(answer) = answer(requests.fetch_add(1, Ordering::Relaxed)) else { return };
                    if stream.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (address, read)
}

/// A request without a body, or one whose body is a JSON object.
fn is_whole(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request).to_lowercase();
    text.ends_with('}') || text.ends_with("\r\n\r\n") && !text.contains("\r\ncontent-")
}

/// A staged tokenizer, loaded once per process.
pub fn model(name: &str) -> Arc<Model> {
    static STORE: OnceLock<Tokenizers> = OnceLock::new();
    let store =
        STORE.get_or_init(|| Tokenizers::new(kvgate_tests::tokenizers(), TokenizersConfig::default()));
    match store.load(name) {
        State::Ready(model) => model,
        other => panic!("{name}: {other:?}"),
    }
}

/// An engine as `change` has it.
pub async fn engine_with(change: impl FnOnce(&mut SimConfig)) -> Sim {
    let mut config = SimConfig {
        address: (host(), 0).into(),
        models: vec![MODEL.into()],
        tokenizers: kvgate_tests::tokenizers(),
        ..SimConfig::default()
    };
    change(&mut config);
    Sim::with_model(config, model(MODEL)).await.unwrap()
}

/// An engine.
pub async fn engine() -> Sim {
    engine_with(|_| {}).await
}

/// Some engines.
pub async fn engines(count: usize) -> Vec<Sim> {
    let mut engines = Vec::new();
    for _ in 0..count {
        engines.push(engine().await);
    }
    engines
}

/// An engine that publishes nothing.
pub async fn silent_engine() -> Sim {
    engine_with(|config| config.events = false).await
}

/// A prompt of token ids; those of different `seed`s, below 1200, have not one block in common.
pub fn prompt(seed: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|at| (seed * 131 + at * 7) % VOCABULARY).collect()
}

/// The body of a completions request for a prompt of ids.
pub fn completion(model: &str, prompt: &[u32]) -> serde_json::Value {
    serde_json::json!({"model": model, "prompt": prompt, "max_tokens": 1})
}

/// What an engine knows of the request with this id.
pub fn served(engine: &Sim, id: &str) -> Option<Served> {
    engine.log().into_iter().find(|served| served.request_id.as_deref() == Some(id))
}

/// Reads a head, and nothing behind it.
pub async fn reads_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = stream.read_u8().await;
        head.push(byte.unwrap_or_else(|e| panic!("{e} after {}", String::from_utf8_lossy(&head))));
    }
    String::from_utf8(head).unwrap()
}

/// Goes over to another protocol, as an engine does that was asked to. Returns how it was.
pub async fn switches(stream: &mut TcpStream) -> String {
    let head = reads_head(stream).await;
    // an engine needs a moment, and the proxy library relies on it
    tokio::time::sleep(Duration::from_millis(50)).await;
    let switch = "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n";
    stream.write_all(switch.as_bytes()).await.unwrap();
    head
}

/// Waits until something holds.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let end = tokio::time::Instant::now() + PATIENCE;
    while !holds().await {
        assert!(tokio::time::Instant::now() < end, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
