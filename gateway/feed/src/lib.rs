//! The sockets of the event plane: a ZMTP client, its supervisor and replay.
#![deny(rustdoc::broken_intra_doc_links)]

pub mod zmtp;
