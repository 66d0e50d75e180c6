//! The declared keys as text, JSON and Markdown: `kvgate schema`, `kvgate tiers`,
//! `docs/configuration.md` and `docs/tiers.md`.

use std::fmt::Write;

use kvgate_core::schema::{Field, Kind, show_duration, show_size};
use kvgate_core::{MissKind, TierKind};
use serde::Serialize;
use serde_json::{Value, json};

use super::compat::{VARIABLES, Variable};
use super::document::{default_of, tier_table};
use super::gateway_fields::GATEWAY;
use super::rule_fields::RULE;
use super::table::{Form, Table, Times};

/// All keys there are, in the order they are documented.
#[derive(Debug, Clone, Serialize)]
pub struct Schema {
    /// `gateway.toml`.
    pub gateway: Vec<Section>,
    /// A rule file, its tiers excepted.
    pub rule: Vec<Section>,
    /// The tiers.
    pub tiers: Vec<TierSection>,
    /// Variables of the environment that stand for keys.
    pub environment: Vec<VariableSection>,
}

/// A variable of the environment.
#[derive(Debug, Clone, Serialize)]
pub struct VariableSection {
    /// Its name.
    pub variable: &'static str,
    /// The key it gives a value to where no file does.
    pub key: &'static str,
    /// The values in words.
    pub allowed: String,
}

/// A table.
#[derive(Debug, Clone, Serialize)]
pub struct Section {
    /// As it is written: `[server]`, `[[listener]]`.
    pub table: String,
    /// What it is for.
    pub doc: &'static str,
    /// Its keys.
    pub keys: Vec<Key>,
}

/// A key.
#[derive(Debug, Clone, Serialize)]
pub struct Key {
    /// Its name; `contract.mode` is `mode` in the table `contract`.
    pub key: &'static str,
    /// Whether its table means nothing without it.
    pub required: bool,
    /// The values in words.
    pub allowed: String,
    /// The values as JSON Schema has them; durations and sizes with bounds of their own.
    pub schema: Value,
    /// The value when it is absent; `null` when absence has its own meaning, which `doc` gives.
    pub default: Option<Value>,
    /// The same as it is written in TOML; empty for `null`.
    #[serde(skip)]
    pub written: &'static str,
    /// What it means.
    pub doc: &'static str,
}

/// A tier.
#[derive(Debug, Clone, Serialize)]
pub struct TierSection {
    /// Its name in `tiers` and metrics.
    pub name: &'static str,
    /// What it does.
    pub doc: &'static str,
    /// The keys of `[tier.<name>]`.
    pub keys: Vec<Key>,
    /// Why it may pass.
    pub misses: Vec<Reason>,
}

/// Why a tier may pass.
#[derive(Debug, Clone, Serialize)]
pub struct Reason {
    /// As it stands in metrics and decision records.
    pub reason: &'static str,
    /// When.
    pub doc: &'static str,
}

/// All keys; `kinds` are the tiers there are.
pub fn schema(kinds: &[TierKind]) -> Schema {
    Schema {
        gateway: GATEWAY.iter().map(section).collect(),
        rule: RULE.iter().map(section).collect(),
        tiers: tiers(kinds),
        environment: VARIABLES.iter().map(variable).collect(),
    }
}

fn variable(variable: &Variable) -> VariableSection {
    let Variable { name, key, takes, .. } = variable;
    VariableSection { variable: name, key, allowed: takes.allowed() }
}

/// The tiers there are: what `kvgate tiers` lists.
pub fn tiers(kinds: &[TierKind]) -> Vec<TierSection> {
    let tier = |kind: &TierKind| TierSection {
        name: kind.name,
        doc: kind.doc,
        keys: section(&tier_table(kind)).keys,
        misses: kind.misses.iter().map(|MissKind { reason, doc }| Reason { reason, doc }).collect(),
    };
    kinds.iter().map(tier).collect()
}

fn section(table: &Table) -> Section {
    Section {
        table: table.header(),
        doc: table.doc,
        keys: table.fields.iter().map(|field| key(table, field)).collect(),
    }
}

fn key(table: &Table, field: &Field) -> Key {
    let over = table.times == Times::Over;
    Key {
        key: field.key,
        required: table.required.contains(&field.key),
        allowed: match (table.form(field.key), field.kind) {
            (Some(form), Kind::TextList) => format!("a list; each {}", form.allowed()),
            (Some(form), _) => form.allowed().into(),
            (None, kind) => kind.allowed(),
        },
        schema: json_schema(&field.kind, table.form(field.key)),
        default: if over { None } else { default_of(field) },
        written: if over { "" } else { field.default },
        doc: field.doc,
    }
}

fn json_schema(kind: &Kind, form: Option<Form>) -> Value {
    match kind {
        Kind::Bool => json!({"type": "boolean"}),
        Kind::Int { min, max } => json!({"type": "integer", "minimum": min, "maximum": max}),
        Kind::Duration { min, max } => json!({
            "type": "string", "format": "duration", "minimum": show_duration(*min), "maximum": show_duration(*max)
        }),
        Kind::Size { min, max } => json!({
            "type": ["string", "integer"], "format": "size", "minimum": show_size(*min), "maximum": show_size(*max)
        }),
        Kind::Text => json!({"type": "string", "minLength": 1}),
        Kind::Choice(words) => json!({"type": "string", "enum": words}),
        Kind::TextList => {
            json!({"type": "array", "items": {"type": "string"}, "uniqueItems": form != Some(Form::Key)})
        }
        Kind::IntList { min, max } => {
            json!({"type": "array", "items": {"type": "integer", "minimum": min, "maximum": max}})
        }
        Kind::TextMap => json!({"type": "object", "additionalProperties": {"type": "string"}}),
    }
}

impl Schema {
    /// For people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for (file, sections) in [("gateway.toml", &self.gateway), ("rules/*.toml", &self.rule)] {
            _ = writeln!(out, "{file}\n");
            for section in sections {
                _ = writeln!(out, "{}  {}", section.table, section.doc);
                keys_text(&mut out, &section.keys);
            }
        }
        out.push_str(&tiers_text(&self.tiers));
        out.push_str("environment\n\n");
        for VariableSection { variable, key, allowed } in &self.environment {
            _ = writeln!(out, "  {variable} ({allowed})\n      {key}");
        }
        out
    }

    /// `docs/configuration.md`.
    pub fn markdown(&self) -> String {
        let mut out = INTRODUCTION.to_owned();
        for (title, sections) in [("gateway.toml", &self.gateway), ("Rules", &self.rule)] {
            _ = writeln!(out, "\n## {title}");
            for section in sections {
                _ = writeln!(out, "\n### {}\n\n{}\n", code(&section.table), section.doc);
                keys_markdown(&mut out, &section.keys);
            }
        }
        out.push_str("\n## Tiers\n\nA tier's keys stand in the rule under `[tier.<name>]`.\n");
        tier_sections(&mut out, &self.tiers, "###");
        out.push_str(ENVIRONMENT);
        for VariableSection { variable, key, allowed } in &self.environment {
            _ = writeln!(out, "| `{variable}` | `{key}` | {allowed} |");
        }
        out
    }
}

/// `docs/tiers.md`.
pub fn tiers_markdown(tiers: &[TierSection]) -> String {
    let mut out = TIERS.to_owned();
    tier_sections(&mut out, tiers, "##");
    out
}

fn tier_sections(out: &mut String, tiers: &[TierSection], heading: &str) {
    for tier in tiers {
        _ = writeln!(out, "\n{heading} `{}`\n\n{}", tier.name, tier.doc);
        if !tier.keys.is_empty() {
            out.push('\n');
            keys_markdown(out, &tier.keys);
        }
        if !tier.misses.is_empty() {
            out.push_str("\nIt passes for these reasons:\n\n");
        }
        for Reason { reason, doc } in &tier.misses {
            _ = writeln!(out, "- `{reason}`: {doc}");
        }
    }
}

/// For people: what `kvgate tiers` prints.
pub fn tiers_text(tiers: &[TierSection]) -> String {
    let mut out = String::new();
    for tier in tiers {
        _ = writeln!(out, "{}  {}", tier.name, tier.doc);
        keys_text(&mut out, &tier.keys);
        for Reason { reason, doc } in &tier.misses {
            _ = writeln!(out, "  misses {reason}: {doc}");
        }
        out.push('\n');
    }
    out
}

fn keys_text(out: &mut String, keys: &[Key]) {
    for key in keys {
        let default = match key.written {
            "" if key.required => "needed".to_owned(),
            "" => "optional".to_owned(),
            text => format!("default {text}"),
        };
        _ = writeln!(out, "  {} ({}; {default})\n      {}", key.key, key.allowed, key.doc);
    }
    out.push('\n');
}

fn keys_markdown(out: &mut String, keys: &[Key]) {
    out.push_str("| key | values | default | meaning |\n|---|---|---|---|\n");
    for key in keys {
        let default = match key.written {
            "" if key.required => "needed".to_owned(),
            "" => String::new(),
            text => format!("`{text}`"),
        };
        let cell = |text: &str| text.replace('|', "\\|");
        _ = writeln!(out, "| `{}` | {} | {default} | {} |", key.key, cell(&key.allowed), cell(key.doc));
    }
}

fn code(header: &str) -> String {
    if header.starts_with('[') { format!("`{header}`") } else { header.replace("top", "Top") }
}

const INTRODUCTION: &str = "\
# Configuration

<!-- Generated by `kvgate schema --markdown`. Change the declarations, not this page. -->

kvgate reads `gateway.toml`, for the process, and a folder of rules beside it: one file, one service. Every key but an
endpoint's address has a default, and a key that is not listed here is an error. `kvgate check` reports every problem of
every file with its line, its key, what stands there and what may; it binds nothing.

Changes of any file are read while the gateway runs, and so is the signal `SIGHUP`. A configuration with errors leaves
the one before it in force. Rules are hot; of `gateway.toml`, `server.rules`, `server.reload_debounce`, `server.grace_period`, `server.drain_delay`,
`server.upgrade_socket`, `[limits]`, `[timeouts]`, `[retry]`, `[retry_budget]`, `[breaker]`, `[probe]`, `[telemetry]` and
`[alarms]` are, and so is `[listener.tls]` of a listener that has certificates: they, their keys and the authorities of
clients are read again whenever the files change. The rest is read at the start.

Durations are a whole number and `ms`, `s`, `m` or `h`: `\"30s\"`. Sizes are a whole number and `B`, `KiB`, `MiB` or `GiB`,
`\"16MiB\"`, or a plain number of bytes. A default left empty means that absence has its own meaning, which is given; in a
rule's `[limits]`, `[timeouts]`, `[retry]`, `[breaker]`, `[probe]` and `[telemetry]` it means the value of
`gateway.toml`.
";

const ENVIRONMENT: &str = "
## Environment

Variables of the LoxiLB inference gateway that are read when the process starts. Each stands for a key: what a file gives
comes first, then the variable, then the default. A variable of a rule's key counts for every rule. A value that is not
allowed is warned of and not used; an empty one counts as unset; of two variables for one key the first that is set counts.
Other variables of that gateway have no effect here. `kvgate check --effective` shows the value of every key and where it
comes from.

| variable | key | values |
|---|---|---|
";

const TIERS: &str = "\
# Tiers

<!-- Generated by `kvgate tiers --markdown`. Change the declarations, not this page. -->

A rule's `tiers` are asked in their order. Each decides, or passes to the next for a reason: its miss. Misses are counted
in `kvgate_tier_misses_total` and stand in the decision record of every request; the ladder ends with `min-load`, named
or not. A tier's keys stand in the rule under `[tier.<name>]`. [Writing a tier](writing-a-tier.md) is how to add one.
";
