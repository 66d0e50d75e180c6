//! Conversations that stay on their two engines.

use kvgate_sim::{Fault, Sim};

use super::{Pair, body, request, rule, set};
use crate::support::{Answer, MODEL, served};

const HITS: &str = "loxilb_ai_pd_session_hits_total";
const ACTIVE: &str = "loxilb_pd_sessions_active";

async fn pairs() -> Pair {
    Pair::new(3, 3, rule(&["session"])).await
}

/// The engines that served a request of this conversation, by place, and the tier that chose the one for prefill.
async fn turn(pair: &Pair, conversation: &str, seed: u32) -> (usize, usize, String) {
    let answer = pair.gateway.send(&request(&body(seed)).field("x-conversation-id", conversation)).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let tier = answer.field("x-kvgate-prefill-tier").unwrap().to_owned();
    (served_by(&pair.prefill, &answer), served_by(&pair.decode, &answer), tier)
}

fn served_by(engines: &[Sim], answer: &Answer) -> usize {
    let ok = |engine: &Sim| served(engine, answer.id()).is_some_and(|served| served.status == 200);
    let all: Vec<_> = (0..engines.len()).filter(|at| ok(&engines[*at])).collect();
    assert_eq!(all.len(), 1, "{all:?}");
    all[0]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_keeps_both_engines() {
    let pair = pairs().await;
    let mut first = Vec::new();
    for conversation in ["a", "b", "c"] {
        let (prefill, decode, tier) = turn(&pair, conversation, 1).await;
        assert_eq!(tier, "min-load");
        first.push((prefill, decode));
    }
    for seed in 2..5 {
        for (conversation, (prefill, decode)) in ["a", "b", "c"].iter().zip(&first) {
            assert_eq!(turn(&pair, conversation, seed).await, (*prefill, *decode, "session".into()));
        }
    }
    pair.is_idle().await;
    let hits = pair.gateway.metric(HITS, &[&format!("model={MODEL:?}")]).await;
    assert_eq!((hits, pair.counter(ACTIVE).await), (9.0, 3.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_keeps_a_conversation_and_what_is_out_of_service_hands_it_over() {
    let pair = pairs().await;
    let (prefill, decode, _) = turn(&pair, "a", 1).await;
    set(&pair.gateway, &pair.prefill[prefill], "draining").await;
    assert_eq!(turn(&pair, "a", 2).await, (prefill, decode, "session".into()));
    set(&pair.gateway, &pair.prefill[prefill], "disabled").await;
    let (next, same, tier) = turn(&pair, "a", 3).await;
    assert!(next != prefill && same == decode && tier == "min-load");
    set(&pair.gateway, &pair.prefill[prefill], "active").await;
    assert_eq!(turn(&pair, "a", 4).await, (next, decode, "session".into()), "it stays where it went");
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_goes_with_who_answers_in_place_of_a_failed_engine() {
    let mut pair = pairs().await;
    let (prefill, decode, _) = turn(&pair, "a", 1).await;
    pair.prefill[prefill].fault(Fault { status: Some(500), ..Fault::default() }, 1);
    pair.decode[decode].refuse(true).await.unwrap();
    let (other, another, _) = turn(&pair, "a", 2).await;
    assert!(other != prefill && another != decode);
    pair.decode[decode].refuse(false).await.unwrap();
    assert_eq!(turn(&pair, "a", 3).await, (other, another, "session".into()));
    pair.is_idle().await;
}
