//! How the process ends.

use crate::support::{Connection, MODEL, Request, Rule, Setup, completion, engine_with, prompt, until};

/// Streams that are under way when the process is told to stop come to their end, and then so does it.
#[tokio::test(flavor = "multi_thread")]
async fn requests_under_way_are_finished_before_the_end() {
    let engine = engine_with(|c| c.decode_us = 20_000.0).await;
    let mut gateway = Setup::new(&[Rule::kv("words").engine(&engine)]).spawn().await;
    let mut clients = Vec::new();
    for (seed, stream) in [(1, true), (2, true), (3, false)] {
        let mut body = completion(MODEL, &prompt(seed, 40));
        (body["stream"], body["max_tokens"]) = (stream.into(), 50.into());
        let mut client = Connection::open(gateway.address).await;
        client.send(&Request::json("/v1/completions", &body)).await;
        let head = if stream { client.head().await } else { None };
        clients.push((client, head));
    }
    until("the engine has all", async || engine.log().len() == 3).await;
    gateway.signal("TERM", 1);
    for (mut client, head) in clients {
        let answer = match head {
            Some(head) => client.rest(head).await,
            None => client.answer().await,
        };
        assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
        let text = String::from_utf8(answer.body.to_vec()).unwrap();
        match answer.field("content-type") {
            Some("application/json") => assert!(text.contains("\"completion_tokens\":50"), "{text}"),
            _ => {
                assert!(text.ends_with("data: [DONE]\n\n") && text.matches("data: ").count() == 51, "{text}")
            }
        }
    }
    until("it ends", async || gateway.ended().is_some()).await;
    assert_eq!(gateway.ended().unwrap().code(), Some(0), "{}", gateway.log());
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

/// An upload that had begun is taken to its end; who comes later is not let in.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_comes_after_the_signal_is_refused() {
    let engine = engine_with(|_| {}).await;
    let mut gateway = Setup::new(&[Rule::kv("words").engine(&engine)]).spawn().await;
    let mut uploading = Connection::open(gateway.address).await;
    let (mut kept, body) = (Connection::open(gateway.address).await, completion(MODEL, &prompt(1, 40)));
    kept.send(&Request::json("/v1/completions", &body)).await;
    assert_eq!(kept.answer().await.status, 200);
    let rest = uploading.send_half(&Request::json("/v1/completions", &body)).await;
    // it has been read so far when the next one on another connection is answered
    kept.send(&Request::json("/v1/completions", &body)).await;
    assert_eq!(kept.answer().await.status, 200);
    gateway.signal("TERM", 1);
    until("the gateway drains", async || gateway.ask("/readyz").await.status == 503).await;
    assert_eq!(gateway.ask("/livez").await.status, 200);
    let address = gateway.address;
    let closed = async || tokio::net::TcpStream::connect(address).await.is_err();
    until("nobody is let in", closed).await;
    uploading.send_rest(rest).await;
    let answer = uploading.answer().await;
    assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    assert!(kept.head().await.is_none(), "a connection that waits for a request is closed");
    until("it ends", async || gateway.ended().is_some()).await;
    assert_eq!(gateway.ended().unwrap().code(), Some(0), "{}", gateway.log());
    assert_eq!(engine.log().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn grace_has_an_end() {
    let engine = engine_with(|c| c.decode_us = 100_000.0).await;
    let setup = Setup::new(&[Rule::kv("words").engine(&engine)]);
    let mut gateway = setup.grace("300ms").spawn().await;
    let mut body = completion(MODEL, &prompt(1, 40));
    (body["stream"], body["max_tokens"]) = (true.into(), 10_000.into());
    let mut client = Connection::open(gateway.address).await;
    client.send(&Request::json("/v1/completions", &body)).await;
    let head = client.head().await.unwrap();
    gateway.signal("TERM", 1);
    let cut = client.rest(head).await;
    assert!(cut.complete && String::from_utf8_lossy(&cut.body).contains("\"gateway_draining\""), "{cut:?}");
    until("it ends", async || gateway.ended().is_some()).await;
    assert_eq!(gateway.ended().unwrap().code(), Some(0), "{}", gateway.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_requests_it_ends_at_once() {
    for signal in ["TERM", "INT"] {
        let engine = engine_with(|_| {}).await;
        let mut gateway = Setup::new(&[Rule::kv("words").engine(&engine)]).spawn().await;
        gateway.complete(&prompt(1, 20)).await;
        gateway.signal(signal, 1);
        until("it ends", async || gateway.ended().is_some()).await;
        assert_eq!(gateway.ended().unwrap().code(), Some(0), "{signal}: {}", gateway.log());
    }
}
