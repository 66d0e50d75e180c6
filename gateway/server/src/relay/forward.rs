//! The engine's answer on its way to the client, or into memory.

use std::future::Future;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header;
use kvgate_core::Phase;
use pingora_core::Result as PingoraResult;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::client::HttpSession;
use pingora_http::ResponseHeader;
use tokio::time::{Instant, timeout_at};

use super::answer::{Code, error_json};
use super::events::EventGate;
use super::exchange::{Ended, Run};
use super::heads::{self, Framing};
use super::leg::{Fault, Kept, LegError, Relayed, Side};

/// A refusal longer than this, or slower, is not kept.
const REFUSAL: usize = 64 * 1024;
const REFUSAL_TIME: Duration = Duration::from_secs(1);

impl Run<'_> {
    /// An answer that is to be tried elsewhere. Read to its end if that is near: the connection is worth keeping, and
    /// the client gets it if nobody does better.
    pub(super) async fn refused(
        &mut self,
        engine: &mut HttpSession,
        head: ResponseHeader,
        clean: bool,
    ) -> Result<Ended, LegError> {
        let mut error = self.error(Side::Engine, Fault::Status(head.status.as_u16()), None);
        match self.keep(engine, REFUSAL, Some(Instant::now() + REFUSAL_TIME)).await {
            Ok(body) => {
                error.kept = Some(Box::new(Kept { head, body }));
                Ok((Err(error), clean))
            }
            Err(e) if e.side == Side::Client => Err(e),
            Err(_) => Err(error),
        }
    }

    pub(super) async fn forward(
        &mut self,
        engine: &mut HttpSession,
        head: ResponseHeader,
        relayed: &mut Relayed,
    ) -> Result<(), LegError> {
        let framed = heads::to_client(head, self.client.req_header());
        let (head, framing) = framed.map_err(|e| self.error(Side::Engine, Fault::Broken, Some(e)))?;
        let mut events = heads::is_event_stream(&head, framing).then(EventGate::default);
        if framing == Framing::Close {
            // else the head promises a keep-alive that its framing rules out
            self.client.set_keepalive(None);
        }
        // an h1 answer that ends with its connection: an orderly end looks like a crash
        let unframed = engine.as_http1().is_some()
            && !head.headers.contains_key(header::CONTENT_LENGTH)
            && !engine.response_header().is_some_and(|h| h.headers.contains_key(header::TRANSFER_ENCODING));
        if engine.response_done() {
            self.ended();
        }
        self.write(|client| heads::write(client, head, framing)).await?;
        self.head_sent = true;
        self.phase = Phase::Answer;

        let ended = self.pump(engine, framing, events.as_mut()).await;
        let without_done = self.leg.done_marker && events.as_ref().is_some_and(|gate| !gate.done());
        match (ended, events) {
            (Ok(()), Some(gate)) if unframed && without_done => {
                let error = self.error(Side::Engine, Fault::Unfinished, None);
                Err(self.tell(error, &gate).await)
            }
            (Ok(()), events) => {
                self.ended();
                if let Some(rest) = events.and_then(|mut gate| gate.rest()) {
                    self.send(rest).await?;
                }
                relayed.without_done = without_done;
                relayed.bytes = self.sent;
                self.finish(engine).await
            }
            (Err(error), Some(gate)) if error.side == Side::Engine => Err(self.tell(error, &gate).await),
            (Err(error), _) => Err(error),
        }
    }

    /// The body, piece by piece. While the client does not take a piece, no further one is read.
    async fn pump(
        &mut self,
        engine: &mut HttpSession,
        framing: Framing,
        mut events: Option<&mut EventGate>,
    ) -> Result<(), LegError> {
        loop {
            let until = self.limits.after(self.limits.idle);
            let Some(piece) = self.guard(until, engine.read_response_body()).await? else { return Ok(()) };
            let ready = match &mut events {
                Some(gate) => gate.push(piece),
                None => {
                    if engine.response_done() {
                        self.ended();
                    }
                    Some(piece)
                }
            };
            if let Some(ready) = ready.filter(|b| !b.is_empty() && framing != Framing::None) {
                self.send(ready).await?;
            }
        }
    }

    /// The whole body, if no longer than `limit`.
    pub(super) async fn keep(
        &mut self,
        engine: &mut HttpSession,
        limit: usize,
        until: Option<Instant>,
    ) -> Result<Bytes, LegError> {
        let mut kept = BytesMut::new();
        loop {
            let idle = self.limits.after(self.limits.idle);
            let until = until.map_or(idle, |until| until.min(idle));
            let Some(piece) = self.guard(until, engine.read_response_body()).await? else { break };
            if kept.len() + piece.len() > limit {
                return Err(self.error(Side::Engine, Fault::TooLarge, None));
            }
            kept.extend_from_slice(&piece);
        }
        Ok(kept.freeze())
    }

    /// Ends the answer, with the engine's trailers where both sides speak h2 (pingora drops those of h1).
    async fn finish(&mut self, engine: &mut HttpSession) -> Result<(), LegError> {
        if let (HttpSession::H2(h2), true) = (engine, self.client.is_http2()) {
            let until = self.limits.after(self.limits.idle);
            if let Some(trailers) = self.guard(until, h2.read_trailers()).await? {
                return self.write(|client| client.write_response_trailers(trailers)).await;
            }
        }
        self.write(|client| client.finish_body()).await
    }

    /// Tells the client of an event stream why it ends, and ends it in order.
    async fn tell(&mut self, mut error: LegError, gate: &EventGate) -> LegError {
        let code = Code::of(&error, self.leg.role);
        let message = match error.fault {
            Fault::Deadline | Fault::Total => "The engine took too long to go on.",
            _ => "The engine broke off before its answer was complete.",
        };
        let event = gate.farewell(error_json(code.status, code.name, message).as_bytes());
        error.told = match self.send(event).await {
            Ok(()) => self.write(|client| client.finish_body()).await.is_ok(),
            Err(_) => false,
        };
        error
    }

    async fn send(&mut self, piece: Bytes) -> Result<(), LegError> {
        let n = piece.len() as u64;
        self.write(|client| client.write_response_body(piece, false)).await?;
        self.sent += n;
        Ok(())
    }

    /// A write to the client; its own leaving shows as an error here.
    pub(super) async fn write<'b, F: Future<Output = PingoraResult<()>> + 'b>(
        &'b mut self,
        work: impl FnOnce(&'b mut ServerSession) -> F,
    ) -> Result<(), LegError> {
        let (phase, status, bytes_sent, head_sent) = (self.phase, self.status, self.sent, self.head_sent);
        let error = |fault, source| LegError {
            status,
            bytes_sent,
            head_sent,
            ..LegError::new(Side::Client, phase, fault, source)
        };
        match timeout_at(self.limits.after(self.limits.idle), work(self.client)).await {
            Ok(done) => done.map_err(|e| error(Fault::Broken, Some(e))),
            Err(_) => Err(error(Fault::Deadline, None)),
        }
    }
}
