use std::{io, net::SocketAddr, time::Duration};

use bytes::BytesMut;
use tokio::{
    io::{Interest, Ready},
    net::{TcpStream, UnixStream, lookup_host},
    time::{Instant, timeout},
};

use super::{Endpoint, Error, Options};

/// Resolves and connects, by `by` at the latest.
pub(super) async fn dial(to: &Endpoint, by: Instant, options: &Options) -> Result<Stream, Error> {
    let (host, port) = match to {
        Endpoint::Ipc(path) => {
            return UnixStream::connect(path).await.map(Stream::Unix).map_err(Error::Connect);
        }
        Endpoint::Tcp { host, port } => (host.as_str(), *port),
    };
    let addresses: Vec<SocketAddr> = lookup_host((host, port)).await.map_err(Error::Resolve)?.collect();
    let mut error = Error::Resolve(io::Error::other("no address"));
    for (i, address) in addresses.iter().enumerate() {
        // A black hole gets its share of the time, not all of it.
        let share = by.saturating_duration_since(Instant::now()) / (addresses.len() - i) as u32;
        match timeout(share, TcpStream::connect(address)).await {
            // A loopback port in the ephemeral range can connect to itself, and then blocks the real peer's bind.
            Ok(Ok(s)) if s.local_addr().ok() == s.peer_addr().ok() => {
                socket2::SockRef::from(&s).set_linger(Some(Duration::ZERO))?; // leave no TIME_WAIT on its port
                error = Error::Connect(io::Error::other("connected to ourselves"));
            }
            Ok(Ok(s)) => {
                let socket = socket2::SockRef::from(&s);
                let probes = socket2::TcpKeepalive::new().with_time(options.keepalive);
                let probes =
                    probes.with_interval((options.keepalive / 3).max(Duration::from_secs(1))).with_retries(3);
                socket.set_tcp_keepalive(&probes)?;
                if options.recv_buffer > 0 {
                    socket.set_recv_buffer_size(options.recv_buffer)?;
                }
                s.set_nodelay(true)?;
                return Ok(Stream::Tcp(s));
            }
            Ok(Err(e)) => error = Error::Connect(e),
            Err(_) => error = Error::ConnectTimeout(share),
        }
    }
    Err(error)
}

/// A connected socket of either family.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        match self {
            Self::Tcp(s) => s.ready(interest).await,
            Self::Unix(s) => s.ready(interest).await,
        }
    }

    pub fn try_write(&self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(s) => s.try_write(from),
            Self::Unix(s) => s.try_write(from),
        }
    }

    pub fn try_read_buf(&self, into: &mut BytesMut) -> io::Result<usize> {
        match self {
            Self::Tcp(s) => s.try_read_buf(into),
            Self::Unix(s) => s.try_read_buf(into),
        }
    }
}
