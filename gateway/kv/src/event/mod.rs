//! The KV events that engines publish, decoded.
//!
//! A payload is msgpack `[timestamp, [event, ...], rank?]`. An event is a map with a key `type` (vLLM from 0.24,
//! SGLang from 0.5.20, TensorRT-LLM) or an array that starts with the type (older ones); fields come and go with
//! the version, so maps are read by name and arrays by position, unknown ones are counted and ignored. Block
//! hashes are unsigned (vLLM) or signed integers (SGLang, TensorRT-LLM) or whole digests (vLLM with
//! `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`): here all are u64, see [`Stored::hashes`].
//!
//! The payload comes from a peer: decoding is iterative, never reserves more than the payload could fill, and a
//! damaged event does not cost its neighbours.

mod cursor;
mod decode;

pub use decode::decode;

use cursor::{Cursor, Head};

/// What one message of an engine says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch<'a> {
    /// When the engine made it: seconds since 1970.
    pub timestamp: f64,
    /// The data-parallel rank; absent in older engines and `None` where nil.
    pub rank: Option<u32>,
    /// What happened, in order.
    pub events: Vec<Event<'a>>,
    /// Events that were dropped because they could not be read.
    pub bad_events: Vec<DecodeError>,
    /// Events of types unknown to us.
    pub unknown_events: u32,
    /// Fields unknown to us, in all events.
    pub unknown_fields: u32,
}

/// One change of an engine's cache.
#[derive(Clone, Debug, PartialEq)]
pub enum Event<'a> {
    /// Blocks are held now.
    Stored(Box<Stored<'a>>),
    /// Blocks are held no more, one copy of each.
    Removed(Removed<'a>),
    /// Nothing is held any more.
    Cleared,
}

/// Blocks that follow one another, the first one following `parent`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored<'a> {
    /// The engine's names of the blocks: an unsigned integer as it is, a signed one as its bit pattern, of a digest
    /// the last eight bytes, big-endian.
    pub hashes: Vec<u64>,
    /// The block before the first one; `None`: it starts a prompt.
    pub parent: Option<u64>,
    /// The tokens of all blocks, one after the other; `None` where they are not plain u32 (SGLang publishes pairs
    /// with EAGLE, TensorRT-LLM strings for media).
    pub tokens: Option<Vec<u32>>,
    /// Tokens per block, of this engine and group.
    pub block_size: u32,
    /// The adapter's number within the engine, as encoded: what it is called is [`Stored::lora_name`].
    pub lora_id: Option<&'a [u8]>,
    /// The adapter's name (vLLM from 0.15).
    pub lora_name: Option<&'a str>,
    /// `GPU`, `CPU`, `CPU_PINNED`, `DISK`, `STORAGE`, `EXTERNAL`, ...
    pub medium: Option<&'a str>,
    /// The salt of the prompt (SGLang); vLLM puts it into `extra_keys`.
    pub cache_salt: Option<&'a str>,
    /// What else distinguishes each block (vLLM from 0.17).
    pub extra_keys: Option<BlockKeys<'a>>,
    /// The group of layers that holds the blocks (hybrid models have several).
    pub group_idx: Option<u32>,
    /// How that group attends: `full_attention`, `sliding_window`, ...
    pub kind: Option<&'a str>,
    /// The window of a sliding-window group, in tokens.
    pub sliding_window: Option<u32>,
    /// `LOCAL` or `REMOTE` (vLLM from 0.26).
    pub locality: Option<&'a str>,
}

/// Blocks that one copy each was dropped of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Removed<'a> {
    /// As in [`Stored::hashes`].
    pub hashes: Vec<u64>,
    /// As in [`Stored::medium`].
    pub medium: Option<&'a str>,
    /// As in [`Stored::group_idx`].
    pub group_idx: Option<u32>,
    /// As in [`Stored::locality`].
    pub locality: Option<&'a str>,
}

/// The extra keys of an event's blocks, left encoded: nil or an array per block.
///
/// Unlike the hashed form they are untagged in all versions and hold no adapter path: the adapter's name, then
/// `[identifier, offset]` per medium (before 0.20 the bare identifier), the salt, a digest of embeddings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockKeys<'a> {
    blocks: u32,
    /// So many valid msgpack values.
    encoded: &'a [u8],
}

impl<'a> BlockKeys<'a> {
    /// The keys of each block, msgpack.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let mut cursor = Cursor::new(self.encoded);
        (0..self.blocks).map_while(move |_| cursor.skip().ok())
    }
}

/// The extra keys of one block, as far as a prompt without media can have them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Keys<'a> {
    None,
    One(&'a str),
    Two(&'a str, &'a str),
    /// Anything else: media, embeddings, integers.
    Other,
}

impl<'a> Keys<'a> {
    pub(crate) fn read(encoded: &'a [u8]) -> Keys<'a> {
        let mut cursor = Cursor::new(encoded);
        let count = match cursor.head() {
            Ok(Head::Nil) => 0,
            Ok(Head::Array(n)) => n,
            _ => return Keys::Other,
        };
        let mut text = || match cursor.head() {
            Ok(Head::Text(t)) => std::str::from_utf8(t).ok(),
            _ => None,
        };
        let keys = match count {
            0 => Some(Keys::None),
            1 => text().map(Keys::One),
            2 => text().and_then(|a| Some(Keys::Two(a, text()?))),
            _ => None,
        };
        keys.unwrap_or(Keys::Other)
    }
}

/// Why a payload, or one event of it, could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end within a value.
    #[error("the payload ends within a value")]
    Truncated,
    /// Bytes follow the batch.
    #[error("bytes follow the batch")]
    Trailing,
    /// Not `[timestamp, [event, ...], rank?]`.
    #[error("not an array of a timestamp, events and a rank")]
    Batch,
    /// An event that is neither a map with a type nor an array that starts with one.
    #[error("an event without a type")]
    Event,
    /// A block hash that is neither an integer nor at least eight bytes.
    #[error("a block hash is neither an integer nor a digest")]
    Hash,
    /// A field we need is missing.
    #[error("a field is missing")]
    Missing,
    /// A field is of a type it has in no known engine.
    #[error("a field is of another type")]
    Field,
}

/// Every [`DecodeError::reason`].
pub const REASONS: [&str; 7] = ["truncated", "trailing", "batch", "event", "hash", "missing", "field"];

impl DecodeError {
    /// A stable short name, one of [`REASONS`].
    pub fn reason(self) -> &'static str {
        REASONS[self as usize]
    }
}
