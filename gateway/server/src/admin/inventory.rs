//! `/netlox/v1/config/ai/kv/inventory`: the blocks an endpoint holds, in the reference system's JSON.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use kvgate_kv::inventory::Row;
use kvgate_tiers::kv_exact;
use serde::Serialize;

use super::error;
use crate::plan::Rule;
use crate::world::World;

/// `?service_id=<rule's name or id>&ep_idx=<n>`. `hash_uint64` is the engine's published hash, an exact integer;
/// blocks whose parent is unknown are marked `orphan`.
pub async fn page(State(world): State<Arc<World>>, Query(query): Query<HashMap<String, String>>) -> Response {
    let Some(service) = query.get("service_id") else {
        return error(StatusCode::BAD_REQUEST, "service_id is missing: a rule's name or id");
    };
    let index = match query.get("ep_idx").map(|i| i.parse::<usize>()) {
        Some(Ok(index)) => index,
        Some(Err(_)) => return error(StatusCode::BAD_REQUEST, "ep_idx is not a whole number"),
        None => return error(StatusCode::BAD_REQUEST, "ep_idx is missing: an endpoint's number"),
    };
    let plan = world.plan.load_full();
    let named = |rule: &&Arc<Rule>| {
        rule.config.name == *service || rule.config.id.is_some_and(|id| id.to_string() == *service)
    };
    let Some(rule) = plan.rules.iter().find(named) else {
        return error(StatusCode::NOT_FOUND, "no rule of this service_id");
    };
    let Some(endpoint) = rule.endpoints.iter().find(|e| e.index == index) else {
        return error(StatusCode::NOT_FOUND, "the rule has no endpoint of this ep_idx");
    };
    if rule.kv.is_none() {
        return error(StatusCode::NOT_FOUND, "the rule has no kv-exact tier: it mirrors no blocks");
    }
    let blocks = blocks(&world, endpoint.engine.id().0).await;
    let total = blocks.len();
    let page = Page { service_id: service, ep_idx: index, hash_algo: algorithm(rule), blocks, total };
    Json(page).into_response()
}

/// One block of an endpoint.
#[derive(Serialize)]
struct Block {
    block_idx: usize,
    hash_uint64: u64,
    copies: u32,
    rank: u32,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    orphan: bool,
}

async fn blocks(world: &World, engine: u64) -> Vec<Block> {
    let ranks = world.plane.dump(engine, None).await;
    let rows = ranks.into_iter().flat_map(|(rank, rows)| rows.into_iter().map(move |row| (rank, row)));
    let block = |(block_idx, (rank, row)): (usize, (u32, Row))| Block {
        block_idx,
        hash_uint64: row.engine_hash,
        copies: row.copies,
        rank,
        orphan: row.orphan,
    };
    rows.enumerate().map(block).collect()
}

/// The answer.
#[derive(Serialize)]
struct Page<'a> {
    service_id: &'a str,
    ep_idx: usize,
    hash_algo: String,
    blocks: Vec<Block>,
    total: usize,
}

/// What the rule's contract says; `auto` needs to know none.
fn algorithm(rule: &Rule) -> String {
    let config = rule.config.tier.get(kv_exact::KIND.name);
    match (rule.kv, config.map(kv_exact::explained)) {
        (Some(kvgate_kv::mirror::View::Published), Some(Ok((contract, _)))) => contract.algorithm.to_string(),
        _ => "auto".into(),
    }
}
