//! Descriptors, disk and memory that run out, and come back.

use std::fs;
use std::time::Instant;

use kvgate_sim::Sim;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{is_ready, short};
use crate::support::{
    Connection, Gateway, Request, Rule, Setup, completion, engine, prompt, silent_engine, until,
};

/// The limit of open files of a process: soft, hard.
fn open_files(pid: u32) -> (u64, u64) {
    let text = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap().to_owned();
    let mut numbers = line.split_whitespace().map(|n| n.parse().unwrap_or(u64::MAX));
    (numbers.next().unwrap(), numbers.next().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn it_takes_as_many_descriptors_as_it_may_have() {
    let engine = engine().await;
    let setup = Setup::new(&[Rule::kv("words").engine(&engine)]).shell("ulimit -Sn 300 && ulimit -Hn 900");
    let gateway = setup.spawn().await;
    assert_eq!(open_files(gateway.process.id()), (900, 900));
    let said = async || gateway.log().contains("418 connections of clients are let in");
    until("it says how many it lets in", said).await;
}

/// How often the gateway has said this, and that it does not say it more than once a second.
async fn seldom(gateway: &Gateway, words: &str) {
    let said = || gateway.log().matches(words).count();
    let (since, before) = (Instant::now(), said());
    until("a while has passed", async || since.elapsed().as_secs() >= 3).await;
    let (lines, seconds) = (said() - before, since.elapsed().as_secs() as usize + 2);
    assert!(lines <= seconds, "{lines} lines in {seconds} seconds");
}

/// A gateway that may have 256 descriptors, and a client that is in.
async fn with_few_descriptors(engine: &Sim) -> (Gateway, Connection) {
    let setup = Setup::new(&[Rule::kv("words").engine(engine)]).shell("ulimit -n 256");
    let gateway = setup.spawn().await;
    let mut early = Connection::open(gateway.address).await;
    is_served(&mut early, 1).await;
    (gateway, early)
}

async fn is_served(client: &mut Connection, times: u32) {
    for seed in 0..times {
        client.send(&short(seed)).await;
        assert_eq!(client.answer().await.status, 200);
    }
}

/// More clients than half of the descriptors: those that are in are served, and so are others when they have gone.
#[tokio::test(flavor = "multi_thread")]
async fn clients_never_take_all_descriptors() {
    let engine = engine().await;
    let (mut gateway, mut early) = with_few_descriptors(&engine).await;
    let mut idle = Vec::new();
    for _ in 0..400 {
        idle.push(TcpStream::connect(gateway.address).await.unwrap());
    }
    until("some are refused", async || gateway.log().contains("connections are refused")).await;
    assert_eq!(gateway.metrics().await.sum("kvgate_connections_open", &[]), 96.0);
    is_served(&mut early, 20).await;
    seldom(&gateway, "connections are refused").await;
    drop(idle);
    until("there is room", async || gateway.metrics().await.sum("kvgate_connections_open", &[]) < 2.0).await;
    for seed in 0..20 {
        assert_eq!(gateway.send(&short(seed)).await.status, 200);
    }
    assert_eq!(gateway.ended(), None);
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

const BLIND: &str = "whether the configuration has changed cannot be seen";
const READING: &str = "reading the configuration";
const RUN_OUT: &str = "no connection can be accepted";

/// Takes every descriptor of the gateway, by the admin surface, whose connections nobody counts: an operator's own fault.
async fn runs_out(gateway: &Gateway) -> Vec<TcpStream> {
    let mut idle = Vec::new();
    for _ in 0..300 {
        idle.push(TcpStream::connect(gateway.admin).await.unwrap());
    }
    until("descriptors have run out", async || {
        idle.push(TcpStream::connect(gateway.address).await.unwrap());
        gateway.log().contains(RUN_OUT)
    })
    .await;
    idle
}

/// Whoever is in is served without a descriptor to spare, others wait, and all is well when there are some again.
#[tokio::test(flavor = "multi_thread")]
async fn descriptors_run_out_and_come_back() {
    let engine = engine().await;
    let (mut gateway, mut early) = with_few_descriptors(&engine).await;
    let idle = runs_out(&gateway).await;
    let mut waits = Connection::open(gateway.address).await;
    waits.send(&short(2)).await;
    is_served(&mut early, 20).await;
    seldom(&gateway, RUN_OUT).await;
    // nor does what cannot be read look as if it were gone
    until("it says that it cannot look", async || gateway.log().contains(BLIND)).await;
    let read = || gateway.log().matches(READING).count();
    let before = read();
    gateway.signal("HUP", 1);
    seldom(&gateway, BLIND).await;
    assert_eq!(read(), before, "{}", gateway.log());
    drop(idle);
    assert_eq!(waits.answer().await.status, 200);
    for seed in 0..20 {
        assert_eq!(gateway.send(&short(seed)).await.status, 200);
    }
    until("the signal is not forgotten", async || read() == before + 1).await;
    assert_eq!(gateway.log().matches(BLIND).count(), 1);
    assert_eq!(gateway.ended(), None);
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

/// A gateway without a descriptor for a connection to an engine blames itself, and nobody is taken out for it.
#[tokio::test(flavor = "multi_thread")]
async fn engines_are_not_blamed_for_descriptors_that_are_missing() {
    let engine = silent_engine().await;
    let rule = Rule::new("words", &["round-robin"]).endpoint(engine.address(), "");
    let gateway = Setup::new(&[rule]).shell("ulimit -n 128").spawn().await;
    let mut clients = Vec::new();
    for _ in 0..12 {
        clients.push(Connection::open(gateway.address).await);
    }
    until("all are in", async || gateway.metrics().await.sum("kvgate_connections_open", &[]) == 12.0).await;
    let idle = runs_out(&gateway).await;
    let mut waits = Connection::open(gateway.address).await;
    waits.send(&short(1)).await;
    for client in &mut clients {
        client.send(&short(1)).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.code().as_str()), (503, "overloaded"), "{answer:?}");
    }
    assert!(engine.log().is_empty());
    drop(idle);
    assert_eq!(waits.answer().await.status, 200, "the engine was not taken out");
    let decisions = gateway.ask("/decisions").await.json();
    let cause = |decision: &serde_json::Value| decision["outcome"]["cause"].as_str().map(str::to_owned);
    let causes: Vec<_> = decisions.as_array().unwrap().iter().filter_map(cause).collect();
    assert_eq!(causes.iter().filter(|cause| *cause == "exhausted").count(), 12, "{causes:?}");
    assert_eq!(gateway.metric("kvgate_endpoint_failures_total", &[]).await, 0.0);
}

/// Whatever it has to say, and nowhere to say it.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_for_the_log_changes_nothing() {
    let engine = engine().await;
    let rule = Rule::kv("words").engine(&engine);
    let setup = Setup::new(std::slice::from_ref(&rule)).environment("RUST_LOG", "trace").mute();
    let mut gateway = setup.spawn().await;
    for seed in 0..20 {
        gateway.complete(&prompt(seed, 64)).await;
        assert_eq!(gateway.send(&Request::get("/nowhere")).await.status, 404);
    }
    gateway.setup.write_text("words", "nonsense");
    gateway.until_metric("kvgate_config_reloads_total", &["result=\"refused\""], 1.0).await;
    gateway.change(&rule).await;
    gateway.complete(&prompt(1, 64)).await;
    gateway.signal("TERM", 1);
    until("it ends", async || gateway.ended().is_some()).await;
    assert_eq!(gateway.ended().unwrap().code(), Some(0));
}

/// A log that nobody reads loses lines, and stalls nobody.
#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_nobody_reads_stalls_nobody() {
    let engine = engine().await;
    let setup = Setup::new(&[Rule::kv("words").engine(&engine)]).environment("RUST_LOG", "trace").unread();
    let mut gateway = setup.spawn().await;
    // far more than the system keeps for a reader
    for seed in 0..300 {
        gateway.complete(&prompt(seed, 64)).await;
    }
    gateway.until_metric("kvgate_requests_total", &["outcome=\"2xx\""], 300.0).await;
    gateway.signal("TERM", 1);
    until("it ends", async || gateway.ended().is_some()).await;
    assert_eq!(gateway.ended().unwrap().code(), Some(0));
}

/// Sends a request as far as it is taken, and says what came back.
async fn pour(address: std::net::SocketAddr, body: usize) -> String {
    let mut client = TcpStream::connect(address).await.unwrap();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {body}\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    let piece = vec![b'x'; 64 * 1024];
    let mut left = body;
    while left > 0 {
        let n = piece.len().min(left);
        if client.write_all(&piece[..n]).await.is_err() {
            break;
        }
        left -= n;
    }
    let mut answer = vec![0; 4096];
    let n = client.read(&mut answer).await.unwrap_or(0);
    String::from_utf8_lossy(&answer[..n]).into_owned()
}

/// More bodies at once than memory: some are refused, and the process lives.
#[tokio::test(flavor = "multi_thread")]
async fn bodies_never_take_more_memory_than_there_is() {
    let engine = silent_engine().await;
    let rule = Rule::new("words", &["round-robin"]).endpoint(engine.address(), "");
    // private memory that can be written to, in KiB
    let setup = Setup::new(&[rule]).shell("ulimit -d 262144");
    let mut gateway = setup.spawn().await;
    is_ready(&gateway).await;
    assert!(gateway.log().contains("64MiB instead of"), "{}", gateway.log());
    // bodies that have begun hold what they have sent
    let large = Request::post("/v1/completions", vec![b'x'; 15 << 20]);
    let mut held = Vec::new();
    for _ in 0..8 {
        let mut client = Connection::open(gateway.address).await;
        let rest = client.send_half(&large).await;
        held.push((client, rest));
    }
    let poured: Vec<_> = (0..24).map(|_| tokio::spawn(pour(gateway.address, 15 << 20))).collect();
    let mut refused = 0;
    for answer in poured {
        refused += usize::from(answer.await.unwrap().contains("\"overloaded\""));
    }
    assert!(refused > 0);
    assert_eq!(gateway.ended(), None, "{}", gateway.log());
    drop(held);
    let small = Request::json("/v1/completions", &completion(crate::support::MODEL, &prompt(1, 20)));
    until("all is well again", async || gateway.send(&small).await.status == 200).await;
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

/// What is decided goes by a clock that nobody can set. Where the other one is read, it is for a timestamp, or to compare
/// with one of a file or a `Retry-After`.
#[test]
fn the_machines_clock_decides_nothing() {
    let allowed = [
        "gateway/feed/src/plane/status.rs",
        "gateway/prompt/src/tokenizer/store.rs",
        "gateway/server/src/relay/busy.rs",
        "gateway/server/src/watch.rs",
        "gateway/server/src/world.rs",
    ];
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut folders: Vec<_> = ["gateway", "plugins"].map(|folder| root.join(folder)).into();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(&root).unwrap().display().to_string();
            if path.is_dir() && !name.ends_with("tests") && !name.ends_with("target") && name != "gateway/sim"
            {
                folders.push(path);
            } else if name.ends_with(".rs") {
                let text = fs::read_to_string(path).unwrap();
                let reads = ["SystemTime::now", "Utc::now", "Local::now", "ClockId::Realtime"];
                if reads.iter().any(|read| text.contains(read)) {
                    found.push(name);
                }
            }
        }
    }
    found.sort();
    assert!(found.iter().all(|name| allowed.contains(&name.as_str())), "{found:?}");
    assert!(found.len() > 2, "{found:?}");
}
