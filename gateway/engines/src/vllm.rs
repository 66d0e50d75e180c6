//! vLLM 0.10 to 0.33.

use crate::EngineKind;

/// The row of the table.
pub const KIND: EngineKind = EngineKind {
    name: "vllm",
    doc: "vLLM publishes KV events over ZeroMQ with --kv-events-config.",
    announces_blocks: true,
    hashes: true,
};
