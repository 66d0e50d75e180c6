//! SGLang.

use crate::EngineKind;

/// The row of the table.
pub const KIND: EngineKind = EngineKind {
    name: "sglang",
    doc: "SGLang publishes KV events over ZeroMQ with --kv-events-config.",
    announces_blocks: true,
    hashes: false,
};
