//! HTTP/1 on one connection.

use std::future::pending;
use std::time::Duration;

use bytes::BytesMut;
use pingora_core::apps::HttpServerApp;
use pingora_core::protocols::http::ServerSession;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::arrival::Arrival;
use crate::edge::Shared;
use crate::h1::Framer;
use crate::refusal::{Code, Refusal, answer};
use crate::stream::{Facts, Stream};
use crate::wire::Wire;

/// How long a connection is kept, at most, after its last answer: closed at once, a client still sending would see a
/// reset instead of the answer's end.
const LINGER: Duration = Duration::from_secs(2);
/// How long a connection that waits for a request is kept when draining begins: one may be on its way, or be there and
/// not have been looked at.
pub const LAST_CALL: Duration = Duration::from_millis(50);

/// Serves requests one after the other, until either side ends the connection. Pingora gets each of them when its head
/// is whole and good; while none is under way, nothing of pingora is held.
pub(crate) async fn serve_h1<A>(shared: &Shared<A>, arrival: Arrival)
where
    A: HttpServerApp + Send + Sync + 'static,
{
    let facts = Facts::of(&arrival);
    let wire = Wire::new(arrival.io, Framer::new(shared.config.requests));
    let (mut draining, mut ending) = (shared.draining.clone(), shared.ending.clone());
    let head = shared.config.head;
    // a connection's first head must be whole by the time when others must have begun
    let mut wait = Wait { begin: arrival.accepted + head, head: Duration::ZERO };
    loop {
        match wait.request(&wire, &mut draining).await {
            Ok(Some(request)) => {
                let stream = Stream { wire: wire.clone(), facts: facts.clone() };
                let mut session = ServerSession::new_http1(Box::new(stream));
                session.set_pipelined_prefix(request);
                let may_be_tunnel = wire.lock().is_upgrade();
                let next = tokio::select! {
                    next = shared.app.process_new_http(session, &draining) => next,
                    () = tunnel_ends(&mut ending, &wire), if may_be_tunnel => None,
                };
                if next.is_none() {
                    break;
                }
            }
            Ok(None) => return,
            Err(refusal) => {
                let id = (shared.refused)(refusal);
                wire.lock().answer(&answer(refusal, &id));
                break;
            }
        }
        if !wire.lock().next_request() {
            break;
        }
        wait = Wait { begin: Instant::now() + shared.config.keep_alive, head };
    }
    if !wire.lock().resets() {
        let _ = timeout(LINGER, wire.linger()).await;
    }
}

/// Waits until draining has begun and all have been called who may still be served.
async fn last_call(draining: &mut watch::Receiver<bool>) {
    drop(draining.wait_for(|draining| *draining).await);
    sleep(LAST_CALL).await;
}

/// Comes when tunnels are closed, if the connection is one.
async fn tunnel_ends(ending: &mut watch::Receiver<bool>, wire: &Wire) {
    if ending.wait_for(|ending| *ending).await.is_err() || !wire.lock().is_tunnel() {
        pending::<()>().await;
    }
}

/// How long a request is waited for.
struct Wait {
    /// Its first byte must have come by then.
    begin: Instant,
    /// The rest of its head this long after that; zero: by then, too.
    head: Duration,
}

impl Wait {
    /// The next request's head, with what has come of its body; `None`: there will be none.
    async fn request(
        &self,
        wire: &Wire,
        draining: &mut watch::Receiver<bool>,
    ) -> Result<Option<BytesMut>, Refusal> {
        let begun = tokio::select! {
            biased;
            begun = timeout_at(self.begin, wire.begun()) => begun.unwrap_or(false),
            () = last_call(draining) => false,
        };
        if !begun {
            return Ok(None);
        }
        let until = if self.head.is_zero() { self.begin } else { Instant::now() + self.head };
        match timeout_at(until, wire.head()).await {
            Ok(head) => head,
            Err(_) => Err(Refusal::of(Code::HEAD_TOO_SLOW)),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::io::{AsyncWriteExt, DuplexStream, duplex};

    use super::*;
    use crate::arrival::Transport;
    use crate::h1::Limits;

    const HEAD: Duration = Duration::from_secs(5);

    impl Transport for DuplexStream {
        fn resets(&self) {}
    }

    struct Case {
        wire: Wire,
        client: DuplexStream,
        drain: watch::Sender<bool>,
    }

    fn case() -> Case {
        let (client, io) = duplex(64);
        Case {
            wire: Wire::new(Box::new(io), Framer::new(Limits::default())),
            client,
            drain: watch::channel(false).0,
        }
    }

    impl Case {
        async fn wait(&self, begin: u64, head: Duration) -> Result<Option<BytesMut>, Refusal> {
            let wait = Wait { begin: Instant::now() + Duration::from_secs(begin), head };
            wait.request(&self.wire, &mut self.drain.subscribe()).await
        }
    }

    fn is_slow(waited: &Result<Option<BytesMut>, Refusal>) -> bool {
        matches!(waited, Err(refusal) if refusal.code == Code::HEAD_TOO_SLOW)
    }

    /// The deadline is of the whole head: bytes that trickle in do not move it.
    #[tokio::test(start_paused = true)]
    async fn trickling_does_not_help() {
        for (begin, head, end) in [(5, Duration::ZERO, 5), (60, HEAD, 5)] {
            let mut case = case();
            case.client.write_all(b"GET / HTTP/1.1\r\nX: ").await.unwrap();
            let (wire, drain, start) = (case.wire.clone(), case.drain.clone(), Instant::now());
            let trickle = async {
                loop {
                    case.client.write_all(b"a").await.unwrap();
                    sleep(Duration::from_millis(20)).await;
                }
            };
            let wait = Wait { begin: start + Duration::from_secs(begin), head };
            let mut draining = drain.subscribe();
            let waited = tokio::select! {
                () = trickle => return,
                waited = wait.request(&wire, &mut draining) => waited,
            };
            assert!(is_slow(&waited), "{waited:?}");
            assert_eq!(start.elapsed().as_secs(), end);
        }
    }

    /// A wait that is longer than a head's deadline is none of its business, and who does not begin is told nothing.
    #[tokio::test(start_paused = true)]
    async fn between_requests_there_is_more_time() {
        let mut case = case();
        let send = async {
            sleep(Duration::from_secs(50)).await;
            case.client.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
            sleep(Duration::from_secs(4)).await;
            case.client.write_all(b"Host: a\r\n\r\n").await.unwrap();
        };
        let wait = Wait { begin: Instant::now() + Duration::from_secs(60), head: HEAD };
        let mut draining = case.drain.subscribe();
        let (waited, ()) = tokio::join!(wait.request(&case.wire, &mut draining), send);
        assert!(waited.unwrap().is_some_and(|request| request.ends_with(b"Host: a\r\n\r\n")));
        assert!(case.wire.lock().next_request());
        let start = Instant::now();
        assert_eq!(case.wait(60, HEAD).await, Ok(None));
        assert_eq!(start.elapsed().as_secs(), 60);
    }

    /// A request that is there, or comes at once, when draining begins is taken.
    #[tokio::test(start_paused = true)]
    async fn draining_waits_a_moment() {
        let mut case = case();
        case.drain.send_replace(true);
        let start = Instant::now();
        assert_eq!(case.wait(60, HEAD).await, Ok(None));
        assert_eq!(start.elapsed(), LAST_CALL);
        let send = async {
            sleep(LAST_CALL / 2).await;
            case.client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        };
        let wait = Wait { begin: start + Duration::from_secs(60), head: HEAD };
        let mut draining = case.drain.subscribe();
        let (waited, ()) = tokio::join!(wait.request(&case.wire, &mut draining), send);
        assert!(waited.unwrap().is_some());
    }
}
