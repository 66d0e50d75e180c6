//! The keys of `[tier.kv-exact]`.

use std::collections::BTreeMap;
use std::time::Duration;

use kvgate_core::law::{self, Law};
use kvgate_core::schema::{Field, Kind, duration};
use kvgate_core::{BuildError, Role, TierConfig};
use kvgate_kv::hash::{Algorithm, Contract, ExtraKeys, Lora, MAX_BLOCK_SIZE};
use kvgate_kv::mirror::View;
use serde::Deserialize;

/// The keys, documented.
pub const SCHEMA: &[Field] = &[
    Field {
        key: "min_match_tokens",
        kind: Kind::Int { min: 0, max: 4096 },
        default: "16",
        doc: "Prompts of fewer tokens are not looked up, for the reason `shallow`; 0 looks up all.",
    },
    Field {
        key: "zero_hit_requests",
        kind: Kind::Int { min: 0, max: 1_000_000 },
        default: "50",
        doc: "After this many requests in a row that matched nothing in a filled inventory the alarm \
              `kv_zero_hits` is raised; 0 turns it off.",
    },
    Field {
        key: "contract.mode",
        kind: Kind::Choice(&["auto", "strict"]),
        default: "\"auto\"",
        doc: "`auto`: blocks are compared by the tokens in the engine's events, so that no algorithm, seed or \
              block size can be wrong. `strict`: by the engine's own hashes, computed from the keys below.",
    },
    Field {
        key: "contract.algorithm",
        kind: Kind::Choice(Algorithm::NAMES),
        default: "",
        doc: "The engine's `--prefix-caching-hash-algo`. Needed by `strict`; `explain` takes `sha256_cbor` when \
              absent.",
    },
    Field {
        key: "contract.block_size",
        kind: Kind::Int { min: 1, max: MAX_BLOCK_SIZE as i64 },
        default: "",
        doc: "The engine's `--block-size`, in tokens. Needed by `strict`; `explain` takes 16 when absent.",
    },
    Field {
        key: "contract.none_hash_seed",
        kind: Kind::Text,
        default: "",
        doc: "The engine's `PYTHONHASHSEED`. Absent: it is unset there too, which works with the `sha256` \
              algorithms of vLLM 0.29 and later only.",
    },
    Field {
        key: "contract.extra_keys",
        kind: Kind::Choice(&["tagged", "bare"]),
        default: "\"tagged\"",
        doc: "How adapters and salts enter the hash: `tagged` since vLLM 0.31, `bare` before.",
    },
    Field {
        key: "lora",
        kind: Kind::TextMap,
        default: "",
        doc: "Adapters by the model name that requests give, each with its path as the engine was told. What is \
              cached for one adapter serves no other. An adapter that a request names beside its model, as \
              `lora_path` or `lora_adapter`, is told apart without being listed; but `strict` with `tagged` keys knows \
              nothing of it then.",
    },
    Field {
        key: "law.mode",
        kind: Kind::Choice(&["off", "hard", "soft", "adaptive", "adaptive-soft"]),
        default: "\"hard\"",
        doc: "How overlap and load are traded; [laws.md](laws.md) has the formulas. `off`: the longest prefix wins, \
              whatever the load; among equals the first endpoint. `hard`: it wins while its endpoint carries no \
              more than a bounded share of the load. `soft`: blocks to compute and requests in flight are added \
              up, and the least sum wins. `adaptive`, `adaptive-soft`: the same, with a bound or price that \
              follows the load of the fleet.",
    },
    Field {
        key: "law.mean_load_factor_pct",
        kind: Kind::Int { min: 100, max: 1000 },
        default: "175",
        doc: "For `hard`: how much of its share of the load, by capacity, an endpoint may carry, in percent.",
    },
    Field {
        key: "law.load_penalty",
        kind: Kind::Int { min: 1, max: 100_000 },
        default: "32",
        doc: "For `soft`: what a request in flight costs, in thousandths of a block to compute.",
    },
    Field {
        key: "law.relief",
        kind: Kind::Choice(&["auto", "on", "off"]),
        default: "\"auto\"",
        doc: "Whether an endpoint that holds none of the prompt may relieve those that do. `auto`: in pools, not \
              for prefill.",
    },
    Field {
        key: "seeding.every",
        kind: Kind::Int { min: 0, max: 1_000_000 },
        default: "16",
        doc: "Every so many choices one goes to the first cold endpoint instead, so that an empty engine beside \
              warm ones gets something to hold; 0 turns it off.",
    },
    Field {
        key: "seeding.min_blocks",
        kind: Kind::Int { min: 1, max: 1_000_000 },
        default: "16",
        doc: "An endpoint that holds fewer blocks is cold.",
    },
    Field {
        key: "speculative.enabled",
        kind: Kind::Bool,
        default: "true",
        doc: "Whether an endpoint whose events are followed is taken to hold the prompts of the requests it is \
              answering, though its events do not say so yet.",
    },
    Field {
        key: "speculative.ttl",
        kind: Kind::Duration { min: Duration::from_millis(100), max: Duration::from_secs(3600) },
        default: "\"30s\"",
        doc: "For how long from the dispatch on, if the answer does not end before: longer than a prompt waits and \
              is computed.",
    },
    Field {
        key: "speculative.discount_pct",
        kind: Kind::Int { min: 0, max: 100 },
        default: "10",
        doc: "How much less than a held block an expected one counts, in percent.",
    },
    Field {
        key: "speculative.slots",
        kind: Kind::Int { min: 8, max: 16_777_216 },
        default: "65536",
        doc: "Expected blocks kept, 41 bytes each: at most 4 for every power of two in a prompt's blocks. The one \
              that would expire first gives way, which `kvgate_kv_speculative_evictions_total` counts.",
    },
];

#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    pub min_match_tokens: usize,
    pub zero_hit_requests: u64,
    pub contract: ContractConfig,
    #[serde(default)]
    pub lora: BTreeMap<String, String>,
    pub law: LawConfig,
    pub seeding: SeedingConfig,
    pub speculative: SpeculativeConfig,
}

#[derive(Debug, Clone, Copy, Deserialize)]
pub struct LawConfig {
    mode: law::Mode,
    mean_load_factor_pct: u32,
    load_penalty: u32,
    relief: Relief,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Relief {
    Auto,
    On,
    Off,
}

impl LawConfig {
    /// The law by which endpoints of this role are chosen.
    pub fn of(&self, role: Role) -> Law {
        let relief = match self.relief {
            Relief::Auto => role == Role::Any,
            relief => relief == Relief::On,
        };
        let Self { mode, mean_load_factor_pct, load_penalty, .. } = *self;
        Law { mode, mean_load_factor_pct, load_penalty, relief }
    }
}

#[derive(Debug, Clone, Copy, Deserialize)]
pub struct SeedingConfig {
    pub every: u64,
    pub min_blocks: usize,
}

#[derive(Debug, Clone, Copy, Deserialize)]
pub struct SpeculativeConfig {
    pub enabled: bool,
    #[serde(deserialize_with = "duration")]
    pub ttl: Duration,
    pub discount_pct: u64,
    pub slots: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    Auto,
    Strict,
}

#[derive(Debug, Clone, Deserialize)]
pub struct ContractConfig {
    pub mode: Mode,
    algorithm: Option<Algorithm>,
    block_size: Option<u32>,
    none_hash_seed: Option<String>,
    extra_keys: ExtraKeys,
}

impl ContractConfig {
    /// The contract that `strict` compares by.
    pub fn contract(&self) -> Result<Contract, BuildError> {
        let needed = |key: &str| BuildError {
            key: format!("contract.{key}"),
            message: "contract.mode = \"strict\" needs it".into(),
        };
        Ok(Contract {
            algorithm: self.algorithm.ok_or_else(|| needed("algorithm"))?,
            block_size: self.block_size.ok_or_else(|| needed("block_size"))?,
            seed: self.none_hash_seed.clone(),
            extra_keys: self.extra_keys,
        })
    }

    /// What an operator should look at when nothing ever matches.
    pub fn likely_fault(&self, requests: u64) -> String {
        let fault = match self.mode {
            Mode::Auto => {
                "the staged tokenizer or chat template is likely not the engine's: compare `kvgate explain` with \
                 the engine's /tokenize"
                    .to_owned()
            }
            Mode::Strict => format!(
                "the contract is likely wrong: compare contract.algorithm, block_size ({}) and none_hash_seed with \
                 the engine's --prefix-caching-hash-algo, --block-size and PYTHONHASHSEED, or set contract.mode = \
                 \"auto\"",
                self.block_size.unwrap_or_default()
            ),
        };
        format!("{requests} requests in a row matched nothing in a filled inventory: {fault}")
    }
}

/// Which view of its engines' blocks a rule with this table needs.
pub fn follows(config: &TierConfig) -> View {
    match config.parse::<Config>().map(|c| c.contract.mode) {
        Ok(Mode::Strict) => View::Published,
        _ => View::Own,
    }
}

/// The contract that `explain` computes block hashes with: as configured, else what vLLM is mostly run with.
pub fn explained(config: &TierConfig) -> Result<(Contract, BTreeMap<String, String>), BuildError> {
    let config: Config = config.parse()?;
    let contract = Contract {
        algorithm: config.contract.algorithm.unwrap_or(Algorithm::Sha256Cbor),
        block_size: config.contract.block_size.unwrap_or(16),
        seed: config.contract.none_hash_seed,
        extra_keys: config.contract.extra_keys,
    };
    Ok((contract, config.lora))
}

/// The adapter a request asks for: by its model's name, if `lora` has that, else the one `named` beside the model,
/// whose path is that in `lora`, or empty.
pub fn adapter(lora: &BTreeMap<String, String>, model: &str, named: Option<&str>) -> Option<Lora> {
    let name = if lora.contains_key(model) { model } else { named.filter(|name| !name.is_empty())? };
    Some(Lora { name: name.to_owned(), path: lora.get(name).cloned().unwrap_or_default() })
}

/// Prompts of fewer tokens are not looked up.
pub fn min_match_tokens(config: &TierConfig) -> usize {
    config.parse::<Config>().map_or(0, |c| c.min_match_tokens)
}
