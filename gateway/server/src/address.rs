//! An engine's address: a name may move, so it is looked up again and again.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long an answer of the resolver is used.
const FRESH: Duration = Duration::from_secs(10);

/// `host:port`, and what it stands for now.
#[derive(Debug)]
pub struct Address {
    text: String,
    literal: Option<SocketAddr>,
    resolved: Mutex<Option<(SocketAddr, Instant)>>,
}

impl Address {
    /// The address as configured; nothing is looked up yet.
    pub fn new(text: &str) -> Self {
        Self { text: text.to_owned(), literal: text.parse().ok(), resolved: Mutex::default() }
    }

    /// The socket address; names are looked up at most every ten seconds. While the resolver fails its last answer
    /// is used. `None` if it never gave one.
    pub async fn socket(&self) -> Option<SocketAddr> {
        if self.literal.is_some() {
            return self.literal;
        }
        let known = *self.resolved.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((socket, at)) = known
            && at.elapsed() < FRESH
        {
            return Some(socket);
        }
        match tokio::net::lookup_host(&self.text).await {
            Ok(mut found) => {
                let first = found.next()?;
                *self.resolved.lock().unwrap_or_else(PoisonError::into_inner) = Some((first, Instant::now()));
                Some(first)
            }
            Err(error) => {
                tracing::warn!(address = self.text, %error, "the name cannot be resolved");
                known.map(|(socket, _)| socket)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn literals_and_names() {
        assert_eq!(Address::new("[::1]:80").socket().await, Some("[::1]:80".parse().unwrap()));
        let local = Address::new("localhost:81").socket().await.unwrap();
        assert!(local.ip().is_loopback() && local.port() == 81);
        assert_eq!(Address::new("no-such-name.invalid:80").socket().await, None);
    }
}
