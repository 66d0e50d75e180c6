//! The relay over real sockets: every case met while it was built, and every trap of the proxy library.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

mod bodies;
mod departures;
mod framing;
mod limits;
mod refused;
mod retries;
mod streams;
mod tls;
