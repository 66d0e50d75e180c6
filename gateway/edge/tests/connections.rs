//! Connections: how long they are kept, how many there may be, and how they end.
#![allow(clippy::unwrap_used, clippy::panic)]

#[allow(dead_code)]
mod cases;
mod support;

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use cases::play::Client;
use kvgate_edge::{Config, Reason};
use support::{config, start, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const GET: &str = "GET /a HTTP/1.1\r\nHost: a\r\n\r\n";
const WAIT: &str = "GET /wait HTTP/1.1\r\nHost: a\r\n\r\n";

fn short(head: u64, keep_alive: u64) -> Config {
    Config { head: Duration::from_millis(head), keep_alive: Duration::from_millis(keep_alive), ..config() }
}

#[tokio::test]
async fn a_head_has_a_deadline() {
    let server = start(short(200, 120_000));
    let mut first = Client::open(server.address).await;
    first.send("GET / HTTP/1.1\r\nHo").await;
    let mut second = Client::open(server.address).await;
    second.send(GET).await;
    assert_eq!(second.answer(false).await.unwrap().status, 200);
    second.send("GET / HTTP/1.1\r\nHo").await;
    for client in [&mut first, &mut second] {
        let answer = client.answer(false).await.unwrap();
        assert_eq!(answer.status, 408);
        assert!(answer.body.contains("\"head_too_slow\"") && answer.head.contains("Connection: close"));
        assert!(client.ended().await);
    }
    assert_eq!(*server.refused.lock().unwrap(), ["head_too_slow"; 2]);
}

/// The deadline is of the whole head: bytes that trickle in do not move it.
#[tokio::test]
async fn trickling_does_not_help() {
    let server = start(short(300, 120_000));
    let mut client = Client::open(server.address).await;
    let (mut reader, mut writer) = client.stream.split();
    let trickle = async {
        writer.write_all(b"GET / HTTP/1.1\r\nX: ").await.unwrap();
        loop {
            if writer.write_all(b"a").await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let mut answer = String::new();
    tokio::select! {
        () = trickle => {}
        read = reader.read_to_string(&mut answer) => { read.unwrap(); }
    }
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
}

#[tokio::test]
async fn who_says_nothing_is_closed_without_a_word() {
    let server = start(short(200, 300));
    let mut silent = Client::open(server.address).await;
    assert!(silent.ended().await);
    let mut kept = Client::open(server.address).await;
    kept.send(GET).await;
    assert_eq!(kept.answer(false).await.unwrap().status, 200);
    assert!(kept.ended().await);
    assert!(server.refused.lock().unwrap().is_empty());
    until("both are forgotten", || server.edge.open() == 0).await;
}

/// A wait that is longer than a head's deadline is none of its business.
#[tokio::test]
async fn between_requests_there_is_more_time() {
    let server = start(short(50, 120_000));
    let mut client = Client::open(server.address).await;
    for _ in 0..3 {
        client.send(GET).await;
        assert_eq!(client.answer(false).await.unwrap().status, 200);
        tokio::time::sleep(Duration::from_millis(120)).await;
    }
}

#[tokio::test]
async fn there_may_be_so_many_connections() {
    for (config, reason) in [
        (Config { connections: 2, ..config() }, Reason::Total),
        (Config { connections_per_address: 2, ..config() }, Reason::PerAddress),
    ] {
        let server = start(config);
        let stats = &server.stats.listeners()[0];
        let mut held = [Client::open(server.address).await, Client::open(server.address).await];
        until("two are open", || stats.open() == 2).await;
        let mut third = Client::open(server.address).await;
        third.send(GET).await;
        let answer = third.answer(false).await.unwrap();
        assert_eq!(answer.status, 503);
        assert!(answer.body.contains("\"overloaded\""));
        assert!(third.ended().await);
        assert_eq!((stats.refused(reason), stats.accepted(), stats.open()), (1, 3, 2));
        assert_eq!(*server.refused.lock().unwrap(), ["overloaded"]);
        for client in &mut held {
            client.send(GET).await;
            assert_eq!(client.answer(false).await.unwrap().status, 200);
        }
        drop(held);
        until("none is open", || stats.open() == 0).await;
        let mut next = Client::open(server.address).await;
        next.send(GET).await;
        assert_eq!(next.answer(false).await.unwrap().status, 200);
    }
}

/// A client that leaves is seen, whatever it sent before.
#[tokio::test]
async fn leaving_is_seen() {
    let server = start(config());
    for (n, early) in ["", GET, "rubbish", "\r\n"].iter().enumerate() {
        let mut client = Client::open(server.address).await;
        client.send(format!("{WAIT}{early}")).await;
        until("it waits", || server.app.waiting.load(SeqCst) == n + 1).await;
        drop(client);
        until("its leaving is seen", || server.app.left.load(SeqCst) == n + 1).await;
    }
    until("all are closed", || server.edge.open() == 0).await;
}

/// Requests that come early are not taken for a leaving, are kept to a bound, and are all served in the end.
#[tokio::test]
async fn early_requests_wait() {
    let server = start(config());
    let mut client = Client::open(server.address).await;
    client.send(WAIT).await;
    until("it waits", || server.app.waiting.load(SeqCst) == 1).await;
    let many = 1500;
    let (mut reader, mut writer) = client.stream.split();
    let write = async {
        for _ in 0..many {
            writer.write_all(GET.as_bytes()).await.unwrap();
        }
    };
    let read = async {
        server.app.go.add_permits(1);
        let (mut answers, mut piece) = (Vec::new(), vec![0; 65_536]);
        while answers.windows(6).filter(|w| w == b"\r\n\r\nok").count() <= many {
            let n = reader.read(&mut piece).await.unwrap();
            assert!(n > 0, "it was closed");
            answers.extend_from_slice(&piece[..n]);
        }
    };
    tokio::join!(write, read);
    assert_eq!(server.app.take().len(), many + 1);
}

#[tokio::test]
async fn a_client_that_waits_for_a_100_gets_it() {
    let server = start(config());
    let mut client = Client::open(server.address).await;
    client
        .send("POST /continue HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        .await;
    assert_eq!(client.any(false).await.unwrap().status, 100);
    client.send("hi").await;
    assert_eq!(client.any(false).await.unwrap().status, 200);
    assert_eq!(server.app.take(), ["POST /continue hi"]);
}

/// Bytes that belong to another protocol pass when it was agreed on, those included that came before.
#[tokio::test]
async fn another_protocol_passes_once_it_was_agreed_on() {
    let server = start(config());
    let mut client = Client::open(server.address).await;
    client
        .send("GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n\0early")
        .await;
    assert_eq!(client.any(false).await.unwrap().status, 101);
    client.send("\x01late\r\n").await;
    assert_eq!(client.bytes(13).await, b"\0early\x01late\r\n");
    drop(client);
    until("it is closed", || server.edge.open() == 0).await;
    assert!(server.refused.lock().unwrap().is_empty());
    assert_eq!(server.app.take().len(), 1);
}

#[tokio::test]
async fn draining_lets_answers_end() {
    let server = start(config());
    let mut idle = Client::open(server.address).await;
    idle.send(GET).await;
    assert_eq!(idle.answer(false).await.unwrap().status, 200);
    let mut half = Client::open(server.address).await;
    half.send("GET /a HTTP/1.1\r\n").await;
    let mut busy = Client::open(server.address).await;
    busy.send(WAIT).await;
    until("it waits", || server.app.waiting.load(SeqCst) == 1).await;
    server.edge.drain();
    assert!(idle.ended().await);
    half.send("Host: a\r\n\r\n").await;
    let answer = half.answer(false).await.unwrap();
    assert!(answer.status == 200 && answer.head.contains("Connection: close"), "{answer:?}");
    assert!(half.ended().await);
    server.app.go.add_permits(1);
    assert_eq!(busy.answer(false).await.unwrap().status, 200);
    assert!(busy.ended().await);
    server.edge.closed().await;
    assert_eq!(server.stats.open(), 0);
    until("nobody listens", || std::net::TcpStream::connect(server.address).is_err()).await;
}

/// A client still sending when it is refused reads its answer to the end.
#[tokio::test]
async fn who_is_refused_can_read_it() {
    let server = start(config());
    for _ in 0..20 {
        let mut client = Client::open(server.address).await;
        let (mut reader, mut writer) = client.stream.split();
        let write = async {
            let _ = writer.write_all(b"GET /\x01 HTTP/1.1\r\n").await;
            for _ in 0..100 {
                let _ = writer.write_all(&[b'x'; 10_000]).await;
            }
        };
        let mut answer = String::new();
        let (_, read) = tokio::join!(write, reader.read_to_string(&mut answer));
        read.unwrap();
        assert!(answer.starts_with("HTTP/1.1 400") && answer.ends_with("}"), "{answer}");
    }
}
