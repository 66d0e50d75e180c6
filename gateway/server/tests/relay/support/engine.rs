//! A scriptable engine that speaks h1 and, when the client begins so, h2c.

use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use super::{digest, patience};

type Script = Arc<dyn for<'a> Fn(&'a mut Call) -> BoxFuture<'a, io::Result<()>> + Send + Sync>;

/// What an engine was asked.
#[derive(Clone, Debug)]
pub struct Seen {
    pub h2: bool,
    pub method: String,
    /// Path and query, as it stood on the wire.
    pub target: String,
    pub headers: Vec<(String, String)>,
}

impl Seen {
    pub fn get(&self, name: &str) -> Vec<&str> {
        self.headers.iter().filter(|(k, _)| k.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str()).collect()
    }

    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }
}

/// The engine.
pub struct Engine {
    pub address: SocketAddr,
    scripts: Mutex<HashMap<String, Script>>,
    seen: Mutex<Vec<Seen>>,
    connections: AtomicUsize,
}

impl Engine {
    pub async fn start() -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let engine = Arc::new(Self {
            address: listener.local_addr().unwrap(),
            scripts: Mutex::default(),
            seen: Mutex::default(),
            connections: AtomicUsize::new(0),
        });
        let me = engine.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                me.connections.fetch_add(1, Ordering::SeqCst);
                let me = me.clone();
                tokio::spawn(async move {
                    let _ = me.connection(stream).await;
                });
            }
        });
        engine
    }

    /// What to do with requests for a path. Others get the length and the digest of their body.
    pub fn on<F>(&self, path: &str, script: F)
    where
        F: for<'a> Fn(&'a mut Call) -> BoxFuture<'a, io::Result<()>> + Send + Sync + 'static,
    {
        self.scripts.lock().unwrap().insert(path.into(), Arc::new(script));
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub fn last(&self) -> Seen {
        self.seen.lock().unwrap().last().cloned().expect("a request reached the engine")
    }

    pub fn hits(&self, path: &str) -> usize {
        self.seen.lock().unwrap().iter().filter(|s| s.path() == path).count()
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    fn script(&self, seen: &Seen) -> Script {
        self.seen.lock().unwrap().push(seen.clone());
        let default: Script = Arc::new(|c| c.echo().boxed());
        self.scripts.lock().unwrap().get(seen.path()).cloned().unwrap_or(default)
    }

    async fn connection(self: Arc<Self>, stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut first = [0; 3];
        while stream.peek(&mut first).await? < 3 {
            if first.first() == Some(&0) {
                return Ok(());
            }
            tokio::task::yield_now().await;
        }
        if first == *b"PRI" { self.h2(stream).await } else { self.h1(stream).await }
    }

    async fn h1(self: Arc<Self>, stream: TcpStream) -> io::Result<()> {
        let mut io = BufReader::new(stream);
        let mut count = 0;
        loop {
            let Some(seen) = h1_head(&mut io).await? else { return Ok(()) };
            let script = self.script(&seen);
            count += 1;
            let mut call = Call { seen, nth: count, wire: Wire::H1 { io, closed: false } };
            let done = script(&mut call).await;
            match call.wire {
                Wire::H1 { io: back, closed: false } if done.is_ok() => io = back,
                _ => return Ok(()),
            }
        }
    }

    async fn h2(self: Arc<Self>, stream: TcpStream) -> io::Result<()> {
        let mut connection = h2::server::handshake(stream).await.map_err(io::Error::other)?;
        let close = Arc::new(Notify::new());
        let mut count = 0;
        loop {
            let accepted = tokio::select! {
                accepted = connection.accept() => accepted,
                () = close.notified() => return Ok(()),
            };
            let Some(Ok((request, respond))) = accepted else { return Ok(()) };
            let (head, body) = request.into_parts();
            let mut headers: Vec<_> = head
                .headers
                .iter()
                .map(|(k, v)| (k.to_string(), String::from_utf8_lossy(v.as_bytes()).into_owned()))
                .collect();
            headers
                .push((":authority".into(), head.uri.authority().map(|a| a.to_string()).unwrap_or_default()));
            let target = head.uri.path_and_query().map(|p| p.to_string()).unwrap_or_default();
            let seen = Seen { h2: true, method: head.method.to_string(), target, headers };
            let script = self.script(&seen);
            count += 1;
            let wire = Wire::H2 { respond, body, send: None, close: close.clone() };
            let mut call = Call { seen, nth: count, wire };
            tokio::spawn(async move {
                let _ = script(&mut call).await;
            });
        }
    }
}

async fn h1_head(io: &mut BufReader<TcpStream>) -> io::Result<Option<Seen>> {
    let mut lines = Vec::new();
    loop {
        let mut line = Vec::new();
        if io.read_until(b'\n', &mut line).await? == 0 {
            return Ok(None);
        }
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if line.is_empty() {
            break;
        }
        lines.push(line);
    }
    let mut request = lines.first().map(|l| l.split(' ')).into_iter().flatten();
    let mut word = || request.next().unwrap_or_default().to_owned();
    let (method, target) = (word(), word());
    let headers =
        lines.iter().skip(1).filter_map(|l| l.split_once(": ")).map(|(k, v)| (k.into(), v.into())).collect();
    Ok(Some(Seen { h2: false, method, target, headers }))
}

enum Wire {
    H1 { io: BufReader<TcpStream>, closed: bool },
    H2 { respond: SendResponse<Bytes>, body: RecvStream, send: Option<SendStream<Bytes>>, close: Arc<Notify> },
}

/// One request at the engine, and the means to answer it.
pub struct Call {
    pub seen: Seen,
    /// Which request of its connection it is, from 1.
    pub nth: usize,
    wire: Wire,
}

impl Call {
    pub fn is_h2(&self) -> bool {
        self.seen.h2
    }

    /// Reads the request's body to its end.
    pub async fn body(&mut self) -> io::Result<Vec<u8>> {
        match &mut self.wire {
            Wire::H1 { io, .. } => {
                assert!(self.seen.get("transfer-encoding").is_empty(), "uploads travel with a length");
                let n = self.seen.get("content-length").first().map_or(0, |n| n.parse().unwrap());
                let mut body = vec![0; n];
                io.read_exact(&mut body).await?;
                Ok(body)
            }
            Wire::H2 { body, .. } => {
                let mut all = Vec::new();
                while let Some(data) = body.data().await {
                    let data = data.map_err(io::Error::other)?;
                    body.flow_control().release_capacity(data.len()).map_err(io::Error::other)?;
                    all.extend_from_slice(&data);
                }
                Ok(all)
            }
        }
    }

    /// Bytes as they are (h1).
    pub async fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.wire {
            Wire::H1 { io, .. } => io.get_mut().write_all(bytes).await,
            Wire::H2 { .. } => panic!("raw bytes on an h2 stream"),
        }
    }

    async fn begin(&mut self, status: u16, headers: &[(&str, &str)], end: bool) -> io::Result<()> {
        match &mut self.wire {
            Wire::H1 { .. } => {
                let mut head = format!("HTTP/1.1 {status} X\r\n");
                for (k, v) in headers {
                    head += &format!("{k}: {v}\r\n");
                }
                self.raw((head + "\r\n").as_bytes()).await
            }
            Wire::H2 { respond, send, .. } => {
                let mut head = http::Response::builder().status(status);
                for (k, v) in headers {
                    head = head.header(*k, *v);
                }
                let head = head.body(()).map_err(io::Error::other)?;
                *send = Some(respond.send_response(head, end).map_err(io::Error::other)?);
                Ok(())
            }
        }
    }

    /// A head after which [`chunk`](Self::chunk)s follow.
    pub async fn head(&mut self, status: u16, headers: &[(&str, &str)]) -> io::Result<()> {
        let mut headers = headers.to_vec();
        if !self.is_h2() && !headers.iter().any(|(k, _)| k.eq_ignore_ascii_case("content-length")) {
            headers.push(("Transfer-Encoding", "chunked"));
        }
        self.begin(status, &headers, false).await
    }

    /// A head without any body.
    pub async fn only_head(&mut self, status: u16, headers: &[(&str, &str)]) -> io::Result<()> {
        self.begin(status, headers, true).await
    }

    /// A whole answer with its length.
    pub async fn answer(&mut self, status: u16, body: &[u8], headers: &[(&str, &str)]) -> io::Result<()> {
        let length = body.len().to_string();
        let headers: Vec<_> =
            [("content-length", length.as_str())].into_iter().chain(headers.to_vec()).collect();
        self.begin(status, &headers, false).await?;
        match &mut self.wire {
            Wire::H1 { io, .. } => io.get_mut().write_all(body).await,
            Wire::H2 { .. } => self.data(body, true).await,
        }
    }

    pub async fn events(&mut self) -> io::Result<()> {
        self.head(200, &[("content-type", "text/event-stream; charset=utf-8")]).await
    }

    pub async fn chunk(&mut self, data: &[u8]) -> io::Result<()> {
        match &mut self.wire {
            Wire::H1 { .. } => {
                let chunk = [format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat();
                self.raw(&chunk).await
            }
            Wire::H2 { .. } => self.data(data, false).await,
        }
    }

    pub async fn end(&mut self) -> io::Result<()> {
        match &mut self.wire {
            Wire::H1 { .. } => self.raw(b"0\r\n\r\n").await,
            Wire::H2 { .. } => self.data(b"", true).await,
        }
    }

    /// Ends with a trailer field.
    pub async fn trailer(&mut self, name: &'static str, value: &'static str) -> io::Result<()> {
        match &mut self.wire {
            Wire::H1 { .. } => self.raw(format!("0\r\n{name}: {value}\r\n\r\n").as_bytes()).await,
            Wire::H2 { send, .. } => {
                let mut trailers = http::HeaderMap::new();
                trailers.insert(name, http::HeaderValue::from_static(value));
                send.as_mut().expect("head first").send_trailers(trailers).map_err(io::Error::other)
            }
        }
    }

    async fn data(&mut self, data: &[u8], end: bool) -> io::Result<()> {
        let Wire::H2 { send: Some(send), .. } = &mut self.wire else { panic!("head first") };
        let mut rest = Bytes::copy_from_slice(data);
        while !rest.is_empty() {
            send.reserve_capacity(rest.len());
            let room = poll_fn(|cx| send.poll_capacity(cx)).await;
            let room = room.ok_or(io::ErrorKind::BrokenPipe)?.map_err(io::Error::other)?;
            let piece = rest.split_to(room.min(rest.len()));
            send.send_data(piece, end && rest.is_empty()).map_err(io::Error::other)?;
        }
        if end && data.is_empty() {
            send.send_data(Bytes::new(), true).map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Resets the connection (h1) or the stream (h2).
    pub fn reset(&mut self) {
        self.reset_with(Reason::INTERNAL_ERROR);
    }

    pub fn reset_with(&mut self, reason: Reason) {
        match &mut self.wire {
            Wire::H1 { io, closed } => {
                *closed = true;
                socket2::SockRef::from(io.get_ref()).set_linger(Some(Duration::ZERO)).unwrap();
            }
            Wire::H2 { respond, send, .. } => match send {
                Some(send) => send.send_reset(reason),
                None => respond.send_reset(reason),
            },
        }
    }

    /// Closes the connection, when the script returns (h1) or at once (h2).
    pub fn close(&mut self) {
        match &mut self.wire {
            Wire::H1 { closed, .. } => *closed = true,
            Wire::H2 { close, .. } => close.notify_one(),
        }
    }

    /// Ends its side of the connection, now (h1).
    pub async fn shut(&mut self) -> io::Result<()> {
        match &mut self.wire {
            Wire::H1 { io, closed } => {
                *closed = true;
                io.get_mut().shutdown().await
            }
            Wire::H2 { .. } => panic!("one side of an h2 connection"),
        }
    }

    /// Waits until the other side leaves.
    pub async fn gone(&mut self) -> io::Result<()> {
        let gone = async {
            match &mut self.wire {
                Wire::H1 { io, closed } => {
                    *closed = true;
                    let mut sink = vec![0; 65536];
                    while io.read(&mut sink).await.is_ok_and(|n| n > 0) {}
                }
                Wire::H2 { respond, send, .. } => {
                    let _ = poll_fn(|cx| match send {
                        Some(send) => send.poll_reset(cx),
                        None => respond.poll_reset(cx),
                    })
                    .await;
                }
            }
        };
        patience("the other side leaves", gone).await;
        Ok(())
    }

    /// Waits until the other side leaves, and reads nothing it sends.
    pub async fn gone_unread(&mut self) -> io::Result<()> {
        match &mut self.wire {
            Wire::H1 { io, closed } => {
                *closed = true;
                let ready = io.get_ref().ready(tokio::io::Interest::ERROR);
                patience("the other side leaves", ready).await.map(drop)
            }
            Wire::H2 { .. } => self.gone().await,
        }
    }

    /// The last piece of a body, with its end (h2).
    pub async fn last(&mut self, data: &[u8]) -> io::Result<()> {
        self.data(data, true).await
    }

    /// Length and digest of the body.
    pub async fn echo(&mut self) -> io::Result<()> {
        let body = self.body().await?;
        self.answer(200, digest(&body).as_bytes(), &[]).await
    }
}
