//! `kv-exact`: the endpoint whose cache holds the longest prefix of the prompt.
//!
//! Order of the checks, each with its miss: the request names a model (`model_empty`), holds a prompt
//! (`text_empty`), which can be tokenised as the engine would (`tokenize`) and is long enough to bother
//! (`shallow`); its blocks can be hashed (`hashes`); some endpoint holds the first of them (`no_worker`), and one
//! that may be chosen does (`excluded`).

mod config;
mod counters;
mod query;
mod score;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt;
use kvgate_core::law::{Law, select};
use kvgate_core::{
    Alarm, BoxFuture, BuildContext, BuildError, Candidate, Choice, Counter, Dispatch, EngineId, Facts,
    HeaderMap, Miss, Routing, Tier, TierConfig, TierKind, Verdict,
};
use kvgate_kv::hash::{Hasher, Lora, Namespace};
use kvgate_kv::holdings::Holdings;
use kvgate_kv::mirror::View;

pub use config::{explained, follows, min_match_tokens};
pub use counters::{Misses, none_held};

use config::{Config, Mode};
use query::Query;

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "kv-exact",
    doc: "Picks the endpoint that holds the longest prefix of the prompt in its KV cache, as its events tell. \
          Passes when nobody holds any of it.",
    misses: counters::MISSES,
    schema: config::SCHEMA,
    build,
};

/// Under this name the query is kept with the request's facts.
const QUERY: &str = "kv-exact";

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
    hits: HashMap<usize, Arc<Counter>>,
    zero_hits: Arc<Counter>,
    alarm: Arc<Alarm>,
    rule: String,
    lookups: AtomicU64,
    /// Scored requests since the last overlap.
    in_vain: AtomicU64,
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
    let hits = context.endpoints.iter().map(|e| (e.index, counters::hits(context, e.index))).collect();
    Ok(Arc::new(KvExact {
        strict,
        holdings,
        engines: context.endpoints.iter().map(|e| e.engine.id()).collect(),
        misses: Misses::new(context.registry),
        hits,
        zero_hits: counters::zero_hits(context),
        alarm: context.alarm("kv_zero_hits"),
        rule: context.rule.to_owned(),
        lookups: AtomicU64::new(0),
        in_vain: AtomicU64::new(0),
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
        let overlaps = score::overlaps(&self.holdings, self.view(), &self.engines, &query, audit);
        self.watch(&overlaps);
        let candidate = |(endpoint, overlap): (usize, u64)| {
            let load = routing.endpoints.get(endpoint).map_or(0, |e| e.engine.in_flight());
            Candidate { endpoint, overlap, load, capacity: 1 }
        };
        let holders = overlaps.tokens.iter().copied().enumerate().filter(|(_, overlap)| *overlap > 0);
        let (open, masked): (Vec<_>, Vec<_>) =
            holders.map(candidate).partition(|c| routing.eligible.contains(c.endpoint));
        routing.candidates.clone_from(&open);
        match select(Law::Off, &open).and_then(|at| open.get(at)) {
            Some(best) => Verdict::Pick(Choice::of(best.endpoint)),
            None if masked.is_empty() => Verdict::Pass(counters::NO_WORKER),
            None => Verdict::Pass(counters::EXCLUDED),
        }
    }

    fn on_miss(&self, miss: Miss) {
        self.misses.count(miss);
    }

    fn on_answer(&self, dispatch: &Dispatch<'_>, _: &HeaderMap) {
        if dispatch.tier == KIND.name
            && let Some(hits) = self.hits.get(&dispatch.endpoint.index)
        {
            hits.inc();
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
        let lora =
            self.config.lora.get(model).map(|path| Lora { name: model.to_owned(), path: path.clone() });
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

    /// Notices that nothing ever matches: what else would show as a slow fleet and nothing more.
    fn watch(&self, overlaps: &score::Overlaps) {
        let limit = self.config.zero_hit_requests;
        if overlaps.tokens.iter().any(|overlap| *overlap > 0) {
            self.in_vain.store(0, Ordering::Relaxed);
            if self.alarm.clear() {
                tracing::info!(rule = self.rule, "kv-exact: prompts match the inventory again");
            }
        } else if overlaps.scored && limit > 0 {
            let in_vain = self.in_vain.fetch_add(1, Ordering::Relaxed) + 1;
            if in_vain < limit {
                return;
            }
            self.zero_hits.inc();
            let detail = self.config.contract.likely_fault(in_vain);
            if self.alarm.raise(detail.clone()) {
                tracing::warn!(rule = self.rule, alarm = "kv_zero_hits", "{detail}");
            }
        }
    }
}
