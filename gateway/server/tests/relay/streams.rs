//! Event streams: unbuffered, whole events only, and an end that says what happened.

use std::sync::Arc;

use futures::FutureExt;
use kvgate_core::{Cause, Phase};
use tokio::sync::Semaphore;

use crate::support::client::{H1, error_code};
use crate::support::{Ask, BOTH, Call, Client, DONE, Gateway, PATIENCE, Response, VIA_H1, digest, event};

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
    let value: serde_json::Value = serde_json::from_str(last).unwrap();
    // Anthropic's errors have a type above
    if value["type"] == "error" {
        value["error"]["code"].as_str().unwrap().into()
    } else {
        error_code(last.as_bytes())
    }
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
    assert_eq!(gateway.count(|c| &c.unfinished), 0);
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

/// Wherever a stream is cut into pieces, within a character, a line end or the marker, the bytes are the same and come as
/// whole events.
#[tokio::test]
async fn any_pieces_are_the_same_stream() {
    let gateway = Gateway::start().await;
    let mut whole = Vec::new();
    for n in 0..12 {
        let end = ["\n", "\r\n", "\r"][n % 3];
        let usage = format!("\"usage\":{{\"prompt_tokens\":7,\"completion_tokens\":{n}}}");
        let text = format!("data: {{\"text\":\"é漢🦀 [DONE] {n}\",{usage}}}{end}: comment{end}{end}");
        whole.extend_from_slice(text.as_bytes());
    }
    whole.extend_from_slice(DONE);
    let whole = Arc::new(whole);
    gateway.on("/v1/completions", {
        let whole = whole.clone();
        move |c| {
            let whole = whole.clone();
            async move {
                let seed = String::from_utf8(c.body().await?).unwrap().parse::<usize>().unwrap();
                c.events().await?;
                let mut rest = whole.as_slice();
                for dice in crate::support::noise(1000 + seed).into_iter().cycle() {
                    let (piece, left) = rest.split_at(rest.len().min(1 + usize::from(dice) % (1 + seed * 3)));
                    c.chunk(piece).await?;
                    rest = left;
                    if rest.is_empty() {
                        break;
                    }
                    tokio::task::yield_now().await;
                }
                c.end().await
            }
            .boxed()
        }
    });
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        for seed in 0..24 {
            let answer = client.call(&Ask::post("/v1/completions", seed.to_string()).via(engine)).await;
            assert_eq!((answer.cut, answer.body == *whole), (false, true), "{h2} {engine} {seed}");
            let ends = [&b"\n\n"[..], b"\r\n\r\n", b"\r\r"];
            let whole_events = |piece: &Vec<u8>| ends.iter().any(|end| piece.ends_with(end));
            assert!(answer.pieces.iter().all(whole_events), "{h2} {engine} {seed}");
        }
    }
    gateway.settled(4 * 24).await;
    assert_eq!(gateway.count(|c| &c.unfinished), 0);
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

const CHAT: &str = "/v1/chat/completions";
const FINISH: &[u8] = b"data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n\n";
const STOP: &[u8] = b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
const COMPLETED: &[u8] = b"event: response.completed\ndata: {\"type\":\"response.completed\"}\n\n";
/// Text in which the markers are no markers.
const QUOTED: &[u8] = b"data: {\"choices\":[{\"delta\":{\"content\":\"data: [DONE]\\n\\n[DONE] \\\"finish_reason\\\":\\\"stop\\\"\"},\"finish_reason\":null}]}\n\n";

/// Streams with these events on this path, framed or ended by the connection.
fn says(gateway: &Gateway, path: &str, events: Vec<u8>, framed: bool) {
    let events = Arc::new(events);
    gateway.on(path, move |c| {
        let events = events.clone();
        async move {
            c.body().await?;
            if framed || c.is_h2() {
                c.events().await?;
                c.chunk(&events).await?;
                return c.end().await;
            }
            c.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n").await?;
            c.raw(&events).await?;
            c.close();
            Ok(())
        }
        .boxed()
    });
}

/// What ends a stream hangs on its path; one that ends in order without it is noted, and told of where the end looks
/// like a crash.
#[tokio::test]
async fn end_markers_belong_to_the_path() {
    let gateway = Gateway::start().await;
    for (path, end, complete) in [
        (CHAT, &b""[..], false),
        (CHAT, DONE, true),
        (CHAT, FINISH, true),
        (CHAT, QUOTED, false),
        (CHAT, STOP, false),
        (CHAT, b"data: [DONE]\n", true),
        ("/v1/completions", DONE, true),
        ("/v1/completions", b"", false),
        ("/v1/messages", STOP, true),
        ("/v1/messages", b"", false),
        ("/v1/responses", COMPLETED, true),
        ("/v1/responses", b"", false),
        ("/v1/audio/speech", b"", true),
    ] {
        for framed in [true, false] {
            says(&gateway, path, [&event(0), end].concat(), framed);
            for (h2, engine) in BOTH {
                let mut client = Client::open(gateway.address, h2).await;
                let (noted, over) = (gateway.count(|c| &c.unfinished), gateway.count(|c| &c.logged));
                let answer = client.call(&Ask::post(path, "q").via(engine)).await;
                gateway.settled(over + 1).await;
                let case = format!("{path} {} {framed} {engine}", String::from_utf8_lossy(end));
                let looks_like_a_crash = !framed && engine == VIA_H1;
                let cause = gateway.outcomes(1).await.pop().unwrap().cause;
                if !complete && looks_like_a_crash {
                    assert_eq!(farewell(&answer), "engine_error", "{case}");
                    assert_eq!(cause, Cause::EngineBroken, "{case}");
                } else {
                    let sent = [&event(0), end].concat();
                    assert_eq!((answer.body.as_slice(), answer.cut), (&sent[..], false), "{case}");
                    assert_eq!(gateway.count(|c| &c.unfinished), noted + usize::from(!complete), "{case}");
                    assert_eq!(cause, Cause::Complete, "{case}");
                }
            }
        }
    }
}

/// How an engine ends a connection that it should not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Breaks {
    Reset,
    Close,
    Stall,
}

/// Streams these pieces and breaks off.
fn breaks(gateway: &Gateway, path: &str, pieces: Vec<Vec<u8>>, how: Breaks) {
    let pieces = Arc::new(pieces);
    gateway.on(path, move |c| {
        let pieces = pieces.clone();
        async move {
            c.body().await?;
            c.events().await?;
            for piece in pieces.iter() {
                c.chunk(piece).await?;
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            match how {
                Breaks::Reset => c.reset(),
                Breaks::Close => c.close(),
                Breaks::Stall => return c.gone().await,
            }
            Err(std::io::ErrorKind::Other.into())
        }
        .boxed()
    });
}

/// What comes after the answer's own word that it is complete is nothing to tell of: no error event, no failure, and a
/// connection that is not used again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_complete_stays_so_however_the_connection_ends() {
    let gateway = Gateway::start().await;
    for (path, end) in [(CHAT, DONE), ("/v1/messages", STOP), ("/v1/responses", COMPLETED)] {
        for how in [Breaks::Reset, Breaks::Close, Breaks::Stall] {
            if how == Breaks::Stall && path != CHAT {
                continue;
            }
            let torn = [end, b"data: {\"to"].concat();
            breaks(&gateway, path, vec![event(0), torn], how);
            for (h2, engine) in BOTH {
                let mut client = Client::open(gateway.address, h2).await;
                let answer = client.call(&Ask::post(path, "q").via(engine)).await;
                let case = format!("{path} {how:?} {h2} {engine}");
                assert_eq!(
                    (answer.text(), answer.cut),
                    (String::from_utf8([&event(0), end].concat()).unwrap(), false),
                    "{case}"
                );
                let outcome = gateway.outcomes(1).await.pop().unwrap();
                assert_eq!((outcome.status, outcome.cause), (Some(200), Cause::Complete), "{case}");
                let answer = client.call(&Ask::post("/echo", "abc").via(engine)).await;
                assert_eq!(answer.text(), digest(b"abc"), "{case}: both connections are in step");
                gateway.outcomes(1).await;
            }
        }
    }
    gateway.drained().await;
    assert_eq!((gateway.count(|c| &c.told), gateway.count(|c| &c.unfinished)), (0, 0));
}

/// A client that has the end of its answer may leave: it left nothing undone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_leaves_after_the_end_has_left_nothing() {
    let gateway = Gateway::start().await;
    breaks(&gateway, CHAT, vec![event(0), DONE.to_vec()], Breaks::Stall);
    for engine in [VIA_H1, crate::support::VIA_H2] {
        let mut client = H1::open(gateway.address).await;
        client.send(&Ask::post(CHAT, "q").via(engine)).await;
        client.head().await.unwrap();
        while client.chunk().await.unwrap() != DONE {}
        drop(client);
        let outcome = gateway.outcomes(1).await.pop().unwrap();
        assert_eq!(outcome.cause, Cause::Complete);
    }
    gateway.settled(2).await;
    assert_eq!((gateway.count(|c| &c.gone), gateway.count(|c| &c.served)), (0, 2));
}

/// Each API's clients read of an error in their own way.
#[tokio::test]
async fn an_error_event_has_the_shape_of_its_api() {
    let gateway = Gateway::start().await;
    for (path, kind, typed) in [
        (CHAT, "server_error", false),
        ("/v1/completions", "server_error", false),
        ("/v1/messages", "api_error", true),
        ("/v1/responses", "server_error", true),
        ("/v1/others", "server_error", false),
    ] {
        breaks(&gateway, path, vec![event(0), b"data: {\"ha".to_vec()], Breaks::Reset);
        for (h2, engine) in BOTH {
            let mut client = Client::open(gateway.address, h2).await;
            let answer = client.call(&Ask::post(path, "q").via(engine)).await;
            assert!(!answer.cut, "{path}");
            let told = answer.body.strip_prefix(&event(0)[..]).expect("whole events only");
            let data = std::str::from_utf8(told).unwrap().strip_prefix("event: error\ndata: ").unwrap();
            let data: serde_json::Value = serde_json::from_str(data.strip_suffix("\n\n").unwrap()).unwrap();
            assert_eq!((data["type"] == "error", &data["error"]["type"]), (typed, &kind.into()), "{path}");
            assert_eq!(data["error"]["code"], "engine_error", "{path}");
        }
    }
}

/// Where the engine has told of the error itself, one is enough.
#[tokio::test]
async fn an_engine_s_own_error_event_is_the_only_one() {
    let gateway = Gateway::start().await;
    let openai: &[u8] = b"data: {\"error\":{\"message\":\"no\"}}\n\n";
    let anthropic: &[u8] = b"event: error\ndata: {\"type\":\"error\",\"error\":{}}\n\n";
    for (path, error) in [(CHAT, openai), ("/v1/messages", anthropic)] {
        for how in [Breaks::Reset, Breaks::Close] {
            breaks(&gateway, path, vec![event(0), error.to_vec()], how);
            for (h2, engine) in BOTH {
                let mut client = Client::open(gateway.address, h2).await;
                let answer = client.call(&Ask::post(path, "q").via(engine)).await;
                assert_eq!(
                    (answer.cut, &answer.body),
                    (false, &[&event(0), error].concat()),
                    "{path} {how:?}"
                );
                assert_eq!(gateway.outcomes(1).await.pop().unwrap().cause, Cause::EngineBroken);
            }
        }
    }
}

/// An engine that sends 4,000 bytes of more.
async fn breaks_off(c: &mut Call, fields: &[(&str, &str)]) -> std::io::Result<()> {
    c.body().await?;
    c.head(200, fields).await?;
    if c.is_h2() {
        c.chunk(&[b'x'; 4000]).await?
    } else {
        c.raw(&[b'x'; 4000]).await?
    }
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    c.close();
    Err(std::io::ErrorKind::Other.into())
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
    gateway.on("/long", |c| {
        async move {
            let fields = [("content-length", "90000"), ("content-type", "text/event-stream")];
            breaks_off(c, &fields).await
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
        for (path, bytes) in [("/plain", 4), ("/long", 4000), ("/zipped", 2)] {
            let mut client = Client::open(gateway.address, h2).await;
            let answer = client.call(&Ask::post(path, "q").via(engine)).await;
            assert!(answer.cut && answer.status == 200, "{h2} {engine} {path} {answer:?}");
            assert!(answer.body.len() <= bytes);
        }
    }
    gateway.settled(12).await;
    assert_eq!((gateway.count(|c| &c.told), gateway.in_flight()), (0, 0));
}

/// A short answer with a length reaches the client whole or not at all: then it is an error, or another engine's.
#[tokio::test]
async fn a_short_answer_is_whole_or_none() {
    let gateway = Gateway::start().await;
    let first = Arc::new(std::sync::atomic::AtomicBool::new(true));
    for (path, heals) in [("/short", false), ("/heals", true)] {
        let first = first.clone();
        gateway.on(path, move |c| {
            let again = heals && !first.swap(false, std::sync::atomic::Ordering::SeqCst);
            async move {
                if !again {
                    return breaks_off(c, &[("content-length", "9000")]).await;
                }
                c.body().await?;
                c.answer(200, &[b'y'; 9000], &[]).await
            }
            .boxed()
        });
    }
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        let answer = client.call(&Ask::post("/short", "q").via(engine)).await;
        assert_eq!((answer.cut, answer.status, answer.code().as_str()), (false, 502, "engine_error"));
        let outcome = gateway.outcomes(1).await.pop().unwrap();
        assert_eq!((outcome.status, outcome.cause), (Some(200), Cause::EngineBroken));
        first.store(true, std::sync::atomic::Ordering::SeqCst);
        let answer = client.call(&Ask::post("/heals", "q").via(engine).with("x-resend", 1)).await;
        assert_eq!((answer.cut, answer.status, answer.body), (false, 200, vec![b'y'; 9000]));
        gateway.outcomes(2).await;
    }
    gateway.drained().await;
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
