//! A client that shows an answer as it came.

use std::net::SocketAddr;

use bytes::{Buf, Bytes, BytesMut};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::PATIENCE;

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    line: String,
    host: String,
    fields: String,
    body: Vec<u8>,
}

impl Request {
    /// Without a body.
    pub fn get(path: &str) -> Self {
        Self { line: format!("GET {path}"), host: "gateway".into(), fields: String::new(), body: Vec::new() }
    }

    /// With a body that claims to be JSON.
    pub fn post(path: &str, body: impl Into<Vec<u8>>) -> Self {
        let request = Self { line: format!("POST {path}"), body: body.into(), ..Self::get(path) };
        request.field("content-type", "application/json")
    }

    /// With a JSON body.
    pub fn json(path: &str, body: &Value) -> Self {
        Self::post(path, body.to_string())
    }

    /// With a JSON body, to be put in place.
    pub fn put(path: &str, body: &Value) -> Self {
        let request = Self::json(path, body);
        Self { line: format!("PUT {path}"), ..request }
    }

    /// To another host.
    pub fn host(mut self, host: &str) -> Self {
        self.host = host.into();
        self
    }

    /// With a body that claims to be text.
    pub fn text(path: &str, body: &str) -> Self {
        let request = Self { line: format!("POST {path}"), body: body.into(), ..Self::get(path) };
        request.field("content-type", "text/plain")
    }

    /// With one more field.
    pub fn field(mut self, name: &str, value: &str) -> Self {
        self.fields.push_str(&format!("{name}: {value}\r\n"));
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let Self { line, host, fields, body } = self;
        let length = match body.len() {
            0 if line.starts_with("GET") => String::new(),
            n => format!("content-length: {n}\r\n"),
        };
        let head = format!("{line} HTTP/1.1\r\nhost: {host}\r\n{length}{fields}\r\n");
        [head.as_bytes(), body].concat()
    }
}

/// An answer, its chunks joined.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub status: u16,
    /// Names in lower case.
    pub fields: Vec<(String, String)>,
    pub body: Bytes,
    /// Whether all of it came, and nothing more.
    pub complete: bool,
}

impl Answer {
    /// The only field of this name.
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut named = self.fields.iter().filter(|(n, _)| n == name);
        let only = named.next().map(|(_, value)| value.as_str());
        assert!(named.next().is_none(), "{name} twice: {self:?}");
        only
    }

    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// `error.code` of an error.
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_else(|| panic!("no error: {self:?}")).to_owned()
    }

    /// Where it was answered.
    pub fn endpoint(&self) -> &str {
        self.field("x-kvgate-endpoint").unwrap_or_default()
    }

    /// Which tier chose.
    pub fn tier(&self) -> &str {
        self.field("x-kvgate-tier").unwrap_or_default()
    }

    /// The request's id.
    pub fn id(&self) -> &str {
        self.field("x-request-id").unwrap_or_default()
    }
}

/// How much of a body is still to come.
#[derive(Clone, Copy, Debug)]
enum Left {
    Bytes(usize),
    Chunks,
    Nothing,
}

/// One connection.
pub struct Connection {
    stream: TcpStream,
    buffer: BytesMut,
    left: Left,
}

impl Connection {
    pub async fn open(to: SocketAddr) -> Self {
        let stream = timeout(PATIENCE, TcpStream::connect(to)).await.expect("a connection in time").unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, buffer: BytesMut::new(), left: Left::Nothing }
    }

    pub async fn send(&mut self, request: &Request) {
        self.stream.write_all(&request.bytes()).await.unwrap();
    }

    /// Half of the request, its head included; returns the rest.
    pub async fn send_half(&mut self, request: &Request) -> Vec<u8> {
        let mut bytes = request.bytes();
        let rest = bytes.split_off(bytes.len() - request.body.len() / 2);
        self.stream.write_all(&bytes).await.unwrap();
        rest
    }

    /// What was left of a request.
    pub async fn send_rest(&mut self, rest: Vec<u8>) {
        self.stream.write_all(&rest).await.unwrap();
    }

    /// More bytes; `false` at the end.
    async fn more(&mut self) -> bool {
        let read =
            timeout(PATIENCE, self.stream.read_buf(&mut self.buffer)).await.expect("an answer in time");
        read.is_ok_and(|n| n > 0)
    }

    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|w| w == b"\r\n") {
                let line = self.buffer.split_to(end);
                self.buffer.advance(2);
                return Some(String::from_utf8(line.to_vec()).unwrap());
            }
            if !self.more().await {
                return None;
            }
        }
    }

    /// The answer's head; `None` if the connection ended instead.
    pub async fn head(&mut self) -> Option<Answer> {
        let line = self.line().await?;
        let status = line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
        let mut answer = Answer { status: status.expect("a status line"), ..Answer::default() };
        while let Some(line) = self.line().await.filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(':').expect("a field");
            answer.fields.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        self.left = match (answer.field("content-length"), answer.field("transfer-encoding")) {
            (Some(length), None) => Left::Bytes(length.parse().unwrap()),
            (None, Some("chunked")) => Left::Chunks,
            _ => panic!("no framing, or two: {answer:?}"),
        };
        Some(answer)
    }

    /// A piece of the body as it came; `None` at its end, `Err` if it breaks off.
    pub async fn piece(&mut self) -> Result<Option<Bytes>, &'static str> {
        match self.left {
            Left::Nothing | Left::Bytes(0) => Ok(None),
            Left::Bytes(left) => {
                if self.buffer.is_empty() && !self.more().await {
                    return Err("cut");
                }
                let piece = self.buffer.split_to(left.min(self.buffer.len())).freeze();
                self.left = Left::Bytes(left - piece.len());
                Ok(Some(piece))
            }
            Left::Chunks => {
                let line = self.line().await.ok_or("cut")?;
                let size = usize::from_str_radix(&line, 16).map_err(|_| "no chunk size")?;
                while self.buffer.len() < size + 2 {
                    if !self.more().await {
                        return Err("cut");
                    }
                }
                let piece = self.buffer.split_to(size).freeze();
                assert_eq!(&self.buffer.split_to(2)[..], b"\r\n", "a chunk ends with its line");
                if size == 0 {
                    self.left = Left::Nothing;
                    return Ok(None);
                }
                Ok(Some(piece))
            }
        }
    }

    /// The rest of an answer whose head is here.
    pub async fn rest(&mut self, mut answer: Answer) -> Answer {
        let mut body = BytesMut::new();
        answer.complete = loop {
            match self.piece().await {
                Ok(Some(piece)) => body.extend_from_slice(&piece),
                Ok(None) => break self.buffer.is_empty(),
                Err(_) => break false,
            }
        };
        answer.body = body.freeze();
        answer
    }

    /// A whole answer.
    pub async fn answer(&mut self) -> Answer {
        match self.head().await {
            Some(head) => self.rest(head).await,
            None => Answer::default(),
        }
    }
}

/// One request on a connection of its own.
pub async fn fetch(from: SocketAddr, request: &Request) -> Answer {
    let mut connection = Connection::open(from).await;
    connection.send(request).await;
    connection.answer().await
}
