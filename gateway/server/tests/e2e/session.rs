//! Conversations in a pool.

use kvgate_sim::{Fault, Sim};

use crate::pairs::set;
use crate::support::{Answer, Gateway, MODEL, Request, Rule, Setup, completion, engines, prompt, served};

const TIER: &str = "tier=\"session\"";

fn ask(member: Option<(&str, &str)>) -> Request {
    let mut body = completion(MODEL, &prompt(1, 40));
    if let Some((member, id)) = member {
        body[member] = id.into();
    }
    Request::json("/v1/completions", &body)
}

/// Who served a request, and which tier chose.
async fn went(gateway: &Gateway, engines: &[Sim], request: &Request) -> (usize, String) {
    let answer: Answer = gateway.send(request).await;
    assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    let at = engines.iter().position(|engine| engine.address().to_string() == answer.endpoint()).unwrap();
    assert!(served(&engines[at], answer.id()).is_some());
    (at, answer.tier().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_stays_on_its_engine_and_moves_when_that_fails() {
    let mut engines = engines(3).await;
    let rule = Rule::new("words", &["session", "round-robin"]).engines(&engines);
    let gateway = Setup::new(&[rule]).start().await;
    let conversations = [
        ask(None).field("x-conversation-id", "one"),
        ask(Some(("user_id", "two"))),
        ask(Some(("user", "three"))),
        ask(None).field("X-CONVERSATION-ID", "four"),
    ];
    let mut homes = Vec::new();
    for talk in &conversations {
        let (home, tier) = went(&gateway, &engines, talk).await;
        assert_eq!(tier, "round-robin");
        homes.push(home);
    }
    assert_eq!(homes[..3].iter().collect::<std::collections::BTreeSet<_>>().len(), 3);
    for (talk, home) in conversations.iter().zip(&homes) {
        assert_eq!(went(&gateway, &engines, talk).await, (*home, "session".into()));
    }
    let (talk, home) = (&conversations[0], homes[0]);
    set(&gateway, &engines[home], "draining").await;
    for _ in 0..3 {
        assert_eq!(went(&gateway, &engines, talk).await, (home, "session".into()));
        assert_ne!(went(&gateway, &engines, &ask(None)).await.0, home);
    }
    set(&gateway, &engines[home], "disabled").await;
    let (second, tier) = went(&gateway, &engines, talk).await;
    assert!(second != home && tier == "round-robin");
    set(&gateway, &engines[home], "active").await;
    assert_eq!(went(&gateway, &engines, talk).await, (second, "session".into()));
    // it dies before it answers, and then takes no connection at all
    engines[second].fault(Fault { no_answer: true, ..Fault::default() }, 2);
    let (third, _) = went(&gateway, &engines, talk).await;
    assert_ne!(third, second);
    engines[second].clear_faults();
    assert_eq!(went(&gateway, &engines, talk).await, (third, "session".into()));
    engines[third].refuse(true).await.unwrap();
    let (fourth, _) = went(&gateway, &engines, talk).await;
    assert_ne!(fourth, third);
    engines[third].refuse(false).await.unwrap();
    assert_eq!(went(&gateway, &engines, talk).await, (fourth, "session".into()));
    gateway.until_idle().await;
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.get("loxilb_pd_sessions_active", &[]), 4.0);
    assert_eq!(metrics.get("kvgate_tier_misses_total", &[TIER, "reason=\"pin_lost\""]), 1.0);
    assert_eq!(metrics.get("kvgate_tier_misses_total", &[TIER, "reason=\"no_key\""]), 3.0);
    gateway.until_metric("loxilb_ai_normal_session_hits_total", &["service=\"words\""], 10.0).await;
    // tried and chosen again: 4 + 3 + 1 + 1 + 1, and the two that failed
    assert_eq!(metrics.get("kvgate_tier_picks_total", &[TIER]), 12.0);
}
