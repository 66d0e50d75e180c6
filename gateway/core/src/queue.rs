//! Requests that wait for a place on an engine.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use futures::channel::oneshot;

use crate::engine::{Engine, EngineId};
use crate::lease::Lease;
use crate::metrics::Gauge;

/// Numbers tickets in the order of their arrival, over all queues of the process.
static ARRIVALS: AtomicU64 = AtomicU64::new(0);

/// The first-come-first-served queue of one rule and role. A place that comes free goes to the first who accepts it;
/// a ticket that is dropped leaves at once.
#[derive(Debug)]
pub struct Queue {
    state: Mutex<State>,
    length: Arc<Gauge>,
}

#[derive(Debug, Default)]
struct State {
    waiting: BTreeMap<u64, Waiter>,
    /// How many wait of each tenant.
    tenants: HashMap<u64, usize>,
}

#[derive(Debug)]
struct Waiter {
    tenant: u64,
    accepts: Arc<[Seat]>,
    tell: oneshot::Sender<Grant>,
}

/// Where a waiting request may go.
#[derive(Clone, Debug)]
pub struct Seat {
    /// The engine.
    pub engine: Arc<Engine>,
    /// It is full with so many in flight. Who waits for it goes by what this says now: a cap may change meanwhile.
    pub cap: Arc<AtomicU64>,
}

impl Seat {
    /// With so many in flight it is full.
    pub fn cap(&self) -> u64 {
        self.cap.load(Ordering::Relaxed)
    }

    fn has_room(&self) -> bool {
        self.engine.in_flight() < self.cap()
    }
}

/// How many may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// All together.
    pub total: usize,
    /// Of one tenant.
    pub tenant: usize,
}

/// Why a request may not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// Too many wait.
    Queue,
    /// Too many wait of its tenant.
    Tenant,
}

impl Queue {
    /// An empty queue that shows its length in `length`.
    pub fn new(length: Arc<Gauge>) -> Self {
        length.set(0);
        Self { state: Mutex::default(), length }
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.lock().waiting.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the last place in the queue, to wait for one of the seats in `accepts`; every engine among them must
    /// [serve](Engine::serve_queue) this queue. A seat that is free already, and that nobody before accepts, is granted
    /// at once: no slot freed in between is lost.
    ///
    /// # Errors
    /// When as many wait as `depth` allows.
    pub fn enter(self: &Arc<Self>, accepts: Arc<[Seat]>, tenant: u64, depth: Depth) -> Result<Ticket, Full> {
        let mut state = self.lock();
        if state.waiting.len() >= depth.total {
            return Err(Full::Queue);
        }
        if state.tenants.get(&tenant).is_some_and(|waiting| *waiting >= depth.tenant) {
            return Err(Full::Tenant);
        }
        *state.tenants.entry(tenant).or_default() += 1;
        let id = ARRIVALS.fetch_add(1, Ordering::Relaxed);
        let (tell, told) = oneshot::channel();
        state.waiting.insert(id, Waiter { tenant, accepts: accepts.clone(), tell });
        accepts.iter().filter(|seat| seat.has_room()).for_each(|seat| state.serve(&seat.engine));
        self.length.set(state.waiting.len() as u64);
        drop(state);
        Ok(Ticket { id, queue: self.clone(), accepts, told })
    }

    /// Those of `seats` that a newcomer may take: they have room, and nobody who waits accepts them. Who waits is
    /// served first.
    pub fn open<'s>(&self, seats: impl Iterator<Item = (usize, &'s Seat)>) -> crate::Mask {
        let mut state = self.lock();
        let open = seats.filter(|(_, seat)| {
            seat.has_room() && {
                state.serve(&seat.engine);
                seat.has_room() && state.first(seat.engine.id()).is_none()
            }
        });
        let open = open.map(|(at, _)| at).collect();
        self.length.set(state.waiting.len() as u64);
        open
    }

    /// Gives the free places of `engine` to those who wait for it.
    pub fn serve(&self, engine: &Arc<Engine>) {
        let mut state = self.lock();
        if !state.waiting.is_empty() {
            state.serve(engine);
            self.length.set(state.waiting.len() as u64);
        }
    }

    /// When the first in the queue arrived, as a number that grows; the last number when nobody waits.
    pub(crate) fn oldest(&self) -> u64 {
        self.lock().waiting.first_key_value().map_or(u64::MAX, |(id, _)| *id)
    }

    fn leave(&self, id: u64) {
        let mut state = self.lock();
        state.remove(id);
        self.length.set(state.waiting.len() as u64);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The first who accepts the engine, and up to how many in flight.
    fn first(&self, engine: EngineId) -> Option<(u64, u64)> {
        self.waiting.iter().find_map(|(id, waiter)| {
            let seat = waiter.accepts.iter().find(|seat| seat.engine.id() == engine)?;
            Some((*id, seat.cap()))
        })
    }

    fn serve(&mut self, engine: &Arc<Engine>) {
        while engine.takes_new(Instant::now())
            && let Some((id, cap)) = self.first(engine.id())
            && let Some(lease) = Lease::try_take(engine, Some(cap))
        {
            // Whoever waits leaves the queue, under its lock, before it stops listening: this does not fail. A lease
            // that ended here would want the lock.
            let told = match self.remove(id) {
                Some(waiter) => waiter.tell.send(Grant(lease)),
                None => Err(Grant(lease)),
            };
            if let Err(Grant(lease)) = told {
                lease.undo();
            }
        }
    }

    fn remove(&mut self, id: u64) -> Option<Waiter> {
        let waiter = self.waiting.remove(&id)?;
        if let Some(of_tenant) = self.tenants.get_mut(&waiter.tenant) {
            *of_tenant -= 1;
            if *of_tenant == 0 {
                self.tenants.remove(&waiter.tenant);
            }
        }
        Some(waiter)
    }
}

/// A place in a [`Queue`]: a future of the slot. Dropping it leaves the queue; a slot that had already been
/// handed over goes to the next.
#[derive(Debug)]
pub struct Ticket {
    id: u64,
    queue: Arc<Queue>,
    accepts: Arc<[Seat]>,
    told: oneshot::Receiver<Grant>,
}

impl Ticket {
    /// Whether one of the engines it may be served by takes requests.
    pub(crate) fn is_of_use(&self, now: Instant) -> bool {
        self.accepts.iter().any(|seat| seat.engine.takes_new(now))
    }

    /// Looks for places that came free without a request ending: an engine is back, say. They go to the first who
    /// accepts them.
    pub(crate) fn look_again(&self) {
        let now = Instant::now();
        let free = self.accepts.iter().filter(|seat| seat.has_room() && seat.engine.takes_new(now));
        free.for_each(|seat| self.queue.serve(&seat.engine));
    }
}

impl Future for Ticket {
    type Output = Option<Grant>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.told).poll(cx).map(Result::ok)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // Under the lock: from now on nothing is handed over. What was before is dropped with the channel, which
        // ends the lease and serves the next.
        self.queue.leave(self.id);
    }
}

/// A slot handed over to a request that waited.
#[derive(Debug)]
pub struct Grant(Lease);

impl Grant {
    /// The claim that comes with it.
    pub fn into_lease(self) -> Lease {
        self.0
    }

    /// The claim that comes with it.
    pub fn lease(&self) -> &Lease {
        &self.0
    }
}

#[cfg(test)]
mod tests;
