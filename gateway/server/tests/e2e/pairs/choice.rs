//! Who is chosen for each part.

use serde_json::json;

use super::{Pair, rule};
use crate::support::{MODEL, Request, fetch, prompt, served};

const HITS: &str = "loxilb_pd_kv_tier15_hits_total";

/// Endpoints for prefill at positions 0, 2 and 4, those for decode between them.
async fn interleaved() -> Pair {
    let (prefill, decode) =
        (super::parts(kvgate_sim::Role::Prefill, 3).await, super::parts(kvgate_sim::Role::Decode, 2).await);
    let mut rule = rule(&["kv-exact"]);
    for (at, engine) in prefill.iter().enumerate() {
        rule = rule.part(engine, "prefill");
        if let Some(engine) = decode.get(at) {
            rule = rule.part(engine, "decode");
        }
    }
    let gateway = crate::support::Setup::new(&[rule]).start().await;
    Pair { prefill, decode, positions: vec![0, 2, 4], gateway }
}

async fn prefill_of(pair: &Pair, blocks: usize) -> (String, String) {
    let body = json!({"model": MODEL, "prompt": prompt(1, blocks * 16), "max_tokens": 2});
    let answer = pair.send(&body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let told = answer.field("x-kvgate-prefill-endpoint").unwrap().to_owned();
    let engine = pair.prefill.iter().find(|engine| engine.address().to_string() == told).unwrap();
    assert!(served(engine, answer.id()).is_some(), "who is told of has served it");
    assert!(pair.decode.iter().any(|engine| served(engine, answer.id()).is_some()));
    (told, answer.field("x-kvgate-prefill-tier").unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_prefill_endpoint_that_holds_most_wins_wherever_it_stands() {
    let pair = interleaved().await;
    // each in turn comes to hold more than the one before was asked to compute
    for (nth, engine) in pair.prefill.iter().enumerate() {
        super::hold(&pair, nth, 1, 4 * nth + 2).await;
        let labels = format!("ep_idx=\"{}\"", pair.positions[nth]);
        let before = pair.gateway.metric(HITS, &[&labels]).await;
        let (endpoint, tier) = prefill_of(&pair, 4 * nth + 4).await;
        assert_eq!((endpoint, &*tier), (engine.address().to_string(), "kv-exact"), "{nth}");
        assert_eq!(pair.gateway.metric(HITS, &[&labels]).await, before + 1.0);
    }
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_winner_that_is_excluded_falls_to_the_second_best_and_never_to_decode() {
    let pair = interleaved().await;
    for (at, blocks) in [2, 6, 4].into_iter().enumerate() {
        super::hold(&pair, at, 1, blocks).await;
    }
    // decode endpoints hold all of it, and are not asked for it
    for engine in &pair.decode {
        let body = json!({"model": MODEL, "prompt": prompt(1, 112), "max_tokens": 1});
        assert_eq!(fetch(engine.address(), &Request::json("/v1/completions", &body)).await.status, 200);
    }
    let address = |at: usize| pair.prefill[at].address().to_string();
    for state in ["disabled", "draining"] {
        super::set(&pair.gateway, &pair.prefill[1], state).await;
        let (endpoint, tier) = prefill_of(&pair, 6).await;
        assert_eq!((endpoint, &*tier), (address(2), "kv-exact"), "{state}");
    }
    super::set(&pair.gateway, &pair.prefill[2], "disabled").await;
    let (endpoint, tier) = prefill_of(&pair, 2).await;
    assert_eq!((endpoint, &*tier), (address(0), "kv-exact"));
    super::set(&pair.gateway, &pair.prefill[1], "active").await;
    let (endpoint, _) = prefill_of(&pair, 6).await;
    assert_eq!(endpoint, address(1));
    // decode that is out of service is not chosen either
    super::set(&pair.gateway, &pair.decode[0], "draining").await;
    let before = pair.decode[0].log().len();
    for _ in 0..4 {
        prefill_of(&pair, 6).await;
    }
    assert_eq!(pair.decode[0].log().len(), before);
    pair.is_idle().await;
}
