//! A configuration folder under construction, and tiers to configure.

use std::fs;
use std::path::PathBuf;

use kvgate::config::{self, CheckReport, Config, Diagnostics};
use kvgate_core::schema::{Field, Kind};
use kvgate_core::{Build, BuildError, MissKind, TierKind};
use kvgate_kv::hash::Algorithm;
use tempfile::TempDir;

/// A rule with nothing wrong with it.
pub const RULE: &str = "tiers = [\"round-robin\"]\n[[endpoint]]\naddress = \"127.0.0.1:8001\"\n";

pub struct Folder(TempDir);

impl Folder {
    /// With an empty gateway.toml, no rules and no tokenizers.
    pub fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        fs::create_dir(folder.path("rules")).unwrap();
        folder.write("gateway.toml", "")
    }

    /// With one rule and the tokenizer of the model `m`.
    pub fn with(rule: &str) -> Self {
        Self::new().write("tokenizers/m/tokenizer.json", "{}").write("rules/one.toml", rule)
    }

    /// With two rules of one endpoint each, which have these tables too.
    pub fn pair(one: &str, two: &str) -> Self {
        let rule = |text: &str, port: u16| {
            format!("tiers = [\"round-robin\"]\n{text}\n[[endpoint]]\naddress = \"127.0.0.1:{port}\"\n")
        };
        Self::new().write("rules/one.toml", rule(one, 8001)).write("rules/two.toml", rule(two, 8002))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(self, name: &str, text: impl AsRef<[u8]>) -> Self {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
        self
    }

    pub fn load(&self) -> Result<Config, Diagnostics> {
        config::load(&self.path("gateway.toml"), KINDS)
    }

    pub fn check(&self, strict: bool) -> CheckReport {
        config::check(&self.path("gateway.toml"), KINDS, strict)
    }

    /// Its text without the folder's name.
    pub fn plain(&self, text: impl ToString) -> String {
        text.to_string().replace(&format!("{}/", self.0.path().display()), "")
    }

    /// What is wrong with it, a line each, and whether it is refused.
    pub fn problems(&self) -> String {
        let (word, problems) = match self.load() {
            Ok(config) => ("taken", Diagnostics(config.warnings)),
            Err(problems) => ("refused", problems),
        };
        self.plain(format!("{word}\n{problems}"))
    }
}

const BUILD: Build = |_, _| Err(BuildError { key: String::new(), message: "not to be built".into() });

const fn field(key: &'static str, kind: Kind, default: &'static str) -> Field {
    Field { key, kind, default, doc: "A key." }
}

const fn kind(name: &'static str, schema: &'static [Field], misses: &'static [MissKind]) -> TierKind {
    TierKind { name, doc: "A tier.", misses, schema, build: BUILD }
}

const PASSES: &[MissKind] = &[MissKind { reason: "unknown", doc: "Nothing is known of it." }];
const NONE: &[MissKind] = &[MissKind { reason: "no_endpoint", doc: "No endpoint is eligible." }];

/// Tiers as they may be, whatever they are today.
pub const KINDS: &[TierKind] = &[
    kind(
        "session",
        &[field(
            "ttl",
            Kind::Duration {
                min: std::time::Duration::from_secs(1),
                max: std::time::Duration::from_secs(3600),
            },
            "\"300s\"",
        )],
        PASSES,
    ),
    kind(
        "kv-exact",
        &[
            field("min_match_tokens", Kind::Int { min: 0, max: 4096 }, "16"),
            field("contract.mode", Kind::Choice(&["auto", "strict"]), "\"auto\""),
            field("contract.algorithm", Kind::Choice(Algorithm::NAMES), ""),
            field("contract.block_size", Kind::Int { min: 1, max: 4096 }, ""),
            field("contract.none_hash_seed", Kind::Text, ""),
            field("lora", Kind::TextMap, ""),
            field("cache", Kind::Size { min: 0, max: 1 << 30 }, "\"1MiB\""),
        ],
        PASSES,
    ),
    kind("round-robin", &[], NONE),
    kind("chwbl", &[], NONE),
];
