//! llama.cpp server.

use crate::EngineKind;

/// The row of the table.
pub const KIND: EngineKind = EngineKind {
    name: "llamacpp",
    doc: "The llama.cpp server announces no blocks: tiers that go by them cannot serve it.",
    announces_blocks: false,
    hashes: false,
};
