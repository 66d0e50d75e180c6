//! Trying again: what may be, where, and how often. Pooled connections that had died.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;
use kvgate_core::{Cause, Phase};
use tokio::sync::Semaphore;

use crate::support::client::H1;
use crate::support::{Ask, BOTH, Client, Gateway, VIA_H1, VIA_H2, digest, event, noise, until};

/// The engine that takes no connection.
const REFUSES: usize = 4;
/// How often what depends on a race is tried.
const TRIES: usize = 24;

/// Runs a script with the number of the request on its path, from 1, over both engines.
pub fn numbered<F>(gateway: &Gateway, path: &str, script: F) -> Arc<AtomicUsize>
where
    F: for<'a> Fn(&'a mut crate::support::Call, usize) -> futures::future::BoxFuture<'a, std::io::Result<()>>
        + Clone
        + Send
        + Sync
        + 'static,
{
    let hits = Arc::new(AtomicUsize::new(0));
    let count = hits.clone();
    gateway.on(path, move |c| script(c, count.fetch_add(1, Ordering::SeqCst) + 1));
    hits
}

#[tokio::test]
async fn a_refused_connection_is_tried_elsewhere() {
    let gateway = Gateway::start().await;
    for h2 in [false, true] {
        let mut client = Client::open(gateway.address, h2).await;
        for _ in 0..20 {
            let answer = client.call(&Ask::post("/echo", "q").via(REFUSES)).await;
            assert_eq!((answer.status, answer.get("x-served-by")), (200, Some("0")));
            let ends: Vec<_> = gateway.outcomes(2).await.iter().map(|o| (o.phase, o.cause)).collect();
            assert_eq!(ends, [(Phase::Connect, Cause::EngineBroken), (Phase::Answer, Cause::Complete)]);
        }
        // who took no connection does not count as tried
        let answer = client.call(&Ask::post("/echo", "q").via(REFUSES).with("x-attempts", 1)).await;
        assert_eq!((answer.status, answer.get("x-served-by")), (200, Some("0")));
        assert_eq!(
            client.call(&Ask::post("/echo", "q").via(VIA_H1)).await.status,
            200,
            "connection lives on"
        );
        gateway.outcomes(3).await;
    }
    gateway.drained().await;
}

/// A request the engine had whole is sent again only if that is allowed.
#[tokio::test]
async fn a_reset_before_the_answer() {
    let gateway = Gateway::start().await;
    let hits = numbered(&gateway, "/reset", |c, n| {
        async move {
            c.body().await?;
            if n == 1 {
                c.reset();
                return Err(std::io::ErrorKind::Other.into());
            }
            c.answer(200, b"second", &[]).await
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        let ask = Ask::post("/reset", noise(300_000)).via(engine);
        hits.store(0, Ordering::SeqCst);
        let answer = client.call(&ask.clone().with("x-resend", 1)).await;
        assert_eq!((answer.status, answer.text().as_str()), (200, "second"));
        assert_eq!(hits.load(Ordering::SeqCst), 2);
        gateway.outcomes(2).await;
        hits.store(0, Ordering::SeqCst);
        let answer = client.call(&ask).await;
        assert_eq!((answer.status, answer.code().as_str()), (502, "engine_error"));
        assert_eq!(hits.load(Ordering::SeqCst), 1);
        let last = gateway.outcomes(1).await.pop().unwrap();
        assert_eq!((last.phase, last.cause), (Phase::FirstByte, Cause::EngineBroken));
    }
}

#[tokio::test]
async fn a_refusal_is_tried_elsewhere_and_keeps_its_connection() {
    let gateway = Gateway::start().await;
    let hits = numbered(&gateway, "/busy", |c, n| {
        async move {
            c.body().await?;
            if n % 2 == 1 { c.answer(503, b"no", &[]).await } else { c.answer(200, b"second", &[]).await }
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        let ask = Ask::post("/busy", noise(300_000)).via(engine).with("x-refuse", 1);
        client.call(&ask).await;
        gateway.outcomes(2).await;
        let connections = gateway.engines.each_ref().map(|e| e.connections());
        for _ in 0..5 {
            let answer = client.call(&ask).await;
            assert_eq!((answer.status, answer.text().as_str()), (200, "second"));
            let ends: Vec<_> = gateway.outcomes(2).await.iter().map(|o| (o.status, o.cause)).collect();
            assert_eq!(ends, [(Some(503), Cause::Refused), (Some(200), Cause::Complete)]);
        }
        assert_eq!(gateway.engines.each_ref().map(|e| e.connections()), connections, "all reused");
    }
    assert_eq!(hits.load(Ordering::SeqCst), 4 * 6 * 2);
}

/// When everyone refuses, the client gets an engine's own words; each was asked once.
#[tokio::test]
async fn when_all_refuse_the_last_refusal_is_passed_on() {
    let gateway = Gateway::start().await;
    gateway.on("/full", |c| {
        async move {
            c.body().await?;
            c.head(429, &[("retry-after", "7"), ("content-type", "application/json")]).await?;
            c.chunk(b"{\"error\":").await?;
            c.chunk(b"\"full\"}").await?;
            c.end().await
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        let before: usize = gateway.engines.iter().map(|e| e.hits("/full")).sum();
        let answer = client.call(&Ask::post("/full", "q").via(engine).with("x-refuse", 1)).await;
        assert_eq!((answer.status, answer.text().as_str()), (429, "{\"error\":\"full\"}"));
        assert_eq!((answer.get("retry-after"), answer.get("content-length")), (Some("7"), Some("16")));
        assert!(answer.get("x-served-by").is_some());
        let after: usize = gateway.engines.iter().map(|e| e.hits("/full")).sum();
        assert_eq!(after - before, 4, "each route once; the fifth refuses connections");
        assert_eq!(client.call(&Ask::post("/echo", "q").via(engine)).await.status, 200);
    }
    gateway.settled(8).await;
    assert_eq!(gateway.count(|c| &c.told), 4);
}

/// Who says for how long it is busy is passed over; when all are, the client learns of the shortest time.
#[tokio::test]
async fn busy_engines_are_passed_over() {
    let gateway = Gateway::start().await;
    let say = |at: usize, path: &str, status: u16, wait: &'static str| {
        gateway.engines[at].on(path, move |c| {
            async move {
                c.body().await?;
                let body = format!("{status} {wait}");
                c.answer(status, body.as_bytes(), &[("retry-after", wait), ("x-own", "kept")]).await
            }
            .boxed()
        });
    };
    say(0, "/one", 503, "9");
    for (path, first, second) in [("/all", "9", "4"), ("/rising", "4", "9"), ("/same", "5", "5")] {
        say(0, path, 429, first);
        say(1, path, 429, second);
    }
    // asked through h1 and then h2, by the number of routes that are tried
    for (h2, engine) in [(false, VIA_H1), (true, VIA_H1), (false, VIA_H2), (true, VIA_H2)] {
        let mut client = Client::open(gateway.address, h2).await;
        let ask = |path: &str| Ask::post(path, "q").via(engine).with("x-busy", 1).with("x-attempts", 2);
        let answer = client.call(&ask("/one")).await;
        assert_eq!((answer.status, answer.text()), (200, digest(b"q")));
        let ends: Vec<_> = gateway.outcomes(2).await.iter().map(|o| (o.status, o.cause)).collect();
        assert_eq!(ends, [(Some(503), Cause::Refused), (Some(200), Cause::Complete)]);
        for (path, last, least) in [("/all", "4", "4"), ("/rising", "9", "4"), ("/same", "5", "5")] {
            let before: Vec<_> = gateway.engines.iter().map(|e| e.hits(path)).collect();
            let answer = client.call(&ask(path)).await;
            assert_eq!((answer.status, answer.text()), (429, format!("429 {last}")), "the last one's words");
            assert_eq!((answer.get("retry-after"), answer.get("x-own")), (Some(least), Some("kept")));
            let asked: Vec<_> = gateway.engines.iter().zip(before).map(|(e, n)| e.hits(path) - n).collect();
            assert_eq!(asked, [1, 1], "each once");
            gateway.outcomes(2).await;
        }
        // without such a time, or where the rule does not say so, it is the answer
        for (path, header) in [("/busy-without", "x-busy"), ("/one", "x-nothing")] {
            gateway.engines[0].on("/busy-without", |c| {
                async move {
                    c.body().await?;
                    c.answer(429, b"mine", &[]).await
                }
                .boxed()
            });
            let answer = client.call(&Ask::post(path, "q").via(engine).with(header, 1)).await;
            assert!(matches!(answer.status, 429 | 503), "{path}");
            assert_eq!(gateway.outcomes(1).await.pop().unwrap().cause, Cause::Complete);
        }
    }
}

/// A refusal too long or too slow to keep is still tried elsewhere; then the error is ours.
#[tokio::test]
async fn a_refusal_that_cannot_be_kept() {
    let gateway = Gateway::start().await;
    gateway.on("/long", |c| {
        async move {
            c.body().await?;
            c.answer(503, &[b'x'; 100_000], &[]).await
        }
        .boxed()
    });
    gateway.on("/slow", |c| {
        async move {
            c.body().await?;
            c.head(503, &[]).await?;
            c.gone().await
        }
        .boxed()
    });
    for (h2, engine, path) in [
        (false, VIA_H1, "/long"),
        (false, VIA_H2, "/long"),
        (true, VIA_H1, "/long"),
        (false, VIA_H1, "/slow"),
        (true, VIA_H2, "/slow"),
    ] {
        let mut client = Client::open(gateway.address, h2).await;
        let ask = Ask::post(path, "q").via(engine).with("x-refuse", 1).with("x-attempts", 2);
        let answer = client.call(&ask).await;
        assert_eq!((answer.status, answer.code().as_str()), (502, "engine_error"), "{path}");
    }
    gateway.drained().await;
}

/// Attempts are capped: a poisonous request visits each engine once, by pooled connections twice.
#[tokio::test]
async fn a_poisonous_request_does_not_spread() {
    let gateway = Gateway::start().await;
    let hits = numbered(&gateway, "/poison", |c, _| {
        async move {
            c.body().await?;
            c.reset();
            Err(std::io::ErrorKind::Other.into())
        }
        .boxed()
    });
    let mut client = H1::open(gateway.address).await;
    let answer = client.call(&Ask::post("/poison", "q").via(VIA_H1).with("x-resend", 1)).await;
    assert_eq!((answer.status, hits.swap(0, Ordering::SeqCst)), (502, 4));
    let ask = Ask::post("/poison", "q").via(VIA_H1).with("x-resend", 1).with("x-attempts", 2);
    assert_eq!((client.call(&ask).await.status, hits.swap(0, Ordering::SeqCst)), (502, 2));
    assert_eq!(
        (client.call(&Ask::post("/poison", "q").via(VIA_H1)).await.status, hits.swap(0, Ordering::SeqCst)),
        (502, 1)
    );
    // by a pooled connection the reset looks like staleness: one fresh try at the same engine, if it may run twice
    for (ask, times) in [
        (Ask::post("/poison", "q").via(VIA_H1), 1),
        (Ask::post("/poison", "q").via(VIA_H1).with("x-attempts", 1).with("x-resend", 1), 2),
    ] {
        client.call(&Ask::post("/echo", "q").via(VIA_H1)).await;
        assert_eq!((client.call(&ask).await.status, hits.swap(0, Ordering::SeqCst)), (502, times));
    }
    gateway.drained().await;
}

#[tokio::test]
async fn connections_are_reused() {
    let gateway = Gateway::start().await;
    let mut client = H1::open(gateway.address).await;
    for engine in [1, 3] {
        client.call(&Ask::post("/echo", "q").via(engine)).await;
    }
    let connections = gateway.engines[1].connections();
    for i in 0..30 {
        for engine in [1, 3] {
            let answer = client.call(&Ask::post("/echo", noise(1 + i * 5000)).via(engine)).await;
            assert_eq!(answer.text(), digest(&noise(1 + i * 5000)));
        }
    }
    assert_eq!(gateway.engines[1].connections(), connections);
}

/// An engine that finds a kept connection idle for too long says so, perhaps to the request that is on its way just then.
#[tokio::test]
async fn after_a_408_nothing_is_read_from_a_connection() {
    let gateway = Gateway::start().await;
    gateway.on("/idle", |c| async move { c.answer(408, b"", &[]).await }.boxed());
    let mut client = H1::open(gateway.address).await;
    for connections in 1..4 {
        assert_eq!(client.call(&Ask::post("/idle", "q").via(VIA_H1)).await.status, 408);
        assert_eq!(gateway.engines[0].connections(), connections);
    }
}

/// The engine closes a kept connection just as the next request arrives on it: no failure of the engine.
#[tokio::test]
async fn a_stale_connection_gets_a_fresh_try() {
    let gateway = Gateway::start().await;
    let cuts = Arc::new(AtomicUsize::new(0));
    gateway.on("/fickle", {
        let cuts = cuts.clone();
        move |c| {
            let cuts = cuts.clone();
            async move {
                if c.nth != 2 {
                    return c.echo().await;
                }
                if cuts.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
                    c.reset();
                } else {
                    c.body().await?;
                    c.close();
                }
                Err(std::io::ErrorKind::Other.into())
            }
            .boxed()
        }
    });
    let mut client = H1::open(gateway.address).await;
    for i in 0..20 {
        let body = noise(if i % 2 == 0 { 1 } else { 300_000 });
        let answer = client.call(&Ask::post("/fickle", body.clone()).via(VIA_H1).with("x-resend", 1)).await;
        assert_eq!((answer.status, answer.text()), (200, digest(&body)), "{i}");
    }
    assert!(cuts.load(Ordering::SeqCst) >= 9);
    assert!(
        gateway.outcomes(20).await.iter().all(|o| o.cause == Cause::Complete),
        "nothing counts against the engine"
    );

    // an h2 connection the engine closes between requests
    let bye = Arc::new(Semaphore::new(0));
    gateway.on("/bye", {
        let bye = bye.clone();
        move |c| {
            let bye = bye.clone();
            async move {
                c.echo().await?;
                bye.acquire().await.unwrap().forget();
                c.close();
                Ok(())
            }
            .boxed()
        }
    });
    for _ in 0..TRIES {
        let answer = client.call(&Ask::post("/bye", "q").via(VIA_H2).with("x-resend", 1)).await;
        assert_eq!(answer.text(), digest(b"q"));
        bye.add_permits(1);
    }
}

/// When all pooled connections are stale, the second try does not meet the next of them.
#[tokio::test]
async fn the_fresh_try_is_a_new_connection() {
    let gateway = Gateway::start().await;
    let (begun, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
    gateway.on("/once", {
        let (begun, gate) = (begun.clone(), gate.clone());
        move |c| {
            let (begun, gate) = (begun.clone(), gate.clone());
            async move {
                if c.nth == 2 {
                    c.reset();
                    return Err(std::io::ErrorKind::Other.into());
                }
                begun.fetch_add(1, Ordering::SeqCst);
                gate.acquire().await.unwrap().forget();
                c.echo().await
            }
            .boxed()
        }
    });
    let mut clients = Vec::new();
    for n in 1..=6 {
        let mut client = H1::open(gateway.address).await;
        client.send(&Ask::post("/once", "q").via(VIA_H1)).await;
        until("it has its own connection", || begun.load(Ordering::SeqCst) == n).await;
        clients.push(client);
    }
    gate.add_permits(100);
    for client in &mut clients {
        assert_eq!(client.recv("POST").await.text(), digest(b"q"));
    }
    gateway.settled(6).await;
    for client in &mut clients {
        let answer = client.call(&Ask::post("/once", "q").via(VIA_H1).with("x-resend", 1)).await;
        assert_eq!(answer.text(), digest(b"q"));
    }
}

/// A request that may have an effect is not sent twice, whatever the connection that broke on it.
#[tokio::test]
async fn what_an_engine_may_have_read_is_not_sent_again() {
    let gateway = Gateway::start().await;
    for (path, read, reset) in [
        ("/reset", true, true),
        ("/fin", true, false),
        ("/unread", false, true),
        ("/turned-away", false, false),
    ] {
        gateway.on(path, move |c| {
            async move {
                if read {
                    c.body().await?;
                }
                if reset {
                    c.reset();
                } else {
                    c.close();
                }
                Err(std::io::ErrorKind::Other.into())
            }
            .boxed()
        });
        for kept in [true, false] {
            for size in [1, 3_000_000] {
                let mut client = H1::open(gateway.address).await;
                if kept {
                    client.call(&Ask::post("/echo", "q").via(VIA_H1)).await;
                    gateway.outcomes(1).await;
                }
                let before = gateway.engines.each_ref().map(|engine| engine.hits(path));
                let answer = client.call(&Ask::post(path, noise(size)).via(VIA_H1)).await;
                assert_eq!(
                    (answer.status, answer.code().as_str()),
                    (502, "engine_error"),
                    "{path} {kept} {size}"
                );
                let hits = gateway.engines.each_ref().map(|engine| engine.hits(path));
                assert_eq!(hits, [before[0] + 1, before[1]], "{path} {kept} {size}");
                let cause = gateway.outcomes(1).await[0].cause;
                assert_eq!(
                    cause,
                    if kept { Cause::Stale } else { Cause::EngineBroken },
                    "{path} {kept} {size}"
                );
            }
        }
    }
}

/// One that is closed by the time of the next request is not used for it.
#[tokio::test]
async fn a_closed_connection_is_replaced_unused() {
    let gateway = Gateway::start().await;
    let closed = Arc::new(Semaphore::new(0));
    gateway.on("/last", {
        let closed = closed.clone();
        move |c| {
            let closed = closed.clone();
            async move {
                c.echo().await?;
                c.shut().await?;
                closed.add_permits(1);
                c.gone().await
            }
            .boxed()
        }
    });
    let mut client = H1::open(gateway.address).await;
    for n in 0..TRIES {
        let answer = client.call(&Ask::post("/last", "q").via(VIA_H1)).await;
        assert_eq!((answer.status, answer.text()), (200, digest(b"q")), "{n}");
        closed.acquire().await.unwrap().forget();
    }
    assert_eq!(gateway.engines[0].hits("/last"), TRIES);
}

/// What an engine has begun to work on is not stale, however the connection ends.
#[tokio::test]
async fn a_connection_that_breaks_on_the_request_is_not_stale() {
    let gateway = Gateway::start().await;
    for (path, words, late) in [
        ("/half", &b"HTTP/1.1 200 OK\r\nContent-"[..], false),
        ("/informed", b"HTTP/1.1 102 Processing\r\n\r\n", false),
        ("/late", b"", true),
    ] {
        gateway.on(path, move |c| {
            async move {
                c.body().await?;
                c.raw(words).await?;
                tokio::time::sleep(std::time::Duration::from_millis(if late { 1500 } else { 20 })).await;
                c.close();
                Ok(())
            }
            .boxed()
        });
        let mut client = H1::open(gateway.address).await;
        client.call(&Ask::post("/echo", "q").via(VIA_H1)).await;
        let connections = gateway.engines[0].connections();
        let answer = client.call(&Ask::post(path, "q").via(VIA_H1)).await;
        assert_eq!((answer.status, answer.code().as_str()), (502, "engine_error"), "{path}");
        assert_eq!(gateway.engines[0].connections(), connections, "{path} came by the pooled connection");
        assert_eq!(gateway.engines[0].hits(path), 1, "{path} was sent again");
    }
}

/// An engine that dies amid a long upload has failed, though the connection was a kept one.
#[tokio::test]
async fn a_connection_that_breaks_amid_the_upload_is_not_stale() {
    let gateway = Gateway::start().await;
    gateway.engines[0].on("/dies", |c| {
        async move {
            tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
            c.reset();
            Err(std::io::ErrorKind::Other.into())
        }
        .boxed()
    });
    let mut client = H1::open(gateway.address).await;
    client.call(&Ask::post("/echo", "q").via(VIA_H1)).await;
    gateway.outcomes(1).await;
    let connections = gateway.engines[0].connections();
    let body = noise(32 << 20);
    let answer = client.call(&Ask::post("/dies", body.clone()).via(VIA_H1).with("x-resend", 1)).await;
    assert_eq!((answer.status, answer.text()), (200, digest(&body)));
    assert_eq!(answer.get("x-served-by"), Some("1"));
    assert_eq!(
        (gateway.engines[0].hits("/dies"), gateway.engines[0].connections()),
        (1, connections),
        "once, by the kept connection"
    );
    let ends: Vec<_> = gateway.outcomes(2).await.iter().map(|o| (o.phase, o.cause)).collect();
    assert_eq!(ends, [(Phase::Upload, Cause::EngineBroken), (Phase::Answer, Cause::Complete)]);
}

/// Nothing is repeated once the client has seen a byte.
#[tokio::test]
async fn never_after_the_head() {
    let gateway = Gateway::start().await;
    let hits = numbered(&gateway, "/stream", |c, _| {
        async move {
            c.body().await?;
            c.events().await?;
            c.chunk(&event(0)).await?;
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            c.reset();
            Err(std::io::ErrorKind::Other.into())
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        hits.store(0, Ordering::SeqCst);
        let mut client = Client::open(gateway.address, h2).await;
        let answer = client.call(&Ask::post("/stream", "q").via(engine).with("x-resend", 1)).await;
        assert!(answer.text().contains("event: error"));
        assert_eq!(hits.load(Ordering::SeqCst), 1);
    }
}

/// A prefill leg and its decode leg, by the same call.
#[tokio::test]
async fn two_legs() {
    let gateway = Gateway::start().await;
    gateway.on("/pd", |c| {
        async move {
            let body = c.body().await?;
            assert_eq!(body.len(), 100_000);
            if c.seen.get("x-role") == ["prefill"] {
                return c.answer(200, b"{\"kv_transfer_params\":{}}", &[]).await;
            }
            c.events().await?;
            c.chunk(format!("data: prefilled {}\n\n", c.seen.get("x-prefilled")[0]).as_bytes()).await?;
            c.chunk(crate::support::DONE).await?;
            c.end().await
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        for _ in 0..3 {
            let answer =
                client.call(&Ask::post("/pd", noise(100_000)).via(engine).with("x-prefill", 1)).await;
            assert_eq!(answer.text(), "data: prefilled 25\n\ndata: [DONE]\n\n");
        }
    }
    until("all legs ended", || gateway.in_flight() == 0).await;
    assert_eq!(gateway.engines[0].hits("/pd"), 24);
}
