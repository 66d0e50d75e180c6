//! A plain HTTP client and a shared tokenizer, for the tests of this crate.
#![allow(dead_code)]

use kvgate_prompt::{Model, State, Tokenizers, TokenizersConfig};
use kvgate_sim::{Sim, SimConfig};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Loaded once per process.
pub fn model(name: &str) -> Arc<Model> {
    static STORE: OnceLock<Tokenizers> = OnceLock::new();
    let store =
        STORE.get_or_init(|| Tokenizers::new(kvgate_tests::tokenizers(), TokenizersConfig::default()));
    match store.load(name) {
        State::Ready(model) => model,
        other => panic!("{other:?}"),
    }
}

/// An engine whose tokenizer is quick to load.
pub async fn start(config: SimConfig) -> Sim {
    Sim::with_model(config, model("tiny-words")).await.unwrap()
}

/// An engine with the tokenizer of captured answers.
pub async fn start_qwen3(config: SimConfig) -> Sim {
    Sim::with_model(config, model("tiny-qwen3")).await.unwrap()
}

/// An answer, its chunks joined.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
    /// Whether the whole body came.
    pub complete: bool,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The JSON events of a stream, `[DONE]` left out.
    pub fn events(&self) -> Vec<Value> {
        let data = self.body.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

pub async fn send(address: SocketAddr, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let length = body.len();
    let request =
        format!("{method} {path} HTTP/1.1\r\nhost: sim\r\ncontent-length: {length}\r\n{headers}\r\n{body}");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

pub async fn request(address: SocketAddr, method: &str, path: &str, headers: &str, body: &str) -> Answer {
    let mut stream = send(address, method, path, &format!("connection: close\r\n{headers}"), body).await;
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut bytes)).await;
    let _ = read.expect("an answer within 30 s");
    parse(&String::from_utf8(bytes).unwrap())
}

fn parse(answer: &str) -> Answer {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let lower = head.to_lowercase();
    let length = lower.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
    let (body, complete) = if lower.contains("transfer-encoding: chunked") {
        dechunk(body)
    } else {
        (body.to_owned(), length.is_none_or(|length| length == body.len()))
    };
    Answer { status, head: lower, body, complete }
}

fn dechunk(mut rest: &str) -> (String, bool) {
    let mut body = String::new();
    while let Some((size, tail)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            return (body, true);
        }
        let Some(chunk) = tail.get(..size) else { break };
        body.push_str(chunk);
        rest = tail.get(size + 2..).unwrap_or_default();
    }
    (body, false)
}

pub async fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    request(address, "POST", path, "content-type: application/json\r\n", &body.to_string()).await
}

pub async fn get(address: SocketAddr, path: &str) -> Answer {
    request(address, "GET", path, "", "").await
}

/// Completes a prompt of the token ids `start..start + count`.
pub async fn complete(address: SocketAddr, start: u32, count: u32) -> Value {
    let prompt: Vec<u32> = (start..start + count).collect();
    let answer = post(address, "/v1/completions", &json!({ "prompt": prompt, "max_tokens": 1 })).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..1000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("never: {what}");
}
