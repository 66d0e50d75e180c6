//! Listening sockets.

use std::io;
use std::net::{SocketAddr, TcpListener};

use socket2::{Domain, Protocol, Socket, Type};

use crate::opening::Opening;

/// A listening socket and what it is called. The socket may be a clone of one that somebody else keeps, or have
/// come from another process.
#[derive(Debug)]
pub struct Listener {
    /// As the [`Stats`](crate::Stats) know it.
    pub name: String,
    /// The socket.
    pub socket: TcpListener,
    /// How its connections begin.
    pub opening: Opening,
}

/// Listens at an address, with room for `backlog` connections that nobody has accepted yet. An address that was
/// used a moment ago is taken at once.
///
/// # Errors
/// The system refuses, as when somebody else listens there.
pub fn bind(address: SocketAddr, backlog: u32) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(i32::try_from(backlog).unwrap_or(i32::MAX))?;
    Ok(socket.into())
}
