//! Heads and framings on their way through: what passes, what is mended, what stays behind.

use futures::FutureExt;
use http::Version;

use crate::support::client::H1;
use crate::support::{Ask, BOTH, Client, Gateway, VIA_H1, VIA_H2, digest, noise};

#[tokio::test]
async fn answers_without_a_body() {
    let gateway = Gateway::start().await;
    gateway.on("/length", |c| c.only_head(200, &[("content-length", "1234"), ("x-a", "1")]).boxed());
    gateway.on("/chunked", |c| {
        let chunked: &[_] = if c.is_h2() { &[] } else { &[("Transfer-Encoding", "chunked")] };
        c.only_head(200, chunked).boxed()
    });
    gateway.on("/204", |c| {
        async move {
            c.body().await?;
            c.only_head(204, &[]).await
        }
        .boxed()
    });
    gateway.on("/304", |c| c.only_head(304, &[("etag", "x"), ("content-length", "77")]).boxed());
    gateway.on("/304-bare", |c| c.only_head(304, &[("etag", "x")]).boxed());
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        for (method, path, status) in [
            ("HEAD", "/length", 200),
            ("HEAD", "/chunked", 200),
            ("POST", "/204", 204),
            ("GET", "/304", 304),
            ("GET", "/304-bare", 304),
            ("GET", "/echo", 200),
            ("DELETE", "/echo", 200),
        ] {
            let answer = client.call(&Ask::new(method, path, "").via(engine)).await;
            assert_eq!((answer.status, answer.cut), (status, false), "{h2} {engine} {method} {path}");
            assert!(answer.get("transfer-encoding").is_none() || path == "/chunked");
            if path == "/length" {
                assert_eq!(answer.get("content-length"), Some("1234"));
                assert_eq!(gateway.engines[0].last().method, "HEAD");
            }
            if path == "/304" {
                assert_eq!(answer.get("content-length"), Some("77"));
            }
            if method != "POST" {
                assert!(gateway.engines[0].last().get("content-length").is_empty());
            }
        }
        let answer = client.call(&Ask::new("HEAD", "/length", "a body, too").via(engine)).await;
        assert_eq!((answer.status, answer.get("content-length")), (200, Some("1234")));
        // still in step on the same connections
        let answer = client.call(&Ask::post("/echo", "abc").via(engine)).await;
        assert_eq!(answer.text(), digest(b"abc"));
    }
}

#[tokio::test]
async fn answers_of_every_framing() {
    let gateway = Gateway::start().await;
    gateway.on("/chunked", |c| {
        async move {
            c.body().await?;
            c.head(200, &[]).await?;
            c.chunk(b"he").await?;
            c.chunk(b"llo").await?;
            c.end().await
        }
        .boxed()
    });
    for (path, raw) in [
        ("/close", "HTTP/1.1 200 OK\r\n\r\nhello"),
        ("/ten", "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"),
        (
            "/both",
            "HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        ),
    ] {
        gateway.on(path, move |c| {
            async move {
                c.body().await?;
                if c.is_h2() {
                    return c.answer(200, b"hello", &[]).await;
                }
                c.raw(raw.as_bytes()).await?;
                c.close();
                Ok(())
            }
            .boxed()
        });
    }
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        for path in ["/chunked", "/close", "/ten", "/both"] {
            let answer = client.call(&Ask::post(path, "q").via(engine)).await;
            assert_eq!((answer.status, answer.text().as_str(), answer.cut), (200, "hello", false), "{path}");
            assert!(answer.get("content-length").is_none() || answer.get("transfer-encoding").is_none());
        }
    }
    for path in ["/chunked", "/close", "/ten"] {
        for keep in [false, true] {
            let mut client = H1::open(gateway.address).await;
            let mut ask = Ask { version: Version::HTTP_10, ..Ask::post(path, "q").via(VIA_H1) };
            if keep {
                ask = ask.with("Connection", "keep-alive");
            }
            let answer = client.call(&ask).await;
            assert_eq!((answer.status, answer.text().as_str()), (200, "hello"));
            assert!(answer.get("transfer-encoding").is_none());
            // an answer that ends with the connection must not promise to keep it
            let kept = keep && answer.get("content-length").is_some();
            assert_eq!(answer.get("connection"), Some(if kept { "keep-alive" } else { "close" }), "{path}");
        }
    }
}

#[tokio::test]
async fn trailers_pass_where_both_sides_can() {
    let gateway = Gateway::start().await;
    gateway.on("/trailers", |c| {
        async move {
            c.body().await?;
            c.head(200, &[]).await?;
            c.chunk(b"hello").await?;
            c.trailer("x-t", "1").await
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        for _ in 0..2 {
            let answer = client.call(&Ask::post("/trailers", "q").via(engine).with("te", "trailers")).await;
            assert_eq!((answer.text().as_str(), answer.cut), ("hello", false));
            assert_eq!(answer.trailers.len(), usize::from(h2 && engine == VIA_H2));
        }
    }
}

#[tokio::test]
async fn interim_answers_pass_to_whom_may_get_them() {
    let gateway = Gateway::start().await;
    gateway.on("/info", |c| {
        async move {
            c.body().await?;
            c.raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n").await?;
            c.raw(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await
        }
        .boxed()
    });
    for (h2, version, informed) in [
        (false, Version::HTTP_11, &[103, 102][..]),
        (false, Version::HTTP_10, &[]),
        (true, Version::HTTP_2, &[]),
    ] {
        let mut client = Client::open(gateway.address, h2).await;
        let answer = client.call(&Ask { version, ..Ask::post("/info", "q").via(VIA_H1) }).await;
        assert_eq!((answer.status, answer.text().as_str()), (200, "ok"));
        assert_eq!(answer.informed, informed);
    }
}

#[tokio::test]
async fn interim_answers_are_few_and_no_other_protocol() {
    let gateway = Gateway::start().await;
    let flood = "HTTP/1.1 102 Processing\r\n\r\n".repeat(1000);
    let switch = "HTTP/1.1 101 Switching Protocols\r\n\r\n".to_owned();
    for (path, words) in [("/flood", flood), ("/switch", switch)] {
        let words = words + "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
        gateway.on(path, move |c| {
            let words = words.clone();
            async move {
                c.body().await?;
                c.raw(words.as_bytes()).await
            }
            .boxed()
        });
        let mut client = H1::open(gateway.address).await;
        assert_eq!(client.call(&Ask::post(path, "q").via(VIA_H1)).await.status, 502, "{path}");
    }
}

#[tokio::test]
async fn connection_fields_stay_behind() {
    let gateway = Gateway::start().await;
    gateway.on("/hop", |c| {
        async move {
            c.body().await?;
            let mut fields = vec![("X-Dup", "1"), ("X-Dup", "2"), ("Set-Cookie", "a"), ("Set-Cookie", "b")];
            if !c.is_h2() {
                fields.extend([
                    ("Connection", "X-Secret, keep-alive"),
                    ("X-Secret", "1"),
                    ("Keep-Alive", "timeout=9"),
                    ("Proxy-Authenticate", "z"),
                    ("Upgrade", "h9"),
                ]);
            }
            c.answer(200, b"ok", &fields).await
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        let mut ask = Ask::post("/hop?a=%20b", "q").via(engine).with("Authorization", "Bearer k");
        ask = ask.with("X-Two", "1").with("X-Two", "2");
        if !h2 {
            ask = ask.with("Connection", "X-Mine, keep-alive, Authorization").with("X-Mine", "1");
            ask = ask.with("Keep-Alive", "timeout=5").with("Proxy-Connection", "x").with("TE", "gzip");
            ask = ask.with("Proxy-Authorization", "q");
        }
        let answer = client.call(&ask).await;
        let seen = gateway.engines[0].last();
        for stays in ["connection", "x-mine", "keep-alive", "proxy-connection", "te", "proxy-authorization"] {
            assert!(seen.get(stays).is_empty(), "{stays} reached the engine");
        }
        assert_eq!((seen.get("x-two"), seen.get("authorization")), (vec!["1", "2"], vec!["Bearer k"]));
        assert_eq!((seen.get("content-length"), seen.get("x-engine").len()), (vec!["1"], 1));
        assert_eq!((seen.target.as_str(), seen.get("host")), ("/hop?a=%20b", vec!["front.example"]));
        for stays in ["x-secret", "keep-alive", "proxy-authenticate", "upgrade"] {
            assert!(answer.get(stays).is_none(), "{stays} reached the client");
        }
        assert_eq!(["x-dup", "set-cookie", "date"].map(|name| answer.count(name)), [2, 2, 1]);
        assert_eq!(answer.count("connection"), usize::from(!h2));

        client.call(&Ask::post("/hop", "q").via(engine).with("x-host", "inner.example:8000")).await;
        let seen = gateway.engines[0].last();
        assert_eq!(seen.get("host"), ["inner.example:8000"]);
        if seen.h2 {
            assert_eq!(seen.get(":authority"), ["inner.example:8000"]);
        }
    }
}

#[tokio::test]
async fn the_target_reaches_the_engine_in_origin_form() {
    let gateway = Gateway::start().await;
    let mut client = H1::open(gateway.address).await;
    for (target, seen) in [
        ("/v1/a?b=c&d=%2F", "/v1/a?b=c&d=%2F"),
        ("http://front.example/v1/a?b", "/v1/a?b"),
        ("http://front.example", "/"),
        ("/a//b/../c/./%7e", "/a//b/../c/./%7e"),
    ] {
        client.call(&Ask::post(target, "q").via(VIA_H1)).await;
        assert_eq!(gateway.engines[0].last().target, seen);
    }
}

/// Heads that two readers could take for different ones get 400 and reach nobody. Those of HTTP/1 are refused before
/// there is a session: see the edge's tests.
#[tokio::test]
async fn ambiguous_requests_are_refused() {
    let gateway = Gateway::start().await;
    let mut client = Client::open(gateway.address, true).await;
    for (target, name, value) in [("/", "content_length", "1"), ("/a%00b", "x-a", "b")] {
        let answer = client.call(&Ask::post(target, "q").with(name, value)).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "bad_request"), "{target} {name}");
    }
    assert_eq!(client.call(&Ask::post("/", "q").with("host", "other")).await.status, 400);
    assert!(gateway.engines.iter().all(|engine| engine.seen().is_empty()));
    assert_eq!(client.call(&Ask::post("/echo", "q").via(VIA_H1)).await.status, 200, "other streams live on");
}

/// Upgrades and uploads nobody looks into take pingora's own path beside ours.
#[tokio::test]
async fn the_stock_path_stays_open() {
    let gateway = Gateway::start().await;
    gateway.on("/ws", |c| {
        async move {
            c.raw(
                b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello",
            )
            .await?;
            c.gone().await
        }
        .boxed()
    });
    let mut client = H1::open(gateway.address).await;
    let body = noise(300_000);
    let answer = client.call(&Ask::post("/echo", body.clone()).with("x-stock", 1)).await;
    assert_eq!(answer.text(), digest(&body));
    let answer = client.call(&Ask::post("/echo", "ours").via(VIA_H1)).await;
    assert_eq!(answer.text(), digest(b"ours"));
    let mut client = H1::open(gateway.address).await;
    let fields = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    let head = "GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n";
    client.raw(format!("{head}{fields}\r\n").as_bytes()).await;
    assert_eq!(client.head().await.unwrap().status, 101);
    let mut hello = [0; 5];
    tokio::io::AsyncReadExt::read_exact(&mut client.io, &mut hello).await.unwrap();
    assert_eq!(&hello, b"hello");
}

/// The access log and the decision record hang on this hook.
#[tokio::test]
async fn every_request_is_logged() {
    let gateway = Gateway::start().await;
    gateway.on("/never", |c| c.gone().boxed());
    let mut client = H1::open(gateway.address).await;
    for _ in 0..5 {
        client.call(&Ask::post("/echo", "q").via(VIA_H1)).await;
    }
    client.send(&Ask::post("/never", "q").via(VIA_H1)).await;
    crate::support::until("the engine was asked", || gateway.engines[0].hits("/never") == 1).await;
    drop(client);
    crate::support::until("all are logged", || gateway.count(|c| &c.logged) == 6).await;
    assert_eq!((gateway.count(|c| &c.served), gateway.count(|c| &c.gone)), (5, 1));
}
