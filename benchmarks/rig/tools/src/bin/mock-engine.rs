//! Mock OpenAI-compatible engine: canned JSON or SSE, no model. One process plays several backends.
//!
//!   POST /v1/chat/completions, /v1/completions   "stream":true gives "max_tokens" SSE chunks (default 64)
//!   GET  /v1/models /health /metrics             and the info paths that routers probe
//!   POST /_mock/config?pace_us=N                 change pacing of all backends while running
//!
//! Every response carries `X-Backend: NAME` and every completion `"system_fingerprint":"NAME"`.
use clap::Parser;
use kvgate_rig::http::{Body, framing};
use memchr::memmem;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep_until};

const MAX_BODY: usize = 16 << 20;
const WORDS: [&str; 7] = ["the", "route", "of", "every", "block", "was", "known"];

/// Answers like several engines, at once or at a pace.
#[derive(Parser)]
struct Opts {
    /// The model they serve
    #[arg(long, default_value = "mock")]
    model: String,
    /// Each engine's name and address, NAME=ADDRESS
    #[arg(required = true)]
    backends: Vec<String>,
}

#[derive(Default)]
struct Shared {
    model: String,
    pace_us: Cell<u64>,
    backends: RefCell<Vec<Rc<Backend>>>,
}

struct Backend {
    name: String,
    /// Canned complete responses (head and body).
    chat: Vec<u8>,
    text: Vec<u8>,
    health: Vec<u8>,
    sse_head: Vec<u8>,
    chat_sse: Sse,
    text_sse: Sse,
    running: Cell<u64>,
}

/// SSE events, each already framed as one HTTP chunk.
struct Sse {
    first: Vec<u8>,
    /// Sent in turn: some proxies take a repeated token for a looping model.
    tokens: Vec<Vec<u8>>,
    last: Vec<u8>,
}

fn response(name: &str, status: &str, ctype: &str, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\nServer: mock-engine\r\nContent-Type: {ctype}\r\nX-Backend: {name}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn event(data: &str) -> Vec<u8> {
    let ev = format!("data: {data}\n\n");
    format!("{:x}\r\n{ev}\r\n", ev.len()).into_bytes()
}

impl Backend {
    fn new(name: &str, model: &str) -> Backend {
        let text =
            "The quick brown fox jumps over the lazy dog while the router counts its blocks. ".repeat(3);
        let usage =
            r#"{"prompt_tokens":128,"total_tokens":192,"completion_tokens":64,"prompt_tokens_details":null}"#;
        let head = |id: &str, obj: &str| {
            format!(
                r#""id":"{id}-0123456789abcdef","object":"{obj}","created":1764000000,"model":"{model}","system_fingerprint":"{name}""#
            )
        };
        let chat = format!(
            r#"{{{},"choices":[{{"index":0,"message":{{"role":"assistant","content":"{text}","refusal":null,"tool_calls":[]}},"logprobs":null,"finish_reason":"stop","stop_reason":null}}],"usage":{usage}}}"#,
            head("chatcmpl", "chat.completion")
        );
        let completion = format!(
            r#"{{{},"choices":[{{"index":0,"text":"{text}","logprobs":null,"finish_reason":"stop","stop_reason":null}}],"usage":{usage}}}"#,
            head("cmpl", "text_completion")
        );
        let chat_delta = |delta: &str, fin: &str| {
            event(&format!(
                r#"{{{},"choices":[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{fin}}}]}}"#,
                head("chatcmpl", "chat.completion.chunk")
            ))
        };
        let text_delta = |text: &str, fin: &str| {
            event(&format!(
                r#"{{{},"choices":[{{"index":0,"text":"{text}","logprobs":null,"finish_reason":{fin}}}]}}"#,
                head("cmpl", "text_completion")
            ))
        };
        let done = |mut last: Vec<u8>| {
            last.extend_from_slice(&event("[DONE]"));
            last.extend_from_slice(b"0\r\n\r\n");
            last
        };
        let json = "application/json";
        Backend {
            name: name.into(),
            chat: response(name, "200 OK", json, &chat),
            text: response(name, "200 OK", json, &completion),
            health: response(name, "200 OK", json, ""),
            sse_head: format!(
                "HTTP/1.1 200 OK\r\nServer: mock-engine\r\nContent-Type: text/event-stream; charset=utf-8\r\nX-Backend: {name}\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            .into_bytes(),
            chat_sse: Sse {
                first: chat_delta(r#"{"role":"assistant","content":""}"#, "null"),
                tokens: WORDS.iter().map(|w| chat_delta(&format!(r#"{{"content":" {w}"}}"#), "null")).collect(),
                last: done(chat_delta("{}", r#""stop""#)),
            },
            text_sse: Sse {
                first: text_delta("", "null"),
                tokens: WORDS.iter().map(|w| text_delta(&format!(" {w}"), "null")).collect(),
                last: done(text_delta("", r#""stop""#)),
            },
            running: Cell::new(0),
        }
    }
}

/// The text after `"key":` in a JSON body, without parsing all of it.
fn after_key<'a>(body: &'a [u8], key: &str) -> Option<&'a [u8]> {
    let quoted = format!("\"{key}\"");
    let at = memmem::find(body, quoted.as_bytes())? + quoted.len();
    let rest = &body[at..];
    let skip = rest.iter().take_while(|c| matches!(c, b' ' | b':' | b'\n' | b'\t')).count();
    Some(&rest[skip..])
}

fn number(s: &[u8]) -> Option<u64> {
    let n = s.iter().take_while(|c| c.is_ascii_digit()).count();
    std::str::from_utf8(&s[..n]).ok()?.parse().ok()
}

fn query(path: &str, key: &str) -> Option<u64> {
    let (_, q) = path.split_once('?')?;
    q.split('&').find_map(|kv| kv.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
}

async fn stream(
    sock: &mut TcpStream,
    sh: &Shared,
    be: &Backend,
    sse: &Sse,
    tokens: u64,
) -> std::io::Result<()> {
    let pace = sh.pace_us.get();
    let mut due = Instant::now();
    sock.write_all(&be.sse_head).await?;
    for i in 0..=tokens {
        let ev = match i {
            0 => &sse.first,
            _ if i == tokens => &sse.last,
            _ => &sse.tokens[i as usize % sse.tokens.len()],
        };
        sock.write_all(ev).await?;
        if pace > 0 && i < tokens {
            due += Duration::from_micros(pace);
            sleep_until(due).await;
        }
    }
    Ok(())
}

async fn respond(
    sock: &mut TcpStream,
    sh: &Shared,
    be: &Backend,
    path: &str,
    body: &[u8],
) -> std::io::Result<()> {
    let json = "application/json";
    let bare = path.split('?').next().unwrap_or(path);
    match bare {
        "/v1/chat/completions" | "/v1/completions" => {
            let chat = bare == "/v1/chat/completions";
            if after_key(body, "stream").is_some_and(|v| v.starts_with(b"true")) {
                let key = after_key(body, "max_tokens").or_else(|| after_key(body, "max_completion_tokens"));
                let tokens = key.and_then(number).unwrap_or(64).max(1);
                be.running.set(be.running.get() + 1);
                let r = stream(sock, sh, be, if chat { &be.chat_sse } else { &be.text_sse }, tokens).await;
                be.running.set(be.running.get() - 1);
                return r;
            }
            sock.write_all(if chat { &be.chat } else { &be.text }).await
        }
        "/health" | "/health_generate" | "/ping" => sock.write_all(&be.health).await,
        "/v1/models" => {
            let b = format!(
                r#"{{"object":"list","data":[{{"id":"{m}","object":"model","created":1764000000,"owned_by":"vllm","root":"{m}","parent":null,"max_model_len":1048576}}]}}"#,
                m = sh.model
            );
            sock.write_all(&response(&be.name, "200 OK", json, &b)).await
        }
        "/version" => sock.write_all(&response(&be.name, "200 OK", json, r#"{"version":"0.15.0"}"#)).await,
        "/get_model_info" | "/model_info" => {
            let b = format!(
                r#"{{"model_path":"{m}","served_model_name":"{m}","is_generation":true}}"#,
                m = sh.model
            );
            sock.write_all(&response(&be.name, "200 OK", json, &b)).await
        }
        "/get_server_info" | "/server_info" => {
            let b = format!(
                r#"{{"model_path":"{m}","served_model_name":"{m}","model_id":"{m}","tp_size":1,"dp_size":1}}"#,
                m = sh.model
            );
            sock.write_all(&response(&be.name, "200 OK", json, &b)).await
        }
        "/metrics" => {
            let l = format!("{{engine=\"0\",model_name=\"{}\"}}", sh.model);
            let b = format!(
                "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{l} {}\n\
                 # TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{l} 0\n\
                 # TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{l} 0.1\n",
                be.running.get()
            );
            sock.write_all(&response(&be.name, "200 OK", "text/plain; version=0.0.4", &b)).await
        }
        "/_mock/config" => {
            if let Some(v) = query(path, "pace_us") {
                sh.pace_us.set(v);
            }
            let b = format!(r#"{{"pace_us":{}}}"#, sh.pace_us.get());
            sock.write_all(&response(&be.name, "200 OK", json, &b)).await
        }
        _ => sock.write_all(&response(&be.name, "404 Not Found", json, r#"{"detail":"Not Found"}"#)).await,
    }
}

/// Serves one connection until the peer closes it.
async fn serve(mut sock: TcpStream, sh: Rc<Shared>, be: Rc<Backend>) -> std::io::Result<()> {
    sock.set_nodelay(true)?;
    let bad = |why: &str| std::io::Error::new(std::io::ErrorKind::InvalidData, why.to_string());
    let mut buf: Vec<u8> = Vec::with_capacity(64 << 10);
    let mut body: Vec<u8> = Vec::new();
    loop {
        let (used, path, mut frame, expect) = loop {
            let mut slots = [httparse::EMPTY_HEADER; 96];
            let mut req = httparse::Request::new(&mut slots);
            match req.parse(&buf).map_err(|e| bad(&e.to_string()))? {
                httparse::Status::Complete(n) => {
                    let frame = framing(req.headers, true).map_err(bad)?;
                    let expect = req.headers.iter().any(|h| h.name.eq_ignore_ascii_case("expect"));
                    break (n, req.path.unwrap_or("/").to_string(), frame, expect);
                }
                httparse::Status::Partial => {
                    if buf.len() > 256 << 10 {
                        return Err(bad("header too large"));
                    }
                    if sock.read_buf(&mut buf).await? == 0 {
                        return Ok(());
                    }
                }
            }
        };
        buf.drain(..used);
        if expect {
            sock.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        }
        body.clear();
        if let Body::Length(n) = frame {
            body.reserve((n as usize).min(MAX_BODY));
        }
        loop {
            let n = frame.feed(&buf, |s| body.extend_from_slice(s)).map_err(bad)?;
            buf.drain(..n);
            if frame.done() {
                break;
            }
            if body.len() > MAX_BODY {
                sock.write_all(&response(&be.name, "413 Payload Too Large", "application/json", "{}"))
                    .await?;
                return Ok(());
            }
            if sock.read_buf(&mut buf).await? == 0 {
                return Ok(());
            }
        }
        respond(&mut sock, &sh, &be, &path, &body).await?;
    }
}

fn main() -> std::io::Result<()> {
    let o = Opts::parse();
    let sh = Shared { model: o.model, ..Shared::default() };
    let mut binds = Vec::new();
    for backend in o.backends {
        let Some((name, addr)) = backend.split_once('=') else {
            return Err(std::io::Error::other(format!("{backend}: not NAME=ADDRESS")));
        };
        binds.push((name.to_owned(), addr.to_owned()));
    }
    let sh = Rc::new(sh);
    let rt = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    tokio::task::LocalSet::new().block_on(&rt, async move {
        let mut accepts = Vec::new();
        for (name, addr) in binds {
            let be = Rc::new(Backend::new(&name, &sh.model));
            sh.backends.borrow_mut().push(be.clone());
            let l = TcpListener::bind(&addr).await?;
            let sh = sh.clone();
            accepts.push(tokio::task::spawn_local(async move {
                loop {
                    match l.accept().await {
                        Ok((s, _)) => {
                            let (sh, be) = (sh.clone(), be.clone());
                            tokio::task::spawn_local(async move {
                                let _ = serve(s, sh, be).await;
                            });
                        }
                        Err(e) => {
                            eprintln!("accept: {e}");
                            tokio::time::sleep(Duration::from_millis(50)).await;
                        }
                    }
                }
            }));
        }
        println!("ready");
        for a in accepts {
            let _ = a.await;
        }
        Ok(())
    })
}
