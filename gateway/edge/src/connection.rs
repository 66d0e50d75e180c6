//! One connection from its acceptance to its end.

use std::net::SocketAddr;
use std::sync::Arc;

use pingora_core::apps::HttpServerApp;
use pingora_core::protocols::ALPN;
use tokio::net::TcpStream;

use crate::arrival::Arrival;
use crate::edge::Shared;
use crate::serve::serve_h1;

/// Brings the transport up and serves requests until either side ends it. The only place where a protocol is
/// chosen.
pub(crate) async fn run<A>(shared: Arc<Shared<A>>, stream: TcpStream, peer: SocketAddr, local: SocketAddr)
where
    A: HttpServerApp + Send + Sync + 'static,
{
    let arrival = Arrival::plain(stream, peer, local);
    match arrival.alpn {
        // nobody agrees on it yet
        Some(ALPN::H2) => {}
        _ => serve_h1(&shared, arrival).await,
    }
}
