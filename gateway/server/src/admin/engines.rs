//! `/engines`: what is wanted of engines, by an operator or a controller.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use kvgate_core::{Admin, Availability, BreakerState, Engine};
use serde::{Deserialize, Serialize};

use super::error;
use crate::world::{World, unix_millis};

/// The most that an engine may be taken for.
const MOST_PCT: u32 = 1000;

/// An engine, as it is.
#[derive(Serialize)]
struct Shown {
    engine: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<String>,
    state: Admin,
    weight_pct: u32,
    available: Availability,
    healthy: bool,
    /// What was wrong when it was last asked whether it is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    breaker: BreakerState,
    /// Milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    cooling_until_ms: Option<u64>,
    in_flight: u64,
}

impl Shown {
    fn of(world: &World, engine: &Engine) -> Self {
        let (identity, now) = (engine.identity(), Instant::now());
        let left = engine.cooling(now).map(|(until, _)| until.saturating_duration_since(now).as_millis());
        Self {
            engine: identity.address.clone(),
            tls: identity.tls.clone(),
            state: engine.admin(),
            weight_pct: engine.weight_pct(),
            available: engine.availability(now),
            healthy: engine.is_healthy(),
            problem: world.probe(engine.id()).and_then(|probe| probe.problem()),
            breaker: engine.breaker(now),
            cooling_until_ms: left.map(|left| unix_millis() + u64::try_from(left).unwrap_or(0)),
            in_flight: engine.in_flight(),
        }
    }
}

/// What is to change; what is absent stays.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    state: Option<Admin>,
    weight_pct: Option<u32>,
}

/// Every engine of the rules in force.
pub async fn list(State(world): State<Arc<World>>) -> Response {
    let all: Vec<_> = engines(&world).iter().map(|engine| Shown::of(&world, engine)).collect();
    Json(all).into_response()
}

/// Changes what is wanted of the engine at this address, in every rule that names it, for as long as the process
/// lives or a rule names it.
pub async fn set(State(world): State<Arc<World>>, Path(address): Path<String>, body: Bytes) -> Response {
    let wanted: Wanted = match serde_json::from_slice(&body) {
        Ok(wanted) => wanted,
        Err(e) => {
            let like = r#"{"state": "active" | "draining" | "disabled", "weight_pct": 1..1000}"#;
            return error(StatusCode::BAD_REQUEST, &format!("{e}; the body is like {like}"));
        }
    };
    if wanted.weight_pct.is_some_and(|pct| !(1..=MOST_PCT).contains(&pct)) {
        return error(StatusCode::BAD_REQUEST, &format!("weight_pct is a whole number, 1 to {MOST_PCT}"));
    }
    let mut named = engines(&world);
    named.retain(|engine| engine.address().eq_ignore_ascii_case(&address));
    if named.is_empty() {
        return error(StatusCode::NOT_FOUND, "no rule has an endpoint of this address");
    }
    for engine in &named {
        if let Some(state) = wanted.state {
            engine.set_admin(state);
        }
        if let Some(pct) = wanted.weight_pct {
            engine.set_weight_pct(pct);
        }
        tracing::info!(engine = address, state = %engine.admin(), weight_pct = engine.weight_pct(), "set by hand");
    }
    Json(named.iter().map(|engine| Shown::of(&world, engine)).collect::<Vec<_>>()).into_response()
}

/// Once each, in the order of the rules.
fn engines(world: &World) -> Vec<Arc<Engine>> {
    let mut all: Vec<Arc<Engine>> = Vec::new();
    for endpoint in world.plan.load().rules.iter().flat_map(|rule| &rule.endpoints) {
        if all.iter().all(|known| known.id() != endpoint.engine.id()) {
            all.push(endpoint.engine.clone());
        }
    }
    all
}
