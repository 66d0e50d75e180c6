//! `canary`: a share of the conversations goes to endpoints on trial.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvgate_core::schema::{Field, Kind};
use kvgate_core::{
    BoxFuture, BuildError, Completion, Counter, Endpoint, Facts, Miss, MissKind, Routing, Tier, TierKind,
    Verdict,
};
use serde::Deserialize;

const TRIAL: Miss = Miss("trial");
const STABLE: Miss = Miss("stable");
const STOPPED: Miss = Miss("stopped");
const FOLLOWS: Miss = Miss("follows");
const NO_PROMPT: Miss = Miss("no_prompt");

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "canary",
    doc: "Keeps a share of the conversations on endpoints on trial and the rest off them, until too many answers have \
          failed there.",
    misses: &[
        MissKind { reason: TRIAL.0, doc: "The conversation is one for the endpoints on trial." },
        MissKind { reason: STABLE.0, doc: "It is one for the others." },
        MissKind { reason: STOPPED.0, doc: "All are for the others: too many answers have failed." },
        MissKind { reason: FOLLOWS.0, doc: "Decode goes where prefill went: on trial or not." },
        MissKind { reason: NO_PROMPT.0, doc: "The request holds no prompt: it is for the others." },
    ],
    schema: &[
        Field {
            key: "endpoints",
            kind: Kind::TextList,
            default: "[]",
            doc: "The addresses of the endpoints on trial. Other ones are another trial.",
        },
        Field {
            key: "percent",
            kind: Kind::Int { min: 0, max: 100 },
            default: "5",
            doc: "Their share of the conversations.",
        },
        Field {
            key: "max_failures",
            kind: Kind::Int { min: 1, max: 1_000_000 },
            default: "3",
            doc: "The trial ends after so many failed answers.",
        },
    ],
    build: |config, context| {
        let config: Config = config.parse()?;
        let known = |address: &&String| context.endpoints.iter().any(|e| e.engine.address() == *address);
        if let Some(address) = config.endpoints.iter().find(|address| !known(address)) {
            let message = format!("{address} is no endpoint of the rule");
            return Err(BuildError { key: "endpoints".into(), message });
        }
        let failed = context.state("canary", &config.endpoints.join(" "), AtomicU64::default);
        let help = "Answers of endpoints on trial that failed.";
        let failures = context.counter("canary_failures_total", help, &[("service", context.rule)]);
        Ok(Arc::new(Canary { config, failed, failures }))
    },
};

#[derive(Deserialize)]
struct Config {
    endpoints: Vec<String>,
    percent: u64,
    max_failures: u64,
}

struct Canary {
    config: Config,
    failed: Arc<AtomicU64>,
    failures: Arc<Counter>,
}

impl Canary {
    fn tries(&self, endpoint: &Endpoint) -> bool {
        self.config.endpoints.iter().any(|address| address == endpoint.engine.address())
    }
}

/// The conversation's lot, 0 to 99: how it begins stays the same over its turns.
async fn lot(facts: &Facts) -> Result<u64, Miss> {
    let opening = facts.opening().await?;
    let mut hasher = DefaultHasher::new();
    (&opening.system, &opening.first).hash(&mut hasher);
    Ok(hasher.finish() % 100)
}

impl Tier for Canary {
    fn prepare<'a>(&'a self, facts: &'a Facts) -> Option<BoxFuture<'a, Result<(), Miss>>> {
        Some(Box::pin(async {
            facts.memo(KIND.name, lot(facts)).await.ok();
            Ok(())
        }))
    }

    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let prefill = routing.prefill.and_then(|at| routing.endpoints.get(at));
        let (on_trial, why) = match (prefill, routing.facts.known::<u64>(KIND.name)) {
            (Some(prefill), _) => (self.tries(prefill), FOLLOWS),
            _ if self.failed.load(Ordering::Relaxed) >= self.config.max_failures => (false, STOPPED),
            (_, Some(Ok(lot))) if *lot < self.config.percent => (true, TRIAL),
            (_, Some(Ok(_))) => (false, STABLE),
            _ => (false, NO_PROMPT),
        };
        let ours = routing.eligible_endpoints().filter(|(_, endpoint)| self.tries(endpoint) == on_trial);
        Verdict::Narrow(ours.map(|(at, _)| at).collect(), why)
    }

    fn on_complete(&self, completion: &Completion<'_>) {
        if completion.outcome.engine_failed() && self.tries(completion.dispatch.endpoint) {
            self.failed.fetch_add(1, Ordering::Relaxed);
            self.failures.inc();
        }
    }
}
