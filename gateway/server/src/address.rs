//! An engine's address: a name may move, so it is looked up again and again.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pingora_core::BError;
use pingora_core::upstreams::peer::HttpPeer;

use crate::relay::brief;
use crate::transport::Transport;

/// How long an answer of the resolver is used, a failure included.
const FRESH: Duration = Duration::from_secs(10);

/// `host:port`, and what it stands for now.
#[derive(Debug)]
pub struct Address {
    text: String,
    literal: Option<SocketAddr>,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// All that the name stands for; the first is in use.
    sockets: Vec<SocketAddr>,
    asked: Option<Instant>,
    failed: Option<Instant>,
    /// When it was said that TLS fails.
    distrusted: Option<Instant>,
}

impl Known {
    /// Takes what the resolver says; what is in use stays so if it is still there.
    fn learn(&mut self, mut found: Vec<SocketAddr>) {
        // servers on localhost mostly listen on IPv4 alone, while its name is IPv6 first
        if found.iter().all(|socket| socket.ip().is_loopback()) {
            found.sort_by_key(SocketAddr::is_ipv6);
        }
        let used = self.sockets.first().and_then(|used| found.iter().position(|socket| socket == used));
        found.rotate_left(used.unwrap_or(0));
        self.sockets = found;
    }
}

impl Address {
    /// The address as configured; nothing is looked up yet.
    pub fn new(text: &str) -> Self {
        Self { text: text.to_owned(), literal: text.parse().ok(), known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The socket address. A name is looked up at most every ten seconds, by one request while the others use the
    /// last answer if there is one, and for no longer than `limit`. While the resolver fails its last answer stays.
    /// `None` if it never gave one.
    pub async fn socket(&self, limit: Duration) -> Option<SocketAddr> {
        if self.literal.is_some() {
            return self.literal;
        }
        let fresh = |at: Option<Instant>| at.is_some_and(|at| at.elapsed() < FRESH);
        {
            let mut known = self.known();
            if (!known.sockets.is_empty() && fresh(known.asked)) || fresh(known.failed) {
                return known.sockets.first().copied();
            }
            known.asked = Some(Instant::now());
        }
        let found = tokio::time::timeout(limit, tokio::net::lookup_host(&self.text)).await;
        let mut known = self.known();
        match found {
            Ok(Ok(found)) => {
                let found: Vec<_> = found.collect();
                if !found.is_empty() {
                    known.learn(found);
                }
            }
            failed => {
                let error = match failed {
                    Ok(Err(error)) => error.to_string(),
                    _ => "no answer in time".to_owned(),
                };
                tracing::warn!(address = self.text, error, "the name cannot be resolved");
                known.failed = Some(Instant::now());
            }
        }
        known.sockets.first().copied()
    }

    /// The peer to connect to within `limit`, by TLS where the certificate's name is given; `None` if the address
    /// cannot be resolved.
    pub async fn peer(&self, tls: Option<&str>, transport: &Transport, limit: Duration) -> Option<HttpPeer> {
        Some(transport.peer(self.socket(limit).await?, tls, limit))
    }

    /// TLS could not be agreed on: said every ten seconds at most.
    pub fn distrusted(&self, error: &BError) {
        let mut known = self.known();
        if known.distrusted.is_none_or(|at| at.elapsed() >= FRESH) {
            known.distrusted = Some(Instant::now());
            tracing::warn!(
                address = self.text,
                error = brief(error),
                "TLS with the engine fails: nothing is sent to it"
            );
        }
    }

    /// This one took no connection: another one of the name, if it has several, is used from now on.
    pub fn unreachable(&self, socket: SocketAddr) {
        let mut known = self.known();
        if known.sockets.first() == Some(&socket) {
            known.sockets.rotate_left(1);
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

    #[test]
    fn the_one_that_works_stays_in_use() {
        let sockets = |texts: &[&str]| texts.iter().map(|t| t.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let mut known = Known::default();
        known.learn(sockets(&["[::1]:80", "127.0.0.1:80"]));
        assert_eq!(known.sockets, sockets(&["127.0.0.1:80", "[::1]:80"]));
        let named = Address { known: Mutex::new(Known::default()), ..Address::new("name:80") };
        let all = sockets(&["[fd00::1]:80", "10.0.0.1:80"]);
        named.known().learn(all.clone());
        assert_eq!(named.known().sockets, all, "as the resolver has them");
        named.unreachable(all[1]);
        assert_eq!(named.known().sockets[0], all[0], "not the one in use");
        for _ in 0..2 {
            named.unreachable(all[0]);
            assert_eq!(named.known().sockets[0], all[1], "once, however many found out");
        }
        named.known().learn(all.clone());
        assert_eq!(named.known().sockets[0], all[1]);
        named.known().learn(sockets(&["10.0.0.2:80"]));
        assert_eq!(named.known().sockets, sockets(&["10.0.0.2:80"]));
    }
}
