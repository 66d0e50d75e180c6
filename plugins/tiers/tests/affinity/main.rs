//! Tiers that bring like to like, and those that take turns, in real ladders.
#![allow(clippy::unwrap_used)]

mod persist;
mod radix_trie;
mod session;
mod support;
mod turns;
