//! How a connection begins: with a PROXY header or without, with TLS or without.

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use arc_swap::ArcSwap;
use pingora_core::protocols::ALPN;
use pingora_core::protocols::tls::SslDigest;
use pingora_core::tls::TlsAcceptor;
use rustls::ServerConnection;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::arrival::Arrival;
use crate::network::Network;
use crate::places::Place;
use crate::proxy_protocol::{self, Origin};
use crate::stats::Reason;
use crate::tls::Tls;

/// How the connections of a listener begin.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// With a PROXY header, from these networks only; `None`: without.
    pub proxies: Option<Vec<Network>>,
    /// With TLS, as it is when the connection comes; `None`: without.
    pub tls: Option<Arc<ArcSwap<Tls>>>,
}

impl Opening {
    /// Whether they begin with HTTP.
    pub(crate) fn is_plain(&self) -> bool {
        self.proxies.is_none() && self.tls.is_none()
    }
}

/// Brings the transport up. Put a deadline round it.
///
/// # Errors
/// Why the connection is not served.
pub(crate) async fn open(
    opening: &Opening,
    mut stream: TcpStream,
    mut peer: SocketAddr,
    local: SocketAddr,
    place: &mut Place,
) -> Result<Arrival, Reason> {
    let accepted = Instant::now();
    if let Some(proxies) = &opening.proxies {
        if !proxies.iter().any(|network| network.contains(peer.ip())) {
            return Err(Reason::ProxyHeader);
        }
        match proxy_protocol::read(&mut stream).await {
            Ok(Origin::Local) => {}
            Ok(Origin::Proxied { client, .. }) => peer = client,
            Err(error) => {
                tracing::debug!(%peer, %error, "a connection is closed");
                return Err(Reason::ProxyHeader);
            }
        }
        place.claim(peer.ip())?;
    }
    let Some(tls) = &opening.tls else {
        return Ok(Arrival { accepted, ..Arrival::plain(stream, peer, local) });
    };
    let acceptor = TlsAcceptor::from(tls.load().config().clone());
    let fd = stream.as_raw_fd();
    let stream = acceptor.accept(stream).await.map_err(|error| {
        tracing::debug!(%peer, %error, "a TLS handshake fails");
        Reason::Handshake
    })?;
    let (_, agreed) = stream.get_ref();
    let (tls, alpn) = (digest(agreed), agreed.alpn_protocol().map(alpn));
    Ok(Arrival { fd, tls: Some(Arc::new(tls)), alpn, peer, local, accepted, io: Box::new(stream) })
}

/// The protocol by its registered name (RFC 7301 section 6).
fn alpn(name: &[u8]) -> ALPN {
    if name == b"h2" { ALPN::H2 } else { ALPN::H1 }
}

/// What was agreed on.
fn digest(agreed: &ServerConnection) -> SslDigest {
    let cipher =
        agreed.negotiated_cipher_suite().and_then(|suite| suite.suite().as_str()).unwrap_or_default();
    let version = agreed.protocol_version().and_then(|version| version.as_str()).unwrap_or_default();
    SslDigest::new(cipher, version, None, None, Vec::new())
}
