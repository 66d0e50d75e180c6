//! One policy's run over a trace: the gateway's ladder before engines on a virtual clock.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use kvgate_core::{
    Alarms, Attempt, BoxFuture, Choice, Completion, Dispatch, Endpoint, Engines, FactSource, Facts,
    HeaderMap, Ladder, Lease, Mask, Miss, Opening, Outcome, Refused, Registry, Request, Role, Selection,
    Services, StateStore, Telemetry, Timer, Tokens,
};
use kvgate_kv::holdings::{Cache, Caches, Holdings, Standing};
use kvgate_kv::inventory::{CacheId, Config, Ingest};
use kvgate_kv::mirror::View;
use kvgate_kv::own::OwnHasher;
use kvgate_sim::clocked::{Clocked, Happening, Job};
use kvgate_sim::trace::{Asked, BLOCK, Prompt, Trace};

use super::Setting;
use super::policy::{Forecasts, ORACLE, Policy};
use crate::plan::{self, Ground};

/// How often engines tell of themselves.
const TELEMETRY: Duration = Duration::from_secs(1);
/// How long that is believed.
const BELIEVED: Duration = Duration::from_secs(5);

/// What a policy achieved.
#[derive(Debug, Default)]
pub struct Seen {
    /// Prompt tokens of all requests.
    pub tokens: u64,
    /// Those that were cached.
    pub cached: u64,
    /// Times to the first token, in the order in which they came.
    pub ttft: Vec<Duration>,
    /// Requests by endpoint.
    pub served: Vec<u64>,
    /// Requests that went past the engine that affinity was for, because of its load.
    pub spills: u64,
}

/// Runs a policy over a trace.
///
/// # Errors
/// In words, when a tier cannot be built, or refuses or holds a request.
pub fn run(policy: &Policy, trace: &Trace, setting: &Setting) -> Result<Seen, String> {
    let mut drive = Drive::new(policy, setting)?;
    let mut asked = trace.requests.iter().enumerate().peekable();
    loop {
        let due = drive.agenda.first_key_value().map(|((at, _), _)| *at);
        match (asked.peek(), due) {
            // what happens at the same moment has happened before
            (Some(&(id, next)), _) if due.is_none_or(|due| next.at < due) => {
                asked.next();
                drive.arrives(id, next)?;
            }
            (_, Some(_)) => drive.happens(asked.peek().is_some()),
            (_, None) => return Ok(drive.seen),
        }
    }
}

/// What is to happen at some moment.
enum Due {
    /// An engine comes to its next moment.
    Engine(usize),
    /// The gateway hears that an engine holds blocks.
    Stored(usize, Arc<Prompt>, Arc<[u64]>, Range<usize>),
    /// The gateway hears that an engine holds blocks no more.
    Removed(usize, Vec<u64>),
    /// Engines tell of themselves.
    Telemetry,
}

/// A request on its way.
struct Live {
    at: Duration,
    prompt: Arc<Prompt>,
    chain: Arc<[u64]>,
    facts: Facts,
    lease: Option<Lease>,
    endpoint: usize,
    tier: &'static str,
    why: Option<&'static str>,
}

struct Drive<'a> {
    policy: &'a Policy,
    setting: &'a Setting,
    model: Arc<str>,
    endpoints: Vec<Endpoint>,
    ladder: Ladder,
    engines: Vec<Clocked>,
    caches: Vec<(CacheId, Standing)>,
    ingest: Ingest,
    hasher: OwnHasher,
    forecasts: Option<Arc<Forecasts>>,
    /// The moment at which the trace begins, for whoever wants one.
    base: Instant,
    agenda: BTreeMap<(Duration, u64), Due>,
    planned: u64,
    live: BTreeMap<usize, Live>,
    seen: Seen,
}

impl<'a> Drive<'a> {
    fn new(policy: &'a Policy, setting: &'a Setting) -> Result<Self, String> {
        let engines = Engines::default();
        let numbered = policy.rule.endpoints.iter().enumerate();
        let endpoints: Vec<_> = numbered.map(|(index, e)| e.endpoint(&engines, index)).collect();
        let max_caches = u16::try_from(endpoints.len()).unwrap_or(u16::MAX);
        let (mut ingest, inventory) = Ingest::new(Config { max_caches, max_orphans: setting.engine.blocks });
        let hasher = OwnHasher::with_key(setting.seed);
        let holdings = Arc::new(Holdings::new(inventory, hasher.clone()));
        let caches = caches(&mut ingest, &holdings, &endpoints, setting)?;
        let forecasts = policy.rule.uses(ORACLE).then(Arc::<Forecasts>::default);
        let mut services = Services::default().with(holdings);
        if let Some(forecasts) = &forecasts {
            services = services.with(forecasts.clone());
        }
        let ground = Ground {
            store: &StateStore::default(),
            registry: &Registry::default(),
            alarms: &Alarms::default(),
            services: &services,
        };
        let rule = &policy.rule;
        // what tiers would run beside requests has no time of its own here
        let mut tasks = Vec::new();
        let ladder = plan::ladder(rule, &rule.tiers, &endpoints, &policy.kinds, &ground, &mut tasks)
            .map_err(|found| found.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))?;
        let model = rule.base_model().or(rule.matches.models.first().map(String::as_str));
        let mut drive = Self {
            policy,
            setting,
            model: model.unwrap_or("replay").into(),
            engines: endpoints.iter().map(|_| Clocked::new(setting.engine)).collect(),
            seen: Seen { served: vec![0; endpoints.len()], ..Seen::default() },
            endpoints,
            ladder,
            caches,
            ingest,
            hasher,
            forecasts,
            base: Instant::now(),
            agenda: BTreeMap::new(),
            planned: 0,
            live: BTreeMap::new(),
        };
        drive.plan(Duration::ZERO, Due::Telemetry);
        Ok(drive)
    }

    fn plan(&mut self, at: Duration, due: Due) {
        self.planned += 1;
        self.agenda.insert((at, self.planned), due);
    }

    /// A request comes: an endpoint is chosen for it, and asked.
    fn arrives(&mut self, id: usize, asked: &Asked) -> Result<(), String> {
        let now = asked.at;
        let chain = asked.prompt.chain();
        if let Some(forecasts) = &self.forecasts {
            let forecast = |engine: &Clocked| engine.forecast(now, &chain, asked.prompt.len());
            forecasts.set(self.engines.iter().map(forecast).collect());
        }
        let request = Request {
            id: id.to_string(),
            path: "/v1/completions".into(),
            model: Some(self.model.clone()),
            is_json: true,
            ..Request::default()
        };
        let facts = Facts::new(Arc::new(request), Arc::new(Source(asked.prompt.clone())));
        let selection = Selection {
            rule: &self.policy.rule.name,
            role: Role::Any,
            endpoints: &self.endpoints,
            tried: &Mask::none(),
            facts: &facts,
            prefill: None,
            seed: self.setting.seed.wrapping_add(id as u64),
            now: self.base + now,
            timer: &Never,
        };
        let mut record = Attempt::default();
        let what = |why: String| format!("{}: request {}: {why}", self.policy.name, id + 1);
        let chosen = self.ladder.choose(&selection, &mut record).now_or_never();
        let chosen = chosen.ok_or_else(|| what("is held back by a tier, which cannot be replayed".into()))?;
        let chosen = chosen.map_err(|refused| {
            what(match refused {
                Refused::NoEndpoint => "finds no endpoint".into(),
                Refused::Tier(refusal) => format!("is refused: {}", refusal.detail),
            })
        })?;
        let (endpoint, prompt) = (chosen.endpoint, asked.prompt.clone());
        let live = Live {
            at: now,
            prompt,
            chain: chain.clone(),
            facts,
            lease: Some(chosen.lease),
            endpoint,
            tier: chosen.tier,
            why: chosen.why,
        };
        if let Some(dispatch) = self.dispatch(&live, now) {
            self.ladder.on_dispatch(&dispatch);
        }
        self.seen.spills += u64::from(chosen.why == Some(Choice::SPILL));
        if let Some(served) = self.seen.served.get_mut(endpoint) {
            *served += 1;
        }
        self.live.insert(id, live);
        let (answer, generate) = self.setting.answer(asked);
        let job = Job { id, chain, tokens: asked.prompt.len(), answer, generate };
        self.engine(endpoint, now, |engine, happened| engine.submit(now, job, happened));
        Ok(())
    }

    fn dispatch<'l>(&'l self, live: &'l Live, now: Duration) -> Option<Dispatch<'l>> {
        Some(Dispatch {
            rule: &self.policy.rule.name,
            role: Role::Any,
            endpoint: self.endpoints.get(live.endpoint)?,
            tier: live.tier,
            why: live.why,
            facts: &live.facts,
            now: self.base + now,
        })
    }

    /// The next thing on the agenda; `more` requests are to come.
    fn happens(&mut self, more: bool) {
        let Some(((now, _), due)) = self.agenda.pop_first() else { return };
        match due {
            Due::Engine(at) => self.engine(at, now, |engine, happened| engine.advance(now, happened)),
            Due::Stored(at, prompt, chain, range) => self.hears_stored(at, &prompt, &chain, range),
            Due::Removed(at, names) => {
                if let Some((cache, standing)) = self.caches.get(at) {
                    self.ingest.removed(*cache, &names);
                    count(&self.ingest, *cache, standing);
                }
            }
            Due::Telemetry => {
                let until = self.base + now + BELIEVED;
                for (endpoint, engine) in self.endpoints.iter().zip(&self.engines) {
                    let (waiting, running) = engine.depth();
                    endpoint.engine.set_telemetry(Some(Telemetry {
                        blocks: Some(self.setting.engine.blocks as u64),
                        running: Some(running as u64),
                        waiting: Some(waiting as u64),
                        until,
                    }));
                }
                if more || !self.live.is_empty() {
                    self.plan(now + TELEMETRY, Due::Telemetry);
                }
            }
        }
    }

    fn hears_stored(&mut self, at: usize, prompt: &Prompt, chain: &[u64], range: Range<usize>) {
        let (Some((cache, standing)), Some(names)) = (self.caches.get(at), chain.get(range.clone())) else {
            return;
        };
        let parent = range.start.checked_sub(1).and_then(|before| chain.get(before)).copied();
        let hashes: Vec<_> = range.map(|block| self.hasher.token_hash(&prompt.block(block), &[])).collect();
        self.ingest.stored(*cache, parent, names, &hashes);
        count(&self.ingest, *cache, standing);
    }

    /// Lets an engine do something, and sees to what comes of it.
    fn engine(&mut self, at: usize, now: Duration, act: impl FnOnce(&mut Clocked, &mut Vec<Happening>)) {
        let mut happened = Vec::new();
        let Some(engine) = self.engines.get_mut(at) else { return };
        let before = engine.next();
        act(engine, &mut happened);
        let next = engine.next();
        let heard = now + self.setting.event_delay;
        for happening in happened {
            match happening {
                Happening::Removed(names) => self.plan(heard, Due::Removed(at, names)),
                Happening::Stored(id, range) => {
                    let Some(live) = self.live.get(&id) else { continue };
                    let (prompt, chain) = (live.prompt.clone(), live.chain.clone());
                    self.plan(heard, Due::Stored(at, prompt, chain, range));
                }
                Happening::Answers(id, cached) => self.answers(id, now, cached),
                Happening::Ends(id) => self.ends(id, now),
            }
        }
        if let Some(next) = next.filter(|_| next != before) {
            self.plan(next, Due::Engine(at));
        }
    }

    fn answers(&mut self, id: usize, now: Duration, cached: usize) {
        let Some(live) = self.live.get(&id) else { return };
        if let Some(dispatch) = self.dispatch(live, now) {
            self.ladder.on_answer(&dispatch, &HeaderMap::new());
        }
        self.seen.ttft.push(now.saturating_sub(live.at));
        self.seen.tokens += live.prompt.len() as u64;
        self.seen.cached += cached as u64;
    }

    fn ends(&mut self, id: usize, now: Duration) {
        let Some(mut live) = self.live.remove(&id) else { return };
        let outcome = Outcome::complete(200);
        if let Some(lease) = live.lease.take() {
            lease.end(outcome);
        }
        if let Some(dispatch) = self.dispatch(&live, now) {
            self.ladder.on_complete(&Completion { dispatch, outcome });
        }
    }
}

/// A cache in the inventory for each endpoint.
fn caches(
    ingest: &mut Ingest,
    holdings: &Holdings,
    endpoints: &[Endpoint],
    setting: &Setting,
) -> Result<Vec<(CacheId, Standing)>, String> {
    let (mut all, mut made) = (Caches::default(), Vec::new());
    for endpoint in endpoints {
        let blocks = setting.engine.blocks;
        let id = ingest.add_cache(blocks, 2 * blocks).ok_or("more engines than an inventory can hold")?;
        let block_size = Some(BLOCK as u32);
        let key = endpoint.engine.id().0;
        let standing = Standing::default();
        standing.set_trusted(true);
        all.set(key, vec![Cache { key, rank: 0, view: View::Own, id, block_size }], &standing);
        made.push((id, standing));
    }
    holdings.publish(all);
    Ok(made)
}

/// Says how much a cache holds.
fn count(ingest: &Ingest, cache: CacheId, standing: &Standing) {
    standing.set_blocks(ingest.counts(cache).map_or(0, |counts| counts.blocks));
}

/// The facts about a request of a trace.
struct Source(Arc<Prompt>);

impl FactSource for Source {
    fn text<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<str>, Miss>> {
        async { Ok(self.0.text().into()) }.boxed()
    }

    fn opening<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<Opening>, Miss>> {
        let (system, first) = self.0.opening(Opening::LONGEST);
        async { Ok(Arc::new(Opening { system, first })) }.boxed()
    }

    fn tokens<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<Tokens>, Miss>> {
        async { Ok(Arc::new(Tokens { sequences: vec![self.0.tokens().into()] })) }.boxed()
    }
}

/// No tier has to hurry where time stands still.
struct Never;

impl Timer for Never {
    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        futures::future::pending().boxed()
    }
}
