//! The client's side of a connection: what of it a session may see, and when.

use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::arrival::Transport;
use crate::h1::Framer;
use crate::refusal::Refusal;

/// Bytes read at once while a request is awaited.
const PIECE: usize = 4 * 1024;
/// Answers shorter than this are sent at once, head and body.
const WRITE_BUFFER: usize = 4 * 1024;
/// What is kept of requests that come before the one under way is answered, or as much as one read brings behind the end
/// of a body. More is read all the same, or the client's leaving would not be seen, and dropped: the connection ends with
/// the answer under way.
const EARLY: usize = 16 * 1024;

/// A connection that its task and the session of the request under way share. Never locked across an await.
#[derive(Clone, Debug)]
pub(crate) struct Wire(Arc<Mutex<Inner>>);

impl Wire {
    pub fn new(io: Box<dyn Transport>, framer: Framer) -> Self {
        let (early, out) = (BytesMut::new(), BytesMut::new());
        Self(Arc::new(Mutex::new(Inner {
            io,
            framer,
            early,
            out,
            overrun: false,
            answered: false,
            unframed: false,
            reader: None,
        })))
    }

    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something of a request is there; false: the client has left.
    pub async fn begun(&self) -> bool {
        poll_fn(|cx| self.lock().poll_begun(cx)).await
    }

    /// Waits until a request's head is whole, and takes it with what has come of its body. `None`: the client has
    /// left.
    pub async fn head(&self) -> Result<Option<BytesMut>, Refusal> {
        poll_fn(|cx| self.lock().poll_head(cx)).await
    }

    /// Sends what has been written, ends this side, and reads on until the client ends its own: were it closed at
    /// once, a client still sending would see a reset instead of its answer.
    pub async fn linger(&self) {
        poll_fn(|cx| self.lock().poll_linger(cx)).await;
    }
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.lock().poll_read(cx, buf)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.lock().poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.lock().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.lock();
        inner.unframed = false;
        inner.poll_shutdown(cx)
    }
}

/// A connection, its buffers, and where in which request it is. Between requests it holds no memory but this.
#[derive(Debug)]
pub(crate) struct Inner {
    io: Box<dyn Transport>,
    framer: Framer,
    /// Read, and not given to a session.
    early: BytesMut,
    /// More came early than is kept, and was dropped.
    overrun: bool,
    /// Written by a session, and not sent.
    out: BytesMut,
    /// A final answer has begun.
    answered: bool,
    /// The connection's end is the answer's, and the session has not ended it.
    unframed: bool,
    /// Who waits for bytes that a session sees only if the protocol changes.
    reader: Option<Waker>,
}

impl Inner {
    /// Makes ready for the next request; false: the one before is not over, or the next one is lost.
    pub fn next_request(&mut self) -> bool {
        self.out = BytesMut::new();
        (self.answered, self.unframed) = (false, false);
        self.reader = None;
        !self.overrun && self.framer.next_request()
    }

    /// Writes an answer of our own.
    pub fn answer(&mut self, text: &str) {
        self.out.extend_from_slice(text.as_bytes());
    }

    /// Whether the connection has gone over to another protocol.
    pub fn is_tunnel(&self) -> bool {
        self.framer.is_raw()
    }

    /// Whether the request asks for another protocol.
    pub fn is_upgrade(&self) -> bool {
        self.framer.is_upgrade()
    }

    /// Whether an answer was cut whose client would take the connection's end for its: a reset will tell it.
    pub fn resets(&self) -> bool {
        if self.unframed {
            self.io.resets();
        }
        self.unframed
    }

    /// Whether anything of the next request has come.
    pub fn has_begun(&self) -> bool {
        !self.early.is_empty()
    }

    fn poll_begun(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        if self.has_begun() {
            return Poll::Ready(true);
        }
        self.poll_piece(cx, true).map(|read| read.is_ok_and(|n| n > 0))
    }

    fn poll_head(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<BytesMut>, Refusal>> {
        loop {
            if let Some(end) = self.framer.head(&self.early)? {
                let own = self.framer.body(self.early.get(end..).unwrap_or_default())?;
                let request = self.early.split_to(end + own);
                // what is left, if anything, must not hold the memory of what is gone
                self.early = BytesMut::from(self.early.as_ref());
                return Poll::Ready(Ok(Some(request)));
            }
            if !matches!(ready!(self.poll_piece(cx, true)), Ok(1..)) {
                return Poll::Ready(Ok(None));
            }
        }
    }

    /// Reads some bytes. Those to be kept go to `early`, for which memory is taken only when they have come.
    fn poll_piece(&mut self, cx: &mut Context<'_>, keep: bool) -> Poll<io::Result<usize>> {
        let mut bytes = [const { MaybeUninit::uninit() }; PIECE];
        let mut buffer = ReadBuf::uninit(&mut bytes);
        ready!(Pin::new(&mut self.io).poll_read(cx, &mut buffer))?;
        if keep {
            self.early.extend_from_slice(buffer.filled());
        }
        Poll::Ready(Ok(buffer.filled().len()))
    }

    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if ready!(self.poll_shutdown(cx)).is_err() {
            return Poll::Ready(());
        }
        self.early = BytesMut::new();
        while matches!(ready!(self.poll_piece(cx, false)), Ok(1..)) {}
        Poll::Ready(())
    }

    /// What a session reads: this request's bytes, which have been looked at; after them nothing, until the client
    /// leaves.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.framer.is_raw() {
            return self.poll_raw(cx, buf);
        }
        if self.framer.is_done() {
            return self.poll_leaving(cx);
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        let new = buf.filled().get(before..).unwrap_or_default();
        match self.framer.body(new) {
            Ok(own) => {
                self.early.extend_from_slice(new.get(own..).unwrap_or_default());
                buf.set_filled(before + own);
                Poll::Ready(Ok(()))
            }
            Err(refusal) => {
                buf.set_filled(before);
                Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, refusal)))
            }
        }
    }

    fn poll_raw(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.early.is_empty() {
            return Pin::new(&mut self.io).poll_read(cx, buf);
        }
        let some = self.early.split_to(self.early.len().min(buf.remaining()));
        buf.put_slice(&some);
        Poll::Ready(Ok(()))
    }

    fn poll_leaving(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.framer.is_upgrade() {
            self.reader = Some(cx.waker().clone());
        }
        loop {
            let keep = self.early.len() < EARLY;
            if !keep && self.framer.is_upgrade() {
                // another protocol cannot go on behind a gap
                return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
            }
            if ready!(self.poll_piece(cx, keep))? == 0 {
                return Poll::Ready(Ok(()));
            }
            self.overrun |= !keep;
        }
    }

    pub fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.notice(bytes);
        if self.out.len() + bytes.len() > WRITE_BUFFER {
            ready!(self.poll_send(cx))?;
        }
        if bytes.len() >= WRITE_BUFFER {
            return Pin::new(&mut self.io).poll_write(cx, bytes);
        }
        self.out.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    /// A session writes each head at once, so the beginning of the first that is final tells whether the protocol
    /// changes.
    fn notice(&mut self, bytes: &[u8]) {
        if self.answered || bytes.is_empty() {
            return;
        }
        if bytes.starts_with(b"HTTP/1.1 101") {
            self.framer.upgraded();
            if let Some(reader) = self.reader.take() {
                reader.wake();
            }
        } else if bytes.starts_with(b"HTTP/1.1 1") {
            return;
        }
        self.answered = true;
        self.unframed = self.framer.is_http_10() && !tells_length(bytes);
    }

    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            match ready!(Pin::new(&mut self.io).poll_write(cx, &self.out))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                n => self.out.advance(n),
            }
        }
        Poll::Ready(Ok(()))
    }

    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(cx))?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    pub fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(cx))?;
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Whether an answer's head says how long it is.
fn tells_length(head: &[u8]) -> bool {
    const NAME: &[u8] = b"content-length:";
    let mut lines = head.split(|byte| *byte == b'\n');
    lines.any(|line| line.get(..NAME.len()).is_some_and(|name| name.eq_ignore_ascii_case(NAME)))
}
