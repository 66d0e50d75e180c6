//! How a rule's engines are spoken to: by whose word they are trusted, what the gateway shows them, and whether HTTP/2
//! is offered. The one maker of peers, whoever asks the engine.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvgate_edge::pem::{Certificate, PemError, authorities};
use pingora_core::protocols::ALPN;
use pingora_core::protocols::tls::CaType;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_core::utils::tls::{CertKey, WrappedX509, parse_x509};

use crate::config::EngineTls;

/// Streams on one HTTP/2 connection to an engine; more requests take another connection.
const STREAMS: usize = 64;
/// What an engine may send of one answer ahead of its client.
const STREAM_WINDOW: u32 = 256 << 10;
/// Of all answers on a connection: as much as all its streams may, so that clients that stop reading stall nobody else.
const CONNECTION_WINDOW: u32 = STREAM_WINDOW * STREAMS as u32;
/// How often an HTTP/2 connection is asked whether it still lives.
const PING: Duration = Duration::from_secs(20);

/// How a rule's engines are spoken to where they have a `tls` name; the others by plain HTTP/1.1.
#[derive(Default)]
pub struct Transport {
    authorities: Option<Arc<CaType>>,
    certificate: Option<Arc<CertKey>>,
    http2: bool,
    /// Tells connections made with these files from all others; 0 without any.
    key: u64,
}

impl PartialEq for Transport {
    fn eq(&self, other: &Self) -> bool {
        (self.key, self.http2) == (other.key, other.http2)
    }
}

impl Eq for Transport {}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport")
            .field("http2", &self.http2)
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

impl Transport {
    /// Reads the files of a rule.
    ///
    /// # Errors
    /// Every file that cannot be used, after the key of `[tls]` that names it.
    pub fn load(config: &EngineTls) -> Result<Self, Vec<(&'static str, PemError)>> {
        let mut problems = Vec::new();
        let mut hasher = DefaultHasher::new();
        let mut take = |key, read| match read {
            Ok(read) => Some(read),
            Err(problem) => {
                problems.push((key, problem));
                None
            }
        };
        let found = config.ca.as_ref().and_then(|file| take("ca", authorities(file)));
        let certificate = config.certificate().and_then(|(chain, key)| match Certificate::load(chain, key) {
            Ok(certificate) => Some(certificate),
            Err(problem) => {
                let at_fault = if problem.file == *chain { "client_certificate" } else { "client_key" };
                problems.push((at_fault, problem));
                None
            }
        });
        if !problems.is_empty() {
            return Err(problems);
        }
        let authorities = found.map(|found| {
            found.hash(&mut hasher);
            found.iter().map(|der| WrappedX509::new(der.to_vec(), parse_x509)).collect::<Vec<_>>().into()
        });
        let certificate = certificate.map(|certificate| {
            certificate.chain.hash(&mut hasher);
            certificate.key.secret_der().hash(&mut hasher);
            let chain = certificate.chain.iter().map(|der| der.to_vec()).collect();
            Arc::new(CertKey::new(chain, certificate.key.secret_der().to_vec()))
        });
        let named = authorities.is_some() || certificate.is_some();
        // the upper half of the numbers is for connections that must be fresh
        let key = if named { hasher.finish() >> 1 } else { 0 };
        Ok(Self { authorities, certificate, http2: config.http2, key })
    }

    /// The peer to connect to within `limit`: by TLS where the certificate's name is given, and then verified.
    pub fn peer(&self, socket: SocketAddr, name: Option<&str>, limit: Duration) -> HttpPeer {
        let mut peer = HttpPeer::new(socket, name.is_some(), name.unwrap_or_default().to_owned());
        let options = &mut peer.options;
        options.connection_timeout = Some(limit);
        options.total_connection_timeout = Some(limit);
        options.alpn = ALPN::H1;
        if name.is_none() {
            return peer;
        }
        options.ca.clone_from(&self.authorities);
        if self.http2 {
            options.alpn = ALPN::H2H1;
            options.max_h2_streams = STREAMS;
            options.h2_stream_window_size = Some(STREAM_WINDOW);
            options.h2_connection_window_size = Some(CONNECTION_WINDOW);
            options.h2_ping_interval = Some(PING);
        }
        peer.client_cert_key.clone_from(&self.certificate);
        peer.group_key = self.key;
        peer
    }
}
