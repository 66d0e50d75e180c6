//! TensorRT-LLM.

use crate::EngineKind;
use crate::metrics::{Blocks, Metrics};

/// The row of the table.
pub const KIND: EngineKind = EngineKind {
    name: "trtllm",
    doc: "TensorRT-LLM hands out KV events over HTTP, or publishes them over ZeroMQ.",
    announces_blocks: true,
    hashes: false,
    metrics: Metrics {
        path: "/prometheus/metrics",
        hint: "start TensorRT-LLM with return_perf_metrics and enable_iter_perf_stats",
        prefix: "trtllm_",
        running: "trtllm_num_requests_running",
        waiting: "trtllm_num_requests_waiting",
        usage: &["trtllm_kv_cache_utilization"],
        blocks: &[Blocks::Gauge("trtllm_kv_cache_max_blocks")],
        prompt_tokens: "trtllm_prompt_tokens_total",
        generation_tokens: "trtllm_generation_tokens_total",
        ttft: "trtllm_time_to_first_token_seconds",
        rank: "",
    },
    health: "/health",
    connectors: &[],
};
