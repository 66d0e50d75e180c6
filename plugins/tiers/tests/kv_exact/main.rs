//! `kv-exact` on a real inventory, in a real ladder.
#![allow(clippy::unwrap_used)]

mod load;
mod lookup;
mod namespaces;
mod speculative;
mod support;
