//! Every key with the value that is in force and where that comes from: `kvgate check --effective`.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use kvgate_core::TierKind;
use serde::Serialize;
use serde_json::{Map, Value};

use super::compat::Environment;
use super::document::{complete, tier_table};
use super::gateway_fields::GATEWAY;
use super::load_over;
use super::rule_fields::RULE;
use super::source::Origin;
use super::table::{Table, Times};
use super::types::RuleConfig;

/// A configuration, key by key.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Effective {
    /// `gateway.toml`.
    pub gateway: Vec<Setting>,
    /// The rules, in the order of their files' names.
    pub rules: Vec<EffectiveRule>,
}

/// A rule, key by key.
#[derive(Debug, Clone, Serialize)]
pub struct EffectiveRule {
    /// Its name.
    pub rule: String,
    /// Its file.
    pub file: PathBuf,
    /// Its keys; of its tiers those in the ladder.
    pub keys: Vec<Setting>,
}

/// A key and its value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Setting {
    /// Its path: `tier.kv-exact.law.mode`, `endpoint[0].weight`.
    pub key: String,
    /// The value; `null` where absence has its own meaning.
    pub value: Value,
    /// Where it comes from.
    #[serde(flatten)]
    pub from: Provenance,
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "from", rename_all = "lowercase")]
pub enum Provenance {
    /// A file gives it.
    File {
        /// Which.
        file: PathBuf,
        /// In which line, from 1.
        line: usize,
    },
    /// No file does, and a variable of the environment is set.
    Environment {
        /// Which.
        variable: &'static str,
    },
    /// Neither: the default, or what follows from other keys.
    Default,
}

impl Effective {
    /// The list of a configuration over the environment of the process; `None` if it is refused.
    pub fn read(path: &Path, kinds: &[TierKind]) -> Option<Self> {
        let mut effective = Self::default();
        load_over(path, kinds, &Environment::of_process(), Some(&mut effective)).ok()?;
        Some(effective)
    }

    /// The list of `gateway.toml`; `tables` are its tables, complete.
    pub(super) fn gateway(&mut self, tables: &Map<String, Value>, origin: &Origin) {
        self.gateway = settings(GATEWAY, tables, &[origin]);
    }

    /// Adds a rule: what its file and the environment give, over the tables of `gateway.toml`.
    pub(super) fn rule(
        &mut self,
        rule: &RuleConfig,
        given: &Map<String, Value>,
        gateway: (&Map<String, Value>, &Origin),
        kinds: &[TierKind],
    ) {
        let tables = complete(given.clone(), RULE, gateway.0);
        let mut keys = settings(RULE, &tables, &[&rule.origin, gateway.1]);
        for name in &rule.all_tiers() {
            let (Some(kind), Some(tier)) = (kinds.iter().find(|k| k.name == *name), rule.tier.get(name))
            else {
                continue;
            };
            fields(&mut keys, &format!("tier.{name}"), &tier_table(kind), &tier.0, &[&rule.origin]);
        }
        let derived = rule.endpoints.iter().enumerate().flat_map(|(at, endpoint)| {
            let text = |text: &Option<String>| text.clone().map_or(Value::Null, Value::from);
            [
                (format!("endpoint[{at}].kv_events"), text(&endpoint.kv_events)),
                (format!("endpoint[{at}].kv_replay"), text(&endpoint.kv_replay)),
            ]
        });
        let derived = derived.chain([
            ("name".to_owned(), Value::from(rule.name.as_str())),
            ("tiers".to_owned(), Value::from(rule.tiers.clone())),
        ]);
        let decode =
            rule.pair.as_ref().map(|pair| ("decode_tiers".to_owned(), Value::from(pair.tiers.clone())));
        let derived = derived.chain(decode);
        for (key, value) in derived {
            if let Some(setting) = keys.iter_mut().find(|s| s.key == key && s.from == Provenance::Default) {
                setting.value = value;
            }
        }
        let file = rule.origin.source.path.clone();
        self.rules.push(EffectiveRule { rule: rule.name.clone(), file, keys });
    }

    /// For people: a key a line, as it would be written, and where it comes from.
    pub fn text(&self) -> String {
        let mut out = String::from("gateway.toml\n");
        lines(&mut out, &self.gateway);
        for EffectiveRule { rule, file, keys } in &self.rules {
            _ = writeln!(out, "\nrule {rule}, {}", file.display());
            lines(&mut out, keys);
        }
        out
    }
}

fn lines(out: &mut String, settings: &[Setting]) {
    for Setting { key, value, from } in settings {
        let value = if value.is_null() { "absent".to_owned() } else { value.to_string() };
        let from = match from {
            Provenance::File { file, line } => format!("{}:{line}", file.display()),
            Provenance::Environment { variable } => (*variable).to_owned(),
            Provenance::Default => "default".to_owned(),
        };
        _ = writeln!(out, "  {key} = {value}  # {from}");
    }
}

/// The keys of these tables; `origins` say where they stand, the first that knows a key.
fn settings(tables: &[Table], values: &Map<String, Value>, origins: &[&Origin]) -> Vec<Setting> {
    let mut settings = Vec::new();
    for table in tables {
        match (table.times, values.get(table.name)) {
            (Times::Many, Some(Value::Array(list))) => {
                for (at, element) in list.iter().enumerate() {
                    let keys = element.as_object().cloned().unwrap_or_default();
                    fields(&mut settings, &format!("{}[{at}]", table.name), table, &keys, &origins[..1]);
                }
            }
            (Times::Over, Some(Value::Object(keys))) => {
                fields(&mut settings, table.name, table, keys, origins)
            }
            (_, Some(Value::Object(keys))) => fields(&mut settings, table.name, table, keys, &origins[..1]),
            _ if table.name.is_empty() => fields(&mut settings, "", table, values, &origins[..1]),
            _ => {}
        }
    }
    settings
}

fn fields(
    settings: &mut Vec<Setting>,
    path: &str,
    table: &Table,
    keys: &Map<String, Value>,
    origins: &[&Origin],
) {
    for field in table.fields {
        let key = if path.is_empty() { field.key.to_owned() } else { format!("{path}.{}", field.key) };
        let mut segments = field.key.split('.');
        let first = segments.next().and_then(|name| keys.get(name));
        let value = segments.fold(first, |value, name| value?.get(name));
        let from = origins.iter().find_map(|origin| origin.provenance(&key)).unwrap_or(Provenance::Default);
        settings.push(Setting { value: value.cloned().unwrap_or_default(), key, from });
    }
}
