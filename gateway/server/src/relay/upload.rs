//! Sending the request, and noticing an answer that comes before its end.

use std::future::Future;
use std::pin::pin;

use bytes::BytesMut;
use futures::FutureExt;
use http::Method;
use pingora_core::protocols::Stream;
use pingora_core::protocols::http::client::HttpSession;
use pingora_core::protocols::http::v1::client::{HttpSession as Http1Session, http_req_header_to_wire};
use pingora_core::protocols::http::v2::client::Http2Session;
use pingora_core::protocols::http::v2::write_body;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_core::{ErrorType, OrErr, Result as PingoraResult};
use pingora_http::ResponseHeader;
use tokio::io::AsyncWriteExt;

use super::exchange::{Progress, Run};
use super::leg::{Leg, LegError};

/// The request body goes out in pieces of this size; between them we look for an early answer.
const SLICE: usize = 64 * 1024;

impl Run<'_> {
    /// Sends head and body, unless an early answer says that the body is not wanted. Returns the session, also when
    /// that failed: it may hold an answer.
    pub(super) async fn upload(
        &mut self,
        engine: HttpSession,
        peer: &HttpPeer,
    ) -> (HttpSession, Result<(), LegError>) {
        match (engine, self.in_one()) {
            (HttpSession::H1(h1), Some(wire)) => {
                let mut stream = h1.into_inner();
                let until = self.limits.after(self.limits.idle);
                let done = self.guard(until, write_all(&mut stream, &wire)).await;
                (HttpSession::H1(Http1Session::new_with_options(stream, peer)), done)
            }
            (mut engine, _) => {
                let done = self.upload_pieces(&mut engine).await;
                (engine, done)
            }
        }
    }

    /// Head and body of a short request to an h1 engine. The library's session flushes the head by itself, which
    /// costs a send and a wake-up at the other end. It must have written the head of a HEAD request to read
    /// the answer to one, though.
    fn in_one(&self) -> Option<BytesMut> {
        let Leg { head, body, .. } = self.leg;
        if body.is_empty() || body.len() > SLICE || head.method == Method::HEAD {
            return None;
        }
        let mut wire = http_req_header_to_wire(head)?;
        wire.extend_from_slice(body);
        Some(wire)
    }

    async fn upload_pieces(&mut self, engine: &mut HttpSession) -> Result<(), LegError> {
        let mut rest = self.leg.body.clone();
        let until = self.limits.after(self.limits.idle);
        self.guard(until, engine.write_request_header(Box::new(self.leg.head.clone()))).await?;
        if rest.is_empty() {
            return self.guard(until, engine.finish_request_body()).await;
        }
        // an h2 body can be written while its answer is read
        let mut h2_body = match engine {
            HttpSession::H2(h2) => h2.take_request_body_writer(),
            _ => None,
        };
        while !rest.is_empty() && self.answer != Progress::Refused {
            let slice = rest.split_to(rest.len().min(SLICE));
            let last = rest.is_empty();
            let until = self.limits.after(self.limits.idle);
            let mut answer = self.answer;
            let work = async {
                match (&mut *engine, &mut h2_body) {
                    (HttpSession::H2(h2), Some(body)) => {
                        write_and_watch(h2, write_body(body, slice, last, None), &mut answer).await
                    }
                    (h1, _) => {
                        h1.write_request_body(slice, last).await?;
                        if last { h1.finish_request_body().await } else { watch(h1, &mut answer) }
                    }
                }
            };
            let done = self.guard(until, work).await;
            self.answer = answer;
            done?;
        }
        Ok(())
    }
}

async fn write_all(stream: &mut Stream, wire: &[u8]) -> PingoraResult<()> {
    stream.write_all(wire).await.or_err(ErrorType::WriteError, "while writing the request")?;
    stream.flush().await.or_err(ErrorType::WriteError, "while flushing the request")
}

/// Looks whether an answer's head is there already. Reading it is safe to give up and repeat.
fn watch(engine: &mut HttpSession, answer: &mut Progress) -> PingoraResult<()> {
    while !answer.is_final() && engine.read_response_header().now_or_never().transpose()?.is_some() {
        *answer = early(engine.response_header());
    }
    Ok(())
}

/// Writes a piece of an h2 body, unless an answer comes first that makes it pointless.
async fn write_and_watch(
    h2: &mut Http2Session,
    write: impl Future<Output = PingoraResult<()>>,
    answer: &mut Progress,
) -> PingoraResult<()> {
    let mut write = pin!(write);
    if !answer.is_final() {
        tokio::select! {
            biased;
            head = h2.read_response_header() => head?,
            done = &mut write => return done,
        }
        *answer = early(h2.response_header());
    }
    match answer {
        Progress::Refused => Ok(()),
        _ => write.await,
    }
}

fn early(head: Option<&ResponseHeader>) -> Progress {
    match head {
        Some(head) if head.status.is_informational() => Progress::Informed,
        Some(head) if head.status.as_u16() >= 400 => Progress::Refused,
        _ => Progress::Read,
    }
}
