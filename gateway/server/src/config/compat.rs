//! The environment variables of the LoxiLB inference gateway, as a layer of the configuration: a key that a file gives
//! is the file's, else a variable's if it is set, else the default.
//!
//! A value that is not allowed is a warning and nothing more: the process runs where the variable was set long ago.
//! Empty is as good as unset.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use kvgate_core::TierKind;
use serde_json::{Map, Value};

use super::diagnostic::Diagnostic;
use super::document::Document;
use super::source::Source;
use super::table::nearest;

/// A variable and the key it stands for.
#[derive(Debug)]
pub(super) struct Variable {
    pub name: &'static str,
    pub file: File,
    /// The path of the key, with the table it is in.
    pub key: &'static str,
    pub takes: Takes,
}

/// Which file the key is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum File {
    Gateway,
    Rule,
}

/// What a variable may hold.
#[derive(Debug)]
pub(super) enum Takes {
    /// A whole number, both ends included.
    Number(i64, i64),
    /// A whole number from 0 to this one; 0 means 1.
    NumberFromOne(i64),
    /// A whole number from 0 to this one; 0 leaves the key unset.
    Bound(i64),
    /// Seconds, a whole number, both ends included.
    Seconds(i64, i64),
    /// One of these words, in any case of letters, and the value it means.
    Word(&'static [(&'static str, &'static str)]),
    /// `1` for `true`, `0` for `false`.
    Flag,
    /// Text of so many bytes at most.
    Text(usize),
}

const LAWS: &[(&str, &str)] = &[
    ("off", "off"),
    ("hard", "hard"),
    ("soft", "soft"),
    ("adaptive", "adaptive"),
    ("adaptive-soft", "adaptive-soft"),
];

const UNIFIED: &[(&str, &str)] = &[
    ("1", "hard"),
    ("true", "hard"),
    ("on", "hard"),
    ("yes", "hard"),
    ("0", "off"),
    ("false", "off"),
    ("off", "off"),
    ("no", "off"),
];

const RELIEF: &[(&str, &str)] = &[
    ("auto", "auto"),
    ("1", "on"),
    ("true", "on"),
    ("on", "on"),
    ("yes", "on"),
    ("0", "off"),
    ("false", "off"),
    ("off", "off"),
    ("no", "off"),
];

const fn rule(name: &'static str, key: &'static str, takes: Takes) -> Variable {
    Variable { name, file: File::Rule, key, takes }
}

/// How the reference's variables begin.
const PREFIXES: [&str; 2] = ["LLB_", "LOXILB_"];

/// Every variable that is read. Of two that stand for one key the first that is set counts, whatever it holds.
pub(super) const VARIABLES: &[Variable] = &[
    rule("LLB_KV_NONE_HASH_SEED", "tier.kv-exact.contract.none_hash_seed", Takes::Text(23)),
    rule("LLB_KV_MIN_MATCH_TOKENS", "tier.kv-exact.min_match_tokens", Takes::Number(0, 4096)),
    rule("LLB_KV_REPLAY_PORT_OFFSET", "events.replay_port_offset", Takes::Number(0, 65_535)),
    rule("LOXILB_KV_LB_MODE", "tier.kv-exact.law.mode", Takes::Word(LAWS)),
    rule("LOXILB_KV_UNIFIED_MODE", "tier.kv-exact.law.mode", Takes::Word(UNIFIED)),
    rule("LOXILB_KV_MEAN_LOAD_FACTOR", "tier.kv-exact.law.mean_load_factor_pct", Takes::Number(100, 1000)),
    rule("LOXILB_KV_LOAD_PENALTY", "tier.kv-exact.law.load_penalty", Takes::Number(1, 100_000)),
    rule("LOXILB_KV_SPILL_RELIEF", "tier.kv-exact.law.relief", Takes::Word(RELIEF)),
    rule("LOXILB_KV_COLDSTART_SEED_N", "tier.kv-exact.seeding.every", Takes::Number(0, 1_000_000)),
    rule(
        "LOXILB_KV_COLDSTART_MIN_BLOCKS",
        "tier.kv-exact.seeding.min_blocks",
        Takes::NumberFromOne(1_000_000),
    ),
    rule("LLB_PD_MAX_INFLIGHT_PER_EP", "tier.admission.max_in_flight", Takes::Bound(99_999)),
    rule("LLB_PD_MAX_TOTAL_INFLIGHT", "tier.admission.max_total", Takes::Bound(10_000_000)),
    rule("LLB_PD_QUEUE_DEPTH_PER_EP", "tier.admission.queue_depth", Takes::Number(0, 64)),
    rule("LLB_PD_MAX_PARK_SEC", "tier.admission.queue_wait", Takes::Seconds(1, 3600)),
    rule("LLB_PD_ORIGIN_ERR_THRESHOLD", "breaker.origin_errors", Takes::Number(0, 1000)),
    rule("LLB_PD_PREFILL_TIMEOUT_SEC", "timeouts.prefill", Takes::Seconds(1, 86_400)),
    rule("LOXILB_KV_ZERO_HIT_N", "tier.kv-exact.zero_hit_requests", Takes::Number(1, 1_000_000)),
    Variable {
        name: "LOXILB_KV_MAX_BLOCKS",
        file: File::Gateway,
        key: "inventory.max_blocks",
        takes: Takes::Number(1_000, 100_000_000),
    },
    Variable { name: "LLB_KV_HASH_DEBUG", file: File::Gateway, key: "log.block_hashes", takes: Takes::Flag },
];

impl Takes {
    /// In words.
    pub fn allowed(&self) -> String {
        match self {
            Self::Number(min, max) => format!("a whole number, {min} to {max}"),
            Self::Bound(max) => format!("a whole number, 0 to {max}; 0 is none"),
            Self::Seconds(min, max) => format!("seconds, a whole number, {min} to {max}"),
            Self::NumberFromOne(max) => format!("a whole number, 0 to {max}; 0 means 1"),
            Self::Word(words) => words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", "),
            Self::Flag => "1 or 0".into(),
            Self::Text(most) => format!("a text of {most} bytes at most"),
        }
    }

    /// The value of the key, null for none; `None` if the text is not allowed.
    fn value(&self, text: &str) -> Option<Value> {
        let number =
            |min: &i64, max: &i64| text.trim().parse::<i64>().ok().filter(|n| (min..=max).contains(&n));
        match self {
            Self::Number(min, max) => number(min, max).map(Value::from),
            Self::Bound(max) => number(&0, max).map(|n| if n == 0 { Value::Null } else { Value::from(n) }),
            Self::Seconds(min, max) => number(min, max).map(|n| Value::from(format!("{n}s"))),
            Self::NumberFromOne(max) => number(&0, max).map(|n| Value::from(n.max(1))),
            Self::Word(words) => {
                let text = text.trim().to_lowercase();
                words.iter().find(|(word, _)| *word == text).map(|(_, value)| Value::from(*value))
            }
            Self::Flag => match text.trim() {
                "1" => Some(Value::from(true)),
                "0" => Some(Value::from(false)),
                _ => None,
            },
            Self::Text(most) => (text.len() <= *most).then(|| Value::from(text)),
        }
    }
}

/// The environment, as far as it matters.
#[derive(Debug, Clone, Default)]
pub struct Environment(BTreeMap<String, OsString>);

impl Environment {
    /// The one this process was started with.
    pub fn of_process() -> Self {
        let set = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        Self(set.filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix))).collect())
    }

    /// One of these variables and their values.
    pub fn of<V: Into<OsString>>(variables: impl IntoIterator<Item = (&'static str, V)>) -> Self {
        Self(variables.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect())
    }
}

/// The values that an environment gives.
#[derive(Debug, Default)]
pub(super) struct Layer(Vec<(&'static Variable, Value)>);

impl Layer {
    /// Reads an environment; what is not allowed is reported as a warning.
    pub fn read(environment: &Environment, found: &mut Vec<Diagnostic>) -> Self {
        let mut seen = BTreeSet::new();
        let mut set = Vec::new();
        for variable in VARIABLES {
            let text = environment.0.get(variable.name).filter(|text| !text.is_empty());
            if let Some(text) = text.filter(|_| seen.insert(variable.key)) {
                set.push((variable, text.to_string_lossy(), text.to_str()));
            }
        }
        let lines = set.iter().map(|(variable, shown, _)| format!("{}={shown}\n", variable.name));
        let (path, text) = (PathBuf::from("environment"), lines.collect());
        let source = Arc::new(Source { path, text });
        let (mut values, mut at) = (Vec::new(), 0);
        for (variable, shown, text) in set {
            let from = at + variable.name.len() + 1;
            let to = from + shown.len();
            at = to + 1;
            match text.and_then(|text| variable.takes.value(text)) {
                Some(Value::Null) => {}
                Some(value) => values.push((variable, value)),
                None => {
                    let wrong = Diagnostic::new(
                        &source,
                        from..to,
                        variable.name,
                        "is not used: its value is not allowed",
                    );
                    let wrong = wrong.found(format!("{shown:?}")).allowed(variable.takes.allowed());
                    let hint = format!("`{}` has its default where no file gives it", variable.key);
                    found.push(wrong.hint(hint).warning());
                }
            }
        }
        found.extend(unknown(environment));
        Self(values)
    }

    /// Fills in what a file does not give, the keys of its tiers excepted.
    pub fn under(&self, document: &mut Document, file: File) {
        for (variable, value) in self.0.iter().filter(|(v, _)| v.file == file && !v.key.starts_with("tier."))
        {
            let Document { given, origin, .. } = document;
            if insert(given, variable.key, value) {
                origin.environment.insert(variable.key, variable.name);
            }
        }
    }

    /// Fills in what a rule does not give of a tier in its ladder; `keys` are those it gives.
    pub fn under_tier(
        &self,
        document: &mut Document,
        kind: &TierKind,
        mut keys: Map<String, Value>,
    ) -> Map<String, Value> {
        for (variable, value) in &self.0 {
            let key = variable
                .key
                .strip_prefix("tier.")
                .and_then(|rest| rest.strip_prefix(kind.name)?.strip_prefix('.'));
            // a tier of that name that is not ours may have other keys
            let key = key.filter(|key| kind.schema.iter().any(|field| field.key == *key));
            if key.is_some_and(|key| insert(&mut keys, key, value)) {
                document.origin.environment.insert(variable.key, variable.name);
            }
        }
        keys
    }
}

/// Variables of the reference's that stand for no key: one that is misspelt would be missed without a word.
fn unknown(environment: &Environment) -> Vec<Diagnostic> {
    let known = |name: &str| VARIABLES.iter().any(|variable| variable.name == name);
    let unknown = environment.0.iter().filter(|(name, value)| !known(name) && !value.is_empty());
    let diagnose = |(name, value): (&String, &OsString)| {
        let text = format!("{name}={}\n", value.to_string_lossy());
        let source = Arc::new(Source { path: PathBuf::from("environment"), text });
        let wrong = Diagnostic::new(&source, 0..name.len(), name, "is not used: no key stands for it");
        let names = VARIABLES.iter().map(|variable| variable.name.to_lowercase()).collect::<Vec<_>>();
        match nearest(name, names.iter().map(String::as_str)).map(str::to_uppercase) {
            Some(near) => wrong.hint(format!("did you mean `{near}`?")).warning(),
            None => wrong.hint("`kvgate schema --markdown` lists the variables that are read").warning(),
        }
    };
    unknown.map(diagnose).collect()
}

/// Puts a value at a path where there is none yet.
fn insert(table: &mut Map<String, Value>, path: &str, value: &Value) -> bool {
    match path.split_once('.') {
        None if table.contains_key(path) => false,
        None => table.insert(path.to_owned(), value.clone()).is_none(),
        Some((name, rest)) => {
            let inner = table.entry(name).or_insert_with(|| Value::Object(Map::new()));
            inner.as_object_mut().is_some_and(|inner| insert(inner, rest, value))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{gateway_fields::GATEWAY, rule_fields::RULE};
    use kvgate_core::schema::{Field, Kind};

    fn fits(kind: &Kind, takes: &Takes) -> bool {
        match (kind, takes) {
            (Kind::Int { min, max }, Takes::Number(from, to)) => min <= from && to <= max,
            (Kind::Int { min, max }, Takes::NumberFromOne(to)) => *min <= 1 && to <= max,
            (Kind::Int { min, max }, Takes::Bound(to)) => *min <= 1 && to <= max,
            (Kind::Duration { min, max }, Takes::Seconds(from, to)) => {
                let seconds = |n: &i64| std::time::Duration::from_secs(n.unsigned_abs());
                *min <= seconds(from) && seconds(to) <= *max
            }
            (Kind::Choice(words), Takes::Word(mapped)) => mapped.iter().all(|(_, word)| words.contains(word)),
            (Kind::Bool, Takes::Flag) | (Kind::Text, Takes::Text(_)) => true,
            _ => false,
        }
    }

    /// A variable whose key is gone, or takes less than the variable, would be lost without a word.
    #[test]
    fn every_variable_has_a_key_that_takes_all_of_its_values() {
        let tables = |tables: &[super::super::table::Table]| {
            tables
                .iter()
                .flat_map(|t| t.fields.iter().map(|f| (format!("{}.{}", t.name, f.key), f)))
                .collect::<Vec<_>>()
        };
        let tiers = kvgate_tiers::TIERS.iter().flat_map(|kind| {
            kind.schema.iter().map(|field: &Field| (format!("tier.{}.{}", kind.name, field.key), field))
        });
        let rule: Vec<_> = tables(RULE).into_iter().chain(tiers).collect();
        let gateway = tables(GATEWAY);
        for variable in VARIABLES {
            let keys = if variable.file == File::Rule { &rule } else { &gateway };
            let field = keys.iter().find(|(key, _)| key == variable.key).map(|(_, field)| *field);
            let field = field.unwrap_or_else(|| panic!("{}: no key {}", variable.name, variable.key));
            assert!(fits(&field.kind, &variable.takes), "{}: {}", variable.name, field.kind.allowed());
        }
    }

    #[test]
    fn values_at_the_ends_of_their_range() {
        for variable in VARIABLES {
            let takes = |text: &str| variable.takes.value(text);
            match variable.takes {
                Takes::Number(min, max) => {
                    for n in [min, max] {
                        assert_eq!(takes(&format!(" {n} ")), Some(n.into()), "{}", variable.name);
                    }
                    for text in
                        [&(min - 1).to_string(), &(max + 1).to_string(), "x", "1.5", "0x10", "1e3", "-"]
                    {
                        assert_eq!(takes(text), None, "{} {text}", variable.name);
                    }
                }
                Takes::Bound(max) => {
                    assert_eq!((takes("0"), takes("1")), (Some(Value::Null), Some(1.into())));
                    assert_eq!(takes(&max.to_string()), Some(max.into()));
                    assert_eq!((takes("-1"), takes(&(max + 1).to_string())), (None, None));
                }
                Takes::Seconds(min, max) => {
                    for n in [min, max] {
                        assert_eq!(takes(&n.to_string()), Some(format!("{n}s").into()), "{}", variable.name);
                    }
                    assert_eq!((takes(&(min - 1).to_string()), takes(&(max + 1).to_string())), (None, None));
                    assert_eq!(takes("30s"), None, "a number of seconds");
                }
                Takes::NumberFromOne(max) => {
                    assert_eq!((takes("0"), takes("1")), (Some(1.into()), Some(1.into())));
                    assert_eq!(takes(&max.to_string()), Some(max.into()));
                    assert_eq!((takes("-1"), takes(&(max + 1).to_string())), (None, None));
                }
                Takes::Word(words) => {
                    for (word, value) in words {
                        assert_eq!(takes(&word.to_uppercase()), Some((*value).into()));
                    }
                    assert_eq!((takes("hardest"), takes("of")), (None, None));
                }
                Takes::Flag => assert_eq!(
                    (takes("1"), takes("0"), takes("yes")),
                    (Some(true.into()), Some(false.into()), None)
                ),
                Takes::Text(most) => {
                    assert_eq!(takes(&"x".repeat(most)), Some("x".repeat(most).into()));
                    assert_eq!(takes(&"x".repeat(most + 1)), None);
                    assert_eq!(takes(" "), Some(" ".into()), "as it is");
                }
            }
        }
    }
}
