//! HTTP/1 on one connection.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::BytesMut;
use pingora_core::apps::HttpServerApp;
use pingora_core::protocols::http::ServerSession;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::arrival::{Arrival, Io};
use crate::edge::Shared;
use crate::stream::{Facts, Stream};

/// Bytes read at once while a request is awaited.
const PIECE: usize = 4 * 1024;

/// Serves requests one after the other, until either side ends the connection.
pub(crate) async fn serve_h1<A>(shared: &Shared<A>, arrival: Arrival)
where
    A: HttpServerApp + Send + Sync + 'static,
{
    let facts = Facts::of(&arrival);
    let mut draining = shared.draining.clone();
    let mut io = arrival.io;
    let until = arrival.accepted + shared.config.head;
    let Some(prefix) = begun(&mut io, until, &mut draining).await else { return };
    let mut session = ServerSession::new_http1(Box::new(Stream::new(io, facts.clone())));
    session.set_pipelined_prefix(prefix);
    loop {
        let Some(reused) = shared.app.process_new_http(session, &draining).await else { return };
        let (stream, kept) = reused.consume();
        session = ServerSession::new_http1(stream);
        if let Some(kept) = kept {
            kept.apply_to_session(&mut session);
        }
    }
}

/// Waits for the first bytes of a request; `None`: there will be none.
async fn begun(
    io: &mut Box<dyn Io>,
    until: Instant,
    draining: &mut watch::Receiver<bool>,
) -> Option<BytesMut> {
    tokio::select! {
        biased;
        bytes = timeout_at(until, poll_fn(|cx| piece(io, cx))) => bytes.ok()?,
        _ = draining.wait_for(|draining| *draining) => None,
    }
}

/// The next piece, which takes memory only when it has come.
fn piece(io: &mut Box<dyn Io>, cx: &mut Context<'_>) -> Poll<Option<BytesMut>> {
    let mut bytes = [const { std::mem::MaybeUninit::uninit() }; PIECE];
    let mut buffer = ReadBuf::uninit(&mut bytes);
    match Pin::new(io).poll_read(cx, &mut buffer) {
        Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
            Poll::Ready(Some(BytesMut::from(buffer.filled())))
        }
        Poll::Ready(_) => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    }
}
