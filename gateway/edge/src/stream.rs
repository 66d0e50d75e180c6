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

use crate::arrival::{Arrival, Io};

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

/// A connection while a session has it, or, with HTTP/2, all sessions.
#[derive(Debug)]
pub(crate) struct Stream<W> {
    pub wire: W,
    pub facts: Facts,
}

impl<W: Io> AsyncRead for Stream<W> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_read(cx, buf)
    }
}

impl<W: Io> AsyncWrite for Stream<W> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.wire).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.wire).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.wire.is_write_vectored()
    }
}

#[async_trait]
impl<W: Io> Shutdown for Stream<W> {
    async fn shutdown(&mut self) {
        let _ = AsyncWriteExt::shutdown(self).await;
    }
}

impl<W: Io> UniqueID for Stream<W> {
    fn id(&self) -> UniqueIDType {
        self.facts.fd
    }
}

impl<W: Io> Ssl for Stream<W> {
    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.facts.tls.clone()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.facts.alpn.clone()
    }
}

impl<W: Io> GetTimingDigest for Stream<W> {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        Vec::new()
    }
}

impl<W: Io> GetProxyDigest for Stream<W> {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        None
    }
}

impl<W: Io> GetSocketDigest for Stream<W> {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        Some(self.facts.socket.clone())
    }
}

impl<W: Io> Peek for Stream<W> {}
