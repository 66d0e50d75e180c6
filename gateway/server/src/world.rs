//! What outlives every plan: engines, state, counters, the event plane, tokenizers.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use futures::FutureExt;
use kvgate_core::{
    Alarms, BoxFuture, Counter, Decision, EngineId, Engines, Registry, Services, StateStore, Timer,
};
use kvgate_edge::tls::Tls;
use kvgate_feed::plane::{FeedStatus, Plane};
use kvgate_tiers::kv_exact;
use pingora_core::connectors::http::Connector;

use crate::budget::Budget;
use crate::config::ListenerConfig;
use crate::counts::errors;
use crate::facts::Prompts;
use crate::health::ProbeStatus;
use crate::life::Life;
use crate::plan::{Ground, Plan};
use crate::relay::Buffers;
use crate::telemetry::Status;

/// The process, but for its configuration.
pub struct World {
    /// All engines.
    pub engines: Engines,
    /// What tiers keep over reloads.
    pub store: StateStore,
    /// All counters.
    pub registry: Registry,
    /// All alarms.
    pub alarms: Alarms,
    /// What tiers are built on.
    pub services: Services,
    /// The event plane.
    pub plane: Plane,
    /// Rendering and tokenising.
    pub prompts: Prompts,
    /// Connections to engines.
    pub connector: Connector,
    /// The memory of request bodies.
    pub buffers: Buffers,
    /// How the feeds are doing, by engine: those that run now.
    pub feeds: ArcSwap<HashMap<EngineId, Arc<FeedStatus>>>,
    /// Connections on which engines are asked how they are: apart from those that requests take.
    pub scraping: Connector,
    /// How asking them goes, by engine: those that are asked now.
    pub telemetry: ArcSwap<HashMap<EngineId, Arc<Status>>>,
    /// How engines answer whether they are well: those that are asked now.
    pub probes: ArcSwap<HashMap<EngineId, Arc<ProbeStatus>>>,
    /// The plan in force.
    pub plan: ArcSwap<Plan>,
    /// The latest decisions.
    pub decisions: Decisions,
    /// How reloads went.
    pub reloads: Reloads,
    /// The misses of KV-exact routing: held here, so that every series exists from the first second.
    pub kv_misses: kv_exact::Misses,
    /// Requests that no rule took.
    pub unrouted: Unrouted,
    /// How much may be asked again.
    pub budget: Budget,
    /// The listeners, as they were bound: a reload changes none of them.
    pub listeners: Vec<ListenerConfig>,
    /// The TLS of those listeners that have it, by name: swapped when their files change.
    pub tls: BTreeMap<String, Arc<ArcSwap<Tls>>>,
    /// What the listeners count of their connections.
    pub edge: Arc<kvgate_edge::Stats>,
    /// From its start to its end.
    pub life: Arc<Life>,
}

impl World {
    /// The listener at this address: the exact one, else one on all addresses of the port.
    pub fn listener(&self, local: Option<SocketAddr>) -> Option<&ListenerConfig> {
        let Some(local) = local else { return self.listeners.first() };
        let exact = self.listeners.iter().find(|l| l.address == local);
        let any = |l: &&ListenerConfig| l.address.ip().is_unspecified() && l.address.port() == local.port();
        exact.or_else(|| self.listeners.iter().find(any))
    }

    /// What tiers are built on.
    pub fn ground(&self) -> Ground<'_> {
        Ground {
            store: &self.store,
            registry: &self.registry,
            alarms: &self.alarms,
            services: &self.services,
        }
    }

    /// How the feed of an engine is doing, if it is followed.
    pub fn feed(&self, engine: EngineId) -> Option<Arc<FeedStatus>> {
        self.feeds.load().get(&engine).cloned()
    }

    /// How an engine answers whether it is well, if it is asked.
    pub fn probe(&self, engine: EngineId) -> Option<Arc<ProbeStatus>> {
        self.probes.load().get(&engine).cloned()
    }

    /// How asking an engine goes, if it is asked.
    pub fn scraper(&self, engine: EngineId) -> Option<Arc<Status>> {
        self.telemetry.load().get(&engine).cloned()
    }
}

/// The code of a request whose client left before it was whole.
pub const CLIENT_GONE: &str = "client_gone";

/// Requests that no rule took, by our error code.
pub struct Unrouted(Vec<(&'static str, Arc<Counter>)>);

impl Unrouted {
    /// A counter for each of these codes.
    pub fn new(registry: &Registry, codes: impl IntoIterator<Item = &'static str>) -> Self {
        Self(codes.into_iter().map(|code| (code, errors(registry, "", code))).collect())
    }

    /// One more.
    pub fn count(&self, code: &str) {
        if let Some((_, counter)) = self.0.iter().find(|(c, _)| *c == code) {
            counter.inc();
        }
    }
}

/// The latest decisions, newest last.
pub struct Decisions {
    keep: usize,
    /// Hashes of a prompt that a record holds at most; 0 is none.
    pub prompt_hashes: usize,
    latest: Mutex<VecDeque<Arc<Decision>>>,
}

impl Decisions {
    /// Keeps so many, each with so many hashes of its prompt at most.
    pub fn new(keep: usize, prompt_hashes: usize) -> Self {
        Self { keep, prompt_hashes, latest: Mutex::default() }
    }

    /// Adds one; the oldest gives way.
    pub fn push(&self, decision: Arc<Decision>) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        while latest.len() >= self.keep.max(1) {
            latest.pop_front();
        }
        if self.keep > 0 {
            latest.push_back(decision);
        }
    }

    /// All that are kept, oldest first.
    pub fn all(&self) -> Vec<Arc<Decision>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// How reloads went.
#[derive(Default)]
pub struct Reloads {
    /// Those that were put in force.
    pub good: AtomicU64,
    /// Those that were refused; the plan before stayed.
    pub bad: AtomicU64,
    /// When the plan in force was read, seconds since 1970.
    pub last_good: AtomicI64,
    /// What was wrong with the last one; empty if it was good.
    problem: Mutex<String>,
}

impl Reloads {
    /// A plan was put in force.
    pub fn succeeded(&self) {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.last_good.store(i64::try_from(unix_millis() / 1000).unwrap_or(i64::MAX), Ordering::Relaxed);
        // last: who sees it counted finds the rest
        self.good.fetch_add(1, Ordering::Release);
    }

    /// A plan was refused.
    pub fn failed(&self, problem: String) {
        *self.problem.lock().unwrap_or_else(PoisonError::into_inner) = problem;
        self.bad.fetch_add(1, Ordering::Release);
    }

    /// What is wrong with the files, if the last reload failed.
    pub fn problem(&self) -> Option<String> {
        let problem = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        (!problem.is_empty()).then(|| problem.clone())
    }
}

/// Milliseconds since 1970.
pub fn unix_millis() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Sleeps on tokio's clock.
pub struct TokioTimer;

impl Timer for TokioTimer {
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        tokio::time::sleep(duration).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_decision_gives_way() {
        let decisions = Decisions::new(2, 0);
        for n in 0..5 {
            decisions.push(Arc::new(Decision { at_ms: n, ..Decision::default() }));
        }
        assert_eq!(decisions.all().iter().map(|d| d.at_ms).collect::<Vec<_>>(), [3, 4]);
        let none = Decisions::new(0, 0);
        none.push(Arc::default());
        assert!(none.all().is_empty());
    }
}
