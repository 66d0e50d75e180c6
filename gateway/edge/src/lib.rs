//! Between a socket and a request: listeners, connections, HTTP/1 framing. Knows nothing of rules.
//!
//! An [`Edge`] owns the listeners of a process and a task for each connection. It stands where pingora has a
//! `Server` with services; what it serves is any [`HttpServerApp`](pingora_core::apps::HttpServerApp), such as
//! `pingora_proxy::HttpProxy`.
//!
//! In order: [`bind`] the address, [`Edge::start`] accepts, an [`Arrival`] is a connection whose transport is up,
//! and `connection` serves it by the protocol that was agreed on. Every byte of HTTP/1 passes a [`h1::Framer`] before
//! pingora sees it; what does not pass is answered here.

mod accept;
mod arrival;
mod connection;
mod edge;
mod frames;
pub mod h1;
mod listen;
pub mod network;
mod opening;
pub mod pem;
mod places;
pub mod proxy_protocol;
mod refusal;
mod serve;
mod serve_h2;
mod stats;
mod stream;
pub mod tls;
mod wire;

pub use arrival::{Arrival, Io, Transport};
pub use edge::{Config, Edge, Refused};
pub use frames::Allowance;
pub use listen::{Listener, bind};
pub use opening::Opening;
pub use refusal::{Code, Refusal, error_json, error_type};
pub use serve::LAST_CALL;
pub use serve_h2::Http2;
pub use stats::{ListenerStats, Reason, Stats};
