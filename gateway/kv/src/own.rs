//! Our own block hashes, by which prompts are looked up.
//!
//! A block's *token hash* depends on its tokens and on its extras: what the engine keeps apart beside tokens. Its
//! *own hash* chains token hashes with [`mix`], starting at [`ROOT`]. Events carry the tokens of the blocks they
//! announce, so both sides can compute them, and neither the engine's hash algorithm nor its seed matters.
//!
//! Token hashes are keyed, by default at random per process: whoever writes a prompt cannot aim at the blocks of
//! another. They are of use within the process only.

use crate::event::{Keys, Stored};
use crate::hash::Namespace;
use sha2::Digest as _;
use std::fmt;
use std::hash::BuildHasher;
use xxhash_rust::xxh3::xxh3_64_with_secret;

/// The own hash of the (virtual) block before the first one.
pub const ROOT: u64 = 0x9E37_79B9_7F4A_7C15;

/// Chains a block's token hash to its parent's own hash. Never 0, which may mark an absent block.
/// One multiplication deep, because the chain is serial.
#[inline]
pub fn mix(parent: u64, token_hash: u64) -> u64 {
    let product = u128::from(parent ^ token_hash) * 0x9E6C_63D0_676A_9A99;
    (product as u64 ^ (product >> 64) as u64).max(1)
}

/// Computes token hashes and own hashes under one key. Share one among all who must agree.
#[derive(Clone)]
pub struct OwnHasher {
    secret: [u8; 192],
}

impl fmt::Debug for OwnHasher {
    /// Keeps the key to itself.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnHasher").finish_non_exhaustive()
    }
}

impl Default for OwnHasher {
    fn default() -> Self {
        Self::new()
    }
}

impl OwnHasher {
    /// With a random key.
    pub fn new() -> Self {
        // the standard library keys it from the operating system's randomness
        Self::with_key(std::hash::RandomState::new().hash_one(0))
    }

    /// With a given key: for tests, and to tell a recorded run again.
    pub fn with_key(key: u64) -> Self {
        let mut secret = [0; 192];
        for (i, chunk) in secret.chunks_exact_mut(32).enumerate() {
            let seed = [key, i as u64].map(u64::to_le_bytes);
            chunk.copy_from_slice(&sha2::Sha256::digest(seed.as_flattened()));
        }
        OwnHasher { secret }
    }

    /// The hash of one block's tokens and extras; `extras` as [`extras_of_query`] or [`extras_of_event`] write them.
    #[inline]
    pub fn token_hash(&self, tokens: &[u32], extras: &[u8]) -> u64 {
        let hash = xxh3_64_with_secret(bytemuck::cast_slice(tokens), &self.secret);
        if extras.is_empty() { hash } else { self.with_extras(hash, extras) }
    }

    fn with_extras(&self, hash: u64, extras: &[u8]) -> u64 {
        // hashed on their own, so that no tokens look like extras
        let extras = xxh3_64_with_secret(extras, &self.secret);
        xxh3_64_with_secret([hash, extras].map(u64::to_le_bytes).as_flattened(), &self.secret)
    }

    /// The own hashes of a prompt's full blocks of `block_size` tokens; none if that is 0.
    pub fn chain(&self, tokens: &[u32], block_size: usize, namespace: &Namespace) -> Vec<u64> {
        if block_size == 0 {
            return Vec::new();
        }
        let (mut first, mut rest) = (Vec::new(), Vec::new());
        extras_of_query(namespace, 0, &mut first);
        extras_of_query(namespace, 1, &mut rest);
        let mut own = ROOT;
        let blocks = tokens.chunks_exact(block_size).enumerate().map(|(index, block)| {
            own = mix(own, self.token_hash(block, if index == 0 { &first } else { &rest }));
            own
        });
        blocks.collect()
    }

    /// The token hashes of an event's blocks, one for each of its hashes. `None` where the event does not say which
    /// tokens they hold, or not `block_size` for each block.
    pub fn of_event(&self, stored: &Stored<'_>) -> Option<Vec<u64>> {
        let tokens = stored.tokens.as_deref()?;
        let block_size = stored.block_size as usize;
        if block_size == 0 || stored.hashes.len().checked_mul(block_size)? != tokens.len() {
            return None;
        }
        let mut keys = stored.extra_keys.iter().flat_map(|keys| keys.iter());
        let mut extras = Vec::new();
        let blocks = tokens.chunks_exact(block_size).enumerate().map(|(index, block)| {
            extras.clear();
            extras_of_event(stored, index, keys.next(), &mut extras);
            self.token_hash(block, &extras)
        });
        Some(blocks.collect())
    }
}

const LORA: u8 = 1;
const SALT: u8 = 2;
/// No prompt's extras start with it.
const FOREIGN: u8 = 3;

fn push(out: &mut Vec<u8>, tag: u8, value: &[u8]) {
    out.push(tag);
    out.extend_from_slice(&(value.len() as u64).to_le_bytes());
    out.extend_from_slice(value);
}

/// Appends the extras of block `index` of a prompt: the adapter's name on every block, the salt on the first.
pub fn extras_of_query(namespace: &Namespace, index: usize, out: &mut Vec<u8>) {
    let lora = namespace.lora.as_ref().map(|l| l.name.as_str());
    write(lora, namespace.salt(index), out);
}

fn write(lora: Option<&str>, salt: Option<&str>, out: &mut Vec<u8>) {
    if let Some(name) = lora {
        push(out, LORA, name.as_bytes());
    }
    if let Some(salt) = salt {
        push(out, SALT, salt.as_bytes());
    }
}

/// Appends the extras of block `index` of an event, whose extra keys are `keys` (msgpack).
///
/// Equal to those of a prompt whose block the engine would find here; what no prompt of ours can ask for (media,
/// embeddings, adapters without a name) yields bytes that no prompt's extras equal. Events tag nothing, so the
/// rules for their strings are:
/// - the first string is the adapter where it equals `lora_name`, which every engine that sends extra keys sends too;
/// - one more string on the first block of a prompt is the salt (vLLM 0.17 to 0.19 name an image in the same way:
///   only a prompt with that digest as its salt would be taken for it);
/// - a string anywhere else is foreign, as is any other value;
/// - without extra keys `lora_name` names the adapter (SGLang, vLLM 0.15), and `cache_salt` the salt (SGLang); a
///   `lora_id` alone (vLLM up to 0.13) is foreign. Before 0.17 vLLM does not tell salts: salted blocks count as
///   plain ones.
pub fn extras_of_event(stored: &Stored<'_>, index: usize, keys: Option<&[u8]>, out: &mut Vec<u8>) {
    let first = index == 0 && stored.parent.is_none();
    let salt = stored.cache_salt.filter(|salt| first && !salt.is_empty());
    let lora = stored.lora_name;
    let nameless = lora.is_none() && stored.lora_id.is_some();
    match (keys.map_or(Keys::None, Keys::read), lora) {
        (Keys::None, _) if !nameless => write(lora, salt, out),
        (Keys::One(a), Some(name)) if a == name => write(lora, salt, out),
        (Keys::One(a), None) if first && !nameless && salt.is_none_or(|s| s == a) => {
            write(None, Some(a), out)
        }
        (Keys::Two(a, b), Some(name)) if first && a == name && salt.is_none_or(|s| s == b) => {
            write(lora, Some(b), out);
        }
        _ => {
            out.push(FOREIGN);
            push(out, LORA, stored.lora_id.unwrap_or_default());
            push(out, LORA, lora.unwrap_or_default().as_bytes());
            push(out, SALT, salt.unwrap_or_default().as_bytes());
            out.extend_from_slice(keys.unwrap_or_default());
        }
    }
}
