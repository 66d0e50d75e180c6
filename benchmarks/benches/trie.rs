//! `radix-trie` on prompts of three sizes, each of which shares its first quarter with others: what a prompt costs that
//! was never seen, and what it costs again; a whole ladder with its facts at hand, and what is remembered of an answer.
//!
//! CPU time of the thread.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::sync::Arc;

use futures::executor::block_on;
use kvgate_bench::{Chat, Samples};
use kvgate_core::conformance::{self, Ground, Known};
use kvgate_core::{Attempt, Endpoint, Engines, HeaderMap, Ladder, Mask, Request};

const ENDPOINTS: usize = 8;
const PROMPTS: u64 = 400;
/// Prompts that have their first quarter in common.
const GROUP: u64 = 20;

struct Gateway {
    endpoints: Vec<Endpoint>,
    ladder: Ladder,
}

impl Gateway {
    fn new() -> Self {
        let endpoints = conformance::endpoints(&Engines::default(), &[1; ENDPOINTS]);
        let kind = kvgate_tiers::TIERS.iter().find(|kind| kind.name == "radix-trie").unwrap();
        let keys = conformance::keys(kind, &serde_json::Value::Null);
        let rung = Ground::default().rung(kind, &keys, &endpoints).unwrap();
        Self { ladder: conformance::ladder(vec![rung]), endpoints }
    }

    /// Chooses for a prompt and hears of the answer.
    fn serve(&self, prompt: &Arc<str>, choice: &mut Samples, answer: &mut Samples) {
        let facts = Known { text: Ok(Arc::clone(prompt)), ..Known::default() }.facts(Request::default());
        let tried = Mask::none();
        let selection = conformance::selection(&self.endpoints, &tried, &facts);
        let mut record = Attempt::default();
        let chosen = choice.time(|| block_on(self.ladder.choose(&selection, &mut record))).unwrap();
        let dispatch =
            conformance::dispatch(&self.endpoints[chosen.endpoint], &chosen, &facts, selection.now);
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
