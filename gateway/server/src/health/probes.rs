//! Asking engines whether they are well: one task for each engine, whatever number of endpoints name it. A task asks one
//! question at a time and waits for nobody else, so that engines which hang keep no other from being asked; there are never
//! more questions under way than engines.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvgate_core::{Engine, EngineId};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::address::Address;
use crate::config::{ProbeConfig, ProbeMode};
use crate::plan::Plan;
use crate::relay::{brief_io, is_ours};
use crate::telemetry::{Failure, fetch, share};
use crate::transport::Transport;
use crate::world::World;

/// The latest that an engine is asked for the first time.
const MOST_SPREAD: Duration = Duration::from_secs(1);
/// Bytes of an answer that are read; what it says does not matter.
const MOST_READ: usize = 64 * 1024;

/// How an engine is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    path: String,
    config: ProbeConfig,
    transport: Arc<Transport>,
}

/// The tasks that ask. Dropping it ends them.
#[derive(Default)]
pub struct Probers {
    running: HashMap<EngineId, (Wanted, Prober)>,
}

impl Probers {
    /// Starts the tasks of engines that are new or to be asked otherwise, stops those of engines that are gone, and
    /// leaves the others alone. Wants a tokio runtime. An engine of several rules is asked as the one has it that comes
    /// first by [`RuleConfig::probe_rank`](crate::config::RuleConfig::probe_rank).
    pub fn reconcile(&mut self, plan: &Plan, world: &Arc<World>) {
        let mut wanted: BTreeMap<EngineId, (Arc<Engine>, Wanted)> = BTreeMap::new();
        let mut rules: Vec<_> =
            plan.rules.iter().filter(|rule| rule.config.probe.mode != ProbeMode::Off).collect();
        rules.sort_by(|a, b| a.config.probe_rank().cmp(&b.config.probe_rank()));
        for rule in rules {
            let config = &rule.config.probe;
            let path = config.path.clone().unwrap_or_else(|| rule.config.engine.health.to_owned());
            let own = Wanted { path, config: config.clone(), transport: rule.transport.clone() };
            for endpoint in &rule.endpoints {
                let engine = &endpoint.engine;
                wanted.entry(engine.id()).or_insert_with(|| (engine.clone(), own.clone()));
            }
        }
        self.running.retain(|id, (running, prober)| match wanted.get(id) {
            Some((_, wanted)) => wanted == running,
            None => {
                // nobody would find out that it is back
                prober.verdict.retire();
                false
            }
        });
        for (id, (engine, wanted)) in wanted {
            self.running.entry(id).or_insert_with(|| {
                let prober = Prober::start(engine, &wanted, world.clone());
                (wanted, prober)
            });
        }
        let statuses = self.running.iter().map(|(id, (_, prober))| (*id, prober.status.clone()));
        world.probes.store(Arc::new(statuses.collect()));
    }
}

/// How an engine answers.
#[derive(Debug, Default)]
pub struct ProbeStatus {
    asked: AtomicU64,
    failed: AtomicU64,
    /// Why the last one failed, if it did.
    last: Mutex<Option<String>>,
}

impl ProbeStatus {
    /// Times it was asked.
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }

    /// Times it was not well.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// What was wrong the last time it was asked.
    pub fn problem(&self) -> Option<String> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn told(&self, answer: &Answer) {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let problem = match answer {
            Answer::Well => None,
            Answer::Unclear(why) | Answer::Unwell(why) => Some(why.clone()),
        };
        if matches!(answer, Answer::Unwell(_)) {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = problem;
    }
}

/// A running task. Dropping it ends it, and what it finds from then on changes nothing.
struct Prober {
    status: Arc<ProbeStatus>,
    verdict: Arc<Verdict>,
    task: JoinHandle<()>,
}

impl Prober {
    fn start(engine: Arc<Engine>, wanted: &Wanted, world: Arc<World>) -> Self {
        let status = world.probe(engine.id()).unwrap_or_default();
        let verdict = Arc::new(Verdict::new(engine.clone()));
        let asking = Asking {
            address: Address::new(engine.address()),
            answers: engine.answers(),
            engine,
            wanted: wanted.clone(),
            world,
            status: status.clone(),
            verdict: verdict.clone(),
        };
        Self { status, verdict, task: tokio::spawn(asking.run()) }
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.verdict.end();
        self.task.abort();
    }
}

/// What came of asking once.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Answer {
    Well,
    /// It may be our own fault, or the engine has other things to do.
    Unclear(String),
    Unwell(String),
}

/// What is thought of an engine.
struct Verdict {
    engine: Arc<Engine>,
    /// `None` when it is not asked any more: a task that is told to end may be in the middle of an answer, and must not
    /// speak of the engine after whoever ended it has.
    tally: Mutex<Option<Tally>>,
}

impl Verdict {
    fn new(engine: Arc<Engine>) -> Self {
        let tally = Tally { healthy: engine.is_healthy(), against: 0 };
        Self { engine, tally: Mutex::new(Some(tally)) }
    }

    fn tally(&self) -> MutexGuard<'_, Option<Tally>> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if that changes what is thought of it.
    fn told(&self, answer: &Answer, config: &ProbeConfig) -> bool {
        let mut tally = self.tally();
        let Some(tally) = tally.as_mut() else { return false };
        let turns = tally.told(answer, config);
        if turns {
            self.engine.set_healthy(tally.healthy);
        }
        turns
    }

    /// What is thought of it now stands.
    fn end(&self) {
        *self.tally() = None;
    }

    /// It counts as well from now on.
    fn retire(&self) {
        let mut tally = self.tally();
        *tally = None;
        self.engine.set_healthy(true);
    }
}

/// How an engine does, and how many answers in a row speak against that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tally {
    healthy: bool,
    against: u32,
}

impl Tally {
    /// True if that changes it.
    fn told(&mut self, answer: &Answer, config: &ProbeConfig) -> bool {
        let well = match answer {
            Answer::Well => true,
            Answer::Unwell(_) => false,
            Answer::Unclear(_) => return false,
        };
        self.against = if well == self.healthy { 0 } else { self.against + 1 };
        let enough = if self.healthy { config.unhealthy_after } else { config.healthy_after };
        let turns = self.against >= enough.max(1);
        if turns {
            *self = Self { healthy: well, against: 0 };
        }
        turns
    }
}

struct Asking {
    engine: Arc<Engine>,
    address: Address,
    wanted: Wanted,
    world: Arc<World>,
    status: Arc<ProbeStatus>,
    verdict: Arc<Verdict>,
    /// Requests it had answered when it was last asked.
    answers: u64,
}

impl Asking {
    async fn run(mut self) {
        let interval = self.wanted.config.interval;
        // engines that start together are not asked together
        let spread = (interval / 10).min(MOST_SPREAD);
        sleep(spread.mul_f64(share(self.engine.id().0, 0))).await;
        for turn in 1.. {
            let next = Instant::now() + interval.mul_f64(0.9 + 0.2 * share(self.engine.id().0, turn));
            let answer = self.ask().await;
            self.told(&answer);
            sleep_until(next).await;
        }
    }

    async fn ask(&mut self) -> Answer {
        let limit = self.wanted.config.timeout;
        let asked = match self.wanted.config.mode {
            ProbeMode::Tcp => timeout(limit, self.connect(limit)).await,
            ProbeMode::Http | ProbeMode::Off => timeout(limit, self.get(limit)).await,
        };
        let before = std::mem::replace(&mut self.answers, self.engine.answers());
        match asked {
            Ok(answer) => answer,
            Err(_) if self.answers > before => Answer::Unclear(Failure::Timeout(limit).to_string()),
            Err(_) => Answer::Unwell(Failure::Timeout(limit).to_string()),
        }
    }

    async fn connect(&self, limit: Duration) -> Answer {
        let Some(socket) = self.address.socket(limit).await else { return unknown() };
        match TcpStream::connect(socket).await {
            Ok(_) => Answer::Well,
            Err(e) if is_ours(&e) => Answer::Unclear(Failure::Exhausted(brief_io(&e)).to_string()),
            Err(e) => {
                self.address.unreachable(socket);
                Answer::Unwell(Failure::Connect(brief_io(&e)).to_string())
            }
        }
    }

    async fn get(&self, limit: Duration) -> Answer {
        let tls = self.engine.identity().tls.as_deref();
        let Some(peer) = self.address.peer(tls, &self.wanted.transport, limit).await else {
            return unknown();
        };
        let fetched =
            fetch(&self.world.scraping, &peer, self.engine.address(), &self.wanted.path, MOST_READ).await;
        let status = match fetched {
            Ok(_) | Err(Failure::Size(_)) => 200,
            Err(Failure::Status(status)) => status,
            Err(Failure::Exhausted(why)) => return Answer::Unclear(why),
            Err(failure) => return Answer::Unwell(failure.to_string()),
        };
        let well = match &self.wanted.config.codes {
            Some(codes) => codes.contains(&status),
            None => status < 500,
        };
        if well { Answer::Well } else { Answer::Unwell(Failure::Status(status).to_string()) }
    }

    fn told(&mut self, answer: &Answer) {
        self.status.told(answer);
        if !self.verdict.told(answer, &self.wanted.config) {
            return;
        }
        let plan = self.world.plan.load();
        for rule in &plan.rules {
            let Some(endpoint) = rule.endpoints.iter().find(|e| e.engine.id() == self.engine.id()) else {
                continue;
            };
            let (service, ep_idx, engine) = (&rule.config.name, endpoint.index, self.engine.address());
            match answer {
                Answer::Unwell(cause) | Answer::Unclear(cause) => {
                    tracing::warn!(service, ep_idx, engine, cause, "engine down: probes fail");
                }
                Answer::Well => tracing::warn!(service, ep_idx, engine, "engine up: probes succeed again"),
            }
        }
    }
}

fn unknown() -> Answer {
    Answer::Unwell(Failure::Connect("its name cannot be resolved".into()).to_string())
}

#[cfg(test)]
mod tests {
    use kvgate_core::{Engines, Identity};

    use super::*;

    fn config(unhealthy_after: u32, healthy_after: u32) -> ProbeConfig {
        ProbeConfig {
            mode: ProbeMode::Http,
            path: None,
            codes: None,
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(3),
            unhealthy_after,
            healthy_after,
        }
    }

    #[test]
    fn a_task_that_was_ended_does_not_speak_of_its_engine() {
        let engine = Engines::default().get(&Identity { address: "a:1".into(), tls: None });
        let config = config(1, 1);
        let verdict = Verdict::new(engine.clone());
        assert!(verdict.told(&Answer::Unwell("503".into()), &config) && !engine.is_healthy());
        verdict.retire();
        assert!(engine.is_healthy(), "it is asked no more");
        assert!(!verdict.told(&Answer::Unwell("503".into()), &config), "what it was about to say is void");
        assert!(engine.is_healthy());
        // one that takes over begins with what was found before
        let verdict = Verdict::new(engine.clone());
        verdict.told(&Answer::Unwell("503".into()), &config);
        verdict.end();
        let next = Verdict::new(engine.clone());
        assert!(!verdict.told(&Answer::Well, &config) && !engine.is_healthy());
        assert!(next.told(&Answer::Well, &config) && engine.is_healthy());
    }

    #[test]
    fn only_so_many_in_a_row_turn_the_verdict() {
        let config = config(3, 2);
        let mut tally = Tally { healthy: true, against: 0 };
        let unwell = || Answer::Unwell("503".into());
        for (answer, turns, healthy) in [
            (unwell(), false, true),
            (unwell(), false, true),
            (Answer::Well, false, true),
            (unwell(), false, true),
            (unwell(), false, true),
            (Answer::Unclear("late".into()), false, true),
            (unwell(), true, false),
            (unwell(), false, false),
            (Answer::Well, false, false),
            (unwell(), false, false),
            (Answer::Well, false, false),
            (Answer::Well, true, true),
            (unwell(), false, true),
        ] {
            assert_eq!(tally.told(&answer, &config), turns, "{answer:?}");
            assert_eq!(tally.healthy, healthy);
        }
    }
}
