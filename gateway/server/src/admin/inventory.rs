//! `/netlox/v1/config/ai/kv/inventory`: the blocks an endpoint holds, in the reference system's JSON.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use kvgate_tiers::kv_exact;
use serde_json::{Map, Value, json};

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
    Json(json!({
        "service_id": service,
        "ep_idx": index,
        "hash_algo": algorithm(rule),
        "blocks": blocks,
        "total": total,
    }))
    .into_response()
}

async fn blocks(world: &World, engine: u64) -> Vec<Value> {
    let rows =
        world.plane.dump(engine, None).await.into_iter().flat_map(|(_, rows)| rows).collect::<Vec<_>>();
    let mut blocks = Vec::with_capacity(rows.len());
    for (index, row) in rows.into_iter().enumerate() {
        let mut block = Map::new();
        block.insert("block_idx".into(), index.into());
        block.insert("hash_uint64".into(), row.engine_hash.into());
        block.insert("copies".into(), row.copies.into());
        if row.orphan {
            block.insert("orphan".into(), true.into());
        }
        blocks.push(Value::Object(block));
    }
    blocks
}

/// What the rule's contract says; `auto` needs to know none.
fn algorithm(rule: &Rule) -> String {
    let config = rule.config.tier.get(kv_exact::KIND.name);
    match (rule.kv, config.map(kv_exact::explained)) {
        (Some(kvgate_kv::mirror::View::Published), Some(Ok((contract, _)))) => contract.algorithm.to_string(),
        _ => "auto".into(),
    }
}
