//! Row 19: HTTP/2 that is not used but abused.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kvgate_rig::hist::Hist;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::{Lab, engines, pool};
use crate::Result;
use crate::board::Board;
use crate::engine::Script;
use crate::ping::Pinger;
use crate::tls::Secure;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0x0;
const HEADERS: u8 = 0x1;
const PRIORITY: u8 = 0x2;
const RST_STREAM: u8 = 0x3;
const SETTINGS: u8 = 0x4;
const PING: u8 = 0x6;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
/// Frames of an abuse.
const FLOOD: u32 = 20_000;
/// `:method: GET`, `:scheme: https`, `:path: /`, by the static table (RFC 7541 appendix A), and `:authority: a.test`.
const REQUEST: &[u8] = b"\x82\x87\x84\x01\x06a.test";

/// A frame (RFC 9113 section 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
    [length.get(1..).unwrap_or_default(), &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// What opens an abuse: frames.
type Open = fn() -> Vec<u8>;
/// What is sent over and over, for each number: frames.
type Abuse = fn(u32) -> Vec<u8>;

/// What opens an abuse.
fn opened() -> Vec<u8> {
    frame(HEADERS, END_HEADERS, 1, REQUEST)
}

const ABUSES: &[(&str, Open, Abuse)] = &[
    ("rapid reset", Vec::new, |number| {
        let stream = number * 2 + 1;
        let reset = frame(RST_STREAM, 0, stream, &8u32.to_be_bytes());
        [frame(HEADERS, END_HEADERS | END_STREAM, stream, REQUEST), reset].concat()
    }),
    ("CONTINUATION", || frame(HEADERS, 0, 1, REQUEST), |_| frame(CONTINUATION, 0, 1, b"\x10\x01a\x01b")),
    ("empty DATA", opened, |_| frame(DATA, 0, 1, b"")),
    ("PING", Vec::new, |_| frame(PING, 0, 0, &[0; 8])),
    ("SETTINGS", Vec::new, |_| frame(SETTINGS, 0, 0, b"")),
    ("PRIORITY", Vec::new, |number| frame(PRIORITY, 0, number * 2 + 1, &[0, 0, 0, 0, 16])),
];

/// Each abuse on a connection of its own is cut, and nobody else notices.
pub async fn row(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(2, Script::default()).await?;
    let mut setup = lab.setup()?;
    let secure = Secure::listener(&mut setup, "h2")?;
    setup.rule("pool", &pool("tiers = [\"least-connections\"]", &engines))?;
    let gateway = setup.start().await?;
    let engine = engines.first().ok_or("no engine")?.address;
    let start = || (Pinger::start(gateway.address), Pinger::start(engine));
    let (pinger, straight) = start();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let ((quiet, _), (calm, _)) = (pinger.stop()?, straight.stop()?);
    let (pinger, straight) = start();
    for (name, open, abuse) in ABUSES {
        let computed = gateway.computed();
        let start = Instant::now();
        let sent = flood(&secure, open(), *abuse).await?;
        let share = (gateway.computed() - computed) / start.elapsed().as_secs_f64() * 100.0;
        let bound = if *name == "rapid reset" { 500.0 } else { 5000.0 };
        board.most(&format!("{name}: times until it is cut, of {FLOOD}"), sent.into(), "", bound);
        eprintln!("{name}: {share:.0} % of a core while it went on");
    }
    let ((loud, _), (busy, _)) = (pinger.stop()?, straight.stop()?);
    let p99 = |times: &Hist| times.quantile(0.99) as f64;
    let (quiet, loud, calm, busy) = (p99(&quiet), p99(&loud), p99(&calm), p99(&busy));
    eprintln!(
        "p99 of others: {quiet} ns, meanwhile {loud} ns; without a gateway {calm} ns, meanwhile {busy} ns"
    );
    let added = (loud - busy).max(0.0) / (quiet - calm).max(1.0);
    board.most("p99 that is added to others meanwhile, of what it is", added * 100.0, "%", 200.0);
    conformance(board, secure.address)?;
    gateway.settle(board, None).await;
    Ok(())
}

/// How many times it could be done before the connection was cut.
async fn flood(secure: &Secure, open: Vec<u8>, abuse: Abuse) -> Result<u32> {
    let (mut from, mut to) = tokio::io::split(secure.connect().await?);
    to.write_all(&[PREFACE, &frame(SETTINGS, 0, 0, b""), &open].concat()).await?;
    let ended = tokio::spawn(async move { drain(&mut from).await });
    for number in 0..FLOOD {
        if send(&mut to, &abuse(number)).await.is_err() || ended.is_finished() {
            return Ok(number);
        }
        // a hundred at a time, so that what is on its way does not count
        if number % 100 == 99 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    // what was sent last may be what was too much
    match timeout(Duration::from_secs(2), ended).await {
        Ok(_) => Ok(FLOOD - 1),
        Err(_) => Ok(FLOOD),
    }
}

async fn send(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> Result {
    timeout(Duration::from_secs(5), to.write_all(bytes)).await??;
    Ok(timeout(Duration::from_secs(5), to.flush()).await??)
}

/// Reads until GOAWAY or the end.
async fn drain(from: &mut (impl AsyncRead + Unpin)) {
    let (mut bytes, mut piece) = (Vec::new(), vec![0; 16 << 10]);
    loop {
        match from.read(&mut piece).await {
            Ok(read @ 1..) => bytes.extend_from_slice(piece.get(..read).unwrap_or_default()),
            _ => return,
        }
        while let Some(head) = bytes.first_chunk::<9>().copied() {
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            if bytes.len() < 9 + length {
                break;
            }
            if head[3] == 7 {
                return;
            }
            bytes.drain(..9 + length);
        }
    }
}

/// h2spec's own verdict, where it is installed.
fn conformance(board: &mut Board, address: SocketAddr) -> Result {
    let port = address.port().to_string();
    let Ok(out) =
        std::process::Command::new("h2spec").args(["-t", "-k", "-h", "127.0.0.1", "-p", &port]).output()
    else {
        eprintln!("h2spec is not installed: its 146 cases are not run");
        return Ok(());
    };
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    // 146 tests, 145 passed, 1 skipped, 0 failed
    let line = said.lines().rev().find(|line| line.contains(" tests, ")).ok_or("h2spec says nothing")?;
    let number = |word: &str| -> f64 {
        let part = line.split(", ").find(|part| part.ends_with(word)).unwrap_or_default();
        part.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(f64::NAN)
    };
    board.exactly("h2spec: cases failed", number("failed"), 0.0);
    board.most("h2spec: cases skipped", number("skipped"), "", 1.0);
    Ok(())
}
