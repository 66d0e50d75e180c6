//! Requests that end early, and what is left of them: nothing.

use kvgate_sim::{Ended, Sim};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{
    Connection, Gateway, MODEL, Request, Rule, Setup, completion, engine_with, engines, host, prompt,
    reads_head, switches, until,
};

async fn in_flight(gateway: &Gateway) -> f64 {
    gateway.metrics().await.sum("kvgate_endpoint_in_flight", &[])
}

async fn aborted(engines: &[Sim]) -> usize {
    engines.iter().flat_map(Sim::log).filter(|served| served.ended == Ended::Aborted).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_leave_take_their_requests_along() {
    let mut engines = Vec::new();
    for _ in 0..2 {
        engines.push(engine_with(|c| c.decode_us = 50_000.0).await);
    }
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    for mid_stream in [false, true] {
        let before = aborted(&engines).await;
        let mut clients = Vec::new();
        for seed in 0..10 {
            let mut body = completion(MODEL, &prompt(seed, 40));
            (body["stream"], body["max_tokens"]) = (true.into(), 2000.into());
            let mut request = Request::json("/v1/completions", &body);
            if !mid_stream {
                request = request.field("x-sim-fault", "{\"delay_ms\": 600000}");
            }
            let mut client = Connection::open(gateway.address).await;
            client.send(&request).await;
            if mid_stream {
                assert_eq!(client.head().await.unwrap().status, 200);
                assert!(client.piece().await.unwrap().is_some());
            }
            clients.push(client);
        }
        until("all are under way", async || in_flight(&gateway).await == 10.0).await;
        until("the engines have them", async || {
            engines.iter().flat_map(Sim::log).filter(|served| served.ended == Ended::Open).count() == 10
        })
        .await;
        drop(clients);
        until("the engines are rid of them", async || aborted(&engines).await == before + 10).await;
        gateway.until_idle().await;
    }
    gateway.until_metric("kvgate_requests_total", &["outcome=\"client_gone\""], 20.0).await;
    // and what follows is balanced as ever
    let before: Vec<_> = engines.iter().map(|engine| engine.log().len()).collect();
    for seed in 100..110 {
        gateway.complete(&prompt(seed, 5)).await;
    }
    let after = engines.iter().map(|engine| engine.log().len());
    assert!(after.zip(before).all(|(after, before)| after - before == 5));
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_die_under_requests_leave_none_in_flight() {
    let engines = engines(3).await;
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    for (at, (fault, stream)) in [
        ("{\"die_after\": 0}", false),
        ("{\"die_after\": 2}", true),
        ("{\"status\": 500}", false),
        ("{\"die_after\": 0}", true),
    ]
    .into_iter()
    .cycle()
    .take(12)
    .enumerate()
    {
        let mut body = completion(MODEL, &prompt(at as u32, 40));
        (body["stream"], body["max_tokens"]) = (stream.into(), 8.into());
        let request = Request::json("/v1/completions", &body).field("x-sim-fault", fault);
        let answer = gateway.send(&request).await;
        let told = String::from_utf8_lossy(&answer.body).into_owned();
        match (fault.contains("die"), stream) {
            (true, true) => {
                assert!(answer.complete && told.contains("\"code\":\"engine_error\""), "{answer:?}");
                assert!(told.ends_with("\n\n") && !told.contains("[DONE]"), "{told}");
            }
            (true, false) => assert!(!answer.complete || answer.status == 502, "{answer:?}"),
            (false, _) => assert_eq!((answer.status, answer.complete), (500, true)),
        }
    }
    gateway.until_idle().await;
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.sum("kvgate_requests_total", &[]), 12.0, "each is counted once");
    assert_eq!(metrics.get("kvgate_requests_total", &["outcome=\"engine_failed\""]), 9.0);
    assert_eq!(metrics.get("kvgate_requests_total", &["outcome=\"5xx\""]), 3.0);
    // a short answer that is not whole is nobody's yet: all three were asked
    assert_eq!(metrics.sum("kvgate_endpoint_failures_total", &[]), 18.0);
}

/// Engines that start anew with requests on them: clients are told, and nothing is left in flight.
#[tokio::test(flavor = "multi_thread")]
async fn engines_that_restart_under_requests_leave_none_in_flight() {
    let mut engines = Vec::new();
    for _ in 0..2 {
        engines.push(engine_with(|c| c.decode_us = 20_000.0).await);
    }
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    for round in 0..2 {
        let mut clients = Vec::new();
        for seed in 0..10 {
            let mut body = completion(MODEL, &prompt(100 * round + seed, 40));
            (body["stream"], body["max_tokens"]) = (true.into(), 2000.into());
            let mut client = Connection::open(gateway.address).await;
            client.send(&Request::json("/v1/completions", &body)).await;
            let head = client.head().await.unwrap();
            assert!(client.piece().await.unwrap().is_some());
            clients.push((client, head));
        }
        assert_eq!(in_flight(&gateway).await, 10.0);
        for engine in &mut engines {
            engine.restart().await.unwrap();
        }
        for (mut client, head) in clients {
            let answer = client.rest(head).await;
            let told = String::from_utf8_lossy(&answer.body).into_owned();
            assert!(answer.complete && told.contains("\"code\":\"engine_error\""), "{answer:?}");
        }
        gateway.until_idle().await;
    }
    for seed in 500..510 {
        gateway.complete(&prompt(seed, 5)).await;
    }
    assert!(engines.iter().all(|engine| engine.log().len() == 15));
}

/// Clients that leave in the middle of their request, and while an engine does not take it: no claim is left, and no memory.
#[tokio::test(flavor = "multi_thread")]
async fn clients_that_leave_before_they_have_asked_leave_nothing() {
    const FREE: &str = "kvgate_body_buffer_free_bytes";
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let engine = tokio::spawn(async move {
        let mut deaf = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            deaf.push(stream);
        }
    });
    let gateway = Setup::new(&[Rule::new("any", &["round-robin"]).endpoint(address, "")]).start().await;
    let free = gateway.metric(FREE, &[]).await;
    let long = Request::text("/v1/files", &"a word ".repeat(2_000_000));
    for whole in [false, true] {
        let mut clients = Vec::new();
        for _ in 0..8 {
            let mut client = Connection::open(gateway.address).await;
            let rest = client.send_half(&long).await;
            if whole {
                client.send_rest(rest).await;
            }
            clients.push(client);
        }
        gateway.until_metric("kvgate_requests_open", &[], 8.0).await;
        let chosen = if whole { 8.0 } else { 0.0 };
        until("engines are chosen", async || in_flight(&gateway).await == chosen).await;
        assert!(gateway.metric(FREE, &[]).await < free);
        drop(clients);
        gateway.until_metric("kvgate_requests_open", &[], 0.0).await;
        gateway.until_idle().await;
        gateway.until_metric(FREE, &[], free).await;
    }
    engine.abort();
}

/// A WebSocket is passed through, both ways, and counts as one request as long as it stands.
#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_counts_until_it_ends() {
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let engine = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = switches(&mut stream).await;
        let (mut from, mut to) = stream.split();
        let _ = tokio::io::copy(&mut from, &mut to).await;
        head.to_lowercase()
    });
    let gateway = Setup::new(&[Rule::new("any", &["round-robin"]).endpoint(address, "")]).start().await;
    let mut client = TcpStream::connect(gateway.address).await.unwrap();
    let ask = "GET /v1/realtime?x=1 HTTP/1.1\r\nhost: gateway\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
               sec-websocket-key: abc\r\nsec-websocket-version: 13\r\n\r\n";
    client.write_all(ask.as_bytes()).await.unwrap();
    let head = reads_head(&mut client).await.to_lowercase();
    assert!(head.starts_with("http/1.1 101 ") && head.contains("upgrade: websocket"), "{head}");
    assert!(
        head.contains("x-request-id: ") && head.contains(&format!("x-kvgate-endpoint: {address}")),
        "{head}"
    );
    for word in ["ping", "pong", "\u{0}\u{81}"] {
        client.write_all(word.as_bytes()).await.unwrap();
        let mut echo = vec![0; word.len()];
        client.read_exact(&mut echo).await.unwrap();
        assert_eq!(echo, word.as_bytes());
        assert_eq!(in_flight(&gateway).await, 1.0);
    }
    drop(client);
    gateway.until_idle().await;
    let asked = engine.await.unwrap();
    assert!(
        asked.starts_with("get /v1/realtime?x=1 http/1.1\r\n") && asked.contains("sec-websocket-key: abc"),
        "{asked}"
    );
    assert!(asked.contains("x-request-id: "), "{asked}");
    gateway.until_metric("kvgate_endpoint_attempts_total", &[], 1.0).await;
}

/// Names that clients make up cost no series.
#[tokio::test(flavor = "multi_thread")]
async fn made_up_names_leave_no_trace_in_the_metrics() {
    let engines = engines(1).await;
    let any = Rule::new("any", &["kv-exact"]).matching("path_prefix = \"/any\"").engines(&engines);
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines), any]).start().await;
    gateway.complete(&prompt(1, 40)).await;
    // what the engine tells of itself has series of its own
    gateway.until_metric("kvgate_telemetry_fresh", &["service=\"any\""], 1.0).await;
    gateway.until_metric("kvgate_telemetry_fresh", &["service=\"words\""], 1.0).await;
    let before = gateway.metrics().await.lines();
    let mut client = Connection::open(gateway.address).await;
    for n in 0..500_u64 {
        let name = format!("org/{:x}", n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let path = if n % 2 == 0 { format!("/{name}") } else { format!("/any/{name}") };
        let mut request =
            Request::json(&path, &completion(&name, &prompt(1, 20))).field("x-session-id", &name);
        if n % 3 == 0 {
            request = request.field("x-model", &name).field("x-request-id", &name);
        }
        client.send(&request).await;
        let answer = client.answer().await;
        assert!(matches!(answer.status, 404 | 503) && answer.complete, "{answer:?}");
    }
    let after = gateway.metrics().await.lines();
    assert_eq!(after, before);
}
