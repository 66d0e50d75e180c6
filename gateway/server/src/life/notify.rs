//! Telling the service manager how it goes, as systemd has it
//! (<https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html>). Without one, nothing is told.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Where the service manager listens.
#[derive(Debug, Default)]
pub struct Notifier {
    to: Option<(UnixDatagram, SocketAddr)>,
    /// How often it wants to hear that we live.
    every: Option<Duration>,
    ready: AtomicBool,
    succeeded: AtomicBool,
}

impl Notifier {
    /// As the environment has it.
    pub fn from_environment() -> Self {
        let named = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty());
        let to = named.and_then(|name| {
            let found = address(name.as_bytes()).and_then(|address| Ok((UnixDatagram::unbound()?, address)));
            found.inspect_err(|e| tracing::warn!("the service manager cannot be told: {e}")).ok()
        });
        let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
        // WATCHDOG_PID is not looked at: it names the process that the manager started, which is a shell, or the one that
        // this takes over from; and kvgate starts no process that would inherit the variables
        let every = number("WATCHDOG_USEC").filter(|n| *n > 0).map(Duration::from_micros);
        Self { to, every, ..Self::default() }
    }

    /// It serves, and knows what it has to.
    pub fn ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
        self.tell("READY=1");
    }

    /// It reads its configuration again, from now until [`Notifier::reloaded`].
    pub fn reloading(&self) {
        if self.ready.load(Ordering::Relaxed) {
            let now = clock_gettime(ClockId::Monotonic);
            let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1_000;
            self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
        }
    }

    /// It has read it, and put it in force or not.
    pub fn reloaded(&self, good: bool) {
        if self.ready.load(Ordering::Relaxed) {
            let status = if good { "" } else { "the configuration on disk is refused: see the log" };
            self.tell(&format!("READY=1\nSTATUS={status}"));
        }
    }

    /// It serves what is under way, and ends.
    pub fn stopping(&self) {
        self.ready.store(false, Ordering::Relaxed);
        self.tell("STOPPING=1");
    }

    /// Another process has taken over, and shows that it lives itself.
    pub fn succeeded_by(&self, pid: i32) {
        self.succeeded.store(true, Ordering::Relaxed);
        self.ready.store(false, Ordering::Relaxed);
        self.tell(&format!("MAINPID={pid}"));
    }

    /// It lives; to be called at least as often as [`Notifier::every`] says.
    pub fn alive(&self) {
        if self.every.is_some() && !self.succeeded.load(Ordering::Relaxed) {
            self.tell("WATCHDOG=1");
        }
    }

    /// How often it is to be called: half of the time after which it is taken for dead.
    pub fn every(&self) -> Option<Duration> {
        self.every.map(|every| every / 2)
    }

    fn tell(&self, what: &str) {
        let Some((socket, address)) = &self.to else { return };
        if let Err(e) = socket.send_to_addr(what.as_bytes(), address) {
            tracing::debug!(what, "the service manager was not told: {e}");
        }
    }
}

/// A path, or with `@` a name that no file has.
fn address(name: &[u8]) -> io::Result<SocketAddr> {
    match name.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_sockets_with_and_without_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("notify");
        let names = [
            file.as_os_str().as_bytes().to_owned(),
            format!("@kvgate-test-{}", std::process::id()).into_bytes(),
        ];
        for name in names {
            let listens = UnixDatagram::bind_addr(&address(&name).unwrap()).unwrap();
            let to = Some((UnixDatagram::unbound().unwrap(), address(&name).unwrap()));
            let notifier = Notifier { to, every: Some(Duration::from_secs(4)), ..Notifier::default() };
            let heard = || {
                let mut buffer = [0; 256];
                let n = listens.recv(&mut buffer).unwrap();
                String::from_utf8(buffer[..n].to_vec()).unwrap()
            };
            // a reload before it is ready must not make it so
            notifier.reloading();
            notifier.reloaded(true);
            notifier.ready();
            assert_eq!(heard(), "READY=1");
            notifier.reloading();
            assert!(heard().starts_with("RELOADING=1\nMONOTONIC_USEC="));
            notifier.reloaded(false);
            assert!(heard().starts_with("READY=1\nSTATUS=the configuration"));
            notifier.alive();
            assert_eq!((heard().as_str(), notifier.every()), ("WATCHDOG=1", Some(Duration::from_secs(2))));
            notifier.succeeded_by(7);
            notifier.alive();
            notifier.stopping();
            assert_eq!((heard().as_str(), heard().as_str()), ("MAINPID=7", "STOPPING=1"));
        }
        let nobody = Notifier::default();
        nobody.ready();
        nobody.alive();
        assert_eq!(nobody.every(), None);
    }
}
