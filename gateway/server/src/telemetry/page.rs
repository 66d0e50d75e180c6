//! Fetching an engine's metrics page: one request on a connection of its own, bounded in time and size.

use std::time::Duration;

use pingora_core::BError;
use pingora_core::connectors::http::Connector;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_http::RequestHeader;

use crate::relay::{brief, exhausted};

/// The 1xx that may come before the answer.
const MOST_INFORMED: u32 = 8;

/// Why there is no page, or none that can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// Its name is unknown, it takes no connection, or its certificate is another's.
    #[error("takes no connection: {0}")]
    Connect(String),
    /// The gateway has nothing left to connect with: no engine is to blame.
    #[error("cannot be connected to: {0}")]
    Exhausted(String),
    /// It took longer than this.
    #[error("does not answer within {0:?}")]
    Timeout(Duration),
    /// It answered with this status.
    #[error("answers with status {0}")]
    Status(u16),
    /// Its page is larger than this many bytes.
    #[error("has a page of more than {0} bytes")]
    Size(usize),
    /// It broke off, or does not speak HTTP.
    #[error("breaks off: {0}")]
    Broken(String),
    /// What came is no page, or holds nothing of use.
    #[error("{0}")]
    Garbage(&'static str),
}

impl Failure {
    /// One of [`REASONS`](super::status::REASONS).
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Connect(_) | Self::Exhausted(_) => "connect",
            Self::Timeout(_) => "timeout",
            Self::Status(_) => "status",
            Self::Size(_) => "size",
            Self::Broken(_) => "broken",
            Self::Garbage(_) => "garbage",
        }
    }
}

/// The body of the answer to `GET path`, at most `max` bytes. How long it takes is the caller's affair.
pub(crate) async fn fetch(
    connector: &Connector,
    peer: &HttpPeer,
    host: &str,
    path: &str,
    max: usize,
) -> Result<Vec<u8>, Failure> {
    let broken = |e: BError| Failure::Broken(brief(&e));
    let connected = connector.get_http_session(peer).await;
    let (mut engine, _) = connected.map_err(|e| match exhausted(&e) {
        true => Failure::Exhausted(brief(&e)),
        false => Failure::Connect(brief(&e)),
    })?;
    let request = request(host, path).map_err(broken)?;
    engine.write_request_header(Box::new(request)).await.map_err(broken)?;
    engine.finish_request_body().await.map_err(broken)?;
    for _ in 0..=MOST_INFORMED {
        engine.read_response_header().await.map_err(broken)?;
        if engine.response_header().is_none_or(|head| !head.status.is_informational()) {
            break;
        }
    }
    match engine.response_header().map(|head| head.status.as_u16()) {
        Some(200) => {}
        Some(other) => return Err(Failure::Status(other)),
        None => return Err(Failure::Broken("no answer".into())),
    }
    let mut page = Vec::new();
    while let Some(piece) = engine.read_response_body().await.map_err(broken)? {
        if piece.len() > max - page.len() {
            return Err(Failure::Size(max));
        }
        page.extend_from_slice(&piece);
    }
    // dropping the session closes its connection
    Ok(page)
}

fn request(host: &str, path: &str) -> Result<RequestHeader, BError> {
    let mut head = RequestHeader::build("GET", path.as_bytes(), Some(5))?;
    head.insert_header("host", host)?;
    head.insert_header("accept", "text/plain;version=0.0.4")?;
    head.insert_header("user-agent", concat!("kvgate/", env!("CARGO_PKG_VERSION")))?;
    head.insert_header("connection", "close")?;
    Ok(head)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use pingora_core::protocols::ALPN;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// An engine that answers every request with these bytes, and what it was asked.
    async fn engine(answer: Vec<u8>) -> (SocketAddr, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") && stream.read_buf(&mut head).await.unwrap() > 0 {}
            let _ = stream.write_all(&answer).await;
            String::from_utf8(head).unwrap()
        });
        (address, served)
    }

    async fn ask(address: SocketAddr) -> Result<String, Failure> {
        let mut peer = HttpPeer::new(address, false, String::new());
        peer.options.alpn = ALPN::H1;
        let page = fetch(&Connector::new(None), &peer, "engine:8000", "/metrics", 1000).await?;
        Ok(String::from_utf8(page).unwrap())
    }

    async fn answered(answer: &str) -> Result<String, Failure> {
        let (address, served) = engine(answer.as_bytes().to_vec()).await;
        let page = ask(address).await;
        let asked = served.await.unwrap().to_lowercase();
        assert!(asked.starts_with("get /metrics http/1.1\r\nhost: engine:8000\r\n"), "{asked}");
        page
    }

    #[tokio::test]
    async fn pages_come_in_any_framing_and_in_full() {
        let whole = "x".repeat(1000);
        for head in ["content-length: 1000\r\n\r\n", "\r\n", "transfer-encoding: chunked\r\n\r\n3e8\r\n"] {
            let end = if head.contains("chunked") { "\r\n0\r\n\r\n" } else { "" };
            let page = answered(&format!("HTTP/1.1 200 OK\r\n{head}{whole}{end}")).await;
            assert_eq!(page.as_ref(), Ok(&whole), "{head}");
            let longer = head.replace("1000", "1001").replace("3e8", "3e9");
            let more = answered(&format!("HTTP/1.1 200 OK\r\n{longer}{whole}x{end}")).await;
            assert_eq!(more, Err(Failure::Size(1000)), "{head}");
        }
        let late = "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
        assert_eq!(answered(late).await.unwrap(), "ok");
    }

    #[tokio::test]
    async fn what_is_no_page_has_its_reason() {
        for (answer, reason) in [
            ("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "status"),
            ("HTTP/1.1 204 No Content\r\n\r\n", "status"),
            ("HTTP/1.1 307 Temporary Redirect\r\nlocation: /\r\ncontent-length: 0\r\n\r\n", "status"),
            ("", "broken"),
            ("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", "broken"),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhalf", "broken"),
            ("220 smtp.example.com ESMTP\r\n", "broken"),
        ] {
            let failure = answered(answer).await.unwrap_err();
            assert_eq!(failure.reason(), reason, "{answer}: {failure}");
        }
        let endless = format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(1 << 20));
        assert_eq!(answered(&endless).await, Err(Failure::Size(1000)));
        let (address, served) = engine(Vec::new()).await;
        served.abort();
        let _ = served.await;
        assert_eq!(ask(address).await.unwrap_err().reason(), "connect");
    }
}
