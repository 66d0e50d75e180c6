//! HTTP/2 on one connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pingora_core::apps::HttpServerApp;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::v2::server::{H2Accept, H2Options, HttpSession, handshake};
use pingora_core::protocols::{Digest, GetSocketDigest, GetTimingDigest, Ssl};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::arrival::Arrival;
use crate::edge::Shared;
use crate::frames::{Allowance, Metered};
use crate::refusal::Refusal;
use crate::stats::Reason;
use crate::stream::{Facts, Stream};

/// Requests of a connection that may be broken HTTP before it is closed.
const MALFORMED: u32 = 32;
/// Streams that the library may reset for a client's faults before it closes the connection.
const FAULTS: usize = 128;
/// How long a client has to take leave when the connection is closed with nothing under way.
const LEAVE: Duration = Duration::from_millis(500);

/// What an HTTP/2 connection may take up.
#[derive(Clone, Copy, Debug)]
pub struct Http2 {
    /// Requests at once.
    pub streams: u32,
    /// Bytes of one body ahead of its reader.
    pub stream_window: u32,
    /// Bytes of all bodies ahead of their readers.
    pub connection_window: u32,
    /// Frames that carry no request.
    pub allowance: Allowance,
}

impl Default for Http2 {
    fn default() -> Self {
        let allowance = Allowance { control_frames: 100, resets: 20 };
        Self { streams: 128, stream_window: 256 << 10, connection_window: 1 << 20, allowance }
    }
}

impl Http2 {
    /// As the library has them; `head`: bytes of a request's head, as RFC 9113 section 6.5.2 counts them.
    fn options(&self, head: usize) -> H2Options {
        let mut options = H2Options::new();
        options
            .max_concurrent_streams(self.streams)
            .initial_window_size(self.stream_window)
            .initial_connection_window_size(self.connection_window)
            .max_header_list_size(u32::try_from(head).unwrap_or(u32::MAX))
            .max_local_error_reset_streams(Some(FAULTS));
        options
    }
}

/// Serves requests side by side, until either side ends the connection.
pub(crate) async fn serve_h2<A>(shared: Arc<Shared<A>>, index: usize, arrival: Arrival)
where
    A: HttpServerApp + Send + Sync + 'static,
{
    let facts = Facts::of(&arrival);
    let flooded = Arc::new(AtomicBool::new(false));
    let until = arrival.accepted + shared.config.head;
    let metered = Metered::new(arrival.io, shared.config.http2.allowance, flooded.clone());
    let stream = Stream { wire: metered, facts };
    let calmed = serve(&shared, stream, until).await;
    if (calmed || flooded.load(Ordering::Relaxed))
        && let Some(stats) = shared.stats.listeners().get(index)
    {
        stats.refuse(Reason::Flood);
    }
}

/// Returns whether the library cut the connection for a flood, by bounds of its own.
async fn serve<A>(shared: &Arc<Shared<A>>, stream: Stream<Metered>, until: Instant) -> bool
where
    A: HttpServerApp + Send + Sync + 'static,
{
    let digest = Arc::new(Digest {
        ssl_digest: stream.get_ssl_digest(),
        timing_digest: stream.get_timing_digest(),
        proxy_digest: None,
        socket_digest: stream.get_socket_digest(),
    });
    let options = shared.config.http2.options(shared.config.requests.head);
    let Ok(Ok(mut connection)) = timeout_at(until, handshake(Box::new(stream), Some(options))).await else {
        return false;
    };
    let mut draining = shared.draining.clone();
    let mut requests = JoinSet::new();
    let (mut malformed, mut leaving, mut calmed) = (0, false, false);
    // as in HTTP/1, the first request has until the head's deadline
    let mut idle = until;
    loop {
        let accepted = tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining), if !leaving => {
                connection.graceful_shutdown();
                (leaving, idle) = (true, Instant::now() + LEAVE);
                continue;
            }
            _ = requests.join_next(), if !requests.is_empty() => {
                let rest = if leaving { LEAVE } else { shared.config.keep_alive };
                idle = Instant::now() + rest;
                continue;
            }
            accepted = HttpSession::from_h2_conn(&mut connection, digest.clone()) => accepted,
            () = sleep_until(idle), if requests.is_empty() => {
                if leaving {
                    break;
                }
                connection.graceful_shutdown();
                (leaving, idle) = (true, Instant::now() + LEAVE);
                continue;
            }
        };
        match accepted {
            Ok(Some(H2Accept::Session(session))) => {
                let (app, draining) = (shared.app.clone(), shared.draining.clone());
                requests.spawn(async move {
                    app.process_new_http(ServerSession::new_http2(session), &draining).await;
                });
            }
            Ok(Some(H2Accept::Rejected)) => {
                // the library has answered it
                (shared.refused)(Refusal::bad("an HTTP/2 request whose fields contradict each other"));
                malformed += 1;
                if malformed == MALFORMED {
                    break;
                }
            }
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%error, "an HTTP/2 connection breaks");
                calmed = is_calmed(&error);
                break;
            }
        }
    }
    // whoever is still being served sees that the client is gone
    drop(connection);
    while requests.join_next().await.is_some() {}
    calmed
}

/// Whether the library ended a connection because there was too much of something.
fn is_calmed(error: &pingora_core::Error) -> bool {
    let cause = error.cause.as_ref().and_then(|cause| cause.downcast_ref::<h2::Error>());
    cause.is_some_and(|e| e.is_library() && e.reason() == Some(h2::Reason::ENHANCE_YOUR_CALM))
}
