//! The engine's own block hashes, reproduced bit for bit.
//!
//! vLLM 0.10 .. 0.33 (`vllm/v1/core/kv_cache_utils.py`): `block_i = H(ser((parent, tokens, extra keys)))`,
//! where `parent` is the whole digest of the block before, and of the first block `NONE_HASH = H(ser(seed))`.
//! `H` is SHA-256 or XXH3-128 (seed 0, canonical big-endian digest); `ser` is canonical CBOR or pickle protocol 5.
//! An event names a block by the last eight bytes of its digest ([`Digest::u64`]) or by all of them.
//!
//! Routing does not need these hashes ([`crate::own`] does that); they serve strict contracts, explanations and
//! simulated engines.

mod buffer;
mod cbor;
mod contract;
mod keys;
mod pickle;

pub use contract::{Algorithm, Caveat, Contract, ContractError, ExtraKeys, MAX_BLOCK_SIZE};
pub use keys::{ExtraKey, Lora, Namespace};

use buffer::{Buffer, Writer};
use contract::{Function, Serializer};
use sha2::Digest as _;
use std::fmt;

/// A block's whole digest: 32 bytes of SHA-256 or 16 of XXH3-128.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest {
    bytes: [u8; 32],
    len: u8,
}

impl Digest {
    /// The whole digest, 32 or 16 bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The name of the block in events: the last eight bytes, big-endian.
    pub fn u64(&self) -> u64 {
        self.as_bytes().last_chunk().map_or(0, |last| u64::from_be_bytes(*last))
    }

    fn sha256(bytes: &[u8]) -> Digest {
        Digest { bytes: sha2::Sha256::digest(bytes).into(), len: 32 }
    }

    fn xxh3(bytes: &[u8]) -> Digest {
        let mut digest = Digest { bytes: [0; 32], len: 16 };
        digest.bytes[..16].copy_from_slice(&xxhash_rust::xxh3::xxh3_128(bytes).to_be_bytes());
        digest
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_bytes().iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A token id as engines hash it: `u32`, which holds every vocabulary's, or `u64`, because Python's integers have no
/// bound and a hash function is tried beyond vocabularies.
pub trait TokenId: sealed::Token {}

impl TokenId for u32 {}
impl TokenId for u64 {}

mod sealed {
    use super::{Writer, cbor, pickle};

    pub trait Token: Copy {
        /// Bytes that one takes at most.
        const WIDEST: usize;
        fn cbor(self, w: &mut Writer<'_>);
        fn pickle(self, w: &mut Writer<'_>);
    }

    impl Token for u32 {
        const WIDEST: usize = 8;

        #[inline]
        fn cbor(self, w: &mut Writer<'_>) {
            cbor::unsigned(w, self);
        }

        #[inline]
        fn pickle(self, w: &mut Writer<'_>) {
            pickle::unsigned(w, self);
        }
    }

    impl Token for u64 {
        const WIDEST: usize = 11;

        fn cbor(self, w: &mut Writer<'_>) {
            match u32::try_from(self) {
                Ok(id) => id.cbor(w),
                Err(_) => cbor::unsigned_long(w, self),
            }
        }

        fn pickle(self, w: &mut Writer<'_>) {
            match u32::try_from(self) {
                Ok(id) => id.pickle(w),
                Err(_) => pickle::unsigned_long(w, self),
            }
        }
    }
}

/// The serialised form of the block hashed last; reused from block to block.
#[derive(Default)]
pub struct Scratch(Buffer);

impl Scratch {
    /// What [`Hasher::block`] fed to the hash function: CBOR or pickle. For a debug log.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }
}

/// Computes the block hashes of one [`Contract`]. Cheap to share, has no state.
#[derive(Clone, Debug)]
pub struct Hasher {
    function: Function,
    serializer: Serializer,
    extra_keys: ExtraKeys,
    block_size: usize,
    none_hash: Digest,
}

impl Hasher {
    fn new(contract: &Contract, seed: &str) -> Hasher {
        let (function, serializer) = contract.algorithm.parts();
        let mut scratch = Scratch::default();
        match serializer {
            Serializer::Cbor => cbor::seed(&mut scratch.0, seed),
            Serializer::Pickle => pickle::seed(&mut scratch.0, seed),
        }
        Hasher {
            function,
            serializer,
            extra_keys: contract.extra_keys,
            block_size: contract.block_size as usize,
            none_hash: function.digest(scratch.bytes()),
        }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Whether it hashes CBOR; else a pickle.
    pub fn is_cbor(&self) -> bool {
        matches!(self.serializer, Serializer::Cbor)
    }

    /// The parent of every first block (vLLM's `NONE_HASH`).
    pub fn none_hash(&self) -> Digest {
        self.none_hash
    }

    /// The digests of a prompt's full blocks; the unfinished tail has none.
    pub fn blocks(&self, tokens: &[u32], namespace: &Namespace) -> Vec<Digest> {
        let (first, rest) = (namespace.extra_keys(0), namespace.extra_keys(1));
        let mut scratch = Scratch::default();
        let mut parent = self.none_hash;
        tokens
            .chunks_exact(self.block_size)
            .enumerate()
            .map(|(index, block)| {
                let keys = if index == 0 { &first } else { &rest };
                parent = self.block(&parent, block, keys, &mut scratch);
                parent
            })
            .collect()
    }

    /// The digest of one block: `tokens` are the block's, `keys` what else distinguishes it, in the engine's
    /// order (LoRA, media, salt, embeddings). `scratch` then holds the bytes that were hashed.
    pub fn block<T: TokenId>(
        &self,
        parent: &Digest,
        tokens: &[T],
        keys: &[ExtraKey<'_>],
        scratch: &mut Scratch,
    ) -> Digest {
        match self.serializer {
            Serializer::Cbor => cbor::block(&mut scratch.0, parent, tokens, keys, self.extra_keys),
            Serializer::Pickle => pickle::block(&mut scratch.0, parent, tokens, keys, self.extra_keys),
        }
        self.function.digest(scratch.bytes())
    }
}

impl Function {
    fn digest(self, bytes: &[u8]) -> Digest {
        match self {
            Function::Sha256 => Digest::sha256(bytes),
            Function::Xxh3 => Digest::xxh3(bytes),
        }
    }
}
