//! Request bodies: whole and byte for byte, or refused in order.

use std::sync::Arc;

use futures::FutureExt;
use tokio::sync::Semaphore;

use crate::support::client::H1;
use crate::support::{Ask, BOTH, Client, Gateway, VIA_H1, VIA_H2, digest, noise, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_every_size_and_framing_arrive_whole() {
    let gateway = Gateway::start().await;
    for n in [0, 1, 65_536, 65_537, 300_000, 16 << 20] {
        let body = noise(n);
        for (h2, engine) in BOTH {
            let mut client = Client::open(gateway.address, h2).await;
            for unsized_ in [false, true] {
                let answer =
                    client.call(&Ask { unsized_, ..Ask::post("/echo", body.clone()).via(engine) }).await;
                assert_eq!(
                    (answer.status, answer.text()),
                    (200, digest(&body)),
                    "{h2} {engine} {n} {unsized_}"
                );
                let seen = gateway.engines[0].last();
                assert_eq!(seen.get("content-length"), [n.to_string()]);
                assert!(seen.get("transfer-encoding").is_empty());
                assert_eq!(seen.get(if seen.h2 { ":authority" } else { "host" }), ["front.example"]);
                assert_eq!(seen.h2, engine == VIA_H2);
                assert_eq!(answer.get("x-served-by"), Some(engine.to_string().as_str()));
                if !h2 {
                    assert_eq!(answer.get("connection"), Some("keep-alive"));
                }
            }
        }
    }
    gateway.drained().await;
    until("all memory is given back", || gateway.state.buffers.free() == 64 << 20).await;
}

/// Nothing of a body is parsed and printed, neither way.
#[tokio::test]
async fn odd_json_passes_both_ways() {
    const ODD: &[&[u8]] = &[
        br#"{"b":1.0,"a":1,"a":2,"x":9007199254740993,"n":{"m":[{"unknown":1e2}]},"e":1E+400 }"#,
        b"\xef\xbb\xbf{\"model\" : \"\\ud800\", \"s\":\"\\u0000\\/\"}\r\n\t ",
        b"{\"bad utf8\":\"\xff\xfe\"}",
        b"[NaN, Infinity, -0, 1e999]",
        b"{'not': json",
        b"\0\0\0",
    ];
    let gateway = Gateway::start().await;
    gateway.on("/v1/chat/completions", |c| {
        async move {
            let body = c.body().await?;
            c.answer(400, &body, &[("content-type", "application/json"), ("x-Unknown", "a, b;c=\"d\"")]).await
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        for body in ODD {
            let answer = client
                .call(&Ask::post("/v1/chat/completions", *body).via(engine).with("X-Odd", "\u{e9};,\"  x\""))
                .await;
            assert_eq!((answer.status, answer.body.as_slice()), (400, *body), "{h2} {engine}");
            assert_eq!(answer.get("x-unknown"), Some("a, b;c=\"d\""));
            assert_eq!(gateway.engines[0].last().get("x-odd"), ["\u{e9};,\"  x\""]);
        }
    }
}

#[tokio::test]
async fn expect_continue_is_answered_here() {
    let gateway = Gateway::start().await;
    let mut client = H1::open(gateway.address).await;
    for n in [5, 300_000] {
        let head = format!(
            "POST /echo HTTP/1.1\r\nHost: a\r\nx-engine: 0\r\nExpect: 100-continue\r\nContent-Length: {n}\r\n\r\n"
        );
        client.raw(head.as_bytes()).await;
        assert_eq!(client.head().await.unwrap().status, 100);
        client.raw(&noise(n)).await;
        let answer = client.recv("POST").await;
        assert_eq!((answer.status, answer.text()), (200, digest(&noise(n))));
        assert_eq!(answer.get("connection"), Some("keep-alive"), "the 100 is no early answer");
        assert!(gateway.engines[0].last().get("expect").is_empty());
    }
    client
        .raw(b"POST /echo HTTP/1.1\r\nHost: a\r\nx-max-body: 9\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n")
        .await;
    let answer = client.recv("POST").await;
    assert_eq!((answer.status, answer.code().as_str()), (413, "body_too_large"));
    assert!(answer.informed.is_empty());
    assert_eq!(answer.get("connection"), Some("close"), "the body may come or not");
}

/// A next request's first byte must not pass for the client's leaving.
#[tokio::test]
async fn pipelined_requests_are_served_in_order() {
    let gateway = Gateway::start().await;
    let gate = Arc::new(Semaphore::new(0));
    gateway.on("/slow", {
        let gate = gate.clone();
        move |c| {
            let gate = gate.clone();
            async move {
                gate.acquire().await.unwrap().forget();
                c.echo().await
            }
            .boxed()
        }
    });
    let mut client = H1::open(gateway.address).await;
    client.send(&Ask::post("/slow", "1").via(VIA_H1)).await;
    until("the first waits", || gateway.engines[0].hits("/slow") == 1).await;
    client.send(&Ask::post("/slow", "22").via(VIA_H1)).await;
    gate.add_permits(2);
    for body in ["1", "22"] {
        assert_eq!(client.recv("POST").await.text(), digest(body.as_bytes()));
    }
    // in one piece, the second while the first is read
    gate.add_permits(2);
    let both = [Ask::post("/slow", "333").via(VIA_H1).wire(), Ask::post("/slow", "4444").via(VIA_H1).wire()];
    client.raw(&both.concat()).await;
    for body in ["333", "4444"] {
        assert_eq!(client.recv("POST").await.text(), digest(body.as_bytes()));
    }
    gateway.drained().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_long_ones_are_refused_and_the_answer_arrives() {
    let gateway = Gateway::start().await;
    // by their length alone, before a byte of them
    let mut client = H1::open(gateway.address).await;
    client.raw(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 67108864\r\n\r\n").await;
    let answer = client.recv("POST").await;
    assert_eq!((answer.status, answer.code().as_str()), (413, "body_too_large"));
    assert_eq!((answer.get("connection"), answer.get("x-request-id")), (Some("close"), Some("r-1")));
    drop(client);
    // short ones are read to their end: the connection lives on
    for h2 in [false, true] {
        let mut client = Client::open(gateway.address, h2).await;
        for unsized_ in [false, true] {
            let ask = Ask { unsized_, ..Ask::post("/", noise(20_000)).with("x-max-body", 19_999) };
            let answer = client.call(&ask).await;
            assert_eq!((answer.status, answer.code().as_str()), (413, "body_too_large"));
            if !h2 && unsized_ {
                assert_eq!(answer.get("connection"), Some("close"));
                client = Client::open(gateway.address, h2).await;
            } else if !h2 {
                assert_eq!(answer.get("connection"), Some("keep-alive"));
            }
            assert_eq!(client.call(&Ask::post("/echo", "abc").via(VIA_H1)).await.text(), digest(b"abc"));
        }
    }
    assert_eq!(gateway.engines[0].hits("/"), 0);
    until("all memory is given back", || gateway.state.buffers.free() == 64 << 20).await;
}

#[tokio::test]
async fn an_early_refusal_keeps_a_short_upload_in_step() {
    let gateway = Gateway::start().await;
    for h2 in [false, true] {
        let mut client = Client::open(gateway.address, h2).await;
        for _ in 0..3 {
            let answer = client.call(&Ask::post("/early-no-route", noise(30_000))).await;
            assert_eq!((answer.status, answer.code().as_str()), (503, "no_route"));
            let answer = client.call(&Ask::post("/echo", "abc").via(VIA_H1)).await;
            assert_eq!(answer.text(), digest(b"abc"));
        }
        let answer = client.call(&Ask::new("HEAD", "/early-no-route", "")).await;
        assert_eq!((answer.status, answer.body.len()), (503, 0));
        assert!(answer.get("content-length").is_some_and(|n| n != "0"));
        assert_eq!(client.call(&Ask::post("/echo", "abc").via(VIA_H1)).await.text(), digest(b"abc"));
    }
}

#[tokio::test]
async fn slow_ones_are_refused() {
    let gateway = Gateway::start().await;
    let mut client = H1::open(gateway.address).await;
    client.raw(b"POST / HTTP/1.1\r\nHost: a\r\nx-grace: 50\r\nContent-Length: 50000\r\n\r\nabc").await;
    let answer = client.recv("POST").await;
    assert_eq!((answer.status, answer.code().as_str()), (408, "body_too_slow"));
    assert_eq!(answer.get("connection"), Some("close"));
    let mut client = crate::support::client::H2::open(gateway.address).await;
    let stream =
        client.start(&Ask { unsized_: true, ..Ask::post("/", "abc").with("x-grace", 50) }, false).await;
    let answer = stream.recv().await;
    assert_eq!((answer.status, answer.code().as_str()), (408, "body_too_slow"));
}

#[tokio::test]
async fn broken_ones_are_refused() {
    let gateway = Gateway::start().await;
    for chunks in ["xyz\r\nabc", "5\r\nabcdefgh\r\n0\r\n\r\n", "-1\r\n", "ffffffffffffffffff\r\n"] {
        let mut client = H1::open(gateway.address).await;
        let head = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
        client.raw(format!("{head}{chunks}").as_bytes()).await;
        let answer = client.recv("POST").await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "bad_request"), "{chunks}");
        assert!(client.ended().await);
    }
    assert_eq!(gateway.engines[0].hits("/"), 0);
}

#[tokio::test]
async fn all_of_them_share_one_memory() {
    let gateway = Gateway::with_buffers(16 << 10).await;
    let gate = Arc::new(Semaphore::new(0));
    gateway.on("/held", {
        let gate = gate.clone();
        move |c| {
            let gate = gate.clone();
            async move {
                gate.acquire().await.unwrap().forget();
                c.echo().await
            }
            .boxed()
        }
    });
    for h2 in [false, true] {
        let mut first = Client::open(gateway.address, h2).await;
        let held = first.start(&Ask::post("/held", noise(12 << 10)).via(VIA_H1)).await;
        until("the first body is held", || gateway.state.buffers.free() == 4 << 10).await;
        let mut second = Client::open(gateway.address, h2).await;
        let answer = second.call(&Ask::post("/echo", noise(12 << 10)).via(VIA_H1)).await;
        assert_eq!((answer.status, answer.code().as_str()), (503, "overloaded"));
        let answer = second.call(&Ask::post("/echo", noise(4 << 10)).via(VIA_H1)).await;
        assert_eq!(answer.status, 200, "what fits is served");
        gate.add_permits(1);
        let answer = match (held, first) {
            (Some(held), _) => held.recv().await,
            (None, Client::H1(mut first)) => first.recv("POST").await,
            _ => unreachable!("an h2 call is held"),
        };
        assert_eq!(answer.text(), digest(&noise(12 << 10)));
        until("all memory is given back", || gateway.state.buffers.free() == 16 << 10).await;
        let answer = second.call(&Ask::post("/echo", noise(12 << 10)).via(VIA_H1)).await;
        assert_eq!(answer.status, 200);
    }
}
