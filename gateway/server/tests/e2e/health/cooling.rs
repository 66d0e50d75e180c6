use kvgate_sim::{Fault, Sim};

use super::{BREAKER, CLOSED, FLIPS, OPEN, asked, send, shown};
use crate::support::{Gateway, Rule, Setup, engines, until};

const COOLING: &str = "kvgate_endpoint_cooling_seconds";
const STRICT: &str = "[breaker]\nfailures = 1\nopen_for = \"1h\"\n";

fn busy(status: u16, seconds: u64) -> Fault {
    Fault { status: Some(status), retry_after: Some(seconds), ..Fault::default() }
}

async fn gateway(engines: &[Sim], health: &'static str) -> Gateway {
    let rule = Rule::new("words", &["round-robin"]).engines(engines);
    Setup::new(&[rule]).health(health).start().await
}

/// F25: one that asks for a pause gets it, its request is served by the other, and its breaker stays closed.
#[tokio::test(flavor = "multi_thread")]
async fn who_asks_for_a_pause_gets_it_and_is_not_blamed() {
    for status in [503, 429] {
        let engines = engines(2).await;
        let gateway = gateway(&engines, STRICT).await;
        engines[0].fault(busy(status, 600), usize::MAX);
        for _ in 0..20 {
            assert_eq!(send(&gateway).await.status, 200);
        }
        assert_eq!(asked(&engines)[1], 20);
        assert_eq!(gateway.metric("kvgate_endpoint_attempts_total", &["ep_idx=\"0\""]).await, 1.0);
        let metric = async |name| gateway.metric(name, &["ep_idx=\"0\""]).await;
        assert_eq!((metric(BREAKER).await, metric(FLIPS).await), (CLOSED, 0.0));
        assert_eq!(metric("kvgate_endpoint_failures_total").await, 0.0);
        // asked for ten minutes, and a minute is the most
        let left = metric(COOLING).await;
        assert!(left > 0.0 && left <= 60.0, "{left}");
        let shown = shown(&gateway, &engines[0]).await;
        assert_eq!((&shown["available"], &shown["breaker"]), (&"cooling".into(), &"closed".into()));
        assert!(shown["cooling_until_ms"].as_u64().is_some_and(|at| at > 1_600_000_000_000));
        let decisions = gateway.ask("/decisions").await.json();
        let last = &decisions.as_array().unwrap().last().unwrap()["attempts"][0];
        assert_eq!(last["left_out"], serde_json::json!({"cooling": 1}), "{last}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_ends() {
    let engines = engines(2).await;
    let gateway = gateway(&engines, "[breaker]\nfailures = 1\ncooling = \"200ms\"\n").await;
    engines[0].fault(busy(503, 600), 1);
    until("it serves again", async || {
        assert_eq!(send(&gateway).await.status, 200);
        asked(&engines)[0] > 0
    })
    .await;
    assert_eq!(gateway.metric(FLIPS, &["ep_idx=\"0\""]).await, 0.0);
}

/// The rest of F25: all of them say 429. Nobody is asked twice, and the client is told when to come back; until then
/// the gateway says so by itself.
#[tokio::test(flavor = "multi_thread")]
async fn when_all_ask_for_a_pause_the_client_gets_it() {
    let engines = engines(2).await;
    let gateway = gateway(&engines, STRICT).await;
    engines[0].fault(busy(429, 50), usize::MAX);
    engines[1].fault(busy(429, 40), usize::MAX);
    for _ in 0..2 {
        let answer = send(&gateway).await;
        let wait: u64 = answer.field("retry-after").unwrap().parse().unwrap();
        assert_eq!(answer.status, 429, "{answer:?}");
        assert!((30..=40).contains(&wait), "{wait}");
        for endpoint in ["ep_idx=\"0\"", "ep_idx=\"1\""] {
            gateway.until_metric("kvgate_endpoint_attempts_total", &[endpoint], 1.0).await;
        }
    }
    let answer = send(&gateway).await;
    assert_eq!((answer.status, &*answer.code()), (429, "engines_busy"));
    // by 503 alone it is 503
    let engines = crate::support::engines(1).await;
    let gateway = self::gateway(&engines, STRICT).await;
    engines[0].fault(busy(503, 40), usize::MAX);
    assert_eq!(send(&gateway).await.status, 503);
    let answer = send(&gateway).await;
    assert_eq!((answer.status, &*answer.code()), (503, "no_healthy_backend"));
    assert!(answer.field("retry-after").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn without_cooling_a_503_is_an_error_like_any() {
    let engines = engines(2).await;
    let gateway = gateway(&engines, "[breaker]\nfailures = 1\nopen_for = \"1h\"\ncooling = \"0s\"\n").await;
    engines[0].fault(busy(503, 600), 1);
    for _ in 0..4 {
        assert_eq!(send(&gateway).await.status, 200);
    }
    gateway.until_metric(BREAKER, &["ep_idx=\"0\""], OPEN).await;
    assert_eq!(gateway.metric(COOLING, &["ep_idx=\"0\""]).await, 0.0);
}
