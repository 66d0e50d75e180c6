//! The configuration: `gateway.toml` and a folder of rules.
//!
//! The keys are declared once, as tables of fields (`gateway_fields`, `rule_fields`, the schemas of tiers). From them
//! come validation, defaults, [`schema`] and `docs/configuration.md`. A file is read in three steps: its
//! text is walked along the tables (`document`), which yields what it gives, and every problem with its place;
//! then defaults are filled in and the typed configuration is built (`gateway`, `rule`); then everything is
//! checked that takes more than one key (`rule_checks`, `across`). No step stops at the first problem; only a file that
//! is not TOML is not looked at further.

mod across;
mod check;
mod compat;
mod diagnostic;
mod document;
mod effective;
mod gateway;
mod gateway_fields;
mod listener_checks;
mod listener_types;
mod listing;
mod matching;
mod rule;
mod rule_checks;
mod rule_fields;
mod source;
mod table;
mod types;
mod value;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvgate_core::TierKind;
use serde_json::{Map, Value};

pub use check::{CheckReport, check};
pub use compat::Environment;
pub use diagnostic::{Diagnostic, Diagnostics, Severity};
pub use effective::{Effective, EffectiveRule, Provenance, Setting};
pub use listener_types::*;
pub use listing::{
    Key, Reason, Schema, Section, TierSection, VariableSection, schema, tiers, tiers_markdown, tiers_text,
};
pub use matching::{Match, Specificity};
pub use source::{MAX_FILE, Origin, Source};
pub use types::*;

use across::Checked;
use compat::{File, Layer};
use document::Document;
use gateway_fields::GATEWAY;
use rule_fields::RULE;

/// The most rules.
const MAX_RULES: usize = 4096;

/// A valid configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// `gateway.toml`.
    pub gateway: GatewayConfig,
    /// The rules, in the order of their files' names.
    pub rules: Vec<RuleConfig>,
    /// What will not do what was probably meant.
    pub warnings: Vec<Diagnostic>,
}

/// Reads and checks `gateway.toml` and the rules it names, over the environment of the process. `kinds` are the tiers
/// there are.
///
/// # Errors
/// Every problem of every file, warnings included, when at least one refuses the configuration.
pub fn load(path: &Path, kinds: &[TierKind]) -> Result<Config, Diagnostics> {
    load_over(path, kinds, &Environment::of_process(), None)
}

/// As [`load`], over this environment; `effective` is filled with every key's value and where it comes from.
///
/// # Errors
/// As [`load`].
pub fn load_over(
    path: &Path,
    kinds: &[TierKind],
    environment: &Environment,
    effective: Option<&mut Effective>,
) -> Result<Config, Diagnostics> {
    let mut found = Diagnostics::default();
    let layer = Layer::read(environment, &mut found.0);
    let config = read(path, kinds, &layer, &mut found.0, effective);
    found.sort();
    match config {
        Some((gateway, rules)) if found.errors() == 0 => Ok(Config { gateway, rules, warnings: found.0 }),
        _ => Err(found),
    }
}

fn read(
    path: &Path,
    kinds: &[TierKind],
    layer: &Layer,
    found: &mut Vec<Diagnostic>,
    mut effective: Option<&mut Effective>,
) -> Option<(GatewayConfig, Vec<RuleConfig>)> {
    let source = Source::read(path).map_err(|e| found.push(*e)).ok()?;
    let mut document = Document::walk(source, GATEWAY, None);
    layer.under(&mut document, File::Gateway);
    let folder = path.parent().unwrap_or(Path::new(""));
    let gateway = gateway::gateway(&mut document, folder);
    // If gateway.toml is no TOML, the rules are looked for where they usually are.
    let rules_known = !document.is_toml() || !document.is_broken("server.rules");
    let listeners_known = !document.is_broken("listener");
    let (gateway, tables) = match gateway {
        Some(gateway) => gateway,
        None => {
            found.append(&mut document.problems);
            return None;
        }
    };
    let origin = document.origin.clone();
    if let Some(effective) = effective.as_deref_mut() {
        effective.gateway(&tables, &origin);
    }
    let mut rules = Vec::new();
    let mut files = Vec::new();
    if rules_known && gateway.server.rules.is_dir() {
        let about = |wrong: String| {
            document.error("server.rules", wrong).found(gateway.server.rules.display().to_string())
        };
        let problem = match rule_files(&gateway.server.rules) {
            Ok(found) if found.is_empty() => {
                let empty = about("holds no rule: every request is answered 503".into());
                Some(empty.hint("put a file <name>.toml into it for each service").warning())
            }
            Ok(found) => {
                files = found;
                None
            }
            Err(e) => Some(about(format!("cannot be read: {e}"))),
        };
        problem.into_iter().for_each(|problem| document.report(problem));
    }
    if files.len() > MAX_RULES {
        let many = document.error("server.rules", "holds too many rules").found(files.len().to_string());
        document.report(many.allowed(format!("{MAX_RULES} at most")));
    }
    found.append(&mut document.problems);
    let under = Under { gateway: (&tables, &origin), layer, kinds, tokenizers: &gateway.server.tokenizers };
    for file in files.into_iter().take(MAX_RULES) {
        let Ok(source) = Source::read(&file).map_err(|e| found.push(*e)) else { continue };
        rules.extend(read_rule(source, &under, found, effective.as_deref_mut()));
    }
    across::check(&gateway, listeners_known, &rules, found);
    Some((gateway, rules.into_iter().map(|checked| checked.rule).collect()))
}

/// What a rule stands over.
struct Under<'a> {
    /// The tables of `gateway.toml`, complete, and where they stand.
    gateway: (&'a Map<String, Value>, &'a Origin),
    layer: &'a Layer,
    kinds: &'a [TierKind],
    /// The folder of tokenizers.
    tokenizers: &'a Path,
}

fn read_rule(
    source: Arc<Source>,
    under: &Under<'_>,
    found: &mut Vec<Diagnostic>,
    effective: Option<&mut Effective>,
) -> Option<Checked> {
    let mut document = Document::walk(source, RULE, Some(under.kinds));
    under.layer.under(&mut document, File::Rule);
    let rule = match document.is_toml() {
        true => rule::rule(&mut document, under.gateway.0, under.kinds, under.layer),
        false => None,
    };
    if let Some(rule) = &rule {
        rule_checks::check(&mut document, rule, under.kinds, under.tokenizers);
    }
    if let (Some(rule), Some(effective)) = (&rule, effective) {
        effective.rule(rule, &document.given, under.gateway, under.kinds);
    }
    found.append(&mut document.problems);
    rule.map(|rule| Checked { rule, unsure: document.is_broken("match") })
}

/// Reads and checks a rule by itself, over the defaults of `gateway.toml`, with no environment, and without tokenizers,
/// whose absence is only warned of.
///
/// # Errors
/// Every error in it.
pub(crate) fn lone_rule(source: Arc<Source>, kinds: &[TierKind]) -> Result<RuleConfig, Diagnostics> {
    let mut found = Diagnostics::default();
    let defaults = document::complete(Map::new(), GATEWAY, &Map::new());
    let (origin, layer) = (Origin::new(source.clone()), Layer::default());
    let under = Under { gateway: (&defaults, &origin), layer: &layer, kinds, tokenizers: Path::new("") };
    let checked = read_rule(source, &under, &mut found.0, None);
    found.0.retain(Diagnostic::is_error);
    found.sort();
    checked.map(|checked| checked.rule).filter(|_| found.0.is_empty()).ok_or(found)
}

/// The rule files of a folder by name: `*.toml`, except those that begin with a dot (editors' and Kubernetes' own).
pub(crate) fn rule_files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files: Vec<_> = std::fs::read_dir(folder)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.ends_with(".toml") && !name.starts_with('.')
        })
        .collect();
    files.sort();
    Ok(files)
}
