//! A connection of HTTP/1 that sends a request while the answer to it is read.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use async_trait::async_trait;
use bytes::{Buf, Bytes};
use pingora_core::protocols::raw_connect::ProxyDigest;
use pingora_core::protocols::tls::SslDigest;
use pingora_core::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream,
    TimingDigest, UniqueID, UniqueIDType,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

/// Bytes that are sent in one go: copying them is all the time that other requests on the thread wait.
const TURN: usize = 128 * 1024;

/// A connection as the library's session has it, and what is still to be sent on it.
///
/// The library writes a piece of a body to its end or not at all, and an engine that answers without having read the
/// request blocks that write. Here every read sends what the engine takes, and how far it came is known at any time.
#[derive(Debug)]
pub struct Sending(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    stream: Stream,
    /// What is left, and what is left after that: head and body.
    left: [Bytes; 2],
    /// Some of the request was handed to the connection.
    begun: bool,
    /// The engine has all of it. A HEAD request, which the library writes itself, may be next on a connection from the
    /// pool: its answer is read with this still set by the request before.
    done: bool,
    /// Why no more can be sent.
    failed: Option<io::ErrorKind>,
}

impl Inner {
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(kind) = self.failed {
            return Poll::Ready(Err(kind.into()));
        }
        if self.done {
            return Poll::Ready(Ok(()));
        }
        let sent = self.poll_all(cx);
        match &sent {
            Poll::Ready(Ok(())) => self.done = true,
            Poll::Ready(Err(e)) => self.failed = Some(e.kind()),
            Poll::Pending => {}
        }
        sent
    }

    fn poll_all(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut turn = TURN;
        for piece in &mut self.left {
            while !piece.is_empty() {
                if turn == 0 {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                let next = piece.get(..turn.min(piece.len())).unwrap_or_default();
                let n = ready!(Pin::new(&mut self.stream).poll_write(cx, next))?;
                if n == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.begun = true;
                piece.advance(n);
                turn -= n;
            }
            // an empty piece would keep the memory of the whole
            *piece = Bytes::new();
        }
        Pin::new(&mut self.stream).poll_flush(cx)
    }
}

impl Sending {
    /// Sends `head` and `body` on this connection, as it is polled.
    pub fn start(stream: Stream, head: Bytes, body: Bytes) -> Stream {
        let left = [head, body];
        // one that comes from the pool has been wrapped before
        if let Some(known) = (*stream).as_any().downcast_ref::<Self>() {
            let mut inner = known.lock();
            (inner.left, inner.begun, inner.done, inner.failed) = (left, false, false, None);
            drop(inner);
            return stream;
        }
        Box::new(Self(Mutex::new(Inner { stream, left, begun: false, done: false, failed: None })))
    }

    /// The one behind a session that was made with [`start`](Self::start).
    pub fn of(stream: &Stream) -> Option<&Self> {
        (**stream).as_any().downcast_ref()
    }

    /// Sends what the engine takes. Ready when it has all, or will not get it.
    pub fn poll_send(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.lock().poll_send(cx)
    }

    /// Sends no more: the connection is of no use after the answer.
    pub fn give_up(&self) {
        let mut inner = self.lock();
        inner.left = Default::default();
        inner.failed = Some(io::ErrorKind::ConnectionAborted);
        inner.done = false;
    }

    /// Whether an engine may have read some of it.
    pub fn has_begun(&self) -> bool {
        self.lock().begun
    }

    /// Whether the engine has all of it.
    pub fn is_done(&self) -> bool {
        self.lock().done
    }

    /// Bytes still to be sent.
    pub fn left(&self) -> usize {
        self.lock().left.iter().map(Bytes::len).sum()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inner(&mut self) -> &mut Inner {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    fn stream(&mut self) -> Pin<&mut Stream> {
        Pin::new(&mut self.inner().stream)
    }
}

impl AsyncRead for Sending {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let inner = self.inner();
        // what has come is read although nothing more can be sent; the connection's own end says the rest
        let _ = inner.poll_send(cx);
        Pin::new(&mut inner.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Sending {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stream().poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_shutdown(cx)
    }
}

#[async_trait]
impl Shutdown for Sending {
    async fn shutdown(&mut self) {
        let _ = AsyncWriteExt::shutdown(&mut self.inner().stream).await;
    }
}

impl UniqueID for Sending {
    fn id(&self) -> UniqueIDType {
        self.lock().stream.id()
    }
}

impl Ssl for Sending {
    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.lock().stream.get_ssl_digest()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.lock().stream.selected_alpn_proto()
    }
}

impl GetTimingDigest for Sending {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.lock().stream.get_timing_digest()
    }
}

impl GetProxyDigest for Sending {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.lock().stream.get_proxy_digest()
    }
}

impl GetSocketDigest for Sending {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.lock().stream.get_socket_digest()
    }
}

impl Peek for Sending {}
