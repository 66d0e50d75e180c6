//! Requests that begin alike meet on one engine, within its bound.

use std::collections::{BTreeMap, BTreeSet};

use kvgate_sim::Sim;
use serde_json::{Value, json};

use crate::support::{
    Connection, Gateway, MODEL, Request, Rule, Setup, completion, engine_with, prompt, silent_engine,
};

const SELECTORS: [&str; 3] = ["chwbl", "wrr-hash", "gpu-aware"];

fn rule(tier: &str, engines: &[Sim]) -> Rule {
    Rule::new(tier, &[tier]).matching(&format!("hosts = [{tier:?}]")).top("explain = true").engines(engines)
}

async fn silent(count: usize) -> Vec<Sim> {
    let mut engines = Vec::new();
    for _ in 0..count {
        engines.push(silent_engine().await);
    }
    engines
}

/// Where it was served, and what it went by.
async fn ask(gateway: &Gateway, tier: &str, path: &str, body: &Value) -> (String, String) {
    asked(gateway, tier, Request::json(path, body)).await
}

async fn asked(gateway: &Gateway, tier: &str, request: Request) -> (String, String) {
    let answer = gateway.send(&request.host(tier).field("x-kvgate-explain", "1")).await;
    assert_eq!((answer.status, answer.complete, answer.tier()), (200, true, tier), "{answer:?}");
    let told: Value = serde_json::from_str(answer.field("x-kvgate-decision").unwrap()).unwrap();
    (answer.endpoint().to_owned(), told["attempts"][0]["winner"]["why"].as_str().unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_begin_alike_meet() {
    let engines = silent(4).await;
    let rules: Vec<_> = SELECTORS.iter().map(|tier| rule(tier, &engines)).collect();
    let gateway = Setup::new(&rules).spawn().await;
    for tier in SELECTORS {
        let mut used = BTreeSet::new();
        for n in 0..20 {
            let system =
                json!({"role": "system", "content": format!("you are the helper number {n} of many")});
            let user = |text: &str| json!({"role": "user", "content": text});
            let chat = |messages: &[&Value]| json!({"model": MODEL, "messages": messages, "max_tokens": 1});
            let path = "/v1/chat/completions";
            let (home, why) = ask(&gateway, tier, path, &chat(&[&system, &user("one")])).await;
            assert_eq!(why, "prefix");
            let other = ask(&gateway, tier, path, &chat(&[&system, &user("two")])).await;
            assert_eq!(other.0, home, "{tier}: one system prompt");
            used.insert(home);
            // without one, a conversation by its start, however short
            let said = json!({"role": "assistant", "content": "so it is"});
            let start = user(&format!("question {n}"));
            let (first, _) = ask(&gateway, tier, path, &chat(&[&start])).await;
            let (later, _) = ask(&gateway, tier, path, &chat(&[&start, &said, &user("why")])).await;
            assert_eq!(first, later, "{tier}: one conversation");
            // prompts by their first bytes, ids too
            let long: String = (0..100).map(|at| format!("word{} ", at * (n + 1))).collect();
            let ids = prompt(n, 200);
            for (start, more) in
                [(json!(long), json!(format!("{long} and more"))), (json!(ids[..180]), json!(ids))]
            {
                // a place is free again when the client has the last byte, whatever the framing
                let stream = n % 2 == 0;
                let complete = |prompt: &Value| json!({"model": MODEL, "prompt": prompt, "max_tokens": 1, "stream": stream});
                let (first, why) = ask(&gateway, tier, "/v1/completions", &complete(&start)).await;
                let later = ask(&gateway, tier, "/v1/completions", &complete(&more)).await;
                assert_eq!(((first, why.clone()), why.as_str()), (later, "prefix"), "{tier}: one start");
            }
            let talk = || Request::get("/v1/models").field("x-conversation-id", &format!("talk {n}"));
            let (first, why) = asked(&gateway, tier, talk()).await;
            assert_eq!((asked(&gateway, tier, talk()).await.0, why.as_str()), (first, "conversation"));
        }
        assert_eq!(used.len(), 4, "{tier}");
        let mut turns = BTreeMap::<String, usize>::new();
        for _ in 0..8 {
            let (turn, why) = asked(&gateway, tier, Request::get("/v1/models")).await;
            assert_eq!(why, "turn");
            *turns.entry(turn).or_default() += 1;
        }
        assert_eq!(turns.into_values().collect::<Vec<_>>(), [2; 4], "{tier}");
    }
    gateway.until_idle().await;
}

/// One prompt, 48 times at once, on two engines: neither has more than 1.75 times its half.
#[tokio::test(flavor = "multi_thread")]
async fn a_hot_prefix_stays_within_the_bound() {
    let mut engines = Vec::new();
    for _ in 0..2 {
        engines.push(engine_with(|c| (c.decode_us, c.events) = (50_000.0, false)).await);
    }
    let rules: Vec<_> = SELECTORS.iter().map(|tier| rule(tier, &engines)).collect();
    let gateway = Setup::new(&rules).start().await;
    for tier in SELECTORS {
        let mut body = completion(MODEL, &prompt(7, 500));
        (body["stream"], body["max_tokens"]) = (true.into(), 2000.into());
        let request = Request::json("/v1/completions", &body).host(tier);
        let clients = (0..48).map(|_| {
            let (address, request) = (gateway.address, request.clone());
            tokio::spawn(async move {
                let mut client = Connection::open(address).await;
                client.send(&request).await;
                let head = client.head().await.unwrap();
                assert_eq!(head.status, 200);
                (client, head)
            })
        });
        let mut under_way = Vec::new();
        for client in clients.collect::<Vec<_>>() {
            under_way.push(client.await.unwrap());
        }
        let mut loads = BTreeMap::<_, usize>::new();
        under_way.iter().for_each(|(_, head)| *loads.entry(head.endpoint().to_owned()).or_default() += 1);
        let most = loads.values().max();
        assert!(most.is_some_and(|most| (24..=42).contains(most)), "{tier}: {loads:?}");
        let metrics = gateway.metrics().await;
        let rule = format!("service={tier:?}");
        let gauges = metrics.all("kvgate_endpoint_in_flight", &[&rule]);
        assert_eq!(gauges.iter().sum::<f64>(), 48.0, "{tier}");
        assert!(gauges.iter().all(|load| *load <= 42.0), "{tier}: {gauges:?}");
        drop(under_way);
        gateway.until_idle().await;
    }
}

/// What waits for one engine does not wait for it alone: the next like it goes to another.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_engine_does_not_keep_the_next_one_waiting() {
    let engines = silent(2).await;
    let rules: Vec<_> = SELECTORS.iter().map(|tier| rule(tier, &engines)).collect();
    let gateway = Setup::new(&rules).start().await;
    for tier in SELECTORS {
        let body = completion(MODEL, &prompt(7, 500));
        let slow = Request::json("/v1/completions", &body).host(tier);
        let mut waits = Connection::open(gateway.address).await;
        waits.send(&slow.field("x-sim-fault", "{\"delay_ms\": 600000}")).await;
        crate::support::until("it is under way", async || {
            gateway.metrics().await.sum("kvgate_endpoint_in_flight", &[&format!("service={tier:?}")]) == 1.0
        })
        .await;
        let (_, why) = ask(&gateway, tier, "/v1/completions", &body).await;
        assert_eq!(why, "spill", "{tier}");
        drop(waits);
        gateway.until_idle().await;
    }
}
