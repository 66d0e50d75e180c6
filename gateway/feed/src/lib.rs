//! The sockets of the event plane: a ZMTP client, its supervisor and replay, and the [`plane`] that follows
//! engines and keeps the inventory of what they hold.
#![deny(rustdoc::broken_intra_doc_links)]

pub mod plane;
pub mod zmtp;
