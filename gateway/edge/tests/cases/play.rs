//! Showing a case to a server.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Case;

/// How long anything may take that must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

/// A client's end of a connection.
pub struct Client {
    pub stream: TcpStream,
    waiting: Vec<u8>,
}

impl Client {
    pub async fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, waiting: Vec::new() }
    }

    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.unwrap();
    }

    /// The next answer that is final; `None`: the connection ended.
    pub async fn answer(&mut self, to_head: bool) -> Option<Answer> {
        loop {
            let answer = self.any(to_head).await?;
            if answer.status >= 200 {
                return Some(answer);
            }
        }
    }

    /// The next answer.
    pub async fn any(&mut self, to_head: bool) -> Option<Answer> {
        let end = loop {
            if let Some(at) = self.waiting.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            self.more().await.then_some(())?;
        };
        let head = String::from_utf8(self.waiting.drain(..end).collect()).unwrap();
        let status: u16 = head.split(' ').nth(1).unwrap().parse().unwrap();
        let length = |line: &str| line.to_lowercase().strip_prefix("content-length:")?.trim().parse().ok();
        let length: usize = head.lines().find_map(length).unwrap_or(0);
        let length = if to_head || status < 200 { 0 } else { length };
        while self.waiting.len() < length {
            assert!(self.more().await, "an answer was cut: {head}");
        }
        let body = String::from_utf8(self.waiting.drain(..length).collect()).unwrap();
        Some(Answer { status, head, body })
    }

    /// The next bytes, whatever they are.
    pub async fn bytes(&mut self, count: usize) -> Vec<u8> {
        while self.waiting.len() < count {
            assert!(self.more().await, "the connection ended");
        }
        self.waiting.drain(..count).collect()
    }

    /// Whether the server has ended the connection, and sent nothing more.
    pub async fn ended(&mut self) -> bool {
        self.waiting.is_empty() && !self.more().await
    }

    async fn more(&mut self) -> bool {
        let mut piece = [0; 4096];
        match tokio::time::timeout(PATIENCE, self.stream.read(&mut piece)).await.unwrap() {
            Ok(n) => {
                self.waiting.extend_from_slice(&piece[..n]);
                n > 0
            }
            Err(_) => false,
        }
    }
}

/// Sends a case, cut at these places, and holds the answers against it.
pub async fn play(address: SocketAddr, case: &Case, cuts: &[usize]) {
    let name = &case.name;
    let mut client = Client::open(address).await;
    let mut start = 0;
    for end in cuts.iter().copied().chain([case.bytes.len()]) {
        // who was refused early may not take the rest
        if client.stream.write_all(&case.bytes[start..end]).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
        start = end;
    }
    for request in &case.passes {
        let answer = client.answer(request.starts_with("HEAD ")).await;
        assert_eq!(answer.map(|answer| answer.status), Some(200), "{name}, cut at {cuts:?}: {request}");
    }
    let Some(status) = case.then else { return };
    let answer = client.answer(false).await.unwrap_or_else(|| panic!("{name}, cut at {cuts:?}: no answer"));
    assert_eq!(answer.status, status, "{name}, cut at {cuts:?}: {answer:?}");
    assert!(answer.head.to_lowercase().contains("\r\nconnection: close\r\n"), "{name}: {answer:?}");
    assert!(answer.head.to_lowercase().contains("\r\nx-request-id: "), "{name}: {answer:?}");
    let code = match status {
        400 => "bad_request",
        405 => "method_not_allowed",
        414 => "uri_too_long",
        _ => "head_too_large",
    };
    assert!(answer.body.contains(&format!("\"code\":\"{code}\"")), "{name}: {answer:?}");
    assert!(client.ended().await, "{name}, cut at {cuts:?}: more than a refusal");
}
