//! The engine's answer on its way to the client, or into memory.

use std::future::Future;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header;
use kvgate_core::Phase;
use kvgate_edge::error_type;
use kvgate_engines::stream::Dialect;
use pingora_core::Result as PingoraResult;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::client::HttpSession;
use pingora_http::ResponseHeader;
use tokio::time::{Instant, timeout_at};

use super::busy::busy;
use super::codes;
use super::events::EventGate;
use super::exchange::{Ended, Run};
use super::heads::{self, Framing};
use super::leg::{Fault, Kept, LegError, Relayed, Side};

/// A refusal longer than this, or slower, is not kept.
const REFUSAL: usize = 64 * 1024;
const REFUSAL_TIME: Duration = Duration::from_secs(1);
/// Answers up to this length are held until they are whole.
const HELD: usize = 64 * 1024;
/// How long an engine may take to end an answer that it has said is complete.
const CLOSING: Duration = Duration::from_secs(1);

impl Run<'_> {
    /// An answer that is to be tried elsewhere. Read to its end if that is near: the connection is worth keeping, and
    /// the client gets it if nobody does better.
    pub(super) async fn refused(
        &mut self,
        engine: &mut HttpSession,
        head: ResponseHeader,
        clean: bool,
    ) -> Result<Ended, LegError> {
        let fault = self.leg.refuse.fault(head.status.as_u16());
        let mut error = self.error(Side::Engine, fault, None);
        error.busy = busy(&head);
        match self.keep(engine, REFUSAL, Some(Instant::now() + REFUSAL_TIME)).await {
            Ok(body) => {
                error.kept = Some(Box::new(Kept { head, body }));
                Ok((Err(error), clean))
            }
            Err(e) if e.side == Side::Client => Err(e),
            Err(_) => Err(error),
        }
    }

    /// Passes an answer on. Returns whether the engine's connection is in order.
    pub(super) async fn forward(
        &mut self,
        engine: &mut HttpSession,
        head: ResponseHeader,
        relayed: &mut Relayed,
    ) -> Result<bool, LegError> {
        let framed = heads::to_client(head, self.client.req_header());
        let (head, framing) = framed.map_err(|e| self.error(Side::Engine, Fault::Broken, Some(e)))?;
        if let Some(length) = heads::length(&head).filter(|n| framing == Framing::Length && *n <= HELD) {
            return self.forward_held(engine, head, length).await;
        }
        let dialect = self.leg.dialect;
        let mut events = heads::is_event_stream(&head, framing).then(|| EventGate::new(dialect));
        if framing == Framing::Close || self.leg.ending.is_near() {
            // else the head promises a keep-alive that its framing, or the end of the process, rules out
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

        let pumped = self.pump(engine, framing, events.as_mut()).await;
        match (pumped, events) {
            (Ok(()), Some(gate)) => self.end_events(engine, gate, unframed, relayed).await,
            (Ok(()), None) => {
                self.ended();
                self.finish(engine).await.map(|()| true)
            }
            // the answer was complete, and nobody misses what did not come
            (Err(error), Some(gate)) if self.complete => {
                relayed.failed = gate.told().error;
                self.end_early(&error, relayed).await.map(|()| false)
            }
            (Err(error), Some(gate)) if error.side == Side::Engine => Err(self.tell(error, &gate).await),
            (Err(error), _) => Err(error),
        }
    }

    /// Passes a short answer on once it is whole: it would not be flushed before, and an engine that breaks off amid it
    /// costs the client nothing then.
    async fn forward_held(
        &mut self,
        engine: &mut HttpSession,
        head: ResponseHeader,
        length: usize,
    ) -> Result<bool, LegError> {
        self.phase = Phase::Answer;
        let body = self.keep(engine, length, None).await?;
        self.ended();
        if self.leg.ending.is_near() {
            self.client.set_keepalive(None);
        }
        self.write(|client| heads::write(client, head, Framing::Length)).await?;
        self.head_sent = true;
        if !body.is_empty() {
            self.send(body).await?;
        }
        self.finish(engine).await.map(|()| true)
    }

    /// The end of an event stream that ended in order.
    async fn end_events(
        &mut self,
        engine: &mut HttpSession,
        mut gate: EventGate,
        unframed: bool,
        relayed: &mut Relayed,
    ) -> Result<bool, LegError> {
        let (rest, told) = (gate.rest(), gate.told());
        let complete = told.ended || told.finished || self.leg.dialect == Dialect::Other;
        if unframed && !complete {
            if let Some(error) = rest.filter(|_| told.error) {
                self.send(error).await?;
            }
            let error = self.error(Side::Engine, Fault::Unfinished, None);
            return Err(self.tell(error, &gate).await);
        }
        (relayed.failed, relayed.unfinished) = (told.error, !complete && !told.error);
        self.events_ended(told.error);
        if let Some(rest) = rest {
            self.send(rest).await?;
        }
        self.finish(engine).await.map(|()| true)
    }

    /// The whole event stream is here. One in which the engine told of an error is no success: how it ends is said at
    /// the end.
    fn events_ended(&mut self, failed: bool) {
        if !failed {
            self.ended();
        }
    }

    /// Ends an answer that was complete, though its engine broke off or the client left after that.
    async fn end_early(&mut self, error: &LegError, relayed: &Relayed) -> Result<(), LegError> {
        self.events_ended(relayed.failed);
        match error.side {
            Side::Engine => self.write(|client| client.finish_body()).await,
            Side::Client => Ok(()),
        }
    }

    /// The body, piece by piece. While the client does not take a piece, no further one is read.
    async fn pump(
        &mut self,
        engine: &mut HttpSession,
        framing: Framing,
        mut events: Option<&mut EventGate>,
    ) -> Result<(), LegError> {
        let mut closing: Option<Instant> = None;
        loop {
            let idle = self.limits.after(self.limits.idle);
            let until = closing.map_or(idle, |closing| closing.min(idle));
            let Some(piece) = self.guard(until, engine.read_response_body()).await? else { return Ok(()) };
            let ready = match &mut events {
                Some(gate) => {
                    let ready = gate.push(piece);
                    let told = gate.told();
                    if closing.is_none() && told.ended {
                        // nothing is left for the engine to do
                        self.events_ended(told.error);
                        closing = Some(Instant::now() + CLOSING);
                    }
                    ready
                }
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
            self.complete = closing.is_some();
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

    /// Tells the client of an event stream why it ends, unless its engine has, and ends it in order.
    async fn tell(&mut self, mut error: LegError, gate: &EventGate) -> LegError {
        let code = codes::of(&error, self.leg.role);
        let message = match error.fault {
            Fault::Ending => "The gateway stops. Send the request again.",
            Fault::Deadline | Fault::Total => "The engine took too long to go on.",
            _ => "The engine broke off before its answer was complete.",
        };
        let event = gate.farewell(code.status, error_type(code.status), code.name, message);
        let said = if gate.told().error { Ok(()) } else { self.send(event).await };
        error.told = match said {
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
        match timeout_at(self.limits.after(self.limits.client), work(self.client)).await {
            Ok(done) => done.map_err(|e| error(Fault::Broken, Some(e))),
            Err(_) => Err(error(Fault::Deadline, None)),
        }
    }
}
