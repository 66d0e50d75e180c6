//! Answers of one part that are not what the other waits for.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvgate_sim::{Fault, Role};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::{Pair, attempts, body, parts, request, rule, with_parts};
use crate::support::{Rule, Setup, host, prompt};

fn status(status: u16, retry_after: Option<u64>) -> Fault {
    Fault { status: Some(status), retry_after, ..Fault::default() }
}

/// An engine that answers `requests` in this way and takes no connection any more as soon as it has read the last of
/// them. Counts them.
async fn answering(answer: String, requests: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let (address, read) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let count = read.clone();
    tokio::spawn(async move {
        let mut listener = Some(listener);
        for left in (0..requests).rev() {
            let Some(open) = &listener else { return };
            let (mut stream, _) = open.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"}") && stream.read_buf(&mut head).await.is_ok_and(|n| n > 0) {}
            count.fetch_add(1, Ordering::Relaxed);
            listener = listener.filter(|_| left > 0);
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    (address, read)
}

fn whole(status: u16, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
}

/// Decode says 500, which may mean that it lost the blocks, and cannot be asked anew: its word is the answer.
#[tokio::test(flavor = "multi_thread")]
async fn decode_s_own_word_outlives_that_it_is_gone() {
    let prefill = parts(Role::Prefill, 1).await;
    let (decode, asked) = answering(whole(500, "{\"error\":\"its own\"}"), 1).await;
    let rule = with_parts(rule(&["round-robin"]), &prefill, &[]).endpoint(decode, "role = \"decode\"");
    let gateway = Setup::new(&[rule]).start().await;
    let answer = gateway.send(&request(&body(1))).await;
    assert_eq!((answer.status, answer.json()), (500, json!({"error": "its own"})), "{answer:?}");
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    gateway.until_idle().await;
    assert_eq!(gateway.metrics().await.sum("kvgate_errors_total", &["service=\"pair\""]), 0.0);
}

/// What prefill refuses is the first and last that the client gets.
#[tokio::test(flavor = "multi_thread")]
async fn a_relayed_refusal_has_its_first_byte() {
    let pair = Pair::small().await;
    pair.prefill[0].fault(status(422, None), 1);
    assert_eq!(pair.send(&body(1)).await.status, 422);
    pair.is_idle().await;
    let record = pair.gateway.ask("/decisions").await.json().as_array().unwrap().last().unwrap().clone();
    assert!(record["first_byte_us"].as_u64().is_some_and(|us| us > 0), "{record}");
    assert_eq!(record["status"], 422);
}

/// A prefill that redirects has computed nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_is_no_prefill() {
    let pair = Pair::new(2, 1, rule(&["round-robin"])).await;
    pair.prefill[0].fault(status(302, None), 1);
    assert_eq!(pair.send(&body(1)).await.status, 200);
    pair.is_idle().await;
    assert_eq!(pair.legs("prefill").await, [1.0, 0.0, 1.0]);
    assert_eq!(pair.handed_over().await, (1.0, 0.0));
}

/// A busy engine is passed over in each part, and the blocks that wait are fetched by whoever decodes.
#[tokio::test(flavor = "multi_thread")]
async fn busy_engines_are_passed_over_in_both_parts() {
    for (busy, in_prefill) in [(429, true), (429, false), (503, true), (503, false)] {
        let (prefills, decodes) = if in_prefill { (2, 1) } else { (1, 2) };
        let pair = Pair::new(prefills, decodes, rule(&["round-robin"])).await;
        let first = if in_prefill { &pair.prefill } else { &pair.decode };
        first[0].fault(status(busy, Some(5)), 1);
        let answer = pair.send(&body(1)).await;
        let last = pair.decode.last().unwrap();
        assert_eq!((answer.status, answer.endpoint()), (200, &*last.address().to_string()), "{answer:?}");
        assert!(last.log()[0].received_tokens > 0, "it need not compute the prompt");
        let asked: Vec<_> = pair.prefill.iter().chain(&pair.decode).map(|e| e.log().len()).collect();
        assert_eq!(asked, [1, 1, 1], "each once");
        pair.is_idle().await;
        assert_eq!(pair.handed_over().await, (1.0, 0.0));
    }
    // all for decode: their word, with the shorter time
    let pair = Pair::new(1, 2, rule(&["round-robin"])).await;
    for (engine, wait) in pair.decode.iter().zip([3, 8]) {
        engine.fault(status(429, Some(wait)), usize::MAX);
    }
    let answer = pair.send(&body(1)).await;
    assert_eq!((answer.status, answer.field("retry-after")), (429, Some("3")), "{answer:?}");
    assert_eq!(pair.decode.iter().map(|e| e.log().len()).sum::<usize>(), 2, "each once");
    // and for prefill, where decode is not to compute prompts
    let refuse = rule(&["round-robin"]).table("legs", "without_prefill = \"refuse\"");
    let pair = Pair::new(2, 1, refuse).await;
    for engine in &pair.prefill {
        engine.fault(status(429, Some(6)), usize::MAX);
    }
    let answer = pair.send(&body(1)).await;
    assert_eq!((answer.status, answer.field("retry-after")), (429, Some("6")), "{answer:?}");
    assert!(pair.decode[0].log().is_empty());
}

/// With the blocks and without them, no more endpoints are asked than `retry.attempts` has it.
#[tokio::test(flavor = "multi_thread")]
async fn no_more_are_asked_for_decode_than_attempts() {
    for attempts in [1, 3] {
        let rule = rule(&["round-robin"]).table("retry", &format!("attempts = {attempts}"));
        let pair = Pair::new(1, 4, rule).await;
        for engine in &pair.decode {
            engine.fault(status(429, Some(5)), usize::MAX);
        }
        let answer = pair.send(&body(1)).await;
        assert_eq!((answer.status, answer.field("retry-after")), (429, Some("5")), "{answer:?}");
        let asked: usize = pair.decode.iter().map(|engine| engine.log().len()).sum();
        assert_eq!(asked, attempts);
        pair.is_idle().await;
    }
}

/// An engine's refusal is the answer where nobody is left to do better, whichever part it was asked for.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_outlives_that_decode_is_gone() {
    for (at_any, wait) in [(false, "6"), (true, "4")] {
        let any = crate::support::engine().await;
        let rule = rule(&["round-robin"]).table("breaker", "cooling = \"0s\"");
        let rule = if at_any { rule.part(&any, "any") } else { rule };
        let mut pair = Pair::new(1, 1, rule).await;
        let broken = Fault { no_answer: true, ..Fault::default() };
        pair.prefill[0].fault(if at_any { broken } else { status(429, Some(6)) }, 1);
        any.fault(status(429, Some(4)), 1);
        pair.decode[0].refuse(true).await.unwrap();
        let answer = pair.send(&body(1)).await;
        assert_eq!((answer.status, answer.field("retry-after")), (429, Some(wait)), "{at_any} {answer:?}");
        pair.is_idle().await;
    }
}

/// Decode is asked for its part for the first time, whether or not somebody was there who might have helped, but might
/// not be asked.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_computed_after_all_costs_no_budget() {
    for helps in [false, true] {
        let any = crate::support::engine().await;
        let rule = if helps { rule(&["round-robin"]).part(&any, "any") } else { rule(&["round-robin"]) };
        let (prefill, decode) = (parts(Role::Prefill, 1).await, parts(Role::Decode, 1).await);
        let gateway = Setup::new(&[with_parts(rule, &prefill, &decode)])
            .process("[retry_budget]\npercent = 0\nfloor = 0\n")
            .start()
            .await;
        prefill[0].fault(Fault { no_answer: true, ..Fault::default() }, 1);
        let answer = gateway.send(&request(&body(1))).await;
        assert_eq!((answer.status, decode[0].log().len()), (200, 1), "{helps} {answer:?}");
        assert!(any.log().is_empty());
        gateway.until_idle().await;
        let record = gateway.ask("/decisions").await.json().as_array().unwrap().last().unwrap().clone();
        assert_eq!((&record["over_budget"], &record["status"]), (&json!(true), &json!(200)), "{record}");
    }
}

/// An answer longer than is read would be as long from another engine.
#[tokio::test(flavor = "multi_thread")]
async fn an_endless_prefill_answer_is_not_asked_for_twice() {
    let long = format!("{{\"kv_transfer_params\":{{\"a\":\"{}\"}}}}", "x".repeat(20_000));
    for (recomputes, word) in [(true, "recompute"), (false, "refuse")] {
        let (first, asked) = answering(whole(200, &long), 4).await;
        let (second, next) = answering(whole(200, &long), 4).await;
        let decode = parts(Role::Decode, 1).await;
        let rule: Rule = rule(&["round-robin"])
            .table("legs", &format!("prefill_answer = \"4KiB\"\nwithout_prefill = \"{word}\""))
            .endpoint(first, "role = \"prefill\"")
            .endpoint(second, "role = \"prefill\"");
        let gateway = Setup::new(&[with_parts(rule, &[], &decode)]).start().await;
        let answer = gateway.send(&request(&body(1))).await;
        assert_eq!(asked.load(Ordering::Relaxed) + next.load(Ordering::Relaxed), 1);
        if recomputes {
            assert_eq!((answer.status, decode[0].log().len()), (200, 1));
        } else {
            assert_eq!((answer.status, &*answer.code()), (502, "pd_prefill_failed"));
        }
        gateway.until_idle().await;
    }
}

/// Each leg has a body of its own: where there is no memory for them, decode serves the request whole.
#[tokio::test(flavor = "multi_thread")]
async fn the_bodies_of_legs_count_as_memory() {
    let (prefill, decode) = (parts(Role::Prefill, 1).await, parts(Role::Decode, 1).await);
    let rule = with_parts(rule(&["round-robin"]), &prefill, &decode);
    let gateway = Setup::new(&[rule]).server("body_memory = \"16MiB\"\n").start().await;
    let free = gateway.metric("kvgate_body_buffer_free_bytes", &[]).await;
    for (size, split) in [(4 << 20, true), (6 << 20, false)] {
        let body = json!({"model": crate::support::MODEL, "prompt": prompt(1, 64), "max_tokens": 2, "pad": "x".repeat(size)});
        let before = prefill[0].log().len();
        let answer = gateway.send(&request(&body)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(prefill[0].log().len() - before, usize::from(split), "{size}");
        gateway.until_metric("kvgate_body_buffer_free_bytes", &[], free).await;
        let record = gateway.ask("/decisions").await.json().as_array().unwrap().last().unwrap().clone();
        assert_eq!(
            (&record["transfer"], attempts(&record, "prefill").len()),
            (&json!(split), usize::from(split))
        );
    }
}
