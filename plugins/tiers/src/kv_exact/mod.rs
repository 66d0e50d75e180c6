//! `kv-exact`: the endpoint whose cache holds the longest prefix of the prompt.
//!
//! Order of the checks, each with its miss: the request names a model (`model_empty`), holds a prompt
//! (`text_empty`), which can be tokenised as the engine would (`tokenize`) and is long enough to bother
//! (`shallow`); its blocks can be hashed (`hashes`); some endpoint holds the first of them (`no_worker`), and one
//! that may be chosen does (`excluded`). What an endpoint is about to hold counts like what it holds, a little less.
//! Then the law decides among all that may be chosen, and now and then seeding. Choices but the plain ones say why:
//! `speculative`, `spill`, `seed`.

mod config;
mod counters;
mod query;
mod score;
mod seeding;
mod speculation;
mod watch;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt;
use kvgate_core::law::select;
use kvgate_core::{
    BoxFuture, BuildContext, BuildError, Candidate, Choice, Completion, Dispatch, EngineId, Facts, HeaderMap,
    Miss, Routing, Tier, TierConfig, TierKind, Verdict,
};
use kvgate_kv::hash::{Hasher, Namespace};
use kvgate_kv::holdings::Holdings;
use kvgate_kv::mirror::View;

pub use config::{adapter, explained, follows, min_match_tokens};
pub use counters::{Misses, none_held};
pub use query::BLOCK_HASHES;

use config::{Config, Mode};
use query::{Basis, Query};
use score::Overlaps;
use seeding::Seeding;
use speculation::Speculation;
use watch::Watch;

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "kv-exact",
    doc: "Picks the endpoint that holds the longest prefix of the prompt in its KV cache, as its events tell, \
          within the bounds that its law sets to the load. Passes when nobody holds any of it.",
    misses: counters::MISSES,
    schema: config::SCHEMA,
    build,
};

/// Under this name the query is kept with the request's facts.
const QUERY: &str = "kv-exact";

/// For [`Choice::why`]: it holds none of the prompt yet.
const SPECULATIVE: &str = "speculative";
/// For [`Choice::why`]: it holds next to nothing.
const SEED: &str = "seed";

/// One lookup in so many checks the inventory's assumption that holdings have no gaps.
const AUDIT_EVERY: u64 = 512;

struct KvExact {
    config: Config,
    holdings: Arc<Holdings>,
    /// What the hashes of a strict contract are computed with; `None` under auto, or when it cannot be used.
    strict: Option<Hasher>,
    engines: Vec<EngineId>,
    misses: Misses,
    /// By `ep_idx`.
    counts: HashMap<usize, counters::Endpoint>,
    lookups: AtomicU64,
    seeding: Seeding,
    speculation: Option<Speculation>,
    watch: Watch,
}

fn build(config: &TierConfig, context: &mut BuildContext<'_>) -> Result<Arc<dyn Tier>, BuildError> {
    let config: Config = config.parse()?;
    let holdings = context.services.get::<Holdings>().ok_or_else(|| BuildError {
        key: String::new(),
        message: "the gateway follows no KV events".into(),
    })?;
    let strict = match config.contract.mode {
        Mode::Auto => None,
        Mode::Strict => match config.contract.contract()?.hasher() {
            Ok(hasher) => Some(hasher),
            Err(e) => {
                tracing::warn!(rule = context.rule, error = %e, "kv-exact: the contract cannot be used");
                None
            }
        },
    };
    let counts = |e: &kvgate_core::Endpoint| (e.index, counters::Endpoint::new(context, e.index));
    Ok(Arc::new(KvExact {
        strict,
        holdings,
        engines: context.endpoints.iter().map(|e| e.engine.id()).collect(),
        misses: Misses::new(context.registry),
        counts: context.endpoints.iter().map(counts).collect(),
        lookups: AtomicU64::new(0),
        seeding: Seeding::new(config.seeding),
        speculation: Speculation::new(config.speculative, context),
        watch: Watch::new(&config, context),
        config,
    }))
}

impl Tier for KvExact {
    fn prepare<'a>(&'a self, facts: &'a Facts) -> Option<BoxFuture<'a, Result<(), Miss>>> {
        Some(async move { facts.memo(QUERY, self.query(facts)).await.map(drop) }.boxed())
    }

    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let query = match routing.facts.known::<Query>(QUERY) {
            Some(Ok(query)) => query,
            Some(Err(miss)) => return Verdict::Pass(miss),
            None => return Verdict::Pass(counters::HASHES),
        };
        let audit = self.lookups.fetch_add(1, Ordering::Relaxed).is_multiple_of(AUDIT_EVERY);
        let mut overlaps = score::overlaps(&self.holdings, self.view(), &self.engines, &query, audit);
        self.watch.saw(&overlaps);
        self.add_expected(routing, &query, &mut overlaps.bases);
        self.choose(routing, &query, &overlaps)
    }

    fn on_miss(&self, miss: Miss) {
        self.misses.count(miss);
    }

    fn on_answer(&self, dispatch: &Dispatch<'_>, _: &HeaderMap) {
        if dispatch.tier != KIND.name {
            return;
        }
        let Some(counts) = self.counts.get(&dispatch.endpoint.index) else { return };
        match dispatch.why {
            Some(Choice::SPILL) => counts.spills.inc(),
            Some(SEED) => counts.seeds.inc(),
            _ => {}
        }
        let Some(Ok(query)) = dispatch.facts.known::<Query>(QUERY) else { return };
        match query.progress().basis(dispatch.endpoint.engine.id()) {
            Basis { held: 1.., .. } => counts.hits.inc(),
            Basis { expected: 1.., .. } => counts.speculative.inc(),
            _ => {}
        }
    }

    fn on_dispatch(&self, dispatch: &Dispatch<'_>) {
        let Some(speculation) = &self.speculation else { return };
        let Some(Ok(query)) = dispatch.facts.known::<Query>(QUERY) else { return };
        let engine = dispatch.endpoint.engine.id();
        let sizes = score::block_sizes(&self.holdings, self.view(), &[engine]);
        let mut progress = query.progress();
        let held = progress.basis(engine).held;
        let credits = speculation.credit(&query, engine, &sizes, held, dispatch.now);
        progress.dispatched(engine, credits);
    }

    fn on_complete(&self, completion: &Completion<'_>) {
        if let Some(Ok(query)) = completion.dispatch.facts.known::<Query>(QUERY) {
            query.progress().completed(completion.dispatch.endpoint.engine.id());
        }
    }
}

impl KvExact {
    fn view(&self) -> View {
        match self.config.contract.mode {
            Mode::Auto => View::Own,
            Mode::Strict => View::Published,
        }
    }

    /// What to look up for this request.
    async fn query(&self, facts: &Facts) -> Result<Query, Miss> {
        let request = &facts.request;
        let model = request.model.as_deref().filter(|m| !m.is_empty()).ok_or(counters::MODEL_EMPTY)?;
        let tokens = facts.tokens().await?;
        let longest = tokens.sequences.iter().map(|s| s.len()).max().unwrap_or(0);
        if longest == 0 {
            return Err(counters::TEXT_EMPTY);
        }
        if longest < self.config.min_match_tokens {
            return Err(counters::SHALLOW);
        }
        let lora = config::adapter(&self.config.lora, model, request.adapter.as_deref());
        let namespace = Namespace { lora, cache_salt: request.cache_salt.as_deref().map(str::to_owned) };
        match (self.config.contract.mode, &self.strict) {
            (Mode::Auto, _) => {
                let sizes = score::block_sizes(&self.holdings, View::Own, &self.engines);
                Ok(Query::own(self.holdings.hasher(), &tokens, &namespace, &sizes))
            }
            (Mode::Strict, Some(hasher)) => Ok(Query::published(hasher, &tokens, &namespace).await),
            (Mode::Strict, None) => Err(counters::HASHES),
        }
    }

    /// The law's choice among all that may be chosen, or a cold one in its stead.
    fn choose(&self, routing: &mut Routing<'_>, query: &Query, overlaps: &Overlaps) -> Verdict {
        let basis = |c: &Candidate| overlaps.bases.get(c.endpoint).copied().unwrap_or_default();
        let mut candidates = self.candidates(routing, &overlaps.bases);
        let law = self.config.law.of(routing.role);
        let mut selected = select(&law, query.prompt(), &mut candidates);
        let chosen = selected.and_then(|s| candidates.get(s.at));
        if chosen.is_some_and(|c| basis(c).held == 0 && !c.has_room()) {
            // all who hold some of it have their fill: to expect something is no reason to add to that
            candidates.iter_mut().for_each(|c| c.overlap = basis(c).held);
            selected = select(&law, query.prompt(), &mut candidates);
        }
        let Some((selected, winner)) = selected.and_then(|s| Some((s, candidates.get(s.at)?))) else {
            let held = overlaps.any_held();
            return Verdict::Pass(if held { counters::EXCLUDED } else { counters::NO_WORKER });
        };
        let mut progress = query.progress();
        let cold = self.seeding.cold(&mut progress, &self.holdings, routing, &candidates, winner);
        let (chosen, limit, why) = match cold {
            Some(cold) => (cold, cold.cap, Some(SEED)),
            None if selected.spilled => (winner, selected.limit, Some(Choice::SPILL)),
            None => (winner, selected.limit, (basis(winner).held == 0).then_some(SPECULATIVE)),
        };
        if let Some(endpoint) = routing.endpoints.get(chosen.endpoint) {
            progress.picked(endpoint.engine.id(), basis(chosen));
        }
        let choice = Choice { endpoint: chosen.endpoint, limit, why };
        routing.candidates = candidates;
        Verdict::Pick(choice)
    }

    /// Adds what every endpoint is about to hold.
    fn add_expected(&self, routing: &Routing<'_>, query: &Query, bases: &mut [Basis]) {
        let Some(speculation) = &self.speculation else { return };
        let (caches, view) = (self.holdings.caches(), self.view());
        let uses = |engine: EngineId, size| {
            caches.trusted(engine.0).iter().any(|c| c.view == view && c.block_size == Some(size))
        };
        speculation.add_expected(query, &self.engines, uses, routing.now, bases);
    }

    fn candidates(&self, routing: &Routing<'_>, bases: &[Basis]) -> Vec<Candidate> {
        let capacities = routing.capacities();
        let overlap = |basis: Basis| self.speculation.as_ref().map_or(basis.held, |s| s.worth(basis));
        let candidate = |(endpoint, e): (usize, &kvgate_core::Endpoint)| Candidate {
            endpoint,
            overlap: bases.get(endpoint).copied().map_or(0, overlap),
            load: e.engine.in_flight(),
            capacity: capacities.get(endpoint).copied().unwrap_or(1),
            cap: None,
        };
        routing.eligible_endpoints().map(candidate).collect()
    }
}
