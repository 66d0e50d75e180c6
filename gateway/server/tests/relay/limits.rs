//! Deadlines, early answers, and clients that do not take their answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::FutureExt;
use kvgate_core::{Cause, Phase};
use tokio::io::AsyncReadExt;

use crate::support::client::{H1, H2};
use crate::support::{Ask, BOTH, Client, Gateway, VIA_H1, VIA_H2, digest, event, noise, patience, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_deadline_ends_what_it_is_for() {
    let gateway = Gateway::start().await;
    gateway.on("/never", |c| {
        async move {
            c.body().await?;
            c.gone().await
        }
        .boxed()
    });
    gateway.on("/stalls", |c| {
        async move {
            c.body().await?;
            c.events().await?;
            c.chunk(&event(0)).await?;
            c.gone().await
        }
        .boxed()
    });
    gateway.on("/drips", |c| {
        async move {
            c.body().await?;
            c.events().await?;
            while c.chunk(&event(0)).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(std::io::ErrorKind::Other.into())
        }
        .boxed()
    });
    const NONE: u64 = 600_000;
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        for (path, first_byte, idle, total, phase) in [
            ("/never", 200, NONE, NONE, Phase::FirstByte),
            ("/never", NONE, NONE, 200, Phase::FirstByte),
            ("/stalls", NONE, 200, NONE, Phase::Answer),
            ("/drips", NONE, NONE, 400, Phase::Answer),
        ] {
            let ask = Ask::post(path, "q").via(engine).with("x-resend", 1);
            let ask = ask.with("x-first-byte", first_byte).with("x-idle", idle).with("x-total", total);
            let answer = client.call(&ask).await;
            if phase == Phase::FirstByte {
                assert_eq!((answer.status, answer.code().as_str()), (504, "engine_timeout"));
            } else {
                assert!(!answer.cut && answer.text().contains("event: error\n"), "{path} {answer:?}");
                assert!(answer.text().contains("\"engine_timeout\""));
            }
            let ends = gateway.outcomes(1).await;
            let ends: Vec<_> = ends.iter().map(|o| (o.phase, o.cause)).collect();
            let cause = if total == NONE { Cause::Deadline } else { Cause::OutOfTime };
            assert_eq!(ends, [(phase, cause)], "{path}: a deadline is never tried again");
        }
    }
    gateway.drained().await;
}

/// There is always something more to read, which must not keep the deadline from being seen.
#[tokio::test]
async fn an_engine_that_pours_is_stopped() {
    const PIECES: usize = 20_000;
    let gateway = Gateway::start().await;
    gateway.on("/pours", |c| {
        async move {
            c.body().await?;
            c.events().await?;
            let many = event(0).repeat(500);
            for _ in 0..PIECES {
                c.chunk(&many).await?;
            }
            Err(std::io::ErrorKind::Other.into())
        }
        .boxed()
    });
    let mut client = Client::open(gateway.address, false).await;
    let answer = client.call(&Ask::post("/pours", "q").via(VIA_H1).with("x-total", 200)).await;
    assert!(answer.text().len() < PIECES * event(0).len() * 500, "all of it came");
    // the deadline may find it reading from the engine or writing to a client that is slower
    let ends = gateway.outcomes(1).await;
    assert!(matches!(ends[0].cause, Cause::OutOfTime | Cause::ClientGone), "{ends:?}");
    gateway.drained().await;
}

#[tokio::test]
async fn waiting_for_a_choice_ends_with_the_total() {
    let gateway = Gateway::start().await;
    for h2 in [false, true] {
        let mut client = Client::open(gateway.address, h2).await;
        let answer = client.call(&Ask::post("/", "q").with("x-hold", 1).with("x-total", 100)).await;
        assert_eq!((answer.status, answer.code().as_str()), (504, "engine_timeout"));
        assert_eq!(client.call(&Ask::post("/echo", "q").via(VIA_H1)).await.status, 200);
    }
    gateway.drained().await;
}

/// An engine that accepts and never reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_nobody_takes_is_tried_elsewhere() {
    let gateway = Gateway::start().await;
    gateway.engines[0].on("/deaf", |c| c.gone_unread().boxed());
    let body = noise(32 << 20);
    for engine in [VIA_H1, VIA_H2] {
        let mut client = H1::open(gateway.address).await;
        let ask = Ask::post("/deaf", body.clone()).via(engine).with("x-idle", 500);
        let answer = client.call(&ask).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (504, "engine_timeout"),
            "it may have read some of it"
        );
        gateway.outcomes(1).await;
        let answer = client.call(&ask.with("x-resend", 1)).await;
        assert_eq!((answer.status, answer.text()), (200, digest(&body)));
        let ends: Vec<_> = gateway.outcomes(2).await.iter().map(|o| (o.phase, o.cause)).collect();
        assert_eq!(ends, [(Phase::Upload, Cause::Deadline), (Phase::Answer, Cause::Complete)]);
    }
}

/// Answers that come while the upload is on its way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_early_answer_is_passed_on() {
    let gateway = Gateway::start().await;
    gateway.on("/refuse", |c| {
        async move {
            c.answer(413, b"too much", &[]).await?;
            // an h2 stream given up now ends with NO_ERROR: stop sending
            if !c.is_h2() {
                tokio::time::sleep(Duration::from_millis(50)).await;
                c.close();
            }
            Ok(())
        }
        .boxed()
    });
    gateway.on("/stubborn", |c| {
        async move {
            c.answer(413, b"too much", &[]).await?;
            c.gone_unread().await
        }
        .boxed()
    });
    gateway.on("/late", |c| {
        async move {
            tokio::time::sleep(Duration::from_millis(300)).await;
            c.answer(413, b"too much", &[]).await?;
            c.gone_unread().await
        }
        .boxed()
    });
    gateway.on("/reader", |c| {
        async move {
            let good = if c.is_h2() {
                c.head(200, &[]).await
            } else {
                c.head(200, &[("content-length", "4")]).await
            };
            good?;
            assert_eq!(c.body().await?.len(), 16 << 20);
            if c.is_h2() { c.last(b"good").await } else { c.raw(b"good").await }
        }
        .boxed()
    });
    let body = noise(16 << 20);
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        for (path, status) in [("/refuse", 413), ("/reader", 200), ("/stubborn", 413), ("/late", 413)] {
            let ask = Ask::post(path, body.clone()).via(engine).with("x-attempts", 1);
            let answer = client.call(&ask).await;
            assert_eq!(
                (answer.status, answer.cut),
                (status, false),
                "{h2} {engine} {path} {}",
                answer.text()
            );
            assert_eq!(answer.text(), if status == 413 { "too much" } else { "good" });
        }
        // the engine's connection was left amid a body: nobody else may get it
        let answer = client.call(&Ask::post("/echo", "abc").via(engine)).await;
        assert_eq!(answer.text(), digest(b"abc"));
    }
    gateway.drained().await;
}

/// An answer that makes the rest of an upload pointless is not waited for, and the rest is not sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_early_refusal_ends_the_upload() {
    let gateway = Gateway::start().await;
    let whole = Arc::new(AtomicUsize::new(0));
    gateway.on("/no", {
        let whole = whole.clone();
        move |c| {
            let whole = whole.clone();
            async move {
                c.answer(413, b"too much", &[]).await?;
                tokio::time::sleep(Duration::from_millis(200)).await;
                c.body().await?;
                whole.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }
            .boxed()
        }
    });
    for (h2, engine) in BOTH {
        let mut client = Client::open(gateway.address, h2).await;
        let answer = client.call(&Ask::post("/no", noise(32 << 20)).via(engine)).await;
        assert_eq!((answer.status, answer.text().as_str()), (413, "too much"));
    }
    gateway.drained().await;
    assert_eq!(whole.load(Ordering::SeqCst), 0, "no engine got the whole body");
}

/// An engine that answers, reads no more, and keeps the connection: its answer is not held up by what it does not take.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_is_read_while_the_engine_reads_nothing() {
    let gateway = Gateway::start().await;
    gateway.on("/full", |c| {
        async move {
            c.raw(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ngood").await?;
            c.gone_unread().await
        }
        .boxed()
    });
    gateway.on("/busy", |c| {
        async move {
            c.answer(429, b"busy", &[("retry-after", "7")]).await?;
            c.gone_unread().await
        }
        .boxed()
    });
    // what is said in between costs no byte of the body
    gateway.on("/talkative", |c| {
        async move {
            for _ in 0..3 {
                c.raw(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n").await?;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            c.echo().await
        }
        .boxed()
    });
    let body = noise(16 << 20);
    let mut client = H1::open(gateway.address).await;
    for (path, status, text) in
        [("/full", 200, "good"), ("/busy", 429, "busy"), ("/talkative", 200, &digest(&body))]
    {
        // twice: what was left of the first upload is nobody's
        for _ in 0..2 {
            let ask = Ask::post(path, body.clone()).via(VIA_H1).with("x-attempts", 1);
            let answer = client.call(&ask.with("x-busy", 1)).await;
            assert_eq!((answer.status, answer.text().as_str(), answer.cut), (status, text, false), "{path}");
            client = H1::open(gateway.address).await;
        }
    }
    gateway.drained().await;
}

/// The same of either protocol; and what it takes later goes out while its answer is read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_early_answer_does_not_wait_for_the_upload() {
    let gateway = Gateway::start().await;
    gateway.on("/enough", |c| {
        async move {
            c.answer(200, b"good", &[]).await?;
            c.gone_unread().await
        }
        .boxed()
    });
    gateway.on("/pauses", |c| {
        async move {
            c.head(200, &[]).await?;
            tokio::time::sleep(Duration::from_millis(800)).await;
            assert_eq!(c.body().await?.len(), 16 << 20);
            c.chunk(b"good").await?;
            c.end().await
        }
        .boxed()
    });
    for (h2, engine) in BOTH {
        for path in ["/enough", "/pauses"] {
            let mut client = Client::open(gateway.address, h2).await;
            let answer = client.call(&Ask::post(path, noise(16 << 20)).via(engine)).await;
            assert_eq!(
                (answer.status, answer.text().as_str(), answer.cut),
                (200, "good", false),
                "{h2} {engine} {path}"
            );
        }
    }
    gateway.drained().await;
}

/// While a client takes nothing, nothing is read for it; when it goes on, every byte is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_holds_its_engine_back() {
    const PIECE: usize = 64 << 10;
    const PIECES: usize = 1600; // 100 MiB
    let gateway = Gateway::start().await;
    let sent = Arc::new(AtomicUsize::new(0));
    gateway.on("/flood", {
        let sent = sent.clone();
        move |c| {
            let sent = sent.clone();
            async move {
                c.body().await?;
                c.head(200, &[]).await?;
                let piece = noise(PIECE);
                for _ in 0..PIECES {
                    c.chunk(&piece).await?;
                    sent.fetch_add(1, Ordering::SeqCst);
                }
                c.end().await
            }
            .boxed()
        }
    });
    // waits until the engine is stuck
    let stuck = async || loop {
        let before = sent.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(500)).await;
        if before > 0 && sent.load(Ordering::SeqCst) == before {
            return before;
        }
    };
    for engine in [VIA_H1, VIA_H2] {
        sent.store(0, Ordering::SeqCst);
        let mut client = H1::open(gateway.address).await;
        client.send(&Ask::post("/flood", "q").via(engine)).await;
        let pieces = patience("the engine is held back", stuck()).await;
        assert!(pieces * PIECE < 40 << 20, "the engine got rid of {pieces} pieces");
        let answer = client.recv("POST").await;
        assert!(!answer.cut && answer.body.len() == PIECES * PIECE);
        assert!(answer.body.chunks(PIECE).all(|piece| piece == noise(PIECE)));

        sent.store(0, Ordering::SeqCst);
        let mut client = H2::open(gateway.address).await;
        let mut stream = client.start(&Ask::post("/flood", "q").via(engine), true).await;
        let (_, mut body) = stream.head().await;
        let pieces = patience("the engine is held back", stuck()).await;
        assert!(pieces * PIECE < 40 << 20, "the engine got rid of {pieces} pieces");
        let mut bytes = 0;
        while let Some(piece) = body.data().await {
            let piece = piece.unwrap();
            bytes += piece.len();
            body.flow_control().release_capacity(piece.len()).unwrap();
        }
        assert_eq!(bytes, PIECES * PIECE);
    }
    // one that leaves instead
    for engine in [VIA_H1, VIA_H2] {
        sent.store(0, Ordering::SeqCst);
        let mut client = H1::open(gateway.address).await;
        client.send(&Ask::post("/flood", "q").via(engine)).await;
        patience("the engine is held back", stuck()).await;
        drop(client);
        gateway.drained().await;
    }
}

/// A client that takes nothing for too long counts as gone, and its engine is rid of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_takes_nothing_is_given_up() {
    let gateway = Gateway::start().await;
    let left = Arc::new(AtomicUsize::new(0));
    gateway.on("/flood", {
        let left = left.clone();
        move |c| {
            let left = left.clone();
            async move {
                c.body().await?;
                c.events().await?;
                let many = event(0).repeat(4000);
                while c.chunk(&many).await.is_ok() {}
                left.fetch_add(1, Ordering::SeqCst);
                Err(std::io::ErrorKind::Other.into())
            }
            .boxed()
        }
    });
    for (n, (h2, engine)) in BOTH.into_iter().enumerate() {
        let mut client = Client::open(gateway.address, h2).await;
        let ask = Ask::post("/flood", "q").via(engine).with("x-client-idle", 300);
        let _stream = client.start(&ask).await;
        let ended = gateway.outcomes(1).await;
        assert_eq!(ended[0].cause, Cause::ClientGone, "{h2} {engine}");
        until("the engine is rid of it", || left.load(Ordering::SeqCst) == n + 1).await;
    }
    gateway.drained().await;
}

/// Clients that stop reading must not stall others on the same h2 connection to the engine, nor must resets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_clients_do_not_stall_their_neighbours() {
    let gateway = Gateway::start().await;
    gateway.on("/flood", |c| {
        async move {
            c.body().await?;
            c.head(200, &[]).await?;
            while c.chunk(&[0; 65536]).await.is_ok() {}
            Err(std::io::ErrorKind::Other.into())
        }
        .boxed()
    });
    gateway.on("/hang", |c| {
        async move {
            c.body().await?;
            c.gone().await
        }
        .boxed()
    });
    let mut other = H1::open(gateway.address).await;
    other.call(&Ask::post("/echo", "q").via(VIA_H2)).await;
    let connections = gateway.engines[0].connections();
    let mut stalled = Vec::new();
    for _ in 0..3 {
        let mut client = H1::open_with(gateway.address, Some(64 << 10)).await;
        client.send(&Ask::post("/flood", "q").via(VIA_H2)).await;
        client.head().await.unwrap();
        client.io.get_mut().read_exact(&mut [0; 1000]).await.unwrap();
        stalled.push(client);
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    for _ in 0..10 {
        let answer = other.call(&Ask::post("/echo", noise(100_000)).via(VIA_H2)).await;
        assert_eq!(answer.text(), digest(&noise(100_000)));
    }
    drop(stalled);
    gateway.drained().await;
    for n in 1..=20 {
        let mut client = H2::open(gateway.address).await;
        let mut stream = client.start(&Ask::post("/hang", "q").via(VIA_H2), true).await;
        until("the engine was asked", || gateway.engines[0].hits("/hang") == n).await;
        stream.reset();
        gateway.drained().await;
    }
    assert_eq!(other.call(&Ask::post("/echo", "q").via(VIA_H2)).await.status, 200);
    assert_eq!(gateway.engines[0].connections(), connections, "all of it on one connection");
}

/// Everything at once, clients leaving at random: no wrong byte, no claim left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn soak() {
    let gateway = Arc::new(Gateway::start().await);
    gateway.on("/soak", |c| {
        async move {
            c.body().await?;
            c.events().await?;
            for n in 0..8 {
                let event = event(n);
                let (head, tail) = event.split_at(9);
                c.chunk(head).await?;
                tokio::time::sleep(Duration::from_millis(1)).await;
                c.chunk(tail).await?;
            }
            c.chunk(crate::support::DONE).await?;
            c.end().await
        }
        .boxed()
    });
    let whole = [(0..8).flat_map(event).collect(), crate::support::DONE.to_vec()].concat();
    let one = |seed: usize| {
        let (gateway, whole) = (gateway.clone(), whole.clone());
        async move {
            let mut served = 0;
            for (round, dice) in noise(1000 + seed).chunks_exact(8).take(30).enumerate() {
                let (h2, engine) = BOTH[usize::from(dice[0]) % 4];
                let mut client = Client::open(gateway.address, h2).await;
                for turn in 0..=usize::from(dice[1]) % 4 {
                    let body = noise([1, 1000, 70_000, 300_000][usize::from(dice[2 + turn]) % 4]);
                    let (path, want) = match (usize::from(dice[3]) + turn) % 2 {
                        0 => ("/soak", whole.clone()),
                        _ => ("/echo", digest(&body).into_bytes()),
                    };
                    let ask = Ask::post(path, body).via(engine);
                    let call = client.call(&ask);
                    if dice[6] % 3 == 0 {
                        let patience = Duration::from_millis(u64::from(dice[7]) % 20);
                        let Ok(answer) = tokio::time::timeout(patience, call).await else { break };
                        assert_eq!(answer.body, want, "{seed} {round}");
                    } else {
                        assert_eq!(call.await.body, want, "{seed} {round}");
                    }
                    served += 1;
                }
            }
            served
        }
    };
    let all: Vec<_> = (0..16).map(|seed| tokio::spawn(one(seed))).collect();
    let mut served = 0;
    for task in all {
        served += task.await.unwrap();
    }
    assert!(served > 500, "{served} answers");
    gateway.drained().await;
    until("all memory is given back", || gateway.state.buffers.free() == 64 << 20).await;
}
