//! A fleet on a real inventory, asked through a real ladder.

use std::sync::Arc;
use std::time::Instant;

use futures::executor::block_on;
use kvgate_core::conformance::{self, Ground, Known};
use kvgate_core::*;
use kvgate_kv::hash::{Algorithm, Contract, ExtraKeys, Lora, Namespace};
use kvgate_kv::holdings::{Cache, Caches, Holdings, Standing};
use kvgate_kv::inventory::{Config, Ingest};
use kvgate_kv::mirror::View;
use kvgate_kv::own::OwnHasher;
use kvgate_tiers::kv_exact::KIND;
use serde_json::{Value, json};

pub const HITS: &str = "loxilb_pd_kv_tier15_hits_total";
pub const SPILLS: &str = "loxilb_pd_kv_tier15_spills_total";
pub const SEEDS: &str = "loxilb_pd_kv_tier15_cold_seeds_total";
pub const SPECULATIVE: &str = "kvgate_kv_speculative_picks_total";

/// A prompt of these sequences, or the miss there is in its place.
pub fn prompt(tokens: Result<Vec<Vec<u32>>, Miss>) -> Known {
    tokens.map_or_else(|miss| Known { tokens: Err(miss), ..Known::default() }, |s| Known::of_tokens(&s))
}

pub fn contract() -> Contract {
    Contract {
        algorithm: Algorithm::Sha256Cbor,
        block_size: 16,
        seed: Some("0".into()),
        extra_keys: ExtraKeys::Tagged,
    }
}

/// The table `contract` for a mode that agrees with [`contract`].
pub fn contract_keys(mode: &str) -> Value {
    json!({
        "mode": mode, "algorithm": "sha256_cbor", "block_size": 16, "none_hash_seed": "0", "extra_keys": "tagged",
    })
}

pub fn lora(name: &str) -> Namespace {
    Namespace { lora: Some(Lora { name: name.into(), path: format!("/a/{name}") }), cache_salt: None }
}

pub fn salt(salt: &str) -> Namespace {
    Namespace { lora: None, cache_salt: Some(salt.into()) }
}

pub struct Fleet {
    pub endpoints: Vec<Endpoint>,
    pub holdings: Arc<Holdings>,
    pub ingest: Ingest,
    pub ground: Ground,
    /// Of the caches in the order in which they were made.
    pub standing: Vec<Standing>,
}

impl Fleet {
    pub fn new(count: usize) -> Self {
        Self::of(Role::Any, count)
    }

    pub fn of(role: Role, count: usize) -> Self {
        let (ingest, inventory) = Ingest::new(Config { max_caches: 63, max_orphans: 100 });
        let holdings = Arc::new(Holdings::new(inventory, OwnHasher::with_key(1)));
        let services = Services::default().with(holdings.clone());
        let engines = Engines::default();
        Self {
            endpoints: (0..count).map(|index| conformance::endpoint(&engines, index, role, 1)).collect(),
            holdings,
            ingest,
            ground: Ground { services, ..Ground::default() },
            standing: Vec::new(),
        }
    }

    /// The engine holds the full blocks of these tokens, on a rank of their own.
    pub fn holds(&mut self, endpoint: usize, view: View, size: usize, tokens: &[u32], namespace: &Namespace) {
        let id = self.ingest.add_cache(0, 10_000).unwrap();
        let key = self.endpoints[endpoint].engine.id().0;
        let mut all = Caches::clone(&self.holdings.caches());
        let mut caches = all.of(key).to_vec();
        let rank = caches.len() as u32;
        caches.push(Cache { key, rank, view, id, block_size: Some(size as u32) });
        let standing = Standing::default();
        standing.set_trusted(true);
        all.set(key, caches, &standing);
        self.standing.push(standing);
        self.holdings.publish(all);
        self.stores(endpoint, rank as usize, tokens, namespace);
    }

    /// Followed, and known to have blocks of 16 tokens, none of which is of any prompt here.
    pub fn follows_all(&mut self, view: View) {
        for endpoint in 0..self.endpoints.len() {
            let other: Vec<u32> = (0..16).map(|n| 900_000 + endpoint as u32 * 16 + n).collect();
            self.holds(endpoint, view, 16, &other, &Namespace::default());
        }
    }

    /// An event comes: the full blocks of these tokens were stored.
    pub fn stores(&mut self, endpoint: usize, rank: usize, tokens: &[u32], namespace: &Namespace) {
        let key = self.endpoints[endpoint].engine.id().0;
        let caches = self.holdings.caches();
        let cache = caches.of(key)[rank];
        let size = cache.block_size.unwrap() as usize;
        if cache.view == View::Published {
            let hasher = contract().hasher().unwrap();
            let hashes: Vec<u64> = hasher.blocks(tokens, namespace).iter().map(|d| d.u64()).collect();
            self.ingest.stored_published(cache.id, &hashes);
        } else {
            let hash = |(at, block): (usize, &[u32])| {
                let mut extras = Vec::new();
                kvgate_kv::own::extras_of_query(namespace, at, &mut extras);
                self.holdings.hasher().token_hash(block, &extras)
            };
            let hashes: Vec<u64> = tokens.chunks_exact(size).enumerate().map(hash).collect();
            let named = u64::from(tokens.first().copied().unwrap_or(0)) << 32;
            let names: Vec<u64> = (1..=hashes.len() as u64).map(|n| named + n).collect();
            self.ingest.stored(cache.id, None, &names, &hashes);
        }
        let blocks = self.ingest.counts(cache.id).unwrap().blocks;
        caches.of(key).iter().for_each(|_| self.standing_of(endpoint).set_blocks(blocks));
    }

    /// Of the endpoint whose cache was made last.
    fn standing_of(&self, endpoint: usize) -> Standing {
        let all = self.holdings.caches();
        let made: Vec<u64> =
            all.of(self.endpoints[endpoint].engine.id().0).iter().map(|c| c.id.0.into()).collect();
        self.standing[*made.last().unwrap() as usize].clone()
    }

    pub fn ladder(&self, config: Value) -> Ladder {
        let keys = conformance::keys(&KIND, &config);
        conformance::ladder(vec![self.ground.rung(&KIND, &keys, &self.endpoints).unwrap()])
    }

    /// The record of a request that is answered at once.
    pub fn ask(&self, ladder: &Ladder, request: Request, tried: &Mask, prompt: Known) -> Attempt {
        let flight = start(&self.endpoints, ladder, request, tried, prompt, Instant::now());
        flight.answer(ladder);
        let record = flight.record.clone();
        flight.end(ladder, Outcome::complete(200));
        record
    }

    /// The endpoint that kv-exact picked, or its miss.
    pub fn route(&self, ladder: &Ladder, tokens: &[u32]) -> Result<usize, &'static str> {
        outcome(&self.ask(ladder, chat(), &Mask::none(), prompt(Ok(vec![tokens.to_vec()]))))
    }

    /// A request that stays in flight, chosen now.
    pub fn send(&self, ladder: &Ladder, request: Request, tokens: &[u32]) -> Flight {
        self.send_at(ladder, request, tokens, Instant::now())
    }

    pub fn send_at(&self, ladder: &Ladder, request: Request, tokens: &[u32], now: Instant) -> Flight {
        start(&self.endpoints, ladder, request, &Mask::none(), prompt(Ok(vec![tokens.to_vec()])), now)
    }

    /// Of the series with this value of a label, if it is not empty.
    pub fn count(&self, name: &str, label: &str) -> u64 {
        let values: &[&str] = if label.is_empty() { &[] } else { &[label] };
        self.ground.metric(name, values).unwrap()
    }

    /// By `ep_idx`.
    pub fn counts(&self, name: &str) -> Vec<u64> {
        (0..self.endpoints.len()).map(|index| self.count(name, &index.to_string())).collect()
    }

    pub fn in_flight(&self) -> Vec<u64> {
        self.endpoints.iter().map(|e| e.engine.in_flight()).collect()
    }
}

/// A request under way.
pub struct Flight {
    pub record: Attempt,
    endpoint: Endpoint,
    chosen: Chosen,
    facts: Facts,
    now: Instant,
}

/// Chooses for a request and says that it is dispatched.
pub fn start(
    endpoints: &[Endpoint],
    ladder: &Ladder,
    request: Request,
    tried: &Mask,
    prompt: Known,
    now: Instant,
) -> Flight {
    let facts = prompt.facts(request);
    let selection =
        Selection { role: endpoints[0].role, now, ..conformance::selection(endpoints, tried, &facts) };
    let mut record = Attempt::default();
    let chosen = block_on(ladder.choose(&selection, &mut record)).unwrap();
    let flight = Flight { record, endpoint: endpoints[chosen.endpoint].clone(), chosen, facts, now };
    ladder.on_dispatch(&flight.dispatch());
    flight
}

impl Flight {
    fn dispatch(&self) -> Dispatch<'_> {
        conformance::dispatch(&self.endpoint, &self.chosen, &self.facts, self.now)
    }

    /// The endpoint that kv-exact picked and why, or its miss.
    pub fn outcome(&self) -> Result<(usize, Option<&'static str>), &'static str> {
        outcome(&self.record).map(|at| (at, self.chosen.why))
    }

    /// Whoever was chosen, by any tier.
    pub fn endpoint(&self) -> usize {
        self.endpoint.index
    }

    pub fn answer(&self, ladder: &Ladder) {
        ladder.on_answer(&self.dispatch(), &HeaderMap::new());
    }

    pub fn end(self, ladder: &Ladder, outcome: Outcome) {
        ladder.on_complete(&Completion { dispatch: self.dispatch(), outcome });
        self.chosen.lease.end(outcome);
    }
}

pub fn outcome(record: &Attempt) -> Result<usize, &'static str> {
    match record.steps[0].miss {
        Some(miss) => Err(miss.0),
        None => Ok(record.winner.as_ref().unwrap().endpoint),
    }
}

pub fn chat() -> Request {
    of("tiny", None)
}

/// For this model or adapter, with this salt.
pub fn of(model: &str, salt: Option<&str>) -> Request {
    Request {
        model: Some(model.into()),
        cache_salt: salt.map(Into::into),
        is_json: true,
        ..Request::default()
    }
}

pub fn tokens(count: u32) -> Vec<u32> {
    (1000..1000 + count).collect()
}
