//! HTTP/1 on one connection.

use std::time::Duration;

use bytes::BytesMut;
use pingora_core::apps::HttpServerApp;
use pingora_core::protocols::http::ServerSession;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use crate::arrival::Arrival;
use crate::edge::Shared;
use crate::h1::Framer;
use crate::refusal::{Code, Refusal, answer};
use crate::stream::{Facts, Stream};
use crate::wire::Wire;

/// How long a connection is kept for a client that is still sending when it is told that nobody listens.
const LINGER: Duration = Duration::from_secs(2);

/// Serves requests one after the other, until either side ends the connection. Pingora gets each of them when its head
/// is whole and good; while none is under way, nothing of pingora is held.
pub(crate) async fn serve_h1<A>(shared: &Shared<A>, arrival: Arrival)
where
    A: HttpServerApp + Send + Sync + 'static,
{
    let facts = Facts::of(&arrival);
    let wire = Wire::new(arrival.io, Framer::new(shared.config.requests));
    let mut draining = shared.draining.clone();
    let head = shared.config.head;
    // a connection's first head must be whole by the time when others must have begun
    let mut wait = Wait { begin: arrival.accepted + head, head: Duration::ZERO };
    loop {
        match wait.request(&wire, &mut draining).await {
            Ok(Some(request)) => {
                let stream = Stream { wire: wire.clone(), facts: facts.clone() };
                let mut session = ServerSession::new_http1(Box::new(stream));
                session.set_pipelined_prefix(request);
                if shared.app.process_new_http(session, &draining).await.is_none() {
                    break;
                }
            }
            Ok(None) => return,
            Err(refusal) => {
                let id = (shared.refused)(refusal);
                wire.lock().answer(&answer(refusal, &id));
                let _ = timeout(LINGER, wire.linger()).await;
                return;
            }
        }
        if !wire.lock().next_request() {
            break;
        }
        wait = Wait { begin: Instant::now() + shared.config.keep_alive, head };
    }
    if wire.lock().has_more() {
        let _ = timeout(LINGER, wire.linger()).await;
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
            _ = draining.wait_for(|draining| *draining) => false,
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
