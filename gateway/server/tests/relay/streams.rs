//! Event streams: unbuffered, whole events only, and an end that says what happened.

use std::sync::Arc;

use futures::FutureExt;
use kvgate_core::{Cause, Phase};
use tokio::sync::Semaphore;

use crate::support::client::{H1, error_code};
use crate::support::{Ask, BOTH, Client, DONE, Gateway, PATIENCE, Response, VIA_H1, digest, event};

/// The events of a body.
fn events(answer: &Response) -> Vec<String> {
    answer.text().split_terminator("\n\n").map(str::to_owned).collect()
}

/// The code of the error event an answer ends with.
#[track_caller]
fn farewell(answer: &Response) -> String {
    assert!(!answer.cut && answer.status == 200, "{answer:?}");
    let events = events(answer);
    let last = events.last().and_then(|e| e.strip_prefix("event: error\ndata: ")).expect("an error event");
    assert_eq!(events.iter().filter(|e| e.contains("\"error\"")).count(), 1);
    error_code(last.as_bytes())
}

/// Every event is at the client before the engine sends the next.
#[tokio::test]
async fn every_event_passes_at_once() {
    let gateway = Gateway::start().await;
    let turn = Arc::new(Semaphore::new(0));
    gateway.on("/v1/chat/completions", {
        let turn = turn.clone();
        move |c| {
            let turn = turn.clone();
            async move {
                c.body().await?;
                c.events().await?;
                for n in 0..8 {
                    c.chunk(&event(n)).await?;
                    turn.acquire().await.unwrap().forget();
                }
                c.chunk(DONE).await?;
                c.end().await
            }
            .boxed()
        }
    });
    let ask = Ask::post("/v1/chat/completions", "q");
    for engine in [0, 2] {
        let mut client = H1::open(gateway.address).await;
        client.send(&ask.clone().via(engine)).await;
        assert_eq!(client.head().await.unwrap().status, 200);
        for n in 0..8 {
            assert_eq!(tokio::time::timeout(PATIENCE, client.chunk()).await.unwrap().unwrap(), event(n));
            turn.add_permits(1);
        }
        assert_eq!(client.chunk().await.unwrap(), DONE);
        assert!(client.chunk().await.unwrap().is_empty());

        let mut client = crate::support::client::H2::open(gateway.address).await;
        let mut stream = client.start(&ask.clone().via(engine), true).await;
        let (status, mut body) = stream.head().await;
        assert_eq!(status, 200);
        for n in 0..8 {
            assert_eq!(
                tokio::time::timeout(PATIENCE, body.data()).await.unwrap().unwrap().unwrap(),
                event(n)
            );
            turn.add_permits(1);
        }
        assert_eq!(body.data().await.unwrap().unwrap(), DONE);
    }
    gateway.settled(4).await;
    assert_eq!(gateway.count(|c| &c.without_done), 0);
}

#[tokio::test]
async fn torn_events_are_joined() {
    let gateway = Gateway::start().await;
    gateway.on("/halves", |c| {
        async move {
            c.body().await?;
            c.events().await?;
            let whole = [(0..8).flat_map(event).collect(), DONE.to_vec()].concat();
            for piece in whole.chunks(7) {
                c.chunk(piece).await?;
                tokio::task::yield_now().await;
            }
            c.end().await
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        let answer = client.call(&Ask::post("/halves", "q").via(engine)).await;
        assert_eq!(answer.body, [(0..8).flat_map(event).collect(), DONE.to_vec()].concat());
        assert!(answer.pieces.iter().all(|piece| piece.ends_with(b"\n\n")), "{:?}", answer.pieces);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_dies_is_explained() {
    let gateway = Gateway::start().await;
    for (path, tail, reset) in [
        ("/between/reset", "", true),
        ("/between/close", "", false),
        ("/within/reset", "data: {\"half", true),
        ("/within/close", "data: {\"half", false),
        ("/line/close", "data: {\"whole\":1}\n", false),
    ] {
        gateway.on(path, move |c| {
            async move {
                c.body().await?;
                c.events().await?;
                c.chunk(&event(0)).await?;
                c.chunk(&[&event(1), tail.as_bytes()].concat()).await?;
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                if reset {
                    c.reset()
                } else {
                    c.close()
                }
                Err(std::io::ErrorKind::Other.into())
            }
            .boxed()
        });
        for (h2, engine) in BOTH {
            let mut client = Client::open(gateway.address, h2).await;
            let (told, over) = (gateway.count(|c| &c.told), gateway.count(|c| &c.logged));
            let answer = client.call(&Ask::post(path, "q").via(engine)).await;
            gateway.settled(over + 1).await;
            assert_eq!(farewell(&answer), "engine_error", "{h2} {engine} {path}");
            let whole = [event(0), event(1)].concat();
            assert!(answer.body.starts_with(&[&whole[..], b"event: error\n"].concat()), "{}", answer.text());
            assert_eq!(gateway.count(|c| &c.told), told + 1);
            let outcome = gateway.outcomes(1).await.pop().unwrap();
            assert_eq!(
                (outcome.phase, outcome.status, outcome.cause),
                (Phase::Answer, Some(200), Cause::EngineBroken)
            );
            let answer = client.call(&Ask::post("/echo", "abc").via(engine)).await;
            assert_eq!(answer.text(), digest(b"abc"), "the client's connection lives on");
            gateway.settled(over + 2).await;
            gateway.outcomes(1).await;
        }
    }
    gateway.drained().await;
}

/// An unfinished event is held, an endless one let go; what was let go is ended before the error event.
#[tokio::test]
async fn endless_events_are_let_go() {
    let gateway = Gateway::start().await;
    gateway.on("/endless", |c| {
        async move {
            c.body().await?;
            c.events().await?;
            c.chunk(b"data: ").await?;
            c.chunk(&[b'x'; 80_000]).await?;
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            c.reset();
            Err(std::io::ErrorKind::Other.into())
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        let answer = client.call(&Ask::post("/endless", "q").via(engine)).await;
        assert_eq!(farewell(&answer), "engine_error");
        assert_eq!(events(&answer).len(), 2, "the half event ends before the error begins");
        assert!(answer.text().starts_with("data: xxx"));
    }
}

#[tokio::test]
async fn end_markers_belong_to_the_path() {
    let gateway = Gateway::start().await;
    for path in ["/v1/completions", "/v1/messages"] {
        gateway.on(path, |c| {
            async move {
                c.body().await?;
                let done = c.seen.get("x-done").len() == 1;
                let framed = c.is_h2() || c.seen.get("x-framed").len() == 1;
                let text = if done { [&event(0), DONE].concat() } else { event(0) };
                if framed {
                    c.events().await?;
                    c.chunk(&text).await?;
                    return c.end().await;
                }
                c.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n").await?;
                c.raw(&text).await?;
                c.close();
                Ok(())
            }
            .boxed()
        });
    }
    for h2 in [false, true] {
        let mut client = Client::open(gateway.address, h2).await;
        for (path, done, framed, engine) in [
            ("/v1/completions", false, true, 0),
            ("/v1/completions", false, true, 2),
            ("/v1/completions", true, true, 0),
            ("/v1/completions", false, false, 0),
            ("/v1/completions", true, false, 0),
            ("/v1/messages", false, true, 0),
            ("/v1/messages", false, false, 0),
        ] {
            let mut ask = Ask::post(path, "q").via(engine);
            if done {
                ask = ask.with("x-done", 1);
            }
            if framed {
                ask = ask.with("x-framed", 1);
            }
            let (noted, over) = (gateway.count(|c| &c.without_done), gateway.count(|c| &c.logged));
            let answer = client.call(&ask).await;
            gateway.settled(over + 1).await;
            let marked = path == "/v1/completions";
            if marked && !done && !framed {
                assert_eq!(farewell(&answer), "engine_error", "an end that looks like a crash");
            } else {
                let text = if done { [&event(0), DONE].concat() } else { event(0) };
                assert_eq!(
                    (answer.body.as_slice(), answer.cut),
                    (&text[..], false),
                    "{path} {done} {framed}"
                );
                let missed = usize::from(marked && !done);
                assert_eq!(gateway.count(|c| &c.without_done), noted + missed);
            }
        }
    }
}

/// Other answers have no way to say so: a cut must look like one.
#[tokio::test]
async fn other_answers_stay_cut() {
    let gateway = Gateway::start().await;
    gateway.on("/plain", |c| {
        async move {
            c.body().await?;
            c.head(200, &[("content-type", "text/plain")]).await?;
            c.chunk(b"some").await?;
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            c.reset();
            Err(std::io::ErrorKind::Other.into())
        }
        .boxed()
    });
    gateway.on("/short", |c| {
        async move {
            c.body().await?;
            c.head(200, &[("content-length", "9000"), ("content-type", "text/event-stream")]).await?;
            if c.is_h2() {
                c.chunk(&[b'x'; 4000]).await?
            } else {
                c.raw(&[b'x'; 4000]).await?
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            c.close();
            Err(std::io::ErrorKind::Other.into())
        }
        .boxed()
    });
    gateway.on("/zipped", |c| {
        async move {
            c.body().await?;
            c.head(200, &[("content-type", "text/event-stream"), ("content-encoding", "gzip")]).await?;
            c.chunk(b"\x1f\x8b").await?;
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            c.reset();
            Err(std::io::ErrorKind::Other.into())
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        for (path, bytes) in [("/plain", 4), ("/short", 4000), ("/zipped", 2)] {
            let mut client = Client::open(gateway.address, h2).await;
            let answer = client.call(&Ask::post(path, "q").via(engine)).await;
            assert!(answer.cut && answer.status == 200, "{h2} {engine} {path} {answer:?}");
            assert!(answer.body.len() <= bytes);
        }
    }
    gateway.settled(12).await;
    assert_eq!((gateway.count(|c| &c.told), gateway.in_flight()), (0, 0));
}

/// A stream may be long after its deadline for the first byte, and short of its length at any time.
#[tokio::test]
async fn a_stream_that_is_no_event_stream_passes_piece_by_piece() {
    let gateway = Gateway::start().await;
    let turn = Arc::new(Semaphore::new(0));
    gateway.on("/lines", {
        let turn = turn.clone();
        move |c| {
            let turn = turn.clone();
            async move {
                c.body().await?;
                c.head(200, &[("content-type", "application/x-ndjson")]).await?;
                for _ in 0..3 {
                    c.chunk(b"{}\n").await?;
                    turn.acquire().await.unwrap().forget();
                }
                c.end().await
            }
            .boxed()
        }
    });
    let mut client = H1::open(gateway.address).await;
    client.send(&Ask::post("/lines", "q").via(VIA_H1)).await;
    assert_eq!(client.head().await.unwrap().status, 200);
    for _ in 0..3 {
        assert_eq!(tokio::time::timeout(PATIENCE, client.chunk()).await.unwrap().unwrap(), b"{}\n");
        turn.add_permits(1);
    }
    assert!(client.chunk().await.unwrap().is_empty());
}
