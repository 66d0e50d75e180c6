//! One request to one engine, and its answer back.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use http::{StatusCode, Version};
use kvgate_core::Phase;
use pingora_core::connectors::http::Connector;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::client::HttpSession;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_core::{BError, ErrorType, Result as PingoraResult, RetryType};
use pingora_http::ResponseHeader;
use tokio::time::{Instant, sleep_until};

use super::ending::Ending;
use super::leg::{Deadlines, Fault, Kept, Leg, LegError, Limits, Relayed, Side, Sink};
use super::sending::Sending;
use super::upload::sending;

/// How long an engine that broke off the upload has to explain itself.
const LAST_WORDS: Duration = Duration::from_millis(250);
/// How long an idle connection to an engine is kept.
const KEEP: Duration = Duration::from_secs(60);
/// A pooled connection that the engine had given up shows that at once. One that breaks later than this after it was
/// taken broke on the request. (An engine that reads it and breaks off at once looks the same.)
const STALE: Duration = Duration::from_secs(1);

/// What has come from an engine, told before the client gets any of it.
pub enum Came<'a> {
    /// The final head.
    Head(&'a mut ResponseHeader),
    /// The end of the answer, of this status: the engine has nothing more to do. The client lacks some of it still.
    End(u16),
}

/// Called with what comes.
type Listener<'a> = &'a mut (dyn FnMut(Came<'_>) + Send);

/// Sends one request to one engine and its answer to the leg's sink. `came` is told of the final head once, and of the
/// answer's end at least once, if it gets there.
///
/// A pooled connection the engine had already given up is no failure of the engine: one fresh try, where nothing of the
/// request can have been read or `resend` allows it. Dropping the future, like every error, closes or resets what the
/// engine is still busy with.
///
/// # Errors
/// See [`LegError`].
pub async fn exchange(
    client: &mut ServerSession,
    connector: &Connector,
    peer: &HttpPeer,
    leg: &Leg<'_>,
    limits: &Limits,
    came: Listener<'_>,
) -> Result<Relayed, LegError> {
    let mut run = Run {
        client,
        limits: &limits.deadlines,
        leg,
        came,
        phase: Phase::Connect,
        status: None,
        answer: Progress::Awaited,
        waiting: Instant::now(),
        begun: false,
        rest: None,
        sent: 0,
        head_sent: false,
        complete: false,
        multiplexed: false,
    };
    match run.attempt(connector, peer, peer).await {
        Err(error) if error.stale && (error.unprocessed || limits.resend) => {
            log::debug!("stale connection to {peer}: {error}");
            // the library gives no request to an h2 connection that is gone
            let again = if run.multiplexed { peer.clone() } else { fresh(peer) };
            run.attempt(connector, &again, peer).await
        }
        outcome => outcome,
    }
}

/// The same peer under a key of its own in the pool: connecting to it cannot meet a pooled connection.
fn fresh(peer: &HttpPeer) -> HttpPeer {
    static KEY: AtomicU64 = AtomicU64::new(1);
    let mut peer = peer.clone();
    peer.group_key = u64::MAX - KEY.fetch_add(1, Ordering::Relaxed);
    peer
}

/// The 1xx that an engine may send before its answer.
const MOST_INFORMED: u32 = 32;

/// Why work was not finished.
pub(super) enum Stop {
    Failed(BError),
    ClientGone(Option<BError>),
    Deadline,
    Ending,
}

impl Stop {
    pub(super) fn parts(self) -> (Side, Fault, Option<BError>) {
        match self {
            Self::Failed(e) => (Side::Engine, Fault::Broken, Some(e)),
            Self::ClientGone(e) => (Side::Client, Fault::Broken, e),
            Self::Deadline => (Side::Engine, Fault::Deadline, None),
            Self::Ending => (Side::Engine, Fault::Ending, None),
        }
    }
}

/// Drives work while the client stays, until the deadline, and while the process goes on. When it fails, an engine's connection must not be
/// used again: what was dropped half way may have been a write.
pub(super) async fn guard<T>(
    client: &mut ServerSession,
    until: Instant,
    ending: &Ending,
    work: impl Future<Output = PingoraResult<T>>,
) -> Result<T, Stop> {
    // work that is always ready would never let the deadline be seen
    if Instant::now() >= until {
        return Err(Stop::Deadline);
    }
    if ending.has_come() {
        return Err(Stop::Ending);
    }
    tokio::select! {
        biased;
        done = work => done.map_err(Stop::Failed),
        gone = client.read_body_or_idle(true) => Err(Stop::ClientGone(gone.err())),
        () = sleep_until(until) => Err(Stop::Deadline),
        () = ending.come() => Err(Stop::Ending),
    }
}

/// How far the engine's answer has come.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Awaited,
    /// A 1xx came: the engine has the request.
    Informed,
    Read,
    /// It came early and said no: the rest of the body was not sent.
    Refused,
}

impl Progress {
    pub(super) fn is_final(self) -> bool {
        matches!(self, Self::Read | Self::Refused)
    }
}

/// One exchange in progress.
pub(super) struct Run<'a> {
    pub(super) client: &'a mut ServerSession,
    pub(super) limits: &'a Deadlines,
    pub(super) leg: &'a Leg<'a>,
    came: Listener<'a>,
    pub(super) phase: Phase,
    pub(super) status: Option<u16>,
    pub(super) answer: Progress,
    /// Since when the engine has had the whole request, or all that it takes.
    waiting: Instant,
    /// The engine may have read some of the request.
    pub(super) begun: bool,
    /// What is left of an upload to an h2 engine that has answered: it goes out while the answer is read.
    pub(super) rest: Option<BoxFuture<'static, PingoraResult<()>>>,
    /// Bytes of the answer's body that the client was sent.
    pub(super) sent: u64,
    pub(super) head_sent: bool,
    /// The client has an event stream's own word that it is complete.
    pub(super) complete: bool,
    /// The engine's connection is one of HTTP/2.
    multiplexed: bool,
}

/// What became of an exchange that left the engine's connection in order, and whether it may be used again.
pub(super) type Ended = (Result<Relayed, LegError>, bool);

impl Run<'_> {
    pub(super) fn error(&self, side: Side, fault: Fault, source: Option<BError>) -> LegError {
        // the library's word for "not acted on": refused streams and connections being closed (RFC 9113 8.7)
        let unprocessed = !self.answer.is_final()
            && side == Side::Engine
            && source.as_ref().is_some_and(|e| e.retry == RetryType::Decided(true));
        let fault = match fault {
            Fault::Deadline if Instant::now() >= self.limits.total => Fault::Total,
            other => other,
        };
        LegError {
            status: self.status,
            bytes_sent: self.sent,
            head_sent: self.head_sent,
            unprocessed,
            ..LegError::new(side, self.phase, fault, source)
        }
    }

    /// The whole answer is here.
    pub(super) fn ended(&mut self) {
        if let Some(status) = self.status {
            (self.came)(Came::End(status));
        }
    }

    pub(super) async fn guard<T>(
        &mut self,
        until: Instant,
        work: impl Future<Output = PingoraResult<T>>,
    ) -> Result<T, LegError> {
        let (rest, mut work) = (&mut self.rest, pin!(work));
        let work = poll_fn(|cx| {
            if rest.as_mut().is_some_and(|rest| rest.poll_unpin(cx).is_ready()) {
                *rest = None;
            }
            work.as_mut().poll(cx)
        });
        guard(self.client, until, self.leg.ending, work).await.map_err(|stop| {
            let (side, fault, source) = stop.parts();
            self.error(side, fault, source)
        })
    }

    async fn attempt(
        &mut self,
        connector: &Connector,
        peer: &HttpPeer,
        common: &HttpPeer,
    ) -> Result<Relayed, LegError> {
        (self.phase, self.answer, self.begun, self.rest) = (Phase::Connect, Progress::Awaited, false, None);
        let connect = self.limits.after(self.limits.connect);
        let (engine, reused) = self.guard(connect, connector.get_http_session(peer)).await?;
        self.multiplexed = engine.as_http2().is_some();
        if reused && is_closed(&engine) {
            let error = self.error(Side::Engine, Fault::Broken, None);
            return Err(LegError { stale: true, unprocessed: true, ..error });
        }
        let taken = Instant::now();
        self.phase = Phase::Upload;
        let (mut engine, uploaded) = self.upload(engine, peer).await;
        match self.drive(&mut engine, uploaded).await {
            Ok((outcome, clean)) => {
                // An h1 session knows only whether its answer was read, not whether the request was sent.
                // A 408 may have been on its way before the request was, whose own answer would be the next one's.
                let foreign = self.status == Some(408) && !self.multiplexed;
                if clean && is_sent(&engine) && !foreign {
                    connector.release_http_session(engine, common, Some(KEEP)).await;
                }
                outcome
            }
            Err(e) => {
                // Dropping the session closes an h1 connection and resets an h2 stream with CANCEL.
                // (`shutdown` would flush first on h1, and blame INTERNAL_ERROR on h2.)
                let stale = reused
                    && self.answer == Progress::Awaited
                    && given_up(&engine, &e)
                    && taken.elapsed() < STALE;
                Err(LegError { stale, unprocessed: e.unprocessed || !self.begun, ..e })
            }
        }
    }

    async fn drive(
        &mut self,
        engine: &mut HttpSession,
        uploaded: Result<(), LegError>,
    ) -> Result<Ended, LegError> {
        let broken = match uploaded {
            Ok(()) => None,
            // It may have answered before it broke off. (An h2 session has looked already, and panics if asked again.)
            Err(e) if e.side == Side::Engine && (self.answer.is_final() || engine.as_http1().is_some()) => {
                Some(e)
            }
            Err(e) => return Err(e),
        };
        let clean = self.answer != Progress::Refused && broken.is_none();
        let head = self.head(engine, broken).await?;
        let status = head.status.as_u16();
        if self.leg.refuse.has(&head) {
            return self.refused(engine, head, clean).await;
        }
        let mut relayed = Relayed { status, kept: None, failed: false, unfinished: false };
        let mut clean = clean;
        match self.leg.sink {
            Sink::Client => clean &= self.forward(engine, head, &mut relayed).await?,
            Sink::Memory(limit) => {
                self.phase = Phase::Answer;
                // whole, in the time that its head has
                let until = self.waiting + self.limits.first_byte;
                let body = self.keep(engine, limit, Some(until)).await?;
                self.ended();
                relayed.kept = Some(Kept { head, body });
            }
        }
        Ok((Ok(relayed), clean))
    }

    /// Waits for the answer's final head. `broken` is why the upload ended early, if it did.
    async fn head(
        &mut self,
        engine: &mut HttpSession,
        broken: Option<LegError>,
    ) -> Result<ResponseHeader, LegError> {
        self.waiting = Instant::now();
        let until = match broken {
            None => {
                self.phase = Phase::FirstByte;
                self.limits.after(self.limits.first_byte)
            }
            Some(_) => self.waiting + LAST_WORDS,
        };
        let mut informed = 0;
        while !self.answer.is_final() {
            if let Err(e) = self.guard(until, engine.read_response_header()).await {
                return Err(broken.filter(|_| e.side == Side::Engine).unwrap_or(e));
            }
            match engine.response_header() {
                // nobody asked for another protocol, and what follows would not be an answer
                Some(head) if head.status == StatusCode::SWITCHING_PROTOCOLS || informed == MOST_INFORMED => {
                    return Err(self.error(Side::Engine, Fault::Broken, None));
                }
                Some(head) if head.status.is_informational() => {
                    informed += 1;
                    self.inform(head).await?;
                }
                _ => self.answer = Progress::Read,
            }
        }
        self.phase = Phase::FirstByte;
        let mut head =
            engine.response_header().cloned().ok_or_else(|| self.error(Side::Engine, Fault::Broken, None))?;
        self.status = Some(head.status.as_u16());
        (self.came)(Came::Head(&mut head));
        Ok(head)
    }

    /// Passes a 1xx on to a client that may get one. (100 was our own affair; h2 sessions cannot send any.)
    async fn inform(&mut self, head: &ResponseHeader) -> Result<(), LegError> {
        self.answer = Progress::Informed;
        if matches!(self.leg.sink, Sink::Memory(_))
            || head.status.as_u16() <= 101
            || self.client.req_header().version != Version::HTTP_11
        {
            return Ok(());
        }
        self.write(|client| client.write_response_header(Box::new(head.clone()))).await
    }
}

/// Whether the engine has closed this kept connection. The reactor, and with it the pool, may not have heard of it yet.
fn is_closed(engine: &HttpSession) -> bool {
    /// `TCP_ESTABLISHED` of Linux; other systems are not asked, and say 0.
    const ESTABLISHED: u8 = 1;
    let digest = engine.digest().and_then(|digest| digest.socket_digest.as_ref());
    digest.and_then(|socket| socket.tcp_info()).is_some_and(|info| info.tcpi_state > ESTABLISHED)
}

/// Whether all of the request has been sent.
fn is_sent(engine: &HttpSession) -> bool {
    engine.as_http1().and_then(sending).is_none_or(Sending::is_done)
}

/// Whether a pooled connection broke in the way of one that the engine had given up before it saw the request.
/// (A stream the engine reset is its answer to this request.)
fn given_up(engine: &HttpSession, error: &LegError) -> bool {
    error.side == Side::Engine
        && error.source.as_ref().is_some_and(|source| match source.retry {
            RetryType::ReusedOnly => !began(source),
            RetryType::Decided(true) => !is_refused(source),
            RetryType::Decided(false) => {
                engine.as_http1().is_some() && *source.etype() == ErrorType::WriteError
            }
        })
}

/// Whether an h2 engine refused the one stream, and its connection stands.
fn is_refused(source: &BError) -> bool {
    source.root_cause().downcast_ref::<h2::Error>().is_some_and(h2::Error::is_reset)
}

/// Whether part of an h1 head had come: the library says so in words only.
fn began(source: &BError) -> bool {
    source
        .context
        .as_ref()
        .and_then(|context| context.as_str().split_once("bytes already read: "))
        .is_some_and(|(_, n)| n != "0")
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::fd::AsRawFd;

    use pingora_core::protocols::http::v1::client::HttpSession as Http1Session;
    use pingora_core::protocols::l4::stream::Stream;
    use pingora_core::protocols::{GetSocketDigest, SocketDigest};

    use super::*;

    /// Before any task of the runtime could hear of it.
    #[tokio::test]
    async fn a_connection_that_was_closed_is_seen_at_once() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (engine, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        let fd = socket.as_raw_fd();
        let mut stream = Stream::from(tokio::net::TcpStream::from_std(socket).unwrap());
        stream.set_socket_digest(SocketDigest::from_raw_fd(fd));
        let session = HttpSession::H1(Http1Session::new(Box::new(stream)));
        assert!(!is_closed(&session));
        drop(engine);
        assert!(is_closed(&session));
    }
}
