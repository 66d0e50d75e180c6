//! Load generator for HTTP/1.1 keep-alive targets with fixed request bodies; understands SSE.
//! Prints one JSON object. One thread: it measures proxies that cost more per request than it does.
//!
//! Latency in open loop counts from the scheduled time when the connection was still busy then, else from the write.
//! An SSE response gives first_event (write to first event) and gaps (between reads that completed an event).
use clap::Parser;
use kvgate_rig::hist::Hist;
use kvgate_rig::http::{Body, framing, header};
use memchr::memmem;
use serde_json::json;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until};

#[derive(Default)]
struct Stats {
    measuring: bool,
    ok: u64,
    errors: u64,
    last_error: String,
    reconnects: u64,
    statuses: BTreeMap<u16, u64>,
    bytes_in: u64,
    bytes_out: u64,
    events: u64,
    streams: u64,
    streams_cut: u64,
    latency: Hist,
    first_event: Hist,
    gaps: Hist,
    /// (body group, backend) -> responses
    routed: BTreeMap<(String, String), u64>,
}

/// Names the engine in a completion, for proxies that drop `X-Backend`.
const TAG: &[u8] = b"\"system_fingerprint\":\"";

struct Request {
    group: String,
    wire: Vec<u8>,
}

/// Sends requests over kept-alive connections and prints what came of them, as JSON.
#[derive(Parser)]
struct Opts {
    /// Whom to ask
    #[arg(long)]
    target: String,
    /// What to ask for [default: /v1/chat/completions with bodies, else /health]
    #[arg(long)]
    path: Option<String>,
    /// POST the files of this folder in turn; a file's name up to the first '_' is its group
    #[arg(long)]
    bodies: Option<String>,
    /// Connections
    #[arg(long, default_value_t = 1)]
    conns: usize,
    /// The measured window
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Before it
    #[arg(long, default_value_t = 1.0)]
    warmup: f64,
    /// Open loop: requests per second over all connections; closed loop without it
    #[arg(long)]
    rate: Option<f64>,
    /// Whose CPU time over the window is told, with its children's; repeatable
    #[arg(long = "pid")]
    pids: Vec<u32>,
    /// The engines', told apart; repeatable
    #[arg(long = "engine-pid")]
    engine: Vec<u32>,
    /// Open so many connections, make one request on each, print the result, and hold them until stdin closes
    #[arg(long)]
    idle: Option<usize>,
}

struct Conn {
    sock: TcpStream,
    used: bool,
}

struct Reply {
    status: u16,
    keep: bool,
}

enum Fail {
    /// The peer closed a kept-alive connection before any byte of the answer: try again on a new one.
    Stale,
    Error(String),
}

impl From<std::io::Error> for Fail {
    fn from(e: std::io::Error) -> Fail {
        Fail::Error(e.to_string())
    }
}

async fn connect(addr: &str) -> std::io::Result<Conn> {
    let sock = TcpStream::connect(addr).await?;
    sock.set_nodelay(true)?;
    Ok(Conn { sock, used: false })
}

/// Sends one request and reads its whole answer, recording into `st` as it arrives.
async fn exchange(c: &mut Conn, rq: &Request, buf: &mut Vec<u8>, st: &RefCell<Stats>) -> Result<Reply, Fail> {
    buf.clear();
    let reused = std::mem::replace(&mut c.used, true);
    let stale = |e: std::io::Error| if reused { Fail::Stale } else { e.into() };
    let t0 = Instant::now();
    c.sock.write_all(&rq.wire).await.map_err(stale)?;
    let (used, status, mut frame, sse, mut backend, close) = loop {
        let n = match c.sock.read_buf(buf).await {
            Ok(n) => n,
            Err(e) if buf.is_empty() => return Err(stale(e)),
            Err(e) => return Err(e.into()),
        };
        if n == 0 {
            return Err(if reused && buf.is_empty() {
                Fail::Stale
            } else {
                Fail::Error("closed before the answer".into())
            });
        }
        let mut slots = [httparse::EMPTY_HEADER; 96];
        let mut rs = httparse::Response::new(&mut slots);
        let done = rs.parse(buf).map_err(|e| Fail::Error(e.to_string()))?;
        if let httparse::Status::Complete(n) = done {
            let status = rs.code.unwrap_or(0);
            if status == 100 {
                buf.drain(..n);
                continue;
            }
            let text = |v: &[u8]| String::from_utf8_lossy(v).into_owned();
            let frame = framing(rs.headers, false).map_err(|e| Fail::Error(e.into()))?;
            let sse = header(rs.headers, "content-type").is_some_and(|v| v.starts_with(b"text/event-stream"));
            let close = header(rs.headers, "connection").is_some_and(|v| v.eq_ignore_ascii_case(b"close"));
            break (n, status, frame, sse, header(rs.headers, "x-backend").map(text), close);
        }
    };
    let (mut at, mut prev, mut last_event, mut tail) = (used, 0u8, None::<Instant>, Vec::<u8>::new());
    let mut total = buf.len() as u64;
    loop {
        let (mut events, mut seen) = (0u64, None::<String>);
        let want_tag = backend.is_none();
        let n = frame
            .feed(&buf[at..], |s| {
                if want_tag && seen.is_none() {
                    seen = memmem::find(s, TAG).map(|i| {
                        let s = &s[i + TAG.len()..];
                        String::from_utf8_lossy(&s[..memchr::memchr(b'"', s).unwrap_or(s.len())]).into_owned()
                    });
                }
                if sse {
                    for i in memchr::memchr_iter(b'\n', s) {
                        let before = if i == 0 { prev } else { s[i - 1] };
                        events += u64::from(before == b'\n');
                    }
                    if let Some(l) = s.last() {
                        prev = *l;
                    }
                    let keep = s.len().saturating_sub(32);
                    tail.extend_from_slice(&s[keep..]);
                    let over = tail.len().saturating_sub(32);
                    tail.drain(..over);
                }
            })
            .map_err(|e| Fail::Error(e.into()))?;
        at += n;
        backend = backend.or(seen);
        if events > 0 {
            let now = Instant::now();
            let mut s = st.borrow_mut();
            if s.measuring {
                s.events += events;
                match last_event {
                    None => s.first_event.add((now - t0).as_nanos() as u64),
                    Some(l) => s.gaps.add((now - l).as_nanos() as u64),
                }
            }
            last_event = Some(now);
        }
        if frame.done() {
            break;
        }
        if at >= buf.len() {
            buf.clear();
            at = 0;
        }
        let n = c.sock.read_buf(buf).await?;
        total += n as u64;
        if n == 0 {
            if frame == Body::UntilClose {
                break;
            }
            return Err(Fail::Error("closed inside the answer".into()));
        }
    }
    let mut s = st.borrow_mut();
    if s.measuring {
        s.bytes_in += total;
        s.bytes_out += rq.wire.len() as u64;
        if sse {
            s.streams += 1;
            if memmem::find(&tail, b"data: [DONE]").is_none() {
                s.streams_cut += 1;
            }
        }
        if status == 200 && !rq.group.is_empty() {
            *s.routed.entry((rq.group.clone(), backend.unwrap_or("?".into()))).or_default() += 1;
        }
    }
    Ok(Reply { status, keep: !(close || frame == Body::UntilClose) })
}

async fn worker(i: usize, o: Rc<Opts>, reqs: Rc<Vec<Request>>, st: Rc<RefCell<Stats>>, start: Instant) {
    let mut buf = Vec::with_capacity(64 << 10);
    let mut conn: Option<Conn> = None;
    let mut k = 0u64;
    // Spread the starts over the first half of the warm-up, so that streams do not tick in step.
    sleep(Duration::from_secs_f64(o.warmup / 2.0 * i as f64 / o.conns as f64)).await;
    let start = start + Duration::from_secs_f64(o.warmup / 2.0);
    loop {
        let mut from = Instant::now();
        if let Some(rate) = o.rate {
            let due = start + Duration::from_secs_f64((k as f64 * o.conns as f64 + i as f64) / rate);
            if due <= from {
                from = if k == 0 { from } else { due };
            } else {
                sleep_until(due).await;
                from = Instant::now();
            }
        }
        let mut open = match conn.take() {
            Some(open) => open,
            None => match connect(&o.target).await {
                Ok(open) => open,
                Err(e) => {
                    note_error(&st, e.to_string());
                    sleep(Duration::from_millis(20)).await;
                    continue;
                }
            },
        };
        let rq = &reqs[(i.wrapping_mul(7919) + k as usize) % reqs.len()];
        match exchange(&mut open, rq, &mut buf, &st).await {
            Ok(r) => {
                let mut s = st.borrow_mut();
                if s.measuring {
                    *s.statuses.entry(r.status).or_default() += 1;
                    if r.status == 200 {
                        s.ok += 1;
                        s.latency.add((Instant::now() - from).as_nanos() as u64);
                    }
                }
                if r.keep {
                    conn = Some(open);
                } else {
                    s.reconnects += 1;
                }
                k += 1;
            }
            Err(Fail::Stale) => {
                st.borrow_mut().reconnects += 1;
            }
            Err(Fail::Error(e)) => {
                note_error(&st, e);
                k += 1;
                sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

fn note_error(st: &RefCell<Stats>, e: String) {
    let mut s = st.borrow_mut();
    if s.measuring {
        s.errors += 1;
    }
    s.last_error = e;
}

/// utime + stime of a process and its descendants, in clock ticks.
fn tree_ticks(pid: u32) -> u64 {
    let mut sum = 0;
    if let Ok(s) = std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        let f: Vec<&str> = s[s.rfind(')').map_or(0, |i| i + 2)..].split(' ').collect();
        sum += f[11].parse().unwrap_or(0u64) + f[12].parse().unwrap_or(0u64);
    }
    for t in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let kids = std::fs::read_to_string(t.path().join("children")).unwrap_or_default();
        sum += kids.split_whitespace().filter_map(|k| k.parse().ok()).map(tree_ticks).sum::<u64>();
    }
    sum
}

/// (busy, all) ticks of the whole machine.
fn machine_ticks() -> (u64, u64) {
    let s = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let v: Vec<u64> = s
        .lines()
        .next()
        .unwrap_or("")
        .split_whitespace()
        .skip(1)
        .take(8)
        .filter_map(|x| x.parse().ok())
        .collect();
    let all: u64 = v.iter().sum();
    (all - v.get(3).unwrap_or(&0) - v.get(4).unwrap_or(&0), all)
}

fn requests(o: &Opts) -> std::io::Result<Vec<Request>> {
    let Some(dir) = &o.bodies else {
        let path = o.path.as_deref().unwrap_or("/health");
        let wire = format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\nUser-Agent: loadgen\r\nAccept: */*\r\n\r\n",
            o.target
        );
        return Ok(vec![Request { group: String::new(), wire: wire.into_bytes() }]);
    };
    let path = o.path.as_deref().unwrap_or("/v1/chat/completions");
    let mut files: Vec<_> =
        std::fs::read_dir(dir)?.collect::<Result<Vec<_>, _>>()?.iter().map(|e| e.path()).collect();
    files.sort();
    files
        .iter()
        .map(|f| {
            let body = std::fs::read(f)?;
            let name = f.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let mut wire = format!(
                "POST {path} HTTP/1.1\r\nHost: {}\r\nUser-Agent: loadgen\r\nAccept: */*\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
                o.target, body.len()
            )
            .into_bytes();
            wire.extend_from_slice(&body);
            Ok(Request { group: name.split('_').next().unwrap_or("").to_string(), wire })
        })
        .collect()
}

/// Share of responses that went to their group's most used backend, over all groups.
fn affinity(routed: &BTreeMap<(String, String), u64>) -> (f64, BTreeMap<String, u64>) {
    let (mut best, mut per, mut all) = (BTreeMap::<&str, u64>::new(), BTreeMap::<String, u64>::new(), 0);
    for ((g, b), n) in routed {
        let e = best.entry(g).or_default();
        *e = (*e).max(*n);
        *per.entry(b.clone()).or_default() += n;
        all += n;
    }
    (if all == 0 { 0.0 } else { best.values().sum::<u64>() as f64 / all as f64 }, per)
}

async fn hold(o: &Opts, n: usize, reqs: &[Request]) {
    let (st, mut kept, mut failed, mut buf) = (RefCell::new(Stats::default()), Vec::new(), 0u64, Vec::new());
    for i in 0..n {
        match connect(&o.target).await {
            Ok(mut c) => match exchange(&mut c, &reqs[i % reqs.len()], &mut buf, &st).await {
                Ok(r) if r.keep => kept.push(c),
                _ => failed += 1,
            },
            Err(_) => failed += 1,
        }
    }
    println!("{}", json!({ "mode": "idle", "open": kept.len(), "failed": failed }));
    std::io::stdin().lines().for_each(drop);
}

async fn measure(o: Rc<Opts>, reqs: Rc<Vec<Request>>) {
    let st = Rc::new(RefCell::new(Stats::default()));
    let start = Instant::now();
    let tasks: Vec<_> = (0..o.conns)
        .map(|i| tokio::task::spawn_local(worker(i, o.clone(), reqs.clone(), st.clone(), start)))
        .collect();
    sleep(Duration::from_secs_f64(o.warmup)).await;
    let trees = |pids: &[u32]| pids.iter().map(|p| tree_ticks(*p)).sum::<u64>();
    let snap = || {
        (Instant::now(), trees(&o.pids), tree_ticks(std::process::id()), machine_ticks(), trees(&o.engine))
    };
    let a = snap();
    st.borrow_mut().measuring = true;
    sleep(Duration::from_secs_f64(o.seconds)).await;
    st.borrow_mut().measuring = false;
    let b = snap();
    for t in tasks {
        t.abort();
    }
    let hz = 100.0; // USER_HZ, fixed by the Linux ABI
    let secs = (b.0 - a.0).as_secs_f64();
    let s = st.borrow();
    let (aff, per) = affinity(&s.routed);
    let result = json!({
        "mode": if o.rate.is_some() { "open" } else { "closed" },
        "conns": o.conns,
        "seconds": secs,
        "ok": s.ok,
        "rps": s.ok as f64 / secs,
        "errors": s.errors,
        "last_error": s.last_error,
        "reconnects": s.reconnects,
        "statuses": s.statuses,
        "bytes_in": s.bytes_in,
        "bytes_out": s.bytes_out,
        "latency": s.latency.json(),
        "events": s.events,
        "events_per_s": s.events as f64 / secs,
        "streams": s.streams,
        "streams_cut": s.streams_cut,
        "first_event": s.first_event.json(),
        "gaps": s.gaps.json(),
        "affinity": aff,
        "backends": per,
        "cpu_s": (b.1 - a.1) as f64 / hz,
        "loadgen_cpu_s": (b.2 - a.2) as f64 / hz,
        "engine_cpu_s": (b.4 - a.4) as f64 / hz,
        "machine_busy_s": (b.3.0 - a.3.0) as f64 / hz,
        "machine_all_s": (b.3.1 - a.3.1) as f64 / hz,
    });
    println!("{result}");
}

fn main() -> std::io::Result<()> {
    let o = Rc::new(Opts::parse());
    let reqs = Rc::new(requests(&o)?);
    assert!(!reqs.is_empty(), "no bodies");
    let rt = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    tokio::task::LocalSet::new().block_on(&rt, async {
        match o.idle {
            Some(n) => hold(&o, n, &reqs).await,
            None => measure(o.clone(), reqs).await,
        }
    });
    // Open sockets and waiting workers need no orderly end.
    std::process::exit(0)
}
