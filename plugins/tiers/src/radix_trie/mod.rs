//! `radix-trie`: the endpoint that was given the longest part of this prompt before.

mod trie;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use futures::FutureExt;
use kvgate_core::schema::{self, Field, Kind};
use kvgate_core::{
    BoxFuture, BuildContext, BuildError, Candidate, Choice, Counter, Dispatch, EngineId, Facts, Gauge,
    HeaderMap, Miss, MissKind, Request, Role, Routing, Tier, TierConfig, TierKind, Verdict,
};
use serde::Deserialize;

use crate::choose::{lightest, rendezvous};
use trie::{Limits, Service, Trie};

const TEXT_EMPTY: Miss = Miss("text_empty");
const DECODE: Miss = Miss("decode");
const UNSEEN: Miss = Miss("unseen");
const EXCLUDED: Miss = Miss("excluded");
const SHALLOW: Miss = Miss("shallow");
const IMBALANCE: Miss = Miss("imbalance");

const fn miss(reason: Miss, doc: &'static str) -> MissKind {
    MissKind { reason: reason.0, doc }
}

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "radix-trie",
    doc: "Picks the endpoint that was given the longest part of this prompt before, from its start and whichever tier \
          chose it: a guess at what its cache holds, that needs no events and no tokenizer. Among equals the one with \
          the fewest requests in flight for its weight. Prompts are compared by their first MiB of text, tools before \
          messages, apart for each model, adapter and `cache_salt`.",
    misses: &[
        miss(TEXT_EMPTY, "The request holds no prompt, or its path is not one whose prompts are understood."),
        miss(DECODE, "An endpoint is sought for decode, where prompts do not count."),
        miss(UNSEEN, "No endpoint was given a prompt that starts like this one."),
        miss(EXCLUDED, "Only endpoints that may not be chosen were."),
        miss(SHALLOW, "What matches is less than `threshold_pct` of the prompt."),
        miss(IMBALANCE, "The requests in flight of two eligible endpoints differ by more than `imbalance`."),
    ],
    schema: &[
        Field {
            key: "threshold_pct",
            kind: Kind::Int { min: 0, max: 100 },
            default: "20",
            doc: "Matches of less than this share of the prompt's bytes are passed on, for the reason `shallow`.",
        },
        Field {
            key: "imbalance",
            kind: Kind::Int { min: 0, max: 1_000_000 },
            default: "3",
            doc: "While the most and the fewest requests in flight of the eligible endpoints differ by more than this, \
                  all requests are passed on.",
        },
        Field {
            key: "max_nodes",
            kind: Kind::Int { min: 64, max: 10_000_000 },
            default: "65536",
            doc: "Nodes that are kept: about one for each conversation, and one for each point where prompts part. The \
                  least recently used give way.",
        },
        Field {
            key: "max_bytes",
            kind: Kind::Size { min: 4 << 20, max: 64 << 30 },
            default: "\"64MiB\"",
            doc: "Memory of the rule's prompts, text and nodes. The least recently used give way.",
        },
    ],
    build,
};

#[derive(Debug, Clone, Copy, Deserialize)]
struct Config {
    threshold_pct: u64,
    imbalance: u64,
    max_nodes: usize,
    #[serde(deserialize_with = "schema::size")]
    max_bytes: u64,
}

/// What is kept over reloads.
#[derive(Default)]
struct Shared {
    trie: RwLock<Trie>,
    /// Tiers built on it.
    generations: AtomicU64,
}

struct RadixTrie {
    config: Config,
    shared: Arc<Shared>,
    service: Service,
    nodes: Arc<Gauge>,
    bytes: Arc<Gauge>,
    evicted: Arc<Counter>,
}

fn build(config: &TierConfig, context: &mut BuildContext<'_>) -> Result<Arc<dyn Tier>, BuildError> {
    let config: Config = config.parse()?;
    let shared = context.state("radix-trie", "", Shared::default);
    let mut engines: Vec<_> = context.endpoints.iter().map(|e| e.engine.id()).collect();
    engines.sort_unstable();
    let bytes = usize::try_from(config.max_bytes).unwrap_or(usize::MAX);
    let service = Service {
        generation: shared.generations.fetch_add(1, Ordering::Relaxed) + 1,
        engines: engines.into(),
        limits: Limits { nodes: config.max_nodes, bytes },
    };
    let labels = [("service", context.rule)];
    Ok(Arc::new(RadixTrie {
        nodes: context.gauge("loxilb_pd_trie_nodes", "Nodes of the prompts remembered.", &labels),
        bytes: context.gauge("kvgate_radix_trie_bytes", "Memory of the prompts remembered.", &labels),
        evicted: context.counter(
            "kvgate_radix_trie_evicted_nodes_total",
            "Nodes that gave way to newer ones.",
            &labels,
        ),
        config,
        shared,
        service,
    }))
}

impl Tier for RadixTrie {
    fn prepare<'a>(&'a self, facts: &'a Facts) -> Option<BoxFuture<'a, Result<(), Miss>>> {
        Some(async move { facts.text().await.map(drop) }.boxed())
    }

    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        if routing.role == Role::Decode {
            return Verdict::Pass(DECODE);
        }
        let text = match routing.facts.known_text() {
            Some(Ok(text)) => text,
            Some(Err(miss)) => return Verdict::Pass(miss),
            None => return Verdict::Pass(TEXT_EMPTY),
        };
        let text = start(&text);
        let mut eligible: Vec<(EngineId, usize)> =
            routing.eligible_endpoints().map(|(at, e)| (e.engine.id(), at)).collect();
        eligible.sort_unstable();
        let position = |engine: EngineId| {
            let at = eligible.binary_search_by_key(&engine, |(id, _)| *id).ok()?;
            eligible.get(at).map(|(_, position)| *position)
        };
        let wanted = |engine| position(engine).is_some();
        let found = {
            let trie = self.shared.trie.read().unwrap_or_else(PoisonError::into_inner);
            trie.longest(namespace(routing.request()), text, wanted)
        };
        let holders: Vec<usize> = found.engines.iter().filter_map(|engine| position(*engine)).collect();
        if holders.is_empty() {
            return Verdict::Pass(if found.others { EXCLUDED } else { UNSEEN });
        }
        routing.candidates = candidates(routing, &holders, found.bytes);
        if (found.bytes as u128) * 100 < u128::from(self.config.threshold_pct) * text.len() as u128 {
            return Verdict::Pass(SHALLOW);
        }
        if spread(routing) > self.config.imbalance {
            return Verdict::Pass(IMBALANCE);
        }
        match choose(routing, &holders, text) {
            Some(endpoint) => Verdict::Pick(Choice::of(endpoint)),
            None => Verdict::Pass(UNSEEN),
        }
    }

    fn on_answer(&self, dispatch: &Dispatch<'_>, _: &HeaderMap) {
        if dispatch.role == Role::Decode {
            return;
        }
        // a tier before this one may have chosen, and nobody asked for the text yet: it is had without waiting
        let Some(Ok(text)) = dispatch.facts.text().now_or_never() else { return };
        self.remember(namespace(&dispatch.facts.request), start(&text), dispatch.endpoint.engine.id());
    }
}

impl RadixTrie {
    fn remember(&self, namespace: u64, text: &[u8], engine: EngineId) {
        let mut trie = self.shared.trie.write().unwrap_or_else(PoisonError::into_inner);
        trie.serve(&self.service);
        trie.insert(namespace, text, engine);
        self.evicted.add(trie.trim());
        self.nodes.set(trie.nodes() as u64);
        self.bytes.set(trie.bytes() as u64);
    }
}

fn start(text: &str) -> &[u8] {
    text.as_bytes().get(..Facts::LONGEST_TEXT).unwrap_or(text.as_bytes())
}

/// What an engine caches for one of these serves no other.
fn namespace(request: &Request) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&request.model, &request.adapter, &request.cache_salt).hash(&mut hasher);
    hasher.finish()
}

fn candidates(routing: &Routing<'_>, holders: &[usize], bytes: usize) -> Vec<Candidate> {
    let candidate = |at: &usize| {
        let endpoint = routing.endpoints.get(*at)?;
        Some(Candidate {
            endpoint: *at,
            overlap: bytes as u64,
            load: endpoint.engine.in_flight(),
            capacity: u64::from(endpoint.weight),
            ..Candidate::default()
        })
    };
    holders.iter().filter_map(candidate).collect()
}

/// The difference between the most and the fewest requests in flight of the eligible endpoints.
fn spread(routing: &Routing<'_>) -> u64 {
    let loads = routing.eligible_endpoints().map(|(_, e)| e.engine.in_flight());
    let (least, most) = loads.fold((u64::MAX, 0), |(least, most), n| (least.min(n), most.max(n)));
    most.saturating_sub(least)
}

/// The least loaded of those that saw the same. Where that is several, one prompt stays with one of them and
/// different prompts are spread.
fn choose(routing: &Routing<'_>, holders: &[usize], text: &[u8]) -> Option<usize> {
    match lightest(routing, holders.iter().copied()).as_slice() {
        [only] => Some(*only),
        equals => rendezvous(routing, equals.iter().copied(), text),
    }
}
