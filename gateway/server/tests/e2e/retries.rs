//! Asking another endpoint: upon what, how often, and what clients are told when nobody does better.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvgate_sim::{Fault, Sim};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use crate::support::{
    Gateway, MODEL, Request, Rule, Setup, completion, counting, engines, fetch, free_port, host, prompt,
};

const RETRIES: &str = "kvgate_retries_total";
const EXHAUSTED: &str = "kvgate_retry_budget_exhausted_total";
const ERRORS: &str = "kvgate_errors_total";

fn status(status: u16, retry_after: Option<u64>) -> Fault {
    Fault { status: Some(status), retry_after, ..Fault::default() }
}

fn ask() -> Request {
    Request::json("/v1/completions", &completion(MODEL, &prompt(1, 20)))
}

fn asked(engines: &[Sim]) -> Vec<usize> {
    engines.iter().map(|engine| engine.log().len()).collect()
}

/// In turn, from the first; engines that fail are left alone by nobody but the request that saw it.
fn rule() -> Rule {
    Rule::new("words", &["round-robin"])
}

async fn retries(gateway: &Gateway, reason: &str) -> f64 {
    gateway.metric(RETRIES, &["service=\"words\"", &format!("reason={reason:?}")]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_engine_s_request_is_served_by_another() {
    for busy in [429, 503] {
        let engines = engines(2).await;
        let gateway = Setup::new(&[rule().engines(&engines)]).start().await;
        engines[0].fault(status(busy, Some(7)), 1);
        let answer = gateway.send(&ask()).await;
        assert_eq!((answer.status, answer.endpoint()), (200, &*engines[1].address().to_string()));
        assert_eq!(asked(&engines), [1, 1]);
        gateway.until_idle().await;
        gateway.until_metric(RETRIES, &["reason=\"refused\""], 1.0).await;
        gateway.until_metric("kvgate_requests_total", &["outcome=\"2xx\""], 1.0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_are_busy_the_client_learns_for_how_long() {
    let engines = engines(3).await;
    let gateway = Setup::new(&[rule().engines(&engines)]).start().await;
    for (engine, wait) in engines.iter().zip([9, 4, 6]) {
        engine.fault(status(429, Some(wait)), 1);
    }
    let answer = gateway.send(&ask()).await;
    assert_eq!((answer.status, answer.field("retry-after")), (429, Some("4")), "{answer:?}");
    assert_eq!(answer.json()["error"]["message"], "a fault that was asked for", "an engine's own words");
    assert_eq!(asked(&engines), [1, 1, 1]);
    gateway.until_metric("kvgate_requests_total", &["outcome=\"4xx\""], 1.0).await;
    assert_eq!(gateway.metrics().await.sum(ERRORS, &["service=\"words\""]), 0.0, "no error of ours");
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_engines_answers_are_passed_on_where_the_rule_wants_that() {
    let engines = engines(2).await;
    let gateway = Setup::new(&[rule().engines(&engines).table("retry", "busy = false")]).start().await;
    engines[0].fault(status(503, Some(1)), 1);
    let answer = gateway.send(&ask()).await;
    assert_eq!((answer.status, answer.field("retry-after")), (503, Some("1")));
    assert_eq!(asked(&engines), [1, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn statuses_of_the_rule_s_choice_are_asked_of_another() {
    let engines = engines(2).await;
    let gateway = Setup::new(&[rule().engines(&engines).table("retry", "statuses = [500]")]).start().await;
    engines[0].fault(status(500, None), 1);
    assert_eq!(gateway.send(&ask()).await.endpoint(), engines[1].address().to_string());
    // nobody does better
    engines.iter().for_each(|engine| engine.fault(status(500, None), 1));
    let answer = gateway.send(&ask()).await;
    assert_eq!((answer.status, asked(&engines)), (500, vec![2, 2]));
    assert_eq!(answer.json()["error"]["message"], "a fault that was asked for");
    // others are answers
    let before: usize = asked(&engines).iter().sum();
    engines.iter().for_each(|engine| engine.fault(status(502, None), 1));
    assert_eq!(gateway.send(&ask()).await.status, 502);
    assert_eq!(asked(&engines).iter().sum::<usize>(), before + 1);
}

/// An engine that answers everything with this, and counts.
async fn always(answer: &'static str) -> (SocketAddr, Arc<AtomicUsize>) {
    counting(move |_| Some(answer)).await
}

/// What has an effect is not done twice on a status; but one who says that it is busy has done nothing.
#[tokio::test(flavor = "multi_thread")]
async fn what_has_an_effect_is_asked_again_of_nobody_but_the_busy() {
    let failed = "HTTP/1.1 500 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let busy = "HTTP/1.1 503 X\r\nretry-after: 3\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    for (said, others) in [(failed, 0), (busy, 1)] {
        let (first, asked) = always(said).await;
        let (second, next) =
            always("HTTP/1.1 200 X\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}").await;
        let rule = rule().table("retry", "statuses = [500, 503]").endpoint(first, "").endpoint(second, "");
        let gateway = Setup::new(&[rule]).start().await;
        let answer = gateway.send(&Request::json("/v1/responses", &json!({"input": "x"}))).await;
        assert_eq!(answer.status, if others == 1 { 200 } else { 500 });
        assert_eq!((asked.load(Ordering::Relaxed), next.load(Ordering::Relaxed)), (1, others));
    }
}

/// An engine that answers the first request of a connection, and breaks the connection on the second, which it has read.
async fn fickle() -> (SocketAddr, Arc<AtomicUsize>) {
    counting(|before| (before % 2 == 0).then_some("HTTP/1.1 200 X\r\ncontent-length: 2\r\n\r\n{}")).await
}

/// On a kept connection that breaks at once, too: the engine may have read it, whatever is thought of the connection.
#[tokio::test(flavor = "multi_thread")]
async fn what_has_an_effect_is_sent_once_on_a_kept_connection() {
    let sends = [
        (Request::json("/v1/files", &json!({"input": "x"})), 502),
        (Request::json("/v1/responses", &json!({"input": "x"})), 502),
        (Request::put("/v1/files/x", &json!({"input": "x"})), 502),
        // only computes
        (ask(), 200),
    ];
    for (request, status) in sends {
        let (address, read) = fickle().await;
        let rule = rule().table("breaker", "failures = 1").endpoint(address, "");
        let gateway = Setup::new(&[rule]).start().await;
        assert_eq!(gateway.send(&ask()).await.status, 200);
        gateway.until_idle().await;
        let answer = gateway.send(&request).await;
        assert_eq!(answer.status, status, "{request:?} {answer:?}");
        if status == 502 {
            assert_eq!(
                (answer.code().as_str(), read.load(Ordering::Relaxed)),
                ("engine_error", 2),
                "{request:?}"
            );
            let record = gateway.ask("/decisions").await.json();
            let attempts = record.as_array().unwrap().last().unwrap()["attempts"].as_array().unwrap().clone();
            assert_eq!(
                (attempts.len(), &attempts[0]["outcome"]["cause"]),
                (1, &"stale".into()),
                "{request:?}"
            );
        } else {
            assert_eq!(read.load(Ordering::Relaxed), 3, "once more, on a fresh connection");
        }
        // neither counts as another endpoint, nor against this one
        assert_eq!(retries(&gateway, "reset").await, 0.0);
        assert_eq!(gateway.send(&ask()).await.status, 200);
    }
}

/// Resend is for the rule to say, on kept connections as on others.
#[tokio::test(flavor = "multi_thread")]
async fn what_only_computes_is_sent_once_where_the_rule_wants_that() {
    let (address, read) = fickle().await;
    let gateway = Setup::new(&[rule().table("retry", "resend = false").endpoint(address, "")]).start().await;
    assert_eq!(gateway.send(&ask()).await.status, 200);
    gateway.until_idle().await;
    let answer = gateway.send(&ask()).await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "engine_error"));
    assert_eq!(read.load(Ordering::Relaxed), 2);
}

/// An engine that says no before it has read all, and reads no more, holds nobody up.
#[tokio::test(flavor = "multi_thread")]
async fn an_early_no_is_heard_amid_the_upload() {
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let busy = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut open = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            crate::support::reads_head(&mut stream).await;
            let said = b"HTTP/1.1 429 X\r\nretry-after: 3\r\ncontent-length: 0\r\n\r\n";
            stream.write_all(said).await.unwrap();
            open.push(stream);
        }
    });
    let engines = engines(1).await;
    let rule = rule().endpoint(busy, "").engine(&engines[0]);
    let gateway = Setup::new(&[rule]).start().await;
    let mut body = completion(MODEL, &prompt(1, 20));
    body["padding"] = "x".repeat(12 << 20).into();
    let answer = gateway.send(&Request::json("/v1/completions", &body)).await;
    assert_eq!((answer.status, answer.endpoint()), (200, &*engines[0].address().to_string()), "{answer:?}");
    gateway.until_metric(RETRIES, &["reason=\"refused\""], 1.0).await;
}

/// A fleet whose every engine fails is asked for its share and no more; endpoints that take no connection cost nothing.
#[tokio::test(flavor = "multi_thread")]
async fn retries_have_a_budget() {
    // every other choice meets the one that resets
    let engines = engines(1).await;
    let (broken, read) = counting(|_| None).await;
    let rule = rule().endpoint(broken, "").engine(&engines[0]);
    let gateway = Setup::new(&[rule]).process("[retry_budget]\npercent = 0\nfloor = 0\n").start().await;
    let answer = gateway.send(&ask()).await;
    assert_eq!((answer.status, answer.code()), (502, "engine_error".into()), "{answer:?}");
    assert_eq!((read.load(Ordering::Relaxed), asked(&engines)), (1, vec![0]));
    gateway.until_metric(EXHAUSTED, &["service=\"words\""], 1.0).await;
    assert_eq!(gateway.ask("/decisions").await.json()[0]["over_budget"], true);
    gateway.until_metric(ERRORS, &["service=\"words\"", "code=\"engine_error\""], 1.0).await;
    gateway.until_idle().await;

    let dead = (0..3).fold(self::rule(), |rule, _| rule.endpoint(free_port(), ""));
    let gateway = Setup::new(&[dead.engine(&engines[0])])
        .process("[retry_budget]\npercent = 0\nfloor = 0\n")
        .start()
        .await;
    for _ in 0..4 {
        assert_eq!(gateway.send(&ask()).await.status, 200);
    }
    assert!(retries(&gateway, "connect").await > 0.0);
    assert_eq!(gateway.metric(EXHAUSTED, &["service=\"words\""]).await, 0.0);
}

/// Ten in ten seconds, whatever the time of the test.
#[tokio::test(flavor = "multi_thread")]
async fn the_floor_of_the_budget_is_for_fleets_of_few_requests() {
    let engines = engines(1).await;
    let (broken, _) = counting(|_| None).await;
    let rule = rule().endpoint(broken, "").engine(&engines[0]);
    let gateway = Setup::new(&[rule]).process("[retry_budget]\npercent = 0\nfloor = 1\n").start().await;
    let answer = gateway.send(&ask()).await;
    assert_eq!((answer.status, answer.endpoint()), (200, &*engines[0].address().to_string()));
    gateway.until_metric(RETRIES, &["reason=\"reset\""], 1.0).await;
    assert_eq!(gateway.metric(EXHAUSTED, &["service=\"words\""]).await, 0.0);
}

/// Each code is a series before anybody met it, in each service and beside them.
#[tokio::test(flavor = "multi_thread")]
async fn every_error_is_a_series_from_the_first_second() {
    let gateway = Setup::new(&[rule().endpoint(free_port(), "")]).start().await;
    let metrics = gateway.metrics().await;
    for code in [
        "engine_error",
        "engine_timeout",
        "engine_unreachable",
        "no_healthy_backend",
        "pd_overloaded",
        "other",
    ] {
        assert_eq!(metrics.get(ERRORS, &["service=\"words\"", &format!("code={code:?}")]), 0.0, "{code}");
    }
    for code in ["bad_request", "no_route", "model_unavailable", "body_too_large", "overloaded"] {
        assert_eq!(metrics.get(ERRORS, &["service=\"\"", &format!("code={code:?}")]), 0.0, "{code}");
    }
    for reason in ["connect", "upload", "reset", "timeout", "refused"] {
        assert_eq!(retries(&gateway, reason).await, 0.0);
    }
    let answer = fetch(gateway.address, &ask()).await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "engine_unreachable"));
    gateway.until_metric(ERRORS, &["service=\"words\"", "code=\"engine_unreachable\""], 1.0).await;
}
