//! From serving to the end: nobody is cut who can be served, and nobody is left without a word.

use std::future::{Future, pending};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kvgate_edge::{Edge, LAST_CALL};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::{Notifier, Stage, Successor, offer};
use crate::admin::Admin;
use crate::world::World;

/// How long clients whose time is over have to take the word that it is.
const LAST_WORDS: Duration = Duration::from_millis(700);
/// How long connections may take to close after that.
const CLOSING: Duration = Duration::from_millis(250);
/// How long a process that was succeeded keeps connections for another request: clients that ask again and again are
/// told on an answer that it is the last one, and never find their connection closed.
const SUCCEEDED: Duration = Duration::from_secs(5);

/// How long a new process may take to serve, beside its `server.warm_up`.
const STARTING: Duration = Duration::from_secs(60);

/// The signals that end the process, taken over from the system.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    quit: Signal,
}

impl Signals {
    /// Takes them over. Wants a runtime that lives as long as the process.
    ///
    /// # Errors
    /// The system does not let go of them.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
        })
    }

    /// Waits until somebody wants the end at once: whoever interrupts, or tells it again to terminate.
    async fn insisted(&mut self, mut told: bool) {
        loop {
            tokio::select! {
                _ = self.interrupt.recv() => return,
                _ = self.terminate.recv() => {
                    if std::mem::replace(&mut told, true) {
                        return;
                    }
                    tracing::info!("told to stop: it is leaving already");
                }
            }
        }
    }
}

/// What is to be ended.
pub struct Cycle {
    /// What is served.
    pub world: Arc<World>,
    /// Where clients connect.
    pub edge: Edge,
    /// The listening sockets, of clients and of the admin surface, to be handed over.
    pub sockets: Vec<TcpListener>,
    /// The admin surface.
    pub admin: Admin,
    /// Who is told.
    pub notifier: Arc<Notifier>,
    /// True, or gone: it ends at once.
    pub stopped: watch::Receiver<bool>,
}

type Handover = Pin<Box<dyn Future<Output = Result<Successor, String>> + Send>>;

impl Cycle {
    /// Serves until it is told to end; without signals it can be told by its owner alone.
    pub async fn run(mut self, signals: Option<Signals>) {
        let mut stopped = self.stopped.clone();
        let lives = self.live(signals);
        tokio::select! {
            () = lives => {}
            _ = stopped.wait_for(|stop| *stop) => {}
        }
        self.edge.stop_accepting();
    }

    async fn live(&mut self, signals: Option<Signals>) {
        let Some(mut signals) = signals else { return pending().await };
        let mut handover: Option<Handover> = None;
        let successor = loop {
            tokio::select! {
                _ = signals.interrupt.recv() => return,
                _ = signals.terminate.recv() => break None,
                _ = signals.quit.recv(), if handover.is_none() => handover = self.hand_over(),
                found = awaited(&mut handover) => match found {
                    Ok(successor) => break Some(successor),
                    Err(why) => {
                        tracing::error!("nobody has taken over, and this process serves on: {why}");
                        handover = None;
                    }
                },
            }
        };
        drop(handover);
        let told = successor.is_none();
        tokio::select! {
            () = self.leave(successor) => {}
            () = signals.insisted(told) => tracing::warn!(requests = self.world.life.requests(), "told again: it ends at once"),
        }
    }

    /// Offers the sockets to a new process, and waits until that serves.
    fn hand_over(&self) -> Option<Handover> {
        let server = self.world.plan.load().gateway.server.clone();
        let Some(path) = server.upgrade_socket else {
            tracing::error!(
                "SIGQUIT is for upgrades, which want `server.upgrade_socket`: this process serves on"
            );
            return None;
        };
        let sockets: std::io::Result<Vec<_>> =
            self.sockets.iter().map(|socket| socket.try_clone().map(OwnedFd::from)).collect();
        tracing::info!(path = %path.display(), "listeners are offered: start `kvgate run --upgrade`");
        Some(Box::pin(async move {
            let sockets = sockets.map_err(|e| format!("the listeners cannot be copied: {e}"))?;
            let mut successor = offer(&path, sockets).await?;
            tracing::info!(pid = successor.pid, "the new process has the listeners");
            successor.serves(server.warm_up.saturating_add(STARTING)).await?;
            Ok(successor)
        }))
    }

    /// Lets everybody go.
    async fn leave(&mut self, successor: Option<Successor>) {
        let life = self.world.life.clone();
        let times = self.world.plan.load().gateway.server.clone();
        let delay = match successor {
            Some(successor) => {
                self.edge.stop_accepting();
                self.sockets.clear();
                // first, for whoever asks whether traffic may be sent here must ask the new process, and not hear of the end
                self.admin.close(CLOSING).await;
                life.reach(Stage::Leaving);
                tracing::info!(
                    pid = successor.pid,
                    requests = life.requests(),
                    "another process has taken over"
                );
                self.notifier.succeeded_by(successor.pid);
                successor.known().await;
                times.drain_delay.max(SUCCEEDED)
            }
            None => {
                tracing::info!(delay = ?times.drain_delay, grace = ?times.grace_period, "told to stop");
                life.reach(Stage::Leaving);
                self.notifier.stopping();
                times.drain_delay
            }
        };
        sleep(delay).await;
        life.reach(Stage::Draining);
        self.sockets.clear();
        self.edge.drain();
        // requests that were on their way are under way by then
        sleep(2 * LAST_CALL).await;
        if timeout(times.grace_period, life.idle()).await.is_err() {
            tracing::warn!(
                requests = life.requests(),
                "the grace period is over: requests under way are ended"
            );
            life.reach(Stage::Ending);
            self.edge.end_tunnels();
            if timeout(LAST_WORDS, life.idle()).await.is_err() {
                tracing::warn!(requests = life.requests(), "requests are cut whose clients do not listen");
            }
        }
        let _ = timeout(CLOSING, self.edge.closed()).await;
        tracing::info!("nobody is served any more");
    }
}

/// What became of it, if it is under way.
async fn awaited(handover: &mut Option<Handover>) -> Result<Successor, String> {
    match handover {
        Some(handover) => handover.await,
        None => pending().await,
    }
}
