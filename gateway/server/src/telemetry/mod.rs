//! What engines tell of themselves, from their metrics pages: capacity, load, tokens, time to first tokens.
//!
//! One task for each engine of the rules that go by it, whatever number of endpoints name it. What it finds is kept
//! by the [`Engine`](kvgate_core::Engine), for so long as it may be believed; the block count bounds the mirror too.

mod families;
mod page;
mod scraper;
mod status;
mod unknown;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use kvgate_core::{Engine, EngineId};
use kvgate_engines::metrics::Metrics;

pub use families::FamilyState;
pub(crate) use page::{Failure, fetch};
pub(crate) use scraper::share;
pub use status::Status;

use crate::config::TelemetryConfig;
use crate::plan::Plan;
use crate::transport::Transport;
use crate::world::World;
use scraper::Scraper;
use unknown::Unknown;

/// How an engine is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    metrics: Metrics,
    config: TelemetryConfig,
    transport: Arc<Transport>,
}

/// The tasks that ask. Dropping it ends them.
#[derive(Default)]
pub struct Scrapers {
    running: HashMap<EngineId, (Wanted, Scraper)>,
    unknown: Unknown,
}

impl Scrapers {
    /// Starts the tasks of engines that are new or to be asked otherwise, stops those of engines that are gone, and
    /// leaves the others alone. Wants a tokio runtime. An engine of several rules is asked as the one has it that asks
    /// most often.
    pub fn reconcile(&mut self, plan: &Plan, world: &Arc<World>) {
        let mut wanted: BTreeMap<EngineId, (Arc<Engine>, Wanted)> = BTreeMap::new();
        for rule in plan.rules.iter().filter(|rule| rule.config.asks_engines()) {
            let own = Wanted {
                metrics: rule.config.engine.metrics,
                config: rule.config.telemetry.clone(),
                transport: rule.transport.clone(),
            };
            for endpoint in &rule.endpoints {
                let (_, chosen) = wanted
                    .entry(endpoint.engine.id())
                    .or_insert_with(|| (endpoint.engine.clone(), own.clone()));
                if own.config.interval < chosen.config.interval {
                    *chosen = own.clone();
                }
            }
        }
        // what an engine told that is asked no more must not weigh for as long as it would have been believed
        for engine in world.engines.all() {
            if self.running.contains_key(&engine.id()) && !wanted.contains_key(&engine.id()) {
                engine.set_telemetry(None);
            }
        }
        self.running.retain(|id, (running, _)| wanted.get(id).is_some_and(|(_, wanted)| wanted == running));
        for (id, (engine, wanted)) in wanted {
            self.running.entry(id).or_insert_with(|| {
                let scraper = Scraper::start(engine, &wanted, world.clone());
                (wanted, scraper)
            });
        }
        let statuses = self.running.iter().map(|(id, (_, scraper))| (*id, scraper.status()));
        world.telemetry.store(Arc::new(statuses.collect()));
    }

    /// Looks once for rules that do not know what their engines can hold.
    pub fn look(&mut self, plan: &Plan, world: &World, now: Instant) {
        self.unknown.look(plan, world, now);
    }
}
