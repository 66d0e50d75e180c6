//! One connection from its acceptance to its end.

use std::sync::Arc;

use pingora_core::apps::HttpServerApp;
use pingora_core::protocols::ALPN;

use crate::arrival::Arrival;
use crate::edge::Shared;
use crate::serve::serve_h1;
use crate::serve_h2::serve_h2;

/// Serves requests until either side ends it. The only place where a protocol is chosen.
pub(crate) async fn run<A>(shared: Arc<Shared<A>>, index: usize, arrival: Arrival)
where
    A: HttpServerApp + Send + Sync + 'static,
{
    match arrival.alpn {
        Some(ALPN::H2) => Box::pin(serve_h2(shared, index, arrival)).await,
        _ => serve_h1(&shared, arrival).await,
    }
}
