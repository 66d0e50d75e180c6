//! A connection whose transport is up.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use pingora_core::protocols::ALPN;
use pingora_core::protocols::tls::SslDigest;
use pingora_core::tls::ServerTlsStream;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Bytes both ways: TCP, or TLS over it.
pub trait Io: AsyncRead + AsyncWrite + Unpin + Send + Sync + Debug + 'static {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + Sync + Debug + 'static> Io for T {}

/// What bytes travel on.
pub trait Transport: Io {
    /// The connection will end by a reset.
    fn resets(&self);
}

impl Transport for TcpStream {
    fn resets(&self) {
        // gone, it needs none
        let _ = SockRef::from(self).set_linger(Some(Duration::ZERO));
    }
}

impl Transport for ServerTlsStream<TcpStream> {
    fn resets(&self) {
        self.get_ref().0.resets();
    }
}

/// A connection whose transport is up and whose protocol is known.
#[derive(Debug)]
pub struct Arrival {
    /// The bytes.
    pub io: Box<dyn Transport>,
    /// The socket beneath, for as long as `io` lives.
    pub fd: RawFd,
    /// The client, as requests on the connection are told.
    pub peer: SocketAddr,
    /// The address it connected to.
    pub local: SocketAddr,
    /// What TLS agreed on; `None` without TLS.
    pub tls: Option<Arc<SslDigest>>,
    /// The protocol TLS agreed on; `None`: HTTP/1.
    pub alpn: Option<ALPN>,
    /// When it was accepted: its first request must be there a head's deadline later.
    pub accepted: Instant,
}

impl Arrival {
    /// A connection without TLS.
    pub fn plain(stream: TcpStream, peer: SocketAddr, local: SocketAddr) -> Self {
        Self {
            fd: stream.as_raw_fd(),
            io: Box::new(stream),
            peer,
            local,
            tls: None,
            alpn: None,
            accepted: Instant::now(),
        }
    }
}
