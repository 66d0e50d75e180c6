//! Reading a request's body, bounded in length, rate and, over all requests, memory.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Version, header};
use pingora_core::protocols::http::ServerSession;
use pingora_core::{BError, ErrorType};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::{Code, codes};

/// Bytes of a permit.
const UNIT: usize = 1024;
/// A declared length is believed so far when memory is set aside.
const BELIEVED: u64 = 1024 * 1024;

/// The memory all request bodies of the process share. A clone is the same memory.
#[derive(Clone, Debug)]
pub struct Buffers(Arc<Semaphore>);

impl Buffers {
    /// Room for so many bytes, counted in KiB, each body rounded up.
    pub fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new((bytes / UNIT).min(Semaphore::MAX_PERMITS))))
    }

    /// Bytes not taken.
    pub fn free(&self) -> usize {
        self.0.available_permits() * UNIT
    }
}

/// Limits of one body.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimits {
    /// Bytes.
    pub max: usize,
    /// The whole body must be in within this.
    pub deadline: Duration,
    /// It must also be in within this, and one second more for each [`rate`](Self::rate) bytes that came.
    pub grace: Duration,
    /// Bytes per second, the least a client may send after its grace; 0: no least rate.
    pub rate: u64,
}

impl BodyLimits {
    fn until(&self, start: Instant, read: usize) -> Instant {
        let last = start + self.deadline;
        if self.rate == 0 {
            return last;
        }
        let earned = Duration::from_millis((read as u64).saturating_mul(1000) / self.rate);
        last.min(start + self.grace.saturating_add(earned).min(self.deadline))
    }
}

/// A request's body, and its share of the [`Buffers`], given back when dropped.
#[derive(Debug, Default)]
pub struct Body {
    /// The body, byte for byte.
    pub bytes: Bytes,
    share: Option<OwnedSemaphorePermit>,
}

/// No body.
#[derive(Debug)]
pub enum BodyError {
    /// Longer than the limit.
    TooLarge,
    /// Slower than the limits.
    TooSlow,
    /// The [`Buffers`] are full.
    Overloaded,
    /// Its framing is broken.
    Malformed(BError),
    /// The client left.
    Gone(BError),
}

impl BodyError {
    /// What to answer; `None`: there is nobody to answer.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::TooLarge => Some(codes::BODY_TOO_LARGE),
            Self::TooSlow => Some(codes::BODY_TOO_SLOW),
            Self::Overloaded => Some(codes::OVERLOADED),
            Self::Malformed(_) => Some(codes::BAD_REQUEST),
            Self::Gone(_) => None,
        }
    }
}

impl From<BError> for BodyError {
    fn from(e: BError) -> Self {
        if is_malformed(&e) {
            return Self::Malformed(e.into_down());
        }
        match e.etype() {
            ErrorType::ReadTimedout => Self::TooSlow,
            ErrorType::ConnectionClosed
            | ErrorType::ReadError
            | ErrorType::WriteError
            | ErrorType::H2Error => Self::Gone(e.into_down()),
            _ => Self::Malformed(e.into_down()),
        }
    }
}

/// Whether the edge has found the bytes to be no body.
fn is_malformed(e: &BError) -> bool {
    let cause = e.root_cause().downcast_ref::<std::io::Error>();
    cause.is_some_and(|e| e.kind() == std::io::ErrorKind::InvalidData)
}

/// Reads the request's body; says `100 Continue` where the client waits for it. From here on a next request that
/// comes early on the same connection waits its turn, where it would else pass for the client's leaving.
///
/// # Errors
/// See [`BodyError`]. A declared length over the limit is refused before anything is read.
pub async fn read(
    client: &mut ServerSession,
    limits: &BodyLimits,
    buffers: &Buffers,
) -> Result<Body, BodyError> {
    if let ServerSession::H1(h1) = client {
        h1.set_pipelining_enabled(true);
    }
    let declared =
        client.get_header(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|n| n > limits.max as u64) {
        return Err(BodyError::TooLarge);
    }
    proceed(client).await?;

    let start = Instant::now();
    let mut body = Body::default();
    let mut buffer = BytesMut::new();
    loop {
        let read = body.bytes.len() + buffer.len();
        let next = timeout_at(limits.until(start, read), client.read_request_body()).await;
        let Some(piece) = next.map_err(|_| BodyError::TooSlow)?? else { break };
        if read + piece.len() > limits.max {
            return Err(BodyError::TooLarge);
        }
        body.grow(read + piece.len(), buffers)?;
        if read == 0 {
            body.bytes = piece; // most bodies are one piece
            continue;
        }
        if buffer.is_empty() {
            buffer.reserve(declared.unwrap_or(0).min(BELIEVED) as usize);
            buffer.extend_from_slice(&std::mem::take(&mut body.bytes));
        }
        buffer.extend_from_slice(&piece);
    }
    if !buffer.is_empty() {
        body.bytes = buffer.freeze();
    }
    Ok(body)
}

/// Says `100 Continue` to whom waits for it. HTTP/2 sessions of pingora cannot.
async fn proceed(client: &mut ServerSession) -> Result<(), BodyError> {
    let expects = client.req_header().version == Version::HTTP_11
        && client
            .get_header(header::EXPECT)
            .is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    if !expects || client.is_body_done() {
        return Ok(());
    }
    // the 100 would else pass for an early answer and end the keep-alive
    client.set_close_on_response_before_downstream_finish(false);
    client.write_continue_response().await?;
    client.set_close_on_response_before_downstream_finish(true);
    Ok(())
}

impl Body {
    /// Takes memory for `more` bytes that are made of it, until it is dropped.
    ///
    /// # Errors
    /// The [`Buffers`] are full.
    pub fn also(&mut self, more: usize, buffers: &Buffers) -> Result<(), BodyError> {
        self.grow(self.bytes.len().saturating_add(more), buffers)
    }

    /// Takes memory for `bytes` in all.
    fn grow(&mut self, bytes: usize, buffers: &Buffers) -> Result<(), BodyError> {
        let held = self.share.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = bytes.div_ceil(UNIT).saturating_sub(held);
        if more == 0 {
            return Ok(());
        }
        let more = u32::try_from(more).map_err(|_| BodyError::Overloaded)?;
        let taken = buffers.0.clone().try_acquire_many_owned(more).map_err(|_| BodyError::Overloaded)?;
        match &mut self.share {
            Some(share) => share.merge(taken),
            None => self.share = Some(taken),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_once_and_given_back() {
        let buffers = Buffers::new(4 * UNIT);
        let mut body = Body::default();
        for (bytes, free) in [(0, 4), (1, 3), (UNIT, 3), (UNIT + 1, 2), (4 * UNIT, 0)] {
            body.grow(bytes, &buffers).unwrap();
            assert_eq!(buffers.free(), free * UNIT);
        }
        assert!(matches!(body.grow(4 * UNIT + 1, &buffers), Err(BodyError::Overloaded)));
        assert!(matches!(Body::default().grow(1, &buffers), Err(BodyError::Overloaded)));
        drop(body);
        assert_eq!(buffers.free(), 4 * UNIT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_earns_its_time() {
        let start = Instant::now();
        let s = Duration::from_secs;
        let limits = BodyLimits { max: 0, deadline: s(60), grace: s(10), rate: 1000 };
        assert_eq!(limits.until(start, 0), start + s(10));
        assert_eq!(limits.until(start, 5000), start + s(15));
        assert_eq!(limits.until(start, usize::MAX), start + s(60));
        assert_eq!(BodyLimits { rate: 0, ..limits }.until(start, 0), start + s(60));
    }
}
