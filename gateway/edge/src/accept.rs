//! Accepting connections.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pingora_core::apps::HttpServerApp;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::arrival::Arrival;
use crate::connection;
use crate::edge::Shared;
use crate::h1::Framer;
use crate::opening::{self, Opening};
use crate::places::Place;
use crate::refusal::{Code, Refusal, answer};
use crate::stats::Reason;
use crate::wire::Wire;

/// The wait after the system has refused a connection: short, for a file descriptor may come free at any time.
const BACK_OFF: Duration = Duration::from_millis(50);
/// How long a client may be silent before the system asks whether it is still there, how often, and how many times.
const SILENCE: Duration = Duration::from_secs(60);
const ASK_AGAIN: Duration = Duration::from_secs(15);
const ASK_TIMES: u32 = 4;
/// How long a client has to read that there is no place for it.
const LINGER: Duration = Duration::from_secs(1);

/// Accepts until it is told not to, and then whoever waits already: closing the socket would reset them.
pub(crate) async fn accept<A>(
    shared: Arc<Shared<A>>,
    index: usize,
    socket: TcpListener,
    opening: Arc<Opening>,
    mut accepts: watch::Receiver<bool>,
) where
    A: HttpServerApp + Send + Sync + 'static,
{
    let Some(stats) = shared.stats.listeners().get(index) else { return };
    let (mut failures, mut refusals) = (Seldom::default(), Seldom::default());
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            _ = accepts.wait_for(|accepts| !accepts) => break,
        };
        match accepted {
            Ok((stream, peer)) => admit(&shared, index, &opening, stream, peer, &mut refusals),
            Err(e) if is_of_the_connection(&e) => {}
            Err(e) => {
                stats.failed.fetch_add(1, Ordering::Relaxed);
                failures
                    .say(|| tracing::warn!(listener = stats.name(), "no connection can be accepted: {e}"));
                tokio::time::sleep(BACK_OFF).await;
            }
        }
    }
    // what the runtime knows of the socket may be older than who waits there
    let Ok(socket) = socket.into_std() else { return };
    loop {
        match socket.accept() {
            Ok((stream, peer)) => {
                if let Ok(stream) = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) {
                    admit(&shared, index, &opening, stream, peer, &mut refusals);
                }
            }
            Err(e) if is_of_the_connection(&e) => {}
            Err(_) => return,
        }
        tokio::task::yield_now().await;
    }
}

/// Serves a connection in a task of its own, if there is a place.
fn admit<A>(
    shared: &Arc<Shared<A>>,
    index: usize,
    opening: &Arc<Opening>,
    stream: TcpStream,
    peer: SocketAddr,
    refusals: &mut Seldom,
) where
    A: HttpServerApp + Send + Sync + 'static,
{
    let Some(stats) = shared.stats.listeners().get(index) else { return };
    stats.accepted.fetch_add(1, Ordering::Relaxed);
    // whose connection a balancer's is, its header tells
    let client = opening.proxies.is_none().then_some(peer.ip());
    match shared.places.take(client) {
        Ok(place) => {
            let (mut open, opening) = (Open::new(shared.clone(), index, place), opening.clone());
            tokio::spawn(async move {
                if let Some(local) = prepare(&stream) {
                    let opened = open_in_time(&mut open, &opening, stream, peer, local).await;
                    drop(opening);
                    if let Some(arrival) = opened {
                        connection::run(open.shared.clone(), index, arrival).await;
                    }
                }
                drop(open);
            });
        }
        Err(reason) => {
            stats.refuse(reason);
            // who speaks TLS, or comes by a balancer, would not understand
            if opening.is_plain() {
                turn_away(shared, stream);
            }
            refusals.say(|| {
                tracing::warn!(listener = stats.name(), reason = reason.name(), "connections are refused");
            });
        }
    }
}

/// Tells a client that there is no place for it, if not too many are being told already.
fn turn_away<A>(shared: &Shared<A>, stream: TcpStream)
where
    A: HttpServerApp + Send + Sync + 'static,
{
    let Ok(permit) = shared.turning_away.clone().try_acquire_owned() else { return };
    let refusal = Refusal { code: Code::OVERLOADED, why: "there are too many connections" };
    let text = answer(refusal, &(shared.refused)(refusal));
    let wire = Wire::new(Box::new(stream), Framer::new(shared.config.requests));
    tokio::spawn(async move {
        wire.lock().answer(&text);
        let _ = timeout(LINGER, wire.linger()).await;
        drop(permit);
    });
}

/// Brings the transport up within the deadline of the first request's head.
async fn open_in_time<A>(
    open: &mut Open<A>,
    opening: &Opening,
    stream: TcpStream,
    peer: SocketAddr,
    local: SocketAddr,
) -> Option<Arrival> {
    let limit = open.shared.config.head;
    // its state is large, and needed for a moment
    let opened = Box::pin(opening::open(opening, stream, peer, local, &mut open.place));
    let reason = match timeout(limit, opened).await {
        Ok(Ok(arrival)) => return Some(arrival),
        Ok(Err(reason)) => reason,
        Err(_) => Reason::Slow,
    };
    if let Some(stats) = open.shared.stats.listeners().get(open.index) {
        stats.refuse(reason);
    }
    None
}

/// Sets the socket up; returns its own address.
fn prepare(stream: &TcpStream) -> Option<SocketAddr> {
    stream.set_nodelay(true).ok()?;
    let keepalive = TcpKeepalive::new().with_time(SILENCE).with_interval(ASK_AGAIN).with_retries(ASK_TIMES);
    SockRef::from(stream).set_tcp_keepalive(&keepalive).ok()?;
    stream.local_addr().ok()
}

/// Whether an error tells of the one connection that was to be accepted: the next may be well.
fn is_of_the_connection(e: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(e.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// A connection that is counted as open until this is dropped, be it by a panic.
struct Open<A> {
    shared: Arc<Shared<A>>,
    index: usize,
    place: Place,
}

impl<A> Open<A> {
    fn new(shared: Arc<Shared<A>>, index: usize, place: Place) -> Self {
        if let Some(stats) = shared.stats.listeners().get(index) {
            stats.open.fetch_add(1, Ordering::AcqRel);
        }
        Self { shared, index, place }
    }
}

impl<A> Drop for Open<A> {
    fn drop(&mut self) {
        self.place.give_back();
        if let Some(stats) = self.shared.stats.listeners().get(self.index) {
            stats.open.fetch_sub(1, Ordering::AcqRel);
        }
        self.shared.ended.notify_waiters();
    }
}

/// Says something once a second at most.
#[derive(Default)]
struct Seldom(Option<Instant>);

impl Seldom {
    fn say(&mut self, say: impl FnOnce()) {
        let now = Instant::now();
        if self.0.is_none_or(|last| now - last >= Duration::from_secs(1)) {
            self.0 = Some(now);
            say();
        }
    }
}
