//! A gateway with nothing but the relay, scriptable engines, and raw clients.

pub mod client;
pub mod engine;
pub mod gateway;

use std::future::Future;
use std::time::Duration;

pub use client::{Ask, Client, Response};
pub use engine::{Call, Engine};
pub use gateway::Gateway;

/// The gateway's route to an engine: by which protocol.
pub const VIA_H1: usize = 0;
pub const VIA_H2: usize = 2;

/// Client protocol and engine index, all four.
pub const BOTH: [(bool, usize); 4] = [(false, VIA_H1), (false, VIA_H2), (true, VIA_H1), (true, VIA_H2)];

/// How long anything may take that must happen.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for what must happen.
pub async fn patience<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("waited in vain: {what}"))
}

/// Waits until something holds.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    patience(what, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// What an engine answers by default.
pub fn digest(body: &[u8]) -> String {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    format!("{} {:x}", body.len(), hasher.finish())
}

/// Bytes without a pattern.
pub fn noise(n: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ n as u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    })
    .take(n)
    .collect()
}

/// Events of a stream, and its end marker.
pub fn event(n: usize) -> Vec<u8> {
    format!("data: {{\"n\":{n}}}\n\n").into_bytes()
}

pub const DONE: &[u8] = b"data: [DONE]\n\n";
