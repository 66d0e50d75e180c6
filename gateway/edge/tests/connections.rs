//! Connections: how long they are kept, how many there may be, and how they end.
#![allow(clippy::unwrap_used, clippy::panic)]

#[allow(dead_code)]
mod cases;
mod support;

use std::io::Write as _;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use cases::play::Client;
use kvgate_edge::{Config, Edge, Reason};
use support::{LONG, config, start, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

const GET: &str = "GET /a HTTP/1.1\r\nHost: a\r\n\r\n";
const WAIT: &str = "GET /wait HTTP/1.1\r\nHost: a\r\n\r\n";

#[tokio::test]
async fn a_head_has_a_deadline() {
    let server = start(Config { head: Duration::from_secs(3), ..config() });
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

#[tokio::test]
async fn who_says_nothing_is_closed_without_a_word() {
    let server = start(Config { head: Duration::from_millis(200), ..config() });
    let mut silent = Client::open(server.address).await;
    assert!(silent.ended().await);
    assert!(server.refused.lock().unwrap().is_empty());
    let server = start(Config { keep_alive: Duration::from_millis(200), ..config() });
    let mut kept = Client::open(server.address).await;
    kept.send(GET).await;
    assert_eq!(kept.answer(false).await.unwrap().status, 200);
    assert!(kept.ended().await);
    assert!(server.refused.lock().unwrap().is_empty());
    until("it is forgotten", || server.edge.open() == 0).await;
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
    let flood = GET.repeat(20_000);
    for (n, early) in ["", GET, "rubbish", "\r\n", &flood].iter().enumerate() {
        let mut client = Client::open(server.address).await;
        client.send(format!("{WAIT}{early}")).await;
        until("it waits", || server.app.waiting.load(SeqCst) == n + 1).await;
        drop(client);
        until("its leaving is seen", || server.app.left.load(SeqCst) == n + 1).await;
    }
    until("all are closed", || server.edge.open() == 0).await;
}

/// Requests that come early are not taken for a leaving, and are all served in the end.
#[tokio::test]
async fn early_requests_wait() {
    let server = start(config());
    let mut client = Client::open(server.address).await;
    client.send(WAIT).await;
    until("it waits", || server.app.waiting.load(SeqCst) == 1).await;
    let many = 500;
    client.send(GET.repeat(many)).await;
    server.app.go.add_permits(1);
    for _ in 0..=many {
        assert_eq!(client.answer(false).await.unwrap().status, 200);
    }
    assert_eq!(server.app.take().len(), many + 1);
}

/// Of those that are too many none is kept: the answer under way is the last.
#[tokio::test]
async fn too_many_early_requests_end_the_connection() {
    let server = start(config());
    let mut client = Client::open(server.address).await;
    client.send(WAIT).await;
    until("it waits", || server.app.waiting.load(SeqCst) == 1).await;
    // more than the system's buffers take: most of it has been read when it is sent
    client.send(GET.repeat(400_000)).await;
    server.app.go.add_permits(1);
    assert_eq!(client.answer(false).await.unwrap().status, 200);
    assert!(client.ended().await);
    assert_eq!(server.app.take().len(), 1);
}

/// Another protocol cannot be agreed on when some of its bytes are lost.
#[tokio::test]
async fn too_much_before_another_protocol_ends_the_connection() {
    let server = start(config());
    let mut client = Client::open(server.address).await;
    let (head, _) = WAIT.split_at(WAIT.len() - 2);
    client.send(format!("{head}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")).await;
    until("it waits", || server.app.waiting.load(SeqCst) == 1).await;
    client.send([0; 20_000]).await;
    until("it is let go of", || server.app.left.load(SeqCst) == 1).await;
    assert!(client.ended().await);
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

/// What a client sends while its last answer is written does not cost it the answer's end.
#[tokio::test]
async fn a_last_answer_is_read_to_its_end() {
    let server = start(config());
    let socket = TcpSocket::new_v4().unwrap();
    // most of the answer waits at the server until it is read here
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(server.address).await.unwrap();
    stream.write_all(b"GET /deaf HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").await.unwrap();
    until("it waits", || server.app.waiting.load(SeqCst) == 1).await;
    stream.write_all(&[b'x'; 10_000]).await.unwrap();
    server.app.go.add_permits(1);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(&[b'x'; LONG]), "{}", answer.len());
}

/// Who has connected, and waits to be accepted, is served when nobody else is accepted any more.
#[tokio::test]
async fn who_waits_to_be_accepted_is_served() {
    for end in [Edge::stop_accepting, Edge::drain] {
        let server = start(config());
        let mut first = Client::open(server.address).await;
        first.send(GET).await;
        assert_eq!(first.answer(false).await.unwrap().status, 200);
        // this thread is the server's, too: until it awaits something nobody is accepted
        let waiting = [(); 5].map(|()| {
            let mut stream = std::net::TcpStream::connect(server.address).unwrap();
            stream.write_all(b"GET /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
            stream.set_nonblocking(true).unwrap();
            stream
        });
        end(&server.edge);
        for stream in waiting {
            let mut answer = String::new();
            TcpStream::from_std(stream).unwrap().read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        until("nobody listens", || std::net::TcpStream::connect(server.address).is_err()).await;
        assert_eq!(server.stats.listeners()[0].accepted(), 6);
    }
}
