//! One function per target: it takes any bytes, must neither panic nor run away, and holds what it says.
//!
//! The code under test is taken in by its files, not by its crates: a tokenizer and a proxy would have to be compiled
//! with instruments for a few hundred lines that need neither. So `crate::` and `kvgate_engines::` in these files lead
//! here.
#![allow(dead_code, unused_imports)]

extern crate self as kvgate_engines;

#[path = "../../gateway/edge/src/h1/mod.rs"]
pub mod h1;
#[path = "../../gateway/prompt/src/json/mod.rs"]
pub mod json;
#[path = "../../gateway/edge/src/proxy_protocol.rs"]
mod proxy_protocol;
#[path = "../../gateway/edge/src/refusal.rs"]
pub mod refusal;
#[path = "../../gateway/server/src/relay/events.rs"]
mod relayed;
#[path = "../../gateway/prompt/src/request.rs"]
mod request;
#[path = "../../gateway/engines/src/stream.rs"]
pub mod stream;

mod body;
mod events;
mod framing;
mod preamble;
mod rules;
mod sse;

pub use body::body;
pub use events::events;
pub use framing::h1;
pub use preamble::proxy;
pub use rules::rules;
pub use sse::sse;
