//! Block hashes, KV events, the sequence window and the inventory of held blocks. Pure: no runtime, no sockets.

pub mod event;
pub mod hash;
pub mod holdings;
pub mod inventory;
pub mod mirror;
pub mod own;
pub mod speculative;
pub mod window;
