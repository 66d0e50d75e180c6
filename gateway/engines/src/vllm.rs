//! vLLM 0.10 to 0.33.

use crate::EngineKind;
use crate::metrics::{Blocks, Metrics};
use crate::pd;

/// The row of the table.
pub const KIND: EngineKind = EngineKind {
    name: "vllm",
    doc: "vLLM publishes KV events over ZeroMQ with --kv-events-config.",
    announces_blocks: true,
    hashes: true,
    metrics: Metrics {
        path: "/metrics",
        hint: "vLLM serves it on its API port unless started with --disable-log-stats",
        prefix: "vllm:",
        running: "vllm:num_requests_running",
        waiting: "vllm:num_requests_waiting",
        usage: &["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
        blocks: &[Blocks::Label("vllm:cache_config_info", "num_gpu_blocks")],
        prompt_tokens: "vllm:prompt_tokens_total",
        generation_tokens: "vllm:generation_tokens_total",
        ttft: "vllm:time_to_first_token_seconds",
        rank: "engine",
    },
    health: "/health",
    connectors: pd::VLLM,
};
