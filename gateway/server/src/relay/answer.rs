//! Answers of our own: errors in OpenAI's shape, correctly framed.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, StatusCode, header};
use kvgate_edge::{Code, error_json};
use pingora_core::Result;
use pingora_core::protocols::http::ServerSession;
use pingora_http::ResponseHeader;

use super::heads::{self, Framing};
use super::leg::Kept;

/// A request body no longer than this is read to its end after an early answer, so that its connection lives on.
const DRAIN: u64 = 64 * 1024;
/// How long that may take.
const DRAIN_TIME: Duration = Duration::from_secs(2);

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
    // else an answer before the body's end closes the connection, for which the edge lingers
    client.set_close_on_response_before_downstream_finish(!drain);
    client.set_total_drain_timeout(Some(DRAIN_TIME));
    if status == 400 {
        client.set_keepalive(None);
    }
    heads::write(client, head, framing).await.map_err(|e| e.into_down())?;
    let body = if framing == Framing::None { Bytes::new() } else { body };
    client.write_response_body(body, true).await.map_err(|e| e.into_down())
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
