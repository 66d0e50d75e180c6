//! `kvgate replay`, as a user runs it.
#![allow(clippy::unwrap_used)]

mod command;

use command::{Done, run};
use kvgate_tests::fixture;
use serde_json::{Value, json};

const POLICIES: [&str; 10] = [
    "round-robin",
    "min-load",
    "radix-trie",
    "chwbl",
    "kv-exact-off",
    "kv-exact-hard",
    "kv-exact-soft",
    "kv-exact-adaptive",
    "kv-exact-adaptive-soft",
    "oracle",
];
/// Requests of the trace.
const REQUESTS: u64 = 226;
/// Engines that are slow enough for an excerpt to make for queues, and small enough for it to fill their caches.
const FLEET: [&str; 6] = ["--engines", "4", "--blocks", "8000", "--prefill-rate", "2000"];

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("trace.jsonl"), fixture("traces/conversation.jsonl")).unwrap();
    folder
}

fn replay(folder: &tempfile::TempDir, args: &[&str]) -> Done {
    let all: Vec<_> = ["replay"].iter().chain(args).copied().collect();
    run(folder.path(), &all)
}

fn rows(done: &Done) -> Vec<Value> {
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    done.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn number(row: &Value, pointer: &str) -> f64 {
    row.pointer(pointer).unwrap().as_f64().unwrap()
}

#[test]
fn every_policy_has_a_line_and_a_second_run_says_the_same() {
    let folder = folder();
    let args = [&["trace.jsonl", "--json", "--seed", "3"][..], &FLEET].concat();
    let done = replay(&folder, &args);
    let rows = rows(&done);
    assert_eq!(rows.iter().map(|row| row["policy"].as_str().unwrap()).collect::<Vec<_>>(), POLICIES);
    for row in &rows {
        let keys: Vec<_> = row.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(keys, ["policy", "requests", "hit_rate", "ttft_ms", "max_over_mean", "spills"]);
        assert_eq!(row["requests"], json!(REQUESTS), "{row}");
        let [mean, p50, p99] = ["mean", "p50", "p99"].map(|key| number(row, &format!("/ttft_ms/{key}")));
        assert!(0.0 < p50 && p50 <= p99 && mean <= p99, "{row}");
        assert!((1.0..=4.0).contains(&number(row, "/max_over_mean")), "{row}");
    }
    let of = |policy: &str| rows.iter().find(|row| row["policy"] == policy).unwrap();
    let (robin, oracle) = (of("round-robin"), of("oracle"));
    assert!(number(robin, "/max_over_mean") < 1.01, "{robin}");
    assert!(number(of("kv-exact-off"), "/max_over_mean") > 3.5, "without a law all go where one went");
    let hard = of("kv-exact-hard");
    assert!(number(hard, "/spills") > 0.0, "{hard}");
    assert!(number(hard, "/hit_rate") > 1.3 * number(robin, "/hit_rate"), "{hard}");
    assert!(number(oracle, "/hit_rate") > 1.5 * number(robin, "/hit_rate"), "{oracle}");
    let best = rows.iter().map(|row| number(row, "/ttft_ms/mean")).fold(f64::INFINITY, f64::min);
    assert_eq!(number(oracle, "/ttft_ms/mean"), best, "nobody beats the oracle");
    assert_eq!(replay(&folder, &args).out, done.out);
}

#[test]
fn the_table_says_how_engines_work_and_what_was_gained() {
    let folder = folder();
    let done = replay(&folder, &[&["trace.jsonl"][..], &FLEET].concat());
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    for said in [
        "226 requests in 899 s",
        "engines: 4, each with a cache of 8000 blocks of 16 tokens",
        "2000 tokens/s",
    ] {
        assert!(done.out.contains(said), "{}", done.out);
    }
    let oracle = done.out.lines().find(|line| line.starts_with("oracle")).unwrap();
    assert!(oracle.ends_with(" 100%"), "{}", done.out);
}

fn rule(tiers: &str, endpoints: usize) -> String {
    let endpoint = |n: usize| format!("[[endpoint]]\naddress = \"10.0.0.{n}:8000\"\n");
    format!("tiers = {tiers}\n{}", (1..=endpoints).map(endpoint).collect::<String>())
}

#[test]
fn a_rule_is_replayed_with_its_own_ladder_and_fleet_beside_another() {
    let folder = folder();
    std::fs::create_dir(folder.path().join("rules")).unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("gateway.toml", "");
    write("rules/exact.toml", &rule("[\"kv-exact\"]", 3));
    write("robin.toml", &rule("[\"round-robin\"]", 2));
    let args =
        ["trace.jsonl", "--config", "gateway.toml", "--rule", "exact", "--against", "robin.toml", "--json"];
    let seen = rows(&replay(&folder, &args));
    assert_eq!(
        seen.iter().map(|row| row["policy"].as_str().unwrap()).collect::<Vec<_>>(),
        ["exact", "robin"]
    );
    assert!(number(&seen[0], "/hit_rate") > number(&seen[1], "/hit_rate"), "{seen:?}");
    assert_eq!(number(&seen[1], "/max_over_mean"), 1.0);
    let told = replay(&folder, &["trace.jsonl", "--config", "gateway.toml", "--rule", "none"]);
    assert_eq!(told.code, 1);
    assert!(told.err.contains("neither a file nor the name of a rule; there are: exact"), "{}", told.err);
    write("bad.toml", &rule("[\"round-robn\"]", 2));
    let told = replay(&folder, &["trace.jsonl", "--rule", "bad.toml"]);
    assert_eq!(told.code, 1);
    assert!(told.err.contains("bad.toml:1:10: tiers[0]: is not a tier"), "{}", told.err);
}

#[test]
fn what_is_wrong_is_told_with_its_place() {
    let folder = folder();
    let good = r#"{"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [0]}"#;
    std::fs::write(folder.path().join("bad.jsonl"), format!("{good}\n{{\"timestamp\": 1}}\n")).unwrap();
    std::fs::write(folder.path().join("empty.jsonl"), "\n").unwrap();
    std::fs::write(folder.path().join("trace.gz"), [0x1f, 0x8b, 8, 0]).unwrap();
    for (args, code, said) in [
        (&["trace.gz"][..], 1, "kvgate: trace.gz: is compressed"),
        (&["bad.jsonl"], 1, "kvgate: bad.jsonl:2: "),
        (&["empty.jsonl"], 1, "kvgate: empty.jsonl: holds no request to replay"),
        (&["missing.jsonl"], 1, "kvgate: missing.jsonl: "),
        (&["trace.jsonl", "--blocks", "2"], 1, "kvgate: trace.jsonl: no request fits a cache of 2 blocks"),
        (&[], 2, "error: "),
        (&["trace.jsonl", "--engines", "0"], 2, "error: "),
        (&["trace.jsonl", "--engines", "2", "--rule", "r.toml"], 2, "error: "),
        (&["trace.jsonl", "--against", "r.toml"], 2, "error: "),
    ] {
        let done = replay(&folder, args);
        assert_eq!((done.code, done.out.as_str()), (code, ""), "{args:?}");
        assert!(done.err.starts_with(said), "{args:?}: {}", done.err);
    }
}
