use std::{
    future::Future,
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::{
    sync::{
        OwnedSemaphorePermit, Semaphore,
        mpsc::{Permit, PermitIterator, Sender, error::SendError},
    },
    task::JoinHandle,
    time::timeout,
};

use super::{Connection, Endpoint, Error, Options};

/// How long a full queue stops the reading before messages are dropped; spent patience grows back at a
/// twentieth of the time that passes.
const PATIENCE: Duration = Duration::from_millis(50);
const OVERFLOW_EVERY: Duration = Duration::from_millis(100);
/// What a queued message costs besides its bytes.
const OVERHEAD: usize = 256;

/// What a [`Subscription`] reports. Order: `Connected`, then `Message` and `Overflow`, then `Disconnected`.
#[derive(Debug)]
pub enum Event {
    /// Handshake done and subscription sent.
    Connected {
        /// See [`Connection::minor`].
        minor: u8,
    },
    /// One message.
    Message(Message),
    /// Messages dropped here because the consumer lags, since the last such report.
    Overflow {
        /// How many.
        dropped: u64,
    },
    /// An attempt failed, or a connection ended.
    Disconnected {
        /// Why.
        reason: Error,
        /// Whether this ended a connection reported as `Connected`.
        was_connected: bool,
        /// When the next attempt starts.
        retry_in: Duration,
    },
}

/// A message's parts. While it lives it counts against its subscription's budget.
#[derive(Debug)]
pub struct Message {
    /// The parts, in order; at least one.
    pub parts: Vec<Bytes>,
    _charge: OwnedSemaphorePermit,
}

/// How long to wait between attempts: doubled each time, jittered by half.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    /// After the first failure.
    pub first: Duration,
    /// At most. A connection that lived this long is made again at once, after which waits start over at `first`.
    pub max: Duration,
}

/// Options of a [`Subscription`].
#[derive(Debug, Clone)]
pub struct SubscriptionOptions {
    /// Of each connection.
    pub connection: Options,
    /// Topic prefix; empty for everything.
    pub prefix: Bytes,
    /// Between attempts.
    pub backoff: Backoff,
    /// Bytes of messages that the consumer has not yet dropped, 256 added for each.
    pub queued_bytes: u32,
}

impl Default for SubscriptionOptions {
    fn default() -> Self {
        Self {
            connection: Options::default(),
            prefix: Bytes::new(),
            backoff: Backoff { first: Duration::from_millis(200), max: Duration::from_secs(5) },
            queued_bytes: 32 << 20,
        }
    }
}

/// A supervised subscription: one task, which dropping it ends.
///
/// A lagging consumer does not make the publisher queue in the engine's memory: after a moment's grace the
/// task reads on, drops, and says how much.
#[derive(Debug)]
pub struct Subscription(JoinHandle<()>);

impl Subscription {
    /// Starts to follow `to`, which need not exist yet, on the current runtime. Ends by itself when `events`
    /// is closed. Give `events` room for 2 at least.
    pub fn spawn(to: Endpoint, options: SubscriptionOptions, events: Sender<Event>) -> Self {
        Self(tokio::spawn(async move {
            tokio::select! {
                () = run(&to, &options, &events) => {}
                () = events.closed() => {}
            }
        }))
    }

    /// Ends the task and waits until its socket is closed.
    pub async fn stop(mut self) {
        self.0.abort();
        let _ = (&mut self.0).await;
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn run(to: &Endpoint, options: &SubscriptionOptions, events: &Sender<Event>) {
    let Backoff { first, max } = options.backoff;
    let budget = Arc::new(Semaphore::new(options.queued_bytes as usize));
    let mut delay = first;
    loop {
        let (reason, lived) = match Connection::subscriber(to, &options.prefix, &options.connection).await {
            Err(reason) => (reason, None),
            Ok(conn) => {
                let start = Instant::now();
                let reason = follow(conn, options.queued_bytes, &budget, events).await;
                (reason, Some(start.elapsed()))
            }
        };
        let retry_in = if lived.is_some_and(|lived| lived >= max) {
            delay = first;
            Duration::ZERO
        } else {
            let wait = jitter(delay);
            delay = (delay * 2).min(max);
            wait
        };
        let until = tokio::time::Instant::now() + retry_in;
        let gone = Event::Disconnected { reason, was_connected: lived.is_some(), retry_in };
        if events.send(gone).await.is_err() {
            return;
        }
        tokio::time::sleep_until(until).await;
    }
}

/// How long a lagging consumer is waited for: mere bursts cost nothing, but under a lasting flood the socket is
/// read nearly all the time.
struct Patience {
    left: Duration,
    since: Instant,
}

impl Patience {
    fn new() -> Self {
        Patience { left: PATIENCE, since: Instant::now() }
    }

    async fn wait<T>(&mut self, wanted: impl Future<Output = Option<T>>) -> Option<T> {
        let start = Instant::now();
        let left = (self.left + (start - self.since) / 20).min(PATIENCE);
        // no timer is finer
        let got = match left < Duration::from_millis(1) {
            true => None,
            false => timeout(left, wanted).await.ok().flatten(),
        };
        self.since = Instant::now();
        self.left = left.saturating_sub(self.since - start);
        got
    }
}

/// Delivers until the connection ends. Waits for a lagging consumer only a moment.
async fn follow(mut conn: Connection, most: u32, budget: &Arc<Semaphore>, events: &Sender<Event>) -> Error {
    let (mut announced, mut dropped, mut patience) = (false, 0, Patience::new());
    let mut report_at = tokio::time::Instant::now();
    let reason = loop {
        let parts = tokio::select! {
            biased;
            Ok(room) = events.reserve(), if !announced => {
                room.send(Event::Connected { minor: conn.minor() });
                announced = true;
                continue;
            }
            Ok(room) = reserve_at(events, report_at), if dropped > 0 && announced => {
                room.send(Event::Overflow { dropped: std::mem::take(&mut dropped) });
                report_at = tokio::time::Instant::now() + OVERFLOW_EVERY;
                continue;
            }
            got = conn.recv() => match got {
                Ok(parts) => parts,
                Err(reason) => break reason,
            },
        };
        let bytes = parts.iter().map(Bytes::len).sum::<usize>() + OVERHEAD;
        let cost = u32::try_from(bytes).unwrap_or(u32::MAX).min(most); // one message always fits
        let slots = 1 + usize::from(dropped > 0);
        let admitted = match try_admit(events, slots, budget, cost) {
            _ if !announced => None,
            None => patience.wait(admit(events, slots, budget, cost)).await,
            now => now,
        };
        let Some((mut room, charge)) = admitted else {
            dropped += 1;
            continue;
        };
        let lost = (dropped > 0).then(|| Event::Overflow { dropped: std::mem::take(&mut dropped) });
        let message = Event::Message(Message { parts, _charge: charge });
        for (event, room) in lost.into_iter().chain([message]).zip(&mut room) {
            room.send(event);
        }
    };
    drop(conn);
    if dropped > 0 {
        let _ = events.send(Event::Overflow { dropped }).await;
    }
    reason
}

type Admission<'a, T> = Option<(PermitIterator<'a, T>, OwnedSemaphorePermit)>;

fn try_admit<'a, T>(
    events: &'a Sender<T>,
    slots: usize,
    budget: &Arc<Semaphore>,
    cost: u32,
) -> Admission<'a, T> {
    let charge = budget.clone().try_acquire_many_owned(cost).ok()?;
    Some((events.try_reserve_many(slots).ok()?, charge))
}

async fn admit<'a, T>(
    events: &'a Sender<T>,
    slots: usize,
    budget: &Arc<Semaphore>,
    cost: u32,
) -> Admission<'a, T> {
    let charge = budget.clone().acquire_many_owned(cost).await.ok()?;
    Some((events.reserve_many(slots).await.ok()?, charge))
}

async fn reserve_at<T>(events: &Sender<T>, at: tokio::time::Instant) -> Result<Permit<'_, T>, SendError<()>> {
    tokio::time::sleep_until(at).await;
    events.reserve().await
}

/// Between half of `delay` and all of it.
fn jitter(delay: Duration) -> Duration {
    let random = RandomState::new().hash_one(Instant::now()) as u32;
    delay / 2 + (delay / 2).mul_f64(f64::from(random) / f64::from(u32::MAX))
}
