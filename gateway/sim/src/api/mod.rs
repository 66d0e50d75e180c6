//! The HTTP API.

mod answer;
mod error;
mod generate;
mod request;
mod transfer;

use crate::config::SimConfig;
use crate::engine::Handle;
use crate::fault::{Fault, Faults};
use crate::log::{Log, Served};
use crate::transfer::Transfers;
use crate::words::Words;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use error::ApiError;
use kvgate_prompt::Model;
use request::Kind;
use serde::Deserialize;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

/// Longest body taken, in bytes.
const MAX_BODY: usize = 64 << 20;

/// What the handlers share.
pub(crate) struct ApiState {
    pub config: Arc<SimConfig>,
    pub model: Arc<Model>,
    pub words: Words,
    pub engine: Handle,
    pub log: Log,
    pub faults: Faults,
    pub transfers: Transfers,
    /// Of the API itself, once it listens.
    pub address: OnceLock<SocketAddr>,
    /// Of events and replay.
    pub sockets: Option<(SocketAddr, SocketAddr)>,
    started: u64,
    ids: AtomicU64,
    max_body: usize,
}

impl ApiState {
    pub fn new(
        config: Arc<SimConfig>,
        model: Arc<Model>,
        words: Words,
        engine: Handle,
        sockets: Option<(SocketAddr, SocketAddr)>,
    ) -> Self {
        Self {
            config,
            model,
            words,
            engine,
            log: Log::default(),
            faults: Faults::default(),
            transfers: Transfers::new(),
            address: OnceLock::new(),
            sockets,
            started: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            ids: AtomicU64::new(0),
            max_body: MAX_BODY,
        }
    }

    /// An id of vLLM's form for a request that brought none.
    fn next_id(&self) -> String {
        format!("{:016x}", self.ids.fetch_add(1, Ordering::Relaxed))
    }
}

/// The engine's routes.
pub(crate) fn router(state: Arc<ApiState>) -> Router {
    Router::new()
        .route("/v1/completions", post(generate::completions))
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/models", get(models))
        .route("/tokenize", post(tokenize))
        .route("/health", get(async || ()))
        .route("/ping", get(async || ()).post(async || ()))
        .route("/version", get(version))
        .route("/metrics", get(metrics))
        .route("/kv_event_sources", get(event_sources))
        .route("/reset_prefix_cache", post(reset_prefix_cache))
        .route("/sim/log", get(log))
        .route("/sim/faults", post(push_fault).delete(clear_faults))
        .route("/sim/slow", post(slow))
        .route(transfer::PATH, post(transfer::give))
        .with_state(state)
}

async fn models(State(state): State<Arc<ApiState>>) -> Json<Value> {
    let config = &state.config;
    let root = config.models.first().cloned().unwrap_or_default();
    let card = |id: &str, root: &str, parent: Option<&str>, length: Option<usize>| {
        json!({
            "id": id, "object": "model", "created": state.started, "owned_by": "vllm", "root": root, "parent": parent,
            "max_model_len": length,
            "permission": [{
                "id": format!("modelperm-{:016x}", xxhash_rust::xxh3::xxh3_64(id.as_bytes())),
                "object": "model_permission", "created": state.started, "allow_create_engine": false,
                "allow_sampling": true, "allow_logprobs": true, "allow_search_indices": false, "allow_view": true,
                "allow_fine_tuning": false, "organization": "*", "group": null, "is_blocking": false,
            }],
        })
    };
    let served = config.models.iter().map(|name| card(name, &root, None, Some(config.context())));
    let adapters = config.lora.iter().map(|lora| card(&lora.name, &lora.path, Some(&root), None));
    Json(json!({ "object": "list", "data": served.chain(adapters).collect::<Vec<_>>() }))
}

async fn tokenize(State(state): State<Arc<ApiState>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = to_bytes(request.into_body(), MAX_BODY).await.map_err(|_| ApiError::no_prompt())?;
    let read: Value = serde_json::from_slice(&body).map_err(|error| ApiError::not_json(error.column()))?;
    let kind = if read.get("messages").is_some() { Kind::Chat } else { Kind::Completions };
    let prompts = request::prompts(&state, kind, &body)?;
    let tokens = prompts.first().ok_or_else(ApiError::no_prompt)?;
    Ok(Json(json!({
        "count": tokens.len(), "max_model_len": state.config.context(), "tokens": tokens, "token_strs": null,
    })))
}

async fn version(State(state): State<Arc<ApiState>>) -> Json<Value> {
    Json(json!({ "version": state.config.version }))
}

async fn metrics(State(state): State<Arc<ApiState>>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], Body::from(state.engine.stats().page(&state.config))).into_response()
}

async fn event_sources(State(state): State<Arc<ApiState>>) -> Json<Value> {
    let Some((events, replay)) = state.sockets else { return Json(json!({})) };
    Json(json!({
        "0": {
            "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": format!("tcp://{events}"),
            "replay_endpoint": format!("tcp://{replay}"), "buffer_steps": state.config.buffer_steps, "hwm": 100_000,
            "max_queue_size": 100_000, "topic": state.config.topic,
        },
    }))
}

async fn log(State(state): State<Arc<ApiState>>) -> Json<Vec<Served>> {
    Json(state.log.entries())
}

/// A fault and the number of requests it is meant for; one where it is not said.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    fault: Fault,
    #[serde(default = "once")]
    times: usize,
}

fn once() -> usize {
    1
}

async fn push_fault(State(state): State<Arc<ApiState>>, Json(asked): Json<Asked>) -> StatusCode {
    state.faults.push(asked.fault, asked.times);
    StatusCode::NO_CONTENT
}

async fn clear_faults(State(state): State<Arc<ApiState>>) -> StatusCode {
    state.faults.clear();
    StatusCode::NO_CONTENT
}

/// How many times as long every step is to take.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Slow {
    factor: f64,
}

async fn slow(State(state): State<Arc<ApiState>>, Json(asked): Json<Slow>) -> StatusCode {
    state.engine.slow(asked.factor);
    StatusCode::NO_CONTENT
}

async fn reset_prefix_cache(State(state): State<Arc<ApiState>>) -> Json<Value> {
    Json(json!({ "success": state.engine.reset_prefix_cache().await }))
}
