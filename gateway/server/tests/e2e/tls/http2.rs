//! HTTP/2 where clients connect.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::SendRequest;
use http::{HeaderMap, Request};
use kvgate_sim::Sim;
use tokio::time::timeout;
use xxhash_rust::xxh3::xxh3_64;

use super::frames::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING, PRIORITY, RST_STREAM, Raw,
    SETTINGS, WINDOW_UPDATE, block, frame, pseudo,
};
use super::{Authority, Terms, certificates, client, connect};
use crate::support::{Gateway, MODEL, PATIENCE, Rule, Setup, completion, engine_with, prompt, served, until};

async fn gateway(ours: &Authority, engine: &Sim, process: &str) -> Gateway {
    let setup = Setup::new(&[Rule::new("all", &["round-robin"]).endpoint(engine.address(), "")]);
    let lines = certificates(setup.folder(), &[&ours.issue(&["a.test"])]);
    setup.listener(&lines).process(process).start().await
}

/// A connection that speaks HTTP/2.
async fn http2(to: SocketAddr, ours: &Authority) -> SendRequest<Bytes> {
    let tls = client(ours, &Terms { offers: &["h2", "http/1.1"], ..Terms::default() });
    let stream = connect(to, "a.test", &tls).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (sender, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(async move {
        let _ = connection.await;
    });
    sender.ready().await.unwrap()
}

struct Answer {
    status: u16,
    fields: HeaderMap,
    body: Vec<u8>,
}

fn post(path: &str) -> http::request::Builder {
    Request::post(format!("https://a.test{path}")).header("content-type", "application/json")
}

async fn call(sender: &mut SendRequest<Bytes>, request: http::request::Builder, body: Bytes) -> Answer {
    let (answer, mut upload) = sender.send_request(request.body(()).unwrap(), body.is_empty()).unwrap();
    if !body.is_empty() {
        // a refusal may be there before the body is sent
        let _ = upload.send_data(body, true);
    }
    let answer = timeout(PATIENCE, answer).await.expect("an answer in time").unwrap();
    let (head, mut stream) = answer.into_parts();
    let mut body = Vec::new();
    while let Some(piece) = timeout(PATIENCE, stream.data()).await.expect("a piece in time") {
        let piece = piece.unwrap();
        stream.flow_control().release_capacity(piece.len()).unwrap();
        body.extend_from_slice(&piece);
    }
    Answer { status: head.status.as_u16(), fields: head.headers, body }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_all_sizes_go_through_side_by_side() {
    let (engine, ours) = (engine_with(|c| c.events = false).await, Authority::new("ours"));
    let gateway = gateway(&ours, &engine, "").await;
    let sender = http2(gateway.address, &ours).await;
    let mut calls = Vec::new();
    for n in 0..60 {
        let mut sender = sender.clone();
        calls.push(tokio::spawn(async move {
            let mut body = completion(MODEL, &prompt(n, 40));
            // from nothing to a megabyte: beyond the windows of stream and connection
            body["user"] = "u".repeat((n as usize % 6) * 200_000).into();
            let body = Bytes::from(body.to_string());
            let request = post("/v1/completions").header("x-request-id", format!("n{n}"));
            (n, xxh3_64(&body), call(&mut sender, request, body).await)
        }));
    }
    for done in calls {
        let (n, hash, answer) = done.await.unwrap();
        assert_eq!(answer.status, 200, "{n}: {}", String::from_utf8_lossy(&answer.body));
        assert_eq!(answer.fields["x-request-id"], format!("n{n}").as_str());
        assert_eq!(served(&engine, &format!("n{n}")).unwrap().body_hash, hash);
    }
    gateway.until_idle().await;
    assert_eq!(gateway.metric("kvgate_connections_open", &["listener=\"edge\""]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_comes_piece_by_piece_and_ends_with_its_client() {
    let (engine, ours) =
        (engine_with(|c| (c.events, c.decode_us) = (false, 100_000.0)).await, Authority::new("ours"));
    let gateway = gateway(&ours, &engine, "").await;
    let mut sender = http2(gateway.address, &ours).await;
    let mut body = completion(MODEL, &prompt(1, 40));
    (body["stream"], body["max_tokens"]) = (true.into(), 1000.into());
    let request = post("/v1/completions").header("x-request-id", "left").body(()).unwrap();
    let (answer, mut upload) = sender.send_request(request, false).unwrap();
    upload.send_data(body.to_string().into(), true).unwrap();
    let mut stream = timeout(PATIENCE, answer).await.unwrap().unwrap().into_body();
    for _ in 0..2 {
        let piece = timeout(PATIENCE, stream.data()).await.unwrap().unwrap().unwrap();
        assert!(piece.starts_with(b"data: {") && piece.ends_with(b"\n\n"), "{piece:?}");
        stream.flow_control().release_capacity(piece.len()).unwrap();
        assert_eq!(served(&engine, "left").unwrap().ended, kvgate_sim::Ended::Open);
    }
    // the request alone is taken back: the connection serves on
    drop((stream, upload));
    until("the engine has seen it leave", async || {
        served(&engine, "left").unwrap().ended != kvgate_sim::Ended::Open
    })
    .await;
    gateway.until_idle().await;
    (body["stream"], body["max_tokens"]) = (false.into(), 1.into());
    assert_eq!(call(&mut sender, post("/v1/completions"), body.to_string().into()).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_hold_as_in_http_1() {
    let (engine, ours) = (engine_with(|c| c.events = false).await, Authority::new("ours"));
    let gateway = gateway(&ours, &engine, "[limits]\nbody = \"64KiB\"\n").await;
    let mut sender = http2(gateway.address, &ours).await;
    let many = (0..200).fold(post("/v1/completions"), |request, n| request.header(format!("x-{n}"), "1"));
    let long = format!("/{}", "a".repeat(9_000));
    for (request, body, status, code) in [
        (many, 1, 431, "head_too_large"),
        (post(&long), 1, 414, "uri_too_long"),
        (post("/v1/completions"), 100_000, 413, "body_too_large"),
        (post("/v1/completions").header("content_length", "1"), 1, 400, "bad_request"),
        (post("/a%00b"), 1, 400, "bad_request"),
    ] {
        let answer = call(&mut sender, request, vec![b'x'; body].into()).await;
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert!(answer.status == status && text.contains(code), "{status} {code}: {} {text}", answer.status);
    }
    let body = completion(MODEL, &prompt(1, 40)).to_string();
    assert_eq!(call(&mut sender, post("/v1/completions"), body.into()).await.status, 200);
    assert_eq!(engine.log().len(), 1);
}

/// How many frames of each kind a connection bears that carry no request, and that others are served meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn floods_end_the_connection_and_nobody_else_is_hurt() {
    type Next = fn(usize) -> Vec<u8>;
    let head = || block(&pseudo("GET", "/v1/models"));
    let floods: [(&str, Next); 9] = [
        ("ping", |_| frame(PING, 0, 0, &[0; 8])),
        ("ping ack", |_| frame(PING, ACK, 0, &[0; 8])),
        ("settings", |_| frame(SETTINGS, 0, 0, &[0, 4, 0, 1, 0, 0])),
        ("priority", |n| frame(PRIORITY, 0, 1 + 2 * (n as u32 % 99), &[0, 0, 0, 0, 1])),
        ("unknown", |_| frame(0xfa, 0, 0, b"")),
        ("empty data", |n| match n {
            0 => frame(HEADERS, END_HEADERS, 1, &block(&pseudo("POST", "/v1/completions"))),
            _ => frame(DATA, 0, 1, b""),
        }),
        ("continuation", |n| match n {
            0 => frame(HEADERS, 0, 1, &block(&pseudo("GET", "/v1/models"))),
            _ => frame(CONTINUATION, 0, 1, &block(&[(b"a", b"b")])),
        }),
        ("window update", |_| frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1])),
        ("rapid reset", |n| {
            let stream = 1 + 2 * n as u32;
            let head = frame(HEADERS, END_HEADERS | END_STREAM, stream, &block(&pseudo("GET", "/v1/models")));
            [head, frame(RST_STREAM, 0, stream, &[0, 0, 0, 8])].concat()
        }),
    ];
    let (engine, ours) = (engine_with(|c| c.events = false).await, Authority::new("ours"));
    let gateway = gateway(&ours, &engine, "").await;
    let mut others = Raw::open(gateway.address, &ours).await;
    let mut stream = 1;
    for (what, next) in floods {
        let mut raw = Raw::open(gateway.address, &ours).await;
        let sent = raw.flood(20_000, next).await;
        assert!(sent < 20_000 && raw.is_cut().await, "{what}: {sent} taken");
        assert!(others.send(&frame(HEADERS, END_HEADERS | END_STREAM, stream, &head())).await);
        assert_eq!(others.status(stream).await, Some(200), "after {what}");
        stream += 2;
    }
    assert!(engine.log().len() < 1_000, "{}", engine.log().len());
    gateway.until_metric("kvgate_connections_refused_total", &["reason=\"flood\""], 9.0).await;
    gateway.until_idle().await;
    until("their connections are given back", async || {
        gateway.metric("kvgate_connections_open", &["listener=\"edge\""]).await == 1.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_allowance_may_be_larger_and_an_ordinary_client_needs_none() {
    let (engine, ours) = (engine_with(|c| c.events = false).await, Authority::new("ours"));
    let gateway = gateway(&ours, &engine, "[http2]\ncontrol_frames = 100_000\nstreams = 3\n").await;
    let mut raw = Raw::open(gateway.address, &ours).await;
    let settings = raw.until(|frame| frame.kind == SETTINGS && frame.flags & ACK == 0).await.unwrap();
    assert!(settings.payload.chunks(6).any(|one| one == [0, 3, 0, 0, 0, 3]), "{settings:?}");
    assert_eq!(raw.flood(2_000, |_| frame(PRIORITY, 0, 1, &[0, 0, 0, 3, 1])).await, 2_000);
    let head = block(&pseudo("GET", "/v1/models"));
    assert!(raw.send(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &head)).await);
    assert_eq!(raw.status(1).await, Some(200));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_http_2_ends_the_connection() {
    let (engine, ours) = (engine_with(|c| c.events = false).await, Authority::new("ours"));
    let gateway = gateway(&ours, &engine, "").await;
    let head = block(&pseudo("GET", "/v1/models"));
    let get = |flags, stream| frame(HEADERS, flags | END_HEADERS, stream, &head);
    for (what, bytes) in [
        ("another preface", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n".to_vec()),
        ("HTTP/1", super::MODELS.as_bytes().to_vec()),
    ] {
        let mut raw = Raw::silent(gateway.address, &ours).await;
        raw.send(&bytes).await;
        assert!(raw.is_cut().await, "{what}");
    }
    for (what, bytes) in [
        ("a stream of the server's", get(END_STREAM, 2)),
        ("stream 0", get(END_STREAM, 0)),
        ("a stream before the last", [get(END_STREAM, 5), get(END_STREAM, 3)].concat()),
        ("a frame amid a head", [frame(HEADERS, 0, 1, &head), frame(PING, 0, 0, &[0; 8])].concat()),
        (
            "a head that goes on elsewhere",
            [frame(HEADERS, 0, 1, &head), frame(CONTINUATION, 4, 3, &head)].concat(),
        ),
        ("a head that goes on without beginning", frame(CONTINUATION, END_HEADERS, 1, &head)),
        ("data before a head", frame(DATA, 0, 1, b"x")),
        ("a short ping", frame(PING, 0, 0, &[0; 7])),
        ("settings for a stream", frame(SETTINGS, 0, 1, b"")),
        ("settings of the wrong length", frame(SETTINGS, 0, 0, &[0; 5])),
        ("a window that is none", frame(SETTINGS, 0, 0, &[0, 4, 0xff, 0xff, 0xff, 0xff])),
        ("a frame size that is none", frame(SETTINGS, 0, 0, &[0, 5, 0, 0, 0, 1])),
        ("a window increment of 0", frame(WINDOW_UPDATE, 0, 0, &[0; 4])),
        ("a window beyond its end", frame(WINDOW_UPDATE, 0, 0, &[0x7f, 0xff, 0xff, 0xff])),
        ("fields that cannot be decoded", frame(HEADERS, END_HEADERS | END_STREAM, 1, &[0xff; 20])),
        ("a frame that is too long", frame(DATA, 0, 1, &vec![0; 70_000])),
        ("a push of the client's", frame(0x5, END_HEADERS, 1, &[0, 0, 0, 2])),
        ("padding beyond its frame", frame(DATA, 0x8, 1, &[9, 1])),
    ] {
        let mut raw = Raw::open(gateway.address, &ours).await;
        raw.send(&bytes).await;
        let goaway = raw.until(|frame| frame.kind == GOAWAY).await;
        let fault = goaway.and_then(|frame| frame.payload.get(7).copied());
        assert!(fault.is_none_or(|fault| fault != 0) && raw.is_cut().await, "{what}: {fault:?}");
    }
    // and a fault of a stream ends that stream alone
    let mut raw = Raw::open(gateway.address, &ours).await;
    let fields = [&pseudo("POST", "/v1/completions")[..], &[(b"content-length", b"1")]].concat();
    let head = frame(HEADERS, END_HEADERS, 1, &block(&fields));
    assert!(raw.send(&[head, frame(DATA, END_STREAM, 1, b"more")].concat()).await);
    assert_eq!(raw.status(1).await, None);
    assert!(raw.send(&get(END_STREAM, 3)).await);
    assert_eq!(raw.status(3).await, Some(200));
    gateway.until_idle().await;
}

/// SIGTERM: connections are told by a GOAWAY without a fault, and streams that are under way come to their end.
#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_connections_are_told_and_streams_are_whole() {
    let engine = engine_with(|c| (c.events, c.decode_us) = (false, 50_000.0)).await;
    let ours = Authority::new("ours");
    let setup = Setup::new(&[Rule::new("all", &["round-robin"]).endpoint(engine.address(), "")]);
    let lines = certificates(setup.folder(), &[&ours.issue(&["a.test"])]);
    let mut gateway = setup.listener(&lines).spawn().await;
    let mut idle = Raw::open(gateway.address, &ours).await;
    let mut sender = http2(gateway.address, &ours).await;
    let mut body = completion(MODEL, &prompt(1, 40));
    (body["stream"], body["max_tokens"]) = (true.into(), 60.into());
    let streaming = tokio::spawn(async move {
        call(&mut sender, post("/v1/completions"), Bytes::from(body.to_string())).await
    });
    until("the engine has it", async || engine.log().len() == 1).await;
    gateway.signal("TERM", 1);
    let goaway = idle.until(|frame| frame.kind == GOAWAY).await.expect("a GOAWAY");
    assert_eq!(goaway.payload.get(4..8), Some(&[0; 4][..]), "no fault");
    let answer = streaming.await.unwrap();
    let text = String::from_utf8(answer.body).unwrap();
    assert!(answer.status == 200 && text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(text.matches("data: ").count(), 61, "{text}");
    until("it ends", async || gateway.ended().is_some()).await;
    assert_eq!(gateway.ended().unwrap().code(), Some(0), "{}", gateway.log());
}
