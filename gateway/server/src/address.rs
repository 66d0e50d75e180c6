//! An engine's address: a name may move, so it is looked up again and again.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long an answer of the resolver is used, a failure included.
const FRESH: Duration = Duration::from_secs(10);

/// `host:port`, and what it stands for now.
#[derive(Debug)]
pub struct Address {
    text: String,
    literal: Option<SocketAddr>,
    known: Mutex<Known>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Known {
    socket: Option<SocketAddr>,
    asked: Option<Instant>,
    failed: Option<Instant>,
}

impl Address {
    /// The address as configured; nothing is looked up yet.
    pub fn new(text: &str) -> Self {
        Self { text: text.to_owned(), literal: text.parse().ok(), known: Mutex::default() }
    }

    /// The socket address. A name is looked up at most every ten seconds, by one request while the others use the
    /// last answer if there is one, and for no longer than `limit`. While the resolver fails its last answer stays. `None` if it
    /// never gave one.
    pub async fn socket(&self, limit: Duration) -> Option<SocketAddr> {
        if self.literal.is_some() {
            return self.literal;
        }
        let fresh = |at: Option<Instant>| at.is_some_and(|at| at.elapsed() < FRESH);
        let known = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            if (known.socket.is_some() && fresh(known.asked)) || fresh(known.failed) {
                return known.socket;
            }
            known.asked = Some(Instant::now());
            *known
        };
        match tokio::time::timeout(limit, tokio::net::lookup_host(&self.text)).await {
            Ok(Ok(mut found)) => {
                let socket = found.next().or(known.socket);
                self.known.lock().unwrap_or_else(PoisonError::into_inner).socket = socket;
                socket
            }
            failed => {
                let error = match failed {
                    Ok(Err(error)) => error.to_string(),
                    _ => "no answer in time".to_owned(),
                };
                tracing::warn!(address = self.text, error, "the name cannot be resolved");
                self.known.lock().unwrap_or_else(PoisonError::into_inner).failed = Some(Instant::now());
                known.socket
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn literals_and_names() {
        assert_eq!(Address::new("[::1]:80").socket(LIMIT).await, Some("[::1]:80".parse().unwrap()));
        let named = Address::new("localhost:81");
        let local = named.socket(LIMIT).await.unwrap();
        assert!(local.ip().is_loopback() && local.port() == 81);
        assert_eq!(named.socket(LIMIT).await, Some(local));
        let nowhere = Address::new("no-such-name.invalid:80");
        for _ in 0..2 {
            assert_eq!(nowhere.socket(LIMIT).await, None);
        }
    }
}
