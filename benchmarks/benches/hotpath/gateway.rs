//! kvgate's decision, put together as the gateway does: a ladder with `kv-exact`, the facts from `kvgate-prompt`, the
//! inventory of `kvgate-kv`.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use futures::executor::block_on;
use kvgate_core::conformance::{self, Ground};
use kvgate_core::{
    Attempt, BoxFuture, Endpoint, Engines, FactSource, Facts, Ladder, Mask, Miss, Request, Services, Tokens,
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
        let endpoints = conformance::endpoints(&Engines::default(), &vec![1; endpoints]);
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
        let tried = Mask::none();
        let selection = conformance::selection(&self.endpoints, &tried, &facts);
        let mut record = Attempt::default();
        let chosen = block_on(self.ladder.choose(&selection, &mut record)).unwrap();
        assert_eq!(chosen.tier, kv_exact::KIND.name, "{record:?}");
        let overlap = record.candidates.iter().find(|c| c.endpoint == chosen.endpoint);
        (chosen.endpoint, overlap.unwrap().overlap)
    }
}

fn ladder(endpoints: &[Endpoint], holdings: &Arc<Holdings>) -> Ladder {
    let ground = Ground { services: Services::default().with(Arc::clone(holdings)), ..Ground::default() };
    // every endpoint is asked for what it holds, cold or not
    let keys = conformance::keys(&kv_exact::KIND, &serde_json::json!({"seeding": {"every": 0}}));
    conformance::ladder(vec![ground.rung(&kv_exact::KIND, &keys, endpoints).unwrap()])
}
