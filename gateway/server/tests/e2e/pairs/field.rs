//! What users of such gateways met in production.

use std::time::{Duration, Instant};

use kvgate_sim::{Fault, Sim};
use serde_json::{Value, json};

use super::{Pair, body, request, rule, sent, stream};
use crate::support::{Connection, MODEL, Request, until};

/// What must not take longer than that, on any machine.
const SOON: Duration = Duration::from_secs(1);

/// Twenty that leave, before an answer and within one, while an engine of each part comes and goes: nothing is left of
/// them, and what follows is balanced.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_clients_that_leave_engines_that_come_and_go() {
    let ladder = rule(&["round-robin"]).top("decode_tiers = [\"round-robin\"]");
    let mut pair = Pair::new(2, 2, ladder).await;
    let stalled = Fault { delay_ms: 600_000, ..Fault::default() };
    let silent = Fault { stall_after: Some(2), ..Fault::default() };
    for (at_prefill, fault, reads) in [(true, stalled, false), (false, stalled, false), (false, silent, true)]
    {
        let engines = if at_prefill { &pair.prefill } else { &pair.decode };
        engines.iter().for_each(|engine| engine.fault(fault, usize::MAX));
        let mut clients = Vec::new();
        for seed in 0..if reads { 10 } else { 5 } {
            let mut client = Connection::open(pair.gateway.address).await;
            client.send(&request(&stream(seed))).await;
            if reads {
                assert_eq!(client.head().await.unwrap().status, 200);
                assert!(client.piece().await.unwrap().is_some());
            }
            clients.push(client);
        }
        let open = async || pair.gateway.metrics().await.sum("kvgate_requests_open", &[]);
        until("all are under way", async || open().await == clients.len() as f64).await;
        pair.prefill.iter().chain(&pair.decode).for_each(Sim::clear_faults);
        for _ in 0..3 {
            for engine in [&mut pair.prefill[1], &mut pair.decode[1]] {
                engine.restart().await.unwrap();
                engine.refuse(true).await.unwrap();
                engine.refuse(false).await.unwrap();
            }
            clients.pop();
        }
        drop(clients);
        pair.is_idle().await;
    }
    let ended = pair.gateway.metrics().await.sum("kvgate_requests_total", &[]);
    assert_eq!(ended, 20.0, "each is counted once");
    let before = (served(&pair.prefill), served(&pair.decode));
    for seed in 0..40 {
        pair.went(&request(&body(100 + seed))).await;
    }
    let after = (served(&pair.prefill), served(&pair.decode));
    for (after, before) in [(after.0, before.0), (after.1, before.1)] {
        let more: Vec<_> = after.iter().zip(before).map(|(after, before)| after - before).collect();
        assert_eq!(more, [20, 20]);
    }
    pair.is_idle().await;
}

/// A prefill is asked for one token and no more, whatever the client asks for; decode for just that.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_client_asks_for_is_decode_s_to_do() {
    let asks = [
        ("/v1/completions", json!({"prompt": "word ".repeat(40), "logprobs": 2})),
        (
            "/v1/chat/completions",
            json!({
                "messages": [{"role": "user", "content": "word ".repeat(40)}], "logprobs": true, "top_logprobs": 2,
                "max_completion_tokens": 12,
            }),
        ),
    ];
    for (path, special) in asks {
        for n in [1, 2] {
            let pair = Pair::small().await;
            let mut body = json!({"model": MODEL, "stream": true, "min_tokens": 8, "max_tokens": 12, "n": n});
            body["stream_options"] = json!({"include_usage": true});
            body.as_object_mut().unwrap().extend(special.as_object().unwrap().clone());
            let answer = pair.gateway.send(&Request::json(path, &body)).await;
            assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
            let text = String::from_utf8_lossy(&answer.body);
            assert!(text.ends_with("data: [DONE]\n\n") && text.contains("\"completion_tokens\":"), "{text}");
            let events: Vec<Value> = text
                .split("\n\n")
                .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
                .collect();
            let of = |index: u64| {
                let choices = events.iter().filter_map(|event| event["choices"].get(0));
                choices.filter(|choice| choice["index"] == index).count()
            };
            assert!((0..n).all(|index| of(index) >= 8), "{text}");

            let (prefill, decode) = (pair.prefill[0].log(), pair.decode[0].log());
            let asked: Value = serde_json::from_str(&sent(&prefill[0])).unwrap();
            assert_eq!((&asked["max_tokens"], &asked["stream"]), (&json!(1), &json!(false)), "{asked}");
            assert!(asked.get("min_tokens").is_none() && asked.get("stream_options").is_none(), "{asked}");
            assert_eq!(
                asked.get("max_completion_tokens"),
                body.get("max_completion_tokens").and(Some(&json!(1)))
            );
            assert_eq!(
                (&asked["n"], &asked["logprobs"]),
                (&body["n"], &body["logprobs"]),
                "as the client has it"
            );
            let mut told: Value = serde_json::from_str(&sent(&decode[0])).unwrap();
            assert!(told.as_object_mut().unwrap().remove("kv_transfer_params").is_some());
            assert_eq!(told, body);
            pair.is_idle().await;
            assert_eq!(pair.handed_over().await, (1.0, 0.0));
        }
    }
}

/// A part that answers 500 is told, or asked of another engine, at once.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_one_part_does_not_keep_the_client_waiting() {
    let failing = Fault { status: Some(500), ..Fault::default() };
    let refuse = rule(&["round-robin"]).table("legs", "without_prefill = \"refuse\"");
    for (at_prefill, others, rule, statuses) in [
        (true, false, rule(&["round-robin"]), [200, 200]),
        (true, true, rule(&["round-robin"]), [200, 200]),
        (true, false, refuse.clone(), [500, 500]),
        (true, true, refuse, [200, 200]),
        (false, false, rule(&["round-robin"]), [200, 200]),
        (false, true, rule(&["round-robin"]), [200, 200]),
    ] {
        let engines = if others { 2 } else { 1 };
        let pair = Pair::new(engines, engines, rule).await;
        for (ask, status) in [stream(1), body(1)].into_iter().zip(statuses) {
            // they take turns
            let last = pair.went(&request(&body(2))).await;
            let (part, last) =
                if at_prefill { (&pair.prefill, last.prefill) } else { (&pair.decode, last.decode) };
            part[(last + 1) % engines].fault(failing, 1);
            let before = (served(part), served(&pair.decode));
            let start = Instant::now();
            let answer = pair.send(&ask).await;
            assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
            assert_eq!((answer.status, answer.complete), (status, true), "{at_prefill} {others}: {answer:?}");
            let more: usize = served(part).iter().sum::<usize>() - before.0.iter().sum::<usize>();
            let asked = if at_prefill { engines } else { 2 };
            assert_eq!(more, asked, "{at_prefill} {others}: decode is asked once more, without the blocks");
            if at_prefill && status == 500 {
                assert_eq!(served(&pair.decode), before.1, "no answer to a prompt that failed");
            }
            pair.is_idle().await;
        }
    }
}

fn served(engines: &[Sim]) -> Vec<usize> {
    engines.iter().map(|engine| engine.log().len()).collect()
}
