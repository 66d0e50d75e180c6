//! Engines that fail, ask for a pause, or are found down: who is left alone, for how long, and who says so.

mod breaker;
mod cooling;
mod pairs;
mod probes;

use kvgate_sim::Sim;
use serde_json::Value;

use crate::support::{Answer, Gateway, MODEL, Request, completion, prompt};

const BREAKER: &str = "kvgate_endpoint_breaker";
const FLIPS: &str = "loxilb_pd_cb_flips_total";
const CLOSED: f64 = 0.0;
const OPEN: f64 = 1.0;
const HALF_OPEN: f64 = 2.0;

fn request() -> Request {
    Request::json("/v1/completions", &completion(MODEL, &prompt(1, 20)))
}

async fn send(gateway: &Gateway) -> Answer {
    gateway.send(&request()).await
}

/// How many requests each engine had.
fn asked(engines: &[Sim]) -> Vec<usize> {
    engines.iter().map(|engine| engine.log().len()).collect()
}

/// What the admin surface says of an engine.
async fn shown(gateway: &Gateway, engine: &Sim) -> Value {
    let all = gateway.ask("/engines").await.json();
    let mut all = all.as_array().unwrap().iter();
    all.find(|shown| shown["engine"] == engine.address().to_string()).unwrap().clone()
}
