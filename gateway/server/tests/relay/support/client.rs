//! Raw clients: h1 over a socket, h2 over the `h2` crate.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use http::Version;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, TcpStream};

use super::patience;

/// A request to make.
#[derive(Clone)]
pub struct Ask {
    pub method: &'static str,
    pub target: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Not with Content-Length: chunked (h1), by END_STREAM (h2).
    pub unsized_: bool,
    pub version: Version,
}

impl Ask {
    pub fn new(method: &'static str, target: impl Into<String>, body: impl Into<Vec<u8>>) -> Self {
        Self {
            method,
            target: target.into(),
            headers: Vec::new(),
            body: body.into(),
            unsized_: false,
            version: Version::HTTP_11,
        }
    }

    pub fn post(target: impl Into<String>, body: impl Into<Vec<u8>>) -> Self {
        Self::new("POST", target, body)
    }

    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.push((name.into(), value.to_string()));
        self
    }

    /// By way of this engine.
    pub fn via(self, engine: usize) -> Self {
        self.with("x-engine", engine)
    }

    /// The request on an h1 wire.
    pub fn wire(&self) -> Vec<u8> {
        let minor = if self.version == Version::HTTP_10 { 0 } else { 1 };
        let mut head = format!("{} {} HTTP/1.{minor}\r\nHost: front.example\r\n", self.method, self.target);
        for (k, v) in &self.headers {
            head += &format!("{k}: {v}\r\n");
        }
        if self.unsized_ {
            let mut wire = (head + "Transfer-Encoding: chunked\r\n\r\n").into_bytes();
            for chunk in self.body.chunks(50_000) {
                wire.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                wire.extend_from_slice(chunk);
                wire.extend_from_slice(b"\r\n");
            }
            wire.extend_from_slice(b"0\r\n\r\n");
            return wire;
        }
        if !self.body.is_empty() || self.method == "POST" {
            head += &format!("Content-Length: {}\r\n", self.body.len());
        }
        [(head + "\r\n").as_bytes(), &self.body].concat()
    }
}

/// An answer, whole or cut.
#[derive(Debug, Default)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// The pieces the body came in: h1 chunks, h2 frames.
    pub pieces: Vec<Vec<u8>>,
    pub trailers: Vec<(String, String)>,
    /// 1xx before it.
    pub informed: Vec<u16>,
    /// It ended before its framing said so.
    pub cut: bool,
}

impl Response {
    pub fn get(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(k, _)| k.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
    }

    pub fn count(&self, name: &str) -> usize {
        self.headers.iter().filter(|(k, _)| k.eq_ignore_ascii_case(name)).count()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// `error.code` of an error in OpenAI's shape, which is checked.
    #[track_caller]
    pub fn code(&self) -> String {
        assert_eq!(self.get("content-type"), Some("application/json"), "{self:?}");
        error_code(&self.body)
    }
}

/// `error.code` of an error in OpenAI's shape, which is checked.
#[track_caller]
pub fn error_code(json: &[u8]) -> String {
    let value: serde_json::Value = serde_json::from_slice(json).unwrap();
    let error = value["error"].as_object().expect("an error object");
    assert!(error["message"].is_string() && error["type"].is_string() && error["param"].is_null());
    error["code"].as_str().unwrap().to_owned()
}

/// An h1 client.
pub struct H1 {
    pub io: BufReader<TcpStream>,
}

impl H1 {
    pub async fn open(address: SocketAddr) -> Self {
        Self::open_with(address, None).await
    }

    /// With a receive buffer of this size.
    pub async fn open_with(address: SocketAddr, receive: Option<u32>) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        if let Some(receive) = receive {
            socket.set_recv_buffer_size(receive).unwrap();
        }
        let stream = socket.connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { io: BufReader::new(stream) }
    }

    pub async fn raw(&mut self, bytes: &[u8]) {
        self.io.get_mut().write_all(bytes).await.unwrap();
    }

    pub async fn send(&mut self, ask: &Ask) {
        self.raw(&ask.wire()).await;
    }

    pub async fn call(&mut self, ask: &Ask) -> Response {
        // an early answer may close the connection under the upload
        let (io, wire) = (self.io.get_mut(), ask.wire());
        let _ = patience("the upload", io.write_all(&wire)).await;
        self.recv(ask.method).await
    }

    pub async fn head(&mut self) -> io::Result<Response> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if self.io.read_line(&mut line).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if line == "\r\n" {
                break;
            }
            lines.push(line.trim_end_matches("\r\n").to_owned());
        }
        let status = lines[0].split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines[1..]
            .iter()
            .map(|l| l.split_once(": ").unwrap())
            .map(|(k, v)| (k.into(), v.into()))
            .collect();
        Ok(Response { status, headers, ..Response::default() })
    }

    pub async fn chunk(&mut self) -> io::Result<Vec<u8>> {
        let mut line = String::new();
        self.io.read_line(&mut line).await?;
        let n = usize::from_str_radix(line.trim_end(), 16).map_err(io::Error::other)?;
        let mut data = vec![0; n + 2];
        self.io.read_exact(&mut data).await?;
        data.truncate(n);
        Ok(data)
    }

    /// The answer; `cut` also when there is none.
    pub async fn recv(&mut self, method: &str) -> Response {
        patience("an answer", async {
            let mut informed = Vec::new();
            let mut answer = loop {
                match self.head().await {
                    Ok(head) if head.status < 200 => informed.push(head.status),
                    Ok(head) => break head,
                    Err(_) => return Response { cut: true, informed, ..Response::default() },
                }
            };
            answer.informed = informed;
            if method != "HEAD" && !matches!(answer.status, 204 | 304) {
                answer.cut = self.body(&mut answer).await.is_err();
            }
            answer
        })
        .await
    }

    async fn body(&mut self, answer: &mut Response) -> io::Result<()> {
        if answer.get("transfer-encoding") == Some("chunked") {
            loop {
                let piece = self.chunk().await?;
                if piece.is_empty() {
                    return Ok(());
                }
                answer.body.extend_from_slice(&piece);
                answer.pieces.push(piece);
            }
        }
        match answer.get("content-length") {
            Some(n) => {
                let n = n.parse().unwrap();
                while answer.body.len() < n {
                    let mut piece = vec![0; (n - answer.body.len()).min(65536)];
                    let read = self.io.read(&mut piece).await?;
                    if read == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    answer.body.extend_from_slice(&piece[..read]);
                }
            }
            None => {
                self.io.read_to_end(&mut answer.body).await?;
            }
        }
        Ok(())
    }

    /// Leaves with a reset.
    pub fn reset(self) {
        socket2::SockRef::from(self.io.get_ref()).set_linger(Some(Duration::ZERO)).unwrap();
    }

    /// Whether the other side has ended the connection in order.
    pub async fn ended(&mut self) -> bool {
        let mut rest = Vec::new();
        patience("the end of the connection", self.io.read_to_end(&mut rest)).await.is_ok() && rest.is_empty()
    }
}

/// An h2 client.
pub struct H2 {
    pub send: SendRequest<Bytes>,
    connection: tokio::task::JoinHandle<()>,
}

/// A request on its way.
pub struct H2Stream {
    pub body: SendStream<Bytes>,
    answer: ResponseFuture,
}

impl H2 {
    pub async fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (send, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::spawn(async move {
            let _ = connection.await;
        });
        Self { send, connection }
    }

    /// Sends the head and what of the body fits without waiting; ends it if `end`.
    pub async fn start(&mut self, ask: &Ask, end: bool) -> H2Stream {
        let uri = format!("http://front.example{}", ask.target);
        let mut head = http::Request::builder().method(ask.method).uri(uri).version(Version::HTTP_2);
        for (k, v) in &ask.headers {
            head = head.header(k.to_lowercase(), v);
        }
        if !ask.body.is_empty() && !ask.unsized_ {
            head = head.header("content-length", ask.body.len());
        }
        let empty = ask.body.is_empty();
        let mut send = self.send.clone().ready().await.unwrap();
        let (answer, mut body) = send.send_request(head.body(()).unwrap(), end && empty).unwrap();
        if !empty {
            // an early answer may have ended the stream by now
            let _ = body.send_data(ask.body.clone().into(), end);
        }
        H2Stream { body, answer }
    }

    pub async fn call(&mut self, ask: &Ask) -> Response {
        self.start(ask, true).await.recv().await
    }

    /// Leaves with the whole connection.
    pub fn close(self) {
        self.connection.abort();
    }
}

impl H2Stream {
    pub async fn recv(self) -> Response {
        patience("an answer", async {
            let Self { body: _upload, answer } = self;
            let Ok(answer) = answer.await else { return Response { cut: true, ..Response::default() } };
            let (head, mut body) = answer.into_parts();
            let headers = head.headers.iter().map(text).collect();
            let mut answer = Response { status: head.status.as_u16(), headers, ..Response::default() };
            answer.cut = receive(&mut body, &mut answer).await.is_err();
            answer
        })
        .await
    }

    /// The answer's status, and the stream of its body.
    pub async fn head(&mut self) -> (u16, RecvStream) {
        let answer = patience("an answer", &mut self.answer).await.unwrap();
        (answer.status().as_u16(), answer.into_body())
    }

    pub fn reset(&mut self) {
        self.body.send_reset(Reason::CANCEL);
    }
}

fn text((name, value): (&http::HeaderName, &http::HeaderValue)) -> (String, String) {
    (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
}

async fn receive(body: &mut RecvStream, answer: &mut Response) -> Result<(), h2::Error> {
    while let Some(piece) = body.data().await {
        let piece = piece?;
        body.flow_control().release_capacity(piece.len())?;
        if !piece.is_empty() {
            answer.body.extend_from_slice(&piece);
            answer.pieces.push(piece.to_vec());
        }
    }
    let trailers = poll_fn(|cx| body.poll_trailers(cx)).await?;
    answer.trailers = trailers.iter().flatten().map(text).collect();
    Ok(())
}

/// Either.
pub enum Client {
    H1(H1),
    H2(H2),
}

impl Client {
    pub async fn open(address: SocketAddr, h2: bool) -> Self {
        if h2 { Self::H2(H2::open(address).await) } else { Self::H1(H1::open(address).await) }
    }

    pub async fn call(&mut self, ask: &Ask) -> Response {
        match self {
            Self::H1(client) => client.call(ask).await,
            Self::H2(client) => client.call(ask).await,
        }
    }

    /// Sends the request and does not wait. Keep what is returned: dropped, it resets an h2 stream.
    pub async fn start(&mut self, ask: &Ask) -> Option<H2Stream> {
        match self {
            Self::H1(client) => {
                client.send(ask).await;
                None
            }
            Self::H2(client) => Some(client.start(ask, true).await),
        }
    }
}
