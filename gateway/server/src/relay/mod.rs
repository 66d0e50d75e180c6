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

mod answer;
mod body;
mod events;
mod exchange;
mod heads;
mod leg;
mod lint;
mod serve;
mod upload;

pub use answer::{Answer, Code, answer, pass_on};
pub use body::{Body, BodyError, BodyLimits, Buffers, read};
pub use exchange::exchange;
pub use heads::{HostPolicy, to_engine};
pub use leg::{Deadlines, Fault, Kept, Leg, LegError, Limits, Relayed, Side, Sink};
pub use lint::lint;
pub use serve::{Failure, Route, parked, serve};
