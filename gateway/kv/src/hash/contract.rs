//! What must be known of an engine to reproduce its block hashes.

use super::Hasher;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The largest block size accepted, in tokens. Engines use 1 to 256; Python's pickler starts a second frame
/// at 64 KiB, which no block of this size reaches.
pub const MAX_BLOCK_SIZE: u32 = 8192;

/// What vLLM hashes an unset seed as, from 0.29 on, with the SHA-256 algorithms.
const UNSET_SEED: &str = "vllm-none-hash";

/// vLLM's `--prefix-caching-hash-algo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// SHA-256 of canonical CBOR.
    Sha256Cbor,
    /// XXH3-128 of canonical CBOR (vLLM 0.13 and later).
    XxhashCbor,
    /// SHA-256 of a pickle, vLLM's default.
    Sha256,
    /// XXH3-128 of a pickle (vLLM 0.13 and later).
    Xxhash,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Function {
    Sha256,
    Xxh3,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Serializer {
    Cbor,
    Pickle,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 4] =
        [Algorithm::Sha256Cbor, Algorithm::XxhashCbor, Algorithm::Sha256, Algorithm::Xxhash];

    /// The names of all of them.
    pub const NAMES: &[&str] =
        &[Self::ALL[0].name(), Self::ALL[1].name(), Self::ALL[2].name(), Self::ALL[3].name()];

    /// The name in the configuration and on vLLM's command line.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Sha256Cbor => "sha256_cbor",
            Algorithm::XxhashCbor => "xxhash_cbor",
            Algorithm::Sha256 => "sha256",
            Algorithm::Xxhash => "xxhash",
        }
    }

    pub(super) fn parts(self) -> (Function, Serializer) {
        match self {
            Algorithm::Sha256Cbor => (Function::Sha256, Serializer::Cbor),
            Algorithm::XxhashCbor => (Function::Xxh3, Serializer::Cbor),
            Algorithm::Sha256 => (Function::Sha256, Serializer::Pickle),
            Algorithm::Xxhash => (Function::Xxh3, Serializer::Pickle),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = ContractError;

    fn from_str(name: &str) -> Result<Self, ContractError> {
        let found = Self::ALL.into_iter().find(|a| a.name() == name);
        found.ok_or_else(|| ContractError::UnknownAlgorithm(name.to_owned()))
    }
}

/// How an engine generation writes a block's extra keys into the hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExtraKeys {
    /// vLLM 0.31 and later: `("lora", name, path)`, `("mm", id, offset)`, `("cache_salt", salt)`, ...
    #[default]
    Tagged,
    /// vLLM 0.30 and earlier: the bare values, a LoRA adapter by name alone. Media are right from 0.20 on,
    /// LoRA from 0.11 on, embeddings from 0.17 on.
    Bare,
}

/// What must agree between an engine and us for hashes to match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contract {
    /// The engine's hash algorithm.
    pub algorithm: Algorithm,
    /// Tokens per block, `1..=`[`MAX_BLOCK_SIZE`].
    pub block_size: u32,
    /// The engine's `PYTHONHASHSEED`, verbatim: `"random"` and `""` are ordinary strings to vLLM.
    /// `None`: the variable is unset there; see [`Contract::caveat`].
    #[serde(rename = "none_hash_seed", default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<String>,
    /// The engine generation's form of the extra keys.
    #[serde(default)]
    pub extra_keys: ExtraKeys,
}

/// Why a usable contract deserves a warning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Caveat {
    /// No seed, and an engine that may only be of a generation whose unset seed is fixed.
    #[error("no none_hash_seed: right only if PYTHONHASHSEED is unset in the engine's environment")]
    SeedUnset,
    /// No seed, and the generation could be one that draws the root at random.
    #[error(
        "no none_hash_seed: vLLM 0.29 and 0.30 have a fixed root then, but up to 0.28 it is random and nothing can match; set PYTHONHASHSEED there"
    )]
    SeedMayBeRandom,
}

/// Why a contract cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContractError {
    /// Not a name of [`Algorithm::ALL`].
    #[error("unknown hash algorithm {0:?}: sha256_cbor, xxhash_cbor, sha256 or xxhash")]
    UnknownAlgorithm(String),
    /// Zero or beyond [`MAX_BLOCK_SIZE`].
    #[error("block_size {0} is not in 1..={MAX_BLOCK_SIZE}")]
    BlockSize(u32),
    /// Without a seed every vLLM generation draws the root of this algorithm at random at each start.
    #[error(
        "{0} without none_hash_seed can never match: the engine's root is random; set PYTHONHASHSEED there"
    )]
    RandomSeed(Algorithm),
}

impl Contract {
    /// A hasher for this contract.
    ///
    /// Without a seed: the XXH3 algorithms have a random root in all generations and are refused. The SHA-256
    /// ones hash `"vllm-none-hash"` from 0.29 on. [`ExtraKeys::Tagged`] (0.31 on) implies that; with
    /// [`ExtraKeys::Bare`] the engine may be 0.29 or 0.30 (the same rule, assumed here) or older (random), which
    /// the contract cannot tell: [`Contract::caveat`] says so, and only comparing with published hashes decides.
    ///
    /// # Errors
    /// The contract can match no engine, or its block size is out of range.
    pub fn hasher(&self) -> Result<Hasher, ContractError> {
        if !(1..=MAX_BLOCK_SIZE).contains(&self.block_size) {
            return Err(ContractError::BlockSize(self.block_size));
        }
        match (&self.seed, self.algorithm.parts().0) {
            (Some(seed), _) => Ok(Hasher::new(self, seed)),
            (None, Function::Sha256) => Ok(Hasher::new(self, UNSET_SEED)),
            (None, Function::Xxh3) => Err(ContractError::RandomSeed(self.algorithm)),
        }
    }

    /// What to warn of although the contract can be used.
    pub fn caveat(&self) -> Option<Caveat> {
        match (&self.seed, self.extra_keys) {
            (Some(_), _) => None,
            (None, ExtraKeys::Tagged) => Some(Caveat::SeedUnset),
            (None, ExtraKeys::Bare) => Some(Caveat::SeedMayBeRandom),
        }
    }
}
