use std::{io, time::Duration};

use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::Interest,
    time::{Instant, timeout, timeout_at},
};

use super::{
    Endpoint, Error,
    dial::{Stream, dial},
    wire::{self, Decoder, Item, Limits},
};

const CHUNK: (usize, usize) = (4 * 1024, 128 * 1024);
const MAX_UNSENT: usize = 64 * 1024;
const MAX_PING_CONTEXT: usize = 16;

/// Deadlines and limits of a connection. No field switches a deadline off.
#[derive(Debug, Clone)]
pub struct Options {
    /// To resolve and connect, over all addresses of the name.
    pub connect_timeout: Duration,
    /// From connected to ready.
    pub handshake_timeout: Duration,
    /// Silence after which we PING (peers of ZMTP 3.1 and later only).
    pub ping_after: Duration,
    /// Silence after a PING that means death.
    pub dead_after: Duration,
    /// Idle time before TCP keepalive probes; three probes at a third of it.
    pub keepalive: Duration,
    /// For each answer of a replay.
    pub reply_timeout: Duration,
    /// The kernel's receive buffer, filled only while we lag (0: the kernel tunes it, at nearly twice
    /// the CPU per large message under a flood).
    pub recv_buffer: usize,
    /// What the peer may send.
    pub limits: Limits,
    /// The ZMTP 3 minor version we announce.
    pub minor: u8,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(3),
            handshake_timeout: Duration::from_secs(3),
            ping_after: Duration::from_secs(5),
            dead_after: Duration::from_secs(5),
            keepalive: Duration::from_secs(15),
            reply_timeout: Duration::from_secs(5),
            recv_buffer: 4 << 20,
            limits: Limits { frame: 16 << 20, message: 16 << 20, parts: 8 },
            minor: 1,
        }
    }
}

/// One ready connection in the role of SUB or DEALER.
#[derive(Debug)]
pub struct Connection {
    stream: Stream,
    buf: BytesMut,
    out: BytesMut,
    decoder: Decoder,
    options: Options,
    minor: u8,
    chunk: usize,
    grown: bool,
    flooded: bool,
    last_rx: Instant,
    pinged: Option<Instant>,
    failed: bool,
}

impl Connection {
    /// Connects as SUB and subscribes to `prefix` (empty: everything).
    pub async fn subscriber(to: &Endpoint, prefix: &[u8], options: &Options) -> Result<Self, Error> {
        let mut conn = Self::open(to, "SUB", &["PUB", "XPUB"], options).await?;
        if conn.minor >= 1 {
            wire::put_command(&mut conn.out, "SUBSCRIBE", prefix);
        } else {
            wire::put_message(&mut conn.out, &[&[b"\x01", prefix].concat()]);
        }
        conn.flush(Instant::now() + options.handshake_timeout).await?;
        Ok(conn)
    }

    /// Connects as DEALER.
    pub async fn dealer(to: &Endpoint, options: &Options) -> Result<Self, Error> {
        Self::open(to, "DEALER", &["ROUTER", "DEALER", "REP"], options).await
    }

    async fn open(to: &Endpoint, ours: &str, peers: &[&str], options: &Options) -> Result<Self, Error> {
        let by = Instant::now() + options.connect_timeout;
        let late = |_| Error::ConnectTimeout(options.connect_timeout);
        let stream = timeout_at(by, dial(to, by, options)).await.map_err(late)??;
        let mut conn = Self {
            stream,
            buf: BytesMut::new(),
            out: BytesMut::new(),
            decoder: Decoder::new(options.limits),
            options: options.clone(),
            minor: 0,
            chunk: CHUNK.0,
            grown: false,
            flooded: false,
            last_rx: Instant::now(),
            pinged: None,
            failed: false,
        };
        let late = |_| Error::HandshakeTimeout(options.handshake_timeout);
        match timeout(options.handshake_timeout, conn.handshake(ours, peers)).await.map_err(late)? {
            Ok(()) => Ok(conn),
            Err(Error::Closed | Error::Io(_)) => Err(Error::HandshakeClosed),
            Err(e) => Err(e),
        }
    }

    async fn handshake(&mut self, ours: &str, peers: &[&str]) -> Result<(), Error> {
        self.out.extend_from_slice(&wire::greeting(self.options.minor));
        let minor = loop {
            match wire::check_greeting(&self.buf)? {
                Some(minor) => break minor,
                None => self.step().await?,
            }
        };
        self.buf.advance(wire::GREETING);
        wire::put_ready(&mut self.out, ours);
        let body = loop {
            match self.decoder.decode(&mut self.buf)? {
                Some(Item::Command(body)) => break body,
                Some(Item::Message(_)) => return Err(Error::Protocol("message before READY")),
                None => self.step().await?,
            }
        };
        self.minor = minor.min(self.options.minor); // from here on we may PING
        match wire::command(&body)? {
            (b"READY", data) => match wire::socket_type(data)?.map(String::from_utf8_lossy) {
                Some(theirs) if peers.contains(&&*theirs) => Ok(()),
                theirs => Err(Error::SocketType(theirs.unwrap_or_default().chars().take(32).collect())),
            },
            (b"ERROR", data) => Err(Error::Refused(wire::reason(data))),
            _ => Err(Error::Protocol("command before READY")),
        }
    }

    /// The minor version both sides speak: 0 means no PING, only TCP keepalive.
    pub fn minor(&self) -> u8 {
        self.minor
    }

    /// The next message. Cancel-safe: dropping the future loses nothing. Must be polled for
    /// PINGs to be answered; after an error the connection is done.
    pub async fn recv(&mut self) -> Result<Vec<Bytes>, Error> {
        if self.failed {
            return Err(Error::Closed);
        }
        let got = self.recv_inner().await;
        self.failed = got.is_err();
        got
    }

    async fn recv_inner(&mut self) -> Result<Vec<Bytes>, Error> {
        loop {
            match self.decoder.decode(&mut self.buf)? {
                Some(Item::Message(parts)) => return Ok(parts),
                Some(Item::Command(body)) => self.on_command(&body)?,
                None => self.step().await?,
            }
        }
    }

    /// Sends one message. Cancel-safe: what was not sent goes out with the next call.
    pub async fn send(&mut self, parts: &[&[u8]]) -> Result<(), Error> {
        wire::put_message(&mut self.out, parts);
        self.flush(Instant::now() + self.options.dead_after).await
    }

    async fn flush(&mut self, by: Instant) -> Result<(), Error> {
        while !self.out.is_empty() {
            let ready = timeout_at(by, self.stream.ready(Interest::WRITABLE)).await;
            ready.map_err(|_| Error::Backlog(self.out.len()))??;
            self.write()?;
        }
        Ok(())
    }

    fn on_command(&mut self, body: &[u8]) -> Result<(), Error> {
        match wire::command(body)? {
            (b"PING", data) => {
                let context = data.get(2..).ok_or(Error::Protocol("PING without TTL"))?;
                let context = &context[..context.len().min(MAX_PING_CONTEXT)];
                wire::put_command(&mut self.out, "PONG", context);
                match self.out.len() {
                    unsent if unsent > MAX_UNSENT => Err(Error::Backlog(unsent)),
                    _ => Ok(()),
                }
            }
            (b"ERROR", data) => Err(Error::Refused(wire::reason(data))),
            _ => Ok(()), // PONG did its work by arriving; the rest is not for us
        }
    }

    /// Waits for the socket or the clock, once, and does what can be done.
    async fn step(&mut self) -> Result<(), Error> {
        // `ready` has no budget of its own: a flood would keep the thread for itself.
        if std::mem::take(&mut self.flooded) {
            tokio::task::yield_now().await;
        }
        tokio::task::coop::consume_budget().await;
        let want =
            if self.out.is_empty() { Interest::READABLE } else { Interest::READABLE | Interest::WRITABLE };
        let silent_at = match self.pinged {
            Some(at) => at + self.options.dead_after,
            None => self.last_rx + self.options.ping_after,
        };
        // The socket is asked before the clock, so time during which nobody polled us kills no healthy peer.
        let Ok(ready) = timeout_at(silent_at, self.stream.ready(want)).await else {
            return self.on_silence();
        };
        let ready = ready?;
        if ready.is_writable() && !self.out.is_empty() {
            self.write()?;
        }
        if ready.is_readable() || ready.is_read_closed() {
            self.read()?;
        }
        Ok(())
    }

    fn on_silence(&mut self) -> Result<(), Error> {
        if self.pinged.is_some() {
            return Err(Error::Silent(self.options.dead_after));
        }
        if self.buf.is_empty() {
            (self.buf, self.chunk, self.grown) = (BytesMut::new(), CHUNK.0, false); // idle costs nothing
        }
        if self.minor >= 1 {
            wire::put_command(&mut self.out, "PING", &[0, 0]);
            self.pinged = Some(Instant::now());
        } else {
            self.last_rx = Instant::now();
        }
        Ok(())
    }

    fn write(&mut self) -> io::Result<()> {
        match self.stream.try_write(&self.out) {
            Ok(n) => self.out.advance(n),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    fn read(&mut self) -> Result<(), Error> {
        // A frame's announced size is only a hint: room grows no faster than data has come.
        let room = self.decoder.need().min(self.buf.len()).max(self.chunk);
        if self.grown && self.buf.len() < CHUNK.1 && room <= CHUNK.1 {
            let mut small = BytesMut::with_capacity(self.buf.len() + room);
            small.extend_from_slice(&self.buf);
            (self.buf, self.grown) = (small, false);
        }
        if self.buf.capacity() - self.buf.len() < room / 2 {
            self.buf.reserve(room);
            self.grown |= self.buf.len() + room > 2 * CHUNK.1;
        }
        match self.stream.try_read_buf(&mut self.buf) {
            Ok(0) => return Err(Error::Closed),
            Ok(n) => {
                (self.last_rx, self.pinged) = (Instant::now(), None);
                self.flooded = n >= CHUNK.1;
                self.chunk = if n >= self.chunk { self.chunk * 2 } else { self.chunk.max(n * 4) / 2 };
                self.chunk = self.chunk.clamp(CHUNK.0, CHUNK.1);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e.into()),
        }
        Ok(())
    }
}
