//! The configuration, through the same door as the gateway: files on disk.

#![allow(clippy::unwrap_used)]

mod environment;
mod folder;
mod hints;
mod mutants;
mod problems;
mod rules;
mod shipped;
mod tls;
mod unused;
mod values;
