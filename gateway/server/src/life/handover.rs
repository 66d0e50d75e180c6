//! A new process takes the listeners over from the one that serves, so that nobody who connects meanwhile is refused.
//!
//! The old process offers its sockets at a path, once, after `SIGQUIT`. The new one (`kvgate run --upgrade`) is given
//! them (`SCM_RIGHTS`, unix(7)), prepares itself while the old one serves on, begins to accept, and says so; only then
//! does the old one stop accepting. If the new one ends before, nothing has happened. Whichever comes first waits for
//! the other. Both must be of the same user.

use std::collections::HashMap;
use std::fs;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg, sockopt,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

/// How long one waits for the other to come.
const WAIT: Duration = Duration::from_secs(60);
/// How long either may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Between two attempts to find the other.
const AGAIN: Duration = Duration::from_millis(50);
/// What is said, a line each: who speaks, a socket, the last of them, the new one serves, the old one knows.
const HELLO: &[u8] = b"kvgate 1\n";
const SOCKET: &[u8] = b"socket\n";
const END: &[u8] = b"end\n";
const SERVING: &[u8] = b"serving\n";
const KNOWN: &[u8] = b"known\n";
/// Sockets at most: more than anybody listens on.
const MOST: usize = 4096;

/// The process that has been given the sockets, and does not serve yet.
#[derive(Debug)]
pub struct Successor {
    /// Its number.
    pub pid: i32,
    stream: tokio::net::UnixStream,
}

/// Waits for a new process and gives it the sockets.
///
/// # Errors
/// In words: nobody came, or the path cannot be used.
pub async fn offer(path: &Path, sockets: Vec<OwnedFd>) -> Result<Successor, String> {
    let fails = |e: io::Error| format!("{}: {e}", path.display());
    let file = Offer::new(path).map_err(fails)?;
    let found = timeout(WAIT, file.accept()).await;
    let (stream, pid) = found.map_err(|_| format!("nobody came to {} in {WAIT:?}", path.display()))?;
    drop(file);
    let given = tokio::task::spawn_blocking(move || give(stream, &sockets)).await;
    let stream = given.map_err(io::Error::other).and_then(|given| given).map_err(fails)?;
    Ok(Successor { pid, stream })
}

impl Successor {
    /// Waits until it serves, for so long at most: then it is killed, lest it begin to serve beside this process later.
    ///
    /// # Errors
    /// In words: it ended before, or was killed.
    pub async fn serves(&mut self, most: Duration) -> Result<(), String> {
        let mut said = [0; SERVING.len()];
        match timeout(most, self.stream.read_exact(&mut said)).await {
            Ok(Ok(_)) if said == SERVING => Ok(()),
            Ok(Ok(_)) => Err("the new process speaks another language".into()),
            Ok(Err(e)) => Err(format!("the new process ended before it served: {e}")),
            Err(_) => {
                let killed = match Pid::from_raw(self.pid).map(|pid| kill_process(pid, Signal::KILL)) {
                    Some(Err(e)) => format!("cannot be killed: {e}"),
                    _ => "was killed".into(),
                };
                Err(format!("the new process did not serve within {most:?}, and {killed}"))
            }
        }
    }

    /// Tells it that it is known to serve.
    pub async fn known(mut self) {
        if let Err(e) = self.stream.write_all(KNOWN).await {
            tracing::debug!("the new process did not hear: {e}");
        }
    }
}

/// The socket at the path, while somebody is awaited there.
struct Offer {
    path: PathBuf,
    listener: tokio::net::UnixListener,
}

impl Offer {
    fn new(path: &Path) -> io::Result<Self> {
        // what a process left that was killed here
        let left = fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
        if left && UnixStream::connect(path).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused) {
            fs::remove_file(path)?;
        }
        let listener = tokio::net::UnixListener::bind(path)?;
        let offer = Self { path: path.to_owned(), listener };
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(offer)
    }

    /// The first who comes and is of the same user, and its number.
    async fn accept(&self) -> (UnixStream, i32) {
        loop {
            let accepted = self.listener.accept().await;
            match accepted.and_then(|(stream, _)| stream.into_std()).and_then(ours) {
                Ok(found) => return found,
                Err(e) => {
                    tracing::warn!("whoever came for the listeners got none: {e}");
                    tokio::time::sleep(AGAIN).await;
                }
            }
        }
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_file(&self.path) {
            tracing::warn!("{}: {e}", self.path.display());
        }
    }
}

/// Whoever is at the other end, if it is of our own user, and its number.
fn ours(stream: UnixStream) -> io::Result<(UnixStream, i32)> {
    let peer = sockopt::socket_peercred(&stream)?;
    let user = rustix::process::geteuid();
    if peer.uid != user {
        return Err(io::Error::new(ErrorKind::PermissionDenied, "the other process is of another user"));
    }
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    Ok((stream, peer.pid.as_raw_nonzero().get()))
}

fn give(mut stream: UnixStream, sockets: &[OwnedFd]) -> io::Result<tokio::net::UnixStream> {
    stream.write_all(HELLO)?;
    for socket in sockets {
        let (fds, mut space) = ([socket.as_fd()], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
        let mut beside = SendAncillaryBuffer::new(&mut space);
        beside.push(SendAncillaryMessage::ScmRights(&fds));
        let said = [IoSlice::new(SOCKET)];
        let sent = retry_on_intr(|| sendmsg(&stream, &said, &mut beside, SendFlags::NOSIGNAL))?;
        stream.write_all(SOCKET.get(sent..).unwrap_or_default())?;
    }
    stream.write_all(END)?;
    stream.set_nonblocking(true)?;
    tokio::net::UnixStream::from_std(stream)
}

/// The sockets of the process before this one. Those that are not [taken](Inherited::take) are closed.
#[derive(Debug)]
pub struct Inherited {
    sockets: HashMap<SocketAddr, TcpListener>,
    stream: UnixStream,
}

impl Inherited {
    /// Waits for the process that serves to offer its sockets at this path.
    ///
    /// # Errors
    /// In words: nobody does.
    pub fn receive(path: &Path) -> Result<Self, String> {
        let until = Instant::now() + WAIT;
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(e) if Instant::now() >= until => {
                    let hint = "send SIGQUIT to the process that is to be replaced";
                    return Err(format!("nobody hands listeners over at {}: {e}; {hint}", path.display()));
                }
                Err(_) => std::thread::sleep(AGAIN),
            }
        };
        let received = ours(stream).and_then(|(stream, _)| {
            let sockets = receive(&stream)?;
            Ok(Self { sockets, stream })
        });
        received.map_err(|e| format!("the listeners of the process before: {e}"))
    }

    /// The socket that listens at this address, if there was one.
    pub fn take(&mut self, address: SocketAddr) -> Option<TcpListener> {
        self.sockets.remove(&address)
    }

    /// Says that this process serves now; returns when the one before knows, or is gone.
    pub fn serving(self) {
        let Self { sockets, mut stream } = self;
        for address in sockets.keys() {
            tracing::info!(%address, "nobody listens here any more");
        }
        let mut known = [0; KNOWN.len()];
        if let Err(e) = stream.write_all(SERVING).and_then(|()| stream.read_exact(&mut known)) {
            tracing::warn!("the process before did not answer: {e}");
        }
    }
}

fn receive(stream: &UnixStream) -> io::Result<HashMap<SocketAddr, TcpListener>> {
    let (mut said, mut sockets) = (Vec::new(), HashMap::new());
    while !said.ends_with(END) {
        let (mut bytes, mut space) = ([0; 256], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))]);
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received =
            retry_on_intr(|| recvmsg(stream, &mut [IoSliceMut::new(&mut bytes)], &mut beside, flags))?;
        if received.bytes == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        said.extend_from_slice(bytes.get(..received.bytes).unwrap_or_default());
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                for socket in fds.map(TcpListener::from) {
                    sockets.insert(socket.local_addr()?, socket);
                }
            }
        }
        if said.len() > HELLO.len() + END.len() + MOST * SOCKET.len() {
            return Err(ErrorKind::InvalidData.into());
        }
    }
    if said.starts_with(HELLO) { Ok(sockets) } else { Err(ErrorKind::InvalidData.into()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn listeners() -> (Vec<TcpListener>, Vec<SocketAddr>) {
        let listeners: Vec<_> = (0..40).map(|_| TcpListener::bind(("127.0.0.1", 0)).unwrap()).collect();
        let addresses = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
        (listeners, addresses)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn sockets_go_over_whoever_comes_first() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("upgrade");
        for old_first in [true, false] {
            let (listeners, addresses) = listeners();
            let (at, here) = (addresses.clone(), path.clone());
            let new = move || {
                let mut inherited = Inherited::receive(&here).unwrap();
                assert!(!here.exists(), "it is offered once");
                let taken: Vec<_> = at.iter().skip(1).map(|a| inherited.take(*a).unwrap()).collect();
                assert!(inherited.take(at[1]).is_none());
                (inherited, taken)
            };
            let offered = offer(&path, listeners.into_iter().map(OwnedFd::from).collect());
            let (mut successor, new) = if old_first {
                let new = async {
                    while !path.exists() {
                        tokio::task::yield_now().await;
                    }
                    let mode = fs::metadata(&path).unwrap().permissions().mode();
                    assert_eq!(mode & 0o777, 0o600);
                    tokio::task::spawn_blocking(new).await
                };
                let (offered, new) = tokio::join!(offered, new);
                (offered.unwrap(), new.unwrap())
            } else {
                let new = tokio::task::spawn_blocking(new);
                tokio::task::yield_now().await;
                (offered.await.unwrap(), new.await.unwrap())
            };
            assert_eq!(successor.pid, i32::try_from(std::process::id()).unwrap());
            let (inherited, taken) = new;
            let serving = tokio::task::spawn_blocking(|| inherited.serving());
            successor.serves(WAIT).await.unwrap();
            successor.known().await;
            serving.await.unwrap();
            // those taken still accept, the other one is closed
            for (at, address) in addresses.iter().enumerate() {
                assert_eq!(std::net::TcpStream::connect(address).is_ok(), at > 0);
            }
            drop(taken);
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_successor_that_ends_early_is_noticed_and_leftovers_do_no_harm() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("upgrade");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "left by one that was killed");
        let (listeners, addresses) = listeners();
        let fds = listeners.iter().map(|l| OwnedFd::from(l.try_clone().unwrap())).collect();
        let here = path.clone();
        let new = tokio::task::spawn_blocking(move || drop(Inherited::receive(&here).unwrap()));
        let mut successor = offer(&path, fds).await.unwrap();
        new.await.unwrap();
        assert!(successor.serves(WAIT).await.unwrap_err().contains("ended before"));
        assert!(std::net::TcpStream::connect(addresses[0]).is_ok());
        // what is no socket is not touched
        fs::write(&path, "precious").unwrap();
        assert!(offer(&path, Vec::new()).await.unwrap_err().contains("in use"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[tokio::test(start_paused = true)]
    async fn a_successor_that_hangs_is_not_waited_for_without_end() {
        let mut hangs = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let (stream, _its_own) = tokio::net::UnixStream::pair().unwrap();
        let mut successor = Successor { pid: i32::try_from(hangs.id()).unwrap(), stream };
        let why = successor.serves(Duration::from_secs(3600)).await.unwrap_err();
        assert!(why.contains("did not serve within 3600s"), "{why}");
        // it will not serve later
        assert_eq!(hangs.wait().unwrap().signal(), Some(9));
    }
}
