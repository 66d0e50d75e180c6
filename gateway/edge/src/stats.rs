//! What is counted, from the first second on.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a connection was not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// There are as many as there may be.
    Total,
    /// Its client has as many as one may have.
    PerAddress,
    /// It begins without a PROXY header that can be read, or comes from where none is taken.
    ProxyHeader,
    /// No TLS can be agreed on.
    Handshake,
    /// Its PROXY header or its TLS handshake takes too long.
    Slow,
    /// It sends too many HTTP/2 frames that carry no request.
    Flood,
}

impl Reason {
    /// All of them.
    pub const ALL: [Reason; 6] =
        [Self::Total, Self::PerAddress, Self::ProxyHeader, Self::Handshake, Self::Slow, Self::Flood];

    /// The label of its counter.
    pub fn name(self) -> &'static str {
        match self {
            Self::Total => "total",
            Self::PerAddress => "per_address",
            Self::ProxyHeader => "proxy_header",
            Self::Handshake => "handshake",
            Self::Slow => "slow",
            Self::Flood => "flood",
        }
    }
}

/// The counts of all listeners.
#[derive(Debug)]
pub struct Stats {
    listeners: Vec<ListenerStats>,
}

/// The counts of one.
#[derive(Debug)]
pub struct ListenerStats {
    name: String,
    pub(crate) accepted: AtomicU64,
    pub(crate) open: AtomicU64,
    pub(crate) failed: AtomicU64,
    refused: [AtomicU64; Reason::ALL.len()],
}

impl Stats {
    /// For the listeners of these names.
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let listener = |name: &str| ListenerStats {
            name: name.to_owned(),
            accepted: AtomicU64::new(0),
            open: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            refused: Default::default(),
        };
        Self { listeners: names.into_iter().map(listener).collect() }
    }

    /// The listeners, in the order they were named.
    pub fn listeners(&self) -> &[ListenerStats] {
        &self.listeners
    }

    /// Connections that are open now, on all.
    pub fn open(&self) -> u64 {
        self.listeners.iter().map(ListenerStats::open).sum()
    }
}

impl ListenerStats {
    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Connections that were accepted, those included that were refused at once.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Connections that are being served now.
    pub fn open(&self) -> u64 {
        self.open.load(Ordering::Acquire)
    }

    /// Times that the system refused to give a connection, as when there were no file descriptors left.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Connections that were refused for this reason.
    pub fn refused(&self, reason: Reason) -> u64 {
        self.cell(reason).load(Ordering::Relaxed)
    }

    pub(crate) fn refuse(&self, reason: Reason) {
        self.cell(reason).fetch_add(1, Ordering::Relaxed);
    }

    fn cell(&self, reason: Reason) -> &AtomicU64 {
        let [total, per_address, proxy_header, handshake, slow, flood] = &self.refused;
        match reason {
            Reason::Total => total,
            Reason::PerAddress => per_address,
            Reason::ProxyHeader => proxy_header,
            Reason::Handshake => handshake,
            Reason::Slow => slow,
            Reason::Flood => flood,
        }
    }
}
