//! Answers of our own: errors in OpenAI's shape, correctly framed.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, StatusCode, header};
use kvgate_core::{Cause, Phase, Role};
use kvgate_edge::error_json;
use pingora_core::Result;
use pingora_core::protocols::http::ServerSession;
use pingora_http::ResponseHeader;
use tokio::time::{Instant, timeout_at};

use super::heads::{self, Framing};
use super::leg::{Fault, Kept, LegError};

/// A request body no longer than this is read to its end after an early answer, so that its connection lives on.
const DRAIN: u64 = 64 * 1024;
/// How long that may take, and how long a connection lingers that ends with its answer: closed at once, a client
/// still sending would see a reset instead of the answer.
const LINGER: Duration = Duration::from_secs(2);

/// An error we answer with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    /// The stable name: `error.code` of the answer.
    pub name: &'static str,
    /// The HTTP status.
    pub status: u16,
    /// When it is given.
    pub doc: &'static str,
}

impl Code {
    /// Broken HTTP.
    pub const BAD_REQUEST: Code = Self::of_edge(kvgate_edge::Code::BAD_REQUEST);
    /// CONNECT.
    pub const METHOD_NOT_ALLOWED: Code = Self::of_edge(kvgate_edge::Code::METHOD_NOT_ALLOWED);
    /// The head took too long.
    pub const HEAD_TOO_SLOW: Code = Self::of_edge(kvgate_edge::Code::HEAD_TOO_SLOW);
    /// The request target is too long.
    pub const URI_TOO_LONG: Code = Self::of_edge(kvgate_edge::Code::URI_TOO_LONG);
    /// The head is too large.
    pub const HEAD_TOO_LARGE: Code = Self::of_edge(kvgate_edge::Code::HEAD_TOO_LARGE);
    /// The body took too long.
    pub const BODY_TOO_SLOW: Code = Code {
        name: "body_too_slow",
        status: 408,
        doc: "The request body came slower than the least rate, or not within its deadline.",
    };
    /// The body is too long.
    pub const BODY_TOO_LARGE: Code = Code {
        name: "body_too_large",
        status: 413,
        doc: "The request body is longer than the limit, by its Content-Length or by what arrived.",
    };
    /// Nobody serves this.
    pub const NO_ROUTE: Code =
        Code { name: "no_route", status: 503, doc: "No rule matches the listener, host and path." };
    /// Nobody serves this model.
    pub const MODEL_UNAVAILABLE: Code = Code {
        name: "model_unavailable",
        status: 503,
        doc: "Rules match the listener, host and path, but none of them the model.",
    };
    /// Nobody is well.
    pub const NO_HEALTHY_BACKEND: Code = Code {
        name: "no_healthy_backend",
        status: 503,
        doc: "A rule matches, but none of its engines is up and in service.",
    };
    /// Everybody is busy, and said so.
    pub const ENGINES_BUSY: Code = Code {
        name: "engines_busy",
        status: 429,
        doc: "None of a rule's engines takes requests, and one that is up answered 429 with `Retry-After`: it is left alone \
              until then.",
    };
    /// The gateway was told to stop.
    pub const GATEWAY_DRAINING: Code = Code {
        name: "gateway_draining",
        status: 503,
        doc: "The gateway is stopping and takes no new requests: connect again.",
    };
    /// Too many bodies or connections at once.
    pub const OVERLOADED: Code = Self::of_edge(kvgate_edge::Code::OVERLOADED);
    /// No engine takes a connection.
    pub const ENGINE_UNREACHABLE: Code = Code {
        name: "engine_unreachable",
        status: 503,
        doc: "None of the engines tried took the connection or the whole request.",
    };
    /// The engine broke.
    pub const ENGINE_ERROR: Code =
        Code { name: "engine_error", status: 502, doc: "The engine closed, reset or garbled its answer." };
    /// The engine took too long.
    pub const ENGINE_TIMEOUT: Code =
        Code { name: "engine_timeout", status: 504, doc: "A deadline of the request ran out." };

    /// The body is in no form that its members could be seen in.
    pub const UNREADABLE_BODY: Code = Code {
        name: "unreadable_body",
        status: 400,
        doc: "A generation for a `prefill-decode` rule is not JSON in UTF-8: what it says of other engines' blocks cannot \
              be taken out.",
    };
    /// A pair has nobody for a part.
    pub const PD_POOL_UNAVAILABLE: Code = Code {
        name: "pd_pool_unavailable",
        status: 503,
        doc: "A `prefill-decode` rule found no engine for prefill, for decode, or took none of their connections.",
    };
    /// The prompt took too long.
    pub const PD_PREFILL_TIMEOUT: Code = Code {
        name: "pd_prefill_timeout",
        status: 504,
        doc: "The engine for prefill took longer than `timeouts.prefill`, and decode does not compute the prompt.",
    };
    /// The prompt's engine broke.
    pub const PD_PREFILL_FAILED: Code = Code {
        name: "pd_prefill_failed",
        status: 502,
        doc: "The engine for prefill broke off, and decode does not compute the prompt.",
    };
    /// The answer's engine did not begin.
    pub const PD_DECODE_TIMEOUT: Code = Code {
        name: "pd_decode_timeout",
        status: 504,
        doc: "The engine for decode took longer than `timeouts.first_byte` to begin.",
    };
    /// The answer's engine fell silent.
    pub const PD_DECODE_STREAM_TIMEOUT: Code = Code {
        name: "pd_decode_stream_timeout",
        status: 502,
        doc: "The engine for decode fell silent for `timeouts.idle` amid its answer.",
    };
    /// The answer's engine broke.
    pub const PD_DECODE_BACKEND_DIED: Code = Code {
        name: "pd_decode_backend_died",
        status: 502,
        doc: "The engine for decode closed, reset or garbled its answer.",
    };

    /// All of them, by status.
    pub const ALL: [Code; 23] = [
        Self::BAD_REQUEST,
        Self::UNREADABLE_BODY,
        Self::METHOD_NOT_ALLOWED,
        Self::HEAD_TOO_SLOW,
        Self::BODY_TOO_SLOW,
        Self::BODY_TOO_LARGE,
        Self::URI_TOO_LONG,
        Self::ENGINES_BUSY,
        Self::HEAD_TOO_LARGE,
        Self::ENGINE_ERROR,
        Self::ENGINE_UNREACHABLE,
        Self::NO_ROUTE,
        Self::MODEL_UNAVAILABLE,
        Self::NO_HEALTHY_BACKEND,
        Self::OVERLOADED,
        Self::GATEWAY_DRAINING,
        Self::ENGINE_TIMEOUT,
        Self::PD_PREFILL_FAILED,
        Self::PD_DECODE_STREAM_TIMEOUT,
        Self::PD_DECODE_BACKEND_DIED,
        Self::PD_POOL_UNAVAILABLE,
        Self::PD_PREFILL_TIMEOUT,
        Self::PD_DECODE_TIMEOUT,
    ];

    /// Those of requests that no rule has taken.
    pub const BEFORE: [Code; 9] = [
        Self::BAD_REQUEST,
        Self::METHOD_NOT_ALLOWED,
        Self::HEAD_TOO_SLOW,
        Self::BODY_TOO_SLOW,
        Self::BODY_TOO_LARGE,
        Self::URI_TOO_LONG,
        Self::HEAD_TOO_LARGE,
        Self::NO_ROUTE,
        Self::MODEL_UNAVAILABLE,
    ];

    /// The same, of what is answered before there is a request.
    const fn of_edge(code: kvgate_edge::Code) -> Self {
        Self { name: code.name, status: code.status, doc: code.doc }
    }

    /// The code of an engine's failure at this part of a request.
    pub fn of(error: &LegError, role: Role) -> Code {
        let unreached = matches!(error.phase, Phase::Connect | Phase::Upload);
        match (role, error.fault) {
            (_, Fault::Ending) => Self::GATEWAY_DRAINING,
            (_, Fault::Total) => Self::ENGINE_TIMEOUT,
            (_, Fault::Status(429)) if error.busy.is_some() => Self::ENGINES_BUSY,
            _ if error.outcome().cause == Cause::Exhausted => Self::OVERLOADED,
            (Role::Any, Fault::Broken | Fault::Deadline) if unreached => Self::ENGINE_UNREACHABLE,
            (Role::Any, Fault::Deadline) => Self::ENGINE_TIMEOUT,
            (Role::Any, _) => Self::ENGINE_ERROR,
            (_, Fault::Broken | Fault::Deadline) if unreached => Self::PD_POOL_UNAVAILABLE,
            (Role::Prefill, Fault::Deadline) => Self::PD_PREFILL_TIMEOUT,
            (Role::Prefill, _) => Self::PD_PREFILL_FAILED,
            (Role::Decode, Fault::Deadline) if error.phase == Phase::Answer => Self::PD_DECODE_STREAM_TIMEOUT,
            (Role::Decode, Fault::Deadline) => Self::PD_DECODE_TIMEOUT,
            (Role::Decode, _) => Self::PD_DECODE_BACKEND_DIED,
        }
    }
}

/// An error as the client gets it. A [`Code`] gives status and code; a tier's refusal brings its own.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// The HTTP status.
    pub status: u16,
    /// `error.code`.
    pub code: &'static str,
    /// `error.message`: what a human reads.
    pub message: &'a str,
    /// Seconds for `Retry-After`.
    pub retry_after: Option<u32>,
    /// For `x-request-id`.
    pub request_id: Option<&'a str>,
}

impl<'a> Answer<'a> {
    /// The plain answer of a code.
    pub fn new(code: Code, message: &'a str) -> Self {
        Self { status: code.status, code: code.name, message, retry_after: None, request_id: None }
    }

    fn head(&self) -> Result<ResponseHeader> {
        let mut head = ResponseHeader::build(self.status, Some(5))?;
        head.insert_header(header::CONTENT_TYPE, "application/json")?;
        if let Some(seconds) = self.retry_after {
            head.insert_header(header::RETRY_AFTER, seconds)?;
        }
        if let Some(id) = self.request_id {
            head.insert_header(HeaderName::from_static("x-request-id"), id)?;
        }
        Ok(head)
    }
}

/// Answers the client with an error. The connection lives on if the request's body was read, or is short enough
/// to be.
///
/// # Errors
/// The client is gone, or a status or request id that HTTP does not allow.
pub async fn answer(client: &mut ServerSession, answer: &Answer<'_>) -> Result<()> {
    let body = error_json(answer.status, answer.code, answer.message);
    send(client, answer.head()?, body.into()).await
}

/// Sends the client elsewhere for good, with the same method and body (308).
///
/// # Errors
/// The client is gone, or a place or request id that HTTP does not allow.
pub async fn redirect(client: &mut ServerSession, place: &str, request_id: &str) -> Result<()> {
    let mut head = ResponseHeader::build(StatusCode::PERMANENT_REDIRECT, Some(3))?;
    head.insert_header(header::LOCATION, place)?;
    head.insert_header(HeaderName::from_static("x-request-id"), request_id)?;
    send(client, head, Bytes::new()).await
}

/// Passes an answer on that was kept.
///
/// # Errors
/// The client is gone.
pub async fn pass_on(client: &mut ServerSession, kept: Kept) -> Result<()> {
    send(client, kept.head, kept.body).await
}

async fn send(client: &mut ServerSession, mut head: ResponseHeader, body: Bytes) -> Result<()> {
    let status = head.status.as_u16();
    // it is whole, however it came
    head.remove_header(&header::TRANSFER_ENCODING);
    if !body.is_empty() || !head.headers.contains_key(header::CONTENT_LENGTH) {
        head.insert_header(header::CONTENT_LENGTH, body.len())?;
    }
    let (head, framing) = heads::to_client(head, client.req_header())?;
    let drain = drains(client, status);
    // else an answer before the body's end closes the connection
    client.set_close_on_response_before_downstream_finish(!drain);
    client.set_total_drain_timeout(Some(LINGER));
    if status == 400 {
        client.set_keepalive(None);
    }
    heads::write(client, head, framing).await.map_err(|e| e.into_down())?;
    let body = if framing == Framing::None { Bytes::new() } else { body };
    client.write_response_body(body, true).await.map_err(|e| e.into_down())?;
    if !drain && !client.is_body_done() && !client.is_http2() {
        linger(client).await;
    }
    Ok(())
}

/// Whether the rest of the request's body may be read after the answer.
fn drains(client: &mut ServerSession, status: u16) -> bool {
    let left = |client: &ServerSession| {
        let length = client.get_header(header::CONTENT_LENGTH)?.to_str().ok()?.parse::<u64>().ok()?;
        // who waits for a 100 may never send the body
        (length <= DRAIN && client.get_header(header::EXPECT).is_none()).then_some(())
    };
    !matches!(status, 400 | 408) && (client.is_body_done() || left(client).is_some())
}

/// Ends our side and reads on until the client ends its own.
async fn linger(client: &mut ServerSession) {
    let until = Instant::now() + LINGER;
    client.shutdown().await;
    while let Ok(Ok(Some(_))) = timeout_at(until, client.read_request_body()).await {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct() {
        let names: std::collections::HashSet<_> = Code::ALL.iter().map(|c| c.name).collect();
        assert_eq!(names.len(), Code::ALL.len());
    }
}
