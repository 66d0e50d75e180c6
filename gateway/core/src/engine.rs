//! Engines: serving processes, shared by every rule that names them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::queue::Queue;

/// What tells one engine from another: its address and how it is spoken to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// `host:port`.
    pub address: String,
    /// The name the engine's certificate must carry; `None` is plain HTTP.
    pub tls: Option<String>,
}

/// An engine's number in this process: never used again, not even after the engine is gone. Tiers keep
/// these, never positions, because positions change on reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineId(pub u64);

/// What an operator or a controller wants of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Admin {
    /// Takes requests.
    Active = 0,
    /// Takes no new assignment; session pins stay.
    Draining = 1,
    /// Takes nothing.
    Disabled = 2,
}

/// What an engine last told of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Telemetry {
    /// KV blocks it can hold; `None` where it does not say.
    pub blocks: Option<u64>,
    /// Requests it runs; `None` where it does not say.
    pub running: Option<u64>,
    /// Requests it has queued; `None` where it does not say.
    pub waiting: Option<u64>,
    /// Until when this may be believed.
    pub until: Instant,
}

/// A serving process. Two rules on one engine see one load.
#[derive(Debug)]
pub struct Engine {
    id: EngineId,
    identity: Identity,
    in_flight: AtomicU64,
    healthy: std::sync::atomic::AtomicBool,
    admin: AtomicU8,
    weight_pct: AtomicU32,
    telemetry: Mutex<Option<Telemetry>>,
    queues: Mutex<Vec<Weak<Queue>>>,
}

impl Engine {
    fn new(id: EngineId, identity: Identity) -> Self {
        Self {
            id,
            identity,
            in_flight: AtomicU64::new(0),
            healthy: true.into(),
            admin: AtomicU8::new(Admin::Active as u8),
            weight_pct: AtomicU32::new(100),
            telemetry: Mutex::default(),
            queues: Mutex::default(),
        }
    }

    /// Its number in this process.
    pub fn id(&self) -> EngineId {
        self.id
    }

    /// What it is known by.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// `host:port`.
    pub fn address(&self) -> &str {
        &self.identity.address
    }

    /// Leases on it now: requests chosen for it and not yet over, of all rules.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Whether probes find it well.
    pub fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    /// Says what a probe found.
    pub fn set_healthy(&self, healthy: bool) {
        self.healthy.store(healthy, Ordering::Relaxed);
    }

    /// What it last told of itself, while that is fresh.
    pub fn telemetry(&self, now: Instant) -> Option<Telemetry> {
        let told = *self.telemetry.lock().unwrap_or_else(PoisonError::into_inner);
        told.filter(|told| now < told.until)
    }

    /// Keeps what it told of itself; `None` forgets it.
    pub fn set_telemetry(&self, told: Option<Telemetry>) {
        *self.telemetry.lock().unwrap_or_else(PoisonError::into_inner) = told;
    }

    /// What is wanted of it.
    pub fn admin(&self) -> Admin {
        match self.admin.load(Ordering::Relaxed) {
            0 => Admin::Active,
            1 => Admin::Draining,
            _ => Admin::Disabled,
        }
    }

    /// Sets what is wanted of it.
    pub fn set_admin(&self, admin: Admin) {
        self.admin.store(admin as u8, Ordering::Relaxed);
    }

    /// How much of its capacity it is to be taken for, in every rule, in percent.
    pub fn weight_pct(&self) -> u32 {
        self.weight_pct.load(Ordering::Relaxed)
    }

    /// Sets how much of its capacity it is to be taken for; 1 at least.
    pub fn set_weight_pct(&self, pct: u32) {
        self.weight_pct.store(pct.max(1), Ordering::Relaxed);
    }

    /// Whether new requests may be assigned to it.
    pub fn takes_new(&self) -> bool {
        self.is_healthy() && self.admin() == Admin::Active
    }

    /// Whether a session pinned to it may stay.
    pub fn keeps_pins(&self) -> bool {
        self.is_healthy() && self.admin() != Admin::Disabled
    }

    /// Counts one more in flight unless `limit` are already.
    pub(crate) fn try_enter(&self, limit: Option<u64>) -> bool {
        let limit = limit.unwrap_or(u64::MAX);
        self.in_flight
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| (n < limit).then_some(n + 1))
            .is_ok()
    }

    /// Counts one less.
    pub(crate) fn leave(&self) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
    }

    /// From now on slots freed here are offered to those who wait in `queue`.
    pub fn serve_queue(&self, queue: &Arc<Queue>) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|q| q.strong_count() > 0 && !Weak::ptr_eq(q, &Arc::downgrade(queue)));
        queues.push(Arc::downgrade(queue));
    }

    /// The queues with a claim on freed slots.
    pub(crate) fn queues(&self) -> Vec<Arc<Queue>> {
        let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.iter().filter_map(Weak::upgrade).collect()
    }
}

/// All engines of the process, by identity: the same identity gives the same engine over reloads, for as
/// long as anything still holds it.
#[derive(Debug, Default)]
pub struct Engines(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    known: HashMap<Identity, Weak<Engine>>,
    next: u64,
}

impl Engines {
    /// The engine of this identity.
    pub fn get(&self, identity: &Identity) -> Arc<Engine> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = table.known.get(identity).and_then(Weak::upgrade) {
            return engine;
        }
        table.known.retain(|_, engine| engine.strong_count() > 0);
        table.next += 1;
        let engine = Arc::new(Engine::new(EngineId(table.next), identity.clone()));
        table.known.insert(identity.clone(), Arc::downgrade(&engine));
        engine
    }

    /// Those alive now, in order of their numbers.
    pub fn all(&self) -> Vec<Arc<Engine>> {
        let table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = table.known.values().filter_map(Weak::upgrade).collect();
        all.sort_by_key(|engine| engine.id);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(address: &str) -> Identity {
        Identity { address: address.into(), tls: None }
    }

    #[test]
    fn one_identity_one_engine_and_numbers_are_never_reused() {
        let engines = Engines::default();
        let a = engines.get(&identity("a:1"));
        assert!(Arc::ptr_eq(&a, &engines.get(&identity("a:1"))));
        let tls = engines.get(&Identity { address: "a:1".into(), tls: Some("a".into()) });
        assert_ne!(a.id(), tls.id());
        let old = a.id();
        drop(a);
        assert_eq!(engines.all().len(), 1);
        assert!(engines.get(&identity("a:1")).id() > old);
    }

    #[test]
    fn entering_stops_at_the_limit() {
        let engine = Engines::default().get(&identity("a:1"));
        assert!(engine.try_enter(Some(1)));
        assert!(!engine.try_enter(Some(1)));
        assert!(engine.try_enter(None));
        engine.leave();
        engine.leave();
        assert_eq!(engine.in_flight(), 0);
    }

    #[test]
    fn what_an_engine_told_is_believed_for_a_while() {
        let engine = Engines::default().get(&identity("a:1"));
        let now = Instant::now();
        assert_eq!(engine.telemetry(now), None);
        let until = now + std::time::Duration::from_secs(1);
        let told = Telemetry { blocks: Some(7), running: None, waiting: Some(0), until };
        engine.set_telemetry(Some(told));
        assert_eq!(engine.telemetry(now), Some(told));
        assert_eq!(engine.telemetry(until), None);
        engine.set_telemetry(None);
        assert_eq!(engine.telemetry(now), None);
    }
}
