//! Requests served by two engines, one for the prompt and one for the answer.

mod choice;
mod departures;
mod failures;
mod field;
mod legs;
mod limits;
mod misses;
mod session;
mod tls;
mod trie;
mod unusual;

use kvgate_sim::{Role, Served, Sim};
use serde_json::{Value, json};

use crate::support::{
    Answer, Gateway, MODEL, Request, Rule, Setup, engine_with, fetch, prompt, served, until,
};

const FOUND: &str = "loxilb_ai_pd_kv_params_found_total";
const MISSING: &str = "loxilb_ai_pd_kv_params_missing_total";
const LEGS: &str = "loxilb_ai_pd_requests_total";
const MISSES: &str = "kvgate_tier_misses_total";

/// Who served the parts of a request, as the engines themselves know, and which tiers chose them.
#[derive(Debug, PartialEq, Eq)]
struct Went {
    prefill: usize,
    decode: usize,
    tiers: [String; 2],
}

/// Engines of both parts behind a gateway.
pub struct Pair {
    pub prefill: Vec<Sim>,
    pub decode: Vec<Sim>,
    /// The numbers of the endpoints for prefill.
    pub positions: Vec<usize>,
    pub gateway: Gateway,
}

/// A rule of the shape, with this ladder for prefill.
pub fn rule(tiers: &[&str]) -> Rule {
    let rule = Rule::new("pair", tiers).top("shape = \"prefill-decode\"").top("explain = true");
    rule.matching(&format!("models = [{MODEL:?}]"))
}

pub async fn parts(role: Role, count: usize) -> Vec<Sim> {
    let mut engines = Vec::new();
    for _ in 0..count {
        engines.push(engine_with(|config| config.role = role).await);
    }
    engines
}

pub fn with_parts(rule: Rule, prefill: &[Sim], decode: &[Sim]) -> Rule {
    let rule = prefill.iter().fold(rule, |rule, engine| rule.part(engine, "prefill"));
    decode.iter().fold(rule, |rule, engine| rule.part(engine, "decode"))
}

impl Pair {
    /// So many engines of each part, behind a rule.
    pub async fn new(prefill: usize, decode: usize, rule: Rule) -> Self {
        let positions = (0..prefill).collect();
        let (prefill, decode) = (parts(Role::Prefill, prefill).await, parts(Role::Decode, decode).await);
        let gateway = Setup::new(&[with_parts(rule, &prefill, &decode)]).start().await;
        Self { prefill, decode, positions, gateway }
    }

    /// The same, as `kvgate run`, which follows its files.
    pub async fn run(prefill: usize, decode: usize, rule: Rule) -> Self {
        let positions = (0..prefill).collect();
        let (prefill, decode) = (parts(Role::Prefill, prefill).await, parts(Role::Decode, decode).await);
        let gateway = Setup::new(&[with_parts(rule, &prefill, &decode)]).spawn().await;
        Self { prefill, decode, positions, gateway }
    }

    /// One of each, of a rule that tells nothing of how it chooses.
    pub async fn small() -> Self {
        Self::new(1, 1, rule(&["round-robin"])).await
    }

    async fn send(&self, body: &Value) -> Answer {
        self.gateway.send(&request(body)).await
    }

    /// A request that is answered, in two parts.
    async fn went(&self, request: &Request) -> Went {
        let answer = self.gateway.send(request).await;
        assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
        let at = |engines: &[Sim], told: Option<&str>| {
            let at = engines.iter().position(|engine| Some(&*engine.address().to_string()) == told);
            let at = at.unwrap_or_else(|| panic!("{answer:?}"));
            assert!(served(&engines[at], answer.id()).is_some(), "who is told of has served it");
            at
        };
        let tier = |name| answer.field(name).unwrap_or_default().to_owned();
        Went {
            prefill: at(&self.prefill, answer.field("x-kvgate-prefill-endpoint")),
            decode: at(&self.decode, answer.field("x-kvgate-endpoint")),
            tiers: [tier("x-kvgate-prefill-tier"), tier("x-kvgate-tier")],
        }
    }

    /// How often a tier passed for this reason.
    async fn misses(&self, tier: &str, reason: &str) -> f64 {
        let labels = ["service=\"pair\"", &format!("tier={tier:?}"), &format!("reason={reason:?}")];
        self.gateway.metric(MISSES, &labels).await
    }

    /// What a phase came to, by status.
    async fn legs(&self, phase: &str) -> [f64; 3] {
        let (metrics, mut legs) = (self.gateway.metrics().await, [0.0; 3]);
        for (leg, status) in legs.iter_mut().zip(["success", "timeout", "error"]) {
            let labels =
                [format!("phase={phase:?}"), format!("status={status:?}"), format!("model={MODEL:?}")];
            *leg = metrics.get(LEGS, &labels.each_ref().map(String::as_str));
        }
        legs
    }

    /// So many requests found parameters for decode, and so many did not.
    async fn handed_over(&self) -> (f64, f64) {
        let (metrics, model) = (self.gateway.metrics().await, format!("model={MODEL:?}"));
        (metrics.get(FOUND, &[&model]), metrics.get(MISSING, &[&model]))
    }

    /// A counter of the rule.
    pub async fn counter(&self, name: &str) -> f64 {
        self.gateway.metric(name, &["service=\"pair\""]).await
    }

    /// Nothing is in flight any more, and everything is counted.
    pub async fn is_idle(&self) {
        self.gateway.until_idle().await;
        let open = async || self.gateway.metric("kvgate_requests_open", &[]).await;
        until("every request is over", async || open().await == 0.0).await;
    }
}

pub fn request(body: &Value) -> Request {
    Request::json("/v1/completions", body)
}

/// A completion of more than one token.
pub fn body(seed: u32) -> Value {
    json!({"model": MODEL, "prompt": prompt(seed, 64), "max_tokens": 4})
}

pub fn stream(seed: u32) -> Value {
    json!({"model": MODEL, "prompt": prompt(seed, 64), "max_tokens": 40, "stream": true})
}

/// What an engine was asked, as it was sent.
fn sent(served: &Served) -> String {
    String::from_utf8(served.body.clone().expect("bodies are kept").to_vec()).unwrap()
}

/// The member of a decision record's attempts at this part of the request.
fn attempts<'a>(decision: &'a Value, role: &str) -> Vec<&'a Value> {
    decision["attempts"].as_array().unwrap().iter().filter(|attempt| attempt["role"] == role).collect()
}

/// Says what is wanted of an engine.
pub async fn set(gateway: &Gateway, engine: &Sim, state: &str) {
    let path = format!("/engines/{}", engine.address());
    let answer = fetch(gateway.admin, &Request::put(&path, &json!({"state": state}))).await;
    assert_eq!((answer.status, &answer.json()[0]["state"]), (200, &json!(state)), "{answer:?}");
}

/// Has the prefill engine at this place compute a prompt of so many blocks, of which it holds none, and waits until the
/// gateway knows.
async fn hold(pair: &Pair, at: usize, seed: u32, blocks: usize) {
    let position = pair.positions[at];
    let before = pair.gateway.held("pair", position).await.len();
    let body = json!({"model": MODEL, "prompt": prompt(seed, blocks * 16), "max_tokens": 1});
    assert_eq!(fetch(pair.prefill[at].address(), &request(&body)).await.status, 200);
    pair.gateway.until_blocks("pair", position, before + blocks).await;
}
