//! Sending the request, and noticing an answer that comes before its end.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use http::Method;
use pingora_core::protocols::http::client::HttpSession;
use pingora_core::protocols::http::v1::client::{HttpSession as Http1Session, http_req_header_to_wire};
use pingora_core::protocols::http::v2::client::Http2Session;
use pingora_core::protocols::http::v2::write_body;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_core::{ErrorType, OrErr, Result as PingoraResult};
use pingora_http::ResponseHeader;
use tokio::task::yield_now;

use super::exchange::{Progress, Run};
use super::leg::{Fault, Leg, LegError};
use super::sending::Sending;

/// An h2 request's body goes out in pieces of this size. A request to an h1 engine is sent in one up to it.
const SLICE: usize = 64 * 1024;
/// How long an engine that has answered, and not said no, may leave the rest of the request where it is before its
/// answer is passed on.
const STALL: Duration = Duration::from_millis(250);

impl Run<'_> {
    /// Sends head and body, unless an early answer says that the body is not wanted. Returns the session, also when
    /// that failed: it may hold an answer.
    pub(super) async fn upload(
        &mut self,
        engine: HttpSession,
        peer: &HttpPeer,
    ) -> (HttpSession, Result<(), LegError>) {
        match (engine, self.wire()) {
            (HttpSession::H1(h1), Some([head, body])) => {
                let stream = Sending::start(h1.into_inner(), head, body);
                let mut h1 = Http1Session::new_with_options(stream, peer);
                let done = self.send_on(&mut h1).await;
                self.begun = sending(&h1).is_none_or(Sending::has_begun);
                (HttpSession::H1(h1), done)
            }
            (mut engine, _) => {
                let done = self.upload_pieces(&mut engine).await;
                (engine, done)
            }
        }
    }

    /// Head and body of a request to an h1 engine, short ones in one piece: what costs a send costs a wake-up at the other
    /// end. The library must have written the head of a HEAD request itself to read the answer to one.
    fn wire(&self) -> Option<[Bytes; 2]> {
        let Leg { head, body, .. } = self.leg;
        if head.method == Method::HEAD {
            return None;
        }
        let mut wire = http_req_header_to_wire(head)?;
        if body.len() > SLICE {
            return Some([wire.freeze(), body.clone()]);
        }
        wire.extend_from_slice(body);
        Some([wire.freeze(), Bytes::new()])
    }

    /// Sends a request to an h1 engine, and reads the head of an answer that comes meanwhile.
    async fn send_on(&mut self, h1: &mut Http1Session) -> Result<(), LegError> {
        loop {
            let answered = self.answer == Progress::Read;
            let until = self.limits.after(if answered { STALL } else { self.limits.idle });
            let mut answer = self.answer;
            let sent = self.guard(until, poll_fn(|cx| poll_send(h1, &mut answer, cx))).await;
            self.answer = answer;
            match sent {
                _ if answer == Progress::Refused => {
                    sending(h1).into_iter().for_each(Sending::give_up);
                    return Ok(());
                }
                // the rest goes out while the answer is read, if the engine takes it
                Err(e) if answered && e.fault == Fault::Deadline => return Ok(()),
                // others on the thread have their turn
                Ok(()) if sending(h1).is_some_and(|sending| !sending.is_done()) => yield_now().await,
                done => return done,
            }
        }
    }

    async fn upload_pieces(&mut self, engine: &mut HttpSession) -> Result<(), LegError> {
        let until = self.limits.after(self.limits.idle);
        self.guard(until, engine.write_request_header(Box::new(self.leg.head.clone()))).await?;
        self.begun = true;
        let mut rest = self.leg.body.clone();
        if rest.is_empty() {
            return self.guard(until, engine.finish_request_body()).await;
        }
        if let HttpSession::H2(h2) = engine {
            return self.send_h2(h2).await;
        }
        // HEAD with a body
        while !rest.is_empty() {
            let slice = rest.split_to(rest.len().min(SLICE));
            let until = self.limits.after(self.limits.idle);
            self.guard(until, engine.write_request_body(slice, rest.is_empty())).await?;
        }
        self.guard(self.limits.after(self.limits.idle), engine.finish_request_body()).await
    }

    /// Sends the body of a request to an h2 engine, and reads the head of an answer that comes meanwhile.
    async fn send_h2(&mut self, h2: &mut Http2Session) -> Result<(), LegError> {
        let Some(mut writer) = h2.take_request_body_writer() else { return Ok(()) };
        let mut rest = self.leg.body.clone();
        let left = Arc::new(AtomicUsize::new(rest.len()));
        let told = left.clone();
        let mut writing = async move {
            while !rest.is_empty() {
                let slice = rest.split_to(rest.len().min(SLICE));
                write_body(&mut writer, slice, rest.is_empty(), None).await?;
                told.store(rest.len(), Ordering::Relaxed);
            }
            Ok(())
        }
        .boxed();
        loop {
            let answered = self.answer == Progress::Read;
            let until = self.limits.after(if answered { STALL } else { self.limits.idle });
            let (before, mut answer) = (left.load(Ordering::Relaxed), self.answer);
            let work = poll_fn(|cx| {
                if !answer.is_final() {
                    let read = pin!(h2.read_response_header()).poll(cx);
                    if let Poll::Ready(read) = read {
                        read?;
                        answer = early(h2.response_header());
                        return Poll::Ready(Ok(()));
                    }
                }
                match writing.poll_unpin(cx) {
                    Poll::Pending if left.load(Ordering::Relaxed) < before => Poll::Ready(Ok(())),
                    sent => sent,
                }
            });
            let sent = self.guard(until, work).await;
            self.answer = answer;
            match sent {
                _ if answer == Progress::Refused => return Ok(()),
                Err(e) if answered && e.fault == Fault::Deadline => {
                    self.rest = Some(writing);
                    return Ok(());
                }
                Ok(()) if left.load(Ordering::Relaxed) > 0 => {}
                done => return done,
            }
        }
    }
}

/// What is sent beneath a session to an h1 engine, where it is.
pub(super) fn sending(h1: &Http1Session) -> Option<&Sending> {
    Sending::of(h1.stream())
}

/// Ready when the engine has all of the request or some more, or the connection broke; or with the head of an answer that
/// is there although it has not.
fn poll_send(h1: &mut Http1Session, answer: &mut Progress, cx: &mut Context<'_>) -> Poll<PingoraResult<()>> {
    let Some(sending) = sending(h1) else { return Poll::Ready(Ok(())) };
    let before = sending.left();
    if let Poll::Ready(sent) = sending.poll_send(cx) {
        return Poll::Ready(sent.or_err(ErrorType::WriteError, "while writing the request"));
    }
    let goes_on = sending.left() < before;
    if !answer.is_final() {
        // reading a head is safe to give up and repeat
        let read = pin!(h1.read_response()).poll(cx);
        if let Poll::Ready(read) = read {
            read?;
            *answer = early(h1.resp_header());
            return Poll::Ready(Ok(()));
        }
    }
    if goes_on { Poll::Ready(Ok(())) } else { Poll::Pending }
}

fn early(head: Option<&ResponseHeader>) -> Progress {
    match head {
        Some(head) if head.status.is_informational() => Progress::Informed,
        Some(head) if head.status.as_u16() >= 400 => Progress::Refused,
        _ => Progress::Read,
    }
}
