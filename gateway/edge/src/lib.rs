//! Between a socket and a request: listeners, connections, HTTP/1 framing. Knows nothing of rules.
//!
//! An [`Edge`] owns the listeners of a process and a task for each connection. It stands where pingora has a
//! `Server` with services; what it serves is any [`HttpServerApp`](pingora_core::apps::HttpServerApp), such as
//! `pingora_proxy::HttpProxy`.
//!
//! In order: [`bind`] the address, [`Edge::start`] accepts, an [`Arrival`] is a connection whose transport is up,
//! and `connection` serves it by the protocol that was agreed on.

mod accept;
mod arrival;
mod connection;
mod edge;
mod listen;
mod places;
mod serve;
mod stats;
mod stream;

pub use arrival::{Arrival, Io};
pub use edge::{Config, Edge};
pub use listen::{Listener, bind};
pub use places::Places;
pub use stats::{ListenerStats, Reason, Stats};
