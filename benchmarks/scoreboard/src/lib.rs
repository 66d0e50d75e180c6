//! Reliability, shown from outside: the built gateway before engines that answer, stall, break and vanish on demand.
//!
//! `rows` holds what docs/reliability.md tells, one function a row; [`soak`] mixes everything for minutes; [`proxy`]
//! is a TCP proxy that breaks what passes. Nothing here knows the gateway but by its sockets, files and signals.

pub mod board;
pub mod client;
pub mod engine;
pub mod gateway;
pub mod load;
pub mod metrics;
pub mod ping;
pub mod proxy;
pub mod publisher;
pub mod rows;
pub mod soak;
pub mod tls;

/// What went wrong with the measuring itself.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
/// Of a step of a measurement.
pub type Result<T = ()> = std::result::Result<T, Error>;
