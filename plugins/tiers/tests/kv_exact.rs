//! `kv-exact` on a real inventory, in a real ladder.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::executor::block_on;
use kvgate_core::*;
use kvgate_kv::hash::{Algorithm, Contract, ExtraKeys, Lora, Namespace};
use kvgate_kv::holdings::{Cache, Holdings, Standing};
use kvgate_kv::inventory::{Config, Ingest};
use kvgate_kv::mirror::View;
use kvgate_kv::own::OwnHasher;
use serde_json::json;

struct Prompt(Result<Vec<Vec<u32>>, Miss>);

impl FactSource for Prompt {
    fn text<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<str>, Miss>> {
        async { Err(Miss("text_empty")) }.boxed()
    }
    fn tokens<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<Tokens>, Miss>> {
        let tokens =
            |s: &Vec<Vec<u32>>| Tokens { sequences: s.iter().map(|s| s.as_slice().into()).collect() };
        async move { self.0.as_ref().map(|s| Arc::new(tokens(s))).map_err(|m| *m) }.boxed()
    }
}

struct Never;

impl Timer for Never {
    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        futures::future::pending().boxed()
    }
}

fn contract() -> Contract {
    Contract {
        algorithm: Algorithm::Sha256Cbor,
        block_size: 16,
        seed: Some("0".into()),
        extra_keys: ExtraKeys::Tagged,
    }
}

struct Fleet {
    endpoints: Vec<Endpoint>,
    holdings: Arc<Holdings>,
    ingest: Ingest,
    registry: Registry,
    alarms: Alarms,
    /// Of the caches in the order in which they were made.
    standing: std::cell::RefCell<Vec<Standing>>,
}

impl Fleet {
    fn new(count: usize) -> Self {
        let (ingest, inventory) = Ingest::new(Config { max_caches: 63, max_orphans: 100 });
        let engines = Engines::default();
        let endpoint = |index| Endpoint {
            engine: engines.get(&Identity { address: format!("127.0.0.1:{index}"), tls: None }),
            role: Role::Any,
            weight: 1,
            index,
        };
        Self {
            endpoints: (0..count).map(endpoint).collect(),
            holdings: Arc::new(Holdings::new(inventory, OwnHasher::with_key(1))),
            ingest,
            registry: Registry::default(),
            alarms: Alarms::default(),
            standing: Default::default(),
        }
    }

    /// The engine holds the full blocks of these tokens.
    fn holds(&mut self, endpoint: usize, view: View, size: usize, tokens: &[u32], namespace: &Namespace) {
        let id = self.ingest.add_cache(0, 10_000).unwrap();
        let hasher = contract().hasher().unwrap();
        let published: Vec<u64> = hasher.blocks(tokens, namespace).iter().map(|d| d.u64()).collect();
        if view == View::Published {
            self.ingest.stored_published(id, &published);
        } else {
            let hash = |(at, block): (usize, &[u32])| {
                let mut extras = Vec::new();
                kvgate_kv::own::extras_of_query(namespace, at, &mut extras);
                self.holdings.hasher().token_hash(block, &extras)
            };
            let hashes: Vec<u64> = tokens.chunks_exact(size).enumerate().map(hash).collect();
            let names: Vec<u64> = (1..=hashes.len() as u64).collect();
            self.ingest.stored(id, None, &names, &hashes);
        }
        let key = self.endpoints[endpoint].engine.id().0;
        let mut all = kvgate_kv::holdings::Caches::clone(&self.holdings.caches());
        let mut caches = all.of(key).to_vec();
        let rank = caches.len() as u32;
        caches.push(Cache { key, rank, view, id, block_size: Some(size as u32) });
        let standing = Standing::default();
        standing.set_trusted(true);
        all.set(key, caches, &standing);
        self.standing.borrow_mut().push(standing);
        self.holdings.publish(all);
    }

    fn ladder(&self, config: serde_json::Value) -> Ladder {
        let mut all = defaults();
        all["zero_hit_requests"] = json!(3);
        for (key, value) in config.as_object().unwrap() {
            all[key] = value.clone();
        }
        let serde_json::Value::Object(all) = all else { unreachable!() };
        let (store, services) = (StateStore::default(), Services::default().with(self.holdings.clone()));
        let mut context = BuildContext {
            rule: "qwen3",
            endpoints: &self.endpoints,
            store: &store,
            registry: &self.registry,
            alarms: &self.alarms,
            services: &services,
            tasks: Vec::new(),
        };
        let tier = (kvgate_tiers::kv_exact::KIND.build)(&TierConfig(all), &mut context).unwrap();
        let rung = Rung { name: "kv-exact", tier, misses: Vec::new(), picks: Arc::default() };
        Ladder::new(vec![rung], Duration::from_secs(1))
    }

    fn ask(&self, ladder: &Ladder, request: Request, tried: &Mask, prompt: Prompt) -> Attempt {
        let facts = Facts::new(Arc::new(request), Arc::new(prompt));
        let selection = Selection {
            rule: "qwen3",
            role: Role::Any,
            endpoints: &self.endpoints,
            tried,
            facts: &facts,
            prefill: None,
            seed: 0,
            now: std::time::Instant::now(),
            timer: &Never,
        };
        let mut record = Attempt::default();
        let chosen = block_on(ladder.choose(&selection, &mut record)).unwrap();
        let answered = Dispatch {
            rule: "qwen3",
            role: Role::Any,
            endpoint: &self.endpoints[chosen.endpoint],
            tier: chosen.tier,
            why: chosen.why,
            facts: &facts,
            now: selection.now,
        };
        ladder.on_answer(&answered, &HeaderMap::new());
        record
    }

    /// The endpoint that kv-exact picked, or its miss.
    fn route(&self, ladder: &Ladder, tokens: &[u32]) -> Result<usize, &'static str> {
        outcome(&self.ask(ladder, chat(), &Mask::none(), Prompt(Ok(vec![tokens.to_vec()]))))
    }

    fn count(&self, name: &str, label: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|f| f.name == name).unwrap();
        let labelled = |s: &&Sample| label.is_empty() || s.labels.iter().any(|(_, v)| v == label);
        family.samples.iter().find(labelled).unwrap().value
    }
}

/// The tier's keys as they are when none is given.
fn defaults() -> serde_json::Value {
    let mut keys = json!({});
    for field in kvgate_tiers::kv_exact::KIND.schema.iter().filter(|f| !f.default.is_empty()) {
        let place = field.key.split('.').fold(&mut keys, |table, part| &mut table[part]);
        *place = serde_json::from_str(field.default).unwrap();
    }
    keys
}

fn outcome(record: &Attempt) -> Result<usize, &'static str> {
    match record.steps[0].miss {
        Some(miss) => Err(miss.0),
        None => Ok(record.winner.as_ref().unwrap().endpoint),
    }
}

fn chat() -> Request {
    Request { model: Some("tiny".into()), is_json: true, ..Request::default() }
}

fn tokens(count: u32) -> Vec<u32> {
    (1000..1000 + count).collect()
}

#[test]
fn the_longest_held_prefix_wins_and_the_first_among_equals() {
    let mut fleet = Fleet::new(4);
    let plain = Namespace::default();
    fleet.holds(1, View::Own, 16, &tokens(32), &plain);
    fleet.holds(2, View::Own, 16, &tokens(64), &plain);
    fleet.holds(3, View::Own, 16, &tokens(64), &plain);
    let ladder = fleet.ladder(json!({}));
    let record = fleet.ask(&ladder, chat(), &Mask::none(), Prompt(Ok(vec![tokens(100)])));
    assert_eq!(outcome(&record), Ok(2));
    let scored: Vec<_> = record.candidates.iter().map(|c| (c.endpoint, c.overlap)).collect();
    assert_eq!(scored, [(2, 64), (3, 64), (1, 32), (0, 0)], "the winner, then the best");
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_hits_total", "2"), 1);
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_hits_total", "3"), 0);
}

#[test]
fn an_excluded_holder_falls_to_the_second_best_and_then_to_excluded() {
    let mut fleet = Fleet::new(3);
    fleet.holds(0, View::Own, 16, &tokens(64), &Namespace::default());
    fleet.holds(1, View::Own, 16, &tokens(32), &Namespace::default());
    let ladder = fleet.ladder(json!({}));
    let ask = |tried: &[usize]| {
        let tried = tried.iter().copied().collect();
        outcome(&fleet.ask(&ladder, chat(), &tried, Prompt(Ok(vec![tokens(64)]))))
    };
    assert_eq!(ask(&[0]), Ok(1));
    assert_eq!(ask(&[0, 1]), Err("excluded"));
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_miss_reason_total", "excluded"), 1);
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_fallthrough_total", ""), 1);
}

#[test]
fn every_miss_has_its_reason_and_the_model_comes_first() {
    let mut fleet = Fleet::new(1);
    let ladder = fleet.ladder(json!({}));
    let ask = |model: Option<&str>, prompt| {
        let request = Request { model: model.map(Into::into), ..Request::default() };
        outcome(&fleet.ask(&ladder, request, &Mask::none(), Prompt(prompt)))
    };
    assert_eq!(ask(None, Err(Miss("text_empty"))), Err("model_empty"));
    assert_eq!(ask(Some(""), Err(Miss("text_empty"))), Err("model_empty"));
    assert_eq!(ask(Some("m"), Err(Miss("text_empty"))), Err("text_empty"));
    assert_eq!(ask(Some("m"), Err(Miss("tokenize"))), Err("tokenize"));
    assert_eq!(ask(Some("m"), Ok(vec![tokens(15)])), Err("shallow"));
    assert_eq!(ask(Some("m"), Ok(vec![tokens(16)])), Err("no_worker"));
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_fallthrough_total", ""), 6);
    for reason in ["mode_off", "warmup", "hashes", "excluded", "deadline"] {
        assert_eq!(fleet.count("loxilb_pd_kv_tier15_miss_reason_total", reason), 0, "{reason}");
    }
    fleet.holds(0, View::Own, 16, &tokens(15), &Namespace::default());
    let all = fleet.ladder(json!({"min_match_tokens": 0}));
    assert_eq!(fleet.route(&all, &tokens(15)), Err("no_worker"), "no full block, nothing to hold");
}

#[test]
fn block_sizes_are_each_engines_own() {
    let mut fleet = Fleet::new(3);
    fleet.holds(0, View::Own, 16, &tokens(48), &Namespace::default());
    fleet.holds(1, View::Own, 32, &tokens(64), &Namespace::default());
    fleet.holds(2, View::Own, 128, &tokens(100), &Namespace::default());
    let ladder = fleet.ladder(json!({}));
    assert_eq!(fleet.route(&ladder, &tokens(64)), Ok(1));
    assert_eq!(fleet.route(&ladder, &tokens(60)), Ok(0));
}

#[test]
fn the_best_rank_counts_and_several_prompts_add_up() {
    let mut fleet = Fleet::new(2);
    let other: Vec<u32> = (5000..5048).collect();
    fleet.holds(0, View::Own, 16, &tokens(32), &Namespace::default());
    fleet.holds(0, View::Own, 16, &other, &Namespace::default());
    fleet.holds(1, View::Own, 16, &tokens(32), &Namespace::default());
    let ladder = fleet.ladder(json!({}));
    let record = fleet.ask(&ladder, chat(), &Mask::none(), Prompt(Ok(vec![tokens(32), other.clone()])));
    let scored: Vec<_> = record.candidates.iter().map(|c| c.overlap).collect();
    assert_eq!(scored, [48, 32]);
}

#[test]
fn adapters_and_salts_are_worlds_of_their_own_in_both_modes() {
    let lora = Namespace { lora: Some(Lora { name: "sql".into(), path: "/a/sql".into() }), cache_salt: None };
    let salt = Namespace { lora: None, cache_salt: Some("t1".into()) };
    for (mode, view) in [("auto", View::Own), ("strict", View::Published)] {
        let mut fleet = Fleet::new(3);
        fleet.holds(0, view, 16, &tokens(32), &Namespace::default());
        fleet.holds(1, view, 16, &tokens(32), &lora);
        fleet.holds(2, view, 16, &tokens(32), &salt);
        let ladder = fleet.ladder(json!({
            "lora": {"sql": "/a/sql"},
            "contract": {"mode": mode, "algorithm": "sha256_cbor", "block_size": 16, "none_hash_seed": "0", "extra_keys": "tagged"},
        }));
        let ask = |model: &str, salt: Option<&str>| {
            let request =
                Request { model: Some(model.into()), cache_salt: salt.map(Into::into), ..Request::default() };
            outcome(&fleet.ask(&ladder, request, &Mask::none(), Prompt(Ok(vec![tokens(32)]))))
        };
        assert_eq!(ask("tiny", None), Ok(0), "{mode}");
        assert_eq!(ask("sql", None), Ok(1), "{mode}");
        assert_eq!(ask("tiny", Some("t1")), Ok(2), "{mode}");
        assert_eq!(ask("tiny", Some("t2")), Err("no_worker"), "{mode}");
        assert_eq!(ask("sql", Some("t1")), Err("no_worker"), "{mode}");
    }
}

#[test]
fn a_strict_contract_with_the_wrong_seed_never_matches_and_says_so() {
    let mut fleet = Fleet::new(1);
    fleet.holds(0, View::Published, 16, &tokens(32), &Namespace::default());
    let contract = |seed: &str| json!({"contract": {"mode": "strict", "algorithm": "sha256_cbor", "block_size": 16, "none_hash_seed": seed, "extra_keys": "tagged"}});
    let wrong = fleet.ladder(contract("1"));
    for _ in 0..4 {
        assert_eq!(fleet.route(&wrong, &tokens(32)), Err("no_worker"));
    }
    let alarm = fleet.alarms.get("qwen3", "kv_zero_hits");
    assert!(alarm.detail().unwrap().contains("none_hash_seed"), "{:?}", alarm.detail());
    assert_eq!(fleet.count("loxilb_pd_kv_zero_hit_watchdog_total", "qwen3"), 2);
    let right = fleet.ladder(contract("0"));
    assert_eq!(fleet.route(&right, &tokens(32)), Ok(0));
    assert_eq!(alarm.detail(), None);
}

#[test]
fn a_contract_that_cannot_be_used_misses_hashes() {
    let mut fleet = Fleet::new(1);
    fleet.holds(0, View::Published, 16, &tokens(32), &Namespace::default());
    let unusable =
        json!({"mode": "strict", "algorithm": "xxhash_cbor", "block_size": 16, "extra_keys": "tagged"});
    let ladder = fleet.ladder(json!({"contract": unusable}));
    assert_eq!(fleet.route(&ladder, &tokens(32)), Err("hashes"));
}

#[test]
fn an_empty_inventory_raises_no_alarm() {
    let fleet = Fleet::new(1);
    let ladder = fleet.ladder(json!({}));
    for _ in 0..10 {
        assert_eq!(fleet.route(&ladder, &tokens(32)), Err("no_worker"));
    }
    assert_eq!(fleet.alarms.get("qwen3", "kv_zero_hits").detail(), None);
}

#[test]
fn an_engine_that_may_have_restarted_gets_no_credit() {
    let mut fleet = Fleet::new(2);
    fleet.holds(0, View::Own, 16, &tokens(64), &Namespace::default());
    fleet.holds(1, View::Own, 16, &tokens(32), &Namespace::default());
    let ladder = fleet.ladder(json!({}));
    fleet.standing.borrow()[0].set_trusted(false);
    assert_eq!(fleet.route(&ladder, &tokens(64)), Ok(1));
    fleet.standing.borrow()[1].set_trusted(false);
    assert_eq!(fleet.route(&ladder, &tokens(64)), Err("no_worker"));
    fleet.standing.borrow()[0].set_trusted(true);
    assert_eq!(fleet.route(&ladder, &tokens(64)), Ok(0));
}

#[test]
fn conforms() {
    let fleet = Fleet::new(0);
    let serde_json::Value::Object(config) = defaults() else { unreachable!() };
    let services = Services::default().with(fleet.holdings.clone());
    conformance::check(&kvgate_tiers::kv_exact::KIND, &TierConfig(config), &services);
}
