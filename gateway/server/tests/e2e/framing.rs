//! HTTP/1 as it may come, shown to the whole gateway before an engine that notes every byte.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[path = "../../../edge/tests/cases/mod.rs"]
#[allow(dead_code)]
mod cases;

use self::cases::play::{Client, play};
use self::cases::{all, splits};
use crate::support::{Rule, Setup, host, until};

/// An engine that takes nothing but requests whose body has a length, and answers each "ok".
struct Recorder {
    address: SocketAddr,
    /// Method, target and body.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Recorder {
    async fn start() -> Self {
        let listener = TcpListener::bind((host(), 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let log = asked.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(record(stream, log.clone()));
            }
        });
        Self { address, asked }
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }
}

async fn record(mut stream: TcpStream, log: Arc<Mutex<Vec<String>>>) {
    let (mut bytes, mut piece) = (Vec::new(), vec![0; 65_536]);
    while let Ok(n @ 1..) = stream.read(&mut piece).await {
        bytes.extend_from_slice(&piece[..n]);
        while let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4) {
            let Some((request, length)) = understand(&bytes[..end]) else {
                // the test finds it in the log and fails
                log.lock().unwrap().push(format!("ambiguous: {}", bytes.escape_ascii()));
                return;
            };
            if bytes.len() < end + length {
                break;
            }
            let body = String::from_utf8_lossy(&bytes[end..end + length]).into_owned();
            log.lock().unwrap().push(format!("{request} {body}"));
            bytes.drain(..end + length);
            let body = if request.starts_with("HEAD ") { "" } else { "ok" };
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{body}");
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    }
    if !bytes.is_empty() {
        log.lock().unwrap().push(format!("left over: {}", bytes.escape_ascii()));
    }
}

/// Method and target, and the length of the body; `None` if anybody could be of another mind.
fn understand(head: &[u8]) -> Option<(String, usize)> {
    let clean = |byte: &u8| matches!(byte, b'\t' | b'\r' | b'\n' | b' '..=b'~' | 0x80..);
    let head = head.iter().all(clean).then(|| String::from_utf8_lossy(head).into_owned())?;
    let mut lines = head.trim_end().split("\r\n");
    let line = lines.next()?.strip_suffix(" HTTP/1.1")?;
    let mut fields = BTreeMap::new();
    for (name, value) in lines.map(|line| line.split_once(':').unwrap_or_default()) {
        let clear = !name.is_empty() && !name.contains([' ', '\t', '\r', '\n', '_']);
        let clear = clear && !value.contains(['\r', '\n']);
        if !clear {
            return None;
        }
        fields.entry(name.to_ascii_lowercase()).or_insert_with(Vec::new).push(value.trim().to_owned());
    }
    let none = Vec::new();
    let hosts = fields.get("host")?;
    let lengths = fields.get("content-length").unwrap_or(&none);
    if fields.contains_key("transfer-encoding") || hosts.len() != 1 || lengths.len() > 1 {
        return None;
    }
    let length = lengths.first().map_or(Ok(0), |length| length.parse()).ok()?;
    (line.split(' ').count() == 2).then(|| (line.to_owned(), length))
}

/// None is passed on that anybody could take for another, none twice, and what is malformed is refused.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_gets_what_is_clear_and_nothing_else() {
    let engine = Recorder::start().await;
    let rule = Rule::new("any", &["round-robin"]).endpoint(engine.address, "");
    let gateway = Setup::new(&[rule]).start().await;
    let (mut shown, mut refused) = (0, 0);
    for case in all() {
        for cuts in splits(&case.bytes) {
            play(gateway.address, &case, &cuts).await;
            assert_eq!(engine.take(), case.passes, "{}, cut at {cuts:?}", case.name);
            shown += 1;
            refused += usize::from(case.then.is_some());
        }
    }
    assert!(shown > 900, "{shown}");
    let mut counted = 0.0;
    for code in ["bad_request", "method_not_allowed", "uri_too_long", "head_too_large"] {
        counted += gateway.metric("kvgate_errors_total", &["service=\"\"", &format!("code={code:?}")]).await;
    }
    assert_eq!(counted, refused as f64);
    gateway.until_idle().await;
    gateway.until_metric("kvgate_connections_open", &["listener=\"edge\""], 0.0).await;
    let accepted = gateway.metric("kvgate_connections_accepted_total", &["listener=\"edge\""]).await;
    assert_eq!(accepted, f64::from(shown));
}

/// What announces more than it may have is refused before any of it is read.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_too_long_by_its_length_is_not_read() {
    let engine = Recorder::start().await;
    let rule =
        Rule::new("any", &["round-robin"]).endpoint(engine.address, "").table("limits", "body = \"1MiB\"");
    let gateway = Setup::new(&[rule]).start().await;
    let mut client = Client::open(gateway.address).await;
    client.send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1048577\r\n\r\n").await;
    let answer = client.answer(false).await.unwrap();
    assert!(answer.status == 413 && answer.body.contains("\"body_too_large\""), "{answer:?}");
    assert!(client.ended().await);
    // and by its chunks as soon as there are too many
    let mut client = Client::open(gateway.address).await;
    client.send("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    let chunk = format!("10000\r\n{}\r\n", "a".repeat(0x10000));
    for _ in 0..17 {
        client.send(&chunk).await;
    }
    let answer = client.answer(false).await.unwrap();
    assert!(answer.status == 413 && answer.body.contains("\"body_too_large\""), "{answer:?}");
    // what is still sent is taken: no reset overtakes the answer
    let (long, chunks) = ("a".repeat(4 << 20), chunk.repeat(64) + "0\r\n\r\n");
    for (framing, body) in [("Content-Length: 4194304", &long), ("Transfer-Encoding: chunked", &chunks)] {
        for _ in 0..10 {
            let mut client = Client::open(gateway.address).await;
            client.send(format!("POST / HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n{body}")).await;
            let answer = client.answer(false).await.unwrap();
            assert!(answer.status == 413 && answer.body.contains("\"body_too_large\""), "{answer:?}");
        }
    }
    assert_eq!(engine.take(), [""; 0]);
}

/// The limits of connections are those of gateway.toml.
#[tokio::test(flavor = "multi_thread")]
async fn limits_are_configured() {
    let engine = Recorder::start().await;
    let rule = Rule::new("any", &["round-robin"]).endpoint(engine.address, "");
    let rule = rule.table("limits", "body_rate = \"1GiB\"").table("timeouts", "body_grace = \"200ms\"");
    let lines = "[connections]\nhead_timeout = \"3s\"\nhead = \"1KiB\"\nfields = 3\nuri = 64\n";
    let gateway = Setup::new(&[rule]).process(lines).start().await;
    for (request, status, code) in [
        (format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(64)), 414, "uri_too_long"),
        (format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "a".repeat(1024)), 431, "head_too_large"),
        ("GET / HTTP/1.1\r\nHost: a\r\nX: a\r\nX: a\r\nX: a\r\n\r\n".into(), 431, "head_too_large"),
        ("GET / HTTP/1.1\r\nHost: a\r\n".into(), 408, "head_too_slow"),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabc".into(), 408, "body_too_slow"),
    ] {
        let mut client = Client::open(gateway.address).await;
        client.send(&request).await;
        let answer = client.answer(false).await.unwrap();
        assert!(answer.status == status && answer.body.contains(code), "{code}: {answer:?}");
    }
}

/// So are their numbers.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_connections_are_configured() {
    let engine = Recorder::start().await;
    let rule = Rule::new("any", &["round-robin"]).endpoint(engine.address, "");
    let lines = "[connections]\nmax = 3\nmax_per_address = 2\n";
    let gateway = Setup::new(&[rule]).process(lines).start().await;
    let open = &["listener=\"edge\""];
    let mut held = [Client::open(gateway.address).await, Client::open(gateway.address).await];
    gateway.until_metric("kvgate_connections_open", open, 2.0).await;
    let mut third = Client::open(gateway.address).await;
    let answer = third.answer(false).await.unwrap();
    assert!(answer.status == 503 && answer.body.contains("\"overloaded\""), "{answer:?}");
    let reason = &["listener=\"edge\"", "reason=\"per_address\""];
    assert_eq!(gateway.metric("kvgate_connections_refused_total", reason).await, 1.0);
    held[0].send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!(held[0].answer(false).await.unwrap().status, 200);
    drop(held);
    gateway.until_metric("kvgate_connections_open", open, 0.0).await;
    until("there is a place again", async || {
        let mut client = Client::open(gateway.address).await;
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        client.answer(false).await.is_some_and(|answer| answer.status == 200)
    })
    .await;
}

/// A client that has sent the next request, and then leaves, is gone: its engine is let go of at once.
#[tokio::test(flavor = "multi_thread")]
async fn leaving_is_seen_behind_early_requests() {
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let rule = Rule::new("any", &["round-robin"]).endpoint(listener.local_addr().unwrap(), "");
    let gateway = Setup::new(&[rule]).start().await;
    let mut client = Client::open(gateway.address).await;
    client.send("GET /1 HTTP/1.1\r\nHost: a\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let (mut engine, _) = listener.accept().await.unwrap();
    let mut asked = Vec::new();
    while !asked.ends_with(b"\r\n\r\n") {
        assert!(engine.read_buf(&mut asked).await.unwrap() > 0);
    }
    assert!(asked.starts_with(b"GET /1 "));
    drop(client);
    let mut more = Vec::new();
    assert_eq!(engine.read_to_end(&mut more).await.unwrap_or(0), 0, "{}", more.escape_ascii());
    gateway.until_idle().await;
}
