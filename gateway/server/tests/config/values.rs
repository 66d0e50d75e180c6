//! What valid files become.

use std::time::Duration;

use kvgate::config::LogFormat;
use kvgate_core::Role;
use kvgate_tiers::TIERS;
use serde_json::json;

use crate::folder::{Folder, KINDS, RULE};

#[test]
fn an_empty_gateway_toml_is_complete() {
    let folder = Folder::with(RULE);
    let config = folder.load().unwrap();
    let gateway = &config.gateway;
    assert_eq!(gateway.listeners.len(), 1);
    assert_eq!(gateway.listeners[0].name, "edge");
    assert_eq!(gateway.listeners[0].address.to_string(), "127.0.0.1:8080");
    assert_eq!(gateway.admin.address.to_string(), "127.0.0.1:11111");
    assert_eq!(gateway.admin.token_file, None);
    assert_eq!(gateway.server.rules, folder.path("rules"));
    assert_eq!(gateway.server.grace_period, Duration::from_secs(30));
    assert_eq!((gateway.limits.body, gateway.server.body_memory), (16 << 20, 1 << 30));
    let feed = &gateway.feed;
    assert_eq!((feed.backoff_min, feed.backoff_max), (Duration::from_millis(200), Duration::from_secs(5)));
    let rule = &config.rules[0];
    assert_eq!((rule.name.as_str(), rule.engine.name), ("one", "vllm"));
    assert_eq!(rule.endpoints[0].role, Role::Any);
    assert_eq!(rule.endpoints[0].kv_events, None);
    assert_eq!(rule.timeouts, gateway.timeouts);
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
}

#[test]
fn everything_given_is_taken() {
    let folder = Folder::with(
        r#"
        name = "all"
        id = 7
        engine = "sglang"
        shape = "pool"
        tiers = ["session", "kv-exact"]
        explain = true
        [match]
        listener = "in"
        hosts = ["LLM.Example.com"]
        path_prefix = "/v1/"
        models = ["m"]
        [events]
        port = 6000
        replay_port_offset = 5
        [tier.session]
        ttl = "5s"
        [tier.kv-exact]
        contract = { mode = "auto", block_size = 0x20 }
        cache = 4_096
        [tier.kv-exact.lora]
        sql = "/adapters/sql"
        [retry]
        attempts = 1
        [timeouts]
        idle = "7s"
        [[endpoint]]
        address = "[::1]:8001"
        role = "any"
        [[endpoint]]
        address = "H:8002"
        weight = 3
        tls = "Engine.example.com"
        kv_events = "tcp://h:7000"
        kv_replay = "tcp://h:7100"
        "#,
    )
    .write(
        "gateway.toml",
        r#"
        [server]
        rules = "rules"
        threads = 3
        grace_period = "1m"
        [[listener]]
        name = "in"
        address = "0.0.0.0:80"
        expose_routing = true
        [admin]
        address = "[::1]:1"
        [log]
        format = "json"
        [limits]
        body = 2048
        [retry]
        attempts = 9
        statuses = [502]
        [retry_budget]
        percent = 50
        [timeouts]
        idle = "9s"
        total = "36h"
        "#,
    );
    let config = folder.load().unwrap();
    assert_eq!(config.warnings.len(), 0, "{:?}", config.warnings);
    let gateway = &config.gateway;
    assert_eq!((gateway.server.threads, gateway.server.grace_period), (3, Duration::from_secs(60)));
    assert!(gateway.listeners[0].expose_routing);
    assert_eq!(gateway.log.format, LogFormat::Json);
    let rule = &config.rules[0];
    assert_eq!((rule.name.as_str(), rule.id, rule.explain), ("all", Some(7), true));
    assert_eq!(rule.tiers, ["session", "kv-exact"]);
    assert_eq!(rule.matches.hosts, ["llm.example.com"]);
    assert_eq!(rule.matches.path_prefix, "/v1");
    assert_eq!(rule.limits.body, 2048);
    assert_eq!(
        (rule.retry.attempts, rule.retry.statuses.as_slice(), rule.retry.busy),
        (1, &[502][..], true),
        "attempts its own, statuses from gateway.toml, the rest by default"
    );
    assert_eq!((gateway.retry_budget.percent, gateway.retry_budget.floor), (50, 10));
    let seconds = Duration::from_secs;
    assert_eq!((rule.timeouts.idle, rule.timeouts.total), (seconds(7), seconds(36 * 3600)));
    let kv = json!({
        "contract": {"mode": "auto", "block_size": 32}, "lora": {"sql": "/adapters/sql"},
        "min_match_tokens": 16, "cache": "4096B"
    });
    assert_eq!(serde_json::Value::Object(rule.tier["kv-exact"].0.clone()), kv);
    assert_eq!(rule.tier["session"].0["ttl"], "5s");
    let [one, two] = rule.endpoints.as_slice() else { panic!("{:?}", rule.endpoints) };
    assert_eq!((one.role, one.weight), (Role::Any, 1));
    assert_eq!(one.kv_events.as_deref(), Some("tcp://[::1]:6000"));
    assert_eq!(one.kv_replay.as_deref(), Some("tcp://[::1]:6005"));
    assert_eq!((two.role, two.weight), (Role::Any, 3));
    assert_eq!(two.address, "h:8002");
    assert_eq!(two.tls.as_deref(), Some("engine.example.com"));
    assert_eq!(two.kv_events.as_deref(), Some("tcp://h:7000"));
    assert_eq!(two.kv_replay.as_deref(), Some("tcp://h:7100"));
}

#[test]
fn the_usual_ladder() {
    let rule = |top: &str| {
        let folder = Folder::with(&format!("{top}\n[[endpoint]]\naddress = \"127.0.0.1:8001\"\n"));
        let mut config = folder.load().unwrap();
        let rule = config.rules.remove(0);
        (rule.tiers, rule.endpoints[0].kv_events.clone())
    };
    let events = Some("tcp://127.0.0.1:5557".to_owned());
    assert_eq!(rule(""), (vec!["kv-exact"], events.clone()));
    assert_eq!(rule("engine = \"llamacpp\""), (vec![], None));
    assert_eq!(rule("engine = \"trtllm\"").1, None, "it hands its events out where it serves");
    assert_eq!(rule("tiers = []"), (vec![], None));
    assert_eq!(rule("tiers = []\nevents = {}").1, events, "asked for without the tier");
    assert_eq!(rule("events.port = 0").1, None);
}

#[test]
fn two_rules_on_one_engine_may_read_the_same_events() {
    let rule = |model: &str| {
        format!("tiers = [\"kv-exact\"]\nmatch.models = [\"{model}\"]\n[[endpoint]]\naddress = \"h:8001\"\n")
    };
    let folder = Folder::new()
        .write("tokenizers/a/tokenizer.json", "")
        .write("tokenizers/b/tokenizer.json", "")
        .write("rules/a.toml", rule("a"))
        .write("rules/b.toml", rule("b"));
    assert_eq!(folder.problems(), "taken\n");
}

#[test]
fn rules_are_the_toml_files_without_a_dot_in_front() {
    let folder = Folder::with(RULE)
        .write("rules/README.md", "no rule")
        .write("rules/.one.toml", "no rule")
        .write("rules/one.toml.bak", "no rule")
        .write("rules/..2026/one.toml", "no rule");
    std::os::unix::fs::symlink("missing", folder.path("rules/.#one.toml")).unwrap();
    assert_eq!(folder.load().unwrap().rules.len(), 1);
}

#[test]
fn line_ends_and_a_byte_order_mark_are_taken() {
    let folder = Folder::with(&format!("\u{feff}{}", RULE.replace('\n', "\r\n")));
    assert_eq!(folder.problems(), "taken\n");
}

#[test]
fn later_problems_point_into_the_file() {
    let folder = Folder::with(&format!("{RULE}[tier.session]\nttl = \"9s\"\n"));
    let rule = &folder.load().unwrap().rules[0];
    let at = |key: &str| folder.plain(rule.error(key, "wrong"));
    assert_eq!(at("tier.session.ttl"), "rules/one.toml:5:7: tier.session.ttl: wrong");
    assert_eq!(at("tier.session.max"), "rules/one.toml:4:1: tier.session.max: wrong");
    assert_eq!(at("tier.kv-exact.law.mode"), "rules/one.toml:4:2: tier.kv-exact.law.mode: wrong");
    assert_eq!(at("limits.body"), "rules/one.toml:1:1: limits.body: wrong");
}

/// A default that its own key would refuse would be left out without a word.
#[test]
fn every_default_is_a_value_of_its_key() {
    let schema = kvgate::config::schema(TIERS);
    let sections = schema.gateway.iter().chain(&schema.rule).map(|s| (s.table.as_str(), &s.keys));
    let mut count = 0;
    for (table, keys) in sections.chain(schema.tiers.iter().map(|t| (t.name, &t.keys))) {
        for key in keys {
            count += 1;
            assert_eq!(key.default.is_some(), !key.written.is_empty(), "{table} {}", key.key);
            assert!(!key.doc.is_empty() && !key.doc.contains("  "), "{table} {}", key.key);
        }
    }
    assert!(count > 60, "{count} keys");
}

#[test]
fn engines_are_those_of_the_table() {
    let schema = kvgate::config::schema(KINDS);
    let words = &schema.rule[0].keys.iter().find(|key| key.key == "engine").unwrap().schema["enum"];
    let known: Vec<_> = kvgate_engines::ENGINES.iter().map(|engine| engine.name).collect();
    assert_eq!(*words, json!(known));
}
