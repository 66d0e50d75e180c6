//! Engines: serving processes, shared by every rule that names them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::breaker::{Breaker, BreakerPolicy, BreakerState, Change, Pass, Sign};
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

/// Whether requests may be assigned to an engine, and if not, why: the first of these that holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Availability {
    /// An operator or a controller took it out.
    Disabled,
    /// Probes find it down.
    Down,
    /// Its breaker lets nothing through, or no more to see.
    Open,
    /// It asked to be left alone for a while.
    Cooling,
    /// It keeps its sessions, and gets nothing new.
    Draining,
    /// It takes requests.
    Free,
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
    breaker: Breaker,
    answers: AtomicU64,
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
            breaker: Breaker::default(),
            answers: AtomicU64::new(0),
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
        let before = self.healthy.swap(healthy, Ordering::Relaxed);
        if healthy && !before {
            self.breaker.back(Instant::now());
        }
    }

    /// Where its breaker stands.
    pub fn breaker(&self, now: Instant) -> BreakerState {
        self.breaker.state(now)
    }

    /// Its failures in a row, as its breaker counts them; once that is open, those that opened it.
    pub fn failures_in_a_row(&self) -> u32 {
        self.breaker.failures()
    }

    /// How often its breaker has opened or closed.
    pub fn breaker_flips(&self) -> u64 {
        self.breaker.flips()
    }

    /// When its breaker opens, and how it closes: [`BreakerPolicy::OFF`] at first.
    pub fn breaker_policy(&self) -> BreakerPolicy {
        self.breaker.policy()
    }

    /// From now on its breaker goes by this. Whether that closed it: nothing opens it any more.
    pub fn set_breaker_policy(&self, policy: BreakerPolicy) -> bool {
        self.breaker.set_policy(policy, Instant::now())
    }

    /// Leaves it alone until then, as it asked by an answer of this status. Never shorter than was said before.
    pub fn cool(&self, until: Instant, status: u16) {
        self.breaker.cool(until, status, Instant::now());
    }

    /// Until when it is left alone as it asked, and by which status.
    pub fn cooling(&self, now: Instant) -> Option<(Instant, u16)> {
        self.breaker.cooling(now)
    }

    /// When its breaker and its own wish let requests through again that do not now.
    pub fn returns(&self, now: Instant) -> Option<Instant> {
        self.breaker.returns(now)
    }

    /// Requests that it has answered with success: one that does is alive.
    pub fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
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

    /// How much of its capacity it is taken for now, in percent: less than is wanted soon after it was back.
    pub fn share_pct(&self, now: Instant) -> u64 {
        (u64::from(self.weight_pct()) * u64::from(self.breaker.share_pct(now)) / 100).max(1)
    }

    /// Sets how much of its capacity it is to be taken for; 1 at least.
    pub fn set_weight_pct(&self, pct: u32) {
        self.weight_pct.store(pct.max(1), Ordering::Relaxed);
    }

    /// Whether requests may be assigned to it. Asking changes nothing.
    pub fn availability(&self, now: Instant) -> Availability {
        self.available(now, || self.breaker.lets_through(now))
    }

    /// The same for a request that its breaker let through already.
    pub(crate) fn availability_for(&self, pass: Pass, now: Instant) -> Availability {
        self.available(now, || self.breaker.honours(pass))
    }

    fn available(&self, now: Instant, passes: impl FnOnce() -> bool) -> Availability {
        match self.admin() {
            Admin::Disabled => Availability::Disabled,
            _ if !self.is_healthy() => Availability::Down,
            _ if !passes() => Availability::Open,
            _ if self.breaker.cooling(now).is_some() => Availability::Cooling,
            Admin::Draining => Availability::Draining,
            Admin::Active => Availability::Free,
        }
    }

    /// Whether new requests may be assigned to it.
    pub fn takes_new(&self, now: Instant) -> bool {
        self.availability(now) == Availability::Free
    }

    /// Whether a session pinned to it may stay.
    pub fn keeps_pins(&self, now: Instant) -> bool {
        matches!(self.availability(now), Availability::Free | Availability::Draining)
    }

    /// Counts one more in flight unless `limit` are already, or its breaker does not let it through.
    pub(crate) fn try_enter(&self, limit: Option<u64>) -> Option<Pass> {
        let (limit, now) = (limit.unwrap_or(u64::MAX), Instant::now());
        let pass = self.breaker.enter(now)?;
        let counted = self
            .in_flight
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |n| (n < limit).then_some(n + 1));
        if counted.is_err() {
            self.breaker.leave(pass, Sign::Neutral, now);
            return None;
        }
        Some(pass)
    }

    /// Counts one less, which ended like this.
    pub(crate) fn leave(&self, pass: Pass, sign: Sign) -> Option<Change> {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
        if sign == Sign::Success {
            self.answers.fetch_add(1, Ordering::Relaxed);
        }
        self.breaker.leave(pass, sign, Instant::now())
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
        let first = engine.try_enter(Some(1)).unwrap();
        assert!(engine.try_enter(Some(1)).is_none());
        let second = engine.try_enter(None).unwrap();
        engine.leave(first, Sign::Success);
        engine.leave(second, Sign::Neutral);
        assert_eq!((engine.in_flight(), engine.answers()), (0, 1));
    }

    #[test]
    fn what_keeps_requests_away_is_told_apart() {
        let engine = Engines::default().get(&identity("a:1"));
        let now = Instant::now();
        let later = now + std::time::Duration::from_secs(1);
        let stands = |at| (engine.availability(at), engine.takes_new(at), engine.keeps_pins(at));
        assert_eq!(stands(now), (Availability::Free, true, true));
        engine.set_admin(Admin::Draining);
        assert_eq!(stands(now), (Availability::Draining, false, true));
        engine.cool(later, 429);
        assert_eq!(stands(now), (Availability::Cooling, false, false));
        assert_eq!(stands(later), (Availability::Draining, false, true));
        engine.set_healthy(false);
        assert_eq!(stands(later), (Availability::Down, false, false));
        engine.set_admin(Admin::Disabled);
        assert_eq!(stands(later), (Availability::Disabled, false, false));
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
