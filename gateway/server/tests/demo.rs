//! `kvgate demo`, as a user runs it.
#![allow(clippy::unwrap_used)]

mod command;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use command::{Done, Spawned, kvgate, signal, wait, wait_until};
use serde::Deserialize;
use tempfile::TempDir;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Shown {
    requests: u64,
    errors: u64,
    policies: Policies,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Policies {
    #[serde(rename = "kv-exact")]
    exact: Policy,
    #[serde(rename = "round-robin")]
    robin: Policy,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Policy {
    hit_rate: f64,
    ttft_ms: Percentiles,
    per_endpoint: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Percentiles {
    p50: f64,
    p99: f64,
}

/// The demo, with a place of its own for temporary files.
fn demo(place: &Path, args: &[&str]) -> Command {
    let all: Vec<_> = ["demo"].iter().chain(args).copied().collect();
    let mut command = kvgate(place, &all);
    command.env("TMPDIR", place).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn finished(args: &[&str]) -> Done {
    let place = tempfile::tempdir().unwrap();
    let done = demo(place.path(), args).output().unwrap().into();
    assert_clean(&place);
    done
}

fn assert_clean(place: &TempDir) {
    let left: Vec<_> = std::fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

fn shown(done: &Done) -> Shown {
    assert_eq!(done.err, "");
    let shown: Shown = serde_json::from_str(&done.out).unwrap();
    assert_eq!((shown.requests, shown.errors), (56, 0));
    for policy in [&shown.policies.exact, &shown.policies.robin] {
        assert_eq!(policy.per_endpoint.len(), 3);
        assert_eq!(policy.per_endpoint.values().sum::<u64>(), 28);
        assert!(policy.ttft_ms.p50 > 0.0 && policy.ttft_ms.p50 <= policy.ttft_ms.p99);
    }
    shown
}

/// A number that the order of requests decides, not the clock.
fn assert_near(rate: f64, expected: f64) {
    assert!((rate - expected).abs() < 0.02, "{rate} is not near {expected}");
}

#[test]
fn is_won() {
    for args in [&["--json"][..], &["--json", "--strict"]] {
        let done = finished(args);
        let policies = shown(&done).policies;
        assert_eq!(done.code, 0, "{}", done.out);
        assert_near(policies.exact.hit_rate, 0.73);
        assert_near(policies.robin.hit_rate, 0.23);
        assert!(policies.exact.ttft_ms.p50 < policies.robin.ttft_ms.p50, "{}", done.out);
    }
}

#[test]
fn is_not_won_with_a_wrong_seed() {
    let done = finished(&["--json", "--strict", "--none-hash-seed", "1"]);
    let policies = shown(&done).policies;
    assert_eq!(done.code, 1);
    assert_near(policies.exact.hit_rate, policies.robin.hit_rate);
}

#[test]
fn pairs_are_won_by_every_tier() {
    let done = finished(&["--shape", "prefill-decode", "--json"]);
    assert_eq!((done.code, done.err.as_str()), (0, ""), "{}", done.out);
    let shown: serde_json::Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!((&shown["requests"], &shown["errors"]), (&15.into(), &0.into()));
    let won = serde_json::json!({"session": 6, "radix-trie": 3, "kv-exact": 2, "min-load": 4});
    assert_eq!(shown["tiers_won"], won);
    for leg in ["prefill", "decode"] {
        let by = shown["per_endpoint"][leg].as_object().unwrap();
        assert_eq!(by.values().map(|n| n.as_u64().unwrap()).sum::<u64>(), 15, "{shown}");
        assert!(by.values().all(|n| n.as_u64() > Some(0)), "{shown}");
    }
    let read = finished(&["--shape", "prefill-decode"]);
    assert!(read.code == 0 && read.out.contains("Won: "), "{}", read.out);
    let refused = finished(&["--shape", "prefill-decode", "--strict"]);
    assert_eq!(refused.code, 2, "{}", refused.err);
}

#[test]
fn is_for_reading() {
    let done = finished(&[]);
    assert_eq!((done.code, done.err.as_str()), (0, ""), "{}", done.out);
    let long: Vec<_> = done.out.lines().filter(|line| line.chars().count() > 90).collect();
    assert!(long.is_empty(), "{long:#?}");
    let chosen = |by: &str| done.out.lines().filter(|line| line.contains(by)).count();
    assert_eq!(chosen("  min-load (no_worker)  "), 7, "a cold question each\n{}", done.out);
    assert_eq!(chosen("  kv-exact              "), 21, "{}", done.out);
    for words in ["no_worker: No endpoint holds", "prompt tokens found cached", "Won: "] {
        assert!(done.out.contains(words), "{words}\n{}", done.out);
    }
}

/// The first line that holds `words`.
fn line_with(words: &str, stream: impl BufRead) -> String {
    stream.lines().map(Result::unwrap).find(|line| line.contains(words)).unwrap_or_default()
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    std::io::read_to_string(stream).unwrap()
}

fn ends(child: &mut Child, code: i32, place: &TempDir) {
    assert_eq!(wait(child).code(), Some(code));
    assert_clean(place);
}

#[test]
fn serves_until_it_is_told_to_end() {
    for (args, by) in [(&["--serve"][..], "INT"), (&["--serve", "--json"], "TERM")] {
        let place = tempfile::tempdir().unwrap();
        let mut child = Spawned(demo(place.path(), args).spawn().unwrap());
        let mut out = BufReader::new(child.0.stdout.take().unwrap());
        let mut err = BufReader::new(child.0.stderr.take().unwrap());
        let told = if args.contains(&"--json") {
            line_with("gateway stays at", &mut err)
        } else {
            line_with("gateway stays at", &mut out)
        };
        let address = told.split("http://").nth(1).unwrap().split(',').next().unwrap().to_owned();
        assert!(get(&address, "/v1/models").contains("tiny-qwen3"), "{address}");
        assert!(child.0.try_wait().unwrap().is_none());
        signal(&child.0, by);
        ends(&mut child.0, 0, &place);
        if args.contains(&"--json") {
            let result = std::io::read_to_string(out).unwrap();
            assert!(serde_json::from_str::<Shown>(&result).is_ok(), "the result alone: {result}");
        }
        assert!(TcpStream::connect(address).is_err());
    }
}

#[test]
fn leaves_nothing_when_it_is_ended_early() {
    // as soon as it says anything; and while the gateway runs
    for (by, at) in [("INT", "tokenizers"), ("TERM", "conf-")] {
        let place = tempfile::tempdir().unwrap();
        let mut child = Spawned(demo(place.path(), &[]).spawn().unwrap());
        let mut out = BufReader::new(child.0.stdout.take().unwrap());
        let mut opening = String::new();
        out.read_line(&mut opening).unwrap();
        let stage = || place.path().join(format!("kvgate-demo-{}", child.0.id())).read_dir().unwrap();
        let there = || stage().any(|e| e.unwrap().file_name().to_string_lossy().starts_with(at));
        wait_until(there);
        signal(&child.0, by);
        let mut err = child.0.stderr.take().unwrap();
        ends(&mut child.0, 1, &place);
        let mut said = String::new();
        err.read_to_string(&mut said).unwrap();
        assert_eq!(said, "kvgate: ended before there was a result\n");
    }
}
