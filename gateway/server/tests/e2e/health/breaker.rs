use kvgate_sim::{Fault, Sim};

use super::{BREAKER, CLOSED, FLIPS, HALF_OPEN, OPEN, asked, request, send, shown};
use crate::support::{Gateway, Request, Rule, Setup, engines, free_port, until};

/// Long enough for a test never to see it end.
const LONG: &str = "[breaker]\nfailures = 3\nopen_for = \"1h\"\n[probe]\nmode = \"off\"\n";
/// Short enough to wait for.
const SHORT: &str = "[breaker]\nfailures = 3\nopen_for = \"300ms\"\n[probe]\nmode = \"off\"\n";
/// Open, it is half open at once as far as a test can tell.
const AT_ONCE: &str = "[breaker]\nfailures = 1\nopen_for = \"10ms\"\n[probe]\nmode = \"off\"\n";

fn status(status: u16) -> Fault {
    Fault { status: Some(status), ..Fault::default() }
}

/// A gateway in front of these, in turn.
async fn gateway(engines: &[Sim], health: &'static str, retry: &str) -> Gateway {
    let rule = Rule::new("words", &["round-robin"]).engines(engines).table("retry", retry);
    Setup::new(&[rule]).health(health).start().await
}

async fn state(gateway: &Gateway, endpoint: usize) -> f64 {
    gateway.metric(BREAKER, &[&format!("ep_idx=\"{endpoint}\"")]).await
}

/// Scoreboard row 7: an engine that takes no connection is found out by requests, none of which a client sees fail, and
/// after the third it gets none.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_takes_no_connection_is_left_alone_after_three_tries() {
    let engines = engines(2).await;
    let dead = Rule::new("words", &["round-robin"]).endpoint(free_port(), "").engines(&engines);
    let gateway = Setup::new(&[dead]).health(LONG).start().await;
    for _ in 0..60 {
        let answer = send(&gateway).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    assert_eq!(asked(&engines).iter().sum::<usize>(), 60);
    let failures = gateway.metric("kvgate_endpoint_failures_total", &["ep_idx=\"0\""]).await;
    assert_eq!((failures, state(&gateway, 0).await), (3.0, OPEN));
    assert_eq!(gateway.metric(FLIPS, &["ep_idx=\"0\""]).await, 1.0);
    let decisions = gateway.ask("/decisions").await.json();
    let last = &decisions.as_array().unwrap().last().unwrap()["attempts"][0];
    assert_eq!(last["left_out"], serde_json::json!({"open": 1}), "{last}");
    gateway.until_idle().await;
}

/// The rest of row 7: when its time is over one request finds out whether it is back.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_back_is_found_by_a_real_request() {
    let mut engines = engines(2).await;
    let gateway = gateway(&engines, SHORT, "attempts = 3").await;
    engines[0].refuse(true).await.unwrap();
    until("its breaker is open", async || {
        assert_eq!(send(&gateway).await.status, 200);
        state(&gateway, 0).await != CLOSED
    })
    .await;
    gateway.until_metric(BREAKER, &["ep_idx=\"0\""], HALF_OPEN).await;
    assert_eq!(shown(&gateway, &engines[0]).await["breaker"], "half-open");
    // still dead: the request that finds out is served elsewhere, and the time begins anew
    let flips = gateway.metric(FLIPS, &["ep_idx=\"0\""]).await;
    until("it was tried again", async || {
        assert_eq!(send(&gateway).await.status, 200);
        gateway.metric(FLIPS, &["ep_idx=\"0\""]).await > flips
    })
    .await;
    engines[0].refuse(false).await.unwrap();
    let before = asked(&engines)[0];
    until("it serves again", async || {
        assert_eq!(send(&gateway).await.status, 200);
        asked(&engines)[0] > before
    })
    .await;
    gateway.until_metric(BREAKER, &["ep_idx=\"0\""], CLOSED).await;
    gateway.until_idle().await;
}

/// Scoreboard row 10: three 5xx in a row demote an engine, each of which its client sees; a 4xx does not count.
#[tokio::test(flavor = "multi_thread")]
async fn three_errors_in_a_row_demote_an_engine() {
    let engines = engines(2).await;
    let gateway = gateway(&engines, LONG, "attempts = 1").await;
    let mut seen = Vec::new();
    for fault in [500, 404, 503] {
        engines[0].fault(status(fault), 1);
        for _ in 0..2 {
            seen.push(send(&gateway).await.status);
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, [200, 200, 200, 404, 500, 503]);
    assert_eq!(state(&gateway, 0).await, CLOSED, "two errors, and a request that was wrong");
    engines[0].fault(status(502), 1);
    let statuses = [send(&gateway).await.status, send(&gateway).await.status];
    assert!(statuses.contains(&502) && statuses.contains(&200), "{statuses:?}");
    gateway.until_metric(BREAKER, &["ep_idx=\"0\""], OPEN).await;
    let failures = gateway.metric("kvgate_endpoint_failures_total", &["ep_idx=\"0\""]).await;
    assert_eq!(failures, 3.0, "as many as the breaker counts");
    let before = asked(&engines);
    for _ in 0..10 {
        assert_eq!(send(&gateway).await.status, 200);
    }
    assert_eq!(asked(&engines), [before[0], before[1] + 10]);
}

/// An engine that refuses connections, where answers are not judged: back, it is let be, whatever it answers.
#[tokio::test(flavor = "multi_thread")]
async fn any_answer_is_enough_where_errors_do_not_count() {
    let mut engines = engines(1).await;
    let health = "[breaker]\nfailures = 1\norigin_errors = 0\nopen_for = \"10ms\"\n[probe]\nmode = \"off\"\n";
    let gateway = gateway(&engines, health, "attempts = 1").await;
    engines[0].refuse(true).await.unwrap();
    assert_eq!(send(&gateway).await.code(), "engine_unreachable");
    gateway.until_metric(BREAKER, &[], HALF_OPEN).await;
    engines[0].refuse(false).await.unwrap();
    engines[0].fault(status(500), 1);
    assert_eq!(send(&gateway).await.status, 500);
    gateway.until_metric(BREAKER, &[], CLOSED).await;
}

/// F24: whatever clients do wrong, the engine is not blamed; and in the half-open state a 400 neither opens nor closes.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_s_fault_neither_opens_nor_closes() {
    let engines = engines(1).await;
    let gateway = gateway(&engines, AT_ONCE, "attempts = 1").await;
    engines[0].fault(status(400), 20);
    for _ in 0..20 {
        assert_eq!(send(&gateway).await.status, 400);
    }
    assert_eq!(send(&gateway).await.status, 200);
    assert_eq!((state(&gateway, 0).await, gateway.metric(FLIPS, &[]).await), (CLOSED, 0.0));
    engines[0].fault(status(500), 1);
    engines[0].fault(status(400), 5);
    assert_eq!(send(&gateway).await.status, 500);
    gateway.until_metric(BREAKER, &[], HALF_OPEN).await;
    for _ in 0..5 {
        assert_eq!(send(&gateway).await.status, 400);
        assert_eq!(state(&gateway, 0).await, HALF_OPEN);
    }
    assert_eq!(send(&gateway).await.status, 200);
    gateway.until_metric(BREAKER, &[], CLOSED).await;
    assert_eq!(gateway.metric(FLIPS, &[]).await, 2.0);
}

/// F26: an engine that accepts and fails every time is found out, and the other serves all.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_breaks_every_answer_off_is_left_alone() {
    for fault in [
        Fault { no_answer: true, ..Fault::default() },
        Fault { die_after: Some(1), ..Fault::default() },
        Fault { stall_after: Some(1), ..Fault::default() },
    ] {
        let engines = engines(2).await;
        let rule = Rule::new("words", &["round-robin"]).engines(&engines);
        // finds out soon, and asks nobody else
        let hasty = Rule::new("hasty", &["round-robin"]).matching("hosts = [\"hasty\"]").engine(&engines[0]);
        let hasty = hasty.table("timeouts", "idle = \"100ms\"");
        let gateway = Setup::new(&[rule, hasty]).health(LONG).start().await;
        engines[0].fault(fault, usize::MAX);
        let mut body = crate::support::completion(crate::support::MODEL, &crate::support::prompt(1, 20));
        body["stream"] = true.into();
        body["max_tokens"] = 4.into();
        let stream = Request::json("/v1/completions", &body);
        until("its breaker is open", async || {
            gateway.send(&stream.clone().host("hasty")).await;
            gateway.metric(BREAKER, &["ep_idx=\"0\"", "service=\"words\""]).await == OPEN
        })
        .await;
        let before = asked(&engines);
        for _ in 0..10 {
            let answer = gateway.send(&stream).await;
            assert_eq!((answer.status, answer.complete), (200, true), "{fault:?}: {answer:?}");
        }
        assert_eq!(asked(&engines), [before[0], before[1] + 10], "{fault:?}");
        gateway.until_idle().await;
    }
}

/// Scoreboard row 12: nobody is left, and the client is told at once, with when to come back.
#[tokio::test(flavor = "multi_thread")]
async fn when_all_are_left_alone_the_client_is_told_when_to_come_back() {
    let mut engines = engines(2).await;
    let gateway = gateway(&engines, LONG, "attempts = 3").await;
    for engine in &mut engines {
        engine.refuse(true).await.unwrap();
    }
    let mut codes = Vec::new();
    for _ in 0..20 {
        let answer = send(&gateway).await;
        assert_eq!((answer.status, answer.complete), (503, true), "{answer:?}");
        assert_eq!(answer.field("content-type"), Some("application/json"));
        codes.push((answer.code(), answer.field("retry-after").map(|text| text.parse::<u64>().unwrap())));
    }
    assert!(codes[..3].iter().all(|(code, _)| code == "engine_unreachable"), "{codes:?}");
    assert!(codes[3..].iter().all(|(code, _)| code == "no_healthy_backend"), "{codes:?}");
    assert!(codes[3..].iter().all(|(_, wait)| wait.is_some_and(|s| (3500..=3600).contains(&s))), "{codes:?}");
    let failures = gateway.metrics().await.all("kvgate_endpoint_failures_total", &[]);
    assert_eq!(failures, [3.0, 3.0], "nobody was asked any more");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_half_open_breaker_lets_one_through_at_a_time() {
    let engines = engines(1).await;
    let gateway = gateway(&engines, AT_ONCE, "attempts = 1").await;
    engines[0].fault(status(500), 1);
    assert_eq!(send(&gateway).await.status, 500);
    gateway.until_metric(BREAKER, &[], HALF_OPEN).await;
    let asked_before = asked(&engines)[0];
    engines[0].fault(Fault { delay_ms: 600_000, ..Fault::default() }, 1);
    let mut first = crate::support::Connection::open(gateway.address).await;
    first.send(&request()).await;
    gateway.until_metric("kvgate_endpoint_in_flight", &[], 1.0).await;
    for _ in 0..5 {
        let answer = send(&gateway).await;
        assert_eq!((answer.status, &*answer.code()), (503, "no_healthy_backend"));
        assert_eq!(answer.field("retry-after"), Some("1"));
    }
    // it leaves, and its place is free again
    drop(first);
    gateway.until_idle().await;
    assert_eq!(send(&gateway).await.status, 200);
    assert!(asked(&engines)[0] > asked_before);
    gateway.until_metric(BREAKER, &[], CLOSED).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_line_in_the_log_says_who_and_why() {
    let engines = engines(2).await;
    let rule = Rule::new("words", &["round-robin"]).engines(&engines).table("retry", "attempts = 1");
    let gateway = Setup::new(&[rule]).health(SHORT).spawn().await;
    engines[1].fault(status(500), 3);
    until("its breaker is open", async || {
        send(&gateway).await;
        state(&gateway, 1).await != CLOSED
    })
    .await;
    until("its breaker is closed", async || {
        send(&gateway).await;
        state(&gateway, 1).await == CLOSED
    })
    .await;
    until("it is written", async || gateway.log().contains("breaker closed: ")).await;
    let log = gateway.log();
    let opened = "breaker open: 3 failures in a row, the last by status 500";
    for what in ["a request failed on the engine: status 500", opened, "breaker closed: "] {
        let lines: Vec<_> = log.lines().filter(|line| line.contains(what)).collect();
        assert_eq!(lines.len(), 1, "{what}: {log}");
        let address = engines[1].address().to_string();
        for part in ["WARN", "words", "ep_idx=1", &address] {
            assert!(lines[0].contains(part), "{part}: {}", lines[0]);
        }
    }
}

/// What is counted is the engine's: of two rules the stricter opens its breaker, in both.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_of_two_rules_has_one_breaker() {
    let engines = engines(1).await;
    let rule = |name: &str, failures| {
        let rule = Rule::new(name, &["round-robin"]).matching(&format!("path_prefix = \"/{name}\""));
        rule.engines(&engines).table("breaker", failures)
    };
    let rules = [rule("v1", "failures = 2"), rule("lax", "failures = 9")];
    let gateway = Setup::new(&rules).health("[breaker]\nopen_for = \"1h\"\n").start().await;
    engines[0].fault(status(500), 2);
    for _ in 0..2 {
        assert_eq!(send(&gateway).await.status, 500);
    }
    assert_eq!(gateway.metrics().await.all(BREAKER, &[]), [OPEN, OPEN]);
    let answer = gateway.send(&Request::get("/lax")).await;
    assert_eq!((answer.status, &*answer.code()), (503, "no_healthy_backend"));
}
