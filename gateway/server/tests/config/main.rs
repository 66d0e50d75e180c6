//! The configuration, through the same door as the gateway: files on disk.

#![allow(clippy::unwrap_used)]

mod folder;
mod mutants;
mod problems;
mod rules;
mod shipped;
mod values;
