//! What a simulated engine is like.

use crate::fault::Fault;
use kvgate_kv::hash::{Algorithm, Contract, ExtraKeys};
use serde::de::IntoDeserializer;
use serde::de::value::{Error as ValueError, StrDeserializer};
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// How events are encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventEncoding {
    /// Maps with a key `type`: vLLM 0.24 and later.
    #[default]
    Map,
    /// Arrays that start with the type, with the fields of vLLM 0.22 and 0.23.
    Array,
}

/// How events name a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HashForm {
    /// The digest's last eight bytes as an unsigned integer: vLLM's default.
    #[default]
    Int,
    /// The whole digest: `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`.
    Bytes,
}

/// The frames of a replayed batch, as a DEALER receives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReplayFrames {
    /// `["", topic, seq, payload]`: vLLM 0.26 and later.
    #[default]
    New,
    /// `["", seq, payload]`: vLLM 0.25 and earlier.
    Old,
}

/// What an engine does of a request that a gateway splits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Everything: it hands nothing over and takes nothing, as a vLLM without a KV connector.
    #[default]
    Any,
    /// Where `kv_transfer_params` ask for it, it keeps a prompt's blocks for another engine and says where they are.
    Prefill,
    /// It fetches the blocks that `kv_transfer_params` name, and prefills nothing then.
    Decode,
}

/// A LoRA adapter that the engine serves; as text `name=path`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adapter {
    /// As requests name it, in `model`.
    pub name: String,
    /// As the engine was told to load it; part of the block hashes.
    pub path: String,
}

impl FromStr for Adapter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, path) = text.split_once('=').ok_or("an adapter is name=path")?;
        Ok(Self { name: name.to_owned(), path: path.to_owned() })
    }
}

/// Reads an enum's value by its name in the configuration.
fn named<T: for<'de> Deserialize<'de>>(name: &str) -> Result<T, ValueError> {
    let name: StrDeserializer<'_, ValueError> = name.into_deserializer();
    T::deserialize(name)
}

/// A simulated engine. The defaults are those of a vLLM 0.32 with nothing set but the hash algorithm, on a free port.
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields)]
pub struct SimConfig {
    /// Address of the HTTP API. Port 0: any free one. Events are published on the same host.
    #[arg(long, default_value_t = SimConfig::default().address)]
    pub address: SocketAddr,
    /// Names the model is served under; answers carry the one that was asked for.
    #[arg(long = "model", default_values_t = SimConfig::default().models)]
    pub models: Vec<String>,
    /// Folder of staged tokenizers, `<slug>/tokenizer.json` and `<slug>/tokenizer_config.json`.
    #[arg(long, default_value = "tokenizers")]
    pub tokenizers: PathBuf,
    /// The model whose staged tokenizer is used, where it is not the first of `models`.
    #[arg(long)]
    pub tokenizer: Option<String>,
    /// Adapters, asked for by name in `model`.
    #[arg(long = "lora", value_name = "NAME=PATH")]
    pub lora: Vec<Adapter>,

    /// Hash algorithm: sha256_cbor, xxhash_cbor, sha256 or xxhash.
    #[arg(long, default_value_t = SimConfig::default().algorithm)]
    pub algorithm: Algorithm,
    /// Tokens per block.
    #[arg(long, default_value_t = SimConfig::default().block_size)]
    pub block_size: u32,
    /// `PYTHONHASHSEED`. Absent: `vllm-none-hash`, vLLM's fixed seed from 0.29 on; the xxhash algorithms then refuse.
    #[arg(long)]
    pub none_hash_seed: Option<String>,
    /// Form of the extra keys in the hash: tagged (vLLM 0.31 and later) or bare.
    #[arg(long, value_parser = named::<ExtraKeys>, default_value = "tagged")]
    pub extra_keys: ExtraKeys,

    /// Blocks of the prefix cache; the engine keeps one of them for itself.
    #[arg(long, default_value_t = SimConfig::default().cache_blocks)]
    pub cache_blocks: usize,
    /// Requests that run at a time; the rest waits in order.
    #[arg(long, default_value_t = SimConfig::default().max_concurrency)]
    pub max_concurrency: usize,
    /// Tokens of one step, prefill and decode together: longer prompts are prefilled in chunks.
    #[arg(long, default_value_t = SimConfig::default().max_step_tokens)]
    pub max_step_tokens: usize,
    /// Longest prompt and answer together; never more than the cache holds.
    #[arg(long, default_value_t = SimConfig::default().max_model_len)]
    pub max_model_len: usize,
    /// Tokens generated where the request names no number.
    #[arg(long, default_value_t = SimConfig::default().default_max_tokens)]
    pub default_max_tokens: usize,
    /// Time of a step per prompt token that is not cached, in microseconds.
    #[arg(long, default_value_t = SimConfig::default().prefill_us)]
    pub prefill_us: f64,
    /// Time of a step that decodes, in microseconds.
    #[arg(long, default_value_t = SimConfig::default().decode_us)]
    pub decode_us: f64,
    /// How many times as long every step takes; `POST /sim/slow` changes it while the engine runs.
    #[arg(long, default_value_t = SimConfig::default().slow)]
    pub slow: f64,
    /// What goes wrong with every completions or chat request, in JSON, `{"status": 503, "retry_after": 7}` say, until
    /// `DELETE /sim/faults`.
    #[arg(long, value_name = "JSON")]
    pub fault: Option<Fault>,
    /// Chooses the generated text: same seed and prompt, same text.
    #[arg(long, default_value_t = SimConfig::default().seed)]
    pub seed: u64,
    /// Role: any, prefill or decode.
    #[arg(long, value_parser = named::<Role>, default_value = "any")]
    pub role: Role,
    /// How long a prefill engine keeps a prompt's blocks for the decode engine, in milliseconds (vLLM: 30 s).
    #[arg(long, default_value_t = SimConfig::default().transfer_lease_ms)]
    pub transfer_lease_ms: u64,
    /// What `/version` says.
    #[arg(long, default_value_t = SimConfig::default().version)]
    pub version: String,

    /// Whether KV events are published.
    #[arg(long, default_value_t = SimConfig::default().events, action = clap::ArgAction::Set)]
    pub events: bool,
    /// Port of the event publisher; 0: any free one.
    #[arg(long, default_value_t = SimConfig::default().event_port)]
    pub event_port: u16,
    /// Port of the replay socket; 0: any free one.
    #[arg(long, default_value_t = SimConfig::default().replay_port)]
    pub replay_port: u16,
    /// Topic frame of published batches.
    #[arg(long, default_value_t = SimConfig::default().topic)]
    pub topic: String,
    /// Encoding of events: map (vLLM 0.24 and later) or array.
    #[arg(long, value_parser = named::<EventEncoding>, default_value = "map")]
    pub event_encoding: EventEncoding,
    /// How events name blocks: int or bytes.
    #[arg(long, value_parser = named::<HashForm>, default_value = "int")]
    pub hash_form: HashForm,
    /// Frames of replayed batches: new (vLLM 0.26 and later) or old.
    #[arg(long, value_parser = named::<ReplayFrames>, default_value = "new")]
    pub replay_frames: ReplayFrames,
    /// Batches kept for replay.
    #[arg(long, default_value_t = SimConfig::default().buffer_steps)]
    pub buffer_steps: usize,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            address: (Ipv4Addr::LOCALHOST, 0).into(),
            models: vec!["tiny-qwen3".into()],
            tokenizers: "tokenizers".into(),
            tokenizer: None,
            lora: Vec::new(),
            algorithm: Algorithm::Sha256Cbor,
            block_size: 16,
            none_hash_seed: None,
            extra_keys: ExtraKeys::Tagged,
            cache_blocks: 2000,
            max_concurrency: 64,
            max_step_tokens: 2048,
            max_model_len: 32_768,
            default_max_tokens: 16,
            prefill_us: 0.0,
            decode_us: 0.0,
            slow: 1.0,
            fault: None,
            seed: 0,
            role: Role::Any,
            transfer_lease_ms: 30_000,
            version: "0.32.0".into(),
            events: true,
            event_port: 0,
            replay_port: 0,
            topic: String::new(),
            event_encoding: EventEncoding::Map,
            hash_form: HashForm::Int,
            replay_frames: ReplayFrames::New,
            buffer_steps: 10_000,
        }
    }
}

impl SimConfig {
    /// What a gateway must know to reproduce this engine's block hashes.
    pub fn contract(&self) -> Contract {
        Contract {
            algorithm: self.algorithm,
            block_size: self.block_size,
            seed: self.none_hash_seed.clone(),
            extra_keys: self.extra_keys,
        }
    }

    /// The longest prompt and answer together that can be served.
    pub(crate) fn context(&self) -> usize {
        let cache = self.cache_blocks.saturating_sub(1).saturating_mul(self.block_size as usize);
        self.max_model_len.min(cache)
    }

    /// How long a step takes.
    pub(crate) fn step_time(&self, prefill_tokens: usize, decodes: usize) -> Duration {
        let decode = if decodes > 0 { self.decode_us } else { 0.0 };
        let micros = self.prefill_us * prefill_tokens as f64 + decode;
        Duration::try_from_secs_f64(micros / 1e6).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        sim: SimConfig,
    }

    #[test]
    fn no_argument_means_the_default() {
        let parsed = Cli::parse_from(["sim"]).sim;
        assert_eq!(format!("{parsed:?}"), format!("{:?}", SimConfig::default()));
        let read: SimConfig = serde_json::from_str("{}").unwrap();
        assert_eq!(format!("{read:?}"), format!("{parsed:?}"));
    }

    #[test]
    fn arguments_and_keys_say_the_same() {
        let line = "sim --lora sql=/adapters/sql --hash-form bytes --event-encoding array --events false --role decode";
        let parsed = Cli::parse_from(line.split(' ')).sim;
        let text = r#"{"lora": [{"name": "sql", "path": "/adapters/sql"}], "hash_form": "bytes", "event_encoding": "array", "events": false, "role": "decode"}"#;
        let read: SimConfig = serde_json::from_str(text).unwrap();
        assert_eq!(format!("{read:?}"), format!("{parsed:?}"));
        assert!(serde_json::from_str::<SimConfig>(r#"{"no_such_key": 1}"#).is_err());
    }

    #[test]
    fn a_step_takes_its_tokens_time() {
        let config = SimConfig { prefill_us: 2.5, decode_us: 100.0, ..SimConfig::default() };
        assert_eq!(config.step_time(1000, 0), Duration::from_micros(2500));
        assert_eq!(config.step_time(1000, 3), Duration::from_micros(2600));
        assert_eq!(SimConfig { prefill_us: -1.0, ..config }.step_time(5, 0), Duration::ZERO);
    }
}
