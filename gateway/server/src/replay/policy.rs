//! The policies: rules, those built in too.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvgate_core::{Choice, Miss, MissKind, Routing, Tier, TierKind, Verdict};
use serde_json::json;

use crate::config::{self, RuleConfig, Source};

/// The built-in policies, each with its ladder and the law of `kv-exact`, if that is in it.
const BUILT_IN: &[(&str, &str, Option<&str>)] = &[
    (ROUND_ROBIN, "round-robin", None),
    ("min-load", "min-load", None),
    ("radix-trie", "radix-trie", None),
    ("chwbl", "chwbl", None),
    ("kv-exact-off", "kv-exact", Some("off")),
    ("kv-exact-hard", "kv-exact", Some("hard")),
    ("kv-exact-soft", "kv-exact", Some("soft")),
    ("kv-exact-adaptive", "kv-exact", Some("adaptive")),
    ("kv-exact-adaptive-soft", "kv-exact", Some("adaptive-soft")),
    (ORACLE, "oracle", None),
];

/// What the others are compared with: knows nothing.
pub const ROUND_ROBIN: &str = "round-robin";
/// What the others are compared with: knows everything.
pub const ORACLE: &str = "oracle";

/// A rule to replay a trace with.
pub struct Policy {
    /// What the result calls it.
    pub name: String,
    /// The rule.
    pub rule: RuleConfig,
    /// The tiers there are.
    pub kinds: Vec<TierKind>,
}

impl Policy {
    fn new(name: String, mut rule: RuleConfig, kinds: &[TierKind]) -> Self {
        // simulated engines announce the tokens of their blocks: which hashes they have makes no difference
        if let Some(tier) = rule.tier.get_mut("kv-exact")
            && let Some(contract) = tier.0.get_mut("contract")
        {
            contract["mode"] = json!("auto");
        }
        Self { name, rule, kinds: kinds.to_vec() }
    }
}

/// The built-in policies on a fleet of equals.
///
/// # Errors
/// When one of them is no valid rule, which is so only where a tier of one's own took the place of a built-in one.
pub fn built_in(engines: u16, kinds: &[TierKind]) -> Result<Vec<Policy>, String> {
    let others = kinds.iter().copied().filter(|kind| kind.name != ORACLE);
    let kinds: Vec<_> = others.chain([ORACLE_KIND]).collect();
    let policy = |(name, tier, law): &(&str, &str, Option<&str>)| {
        let mut text = format!("tiers = [\"{tier}\"]\n");
        if let Some(law) = law {
            text.push_str(&format!("[tier.kv-exact.law]\nmode = \"{law}\"\n"));
        }
        // no two engines share a host, so that each has the usual port of events to itself
        (1..=engines).for_each(|n| {
            text.push_str(&format!("[[endpoint]]\naddress = \"engine-{n}:8000\"\n"));
        });
        let source = Source { path: PathBuf::from(format!("{name}.toml")), text };
        let rule = config::lone_rule(Arc::new(source), &kinds).map_err(|found| found.to_string())?;
        Ok(Policy::new((*name).to_owned(), rule, &kinds))
    };
    BUILT_IN.iter().map(policy).collect()
}

/// A rule and the one to compare it with.
///
/// # Errors
/// When there is no such rule, or it is not valid.
pub fn of_rules(
    rule: &str,
    against: Option<&str>,
    config: &Path,
    kinds: &[TierKind],
) -> Result<Vec<Policy>, String> {
    let mut policies = Vec::new();
    for given in [Some(rule), against].into_iter().flatten() {
        let rule = find(given, config, kinds)?;
        policies.push((given.to_owned(), rule));
    }
    // rules are called by their names, unless that would not tell one from the other
    let alike = matches!(policies.as_slice(), [(_, a), (_, b)] if a.name == b.name);
    let name = |given: String, rule: &RuleConfig| if alike { given } else { rule.name.clone() };
    Ok(policies.into_iter().map(|(given, rule)| Policy::new(name(given, &rule), rule, kinds)).collect())
}

fn find(given: &str, config: &Path, kinds: &[TierKind]) -> Result<RuleConfig, String> {
    let file = Path::new(given);
    if file.is_file() {
        let source = Source::read(file).map_err(|e| e.to_string())?;
        return config::lone_rule(source, kinds).map_err(|found| found.to_string());
    }
    let config = config::load(config, kinds)
        .map_err(|found| format!("{given}: is no file, and as a name of a rule: {found}"))?;
    let names: Vec<_> = config.rules.iter().map(|rule| rule.name.as_str()).collect();
    let unknown =
        format!("{given}: is neither a file nor the name of a rule; there are: {}", names.join(", "));
    config.rules.into_iter().find(|rule| rule.name == given).ok_or(unknown)
}

/// How long each endpoint would take to answer the request at hand, as only a simulation can know.
#[derive(Debug, Default)]
pub struct Forecasts(Mutex<Vec<Duration>>);

impl Forecasts {
    /// For the request at hand, by position of the endpoint.
    pub fn set(&self, forecasts: Vec<Duration>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = forecasts;
    }
}

/// The tier of the policy `oracle`, which no configuration knows.
const ORACLE_KIND: TierKind = TierKind {
    name: ORACLE,
    doc: "Picks the endpoint that will answer first.",
    misses: &[MissKind::NO_ENDPOINT],
    schema: &[],
    build: |_, context| {
        let forecasts = context.services.get::<Forecasts>().unwrap_or_default();
        Ok(Arc::new(Oracle { forecasts }))
    },
};

struct Oracle {
    forecasts: Arc<Forecasts>,
}

impl Tier for Oracle {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let forecasts = self.forecasts.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = routing.eligible_endpoints().filter_map(|(at, e)| Some((at, e, *forecasts.get(at)?)));
        let best = known.min_by_key(|(at, e, forecast)| (*forecast, e.engine.in_flight(), *at));
        best.map_or(Verdict::Pass(Miss::NO_ENDPOINT), |(at, ..)| Verdict::Pick(Choice::of(at)))
    }
}
