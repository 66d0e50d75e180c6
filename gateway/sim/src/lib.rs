//! Simulated engines: real hashing, a prefix cache, KV events over ZeroMQ, the OpenAI API.
//!
//! A [`Sim`] behaves as a vLLM 0.32 engine does towards a router: it tokenises with the model's own tokenizer, keeps a
//! prefix cache of blocks with the engine's hashes and eviction order, and publishes the same events, byte for byte,
//! that captured engines published for the same tokens. Only the model is missing: it answers in words that the seed
//! chooses, and takes the time that the configuration says.
//!
//! In a prefill-decode fleet an engine has a [`Role`]: one prefills and keeps the blocks, the other fetches them. What an
//! engine got, and how it is to fail, is asked in process or over HTTP (`/sim/log`, `/sim/faults`).
//!
//! [`clocked`] is the same cache in an engine on a virtual clock, for replaying a [`trace`].

mod api;
pub mod cache;
pub mod clocked;
mod config;
mod engine;
pub mod event;
mod fault;
mod log;
mod metrics;
mod pace;
mod publisher;
pub mod scheduler;
mod server;
mod sim;
pub mod trace;
mod transfer;
mod words;

pub use config::{Adapter, EventEncoding, HashForm, ReplayFrames, Role, SimConfig};
pub use fault::{FAULT_HEADER, Fault};
pub use log::{Ended, Served};
pub use metrics::Stats;
pub use sim::{Sim, SimError, load};
