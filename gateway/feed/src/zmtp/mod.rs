//! A ZMTP 3.0/3.1 client for exactly two roles: SUB, to follow a publisher, and DEALER, to ask a ROUTER for
//! a replay. NULL mechanism, over `tcp://` and `ipc://`. Wire format: ZeroMQ RFC 23 (3.0) and 37 (3.1).
//!
//! What it promises whatever the peer does: no allocation beyond twice what has arrived, nothing waits
//! without a deadline, one task and one descriptor per subscription, both gone when it is dropped.
//!
//! * [`Connection`]: one connection; `recv` is cancel-safe.
//! * [`Subscription`]: a supervised subscription: reconnects for ever, reports [`Event`]s.
//! * [`Replay`]: one replay request and its answers, both frame forms.

mod conn;
mod dial;
mod endpoint;
mod error;
mod replay;
mod subscription;
pub mod wire;

pub use conn::{Connection, Options};
pub use endpoint::Endpoint;
pub use error::Error;
pub use replay::{Replay, Reply};
pub use subscription::{Backoff, Event, Message, Subscription, SubscriptionOptions};
