//! Engines that fail at their part.

use kvgate_sim::{Ended, Fault, Sim};

use super::{Pair, body, request, rule, sent, stream};
use crate::support::{Connection, Setup, until};

const PREFILL_DIED: &str = "loxilb_pd_prefill_ep_died_total";
const DECODE_DIED: &str = "loxilb_pd_decode_ep_died_total";
const DECODE_MUTE: &str = "loxilb_pd_decode_zero_byte_eof_total";
const FAILOVERS: &str = "loxilb_pd_connect_failover_total";
const RESCUED: &str = "loxilb_pd_fallback_to_normal_total";

fn status(status: u16) -> Fault {
    Fault { status: Some(status), ..Fault::default() }
}

fn served(engines: &[Sim]) -> Vec<usize> {
    engines.iter().map(|engine| engine.log().len()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_prefill_refuses_is_the_client_s_to_know() {
    let pair = Pair::new(2, 1, rule(&["round-robin"])).await;
    for engine in &pair.prefill {
        engine.fault(status(422), 1);
    }
    let answer = pair.send(&stream(1)).await;
    assert_eq!((answer.status, answer.complete), (422, true), "{answer:?}");
    assert_eq!((served(&pair.prefill), served(&pair.decode)), (vec![1, 0], vec![0]), "nobody else is asked");
    pair.is_idle().await;
    assert_eq!(pair.legs("prefill").await, [1.0, 0.0, 0.0], "an answer, though not the one hoped for");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_that_fails_is_asked_of_the_next_best_once() {
    let pair = Pair::new(3, 1, rule(&["kv-exact"])).await;
    let faults = [
        (status(500), 0.0),
        (status(503), 0.0),
        (Fault { no_answer: true, ..Fault::default() }, 1.0),
        (Fault { die_after_bytes: Some(40), ..Fault::default() }, 2.0),
    ];
    for ((fault, died), seed) in faults.into_iter().zip(1..) {
        // the first holds all of it, the last a part
        for (at, blocks) in [(0, 4), (2, 2)] {
            super::hold(&pair, at, seed, blocks).await;
        }
        let before = served(&pair.prefill);
        // a kept connection that breaks at once is tried again on a fresh one
        pair.prefill[0].fault(fault, 2);
        let answer = pair.send(&body(seed)).await;
        assert_eq!(answer.status, 200, "{fault:?}: {answer:?}");
        let last = pair.prefill[2].address().to_string();
        assert_eq!(answer.field("x-kvgate-prefill-endpoint"), Some(&*last), "{fault:?}");
        let after = served(&pair.prefill);
        assert!(after[0] > before[0], "{fault:?}");
        assert_eq!(after[1..], [before[1], before[2] + 1], "{fault:?}");
        pair.prefill[0].clear_faults();
        assert!(pair.decode[0].log().last().unwrap().received_tokens > 0, "{fault:?}");
        pair.is_idle().await;
        assert_eq!(pair.handed_over().await, (f64::from(seed), 0.0), "{fault:?}");
        assert_eq!(pair.counter(PREFILL_DIED).await, died, "{fault:?}");
        // who decodes is chosen anew, for the prefill that is asked then
        let decisions = pair.gateway.ask("/decisions").await.json();
        let attempts = decisions.as_array().unwrap().last().unwrap()["attempts"].as_array().unwrap().clone();
        let roles: Vec<_> = attempts.iter().map(|attempt| attempt["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["prefill", "decode", "prefill", "decode"], "{fault:?}");
        assert_eq!(attempts[1]["outcome"]["cause"], "unused", "{fault:?}");
        // the last one computed the rest
        pair.gateway.until_blocks("pair", 2, 4 * seed as usize).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_computes_what_prefill_could_not_unless_that_is_not_wanted() {
    let pair = Pair::new(3, 1, rule(&["round-robin"])).await;
    let fail = |pair: &Pair, fault: Fault| pair.prefill.iter().for_each(|engine| engine.fault(fault, 2));
    fail(&pair, status(500));
    let answer = pair.send(&body(1)).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(served(&pair.prefill).iter().sum::<usize>(), 2, "two, and no third");
    assert_eq!(sent(&pair.decode[0].log()[0]), body(1).to_string());
    pair.is_idle().await;
    assert_eq!(pair.handed_over().await, (0.0, 1.0));

    let rule = rule(&["round-robin"]).table("legs", "without_prefill = \"refuse\"");
    let pair = Pair::new(3, 1, rule).await;
    fail(&pair, status(500));
    assert_eq!(pair.send(&body(1)).await.status, 500, "the engine's own word");
    pair.prefill.iter().for_each(Sim::clear_faults);
    fail(&pair, Fault { no_answer: true, ..Fault::default() });
    let answer = pair.send(&body(1)).await;
    assert_eq!((answer.status, &*answer.code()), (502, "pd_prefill_failed"));
    pair.is_idle().await;
    assert_eq!((served(&pair.decode), pair.legs("complete").await[0]), (vec![0], 0.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_take_no_connection_are_passed_over() {
    let mut pair = Pair::new(2, 2, rule(&["round-robin"])).await;
    pair.prefill[0].refuse(true).await.unwrap();
    pair.decode[0].refuse(true).await.unwrap();
    for seed in 0..4 {
        let answer = pair.send(&body(seed)).await;
        assert_eq!(
            (answer.status, answer.endpoint()),
            (200, &*pair.decode[1].address().to_string()),
            "{answer:?}"
        );
    }
    assert!(
        pair.decode[1].log().iter().all(|served| served.received_tokens == 63),
        "blocks wait for whoever comes"
    );
    pair.is_idle().await;
    assert!(pair.counter(FAILOVERS).await > 0.0);
    // nobody left for prefill: decode computes it; nobody for decode: 503
    pair.prefill[1].refuse(true).await.unwrap();
    assert_eq!(pair.send(&body(9)).await.status, 200);
    pair.is_idle().await;
    assert_eq!(pair.handed_over().await, (4.0, 1.0));
    pair.decode[1].refuse(true).await.unwrap();
    let answer = pair.send(&body(9)).await;
    assert_eq!((answer.status, &*answer.code()), (503, "pd_pool_unavailable"));
    assert_eq!(answer.json()["error"]["message"], "decode endpoint unreachable");
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_that_breaks_off_unheard_is_asked_anew_without_the_blocks() {
    let rule = rule(&["round-robin"]).top("decode_tiers = [\"round-robin\"]");
    let pair = Pair::new(1, 2, rule).await;
    pair.decode[0].fault(Fault { no_answer: true, ..Fault::default() }, 1);
    let answer = pair.send(&stream(1)).await;
    assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    assert_eq!(answer.endpoint(), pair.decode[1].address().to_string());
    let (first, second) = (pair.decode[0].log(), pair.decode[1].log());
    assert!(sent(&first[0]).contains("kv_transfer_params"), "who may have fetched the blocks");
    assert_eq!((sent(&second[0]), second[0].received_tokens), (stream(1).to_string(), 0));
    pair.is_idle().await;
    assert_eq!((pair.counter(DECODE_DIED).await, pair.counter(DECODE_MUTE).await), (1.0, 1.0));
    assert_eq!((pair.legs("decode").await, pair.legs("complete").await), ([1.0, 0.0, 1.0], [1.0, 0.0, 0.0]));
}

/// As when the engine that prefilled is gone before decode has fetched the blocks.
#[tokio::test(flavor = "multi_thread")]
async fn decode_that_lost_the_blocks_computes_the_prompt() {
    let pair = Pair::small().await;
    pair.decode[0].fault(status(500), 1);
    let answer = pair.send(&stream(1)).await;
    assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    assert_eq!(pair.decode[0].log()[1].received_tokens, 0);
    pair.is_idle().await;
    assert_eq!(pair.handed_over().await, (0.0, 1.0));
    // who fails without them as well is heard
    pair.decode[0].fault(status(500), 2);
    assert_eq!(pair.send(&body(2)).await.status, 500);
    assert_eq!(pair.decode[0].log().len(), 4);
    pair.is_idle().await;
}

/// Nobody can tell whether the engine had it: it gets no blocks a second time.
#[tokio::test(flavor = "multi_thread")]
async fn decode_that_breaks_a_kept_connection_is_asked_anew_without_the_blocks() {
    let pair = Pair::small().await;
    assert_eq!(pair.send(&body(1)).await.status, 200, "a connection is kept");
    pair.decode[0].fault(Fault { no_answer: true, ..Fault::default() }, 1);
    let answer = pair.send(&stream(2)).await;
    assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    let log = pair.decode[0].log();
    let [_, first, second] = &log[..] else { panic!("{log:?}") };
    assert!(sent(first).contains("kv_transfer_params"));
    assert_eq!((sent(second), second.received_tokens), (stream(2).to_string(), 0));
    pair.is_idle().await;
    assert_eq!((pair.counter(DECODE_DIED).await, pair.counter(DECODE_MUTE).await), (0.0, 0.0), "nobody died");
    assert_eq!(pair.handed_over().await, (1.0, 1.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_decode_breaks_off_ends_with_an_error_event() {
    let pair = Pair::small().await;
    pair.decode[0].fault(Fault { die_after: Some(3), ..Fault::default() }, 1);
    let answer = pair.send(&stream(1)).await;
    assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    let text = String::from_utf8_lossy(&answer.body);
    let last = text.trim_end().rsplit("\n\n").next().unwrap();
    assert!(last.contains("pd_decode_backend_died") && !text.contains("[DONE]"), "{text}");
    pair.is_idle().await;
    assert_eq!((pair.counter(DECODE_DIED).await, pair.counter(DECODE_MUTE).await), (1.0, 0.0));
    assert_eq!(pair.legs("decode").await, [0.0, 0.0, 1.0]);
    let record = pair.gateway.ask("/decisions").await.json().as_array().unwrap().last().unwrap().clone();
    assert_eq!((&record["status"], &record["error"]), (&200.into(), &"pd_decode_backend_died".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_for_any_part_helps_out() {
    let (prefill, decode) =
        (super::parts(kvgate_sim::Role::Prefill, 1).await, super::parts(kvgate_sim::Role::Decode, 1).await);
    let any = crate::support::engine().await;
    let rule = super::with_parts(rule(&["round-robin"]), &prefill, &decode).part(&any, "any");
    let gateway = Setup::new(&[rule]).start().await;
    let mut pair = Pair { prefill, decode, positions: vec![0], gateway };
    assert_eq!(pair.send(&body(1)).await.endpoint(), pair.decode[0].address().to_string());
    super::set(&pair.gateway, &pair.prefill[0], "disabled").await;
    let answer = pair.send(&body(1)).await;
    assert_eq!((answer.status, answer.endpoint()), (200, &*any.address().to_string()), "{answer:?}");
    assert_eq!(sent(&any.log()[0]), body(1).to_string());
    super::set(&pair.gateway, &pair.prefill[0], "active").await;
    pair.decode[0].refuse(true).await.unwrap();
    assert_eq!(pair.send(&body(2)).await.endpoint(), any.address().to_string());
    pair.is_idle().await;
    assert_eq!(pair.counter(RESCUED).await, 2.0);
    super::set(&pair.gateway, &pair.decode[0], "disabled").await;
    super::set(&pair.gateway, &any, "disabled").await;
    let answer = pair.send(&body(3)).await;
    assert_eq!((answer.status, &*answer.code()), (503, "pd_pool_unavailable"));
    assert_eq!(answer.json()["error"]["message"], "no healthy prefill or decode endpoint");
    pair.is_idle().await;
}

/// Within the request that finds out: whoever is asked in vain for a part is not the client's to see.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_for_any_part_helps_out_when_a_part_is_busy_or_breaks_off() {
    let busy = |wait| Fault { retry_after: Some(wait), ..status(429) };
    let broken = Fault { no_answer: true, ..Fault::default() };
    for legs in ["", "without_prefill = \"refuse\""] {
        for at_prefill in [true, false] {
            for fault in [busy(7), Fault { retry_after: Some(7), ..status(503) }, broken] {
                let case = format!("{legs} {at_prefill} {fault:?}");
                let any = crate::support::engine().await;
                let rule = rule(&["round-robin"]).table("legs", legs).part(&any, "any");
                // who is busy is asked again by the next
                let rule = rule.table("breaker", "cooling = \"0s\"");
                let pair = Pair::new(1, 1, rule).await;
                let part = if at_prefill { &pair.prefill[0] } else { &pair.decode[0] };
                part.fault(fault, 1);
                let answer = pair.send(&body(1)).await;
                assert_eq!(
                    (answer.status, answer.endpoint()),
                    (200, &*any.address().to_string()),
                    "{case} {answer:?}"
                );
                assert_eq!(sent(&any.log()[0]), body(1).to_string(), "{case}");
                pair.is_idle().await;
                assert_eq!((part.log().len(), pair.counter(RESCUED).await), (1, 1.0), "{case}");
                assert_eq!(pair.decode[0].log().len(), usize::from(!at_prefill), "{case}");
                // where it is busy too, decode computes what prefill did not, or the client learns for how long
                part.fault(busy(7), 1);
                any.fault(busy(4), 1);
                let answer = pair.send(&body(2)).await;
                if at_prefill && legs.is_empty() {
                    assert_eq!(
                        (answer.status, answer.endpoint()),
                        (200, &*pair.decode[0].address().to_string())
                    );
                } else {
                    assert_eq!(
                        (answer.status, answer.field("retry-after")),
                        (429, Some("4")),
                        "{case} {answer:?}"
                    );
                }
                pair.is_idle().await;
            }
        }
    }
}

/// What an engine delivers is its answer, and what may run once runs once.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_for_any_part_is_not_asked_for_what_may_not_be_asked_again() {
    let any = crate::support::engine().await;
    let rule = rule(&["round-robin"]).table("retry", "busy = false\nresend = false").part(&any, "any");
    let rule = rule.table("breaker", "cooling = \"0s\"");
    let pair = Pair::new(1, 1, rule.table("legs", "without_prefill = \"refuse\"")).await;
    let broken = Fault { no_answer: true, ..Fault::default() };
    for (at_prefill, fault, code) in [
        (true, status(500), 500),
        (true, Fault { retry_after: Some(7), ..status(429) }, 429),
        (true, broken, 502),
        (false, Fault { retry_after: Some(7), ..status(429) }, 429),
        (false, broken, 502),
    ] {
        let part = if at_prefill { &pair.prefill[0] } else { &pair.decode[0] };
        part.fault(fault, 1);
        let answer = pair.send(&body(1)).await;
        assert_eq!(answer.status, code, "{at_prefill} {fault:?} {answer:?}");
        pair.is_idle().await;
    }
    assert!(any.log().is_empty());
}

/// Taken out by hand, found down or failing: it is all the same to a prompt.
#[tokio::test(flavor = "multi_thread")]
async fn decode_computes_the_prompt_that_nobody_may_be_asked_for() {
    for (refuse, status) in [("", 200), ("without_prefill = \"refuse\"", 503)] {
        let mut pair = Pair::new(1, 1, rule(&["round-robin"]).table("legs", refuse)).await;
        super::set(&pair.gateway, &pair.prefill[0], "disabled").await;
        let disabled = pair.send(&body(1)).await;
        super::set(&pair.gateway, &pair.prefill[0], "active").await;
        pair.prefill[0].refuse(true).await.unwrap();
        let unreached = pair.send(&body(1)).await;
        assert_eq!((disabled.status, unreached.status), (status, status), "{disabled:?} {unreached:?}");
        pair.is_idle().await;
        if status == 200 {
            assert_eq!(pair.handed_over().await, (0.0, 2.0));
            assert!(pair.decode[0].log().iter().all(|served| served.received_tokens == 0));
        } else {
            assert_eq!([disabled.code(), unreached.code()], ["pd_pool_unavailable"; 2]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_leave_take_both_legs_along() {
    let pair = Pair::small().await;
    let stalled = Fault { delay_ms: 600_000, ..Fault::default() };
    let silent = Fault { stall_after: Some(2), ..Fault::default() };
    for (phase, at_prefill, fault) in
        [("prefill", true, stalled), ("first byte", false, stalled), ("stream", false, silent)]
    {
        let engine = if at_prefill { &pair.prefill[0] } else { &pair.decode[0] };
        engine.fault(fault, 1);
        let before = engine.log().len();
        let mut client = Connection::open(pair.gateway.address).await;
        client.send(&request(&stream(1))).await;
        if phase == "stream" {
            assert_eq!(client.head().await.unwrap().status, 200);
            assert!(client.piece().await.unwrap().is_some());
        }
        until(phase, async || engine.log().get(before).is_some_and(|served| served.ended == Ended::Open))
            .await;
        drop(client);
        until(phase, async || engine.log()[before].ended == Ended::Aborted).await;
        pair.is_idle().await;
    }
    assert_eq!(pair.decode[0].log().len(), 2, "no decode without a client");
    pair.gateway.until_metric("kvgate_requests_total", &["outcome=\"client_gone\""], 3.0).await;
}
