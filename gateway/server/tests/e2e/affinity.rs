//! Tiers that need nothing of their engines: like goes to like, sessions stay, turns are taken.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use kvgate_sim::Sim;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::{
    Answer, Connection, Gateway, MODEL, Request, Rule, Setup, host, served, silent_engine, until,
};

const MISSES: &str = "kvgate_tier_misses_total";

async fn silent(count: usize) -> Vec<Sim> {
    let mut engines = Vec::new();
    for _ in 0..count {
        engines.push(silent_engine().await);
    }
    engines
}

fn chat(messages: &[Value]) -> Request {
    let body = json!({"model": MODEL, "messages": messages, "max_tokens": 2});
    Request::json("/v1/chat/completions", &body)
}

fn text(prompt: &str) -> Request {
    Request::json("/v1/completions", &json!({"model": MODEL, "prompt": prompt, "max_tokens": 2}))
}

async fn ask(gateway: &Gateway, request: &Request) -> Answer {
    let answer = gateway.send(request).await;
    assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    answer
}

async fn misses(gateway: &Gateway, reason: &str) -> f64 {
    gateway.metric(MISSES, &["tier=\"radix-trie\"", &format!("reason={reason:?}")]).await
}

fn trie(engines: &[Sim]) -> Rule {
    Rule::new("words", &["radix-trie", "round-robin"]).engines(engines)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_stays_with_the_engine_of_its_first_turn() {
    let engines = silent(4).await;
    let gateway = Setup::new(&[trie(&engines)]).start().await;
    let mut conversations: Vec<Vec<Value>> = (0..8)
        .map(|n| vec![json!({"role": "system", "content": format!("{n} is the number of this talk")})])
        .collect();
    let mut homes = Vec::new();
    for turn in 0..3 {
        for (n, messages) in conversations.iter_mut().enumerate() {
            messages.push(json!({"role": "user", "content": format!("turn {turn}: {}", "word ".repeat(20))}));
            let answer = ask(&gateway, &chat(messages)).await;
            if turn == 0 {
                assert_eq!(answer.tier(), "round-robin");
                homes.push(answer.endpoint().to_owned());
            } else {
                assert_eq!((answer.tier(), answer.endpoint()), ("radix-trie", &*homes[n]));
                let engine = engines.iter().find(|e| e.address().to_string() == homes[n]).unwrap();
                assert!(served(engine, answer.id()).unwrap().cached_tokens > 0);
            }
            let said = answer.json()["choices"][0]["message"]["content"].clone();
            messages.push(json!({"role": "assistant", "content": said}));
        }
    }
    let mut used = homes.clone();
    used.sort_unstable();
    used.dedup();
    assert_eq!(used.len(), 4, "the first turns went to all");
    assert_eq!(misses(&gateway, "unseen").await + misses(&gateway, "shallow").await, 8.0);
    let metrics = gateway.metrics().await;
    assert!(metrics.get("loxilb_pd_trie_nodes", &["service=\"words\""]) >= 8.0);
    assert!(metrics.get("kvgate_radix_trie_bytes", &["service=\"words\""]) > 1000.0);
    assert_eq!(metrics.get("kvgate_radix_trie_evicted_nodes_total", &["service=\"words\""]), 0.0);
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn too_little_in_common_and_too_much_on_one_engine_are_left_to_the_next_tier() {
    let mut engines = silent(3).await;
    let gateway = Setup::new(&[trie(&engines)]).start().await;
    let known = "known words ".repeat(30);
    let home = ask(&gateway, &text(&known)).await.endpoint().to_owned();
    let little = known[..60].to_owned() + &"others ".repeat(100);
    assert_eq!(ask(&gateway, &text(&little)).await.tier(), "round-robin");
    assert_eq!(misses(&gateway, "shallow").await, 1.0);
    let enough = known[..240].to_owned() + &"more ".repeat(20);
    let answer = ask(&gateway, &text(&enough)).await;
    assert_eq!((answer.tier(), answer.endpoint()), ("radix-trie", &*home));
    // four more than on any other
    let mut held = Vec::new();
    for n in 1..=4 {
        let mut client = Connection::open(gateway.address).await;
        client.send(&text(&known).field("x-sim-fault", "{\"delay_ms\": 600000}")).await;
        let label = format!("ep=\"{home}\"");
        gateway.until_metric("kvgate_endpoint_in_flight", &[&label], f64::from(n)).await;
        held.push(client);
    }
    let spilled = ask(&gateway, &text(&known)).await;
    assert_eq!(spilled.tier(), "round-robin");
    assert_eq!(misses(&gateway, "imbalance").await, 1.0);
    drop(held);
    gateway.until_idle().await;
    // the one that saw most is gone: the next that saw anything
    let at = engines.iter().position(|e| e.address().to_string() == home).unwrap();
    engines[at].refuse(true).await.unwrap();
    let answer = ask(&gateway, &text(&enough)).await;
    assert_eq!(answer.tier(), "radix-trie");
    assert_ne!(answer.endpoint(), home);
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_keeps_what_was_seen_of_engines_that_stay() {
    let engines = silent(3).await;
    let gateway = Setup::new(&[trie(&engines)]).spawn().await;
    let prompts: Vec<String> = (0..3).map(|n| format!("{n} ") + &"word ".repeat(50)).collect();
    let mut homes = Vec::new();
    for prompt in &prompts {
        homes.push(ask(&gateway, &text(prompt)).await.endpoint().to_owned());
    }
    let nodes = gateway.metric("loxilb_pd_trie_nodes", &[]).await;
    gateway.setup.write(&trie(&engines[1..]).table("tier.radix-trie", "threshold_pct = 10"));
    until("the change is in force", async || {
        gateway.metrics().await.all("loxilb_pd_ep_info", &[]).len() == 2
    })
    .await;
    for (prompt, home) in prompts.iter().zip(&homes).filter(|(_, home)| **home != homes[0]) {
        let answer = ask(&gateway, &text(prompt)).await;
        assert_eq!((answer.tier(), answer.endpoint()), ("radix-trie", &**home));
    }
    assert_eq!(gateway.metric("loxilb_pd_trie_nodes", &[]).await, nodes - 1.0);
    assert_eq!(ask(&gateway, &text(&prompts[0])).await.tier(), "round-robin", "its engine is gone");
    gateway.until_idle().await;
}

/// An engine that gives every client that has none a session, in a header and in a cookie.
async fn giving(name: &'static str) -> SocketAddr {
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for given in 0.. {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    if !stream.read_buf(&mut head).await.is_ok_and(|n| n > 0) {
                        return;
                    }
                }
                let asked = String::from_utf8_lossy(&head).to_ascii_lowercase();
                let mut answer = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n".to_owned();
                if !asked.contains("mcp-session-id:") {
                    answer.push_str(&format!("Mcp-Session-Id: {name}-{given}\r\n"));
                }
                if !asked.contains("sid=") {
                    answer.push_str(&format!("Set-Cookie: sid={name}-{given}; Path=/\r\n"));
                }
                answer.push_str("\r\nok");
                let _ = stream.write_all(answer.as_bytes()).await;
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_stay_where_they_were_given() {
    let engines = [giving("a").await, giving("b").await, giving("c").await];
    let rule = |host: &str, keys: &str| {
        let rule = Rule::new(host, &["persist", "weighted-round-robin"])
            .matching(&format!("hosts = [{host:?}]"))
            .table("tier.persist", keys);
        engines.iter().fold(rule, |rule, engine| rule.endpoint(engine, ""))
    };
    let gateway = Setup::new(&[
        rule("mcp", "by = \"header\"\nname = \"mcp-session-id\""),
        rule("cookie", "by = \"cookie\"\nname = \"sid\""),
        rule("query", "by = \"query\"\nname = \"session\""),
        rule("client", "by = \"client-ip\""),
    ])
    .start()
    .await;
    for host in ["mcp", "cookie"] {
        let mut given = BTreeMap::new();
        for _ in 0..9 {
            let first = ask(&gateway, &Request::get("/mcp").host(host)).await;
            assert_eq!(first.tier(), "weighted-round-robin");
            let key = match host {
                "mcp" => ("mcp-session-id", first.field("mcp-session-id").unwrap().to_owned()),
                _ => ("cookie", first.field("set-cookie").unwrap().split(';').next().unwrap().to_owned()),
            };
            given.insert(key, first.endpoint().to_owned());
        }
        let mut homes: Vec<_> = given.values().collect();
        homes.sort_unstable();
        homes.dedup();
        assert_eq!((given.len(), homes.len()), (9, 3));
        for ((name, value), home) in given.iter().chain(&given) {
            let next = ask(&gateway, &Request::get("/mcp").host(host).field(name, value)).await;
            assert_eq!((next.tier(), next.endpoint()), ("persist", home.as_str()), "{name}: {value}");
        }
    }
    for session in 0..5 {
        let request = Request::get(&format!("/x?a=1&session={session}")).host("query");
        let first = ask(&gateway, &request).await;
        assert_eq!(first.tier(), "persist");
        assert_eq!(ask(&gateway, &request).await.endpoint(), first.endpoint());
    }
    assert_eq!(ask(&gateway, &Request::get("/x").host("query")).await.tier(), "weighted-round-robin");
    let first = ask(&gateway, &Request::get("/").host("client")).await;
    for _ in 0..6 {
        let next = ask(&gateway, &Request::get("/").host("client")).await;
        assert_eq!((next.tier(), next.endpoint()), ("persist", first.endpoint()));
    }
    for (service, bindings) in [("mcp", 9.0), ("cookie", 9.0), ("query", 5.0), ("client", 1.0)] {
        let label = format!("service={service:?}");
        assert_eq!(gateway.metric("kvgate_persist_bindings", &[&label]).await, bindings);
    }
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_count_for_turns_and_for_connections() {
    let engines = silent(2).await;
    let weighted = |name: &str, tier: &str| {
        Rule::new(name, &[tier])
            .matching(&format!("hosts = [{name:?}]"))
            .endpoint(engines[0].address(), "weight = 3")
            .endpoint(engines[1].address(), "")
    };
    let gateway =
        Setup::new(&[weighted("turns", "weighted-round-robin"), weighted("least", "least-connections")])
            .start()
            .await;
    let heavy = engines[0].address().to_string();
    let mut turns = Vec::new();
    for _ in 0..8 {
        let answer = ask(&gateway, &text("word").host("turns")).await;
        turns.push(answer.endpoint() == heavy);
    }
    assert_eq!(turns, [true, true, false, true].repeat(2));
    let mut held = Vec::new();
    for n in 1..=8 {
        let mut client = Connection::open(gateway.address).await;
        client.send(&text("word").host("least").field("x-sim-fault", "{\"delay_ms\": 600000}")).await;
        gateway.until_metric("kvgate_leases_open", &[], f64::from(n)).await;
        held.push(client);
    }
    let label = format!("ep=\"{heavy}\"");
    let on_heavy = gateway.metric("kvgate_endpoint_in_flight", &["service=\"least\"", &label]).await;
    assert_eq!(on_heavy, 6.0, "three for one");
    drop(held);
    until("the engines are rid of them", async || {
        engines.iter().flat_map(Sim::log).all(|served| served.ended != kvgate_sim::Ended::Open)
    })
    .await;
    gateway.until_idle().await;
}
