//! kvgate's decision, put together as the gateway does: a ladder with `kv-exact`, the facts from `kvgate-prompt`, the
//! inventory of `kvgate-kv`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::executor::block_on;
use kvgate_core::{
    Alarms, Attempt, BoxFuture, BuildContext, Endpoint, Engines, FactSource, Facts, Identity, Ladder, Mask,
    Miss, Registry, Request, Role, Rung, Selection, Services, StateStore, Timer, Tokens,
};
use kvgate_kv::hash::{Algorithm, Contract, ExtraKeys, Hasher};
use kvgate_kv::holdings::{Cache, Caches, Holdings, Standing};
use kvgate_kv::inventory::{Config, Ingest};
use kvgate_kv::mirror::View;
use kvgate_kv::own::OwnHasher;
use kvgate_prompt::{Fields, Model, TokenizersConfig};
use kvgate_tiers::kv_exact;

pub const PATH: &str = "/v1/chat/completions";

/// Renders and tokenises, as the gateway's own source of facts.
struct Prompts(Arc<Model>);

impl FactSource for Prompts {
    fn text<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<str>, Miss>> {
        async { Err(Miss("text_empty")) }.boxed()
    }

    fn tokens<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Arc<Tokens>, Miss>> {
        async {
            let fields = Fields::read(&request.body).ok_or(Miss("text_empty"))?;
            let prompt =
                kvgate_prompt::prompt(&self.0, &request.path, &fields).map_err(|e| Miss(e.miss()))?;
            let sequences = prompt.sequences.into_iter().map(|s| s.tokens).collect();
            Ok(Arc::new(Tokens { sequences }))
        }
        .boxed()
    }
}

struct Never;

impl Timer for Never {
    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        futures::future::pending().boxed()
    }
}

pub struct Gateway {
    pub model: Arc<Model>,
    pub holdings: Arc<Holdings>,
    /// The engines' own hashes, as a strict contract computes them.
    pub hasher: Hasher,
    ingest: Ingest,
    source: Arc<Prompts>,
    endpoints: Vec<Endpoint>,
    ladder: Ladder,
}

impl Gateway {
    pub fn load(folder: &Path, seed: &str, block_size: u32, endpoints: usize) -> Self {
        let (mut ingest, inventory) = Ingest::new(Config { max_caches: 63, max_orphans: 100 });
        let holdings = Arc::new(Holdings::new(inventory, OwnHasher::new()));
        let engines = Engines::default();
        let endpoint = |index| Endpoint {
            engine: engines.get(&Identity { address: format!("127.0.0.1:{index}"), tls: None }),
            role: Role::Any,
            weight: 1,
            index,
        };
        let endpoints: Vec<Endpoint> = (0..endpoints).map(endpoint).collect();
        let (mut caches, standing) = (Caches::default(), Standing::default());
        standing.set_trusted(true);
        for key in endpoints.iter().map(|endpoint| endpoint.engine.id().0) {
            let id = ingest.add_cache(0, usize::MAX).unwrap();
            caches.set(
                key,
                vec![Cache { key, rank: 0, view: View::Own, id, block_size: Some(block_size) }],
                &standing,
            );
        }
        holdings.publish(caches);
        let contract = Contract {
            algorithm: Algorithm::Sha256Cbor,
            block_size,
            seed: Some(seed.to_owned()),
            extra_keys: ExtraKeys::Tagged,
        };
        let model = Arc::new(Model::load(folder, &TokenizersConfig::default()).unwrap());
        Self {
            source: Arc::new(Prompts(Arc::clone(&model))),
            model,
            hasher: contract.hasher().unwrap(),
            ingest,
            ladder: ladder(&endpoints, &holdings),
            holdings,
            endpoints,
        }
    }

    /// The endpoint's engine says that it stored these blocks of a prompt.
    pub fn stored(&mut self, endpoint: usize, names: &[u64], tokens: &[u32]) {
        let cache = self.holdings.caches().of(self.endpoints[endpoint].engine.id().0)[0];
        let blocks = tokens.chunks_exact(cache.block_size.unwrap() as usize);
        let hashes: Vec<u64> = blocks.map(|b| self.holdings.hasher().token_hash(b, &[])).collect();
        self.ingest.stored(cache.id, None, &names[..hashes.len()], &hashes);
    }

    /// What is read of a request before the ladder.
    pub fn request(&self, body: &Bytes) -> Request {
        let fields = Fields::read(body).unwrap();
        Request {
            path: PATH.to_owned(),
            body: body.clone(),
            model: fields.model.as_deref().map(Arc::from),
            is_json: true,
            ..Request::default()
        }
    }

    /// The whole decision: the endpoint, and the tokens of the prompt it holds.
    pub fn decide(&self, body: &Bytes) -> (usize, u64) {
        self.route(self.request(body), Arc::clone(&self.source) as Arc<dyn FactSource>)
    }

    /// The ladder alone, for a prompt that is tokenised.
    pub fn route(&self, request: Request, source: Arc<dyn FactSource>) -> (usize, u64) {
        let facts = Facts::new(Arc::new(request), source);
        let selection = Selection {
            rule: "bench",
            role: Role::Any,
            endpoints: &self.endpoints,
            tried: &Mask::none(),
            facts: &facts,
            prefill: None,
            seed: 0,
            now: std::time::Instant::now(),
            timer: &Never,
        };
        let mut record = Attempt::default();
        let chosen = block_on(self.ladder.choose(&selection, &mut record)).unwrap();
        assert_eq!(chosen.tier, kv_exact::KIND.name, "{record:?}");
        let overlap = record.candidates.iter().find(|c| c.endpoint == chosen.endpoint);
        (chosen.endpoint, overlap.unwrap().overlap)
    }
}

fn ladder(endpoints: &[Endpoint], holdings: &Arc<Holdings>) -> Ladder {
    let mut keys = serde_json::json!({});
    for field in kv_exact::KIND.schema.iter().filter(|f| !f.default.is_empty()) {
        let place = field.key.split('.').fold(&mut keys, |table, part| &mut table[part]);
        *place = serde_json::from_str(field.default).unwrap();
    }
    // every endpoint is asked for what it holds, cold or not
    keys["seeding"]["every"] = 0.into();
    let serde_json::Value::Object(keys) = keys else { unreachable!() };
    let services = Services::default().with(Arc::clone(holdings));
    let mut context = BuildContext {
        rule: "bench",
        endpoints,
        store: &StateStore::default(),
        registry: &Registry::default(),
        alarms: &Alarms::default(),
        services: &services,
        tasks: Vec::new(),
    };
    let tier = (kv_exact::KIND.build)(&kvgate_core::TierConfig(keys), &mut context).unwrap();
    let rung = Rung { name: kv_exact::KIND.name, tier, misses: Vec::new(), picks: Arc::default() };
    Ladder::new(vec![rung], Duration::from_secs(1))
}

/// Facts that are there already.
pub struct Ready(pub Arc<Tokens>);

impl FactSource for Ready {
    fn text<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<str>, Miss>> {
        async { Err(Miss("text_empty")) }.boxed()
    }

    fn tokens<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<Tokens>, Miss>> {
        async { Ok(Arc::clone(&self.0)) }.boxed()
    }
}
