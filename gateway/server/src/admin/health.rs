//! `/readyz`: whether traffic may be sent here, and what an operator should look at.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use kvgate_core::{Decision, Endpoint, Role};
use serde_json::{Value, json};

use crate::life::{Stage, cold};
use crate::plan::Rule;
use crate::telemetry::FamilyState;
use crate::world::World;

/// 200 once a plan is in force and what engines hold is known, 503 again when the process was told to stop. Alarms, feeds and refused configurations are details: the gateway still routes.
pub async fn ready(State(world): State<Arc<World>>) -> (StatusCode, Json<Value>) {
    let (plan, now) = (world.plan.load(), Instant::now());
    let stage = world.life.stage();
    let ready = world.reloads.good.load(Relaxed) > 0 && stage == Stage::Serving;
    let cold = if stage == Stage::Warming { cold(&world) } else { Vec::new() };
    let warming: Vec<_> = cold.iter().map(|(ep, how)| json!({"ep": ep, "state": how.name()})).collect();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let raised = world.alarms.all();
    let alarms: Vec<_> = raised
        .iter()
        .filter_map(|(rule, name, detail)| {
            detail.as_ref().map(|detail| json!({"service": rule, "alarm": name, "detail": detail}))
        })
        .collect();
    let feeds: Vec<_> = plan
        .rules
        .iter()
        .filter(|rule| rule.kv.is_some())
        .flat_map(|rule| {
            // nobody asks what others hold
            let followed = rule.config.endpoints.iter().map(|e| e.kv_events.is_some() || e.role != Role::Decode);
            let endpoints = rule.endpoints.iter().zip(followed).filter(|(_, followed)| *followed);
            endpoints.map(|(e, _)| {
                let connected = world.feed(e.engine.id()).is_some_and(|status| status.connected.get());
                json!({"service": rule.config.name, "ep_idx": e.index, "ep": e.engine.address(), "connected": connected})
            })
        })
        .collect();
    let told = |rule: &Rule| -> Vec<Value> {
        let asked = rule.endpoints.iter().filter(|_| rule.config.asks_engines());
        let one = |e: &Endpoint| {
            let status = world.scraper(e.engine.id())?;
            let told = e.engine.telemetry(now);
            let usage = status.reading().filter(|_| told.is_some()).and_then(|reading| reading.usage);
            let families = status.families();
            let which = |sought: FamilyState| {
                let those = families.iter().filter(|(_, state)| *state == sought);
                those.map(|(family, _)| family.name()).collect::<Vec<_>>()
            };
            Some(json!({
                "service": rule.config.name, "ep_idx": e.index, "ep": e.engine.address(),
                "blocks": told.and_then(|t| t.blocks), "running": told.and_then(|t| t.running),
                "waiting": told.and_then(|t| t.waiting), "kv_cache_usage": usage,
                "cold": which(FamilyState::Cold), "missing": which(FamilyState::Missing), "reason": status.reason(), "problem": status.problem(),
            }))
        };
        asked.filter_map(one).collect()
    };
    let telemetry: Vec<_> = plan.rules.iter().flat_map(|rule| told(rule)).collect();
    let tokenizers: Vec<_> = world
        .prompts
        .tokenizers()
        .held()
        .into_iter()
        .map(|(model, state)| {
            let (state, detail) = match state {
                kvgate_prompt::State::Ready(model) => {
                    let notes = model.notes().join("; ");
                    ("ready", (!notes.is_empty()).then_some(notes))
                }
                kvgate_prompt::State::Loading => ("loading", None),
                kvgate_prompt::State::Missing(why) => ("missing", Some(why.to_string())),
                kvgate_prompt::State::Failed(why) => ("failed", Some(why.to_string())),
            };
            json!({"model": model, "state": state, "detail": detail})
        })
        .collect();
    let detail = json!({
        "ready": ready,
        "stage": stage.name(),
        "draining": stage > Stage::Serving,
        "requests": world.life.requests(),
        "warming": warming,
        "rules": plan.rules.iter().map(|r| r.config.name.as_str()).collect::<Vec<_>>(),
        "alarms": alarms,
        "config_problem": world.reloads.problem(),
        "feeds": feeds,
        "telemetry": telemetry,
        "tokenizers": tokenizers,
    });
    (status, Json(detail))
}

/// `/decisions`: the latest decision records, oldest first.
pub async fn decisions(State(world): State<Arc<World>>) -> Json<Vec<Arc<Decision>>> {
    Json(world.decisions.all())
}
