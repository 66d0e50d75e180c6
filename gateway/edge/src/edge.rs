//! The listeners of a process and their connections.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use pingora_core::apps::HttpServerApp;
use tokio::sync::{Notify, Semaphore, watch};

use crate::accept::accept;
use crate::h1::Limits;
use crate::listen::Listener;
use crate::places::Places;
use crate::refusal::Refusal;
use crate::serve_h2::Http2;
use crate::stats::Stats;

/// Clients beyond the limits that are told so at once; more see their connection closed.
const TURNING_AWAY: usize = 64;

/// What connections may take up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Connections at once.
    pub connections: usize,
    /// Connections of one client at once; 0: no limit.
    pub connections_per_address: usize,
    /// From the first byte of a request to the end of its head; of a connection's first, from its acceptance on.
    pub head: Duration,
    /// Between two requests.
    pub keep_alive: Duration,
    /// What a request's head may take up.
    pub requests: Limits,
    /// What an HTTP/2 connection may take up.
    pub http2: Http2,
}

/// Told of every refusal of bytes that are no request; returns the request id for the answer.
pub type Refused = Arc<dyn Fn(Refusal) -> String + Send + Sync>;

/// What all connections have in common.
pub(crate) struct Shared<A> {
    pub app: Arc<A>,
    pub config: Config,
    pub places: Arc<Places>,
    pub stats: Arc<Stats>,
    pub refused: Refused,
    /// For clients that are being told that there is no place for them.
    pub turning_away: Arc<Semaphore>,
    /// True: no connection outlives its answer.
    pub draining: watch::Receiver<bool>,
    /// True: tunnels are closed.
    pub ending: watch::Receiver<bool>,
    /// Told whenever a connection ends.
    pub ended: Notify,
}

/// The listeners of a process and their connections. When it is dropped, they [drain](Edge::drain).
pub struct Edge {
    accepting: watch::Sender<bool>,
    draining: watch::Sender<bool>,
    ending: watch::Sender<bool>,
    stats: Arc<Stats>,
    ended: Arc<dyn Ended>,
}

trait Ended: Send + Sync {
    fn ended(&self) -> &Notify;
}

impl<A: Send + Sync> Ended for Shared<A> {
    fn ended(&self) -> &Notify {
        &self.ended
    }
}

impl Edge {
    /// Accepts on all listeners, and serves what comes with the app, on the runtime this is called in. `stats` must
    /// know the listeners, in this order.
    ///
    /// # Errors
    /// A socket cannot be taken into the runtime.
    pub fn start<A>(
        app: Arc<A>,
        listeners: Vec<Listener>,
        config: Config,
        stats: Arc<Stats>,
        refused: Refused,
    ) -> io::Result<Self>
    where
        A: HttpServerApp + Send + Sync + 'static,
    {
        let (accepting, accepts) = watch::channel(true);
        let (draining, drains) = watch::channel(false);
        let (ending, ends) = watch::channel(false);
        let shared = Arc::new(Shared {
            app,
            places: Arc::new(Places::new(config.connections, config.connections_per_address)),
            config,
            stats: stats.clone(),
            refused,
            turning_away: Arc::new(Semaphore::new(TURNING_AWAY)),
            draining: drains,
            ending: ends,
            ended: Notify::new(),
        });
        for (index, listener) in listeners.into_iter().enumerate() {
            listener.socket.set_nonblocking(true)?;
            let socket = tokio::net::TcpListener::from_std(listener.socket)?;
            let opening = Arc::new(listener.opening);
            tokio::spawn(accept(shared.clone(), index, socket, opening, accepts.clone()));
        }
        Ok(Self { accepting, draining, ending, stats, ended: shared })
    }

    /// Closes the listeners when who waits to be accepted is: whoever connects then is refused, unless another process
    /// holds the same sockets.
    pub fn stop_accepting(&self) {
        let _ = self.accepting.send(false);
    }

    /// Stops accepting; connections that wait for a request are closed if none comes within
    /// [`LAST_CALL`](crate::LAST_CALL), all others after the answer they are at.
    pub fn drain(&self) {
        self.stop_accepting();
        let _ = self.draining.send(true);
    }

    /// Closes connections that have gone over to another protocol: a TCP end to both sides, since nobody here knows what
    /// word of theirs would end it. The app's request is dropped.
    pub fn end_tunnels(&self) {
        let _ = self.ending.send(true);
    }

    /// Connections that are open now.
    pub fn open(&self) -> u64 {
        self.stats.open()
    }

    /// Waits until no connection is open: up to two seconds after the last answer if its client does not close.
    pub async fn closed(&self) {
        loop {
            let ended = self.ended.ended().notified();
            tokio::pin!(ended);
            // from here on no end is missed
            ended.as_mut().enable();
            if self.open() == 0 {
                return;
            }
            ended.await;
        }
    }
}
