//! What runs beside the requests: feeds, tasks of tiers, reloads, alarms.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvgate_core::{EngineId, TierKind};
use kvgate_edge::tls::Tls;
use kvgate_feed::plane::{FeedHandle, Source};
use kvgate_feed::zmtp::Endpoint;
use kvgate_kv::mirror::{MirrorConfig, View};
use tokio::task::JoinHandle;

use crate::alarms::NoEvents;
use crate::config::{self, Config, EndpointConfig, GatewayConfig, ListenerConfig, ServerConfig};
use crate::health::Probers;
use crate::plan::{Plan, Rule};
use crate::telemetry::Scrapers;
use crate::world::World;

/// Where an engine publishes, and what of it is looked at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Wanted {
    engine: String,
    events: String,
    replay: Option<String>,
    own: bool,
    published: bool,
}

/// Keeps the world in line with the files: the one who reads them, and who starts and stops what runs.
pub struct Control {
    world: Arc<World>,
    file: PathBuf,
    kinds: Vec<TierKind>,
    feeds: HashMap<EngineId, (Wanted, FeedHandle)>,
    scrapers: Scrapers,
    probers: Probers,
    tasks: Vec<JoinHandle<()>>,
    alarms: NoEvents,
}

impl Control {
    /// Of this world and `gateway.toml`. Nothing runs yet.
    pub fn new(world: Arc<World>, file: &Path, kinds: Vec<TierKind>) -> Self {
        Self {
            world,
            file: file.to_owned(),
            kinds,
            feeds: HashMap::new(),
            scrapers: Scrapers::default(),
            probers: Probers::default(),
            tasks: Vec::new(),
            alarms: NoEvents::default(),
        }
    }

    /// Reads the files and puts them in force; if anything is wrong with them, what was in force stays. Wants a
    /// tokio runtime, on which everything runs that it starts.
    pub fn reload(&mut self) -> bool {
        let config = match config::load(&self.file, &self.kinds) {
            Ok(config) => config,
            Err(found) => return self.refuse(&found.to_string()),
        };
        for warning in &config.warnings {
            tracing::warn!("{warning}");
        }
        self.apply(config)
    }

    /// As [`Control::reload`]; a tier that panics when it is built is a refused configuration, not the end of
    /// reloads and feeds.
    pub fn reload_safely(&mut self) -> bool {
        match catch_unwind(AssertUnwindSafe(|| self.reload())) {
            Ok(done) => done,
            Err(_) => self.refuse("a tier panicked while it was built"),
        }
    }

    /// Puts a configuration in force.
    pub fn apply(&mut self, config: Config) -> bool {
        let certificates = match self.certificates(&config.gateway) {
            Ok(certificates) => certificates,
            Err(problem) => return self.refuse(&problem),
        };
        let plan = match Plan::build(config, &self.kinds, &self.world) {
            Ok(plan) => Arc::new(plan),
            Err(found) => {
                let text: Vec<_> = found.iter().map(ToString::to_string).collect();
                return self.refuse(&text.join("\n"));
            }
        };
        for (name, tls) in certificates {
            if let Some(slot) = self.world.tls.get(&name).filter(|slot| !slot.load().is_same(&tls)) {
                tracing::info!(listener = name, "its TLS is read anew");
                slot.store(Arc::new(tls));
            }
        }
        let before = self.world.plan.swap(plan.clone());
        plan.rules.iter().for_each(|rule| rule.commit_numbers());
        plan.set_breakers();
        report(&before, &plan);
        self.reconcile(&plan);
        self.scrapers.reconcile(&plan, &self.world);
        self.probers.reconcile(&plan, &self.world);
        let tasks =
            std::mem::take(&mut *plan.tasks.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        for old in self.tasks.drain(..) {
            old.abort();
        }
        self.tasks.extend(tasks.into_iter().map(|(name, task)| {
            tracing::debug!(name, "task started");
            tokio::spawn(task)
        }));
        self.prepare_tokenizers(&plan);
        self.world.reloads.succeeded();
        true
    }

    /// What the listeners that have TLS shall have from now on, read anew.
    fn certificates(&self, gateway: &GatewayConfig) -> Result<Vec<(String, Tls)>, String> {
        let files = gateway.listeners.iter().filter_map(|listener| {
            // one that had none when it was bound has none
            self.world.tls.get(&listener.name)?;
            Some((listener.tls.files()?, listener.name.clone()))
        });
        let load = |(files, name)| match Tls::load(&files) {
            Ok(tls) => Ok((name, tls)),
            Err(found) => Err(found.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")),
        };
        files.map(load).collect()
    }

    fn refuse(&self, problem: &str) -> bool {
        tracing::error!("the configuration is refused, what was in force stays:\n{problem}");
        self.world.reloads.failed(problem.to_owned());
        false
    }

    /// Starts the feeds of engines that are new, stops those of engines that are gone, and leaves the others
    /// alone.
    fn reconcile(&mut self, plan: &Plan) {
        let mut wanted: BTreeMap<EngineId, Wanted> = BTreeMap::new();
        for rule in &plan.rules {
            let Some(view) = rule.kv else { continue };
            for (endpoint, config) in rule.endpoints.iter().zip(&rule.config.endpoints) {
                let Some(events) = &config.kv_events else { continue };
                let feed = wanted.entry(endpoint.engine.id()).or_insert_with(|| from(events, config));
                match view {
                    View::Own => feed.own = true,
                    View::Published => feed.published = true,
                }
            }
        }
        self.feeds.retain(|engine, (running, _)| wanted.get(engine) == Some(running));
        for (engine, feed) in wanted {
            if self.feeds.contains_key(&engine) {
                continue;
            }
            match self.follow(engine, &feed, &plan.gateway) {
                Ok(handle) => {
                    self.feeds.insert(engine, (feed, handle));
                }
                Err(error) => tracing::error!(
                    engine = feed.engine,
                    events = feed.events,
                    error,
                    "the engine cannot be followed"
                ),
            }
        }
        let statuses = self.feeds.iter().map(|(engine, (_, handle))| (*engine, handle.status()));
        self.world.feeds.store(Arc::new(statuses.collect()));
    }

    fn follow(&self, engine: EngineId, feed: &Wanted, gateway: &GatewayConfig) -> Result<FeedHandle, String> {
        let endpoint = |text: &String| text.parse::<Endpoint>().map_err(|e| e.to_string());
        let source = Source {
            name: feed.engine.clone(),
            events: endpoint(&feed.events)?,
            replay: feed.replay.as_ref().map(endpoint).transpose()?,
            topic: bytes::Bytes::new(),
            mirror: MirrorConfig {
                own: feed.own,
                published: feed.published,
                // what is known stays known when the feed is started anew
                engine_blocks: self.rank_blocks(engine),
                max_blocks: gateway.inventory.max_blocks,
                max_ranks: 64,
            },
        };
        self.world.plane.follow(engine.0, source).map_err(|e| e.to_string())
    }

    /// The blocks of an engine's largest rank, as it told.
    fn rank_blocks(&self, engine: EngineId) -> Option<usize> {
        let blocks = self.world.scraper(engine)?.reading()?.rank_blocks?;
        Some(usize::try_from(blocks).unwrap_or(usize::MAX))
    }

    /// Loads the tokenizers of the models that rules name, in the background, so that the first request finds them.
    fn prepare_tokenizers(&self, plan: &Plan) {
        for rule in plan.rules.iter().filter(|rule| rule.kv.is_some()) {
            for model in &rule.config.matches.models {
                self.world.prompts.tokenizers().get(model);
            }
        }
    }

    /// `gateway.toml` as it is in force.
    pub fn gateway(&self) -> GatewayConfig {
        self.world.plan.load().gateway.clone()
    }

    /// The certificates and keys that the configuration in force names.
    pub fn files(&self) -> Vec<PathBuf> {
        let plan = self.world.plan.load();
        let engines = plan.rules.iter().flat_map(|rule| rule.config.tls.files()).map(Path::to_owned);
        let listeners = plan.gateway.listeners.iter().flat_map(|listener| listener.tls.all()).cloned();
        listeners.chain(engines).collect()
    }

    /// Loads anew the tokenizers whose files have changed, in the background.
    pub fn refresh_tokenizers(&self) {
        let tokenizers = self.world.prompts.tokenizers().clone();
        tokio::task::spawn_blocking(move || {
            for (model, result) in tokenizers.refresh() {
                match result {
                    Ok(()) => tracing::info!(model, "tokenizer loaded anew"),
                    Err(error) => {
                        tracing::error!(model, %error, "the tokenizer cannot be loaded, the old one stays")
                    }
                }
            }
        });
    }

    /// Looks at what has to be looked at every second.
    pub fn tick(&mut self, now: Instant) {
        let plan = self.world.plan.load();
        self.alarms.look(&plan, &self.world, now);
        self.scrapers.look(&plan, &self.world, now);
    }
}

fn from(events: &str, config: &EndpointConfig) -> Wanted {
    Wanted {
        engine: config.address.clone(),
        events: events.to_owned(),
        replay: config.kv_replay.clone(),
        own: false,
        published: false,
    }
}

/// The most names of a kind that a line of the log has.
const MOST_NAMED: usize = 8;

/// Says what a reload changed.
fn report(before: &Plan, after: &Plan) {
    let name = |rule: &Arc<Rule>| rule.config.name.clone();
    let same = |rule: &Rule, other: &Rule| rule.config.name == other.config.name;
    let only = |a: &Plan, b: &Plan| -> Vec<_> {
        a.rules.iter().filter(|rule| !b.rules.iter().any(|other| same(rule, other))).map(name).collect()
    };
    let text = |rule: &Rule| rule.config.origin.source.text.clone();
    let differs = |rule: &Rule, other: &Rule| text(rule) != text(other) || rule.transport != other.transport;
    let changed = after
        .rules
        .iter()
        .filter(|rule| before.rules.iter().any(|other| same(rule, other) && differs(rule, other)));
    let added = only(after, before);
    tracing::info!(
        kept = after.rules.len() - added.len(),
        added = few(added),
        removed = few(only(before, after)),
        changed = few(changed.map(name).collect()),
        tables = few(tables(&before.gateway, &after.gateway)),
        listeners = few(listeners(&before.gateway.listeners, &after.gateway.listeners)),
        endpoints = after.rules.iter().map(|rule| rule.endpoints.len()).sum::<usize>(),
        "the configuration is in force"
    );
    let waiting = if before.rules.is_empty() { Vec::new() } else { waiting(&before.gateway, &after.gateway) };
    if !waiting.is_empty() {
        tracing::warn!(
            tables = waiting.join(", "),
            "changes of gateway.toml that take effect at the next start"
        );
    }
}

/// The first names, and how many more there are.
fn few(names: Vec<String>) -> String {
    let more = names.len().saturating_sub(MOST_NAMED);
    let first = names.iter().take(MOST_NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{first} and {more} more") } else { first }
}

/// The tables of `gateway.toml` that changed in a part that is read at every reload; listeners not included.
fn tables(before: &GatewayConfig, after: &GatewayConfig) -> Vec<String> {
    let changed = [
        ("server", reloaded(&before.server, &after.server) != before.server),
        ("limits", after.limits != before.limits),
        ("timeouts", after.timeouts != before.timeouts),
        ("retry", after.retry != before.retry),
        ("retry_budget", after.retry_budget != before.retry_budget),
        ("breaker", after.breaker != before.breaker),
        ("probe", after.probe != before.probe),
        ("telemetry", after.telemetry != before.telemetry),
        ("alarms", after.alarms != before.alarms),
    ];
    changed.into_iter().filter(|(_, changed)| *changed).map(|(table, _)| table.to_owned()).collect()
}

/// The listeners whose files or terms of TLS changed: they are read at every reload.
fn listeners(before: &[ListenerConfig], after: &[ListenerConfig]) -> Vec<String> {
    let stands = bound(before);
    let changed = after.iter().zip(bound(after));
    let changed =
        changed.filter(|(listener, as_bound)| !before.contains(listener) && stands.contains(as_bound));
    changed.map(|(listener, _)| listener.name.clone()).collect()
}

/// The tables of `gateway.toml` that changed in a part that is read at the start only.
fn waiting(before: &GatewayConfig, after: &GatewayConfig) -> Vec<&'static str> {
    let changed = [
        ("server", reloaded(&after.server, &before.server) != before.server),
        ("listener", bound(&after.listeners) != bound(&before.listeners)),
        ("http2", after.http2 != before.http2),
        ("connections", after.connections != before.connections),
        ("admin", after.admin != before.admin),
        ("log", after.log != before.log),
        ("tokenizer", after.tokenizer != before.tokenizer),
        ("inventory", after.inventory != before.inventory),
        ("feed", after.feed != before.feed),
        ("decisions", after.decisions != before.decisions),
    ];
    changed.into_iter().filter(|(_, changed)| *changed).map(|(table, _)| table).collect()
}

/// `[server]` of the one with what is read at every reload of the other.
fn reloaded(one: &ServerConfig, other: &ServerConfig) -> ServerConfig {
    ServerConfig {
        rules: other.rules.clone(),
        reload_debounce: other.reload_debounce,
        grace_period: other.grace_period,
        drain_delay: other.drain_delay,
        upgrade_socket: other.upgrade_socket.clone(),
        ..one.clone()
    }
}

/// Listeners without what changes while they are bound: the files and terms of TLS where there is TLS.
fn bound(listeners: &[ListenerConfig]) -> Vec<ListenerConfig> {
    let without = |listener: &ListenerConfig| {
        let mut listener = listener.clone();
        if listener.tls.files().is_some() {
            listener.tls.certificates = vec![PathBuf::new()];
            (listener.tls.keys, listener.tls.client_ca) = (Vec::new(), None);
            (listener.tls.min_version, listener.tls.http2) = (String::new(), true);
        }
        listener
    };
    listeners.iter().map(without).collect()
}

/// How often [`Control::tick`] is due.
pub const TICK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_names_are_a_few_and_a_number() {
        let names = |n: usize| (0..n).map(|n| n.to_string()).collect();
        assert_eq!((few(names(0)), few(names(2))), (String::new(), "0, 1".to_owned()));
        assert_eq!(few(names(8)), "0, 1, 2, 3, 4, 5, 6, 7");
        assert_eq!(few(names(300)), "0, 1, 2, 3, 4, 5, 6, 7 and 292 more");
    }
}
