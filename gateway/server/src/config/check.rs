//! `kvgate check`: whether a configuration would be taken.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvgate_core::{Alarms, Engines, Registry, Services, StateStore, TierKind};
use kvgate_kv::hash::ContractError;
use kvgate_kv::holdings::Holdings;
use kvgate_kv::inventory::{Config as InventoryConfig, Ingest};
use kvgate_kv::own::OwnHasher;
use kvgate_prompt::{Slug, State};
use serde::Serialize;

use super::diagnostic::{Diagnostic, Diagnostics};
use super::rule::KV_EXACT;
use super::rule_checks::{SEED, is_staged, strict_contract};
use super::{Config, Effective, RuleConfig, load};
use crate::plan::{Ground, ladder};

/// What a check found.
#[derive(Debug, Clone, Serialize)]
pub struct CheckReport {
    /// The file that was checked.
    pub file: PathBuf,
    /// Whether the configuration would be taken and can work; with `strict`, whether it is without warnings too.
    pub ok: bool,
    /// How many problems refuse it.
    pub errors: usize,
    /// How many do not.
    pub warnings: usize,
    /// Rules of a configuration that is taken.
    pub rules: usize,
    /// Endpoints of all its rules.
    pub endpoints: usize,
    /// The problems, in the order of files and lines.
    pub problems: Diagnostics,
    /// Every key of a configuration that is taken, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effective: Option<Effective>,
}

/// Reads and checks a configuration, and loads the tokenizers that rules with `kv-exact` name, about a second each;
/// nothing is bound, connected or started.
pub fn check(path: &Path, kinds: &[TierKind], strict: bool) -> CheckReport {
    let loaded = load(path, kinds);
    let found = match &loaded {
        Ok(config) => [contracts(config), tiers(config, kinds), tokenizers(config)].concat(),
        Err(_) => Vec::new(),
    };
    let mut report = CheckReport::new(path, loaded, strict);
    report.add(found, strict);
    report
}

/// Contracts by which nothing can ever match. The gateway starts all the same, and says so in its log.
fn contracts(config: &Config) -> Vec<Diagnostic> {
    let wrong = |rule: &RuleConfig| {
        let why = strict_contract(rule)?.hasher().err()?;
        let key = match why {
            ContractError::RandomSeed(_) => "none_hash_seed",
            _ => "block_size",
        };
        Some(rule.error(&format!("tier.{KV_EXACT}.contract.{key}"), why.to_string()).hint(SEED))
    };
    config.rules.iter().filter_map(wrong).collect()
}

/// Tiers that cannot be built from keys that are each valid. Not `kv-exact`, which has checks of its own.
fn tiers(config: &Config, kinds: &[TierKind]) -> Vec<Diagnostic> {
    let (store, registry, alarms) = (StateStore::default(), Registry::default(), Alarms::default());
    let (_, inventory) = Ingest::new(InventoryConfig { max_caches: 1, max_orphans: 0 });
    let holdings = Holdings::new(inventory, OwnHasher::new());
    let (engines, services) = (Engines::default(), Services::default().with(Arc::new(holdings)));
    let ground = Ground { store: &store, registry: &registry, alarms: &alarms, services: &services };
    let mut problems = Vec::new();
    for rule in &config.rules {
        let numbered = rule.endpoints.iter().enumerate();
        let endpoints: Vec<_> = numbered.map(|(index, e)| e.endpoint(&engines, index)).collect();
        let names: Vec<_> = rule.all_tiers().into_iter().filter(|name| *name != KV_EXACT).collect();
        problems.extend(ladder(rule, &names, &endpoints, kinds, &ground, &mut Vec::new()).err());
    }
    problems.into_iter().flatten().collect()
}

/// What is wrong with staged tokenizers. The gateway starts all the same, and routes by other tiers.
fn tokenizers(config: &Config) -> Vec<Diagnostic> {
    let server = &config.gateway.server;
    let most = config.gateway.tokenizer.max_models;
    let (mut seen, mut problems) = (BTreeSet::new(), Vec::new());
    for rule in config.rules.iter().filter(|rule| rule.uses(KV_EXACT)) {
        for (at, model) in rule.matches.models.iter().enumerate() {
            let staged = Slug::new(model).is_ok_and(|slug| is_staged(&server.tokenizers, slug.as_str()));
            if !staged || !seen.insert(model) {
                continue;
            }
            let warn = |message: String, hint: &str| {
                let error = rule.error(&format!("match.models[{at}]"), message);
                error.found(format!("\"{model}\"")).hint(hint).warning()
            };
            if seen.len() > most {
                let message = format!("has no tokenizer: {most} are held at most, and rules name more");
                problems.push(warn(message, "raise `tokenizer.max_models` in gateway.toml"));
                continue;
            }
            // a store for each, so that its memory is given back before the next
            match crate::explain::tokenizers(config).load(model) {
                State::Ready(loaded) => problems.extend(loaded.notes().iter().map(|note| {
                    warn(format!("has a tokenizer to look at: {note}"), "compare it with the engine's files")
                })),
                State::Failed(why) | State::Missing(why) => {
                    let message = format!("has a tokenizer that cannot be used, {KV_EXACT} passes: {why}");
                    problems.push(warn(message, "put the engine's own files there"));
                }
                State::Loading => {}
            }
        }
    }
    problems
}

impl CheckReport {
    /// The report on what [`load`] said of a file.
    pub fn new(path: &Path, loaded: Result<Config, Diagnostics>, strict: bool) -> Self {
        let (rules, endpoints, problems) = match loaded {
            Ok(config) => {
                let endpoints = config.rules.iter().map(|rule| rule.endpoints.len()).sum();
                (config.rules.len(), endpoints, Diagnostics(config.warnings))
            }
            Err(problems) => (0, 0, problems),
        };
        let mut report = Self {
            file: path.to_owned(),
            ok: true,
            errors: 0,
            warnings: 0,
            rules,
            endpoints,
            problems: Diagnostics::default(),
            effective: None,
        };
        report.add(problems.0, strict);
        report
    }

    /// Adds problems found later, by building what is configured.
    pub fn add(&mut self, problems: Vec<Diagnostic>, strict: bool) {
        self.problems.0.extend(problems);
        self.problems.sort();
        self.errors = self.problems.errors();
        self.warnings = self.problems.0.len() - self.errors;
        self.ok = self.errors == 0 && !(strict && self.warnings > 0);
    }

    /// For people: the problems and a last line that sums up.
    pub fn render(&self, color: bool) -> String {
        let plural = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
        let sum = match self.errors {
            0 => format!(
                "{}: {} with {}, {}",
                if self.ok { "valid" } else { "refused for its warnings" },
                plural(self.rules, "rule"),
                plural(self.endpoints, "endpoint"),
                plural(self.warnings, "warning"),
            ),
            n => format!("invalid: {}, {}", plural(n, "error"), plural(self.warnings, "warning")),
        };
        format!("{}{}: {sum}\n", self.problems.render(color), self.file.display())
    }
}
