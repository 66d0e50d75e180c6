//! Requests that wait for a place.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures::channel::oneshot;

use crate::lease::Lease;

/// The first-come-first-served queue of one rule and role. A freed slot goes to its head; a ticket that is
/// dropped leaves it at once; no newcomer overtakes, because the slot is handed over, not freed.
#[derive(Debug)]
pub struct Queue {
    depth: usize,
    waiting: Mutex<VecDeque<(u64, oneshot::Sender<Grant>)>>,
    next: std::sync::atomic::AtomicU64,
}

impl Queue {
    /// A queue of at most `depth` requests.
    pub fn new(depth: usize) -> Arc<Self> {
        Arc::new(Self { depth, waiting: Mutex::default(), next: 0.into() })
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes the last place, or `None` when the queue is full.
    pub fn enter(self: &Arc<Self>) -> Option<Ticket> {
        let mut waiting = self.lock();
        if waiting.len() >= self.depth {
            return None;
        }
        let (tell, told) = oneshot::channel();
        let id = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        waiting.push_back((id, tell));
        Some(Ticket { id, queue: self.clone(), told })
    }

    /// Hands `slot` to the head, or gives it back when nobody waits.
    pub(crate) fn offer(&self, mut slot: Grant) -> Result<(), Grant> {
        loop {
            let head = self.lock().pop_front();
            let Some((_, tell)) = head else { return Err(slot) };
            match tell.send(slot) {
                Ok(()) => return Ok(()),
                Err(back) => slot = back,
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<(u64, oneshot::Sender<Grant>)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in a [`Queue`]: a future of the slot. Dropping it leaves the queue; a slot that had already been
/// handed over goes to the next.
#[derive(Debug)]
pub struct Ticket {
    id: u64,
    queue: Arc<Queue>,
    told: oneshot::Receiver<Grant>,
}

impl Future for Ticket {
    type Output = Option<Grant>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.told).poll(cx).map(Result::ok)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // Closing first: a slot sent in between is either in the channel (and dropped with it, which
        // hands it on) or comes back to the sender, which offers it to the next.
        self.told.close();
        self.queue.lock().retain(|(id, _)| *id != self.id);
    }
}

/// A slot handed over by a request that ended.
#[derive(Debug)]
pub struct Grant(Lease);

impl Grant {
    pub(crate) fn new(lease: Lease) -> Self {
        Self(lease)
    }

    /// The claim that comes with it.
    pub fn into_lease(self) -> Lease {
        self.0
    }

    /// The claim that comes with it.
    pub fn lease(&self) -> &Lease {
        &self.0
    }

    pub(crate) fn forget(self) {
        self.0.forget();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Engines, Identity};
    use crate::lease::Outcome;
    use futures::FutureExt;

    fn setup() -> (Arc<crate::Engine>, Arc<Queue>) {
        let engine = Engines::default().get(&Identity { address: "a:1".into(), tls: None });
        let queue = Queue::new(2);
        engine.serve_queue(&queue);
        (engine, queue)
    }

    #[test]
    fn first_come_first_served_and_no_barging() {
        let (engine, queue) = setup();
        let held = Lease::try_take(&engine, Some(1)).unwrap();
        let mut first = queue.enter().unwrap();
        let mut second = queue.enter().unwrap();
        assert!(queue.enter().is_none());
        held.end(Outcome::complete(200));
        assert!(Lease::try_take(&engine, Some(1)).is_none(), "the slot was never free");
        let grant = (&mut first).now_or_never().unwrap().unwrap();
        assert!((&mut second).now_or_never().is_none());
        drop(grant);
        let grant = second.now_or_never().unwrap().unwrap();
        drop(grant.into_lease());
        assert_eq!(engine.in_flight(), 0);
    }

    #[test]
    fn a_dropped_ticket_leaves_the_queue_and_loses_no_slot() {
        let (engine, queue) = setup();
        let held = Lease::try_take(&engine, Some(1)).unwrap();
        let first = queue.enter().unwrap();
        let second = queue.enter().unwrap();
        drop(held); // handed to the first, which never looks
        drop(first);
        assert!(second.now_or_never().unwrap().is_some());
        assert_eq!((engine.in_flight(), queue.len()), (0, 0));
    }

    #[test]
    fn slots_are_exact_under_threads() {
        let (engine, _queue) = setup();
        let queue = Queue::new(1000);
        engine.serve_queue(&queue);
        let peak = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    for i in 0..500 {
                        let lease = match Lease::try_take(&engine, Some(3)) {
                            Some(lease) => lease,
                            None => {
                                let Some(ticket) = queue.enter() else { continue };
                                if i % 5 == 0 {
                                    continue; // leaves at once
                                }
                                // A slot may have been freed between the failed take and the ticket.
                                if let Some(lease) = Lease::try_take(&engine, Some(3)) {
                                    lease
                                } else {
                                    match futures::executor::block_on(ticket) {
                                        Some(grant) => grant.into_lease(),
                                        None => continue,
                                    }
                                }
                            }
                        };
                        peak.fetch_max(engine.in_flight(), std::sync::atomic::Ordering::Relaxed);
                        drop(lease);
                    }
                });
            }
        });
        assert!(peak.into_inner() <= 3);
        assert_eq!((engine.in_flight(), queue.len()), (0, 0));
    }
}
