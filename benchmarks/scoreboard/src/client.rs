//! A client that sees every byte: what the answer was, whether it was whole, and when its parts came.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kvgate_rig::http::{Body, framing};
use memchr::memmem;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::Result;

/// How long anything may take before it counts as lost.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// An answer, as far as it came.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// 0: no head came.
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// Without its framing.
    pub body: Vec<u8>,
    /// Ended as its framing said.
    pub whole: bool,
    /// From the sending to the head.
    pub first: Duration,
    /// From the sending to the end.
    pub total: Duration,
}

impl Answer {
    /// The first header of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The code of an error in OpenAI's form, whether as an answer or as the last event of a stream.
    pub fn error(&self) -> Option<String> {
        let text = match memmem::rfind(&self.body, b"event: error\ndata: ") {
            Some(at) if self.streams() => self.body.get(at + 19..)?.strip_suffix(b"\n\n")?,
            _ => &self.body,
        };
        let value: Value = serde_json::from_slice(text).ok()?;
        Some(value["error"]["code"].as_str().or(value["error"]["type"].as_str())?.to_owned())
    }

    /// Whether it is an event stream.
    pub fn streams(&self) -> bool {
        self.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"))
    }

    /// Whether the client was served or properly told why not: an answer that is whole, and if it is a refusal says so
    /// in JSON, and if it is a stream ends with its mark or with an error event.
    pub fn kept(&self) -> bool {
        if !self.whole {
            return false;
        }
        match self.status {
            200..=299 if self.streams() => self.body.ends_with(b"data: [DONE]\n\n") || self.error().is_some(),
            100..=399 => true,
            400..=599 => self.error().is_some(),
            _ => false,
        }
    }
}

/// What a client speaks over.
pub trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> Stream for S {}

/// A connection to a server of HTTP/1.1.
pub struct Client<S = TcpStream> {
    stream: S,
    buffer: Vec<u8>,
    /// The server keeps the connection.
    pub open: bool,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// When it cannot.
    pub async fn connect(address: SocketAddr) -> Result<Self> {
        let stream = tokio::time::timeout(PATIENCE, TcpStream::connect(address)).await??;
        stream.set_nodelay(true)?;
        Ok(Self::over(stream))
    }

    /// The connection itself.
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }
}

impl<S: Stream> Client<S> {
    /// On a connection that is there.
    pub fn over(stream: S) -> Self {
        Self { stream, buffer: Vec::with_capacity(16 << 10), open: true }
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// When the server does not take them.
    pub async fn send(&mut self, bytes: &[u8]) -> Result {
        tokio::time::timeout(PATIENCE, self.stream.write_all(bytes)).await??;
        Ok(self.stream.flush().await?)
    }

    /// Reads an answer to its end, whatever that is; `each` sees the pieces of its body.
    pub async fn answer(&mut self, mut each: impl FnMut(&[u8])) -> Answer {
        let sent = Instant::now();
        let mut answer = Answer::default();
        let read = self.read(sent, &mut answer, &mut each);
        answer_within(read).await;
        answer.total = sent.elapsed();
        self.open &= answer.whole && answer.header("connection") != Some("close");
        answer
    }

    /// Sends a request and reads its answer.
    pub async fn ask(&mut self, wire: &[u8]) -> Answer {
        match self.send(wire).await {
            // a refusal may be there though the request was not taken to its end
            Ok(()) | Err(_) => self.answer(|_| ()).await,
        }
    }

    /// Reads the head, and so much of the body that a first byte is there; the rest is left.
    ///
    /// # Errors
    /// When the connection ends before.
    pub async fn begin(&mut self) -> Result {
        let mut seen = Vec::new();
        loop {
            let read = tokio::time::timeout(PATIENCE, self.stream.read_buf(&mut seen)).await??;
            if read == 0 {
                return Err("closed before the body".into());
            }
            if memmem::find(&seen, b"\r\n\r\n").is_some_and(|at| at + 4 < seen.len()) {
                return Ok(());
            }
        }
    }

    async fn read(&mut self, sent: Instant, answer: &mut Answer, each: &mut impl FnMut(&[u8])) -> Option<()> {
        let (mut body, used) = loop {
            if let Some(found) = head(&self.buffer, answer)? {
                break found;
            }
            if self.stream.read_buf(&mut self.buffer).await.ok()? == 0 {
                return None;
            }
        };
        answer.first = sent.elapsed();
        self.buffer.drain(..used);
        loop {
            let taken = body
                .feed(&self.buffer, |piece| {
                    each(piece);
                    answer.body.extend_from_slice(piece);
                })
                .ok()?;
            self.buffer.drain(..taken);
            if body.done() {
                answer.whole = true;
                return Some(());
            }
            if self.stream.read_buf(&mut self.buffer).await.ok()? == 0 {
                answer.whole = body == Body::UntilClose;
                self.open = false;
                return None;
            }
        }
    }
}

async fn answer_within(read: impl Future<Output = Option<()>>) {
    let _ = tokio::time::timeout(PATIENCE, read).await;
}

/// The framing of the body and the length of the head, once that is there; 1xx are passed over. `None`: no HTTP.
fn head(buffer: &[u8], answer: &mut Answer) -> Option<Option<(Body, usize)>> {
    let mut from = 0;
    loop {
        let mut slots = [httparse::EMPTY_HEADER; 64];
        let mut parsed = httparse::Response::new(&mut slots);
        let httparse::Status::Complete(length) = parsed.parse(buffer.get(from..)?).ok()? else {
            return Some(None);
        };
        let status = parsed.code?;
        if (100..200).contains(&status) && status != 101 {
            from += length;
            continue;
        }
        answer.status = status;
        answer.headers = parsed
            .headers
            .iter()
            .map(|h| (h.name.to_ascii_lowercase(), String::from_utf8_lossy(h.value).into_owned()))
            .collect();
        let empty = matches!(status, 101 | 204 | 304);
        let body = if empty { Body::Length(0) } else { framing(parsed.headers, false).ok()? };
        return Some(Some((body, from + length)));
    }
}

/// A request with a body, as bytes.
pub fn post(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// A request without one.
pub fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: gateway\r\n\r\n").into_bytes()
}

/// A completion, streamed or not, of so many tokens.
pub fn completion(model: &str, prompt: &str, stream: bool, tokens: usize) -> Vec<u8> {
    let body =
        format!(r#"{{"model":"{model}","prompt":"{prompt}","stream":{stream},"max_tokens":{tokens}}}"#);
    post("/v1/completions", "", body.as_bytes())
}

/// One request on a connection of its own.
pub async fn once(address: SocketAddr, wire: &[u8]) -> Answer {
    match Client::connect(address).await {
        Ok(mut client) => client.ask(wire).await,
        Err(_) => Answer::default(),
    }
}
