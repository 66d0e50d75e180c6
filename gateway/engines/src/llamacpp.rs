//! llama.cpp server.

use crate::EngineKind;
use crate::metrics::Metrics;

/// The row of the table.
pub const KIND: EngineKind = EngineKind {
    name: "llamacpp",
    doc: "The llama.cpp server announces no blocks: tiers that go by them cannot serve it.",
    announces_blocks: false,
    hashes: false,
    metrics: Metrics {
        path: "/metrics",
        hint: "start the llama.cpp server with --metrics",
        prefix: "llamacpp:",
        running: "llamacpp:requests_processing",
        waiting: "llamacpp:requests_deferred",
        usage: &[],
        blocks: &[],
        prompt_tokens: "llamacpp:prompt_tokens_total",
        generation_tokens: "llamacpp:tokens_predicted_total",
        ttft: "",
        rank: "",
    },
    // 503 while the model is loaded
    health: "/health",
    connectors: &[],
};
