//! Rows 18, 20 and 21: what strangers send to a listener.

use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::cases::play::play;
use super::cases::{all, splits};
use super::{Lab, MODEL, engines, idle};
use crate::Result;
use crate::board::Board;
use crate::client::{Answer, Client, completion, once, post};
use crate::engine::{Script, heard};
use crate::gateway::Gateway;
use crate::load::Load;
use crate::ping::Pinger;

const LINES: &str = "tiers = [\"least-connections\"]";

/// Every case of the edge's own table, cut where it may be: what is malformed is refused and nothing of it passes.
pub async fn framing(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(1, Script { notes: true, ..Script::default() }).await?;
    let gateway = lab.pool("", LINES, &engines).await?;
    let engine = engines.first().ok_or("no engine")?;
    let (cases, mut wrong, mut passed, mut malformed, mut shown) = (all(), 0u32, 0u32, 0u32, 0u32);
    // what a stranger gets wrong is told by a panic of the player, case by case
    std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
    for case in &cases {
        let cuts = splits(&case.bytes);
        let cuts = if lab.quick { cuts.into_iter().take(1).collect() } else { cuts };
        malformed += u32::from(case.then == Some(400));
        for cut in cuts {
            let played = AssertUnwindSafe(play(gateway.address, case, &cut)).catch_unwind().await;
            wrong += u32::from(played.is_err());
            shown += 1;
        }
        let heard: Vec<_> = heard(engine).into_iter().map(|(_, request)| request).collect();
        let stray = heard.iter().filter(|request| !case.passes.contains(request)).count();
        if stray > 0 {
            eprintln!("{}: {heard:?}", case.name);
        }
        passed += u32::try_from(stray)?;
    }
    let _ = std::panic::take_hook();
    board.least("cases", cases.len() as f64, "", 150.0);
    board.least("of them malformed", malformed.into(), "", 100.0);
    board.exactly(&format!("not answered as they must be, of {shown} with their cuts"), wrong.into(), 0.0);
    board.exactly("requests at the engine that nobody sent, or that are malformed", passed.into(), 0.0);
    gateway.settle(board, None).await;
    Ok(())
}

/// How long the gateway keeps a connection on which something comes so slowly.
async fn kept(gateway: &Gateway, start: &[u8], byte: u8) -> Result<(f64, Answer)> {
    let (mut from, mut to) = TcpStream::connect(gateway.address).await?.into_split();
    to.write_all(start).await?;
    let begun = Instant::now();
    let sending = tokio::spawn(async move {
        while to.write_all(&[byte]).await.is_ok() {
            sleep(Duration::from_millis(400)).await;
        }
    });
    let mut bytes = Vec::new();
    let _ = timeout(Duration::from_secs(60), from.read_to_end(&mut bytes)).await;
    sending.abort();
    let status = bytes.get(9..12).and_then(|code| std::str::from_utf8(code).ok()?.parse().ok()).unwrap_or(0);
    Ok((begun.elapsed().as_secs_f64(), Answer { status, ..Answer::default() }))
}

/// Heads and bodies that never end: cut in time, and nobody else notices two thousand of them.
pub async fn slow(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(8, Script::default()).await?;
    let gateway = lab.pool("[timeouts]\nbody_grace = \"5s\"\nbody = \"30s\"\n", LINES, &engines).await?;
    let head = kept(&gateway, b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nX-A: ", b'a');
    let body = kept(
        &gateway,
        b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: 100000\r\n\r\n{",
        b' ',
    );
    let (head, body) = futures::future::join(head, body).await;
    let ((head, told), (body, refused)) = (head?, body?);
    board.within("a head of a byte each 0.4 s: cut after", head, "s", 9.0, 11.0);
    board.exactly("and told", told.status.into(), 408.0);
    board.most("a body of a byte each 0.4 s, at 5 s of grace: cut after", body, "s", 30.0);
    board.exactly("and told (body)", refused.status.into(), 408.0);
    let load = Load { address: gateway.address, rate: 200.0, time: lab.seconds(20), connections: 32 };
    let wire = |_| completion(MODEL, "one two three", false, 1);
    let quiet = load.run(wire, |_, _| ()).await;
    let count = usize::try_from(lab.scaled(2000))?;
    let mut slow = Vec::new();
    for number in 0..count {
        let mut client = Client::connect(gateway.address).await?;
        let start: &[u8] = if number % 2 == 0 {
            b"GET / HTTP/1.1\r\nHost: g"
        } else {
            b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 9999\r\n\r\n{"
        };
        client.send(start).await?;
        slow.push(client);
    }
    let loud = load.run(wire, |_, _| ()).await;
    board.exactly("requests lost beside them", (quiet.lost + loud.lost) as f64, 0.0);
    board.most(
        &format!("p99 beside {count} slow connections, of what it is"),
        loud.ms(0.99) / quiet.ms(0.99) * 100.0,
        "%",
        200.0,
    );
    drop(slow);
    gateway.settle(board, None).await;
    drop(gateway);
    idle::memory(lab, board).await
}

/// Heads and bodies that are too large, and one that is as large as may be.
pub async fn large(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(2, Script::default()).await?;
    let gateway = lab.pool("", LINES, &engines).await?;
    let field = |name: String, value: String| format!("{name}: {value}\r\n");
    let many: String = (0..129).map(|n| field(format!("X-{n}"), "a".into())).collect();
    let fields = field("X-A".into(), "a".repeat(60_000)) + &field("X-B".into(), "b".repeat(10_000));
    let get =
        |target: &str, fields: &str| format!("GET {target} HTTP/1.1\r\nHost: g\r\n{fields}\r\n").into_bytes();
    let long = format!("/{}", "a".repeat(8 << 10));
    let announced = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 17000000\r\n\r\n".to_vec();
    for (name, wire, status) in [
        ("a head of 70 KB", get("/", &fields), 431.0),
        ("a head of 130 fields", get("/", &many), 431.0),
        ("a target of more than 8 KiB", get(&long, ""), 414.0),
        ("a body of 17 MB announced, and not sent", announced, 413.0),
    ] {
        let answer = once(gateway.address, &wire).await;
        board.exactly(&format!("{name}: status"), answer.status.into(), status);
        board.exactly(&format!("{name}: without an error in JSON"), f64::from(u8::from(!answer.kept())), 0.0);
    }
    let quiet = crate::engine::Engine::start("quiet", Script::default()).await?;
    let prompt = "a".repeat((16 << 20) - 100);
    let body = format!(r#"{{"model":"{MODEL}","prompt":"{prompt}","max_tokens":1}}"#);
    let wire = post("/v1/completions", "", body.as_bytes());
    let before = gateway.memory("VmRSS");
    let (pinger, straight) = (Pinger::start(gateway.address), Pinger::start(quiet.address));
    let mut answers = vec![once(gateway.address, &wire).await];
    let peak = gateway.memory("VmHWM");
    for _ in 0..lab.scaled(20) {
        answers.push(once(gateway.address, &wire).await);
    }
    let ((times, _), (machine, _)) = (pinger.stop()?, straight.stop()?);
    // all at once they take the whole machine, whose delays nobody could tell from the gateway's
    answers.extend(join_all((0..lab.scaled(10)).map(|_| once(gateway.address, &wire))).await);
    let bad = answers.iter().filter(|answer| answer.status != 200 || !answer.kept()).count();
    board.exactly("bodies of 16 MiB not served", bad as f64, 0.0);
    board.most("memory for one, of its size", (peak - before) / body.len() as f64, "x", 4.0);
    let added = |share| (times.quantile(share) as f64 - machine.quantile(share) as f64).max(0.0) / 1e6;
    board.most("p99 that is added to a request each millisecond beside one", added(0.99), "ms", 5.0);
    board.most("p99.9 that is added", added(0.999), "ms", 10.0);
    gateway.settle(board, None).await;
    Ok(())
}
