//! Pairs whose engines fail at their part, by the policy that holds where nothing is said.

use kvgate_sim::{Fault, Role, Sim};

use super::{BREAKER, CLOSED, FLIPS, OPEN, asked};
use crate::pairs::{Pair, body, parts, request, rule, set, with_parts};
use crate::support::{Connection, Gateway, Rule, Setup, engine, until};

const FAILURES: &str = "kvgate_endpoint_failures_total";
const ATTEMPTS: &str = "kvgate_endpoint_attempts_total";
const RESCUED: &str = "loxilb_pd_fallback_to_normal_total";
/// What holds where nothing is said.
const USUAL: &str = "[probe]\nmode = \"off\"\n";
const SHORT: &str = "[breaker]\nopen_for = \"300ms\"\n[probe]\nmode = \"off\"\n";
const LONG: &str = "[breaker]\nopen_for = \"1h\"\n[probe]\nmode = \"off\"\n";
const ROLES: [&str; 2] = ["prefill", "decode"];

async fn pair(prefill: usize, decode: usize, rule: Rule, health: &'static str) -> Pair {
    let positions = (0..prefill).collect();
    let (prefill, decode) = (parts(Role::Prefill, prefill).await, parts(Role::Decode, decode).await);
    let gateway = Setup::new(&[with_parts(rule, &prefill, &decode)]).health(health).start().await;
    Pair { prefill, decode, positions, gateway }
}

fn in_turn() -> Rule {
    rule(&["round-robin"]).top("decode_tiers = [\"round-robin\"]")
}

/// The first engine of a part.
fn first<'a>(pair: &'a mut Pair, role: &str) -> &'a mut Sim {
    let engines = if role == "prefill" { &mut pair.prefill } else { &mut pair.decode };
    &mut engines[0]
}

/// What a metric says of an endpoint, by its engine.
async fn of(gateway: &Gateway, name: &str, engine: &Sim) -> f64 {
    gateway.metric(name, &["service=\"pair\"", &format!("ep=\"{}\"", engine.address())]).await
}

async fn succeeds(gateway: &Gateway, seed: u32) {
    let answer = gateway.send(&request(&body(seed))).await;
    assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
}

/// Sends requests, which all succeed, until the engine has failed so often that its breaker opened.
async fn opens(gateway: &Gateway, engine: &Sim) {
    until("its breaker has opened", async || {
        succeeds(gateway, 1).await;
        of(gateway, FLIPS, engine).await >= 1.0
    })
    .await;
    counted(gateway).await;
}

/// Every request is over, and what is counted of it is.
async fn counted(gateway: &Gateway) {
    gateway.until_idle().await;
    gateway.until_metric("kvgate_requests_open", &[], 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_failures_at_a_part_and_others_do_it() {
    for role in ROLES {
        let mut pair = pair(2, 2, in_turn(), USUAL).await;
        first(&mut pair, role).refuse(true).await.unwrap();
        let address = first(&mut pair, role).address();
        let engine = pair.prefill.iter().chain(&pair.decode).find(|e| e.address() == address).unwrap();
        opens(&pair.gateway, engine).await;
        let told = async || {
            let of = async |name| of(&pair.gateway, name, engine).await;
            (of(BREAKER).await, of(FLIPS).await, of(FAILURES).await, of(ATTEMPTS).await)
        };
        assert_eq!(told().await, (OPEN, 1.0, 3.0, 3.0), "{role}");
        for seed in 0..6 {
            succeeds(&pair.gateway, seed).await;
        }
        counted(&pair.gateway).await;
        assert_eq!(told().await, (OPEN, 1.0, 3.0, 3.0), "{role}: nobody asked it");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_is_back_is_found_by_a_real_request() {
    for role in ROLES {
        let mut pair = pair(2, 2, in_turn(), SHORT).await;
        first(&mut pair, role).refuse(true).await.unwrap();
        let at = usize::from(role == "decode") * 2;
        let label = [format!("ep_idx=\"{at}\""), "service=\"pair\"".to_owned()];
        let metric =
            async |gateway: &Gateway, name| gateway.metric(name, &label.each_ref().map(String::as_str)).await;
        until("its breaker has opened", async || {
            succeeds(&pair.gateway, 1).await;
            metric(&pair.gateway, FLIPS).await >= 1.0
        })
        .await;
        first(&mut pair, role).refuse(false).await.unwrap();
        until("its breaker is closed", async || {
            succeeds(&pair.gateway, 1).await;
            metric(&pair.gateway, BREAKER).await == CLOSED
        })
        .await;
        let before = asked(std::slice::from_ref(first(&mut pair, role)))[0];
        assert!(before > 0, "{role}");
        for seed in 0..4 {
            succeeds(&pair.gateway, seed).await;
        }
        assert!(asked(std::slice::from_ref(first(&mut pair, role)))[0] > before, "{role}: it has its turns");
        pair.is_idle().await;
    }
}

/// Nobody is left for a part: whoever does all of it does, and where there is none the client is told when to come back.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_part_a_request_is_rescued_or_told() {
    for role in ROLES {
        let (prefill, decode) = (parts(Role::Prefill, 1).await, parts(Role::Decode, 1).await);
        let whole = engine().await;
        let alone = in_turn().table("legs", "without_prefill = \"refuse\"");
        let rules = with_parts(alone, &prefill, &decode).engine(&whole);
        let gateway = Setup::new(&[rules]).health(LONG).start().await;
        let mut pair = Pair { prefill, decode, positions: vec![0], gateway };
        first(&mut pair, role).refuse(true).await.unwrap();
        let failing = if role == "prefill" { &pair.prefill[0] } else { &pair.decode[0] };
        opens(&pair.gateway, failing).await;
        let (rescued, before) = (pair.counter(RESCUED).await, asked(std::slice::from_ref(&whole))[0]);
        for seed in 0..4 {
            succeeds(&pair.gateway, seed).await;
        }
        counted(&pair.gateway).await;
        assert_eq!(asked(std::slice::from_ref(&whole))[0], before + 4, "{role}");
        assert_eq!(pair.counter(RESCUED).await, rescued + 4.0, "{role}");
        let asked_before = [asked(&pair.prefill), asked(&pair.decode)];
        set(&pair.gateway, &whole, "disabled").await;
        let answer = pair.gateway.send(&request(&body(1))).await;
        assert_eq!((answer.status, &*answer.code()), (503, "pd_pool_unavailable"), "{role}: {answer:?}");
        let wait: u64 = answer.field("retry-after").unwrap().parse().unwrap();
        assert!((3000..=3600).contains(&wait), "{role}: {wait}");
        assert_eq!(
            [asked(&pair.prefill), asked(&pair.decode)],
            asked_before,
            "no prompt is computed for nobody"
        );
        pair.is_idle().await;
    }
}

/// One part asked for a pause; what the other does decides what the client is told.
#[tokio::test(flavor = "multi_thread")]
async fn a_pause_of_one_part_is_not_all_that_is_missing() {
    let busy = |seconds| Fault { status: Some(429), retry_after: Some(seconds), ..Fault::default() };
    for (without_prefill, decode_is_gone) in [("refuse", true), ("refuse", false), ("recompute", true)] {
        let (prefill, mut decode) = (parts(Role::Prefill, 1).await, parts(Role::Decode, 1).await);
        let beside = |name: &str, engine: &Sim| {
            let rule = Rule::new(name, &["round-robin"]).matching(&format!("hosts = [{name:?}]"));
            rule.endpoint(engine.address(), "")
        };
        let rules = [
            with_parts(
                in_turn().table("legs", &format!("without_prefill = {without_prefill:?}")),
                &prefill,
                &decode,
            ),
            beside("first", &prefill[0]),
            beside("second", &decode[0]),
        ];
        let gateway = Setup::new(&rules).health(LONG).start().await;
        prefill[0].fault(busy(40), 1);
        let ask = async |name| gateway.send(&request(&body(1)).host(name)).await.status;
        assert_eq!(ask("first").await, 429);
        if decode_is_gone {
            decode[0].refuse(true).await.unwrap();
            for _ in 0..3 {
                assert_eq!(ask("second").await, 503);
            }
            assert_eq!(of(&gateway, BREAKER, &decode[0]).await, OPEN);
        } else {
            decode[0].fault(busy(55), 1);
            assert_eq!(ask("second").await, 429);
        }
        let answer = gateway.send(&request(&body(1))).await;
        let wait: u64 = answer.field("retry-after").unwrap().parse().unwrap();
        let told = (answer.status, &*answer.code());
        if decode_is_gone {
            assert_eq!(told, (503, "pd_pool_unavailable"), "{answer:?}");
            assert!((3000..=3600).contains(&wait), "{wait}");
        } else {
            assert_eq!(told, (429, "engines_busy"), "{answer:?}");
            assert!((41..=55).contains(&wait), "when the last part is back: {wait}");
        }
    }
}

/// Whoever waits for a place is handed that of an engine that may be tried again, and is the one that finds out.
#[tokio::test(flavor = "multi_thread")]
async fn who_waits_finds_out_whether_an_engine_is_back() {
    for role in ROLES {
        let keys = format!("{role}_max_in_flight = 1\nqueue_depth = 8\nqueue_wait = \"60s\"");
        let rule = rule(&["admission", "round-robin"]).top("decode_tiers = [\"admission\", \"round-robin\"]");
        let mut pair = pair(2, 2, rule.table("tier.admission", &keys), SHORT).await;
        first(&mut pair, role).refuse(true).await.unwrap();
        let both = if role == "prefill" { &pair.prefill } else { &pair.decode };
        let [failing, other] = &both[..] else { panic!("two") };
        opens(&pair.gateway, failing).await;
        // meanwhile the other is full, and some wait
        set(&pair.gateway, failing, "disabled").await;
        pair.is_idle().await;
        let long = match role {
            "prefill" => Fault { delay_ms: 600_000, ..Fault::default() },
            _ => Fault { stall_after: Some(1), ..Fault::default() },
        };
        other.fault(long, 1);
        let ask = async |seed| {
            let mut client = Connection::open(pair.gateway.address).await;
            client.send(&request(&crate::pairs::stream(seed))).await;
            client
        };
        let place = format!("ep=\"{}\"", other.address());
        let full = ask(1).await;
        pair.gateway.until_metric("kvgate_endpoint_in_flight", &[&place], 1.0).await;
        let mut waits = Vec::new();
        for seed in 0..3 {
            waits.push(ask(seed).await);
            let label = format!("role={role:?}");
            pair.gateway.until_metric("kvgate_admission_queue_length", &[&label], f64::from(seed + 1)).await;
        }
        let address = failing.address();
        first(&mut pair, role).refuse(false).await.unwrap();
        let engine = pair.prefill.iter().chain(&pair.decode).find(|e| e.address() == address).unwrap();
        set(&pair.gateway, engine, "active").await;
        for mut client in waits {
            let answer = client.answer().await;
            assert_eq!((answer.status, answer.complete), (200, true), "{role}: {answer:?}");
        }
        assert_eq!(engine.log().len(), 3, "{role}: the other is full");
        until("its breaker is closed", async || of(&pair.gateway, BREAKER, engine).await == CLOSED).await;
        drop(full);
        pair.is_idle().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_keeps_what_is_known_and_turning_it_off_is_told() {
    let (mut prefill, decode) = (parts(Role::Prefill, 2).await, parts(Role::Decode, 1).await);
    let gateway = Setup::new(&[with_parts(in_turn(), &prefill, &decode)]).health(USUAL).spawn().await;
    prefill[0].refuse(true).await.unwrap();
    opens(&gateway, &prefill[0]).await;
    let told = async || {
        let of = async |name| of(&gateway, name, &prefill[0]).await;
        (of(BREAKER).await, of(FLIPS).await, of(ATTEMPTS).await)
    };
    assert_eq!(told().await, (OPEN, 1.0, 3.0));
    let changed = in_turn().table("timeouts", "connect = \"2s\"");
    gateway.change(&with_parts(changed, &prefill, &decode)).await;
    for seed in 0..4 {
        succeeds(&gateway, seed).await;
    }
    counted(&gateway).await;
    assert_eq!(told().await, (OPEN, 1.0, 3.0), "nobody asked it");
    let line = "breaker closed: by the rules nothing opens it any more";
    assert!(!gateway.log().contains(line));
    let off = in_turn().table("breaker", "failures = 0");
    gateway.change(&with_parts(off, &prefill, &decode)).await;
    let (state, flips, _) = told().await;
    assert_eq!((state, flips), (CLOSED, 2.0));
    until("it is told", async || gateway.log().contains(line)).await;
    assert!(gateway.log().lines().any(|l| l.contains(line) && l.contains(&prefill[0].address().to_string())));
}
