//! SIGTERM: who is still served, who is told to go elsewhere, and what is said to those whose time is over.

use kvgate_sim::Fault;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{is_closed, is_ready, is_whole, reached, readiness, short, stream, streams};
use crate::support::{
    Answer, Connection, Gateway, Rule, Setup, engine, engine_with, host, reads_head, switches, until,
};

/// Waits for the process to end in order.
async fn ends(gateway: &mut Gateway) {
    until("it ends", async || gateway.ended().is_some()).await;
    assert_eq!(gateway.ended().unwrap().code(), Some(0), "{}", gateway.log());
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

fn is_turned_away(answer: &Answer) {
    assert_eq!((answer.status, answer.complete), (503, true), "{answer:?}");
    assert_eq!((answer.code().as_str(), answer.field("connection")), ("gateway_draining", Some("close")));
}

#[tokio::test(flavor = "multi_thread")]
async fn others_see_it_leave_before_it_lets_nobody_in() {
    let engine = engine_with(|c| c.decode_us = 100_000.0).await;
    let setup = Setup::new(&[Rule::kv("words").engine(&engine)]);
    let gateway = setup.server("drain_delay = \"10m\"\n").spawn().await;
    is_ready(&gateway).await;
    let (_streaming, _head) = streams(&gateway, 1, 100_000).await;
    let mut idle = Connection::open(gateway.address).await;
    idle.send(&short(2)).await;
    assert_eq!(idle.answer().await.field("connection"), Some("keep-alive"));
    gateway.signal("TERM", 1);
    until("others see it", async || readiness(&gateway).await.0 == 503).await;
    let (_, detail) = readiness(&gateway).await;
    assert_eq!((&detail["stage"], &detail["draining"]), (&"leaving".into(), &true.into()));
    assert_eq!(gateway.ask("/livez").await.status, 200);
    // whoever comes meanwhile, on a new connection or an old one, is served, and told that it is the last time
    for connection in [&mut idle, &mut Connection::open(gateway.address).await] {
        connection.send(&short(3)).await;
        let answer = connection.answer().await;
        assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
        assert_eq!(answer.field("connection"), Some("close"));
    }
    assert!(!is_closed(&gateway).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_under_way_is_whole_when_nobody_is_let_in() {
    let engine = engine_with(|c| c.decode_us = 100_000.0).await;
    let setup = Setup::new(&[Rule::kv("words").engine(&engine)]).grace("10m");
    let mut gateway = setup.server("drain_delay = \"1s\"\n").spawn().await;
    is_ready(&gateway).await;
    let mut streaming = Vec::new();
    for seed in 0..50 {
        streaming.push(streams(&gateway, seed, 80).await);
    }
    gateway.signal("TERM", 1);
    until("nobody is let in", async || is_closed(&gateway).await).await;
    for (mut client, head) in streaming {
        is_whole(&client.rest(head).await, 80);
    }
    ends(&mut gateway).await;
}

/// An answer that was under way at the signal is whole, and says that it is the last one on its connection.
#[tokio::test(flavor = "multi_thread")]
async fn kept_connections_are_told_by_the_answer_they_wait_for() {
    let engine = engine().await;
    let mut gateway = Setup::new(&[Rule::kv("words").engine(&engine)]).spawn().await;
    engine.fault(Fault { delay_ms: 8_000, ..Fault::default() }, 1);
    let mut client = Connection::open(gateway.address).await;
    client.send(&short(1)).await;
    reached(&engine, 1).await;
    gateway.signal("TERM", 1);
    until("it has heard", async || readiness(&gateway).await.0 == 503).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.field("connection")), (200, Some("close")), "{answer:?}");
    ends(&mut gateway).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_are_closed_and_do_not_keep_it() {
    let engine = engine().await;
    let mut gateway = Setup::new(&[Rule::kv("words").engine(&engine)]).grace("10m").spawn().await;
    let mut idle = Vec::new();
    for seed in 0..20 {
        let mut client = Connection::open(gateway.address).await;
        if seed % 2 == 0 {
            client.send(&short(seed)).await;
            assert_eq!(client.answer().await.status, 200);
        }
        idle.push(client);
    }
    gateway.signal("TERM", 1);
    for mut client in idle {
        assert!(client.head().await.is_none(), "closed without a word");
    }
    ends(&mut gateway).await;
}

/// Whoever is still being served when the grace period ends is told, in the form that fits.
#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_of_grace_everybody_gets_a_word() {
    let engine = engine_with(|c| c.decode_us = 50_000.0).await;
    let rule = Rule::new("words", &["admission", "round-robin"])
        .table("tier.admission", "max_in_flight = 2\nqueue_depth = 8\nqueue_wait = \"10m\"")
        .engine(&engine);
    let mut gateway = Setup::new(&[rule]).grace("1s").spawn().await;
    let (mut streaming, head) = streams(&gateway, 1, 100_000).await;
    // silent: an engine that computes a prompt
    engine.fault(Fault { delay_ms: 600_000, ..Fault::default() }, 1);
    let mut silent = Connection::open(gateway.address).await;
    silent.send(&stream(2, 5)).await;
    reached(&engine, 2).await;
    let mut parked = Vec::new();
    for seed in 3..6 {
        let mut client = Connection::open(gateway.address).await;
        client.send(&stream(seed, 5)).await;
        parked.push(client);
    }
    gateway.until_metric("kvgate_admission_queue_length", &[], 3.0).await;
    let mut uploading = Connection::open(gateway.address).await;
    let _rest = uploading.send_half(&short(7)).await;
    until("all are under way", async || readiness(&gateway).await.1["requests"] == 6).await;
    gateway.signal("TERM", 1);
    let cut = streaming.rest(head).await;
    let text = String::from_utf8(cut.body.to_vec()).unwrap();
    assert!(cut.complete, "the stream ends in order: {text}");
    let last = text.trim_end().rsplit("\n\n").next().unwrap();
    assert!(last.starts_with("event: error\ndata: {") && last.contains("\"gateway_draining\""), "{last}");
    for client in parked.iter_mut().chain([&mut silent, &mut uploading]) {
        is_turned_away(&client.answer().await);
    }
    ends(&mut gateway).await;
    assert_eq!(engine.log().len(), 2, "nobody else was asked");
}

/// Tunnels that say nothing are closed to both sides in order, and that is recorded.
#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_of_grace_tunnels_are_closed_to_both_sides() {
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let rule = Rule::new("any", &["round-robin"]).endpoint(listener.local_addr().unwrap(), "");
    let setup = Setup::new(&[rule]).grace("100ms").environment("RUST_LOG", "info,kvgate::decision=debug");
    let mut gateway = setup.spawn().await;
    let mut client = TcpStream::connect(gateway.address).await.unwrap();
    let ask = "GET /v1/realtime HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    client.write_all(ask.as_bytes()).await.unwrap();
    let (mut engine, _) = listener.accept().await.unwrap();
    switches(&mut engine).await;
    let head = reads_head(&mut client).await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    engine.write_all(b"last").await.unwrap();
    gateway.signal("TERM", 1);
    let mut rest = Vec::new();
    assert_eq!((client.read_to_end(&mut rest).await.unwrap(), &rest[..]), (4, &b"last"[..]), "no reset");
    assert_eq!(engine.read(&mut [0; 9]).await.unwrap(), 0, "no reset");
    drop(client);
    ends(&mut gateway).await;
    let log = gateway.log();
    assert!(log.contains(r#""status":101"#) && log.contains(r#""cause":"stopped""#), "{log}");
    assert!(!log.contains("clients do not listen"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn told_twice_it_ends_at_once() {
    for second in ["TERM", "INT"] {
        let engine = engine_with(|c| c.decode_us = 50_000.0).await;
        let setup = Setup::new(&[Rule::kv("words").engine(&engine)]).grace("10m");
        let mut gateway = setup.server("drain_delay = \"10m\"\n").spawn().await;
        is_ready(&gateway).await;
        let (_client, _head) = streams(&gateway, 1, 100_000).await;
        gateway.signal("TERM", 1);
        until("it has heard", async || readiness(&gateway).await.0 == 503).await;
        gateway.signal(second, 1);
        ends(&mut gateway).await;
    }
}
