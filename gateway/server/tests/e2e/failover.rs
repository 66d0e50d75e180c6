//! Engines that die, one after the other.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::{
    Answer, Connection, Gateway, MODEL, Request, Rule, Setup, completion, counting, engine, engines, fetch,
    free_port, host, prompt, served, until,
};

const HITS: &str = "loxilb_pd_kv_tier15_hits_total";
const MISSES: &str = "loxilb_pd_kv_tier15_miss_reason_total";
const FAILURES: &str = "kvgate_endpoint_failures_total";

async fn hits(gateway: &Gateway, endpoint: usize) -> f64 {
    gateway.metric(HITS, &[&format!("ep_idx=\"{endpoint}\"")]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_best_takes_over_from_a_dead_holder() {
    let mut engines = engines(4).await;
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    let long = prompt(1, 96);
    for (holder, blocks) in [(1, 6), (3, 4), (2, 2)] {
        let body = completion(MODEL, &long[..blocks * 16]);
        assert_eq!(
            fetch(engines[holder].address(), &Request::json("/v1/completions", &body)).await.status,
            200
        );
        gateway.until_blocks("words", holder, blocks).await;
    }
    // an idle connection to each, so that its death is found out in both ways
    for (dead, next) in [(None, 1), (Some(1), 3), (Some(3), 2)] {
        if let Some(dead) = dead {
            let engine: &mut kvgate_sim::Sim = &mut engines[dead];
            engine.refuse(true).await.unwrap();
        }
        let before = hits(&gateway, next).await;
        let answer = gateway.complete(&long).await;
        assert_eq!((answer.tier(), answer.endpoint()), ("kv-exact", &*engines[next].address().to_string()));
        assert!(served(&engines[next], answer.id()).is_some());
        assert_eq!(hits(&gateway, next).await, before + 1.0);
    }
    assert_eq!(gateway.metric(MISSES, &["reason=\"excluded\""]).await, 0.0);
    // the last one that holds any of it: whoever is left serves
    engines[2].refuse(true).await.unwrap();
    let answer = gateway.complete(&long).await;
    assert_eq!((answer.tier(), answer.endpoint()), ("round-robin", &*engines[0].address().to_string()));
    assert_eq!(gateway.metric(MISSES, &["reason=\"excluded\""]).await, 1.0);
    assert_eq!(hits(&gateway, 0).await, 0.0);
    gateway.until_idle().await;
}

/// An engine that answers the first request of each connection and drops the connection at the second. After two
/// connections it takes no more. Counts the requests it read.
async fn fickle() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let (address, read) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let requests = read.clone();
    tokio::spawn(async move {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().await.unwrap();
            let requests = requests.clone();
            tokio::spawn(async move {
                for answer in [&b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"[..], b""] {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        if !stream.read_buf(&mut head).await.is_ok_and(|n| n > 0) {
                            return;
                        }
                    }
                    requests.fetch_add(1, Ordering::Relaxed);
                    stream.write_all(answer).await.unwrap();
                }
            });
        }
    });
    (address, read)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooled_connection_that_dies_unanswered_counts_as_none() {
    let engine = engine().await;
    let (address, read) = fickle().await;
    let rule = Rule::new("words", &["round-robin"]).endpoint(address, "").engine(&engine);
    let gateway = Setup::new(&[rule]).start().await;
    let (first, second) = (address.to_string(), engine.address().to_string());
    // in turn; the third finds the first's connection dead and makes a new one, the fifth cannot
    for (endpoint, requests) in [(&first, 1), (&second, 1), (&first, 3), (&second, 3), (&second, 4)] {
        let answer = gateway.send(&Request::get("/v1/models")).await;
        assert_eq!((answer.status, answer.endpoint()), (200, endpoint.as_str()));
        assert_eq!(read.load(Ordering::Relaxed), requests);
        // only then its connection is surely back in the pool
        gateway.until_idle().await;
    }
    gateway.until_metric(FAILURES, &["ep_idx=\"0\""], 1.0).await;
    assert_eq!(gateway.metric(FAILURES, &["ep_idx=\"1\""]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn however_many_are_dead_the_one_that_lives_serves() {
    let engine = engine().await;
    let dead = |rule: Rule, _| rule.endpoint(free_port(), "");
    let rule = (0..9).fold(Rule::new("words", &["round-robin"]).table("retry", "attempts = 2"), dead);
    let gateway = Setup::new(&[rule.engine(&engine)]).start().await;
    for _ in 0..3 {
        let answer = gateway.complete(&prompt(1, 20)).await;
        assert_eq!(answer.endpoint(), engine.address().to_string());
    }
    assert_eq!(engine.log().len(), 3);
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_are_dead_the_client_is_told() {
    let mut engines = engines(3).await;
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    gateway.complete(&prompt(1, 40)).await;
    for engine in &mut engines {
        engine.refuse(true).await.unwrap();
    }
    let mut client = Connection::open(gateway.address).await;
    for stream in [false, true, false] {
        let mut body = completion(MODEL, &prompt(1, 40));
        body["stream"] = stream.into();
        client.send(&Request::json("/v1/completions", &body).field("x-request-id", "mine")).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.complete, answer.id()), (503, true, "mine"), "{answer:?}");
        assert_eq!(answer.field("content-type"), Some("application/json"));
        assert_eq!(
            (answer.code().as_str(), &answer.json()["error"]["type"]),
            ("engine_unreachable", &"server_error".into())
        );
    }
    engines[1].refuse(false).await.unwrap();
    let answer = gateway.complete(&prompt(1, 40)).await;
    assert_eq!(answer.endpoint(), engines[1].address().to_string(), "back as soon as it is");
    gateway.until_idle().await;
}

/// Asks again and again until told to stop, over connections of a few requests each; returns what came.
async fn client(
    address: SocketAddr,
    seed: u32,
    stop: Arc<AtomicBool>,
    done: Arc<AtomicUsize>,
) -> Vec<Answer> {
    let mut answers = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let mut connection = Connection::open(address).await;
        for at in 0..10 {
            let body = completion(MODEL, &prompt(seed + at % 3, 40));
            connection.send(&Request::json("/v1/completions", &body)).await;
            answers.push(connection.answer().await);
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
    answers
}

/// Engines that go and come while requests flow, in order or by a crash: no client notices.
#[tokio::test(flavor = "multi_thread")]
async fn engines_may_go_and_come_under_load() {
    let mut engines = engines(3).await;
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    for crash in [false, true] {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let client = |seed| tokio::spawn(client(gateway.address, seed, stop.clone(), done.clone()));
        let clients: Vec<_> = (0..4).map(|n| client(n * 10)).collect();
        for round in 0..24 {
            let engine = &mut engines[round % 3];
            let before = done.load(Ordering::Relaxed);
            if crash {
                engine.restart().await.unwrap();
            } else {
                engine.refuse(true).await.unwrap();
            }
            until("requests flow", async || done.load(Ordering::Relaxed) > before + 8).await;
            engine.refuse(false).await.unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            for answer in client.await.unwrap() {
                assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
            }
        }
        gateway.until_idle().await;
    }
}

/// What an engine has read is asked of another when it breaks off: what changes nothing always, what only computes
/// unless the rule forbids it, the rest never.
#[tokio::test(flavor = "multi_thread")]
async fn what_may_run_twice_is_sent_again() {
    for resend in [true, false] {
        let engine = engine().await;
        let (address, read) = counting(|_| None).await;
        let retry = format!("resend = {resend}");
        let rule = Rule::new("words", &["round-robin"]).endpoint(address, "").engine(&engine);
        let gateway = Setup::new(&[rule.table("retry", &retry)]).start().await;
        let body = completion(MODEL, &prompt(1, 20));
        let asks = [
            (Request::get("/v1/models"), true),
            (Request::json("/v1/completions", &body), resend),
            (Request::json("/v1/responses", &body), false),
        ];
        for (n, (ask, again)) in asks.iter().enumerate() {
            let answer = gateway.send(ask).await;
            assert_eq!(read.load(Ordering::Relaxed), n + 1);
            if *again {
                assert_eq!((answer.status, answer.endpoint()), (200, &*engine.address().to_string()));
            } else {
                assert_eq!((answer.status, answer.complete), (502, true));
                assert_eq!(answer.code(), "engine_error");
                // whoever is next in turn
                assert_eq!(gateway.send(&Request::get("/v1/models")).await.status, 200);
            }
        }
        gateway.until_idle().await;
    }
}

/// What an engine says is its answer, whatever it is: nobody else is asked.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_s_own_errors_are_passed_on() {
    let engines = engines(2).await;
    let gateway = Setup::new(&[Rule::new("words", &["round-robin"]).engines(&engines)]).start().await;
    for (n, status) in [400, 404, 429, 500, 503].into_iter().enumerate() {
        let fault = format!("{{\"status\": {status}}}");
        let body = completion(MODEL, &prompt(1, 20));
        let answer =
            gateway.send(&Request::json("/v1/completions", &body).field("x-sim-fault", &fault)).await;
        assert_eq!((answer.status, answer.complete), (status, true));
        assert_eq!(answer.json()["error"]["message"], "a fault that was asked for");
        assert_eq!(engines.iter().map(|e| e.log().len()).sum::<usize>(), n + 1);
    }
}
