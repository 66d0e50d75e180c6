//! What the tier counts, under the names of the gateway whose dashboards and runbooks it serves.

use std::sync::Arc;

use kvgate_core::{BuildContext, Counter, Miss, MissKind, Registry, Step};

pub const TEXT_EMPTY: Miss = Miss("text_empty");
pub const MODEL_EMPTY: Miss = Miss("model_empty");
pub const HASHES: Miss = Miss("hashes");
pub const NO_WORKER: Miss = Miss("no_worker");
pub const SHALLOW: Miss = Miss("shallow");
pub const EXCLUDED: Miss = Miss("excluded");

const fn miss(reason: &'static str, doc: &'static str) -> MissKind {
    MissKind { reason, doc }
}

pub const MISSES: &[MissKind] = &[
    miss("mode_off", "The rule has no kv-exact tier; counted once for each of its requests."),
    miss("warmup", "Never given; the series exists for dashboards that expect it."),
    miss(TEXT_EMPTY.0, "The request holds no prompt, or its path is not one whose prompts are understood."),
    miss(MODEL_EMPTY.0, "The request names no model, in `X-Model` or its body."),
    miss(
        "tokenize",
        "The model's tokenizer is missing or not loaded yet, or the engine would refuse the prompt.",
    ),
    miss(HASHES.0, "The contract cannot be used."),
    miss(NO_WORKER.0, "No endpoint holds the first block of the prompt."),
    miss(SHALLOW.0, "The prompt has fewer tokens than `min_match_tokens`."),
    miss(EXCLUDED.0, "Only endpoints that may not be chosen hold any of the prompt."),
];

/// Whether this step of a decision says that no endpoint held any of the prompt, but perhaps some that could not be
/// chosen: whoever serves it computes all of it.
pub fn none_held(step: &Step) -> bool {
    step.tier == super::KIND.name && step.miss.is_some_and(|miss| [NO_WORKER, EXCLUDED].contains(&miss))
}

/// The counters of misses, of all rules together.
pub struct Misses {
    reasons: Vec<(&'static str, Arc<Counter>)>,
    fallthrough: Arc<Counter>,
}

impl Misses {
    /// All reasons, at 0 if they are new. Whoever holds this keeps the series.
    pub fn new(registry: &Registry) -> Self {
        let reason = |reason: &'static str| {
            let counter = registry.counter(
                "loxilb_pd_kv_tier15_miss_reason_total",
                "Requests that KV-exact routing passed on, by reason.",
                &[("reason", reason)],
            );
            (reason, counter)
        };
        let deadline = std::iter::once(Miss::DEADLINE.0);
        Self {
            reasons: MISSES.iter().map(|m| m.reason).chain(deadline).map(reason).collect(),
            fallthrough: registry.counter(
                "loxilb_pd_kv_tier15_fallthrough_total",
                "Requests of rules with KV-exact routing that it passed on.",
                &[],
            ),
        }
    }

    /// A rule with kv-exact missed.
    pub fn count(&self, miss: Miss) {
        self.fallthrough.inc();
        self.reason(miss.0);
    }

    /// A request of a rule without kv-exact.
    pub fn mode_off(&self) {
        self.reason("mode_off");
    }

    fn reason(&self, reason: &str) {
        if let Some((_, counter)) = self.reasons.iter().find(|(r, _)| *r == reason) {
            counter.inc();
        }
    }
}

/// What is counted of one endpoint, once it answers.
pub struct Endpoint {
    /// It held some of the prompt.
    pub hits: Arc<Counter>,
    /// It was about to hold some, and held none.
    pub speculative: Arc<Counter>,
    /// It was chosen to relieve another.
    pub spills: Arc<Counter>,
    /// It was chosen because it was cold.
    pub seeds: Arc<Counter>,
}

impl Endpoint {
    /// All at 0 if they are new.
    pub fn new(context: &BuildContext<'_>, index: usize) -> Self {
        let index = index.to_string();
        let counter = |name, help| {
            context.counter(name, help, &[("service", context.rule), ("ep_idx", index.as_str())])
        };
        Self {
            hits: counter(
                "loxilb_pd_kv_tier15_hits_total",
                "Requests that KV-exact routing chose this endpoint for, that it answered, and some of whose prompt \
                 it held as its events tell.",
            ),
            speculative: counter(
                "kvgate_kv_speculative_picks_total",
                "Requests that KV-exact routing chose this endpoint for, that it answered, and some of whose prompt \
                 it was only about to hold. They are neither hits nor misses.",
            ),
            spills: counter(
                "loxilb_pd_kv_tier15_spills_total",
                "Requests that this endpoint answered because the one that held most was passed over for its load.",
            ),
            seeds: counter(
                "loxilb_pd_kv_tier15_cold_seeds_total",
                "Requests that this endpoint answered because it held next to nothing.",
            ),
        }
    }
}

/// Expected blocks that were entered, and those that had to give way.
pub fn speculative_blocks(context: &BuildContext<'_>) -> (Arc<Counter>, Arc<Counter>) {
    let counter = |name, help| context.counter(name, help, &[("service", context.rule)]);
    let entered = counter("kvgate_kv_speculative_blocks_total", "Blocks entered as about to be held.");
    let help = "Blocks that gave way to others before they expired: speculative.slots is too small.";
    (entered, counter("kvgate_kv_speculative_evictions_total", help))
}

/// Requests beyond the limit of scored requests without a hit.
pub fn zero_hits(context: &BuildContext<'_>) -> Arc<Counter> {
    context.counter(
        "loxilb_pd_kv_zero_hit_watchdog_total",
        "Requests that matched nothing in a filled inventory, from zero_hit_requests in a row on.",
        &[("service_id", context.rule)],
    )
}
