//! Streams that end as they should not, and clients that do not take theirs: what is told, counted and kept.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use kvgate_sim::{Fault, Sim};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Answer, Gateway, MODEL, Request, Rule, Setup, engine, free_port, host, prompt, until};

const UNFINISHED: &str = "kvgate_unfinished_streams_total";
const FAILURES: &str = "kvgate_endpoint_failures_total";
const ERRORS: &str = "kvgate_errors_total";

fn ask(path: &str) -> Request {
    let mut body = json!({"model": MODEL, "max_tokens": 6, "stream": true});
    if path.ends_with("chat/completions") {
        body["messages"] = json!([{"role": "user", "content": "hello"}]);
    } else {
        body["prompt"] = prompt(1, 40).into();
    }
    Request::json(path, &body)
}

async fn behind(engine: &Sim, tables: &[(&str, &str)]) -> Gateway {
    let rule = tables
        .iter()
        .fold(Rule::new("words", &["round-robin"]), |rule, (name, lines)| rule.table(name, lines));
    Setup::new(&[rule.engine(engine)]).start().await
}

async fn last_record(gateway: &Gateway) -> Value {
    gateway.until_idle().await;
    let open = async || gateway.metric("kvgate_requests_open", &[]).await;
    until("every request is over", async || open().await == 0.0).await;
    gateway.ask("/decisions").await.json().as_array().unwrap().last().unwrap().clone()
}

/// The error event a stream ends with, after whole events only.
#[track_caller]
fn farewell(answer: &Answer) -> Value {
    assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    let text = String::from_utf8(answer.body.to_vec()).unwrap();
    let events: Vec<_> = text.strip_suffix("\n\n").expect("an event's end").split("\n\n").collect();
    let (last, before) = events.split_last().unwrap();
    for event in before {
        let data: Value = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        assert!(data["choices"].is_array() && data["error"].is_null(), "{event}");
    }
    serde_json::from_str(last.strip_prefix("event: error\ndata: ").expect("an error event")).unwrap()
}

/// Engines that close, reset or stall, between events, amid one and amid a character, and before the first.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_breaks_is_told_of_counted_and_recorded() {
    let engine = engine().await;
    let gateway = behind(&engine, &[("timeouts", "idle = \"300ms\"")]).await;
    let mut broken = 0.0;
    let fault = Fault::default();
    for path in ["/v1/completions", "/v1/chat/completions"] {
        for (fault, code) in [
            (Fault { die_after: Some(3), ..fault }, "engine_error"),
            (Fault { die_after: Some(3), reset: true, ..fault }, "engine_error"),
            (Fault { die_after_bytes: Some(431), ..fault }, "engine_error"),
            (Fault { die_after_bytes: Some(433), reset: true, ..fault }, "engine_error"),
            (Fault { stall_after: Some(3), ..fault }, "engine_timeout"),
        ] {
            engine.fault(fault, 1);
            let answer = gateway.send(&ask(path)).await;
            assert_eq!(farewell(&answer)["error"]["code"], code, "{path} {fault:?}");
            broken += 1.0;
            let record = last_record(&gateway).await;
            assert_eq!((&record["status"], &record["error"]), (&200.into(), &code.into()), "{fault:?}");
            assert_eq!(gateway.metric(FAILURES, &[]).await, broken, "{fault:?}");
        }
    }
    let errors = |code| format!("code={code:?}");
    assert_eq!(gateway.metric(ERRORS, &["service=\"words\"", &errors("engine_error")]).await, 8.0);
    assert_eq!(gateway.metric(ERRORS, &["service=\"words\"", &errors("engine_timeout")]).await, 2.0);
    assert_eq!(gateway.metric("kvgate_requests_total", &["outcome=\"engine_failed\""]).await, broken);
    assert_eq!(gateway.metric(UNFINISHED, &[]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_ends_too_early_in_order_is_counted() {
    let engine = engine().await;
    let gateway = behind(&engine, &[]).await;
    for (n, path) in ["/v1/completions", "/v1/chat/completions"].into_iter().enumerate() {
        engine.fault(Fault { end_after: Some(3), ..Fault::default() }, 1);
        let answer = gateway.send(&ask(path)).await;
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert!(answer.complete && !text.contains("[DONE]") && !text.contains("error"), "{text}");
        let record = last_record(&gateway).await;
        assert_eq!((&record["unfinished"], &record["outcome"]["cause"]), (&true.into(), &"complete".into()));
        assert_eq!(gateway.metric(UNFINISHED, &["service=\"words\""]).await, n as f64 + 1.0);
        // a whole one is not
        assert!(String::from_utf8_lossy(&gateway.send(&ask(path)).await.body).ends_with("data: [DONE]\n\n"));
        assert!(last_record(&gateway).await["unfinished"].is_null());
    }
    assert_eq!(gateway.metric(UNFINISHED, &["service=\"words\""]).await, 2.0);
}

/// After `[DONE]` nothing is missing.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_after_the_end_is_no_failure() {
    let engine = engine().await;
    let gateway = behind(&engine, &[]).await;
    let whole = gateway.send(&ask("/v1/completions")).await;
    let events = String::from_utf8_lossy(&whole.body).matches("\n\n").count();
    for fault in [
        Fault { die_after: Some(events), ..Fault::default() },
        Fault { die_after: Some(events), reset: true, ..Fault::default() },
        Fault { stall_after: Some(events), ..Fault::default() },
    ] {
        engine.fault(fault, 1);
        let answer = gateway.send(&ask("/v1/completions")).await;
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert!(answer.complete && text.ends_with("data: [DONE]\n\n"), "{fault:?} {text}");
        assert!(!text.contains("error"), "{text}");
        assert_eq!(last_record(&gateway).await["outcome"]["cause"], "complete", "{fault:?}");
    }
    assert_eq!(gateway.metric(FAILURES, &[]).await, 0.0);
}

/// An answer that is no stream comes whole or not at all where it is short; else it looks cut.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_no_stream_is_whole_or_looks_cut() {
    let engine = engine().await;
    let gateway = behind(&engine, &[]).await;
    for (tokens, path) in [(6, "/v1/completions"), (24_000, "/v1/completions")] {
        let body = json!({"model": MODEL, "prompt": prompt(1, 40), "max_tokens": tokens});
        for reset in [false, true] {
            engine.fault(Fault { die_after_bytes: Some(50), reset, ..Fault::default() }, 1);
            let answer = gateway.send(&Request::json(path, &body)).await;
            if tokens == 6 {
                assert_eq!((answer.status, answer.code().as_str()), (502, "engine_error"), "{answer:?}");
            } else {
                // cut before its head is out, or after
                assert!(matches!(answer.status, 0 | 200) && !answer.complete, "{answer:?}");
            }
            assert_eq!(last_record(&gateway).await["outcome"]["cause"], "engine-broken");
        }
    }
    assert_eq!(gateway.metric(FAILURES, &[]).await, 4.0);
}

/// An engine that streams without end, says how much it got rid of, and whether it is rid of its client.
async fn flood() -> (SocketAddr, Arc<AtomicUsize>, Arc<AtomicBool>) {
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sent, gone) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (bytes, left) = (sent.clone(), gone.clone());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"}") {
            stream.read_buf(&mut head).await.unwrap();
        }
        let events = format!("data: {}\n\n", "x".repeat(1000)).repeat(65);
        let chunk = format!("{:x}\r\n{events}\r\n", events.len());
        let mut piece =
            "HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                .to_owned();
        loop {
            piece.push_str(&chunk);
            if stream.write_all(piece.as_bytes()).await.is_err() {
                break;
            }
            bytes.fetch_add(piece.len(), Ordering::Relaxed);
            piece.clear();
        }
        left.store(true, Ordering::Relaxed);
    });
    (address, sent, gone)
}

/// Kilobytes of memory that a process has.
fn resident(process: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// A client that takes nothing of a large stream holds its engine back, and not the memory of the gateway; when it goes
/// on, all is there; when it leaves, the engine is rid of it.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_stops_reading_costs_no_memory() {
    const MUCH: usize = 200 << 20;
    let (address, sent, gone) = flood().await;
    let gateway = Setup::new(&[Rule::new("words", &["round-robin"]).endpoint(address, "")]).spawn().await;
    assert_eq!(gateway.ask("/livez").await.status, 200);
    let before = resident(gateway.process());
    let mut client = TcpStream::connect(gateway.address).await.unwrap();
    let body = "{\"stream\": true}";
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    client.write_all(head.as_bytes()).await.unwrap();
    let stuck = async || loop {
        let so_far = sent.load(Ordering::Relaxed);
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        if so_far > 0 && sent.load(Ordering::Relaxed) == so_far {
            return so_far;
        }
    };
    let held =
        tokio::time::timeout(crate::support::PATIENCE, stuck()).await.expect("the engine is held back");
    assert!(held < 40 << 20, "the engine got rid of {held} bytes");
    let mut read = 0;
    let mut buffer = vec![0; 1 << 20];
    while read < MUCH {
        read += client.read(&mut buffer).await.unwrap();
    }
    tokio::time::timeout(crate::support::PATIENCE, stuck()).await.expect("and again");
    let grown = resident(gateway.process()).saturating_sub(before);
    assert!(grown < 32 << 10, "{grown} kB more for one client");
    drop(client);
    until("the engine is rid of it", async || gone.load(Ordering::Relaxed)).await;
    gateway.until_idle().await;
}

/// Upgrades have their deadlines and codes too.
#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_that_is_not_answered_times_out() {
    let silent = TcpListener::bind((host(), 0)).await.unwrap();
    let rule = Rule::new("words", &["round-robin"]).table("timeouts", "idle = \"200ms\"");
    let gateway = Setup::new(&[rule.clone().endpoint(silent.local_addr().unwrap(), "")]).start().await;
    let ask = Request::get("/v1/realtime").field("connection", "upgrade").field("upgrade", "websocket");
    let answer = gateway.send(&ask).await;
    assert_eq!((answer.status, answer.code().as_str()), (504, "engine_timeout"));
    assert_eq!(last_record(&gateway).await["error"], "engine_timeout");
    let gateway = Setup::new(&[rule.endpoint(free_port(), "")]).start().await;
    let answer = gateway.send(&ask).await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "engine_unreachable"));
    assert_eq!(last_record(&gateway).await["error"], "engine_unreachable");
}
