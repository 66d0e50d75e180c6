//! KV events as vLLM publishes them: msgpack `[timestamp, [event, ...], rank]`.

use crate::config::{EventEncoding, HashForm};
use kvgate_kv::hash::Digest;
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};

/// One change of the cache.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Blocks that follow one another are held now.
    Stored(Stored),
    /// One copy of a block was evicted.
    Removed(Digest),
    /// All content was forgotten.
    Cleared,
}

/// Blocks that are held now.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// The blocks, in chain order.
    pub hashes: Vec<Digest>,
    /// The block before the first; none at the start of a prompt.
    pub parent: Option<Digest>,
    /// The tokens of all blocks.
    pub tokens: Vec<u32>,
    /// Tokens per block.
    pub block_size: u32,
    /// The adapter's number within the engine and its name.
    pub lora: Option<(u32, String)>,
    /// What else distinguishes each block, untagged: the adapter's name, the salt.
    pub extra_keys: Vec<Option<Vec<String>>>,
    /// The request's `session_id` (vLLM 0.30 and later).
    pub session: Option<String>,
}

/// How an engine writes its events.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wire {
    /// Maps or arrays.
    pub encoding: EventEncoding,
    /// Integers or digests.
    pub hashes: HashForm,
}

impl Wire {
    /// The payload of a batch; `timestamp` in seconds since 1970. The rank is always 0, as without data parallelism.
    ///
    /// # Errors
    /// Never in practice: the encoder writes to memory.
    pub fn encode(self, timestamp: f64, events: &[Event]) -> Result<Vec<u8>, rmp_serde::encode::Error> {
        let events: Vec<_> = events.iter().map(|event| Encoded { event, wire: self }).collect();
        rmp_serde::to_vec(&(timestamp, events, 0u32))
    }
}

struct Encoded<'a> {
    event: &'a Event,
    wire: Wire,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Value<'a> {
    Nil,
    Int(u32),
    Text(&'a str),
    Hash(Name<'a>),
    Hashes(Vec<Name<'a>>),
    Tokens(&'a [u32]),
    Keys(&'a [Option<Vec<String>>]),
}

/// A block's name on the wire.
struct Name<'a>(&'a Digest, HashForm);

impl Serialize for Name<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.1 {
            HashForm::Int => to.serialize_u64(self.0.u64()),
            HashForm::Bytes => to.serialize_bytes(self.0.as_bytes()),
        }
    }
}

impl<'a> Encoded<'a> {
    fn name(&self, digest: &'a Digest) -> Name<'a> {
        Name(digest, self.wire.hashes)
    }

    fn kind(&self) -> &'static str {
        match self.event {
            Event::Stored(_) => "BlockStored",
            Event::Removed(_) => "BlockRemoved",
            Event::Cleared => "AllBlocksCleared",
        }
    }

    /// The fields after the type, in the order of vLLM's structs.
    fn fields(&self) -> Vec<(&'static str, Value<'a>)> {
        match self.event {
            Event::Stored(stored) => {
                let lora = stored.lora.as_ref();
                let mut fields = vec![
                    (
                        "block_hashes",
                        Value::Hashes(stored.hashes.iter().map(|hash| self.name(hash)).collect()),
                    ),
                    (
                        "parent_block_hash",
                        stored.parent.as_ref().map_or(Value::Nil, |p| Value::Hash(self.name(p))),
                    ),
                    ("token_ids", Value::Tokens(&stored.tokens)),
                    ("block_size", Value::Int(stored.block_size)),
                    ("lora_id", lora.map_or(Value::Nil, |(id, _)| Value::Int(*id))),
                    ("medium", Value::Text("GPU")),
                    ("lora_name", lora.map_or(Value::Nil, |(_, name)| Value::Text(name))),
                    ("extra_keys", Value::Keys(&stored.extra_keys)),
                    ("group_idx", Value::Int(0)),
                    ("kv_cache_spec_kind", Value::Text("full_attention")),
                ];
                match (self.wire.encoding, &stored.session) {
                    (EventEncoding::Map, Some(session)) => fields.push(("session_id", Value::Text(session))),
                    (EventEncoding::Map, None) => {}
                    // by name it is left out; by position 0.22 and 0.23 write it
                    (EventEncoding::Array, _) => fields.push(("kv_cache_spec_sliding_window", Value::Nil)),
                }
                fields
            }
            Event::Removed(digest) => vec![
                ("block_hashes", Value::Hashes(vec![self.name(digest)])),
                ("medium", Value::Text("GPU")),
                ("group_idx", Value::Int(0)),
            ],
            Event::Cleared => vec![],
        }
    }
}

impl Serialize for Encoded<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let fields = self.fields();
        match self.wire.encoding {
            EventEncoding::Map => {
                let mut map = to.serialize_map(Some(fields.len() + 1))?;
                map.serialize_entry("type", self.kind())?;
                fields.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))?;
                map.end()
            }
            EventEncoding::Array => {
                let mut array = to.serialize_seq(Some(fields.len() + 1))?;
                array.serialize_element(self.kind())?;
                fields.iter().try_for_each(|(_, value)| array.serialize_element(value))?;
                array.end()
            }
        }
    }
}
