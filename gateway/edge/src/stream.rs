//! A connection as pingora's sessions see it.

use std::io;
use std::os::fd::RawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;
use pingora_core::protocols::l4::socket::SocketAddr;
use pingora_core::protocols::raw_connect::ProxyDigest;
use pingora_core::protocols::tls::SslDigest;
use pingora_core::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, TimingDigest,
    UniqueID, UniqueIDType,
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

use crate::arrival::Arrival;
use crate::wire::Wire;

/// What is known of a connection, whatever is sent on it.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    fd: RawFd,
    socket: Arc<SocketDigest>,
    tls: Option<Arc<SslDigest>>,
    alpn: Option<ALPN>,
}

impl Facts {
    pub fn of(arrival: &Arrival) -> Self {
        let socket = SocketDigest::from_raw_fd(arrival.fd);
        // new: neither is set
        let _ = socket.peer_addr.set(Some(SocketAddr::Inet(arrival.peer)));
        let _ = socket.local_addr.set(Some(SocketAddr::Inet(arrival.local)));
        Self {
            fd: arrival.fd,
            socket: Arc::new(socket),
            tls: arrival.tls.clone(),
            alpn: arrival.alpn.clone(),
        }
    }
}

/// A connection while a session has it.
#[derive(Debug)]
pub(crate) struct Stream {
    pub wire: Wire,
    pub facts: Facts,
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.wire.lock().poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.wire.lock().poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.wire.lock().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.wire.lock().poll_shutdown(cx)
    }
}
#[async_trait]
impl Shutdown for Stream {
    async fn shutdown(&mut self) {
        let _ = AsyncWriteExt::shutdown(self).await;
    }
}

impl UniqueID for Stream {
    fn id(&self) -> UniqueIDType {
        self.facts.fd
    }
}

impl Ssl for Stream {
    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.facts.tls.clone()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.facts.alpn.clone()
    }
}

impl GetTimingDigest for Stream {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        Vec::new()
    }
}

impl GetProxyDigest for Stream {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        None
    }
}

impl GetSocketDigest for Stream {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        Some(self.facts.socket.clone())
    }
}

impl Peek for Stream {}
