//! What the client sends is what the engine gets, and back.

use futures::{StreamExt, stream};
use kvgate_tests::{Kind, heavy_json_cases, json_cases};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use xxhash_rust::xxh3::xxh3_64;

use crate::support::{
    Connection, MODEL, Request, Rule, Setup, completion, engine, engine_with, fetch, host, prompt,
    reads_head, served,
};

const MISSES: &str = "loxilb_pd_kv_tier15_miss_reason_total";

/// Bodies that a gateway which reads and prints JSON would change; `true`: those that name no model, or whose
/// model cannot be read.
fn odd_bodies() -> Vec<(bool, Vec<u8>)> {
    let words =
        r#""the quick question of the day is what to do with a body that nobody expects to see here at all""#;
    let with = |members: &str| {
        format!("{{{members}, \"model\": \"{MODEL}\", \"prompt\": {words}, \"max_tokens\": 1}}")
    };
    let deep = |open: &str, close: &str, n| format!("\"x\": {}1{}", open.repeat(n), close.repeat(n));
    let mut bodies: Vec<(bool, Vec<u8>)> = [
        r#""x": 1.0, "y": 1, "z": 1e2, "w": -0.0"#,
        r#""x": 9007199254740993, "y": 123456789012345678901234567890, "z": 0.1000000000000000055511151231257827"#,
        r#""x": {"b": 1, "a": {"unknown": [null, true, {"c": 2}]}, "b": 3}, "Ünknown": "\u00e9\ud83d\ude00\/""#,
        r#""x": NaN, "y": -Infinity, "z": 1e999"#,
        r#""x": "\ud800""#,
        " \r\n\t\"x\"  :  [ ] ",
        "\"x\": \"\u{7f}\u{2028}\u{feff}\"",
        &deep("[", "]", 10_000),
        &deep("{\"x\":", "}", 10_000),
    ]
    .iter()
    .map(|members| (false, with(members).into_bytes()))
    .collect();
    let doubled = format!(
        r#"{{"model": "nobody's", "prompt": 1, "prompt": {words}, "max_tokens": 1, "model": "{MODEL}"}}"#
    );
    let marked = format!("\u{feff}{}", with("\"x\": 1"));
    bodies.extend([doubled, marked].map(|body| (false, body.into_bytes())));
    let mut broken = with("\"x\": \"?\"").into_bytes();
    let at = broken.iter().position(|b| *b == b'?').unwrap();
    broken[at] = 0xff;
    let unread = [
        &b"{"[..],
        b"null",
        b"[]",
        b"\"model\"",
        b"\0",
        b"{\"model\": 7}",
        b"{} {}",
        b"{\"model\"",
        b"{\"a\":1,}",
    ];
    bodies.extend(unread.map(|body| (true, body.to_vec())));
    bodies.push((true, broken));
    bodies.push((true, with("\"x\": 1").encode_utf16().flat_map(u16::to_le_bytes).collect()));
    bodies.push((true, vec![b'['; 100_000]));
    bodies
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_bodies_pass_through_unchanged_and_nothing_panics() {
    let engine = engine().await;
    let gateway = Setup::new(&[Rule::kv("words").engine(&engine)]).spawn().await;
    let mut unread = 0.0;
    for (no_model, body) in odd_bodies() {
        let shown = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
        for path in ["/v1/completions", "/v1/chat/completions"] {
            let answer = gateway.send(&Request::post(path, body.clone())).await;
            assert!(answer.complete && matches!(answer.status, 200 | 400), "{shown}: {answer:?}");
            let served = served(&engine, answer.id()).unwrap();
            assert_eq!((served.body_bytes, served.body_hash), (body.len(), xxh3_64(&body)), "{shown}");
            assert_eq!(served.status, answer.status);
            unread += f64::from(no_model);
            gateway.until_metric(MISSES, &["reason=\"model_empty\""], unread).await;
            // what the engine says comes back as it said it
            if answer.status == 400 {
                let direct = fetch(engine.address(), &Request::post(path, body.clone())).await;
                assert_eq!((direct.status, &direct.body), (400, &answer.body), "{shown}");
            }
        }
    }
    gateway.complete(&prompt(1, 40)).await;
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

/// The whole corpus, each text as a body and inside one: whatever a reader may make of it, the engine gets it as it came
/// and answers, and what names no model is counted as that.
#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_write_json_passes_through() {
    let engine = engine().await;
    let rule =
        Rule::new("any", &["kv-exact", "round-robin"]).engine(&engine).table("limits", "body = \"32MiB\"");
    let gateway = Setup::new(&[rule]).spawn().await;
    let (small, heavy) = (json_cases(), heavy_json_cases());
    assert!(small.len() > 318 && heavy.len() > 5, "{} and {}", small.len(), heavy.len());
    let send = async |name: &str, body: Vec<u8>| {
        let answer = gateway.send(&Request::post("/v1/completions", body.clone())).await;
        assert!(answer.complete && matches!(answer.status, 200 | 400 | 404), "{name}: {answer:?}");
        let served = served(&engine, answer.id()).unwrap();
        let got = (served.body_bytes, served.body_hash, served.status);
        assert_eq!(got, (body.len(), xxh3_64(&body), answer.status), "{name}");
    };
    let inside = small.iter().map(|case| (case, case.in_request(MODEL)));
    let alone = small.iter().chain(&heavy).map(|case| (case, case.text.clone()));
    let all = alone.chain(inside).map(|(case, body)| {
        let strict = serde_json::from_slice::<serde_json::Value>(&body).ok();
        // what the grammar leaves open may be read or not
        let named = strict.filter(|_| case.kind != Kind::Either).map(|value| {
            let model = value["model"].as_str();
            model.is_some_and(|name| !name.is_empty())
        });
        (named, &case.name, body)
    });
    let (clear, open): (Vec<_>, Vec<_>) = all.partition(|(named, ..)| named.is_some());
    let nameless = clear.iter().filter(|(named, ..)| *named == Some(false)).count();
    assert!(nameless > 50 && clear.len() > 2 * nameless && open.len() > 100);
    let sent = async |bodies: Vec<(Option<bool>, &String, Vec<u8>)>| {
        let requests = bodies.into_iter().map(|(_, name, body)| send(name, body));
        stream::iter(requests).for_each_concurrent(8, |request| request).await;
    };
    sent(clear).await;
    gateway.until_metric(MISSES, &["reason=\"model_empty\""], nameless as f64).await;
    sent(open).await;
    gateway.until_idle().await;
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

/// An engine that answers anything with these bytes and keeps what it was sent.
async fn parrot(answer: Vec<u8>) -> (std::net::SocketAddr, tokio::sync::mpsc::Receiver<Vec<u8>>) {
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (heard, hear) = tokio::sync::mpsc::channel(8);
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (answer, heard) = (answer.clone(), heard.clone());
            tokio::spawn(async move {
                let mut bytes = Vec::new();
                while !bytes.ends_with(b"}") && !bytes.ends_with(b"\r\n\r\n") {
                    if !stream.read_buf(&mut bytes).await.is_ok_and(|n| n > 0) {
                        return;
                    }
                }
                let _ = heard.send(bytes).await;
                let _ = stream.write_all(&answer).await;
            });
        }
    });
    (address, hear)
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_come_back_as_the_engine_wrote_them() {
    let odd = r#"{"n": 1.0, "big": 9007199254740993, "n": 2, "x": NaN, "_extra": {"b":1,"a":2}}"#;
    let bodies = [odd.as_bytes().to_vec(), b"\xff\xfe no JSON".to_vec(), vec![0; 70_000], Vec::new()];
    for (status, body) in [200, 201, 404, 422, 429, 500].into_iter().zip(bodies.iter().cycle()) {
        let head = format!(
            "HTTP/1.1 {status} Odd\r\ncontent-type: application/x-odd\r\nX-Extra: 1\r\nx-extra: 2\r\nretry-after: 7\r\n\
             content-length: {}\r\nkvgate-secret-of: engine\r\n\r\n",
            body.len()
        );
        let (address, mut hear) = parrot([head.as_bytes(), body].concat()).await;
        let gateway = Setup::new(&[Rule::new("odd", &["round-robin"]).endpoint(address, "")]).start().await;
        let request = Request::post("/v1/any%2Fpath?q=%41&q=b+c", odd)
            .field("X-Odd", "one")
            .field("x-odd", "two")
            .field("authorization", "Bearer mine")
            .field("connection", "x-hop")
            .field("x-hop", "mine alone");
        let answer = gateway.send(&request).await;
        assert_eq!((answer.status, answer.complete), (status, true));
        assert_eq!(&answer.body[..], &body[..]);
        let extra: Vec<_> =
            answer.fields.iter().filter(|(n, _)| n == "x-extra").map(|(_, v)| v.as_str()).collect();
        assert_eq!((extra, answer.field("retry-after")), (vec!["1", "2"], Some("7")));
        let heard = String::from_utf8(hear.recv().await.unwrap()).unwrap();
        let (head, sent) = heard.split_once("\r\n\r\n").unwrap();
        assert_eq!(sent, odd);
        assert!(head.starts_with("POST /v1/any%2Fpath?q=%41&q=b+c HTTP/1.1\r\n"), "{head}");
        let lower = head.to_lowercase();
        for line in ["x-odd: one", "x-odd: two", "authorization: bearer mine", "host: gateway"] {
            assert!(lower.contains(line), "{line}: {head}");
        }
        assert!(!lower.contains("x-hop"), "{head}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_come_back_byte_for_byte() {
    let engine = engine_with(|c| c.events = false).await;
    let gateway = Setup::new(&[Rule::kv("words").engine(&engine)]).start_unready().await;
    let mut body = completion(MODEL, &prompt(1, 40));
    (body["stream"], body["max_tokens"]) = (true.into(), 20.into());
    body["stream_options"] = serde_json::json!({"include_usage": true});
    let request = Request::json("/v1/completions", &body).field("x-request-id", "the-same");
    gateway.send(&request).await; // from now on all of it is cached
    // the clock's second is part of the answer
    let mut pair = Vec::new();
    crate::support::until("two answers of one second", async || {
        let ours = gateway.send(&request).await;
        let direct = fetch(engine.address(), &request).await;
        let created = |answer: &crate::support::Answer| {
            String::from_utf8(answer.body.to_vec())
                .unwrap()
                .split("\"created\":")
                .nth(1)
                .map(|t| t[..10].to_owned())
        };
        let same = created(&ours) == created(&direct);
        pair = vec![ours, direct];
        same
    })
    .await;
    assert_eq!(pair[0].body, pair[1].body);
    assert_eq!(pair[0].field("content-type"), pair[1].field("content-type"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_not_kept_back() {
    let engine = engine_with(|c| c.decode_us = 200_000.0).await;
    let gateway = Setup::new(&[Rule::kv("words").engine(&engine)]).start().await;
    let mut body = completion(MODEL, &prompt(1, 40));
    (body["stream"], body["max_tokens"]) = (true.into(), 1000.into());
    let mut client = Connection::open(gateway.address).await;
    client.send(&Request::json("/v1/completions", &body)).await;
    let head = client.head().await.unwrap();
    assert_eq!((head.status, head.field("content-type")), (200, Some("text/event-stream; charset=utf-8")));
    for _ in 0..2 {
        let piece = client.piece().await.unwrap().unwrap();
        assert!(piece.starts_with(b"data: {") && piece.ends_with(b"\n\n"), "{piece:?}");
        let served = served(&engine, head.id()).unwrap();
        assert_eq!(served.ended, kvgate_sim::Ended::Open, "the engine is still at it");
        assert!(served.output_tokens < 900);
    }
    drop(client);
    gateway.until_idle().await;
}

/// The end of the connection is the end of an answer without a length to a client of HTTP/1.0: of one that is whole.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_without_a_length_that_breaks_off_ends_in_a_reset() {
    const CHUNKED: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n";
    let whole = format!("{CHUNKED}0\r\n\r\n");
    let cut = format!("{CHUNKED}4\r\nha");
    for (answer, is_whole) in [(&*whole, true), ("HTTP/1.1 200 OK\r\n\r\nhalf", true), (&*cut, false)] {
        let listener = TcpListener::bind((host(), 0)).await.unwrap();
        let rule = Rule::new("any", &["round-robin"]).endpoint(listener.local_addr().unwrap(), "");
        let gateway = Setup::new(&[rule]).start().await;
        let mut client = TcpStream::connect(gateway.address).await.unwrap();
        client.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
        let (mut engine, _) = listener.accept().await.unwrap();
        reads_head(&mut engine).await;
        engine.write_all(answer.as_bytes()).await.unwrap();
        let head = reads_head(&mut client).await;
        assert!(!head.to_lowercase().contains("content-length"), "{head}");
        drop(engine);
        let mut body = Vec::new();
        let read = client.read_to_end(&mut body).await;
        match is_whole {
            true => assert_eq!((read.unwrap(), &body[..]), (4, &b"half"[..])),
            false => assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset),
        }
        gateway.until_idle().await;
    }
}
