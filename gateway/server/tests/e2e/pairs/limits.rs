//! How long each part may take.

use kvgate_sim::Fault;

use super::{Pair, body, rule, stream};

fn limits(lines: &str) -> crate::support::Rule {
    rule(&["round-robin"]).table("timeouts", lines)
}

pub const STALLED: Fault = Fault {
    delay_ms: 600_000,
    status: None,
    retry_after: None,
    no_answer: false,
    die_after: None,
    die_after_bytes: None,
    stall_after: None,
    end_after: None,
    reset: false,
    no_params: false,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_that_takes_too_long() {
    let pair = Pair::new(1, 1, limits("prefill = \"100ms\"")).await;
    pair.prefill[0].fault(STALLED, 1);
    assert_eq!(pair.send(&body(1)).await.status, 200, "decode computes the prompt");
    pair.is_idle().await;
    assert_eq!((pair.legs("prefill").await, pair.handed_over().await), ([0.0, 1.0, 0.0], (0.0, 1.0)));

    let rule = limits("prefill = \"100ms\"").table("legs", "without_prefill = \"refuse\"");
    let pair = Pair::new(1, 1, rule).await;
    pair.prefill[0].fault(STALLED, 1);
    let answer = pair.send(&body(1)).await;
    assert_eq!((answer.status, &*answer.code()), (504, "pd_prefill_timeout"));
    assert_eq!(pair.decode[0].log().len(), 0);
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_that_trickles_takes_too_long_too() {
    let pair = Pair::new(1, 1, limits("prefill = \"150ms\"")).await;
    pair.prefill[0].fault(Fault { delay_ms: 0, stall_after: Some(0), ..STALLED }, 1);
    assert_eq!(pair.send(&body(1)).await.status, 200, "decode computes the prompt");
    pair.is_idle().await;
    assert_eq!(pair.legs("prefill").await, [0.0, 1.0, 0.0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_that_does_not_begin() {
    let pair = Pair::new(1, 2, limits("first_byte = \"100ms\"")).await;
    pair.decode.iter().for_each(|engine| engine.fault(STALLED, 1));
    let answer = pair.send(&stream(1)).await;
    assert_eq!((answer.status, &*answer.code()), (504, "pd_decode_timeout"));
    pair.is_idle().await;
    let asked: usize = pair.decode.iter().map(|engine| engine.log().len()).sum();
    assert_eq!((asked, pair.legs("decode").await), (1, [0.0, 1.0, 0.0]), "it may still be at work");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_that_falls_silent() {
    let pair = Pair::new(1, 1, limits("idle = \"100ms\"")).await;
    pair.decode[0].fault(Fault { delay_ms: 0, stall_after: Some(2), ..STALLED }, 1);
    let answer = pair.send(&stream(1)).await;
    assert_eq!((answer.status, answer.complete), (200, true));
    let text = String::from_utf8_lossy(&answer.body);
    assert!(text.contains("pd_decode_stream_timeout") && !text.contains("[DONE]"), "{text}");
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_whole_request() {
    let pair = Pair::new(2, 1, limits("total = \"150ms\"")).await;
    for at_prefill in [true, false] {
        let engine = if at_prefill { &pair.prefill } else { &pair.decode };
        engine.iter().for_each(|engine| engine.fault(STALLED, 1));
        let answer = pair.send(&body(1)).await;
        assert_eq!((answer.status, &*answer.code()), (504, "engine_timeout"), "{at_prefill}");
        engine.iter().for_each(kvgate_sim::Sim::clear_faults);
    }
    assert_eq!(pair.decode[0].log().len(), 1, "what no time is left for is not begun");
    pair.is_idle().await;
}
