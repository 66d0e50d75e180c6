//! The one path that moves a request to an engine and the answer back.
//!
//! A request whose body we hold is served inside `ProxyHttp::request_filter`, on the bare downstream session:
//! nothing here goes through pingora's own upstream path, which picks the peer before it reads the body, keeps
//! 64 KiB of it at most for another try, and can neither tell first byte from idle nor a client why its stream
//! broke. Requests we do not look into (upgrades, foreign uploads) take that path instead: `Ok(false)`.
//!
//! In order: [`lint`] the head, [`read`] the body, [`serve`]: choose, [`exchange`], and choose again when that
//! failed before the client saw anything. Whatever ends in a refusal of our own is told by [`answer`].
//!
//! `request_filter` returns `Ok(true)` only when the answer is complete or the client was told: pingora then
//! ends the message in order, and a truncated answer would look whole. Otherwise it returns the error, and a
//! `fail_to_proxy` that writes nothing lets the client see a cut.
//!
//! # What pingora 0.9.1 does that one would not expect
//!
//! What hangs on it is held by the tests in `tests/relay`.
//!
//! - Releasing an h1 session looks only at its answer: after an early 413 it would pool a connection amid a body.
//! - An h2 session's head must be read once: asked again, after success or an error, it panics.
//! - Streams of one h2 connection share a window as large as one of theirs by default, so that two clients that
//!   stop reading stall all others: peers that speak h2 need `h2_connection_window_size` =
//!   `h2_stream_window_size` x `max_h2_streams`.
//! - Reads may be dropped half way and taken up again, on both sides; writes may not: a connection whose write was
//!   dropped is never used again. An h1 session cannot read while it writes, and does not say how much it wrote: all
//!   requests to h1 engines but those of HEAD are written beneath it, as its reads are polled. An h2 one can.
//! - A next request's byte passes for the client's leaving unless pipelining is on; once such a byte is stashed, the
//!   leaving is not noticed before the next write. Behind `kvgate_edge` no such byte reaches a session. A client that
//!   ends its side only counts as gone.
//! - `retry` of an error does not mean that nothing of an answer came, and a fresh connection cannot be asked for:
//!   see [`exchange`].
//! - h1 answers with a length are not flushed before they are complete, all others at every piece, the head
//!   included: head and first event are two sends. The head to an h1 engine is flushed too, which is why short
//!   requests are written around the session, in one.
//! - 1xx and trailers: h1 trailers are swallowed, h2 carries no 1xx either way. Both pass where they can.
//! - A tunnel ends as soon as it stands if the engine's 101 is there before the request's empty body was passed on, which
//!   takes an engine that answers within microseconds.
//! - A listener that speaks h2c waits for 24 bytes before it takes a connection for h1.

mod answer;
mod body;
mod brief;
mod busy;
pub mod codes;
mod ending;
mod events;
mod exchange;
mod forward;
mod heads;
mod leg;
mod lint;
mod sending;
mod serve;
mod upload;

pub use answer::{Answer, answer, pass_on, redirect};
pub use body::{Body, BodyError, BodyLimits, Buffers, read};
pub use brief::{brief, brief_io, exhausted, is_ours};
pub use busy::{busy, seconds};
pub use ending::Ending;
pub use exchange::{Came, exchange};
pub use heads::{HostPolicy, to_engine};
pub use kvgate_edge::Code;
pub use leg::{Deadlines, Fault, Kept, Leg, LegError, Limits, Refusals, Relayed, Side, Sink};
pub use lint::{lint, too_large};
pub use serve::{Failure, Route, deliver, says_more, serve, tell, telling};
