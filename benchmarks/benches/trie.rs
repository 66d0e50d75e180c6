//! `radix-trie` on prompts of three sizes, each of which shares its first quarter with others: what a prompt costs that
//! was never seen, and what it costs again; a whole ladder with its facts at hand, and what is remembered of an answer.
//!
//! CPU time of the thread.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::executor::block_on;
use kvgate_bench::{Chat, Samples};
use kvgate_core::{
    Alarms, Attempt, BoxFuture, BuildContext, Dispatch, Endpoint, Engines, FactSource, Facts, HeaderMap,
    Identity, Ladder, Mask, Miss, Registry, Request, Role, Rung, Selection, Services, StateStore, TierConfig,
    Timer, Tokens,
};

const ENDPOINTS: usize = 8;
const PROMPTS: u64 = 400;
/// Prompts that have their first quarter in common.
const GROUP: u64 = 20;

struct Text(Arc<str>);

impl FactSource for Text {
    fn text<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<str>, Miss>> {
        async { Ok(Arc::clone(&self.0)) }.boxed()
    }

    fn tokens<'a>(&'a self, _: &'a Request) -> BoxFuture<'a, Result<Arc<Tokens>, Miss>> {
        async { Err(Miss("tokenize")) }.boxed()
    }
}

struct Never;

impl Timer for Never {
    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        futures::future::pending().boxed()
    }
}

struct Gateway {
    endpoints: Vec<Endpoint>,
    ladder: Ladder,
}

impl Gateway {
    fn new() -> Self {
        let engines = Engines::default();
        let endpoint = |index| Endpoint {
            engine: engines.get(&Identity { address: format!("127.0.0.1:{index}"), tls: None }),
            role: Role::Any,
            weight: 1,
            index,
        };
        let endpoints: Vec<_> = (0..ENDPOINTS).map(endpoint).collect();
        let kind = kvgate_tiers::TIERS.iter().find(|kind| kind.name == "radix-trie").unwrap();
        let default = |field: &kvgate_core::schema::Field| {
            (field.key.to_owned(), serde_json::from_str(field.default).unwrap())
        };
        let mut context = BuildContext {
            rule: "bench",
            endpoints: &endpoints,
            store: &StateStore::default(),
            registry: &Registry::default(),
            alarms: &Alarms::default(),
            services: &Services::default(),
            tasks: Vec::new(),
        };
        let keys = TierConfig(kind.schema.iter().map(default).collect());
        let tier = (kind.build)(&keys, &mut context).unwrap();
        let rung = Rung { name: kind.name, tier, misses: Vec::new(), picks: Arc::default() };
        Self { ladder: Ladder::new(vec![rung], Duration::from_secs(1)), endpoints }
    }

    /// Chooses for a prompt and hears of the answer.
    fn serve(&self, prompt: &Arc<str>, choice: &mut Samples, answer: &mut Samples) {
        let facts = Facts::new(Arc::default(), Arc::new(Text(Arc::clone(prompt))));
        let tried = Mask::none();
        let selection = Selection {
            rule: "bench",
            role: Role::Any,
            endpoints: &self.endpoints,
            tried: &tried,
            facts: &facts,
            prefill: None,
            seed: 0,
            now: Instant::now(),
            timer: &Never,
        };
        let mut record = Attempt::default();
        let chosen = choice.time(|| block_on(self.ladder.choose(&selection, &mut record))).unwrap();
        let dispatch = Dispatch {
            rule: "bench",
            role: Role::Any,
            endpoint: &self.endpoints[chosen.endpoint],
            tier: chosen.tier,
            why: chosen.why,
            facts: &facts,
            now: selection.now,
        };
        answer.time(|| self.ladder.on_answer(&dispatch, &HeaderMap::new()));
    }
}

fn prompts(bytes: usize) -> Vec<Arc<str>> {
    let text = |seed: u64, bytes: usize| {
        let text = Chat::new(seed, bytes, 1).0.remove(0).1;
        text.chars().take(bytes).collect::<String>()
    };
    let prompt = |seed: u64| text(seed / GROUP, bytes / 4) + &text(seed | 1 << 40, bytes - bytes / 4);
    (0..PROMPTS).map(|seed| prompt(seed).into()).collect()
}

fn main() {
    println!("{PROMPTS} prompts, {ENDPOINTS} endpoints; microseconds, median and 99 of 100");
    println!("{:>10} {:>22} {:>22}", "", "choose", "remember");
    for kib in [1, 32, 128] {
        let (gateway, prompts) = (Gateway::new(), prompts(kib << 10));
        for name in ["new", "again"] {
            let (mut choice, mut answer) = (Samples::default(), Samples::default());
            prompts.iter().for_each(|prompt| gateway.serve(prompt, &mut choice, &mut answer));
            let cell = |samples: &Samples| format!("{:.1} / {:.1}", samples.median(), samples.micros(99));
            println!("{:>4} KiB {name:<6} {:>17} {:>22}", kib, cell(&choice), cell(&answer));
        }
    }
}
