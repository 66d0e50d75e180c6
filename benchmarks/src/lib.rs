//! What the benches share: text, a clock and a way to print.

mod chat;
mod measure;

pub use chat::Chat;
pub use measure::{Samples, cpu_time, resident_bytes};
