//! TensorRT-LLM.

use crate::EngineKind;

/// The row of the table.
pub const KIND: EngineKind = EngineKind {
    name: "trtllm",
    doc: "TensorRT-LLM hands out KV events over HTTP, or publishes them over ZeroMQ.",
    announces_blocks: true,
    hashes: false,
};
