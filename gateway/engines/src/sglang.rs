//! SGLang.

use crate::EngineKind;
use crate::metrics::{Blocks, Metrics};

/// The row of the table.
pub const KIND: EngineKind = EngineKind {
    name: "sglang",
    doc: "SGLang publishes KV events over ZeroMQ with --kv-events-config.",
    announces_blocks: true,
    hashes: false,
    metrics: Metrics {
        path: "/metrics",
        hint: "start SGLang with --enable-metrics",
        prefix: "sglang:",
        running: "sglang:num_running_reqs",
        waiting: "sglang:num_queue_reqs",
        usage: &["sglang:token_usage"],
        blocks: &[
            Blocks::Label("sglang:cache_config_info", "num_pages"),
            Blocks::Tokens("sglang:max_total_num_tokens", "sglang:page_size"),
        ],
        prompt_tokens: "sglang:prompt_tokens_total",
        generation_tokens: "sglang:generation_tokens_total",
        ttft: "sglang:time_to_first_token_seconds",
        rank: "dp_rank",
    },
    // /health_generate computes a token each time
    health: "/health",
    connectors: &[],
};
