//! llama.cpp server.

use crate::EngineKind;

/// The row of the table.
pub const KIND: EngineKind = EngineKind {
    name: "llamacpp",
    doc: "The llama.cpp server announces no blocks: session and prefix tiers serve it.",
    algorithms: &[],
};
