//! Conversations that stay where they were answered.

use kvgate_sim::Fault;

use super::{Pair, Went, body, request, rule, stream, with_parts};
use crate::support::{MODEL, Request, Rule, until};

const ACTIVE: &str = "loxilb_pd_sessions_active";
const EVICTIONS: &str = "kvgate_session_evictions_total";
const HITS: &str = "loxilb_ai_pd_session_hits_total";
const PICKS: &str = "kvgate_tier_picks_total";

fn sticky(keys: &str) -> Rule {
    let rule = rule(&["session", "round-robin"]).top("decode_tiers = [\"session\", \"round-robin\"]");
    rule.table("tier.session", keys)
}

fn in_conversation(id: &str) -> Request {
    request(&body(1)).field("x-conversation-id", id)
}

fn of_user(member: &str, id: &str) -> Request {
    let mut body = body(1);
    body[member] = id.into();
    request(&body)
}

/// A request of a conversation that is pinned to this prefill and this decode endpoint.
async fn stays(pair: &Pair, request: &Request, (prefill, decode): (usize, usize)) {
    let tiers = ["session", "session"].map(str::to_owned);
    assert_eq!(pair.went(request).await, Went { prefill, decode, tiers });
}

/// A request that no pin decides for any part.
async fn is_new(pair: &Pair, request: &Request) -> (usize, usize) {
    let went = pair.went(request).await;
    assert_eq!(went.tiers, ["round-robin", "round-robin"]);
    (went.prefill, went.decode)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_stays_on_both_its_engines() {
    let pair = Pair::new(3, 2, sticky("")).await;
    let conversations =
        [in_conversation("one"), of_user("user_id", "two"), of_user("user", "three"), in_conversation("One")];
    let mut homes = Vec::new();
    for conversation in &conversations {
        homes.push(is_new(&pair, conversation).await);
    }
    for _ in 0..2 {
        for (conversation, home) in conversations.iter().zip(&homes) {
            stays(&pair, conversation, *home).await;
        }
    }
    // the header has the first word, `user_id` the next
    stays(&pair, &of_user("user", "three").field("x-conversation-id", "one"), homes[0]).await;
    let mut both = body(1);
    (both["user"], both["user_id"]) = ("three".into(), "two".into());
    stays(&pair, &request(&both), homes[1]).await;
    // an id is one in its place
    is_new(&pair, &of_user("user", "one")).await;
    pair.is_idle().await;
    assert_eq!(pair.gateway.metric(HITS, &[&format!("model={MODEL:?}")]).await, 10.0);
    assert_eq!(pair.gateway.metric(PICKS, &["tier=\"session\""]).await, 20.0, "of both parts");
    assert_eq!(pair.misses("session", "unknown").await, 10.0);
    assert_eq!(pair.counter(ACTIVE).await, 5.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_new_with_every_request_names_no_conversation() {
    let pair = Pair::new(2, 2, sticky("")).await;
    let mut nested = body(1);
    nested["metadata"] = serde_json::json!({"user": "me", "user_id": "me"});
    let requests = [
        request(&body(1)).field("x-request-id", "mine"),
        request(&body(1)).field("x-trace-id", "mine").field("x-conversation-id-2", "mine"),
        in_conversation("auto-1"),
        in_conversation(""),
        of_user("user", "auto-1"),
        of_user("user_id", ""),
        request(&nested),
    ];
    for request in &requests {
        let first = is_new(&pair, request).await;
        let second = is_new(&pair, request).await;
        assert!(first.0 != second.0 && first.1 != second.1, "in turn: {request:?}");
    }
    pair.is_idle().await;
    assert_eq!(pair.misses("session", "no_key").await, 4.0 * requests.len() as f64);
    assert_eq!(
        (pair.counter(ACTIVE).await, pair.gateway.metric(PICKS, &["tier=\"session\""]).await),
        (0.0, 0.0)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn pins_hold_while_engines_are_drained_and_not_when_they_are_disabled() {
    let pair = Pair::new(3, 3, sticky("")).await;
    let talk = in_conversation("talk");
    let home = is_new(&pair, &talk).await;
    let both = [&pair.prefill[home.0], &pair.decode[home.1]];
    for engine in both {
        super::set(&pair.gateway, engine, "draining").await;
    }
    for n in 0..6 {
        stays(&pair, &talk, home).await;
        let other = is_new(&pair, &in_conversation(&format!("other {n}"))).await;
        assert!(other.0 != home.0 && other.1 != home.1, "nobody new comes");
    }
    for engine in both {
        super::set(&pair.gateway, engine, "disabled").await;
    }
    let moved = is_new(&pair, &talk).await;
    assert!(moved.0 != home.0 && moved.1 != home.1);
    assert_eq!(pair.misses("session", "pin_lost").await, 2.0);
    for engine in both {
        super::set(&pair.gateway, engine, "active").await;
    }
    stays(&pair, &talk, moved).await;
    pair.is_idle().await;
    assert_eq!(pair.misses("session", "pin_lost").await, 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_moves_when_an_engine_of_its_own_fails() {
    let mut pair = Pair::new(3, 3, sticky("")).await;
    let talk = in_conversation("talk");
    let first = is_new(&pair, &talk).await;

    pair.prefill[first.0].fault(Fault { status: Some(500), ..Fault::default() }, 1);
    let went = pair.went(&talk).await;
    assert!(went.prefill != first.0 && went.decode == first.1, "{went:?}");
    stays(&pair, &talk, (went.prefill, first.1)).await;
    let prefill = went.prefill;

    // a kept connection that breaks at once is tried again on a fresh one
    pair.decode[first.1].fault(Fault { no_answer: true, ..Fault::default() }, 2);
    let went = pair.went(&talk).await;
    assert!(went.prefill == prefill && went.decode != first.1, "{went:?}");
    pair.decode[first.1].clear_faults();
    stays(&pair, &talk, (prefill, went.decode)).await;

    // an answer that breaks off
    pair.decode[went.decode].fault(Fault { die_after: Some(3), ..Fault::default() }, 1);
    let answer = pair.gateway.send(&request(&stream(1)).field("x-conversation-id", "talk")).await;
    assert_eq!(answer.field("x-kvgate-endpoint"), Some(&*pair.decode[went.decode].address().to_string()));
    assert!(String::from_utf8_lossy(&answer.body).contains("pd_decode_backend_died"), "{answer:?}");
    pair.is_idle().await;
    let went = pair.went(&talk).await;
    assert_eq!((went.prefill, went.tiers), (prefill, ["session", "round-robin"].map(str::to_owned)));
    stays(&pair, &talk, (prefill, went.decode)).await;
    let decode = went.decode;

    // engines that take no connection, both at once
    pair.prefill[prefill].refuse(true).await.unwrap();
    pair.decode[decode].refuse(true).await.unwrap();
    let went = pair.went(&talk).await;
    assert!(went.prefill != prefill && went.decode != decode, "{went:?}");
    pair.prefill[prefill].refuse(false).await.unwrap();
    pair.decode[decode].refuse(false).await.unwrap();
    stays(&pair, &talk, (went.prefill, went.decode)).await;
    pair.is_idle().await;
    assert_eq!(pair.counter(ACTIVE).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn pins_outlive_a_reload() {
    let pair = Pair::run(3, 2, sticky("")).await;
    let talk = in_conversation("talk");
    let home = is_new(&pair, &talk).await;
    let reversed = || pair.decode.iter().chain(pair.prefill.iter()).rev();
    let rule = |skipped: Option<usize>| {
        let left = reversed()
            .filter(|engine| skipped.is_none_or(|at| engine.address() != pair.prefill[at].address()));
        left.fold(sticky("ttl = \"10m\""), |rule, engine| {
            let prefills = pair.prefill.iter().any(|one| one.address() == engine.address());
            rule.part(engine, if prefills { "prefill" } else { "decode" })
        })
    };
    pair.gateway.change(&rule(None)).await;
    stays(&pair, &talk, home).await;
    // without its prefill endpoint
    pair.gateway.change(&rule(Some(home.0))).await;
    let went = pair.went(&talk).await;
    assert!(went.prefill != home.0 && went.decode == home.1, "{went:?}");
    assert_eq!(went.tiers, ["round-robin", "session"]);
    assert_eq!(pair.misses("session", "pin_lost").await, 1.0);
    pair.gateway.change(&with_parts(sticky(""), &pair.prefill, &pair.decode)).await;
    stays(&pair, &talk, (went.prefill, went.decode)).await;
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_run_out_and_give_way() {
    let pair = Pair::new(2, 2, sticky("max_sessions = 2")).await;
    for id in ["one", "two", "three"] {
        is_new(&pair, &in_conversation(id)).await;
        pair.is_idle().await;
    }
    assert_eq!((pair.counter(ACTIVE).await, pair.counter(EVICTIONS).await), (2.0, 1.0));
    is_new(&pair, &in_conversation("one")).await;
    let went = pair.went(&in_conversation("three")).await;
    assert_eq!(went.tiers, ["session", "session"]);
    pair.is_idle().await;

    let pair = Pair::new(2, 2, sticky("ttl = \"1s\"")).await;
    is_new(&pair, &in_conversation("rests")).await;
    is_new(&pair, &in_conversation("goes on")).await;
    assert_eq!(pair.counter(ACTIVE).await, 2.0);
    until("what rests runs out", async || {
        assert_eq!(pair.went(&in_conversation("goes on")).await.tiers, ["session", "session"]);
        pair.counter(ACTIVE).await == 1.0
    })
    .await;
    is_new(&pair, &in_conversation("rests")).await;
    pair.is_idle().await;
    assert_eq!(pair.counter(EVICTIONS).await, 0.0, "it had run out");
}
