//! The commands that need nothing running, as a user runs them.
#![allow(clippy::unwrap_used, clippy::panic)]

mod command;

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::process::Stdio;

use command::{Done, Folder, Spawned, kvgate, run, run_with, signal, wait};
use kvgate_tests::tokenizers;
use kvgate_tiers::TIERS;
use serde_json::{Value, json};

const STRICT: &str = "tiers = [\"kv-exact\"]\n[tier.kv-exact.contract]\nmode = \"strict\"\n\
                      algorithm = \"sha256_cbor\"\nblock_size = 16\nnone_hash_seed = \"0\"\n";
const AUTO: &str = "tiers = [\"kv-exact\"]\n";

fn folder(rule: &str) -> Folder {
    Folder::new(&tokenizers(), &format!("{rule}[match]\nmodels = [\"tiny-words\"]\n"))
}

/// A chat of more tokens than are needed for a block.
fn chat() -> Value {
    let content = "where there is a will there is a way and the way is long ".repeat(4);
    json!({"model": "tiny-words", "messages": [{"role": "user", "content": content}]})
}

fn line(body: Value) -> Value {
    json!({"path": "/v1/chat/completions", "body": body})
}

/// The answers to the lines of a batch.
fn batch(folder: &Folder, lines: &[String]) -> Vec<Value> {
    folder.write("batch.jsonl", &lines.join("\n"));
    let done = folder.run("explain", &["--batch", "batch.jsonl"]);
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    let answers: Vec<_> = done.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), lines.len());
    answers
}

#[test]
fn odd_requests_have_an_answer_each() {
    let deep = |open: &str, close: &str| format!("{}{}", open.repeat(100_000), close.repeat(100_000));
    let raw = |text: &str| json!({"path": "/v1/chat/completions", "body": text}).to_string();
    let headed = |name: &str, body: Value| {
        let headers = json!({"accept": "*/*", name: "tiny-words"});
        json!({"path": "/v1/chat/completions", "headers": headers, "body": body}).to_string()
    };
    let huge = "all the words ".repeat(1_300_000);
    let cases = [
        (line(chat()).to_string(), None),
        (raw(&chat().to_string()), None),
        (raw(&format!("{:#}\r\n", chat())), None),
        (json!({"path": "/v1/chat/completions?a=b", "headers": null, "body": chat()}).to_string(), None),
        (line(json!(7)).to_string(), Some("model_empty")),
        (line(json!([1, {"model": "tiny-words"}])).to_string(), Some("model_empty")),
        (line(Value::Null).to_string(), Some("model_empty")),
        (raw(""), Some("model_empty")),
        (raw("{\"model\": \"tiny-words\", \"messages\": ["), Some("model_empty")),
        (raw("\"{}\""), Some("model_empty")),
        (line(json!({"model": "", "messages": []})).to_string(), Some("model_empty")),
        (line(json!({"model": "unheard-of", "messages": []})).to_string(), Some("tokenize")),
        (line(json!({"model": "unheard-of", "input": "hi"})).to_string(), Some("text_empty")),
        (line(json!({"model": "../tiny-words", "messages": []})).to_string(), Some("tokenize")),
        (line(json!({"model": "tiny-words", "prompt": "hi"})).to_string(), Some("text_empty")),
        (line(json!({"model": "tiny-words", "messages": "hi"})).to_string(), Some("tokenize")),
        (json!({"path": "/v1/embeddings", "body": chat()}).to_string(), Some("text_empty")),
        (json!({"path": "", "body": chat()}).to_string(), Some("text_empty")),
        (headed("x-model", json!(7)), Some("text_empty")),
        (headed("X-MODEL", json!({"model": "unheard-of", "messages": chat()["messages"]})), None),
        (headed("X-Model", json!({"messages": chat()["messages"]})), None),
        (format!("{{\"path\": \"/v1/completions\", \"body\": {}}}", deep("[", "]")), Some("model_empty")),
        (raw(&format!("{{\"model\":\"tiny-words\",\"messages\":{}}}", deep("[", "]"))), Some("tokenize")),
        (
            raw(&format!("{{\"model\":\"tiny-words\",\"messages\":{}}}", deep("{\"a\":[", "]}"))),
            Some("tokenize"),
        ),
        (
            json!({"path": "/v1/completions", "body": {"model": "tiny-words", "prompt": huge}}).to_string(),
            Some("tokenize"),
        ),
        (line(chat()).to_string(), None),
    ];
    let folder = folder(STRICT);
    let lines: Vec<_> = cases.iter().map(|(line, _)| line.clone()).collect();
    let answers = batch(&folder, &lines);
    for (answer, (line, miss)) in answers.iter().zip(&cases) {
        let start: String = line.chars().take(200).collect();
        assert_eq!(answer["miss"].as_str(), *miss, "{start}: {}", answer["detail"]);
        assert_eq!(answer["detail"].is_string(), miss.is_some(), "{start}");
        if miss.is_none() {
            assert_eq!(answer["model"], "tiny-words", "{start}");
            assert_eq!(answer["token_ids"], answers[0]["token_ids"], "{start}");
            assert_eq!(answer["block_hashes"], answers[0]["block_hashes"], "{start}");
        }
    }
    assert!(answers[0]["block_hashes"].as_array().unwrap().len() > 2);
}

#[test]
fn a_line_that_is_no_request_is_named_and_stops_nothing() {
    let folder = folder(AUTO);
    for bad in [
        "{",
        "[]",
        "7",
        "{\"path\": \"/\"}",
        "{\"body\": {}}",
        "{\"path\": 1, \"body\": {}}",
        "{\"path\": \"/\", \"headers\": [], \"body\": {}}",
        "{\"path\": \"/\", \"headers\": {\"x-model\": 1}, \"body\": {}}",
        "{\"path\": \"/\", \"body\": {}} x",
        "{\"path\": \"/\", \"body\": NaN}",
    ] {
        let good = line(chat());
        folder.write("b.jsonl", &format!("{good}\n\n{good}\n{bad}\n{good}\n"));
        let done = folder.run("explain", &["--batch", "b.jsonl", "--json"]);
        assert_eq!(done.code, 1, "{bad}");
        assert!(done.err.starts_with("kvgate: b.jsonl:4: "), "{bad}: {}", done.err);
        let answers: Vec<Value> = done.out.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(answers.len(), 4, "{bad}");
        assert_eq!((&answers[1], &answers[0]), (&answers[0], &answers[3]), "{bad}");
        assert_eq!(answers[2]["miss"], "model_empty", "{bad}");
        assert!(answers[2]["detail"].as_str().unwrap().starts_with("b.jsonl:4: "), "{bad}");
    }
    std::fs::write(folder.path().join("b.jsonl"), b"\xff\xfe\n").unwrap();
    let done = folder.run("explain", &["--batch", "b.jsonl"]);
    assert!(done.code == 1 && done.err.starts_with("kvgate: b.jsonl:1: "), "{}", done.err);
    assert_eq!(done.out.lines().count(), 1);
}

#[test]
fn one_request_comes_from_a_file_or_from_standard_input() {
    let folder = folder(STRICT);
    folder.write("body.json", &chat().to_string());
    let file = folder.run("explain", &["--body", "body.json", "--json"]);
    assert_eq!((file.code, file.err.as_str()), (0, ""));
    let answer: Value = serde_json::from_str(&file.out).unwrap();
    assert_eq!((answer["rule"].as_str(), &answer["miss"]), (Some("one"), &Value::Null));

    let args = ["explain", "--config", "gateway.toml", "--body", "-", "--json"];
    let piped = run_with(folder.path(), &args, chat().to_string().as_bytes());
    assert_eq!((piped.code, &piped.out), (0, &file.out));
    let args = ["explain", "--config", "gateway.toml", "--batch", "-"];
    let piped = run_with(folder.path(), &args, line(chat()).to_string().as_bytes());
    assert_eq!((piped.code, &piped.out), (0, &file.out));

    let text = folder.run("explain", &["--body", "body.json"]);
    assert!(text.out.contains("block_hashes") && text.out.contains("miss          -"), "{}", text.out);
    let other = folder.run("explain", &["--body", "body.json", "--path", "/v1/completions", "--json"]);
    assert!(other.out.contains("\"miss\":\"text_empty\""), "{}", other.out);
}

#[test]
fn misses_that_the_rule_decides() {
    let xxhash = STRICT.replace("sha256_cbor", "xxhash_cbor").replace("none_hash_seed = \"0\"\n", "");
    let auto = xxhash.replace("strict", "auto");
    let deep = format!("{AUTO}[tier.kv-exact]\nmin_match_tokens = 4096\n");
    let plain = "tiers = [\"round-robin\"]\n";
    for (rule, miss, detail) in [
        (plain, Some("mode_off"), "kv-exact is no tier of the rule"),
        (xxhash.as_str(), Some("hashes"), "can never match"),
        (auto.as_str(), None, "can never match"),
        (deep.as_str(), Some("shallow"), "min_match_tokens is 4096"),
        (AUTO, None, ""),
    ] {
        let answer = &batch(&folder(rule), &[line(chat()).to_string()])[0];
        assert_eq!(answer["miss"].as_str(), miss, "{rule}");
        assert!(answer["detail"].as_str().unwrap_or_default().contains(detail), "{rule}: {answer}");
        assert_eq!(answer["token_ids"].is_array(), miss != Some("mode_off"), "{rule}");
        assert_eq!(answer["detail"].is_null(), detail.is_empty(), "{rule}: {answer}");
    }
}

#[test]
fn a_seed_that_is_not_given_is_a_caveat() {
    for (extra_keys, words) in [("tagged", "unset in the engine's environment"), ("bare", "it is random")] {
        let seed = format!("extra_keys = \"{extra_keys}\"\n");
        let folder = folder(&STRICT.replace("none_hash_seed = \"0\"\n", &seed));
        let answer = &batch(&folder, &[line(chat()).to_string()])[0];
        assert!(answer["miss"].is_null() && answer["detail"].as_str().unwrap().contains(words), "{answer}");
        let check = folder.run("check", &[]);
        assert_eq!(check.code, 0);
        assert!(check.err.contains("contract.none_hash_seed") && check.err.contains(words), "{}", check.err);
        assert_eq!(folder.run("check", &["--strict"]).code, 1);
    }
}

#[test]
fn rules_are_named_where_there_are_several() {
    let folder = folder(AUTO);
    let other =
        "tiers = [\"round-robin\"]\n[match]\nmodels = [\"x\"]\n[[endpoint]]\naddress = \"127.0.0.1:1\"\n";
    folder.write("rules/two.toml", other);
    folder.write("body.json", "{}");
    let unnamed = folder.run("explain", &["--body", "body.json"]);
    assert_eq!(unnamed.code, 1);
    assert_eq!(unnamed.err, "kvgate: --rule is needed; there are: one, two\n");
    let wrong = folder.run("explain", &["--body", "body.json", "--rule", "three"]);
    assert_eq!(wrong.err, "kvgate: no rule \"three\"; there are: one, two\n");
    let named = folder.run("explain", &["--body", "body.json", "--rule", "two", "--json"]);
    assert!(named.code == 0 && named.out.contains("\"miss\":\"mode_off\""), "{}", named.out);
}

#[test]
fn usage_errors_leave_with_2() {
    let folder = folder(AUTO);
    folder.write("body.json", "{}");
    for args in [
        &["explain"][..],
        &["explain", "--body", "body.json", "--batch", "body.json"],
        &["explain", "--batch", "body.json", "--path", "/"],
        &["check", "--no-such-flag"],
        &["schema", "--json", "--markdown"],
        &["demo", "--none-hash-seed", "1"],
        &["no-such-command"],
        &[],
    ] {
        let done = run(folder.path(), args);
        assert_eq!((done.code, done.out.as_str()), (2, ""), "{args:?}");
        assert!(done.err.contains("Usage: kvgate"), "{args:?}: {}", done.err);
    }
    let help = run(folder.path(), &["--help"]);
    assert!(help.code == 0 && help.out.contains("explain"), "{}", help.out);
    let version = run(folder.path(), &["--version"]);
    assert_eq!(version.out, format!("kvgate {}\n", env!("CARGO_PKG_VERSION")));
    let missing = folder.run("explain", &["--body", "none.json"]);
    assert_eq!((missing.code, missing.out.as_str()), (1, ""));
    assert!(missing.err.contains("none.json"), "{}", missing.err);
}

#[test]
fn checks() {
    let good = folder(AUTO);
    let done = good.run("check", &["--strict"]);
    assert_eq!((done.code, done.out.as_str()), (0, ""));
    assert_eq!(done.err, "gateway.toml: valid: 1 rule with 1 endpoint, 0 warnings\n");
    let done = good.run("check", &["--json"]);
    let report: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!((done.code, done.err.as_str(), &report["ok"]), (0, "", &json!(true)));
    assert_eq!((&report["rules"], &report["problems"]), (&json!(1), &json!([])));

    let bad = folder("tiers = [\"kv-exakt\"]\nnmae = \"x\"\n");
    let done = bad.run("check", &[]);
    assert_eq!((done.code, done.out.as_str()), (1, ""));
    assert!(done.err.contains("rules/one.toml:1: tiers[0]: is not a tier"), "{}", done.err);
    assert!(done.err.contains("did you mean \"kv-exact\"?"), "{}", done.err);
    assert!(done.err.contains("rules/one.toml:2: nmae: unknown key"), "{}", done.err);
    assert!(TIERS.iter().all(|kind| done.err.contains(kind.name)), "{}", done.err);
    let done = bad.run("check", &["--json"]);
    let report: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!((done.code, &report["ok"], &report["errors"]), (1, &json!(false), &json!(2)));
    let first = &report["problems"][0];
    assert_eq!((&first["line"], &first["key"]), (&json!(1), &json!("tiers[0]")));
    let explained = bad.run("explain", &["--body", "-"]);
    assert_eq!((explained.code, explained.out.as_str()), (1, ""));
    assert!(explained.err.contains("rules/one.toml:1:"), "{}", explained.err);

    let none = run(good.path(), &["check", "--config", "none.toml"]);
    assert!(none.code == 1 && none.err.contains("none.toml"), "{}", none.err);
}

#[test]
fn warnings_refuse_only_when_strict() {
    let folder = Folder::new(&tokenizers(), "tiers = [\"kv-exact\"]\n[match]\nmodels = [\"unheard-of\"]\n");
    let (lax, strict) = (folder.run("check", &[]), folder.run("check", &["--strict"]));
    assert!(lax.code == 0 && lax.err.contains("match.models[0]"), "{}", lax.err);
    assert!(lax.err.ends_with("valid: 1 rule with 1 endpoint, 1 warning\n"), "{}", lax.err);
    assert!(strict.code == 1 && strict.err.contains("refused for its warnings"), "{}", strict.err);
}

#[test]
fn ports_in_use_do_not_matter() {
    let held = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let [edge, admin] = held.each_ref().map(|l| l.local_addr().unwrap());
    let folder = folder(STRICT);
    let text = std::fs::read_to_string(folder.path().join("gateway.toml")).unwrap();
    folder.write(
        "gateway.toml",
        &format!("{text}[[listener]]\naddress = \"{edge}\"\n[admin]\naddress = \"{admin}\"\n"),
    );
    assert_eq!(folder.run("check", &["--strict"]).code, 0);
    batch(&folder, &[line(chat()).to_string()]);
    for listener in &held {
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "nobody connects");
    }
    let mut run = kvgate(folder.path(), &["run", "--config", "gateway.toml"]);
    let run: Done = run.env("RUST_LOG", "kvgate==info").output().unwrap().into();
    assert_eq!((run.code, run.out.as_str()), (1, ""));
    assert!(run.err.starts_with("kvgate: RUST_LOG is not used: "), "{}", run.err);
    assert!(run.err.contains(&format!("{edge}: ")), "{}", run.err);
}

#[test]
fn listings() {
    let folder = folder(AUTO);
    let (text, json) = (run(folder.path(), &["tiers"]), run(folder.path(), &["tiers", "--json"]));
    let listed: Value = serde_json::from_str(&json.out).unwrap();
    let names: Vec<_> =
        listed.as_array().unwrap().iter().map(|tier| tier["name"].as_str().unwrap()).collect();
    assert_eq!(names, TIERS.iter().map(|kind| kind.name).collect::<Vec<_>>());
    assert!(names.iter().all(|name| text.out.contains(name)) && names.contains(&"kv-exact"));
    let json = run(folder.path(), &["schema", "--json"]);
    let schema: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(schema["tiers"], listed);
    for done in [text, json, run(folder.path(), &["schema"])] {
        assert_eq!((done.code, done.err.as_str()), (0, ""));
    }
    for (command, page) in [("tiers", "docs/tiers.md"), ("schema", "docs/configuration.md")] {
        let printed = run(folder.path(), &[command, "--markdown"]);
        let kept = std::fs::read_to_string(kvgate_tests::root().join(page)).unwrap_or_default();
        assert!(
            printed.out == kept,
            "{page} is not what `kvgate {command} --markdown` prints: print it there"
        );
    }
}

/// As under `| head -1`.
#[test]
fn readers_may_leave_early() {
    let folder = folder(STRICT);
    folder.write("batch.jsonl", &format!("{}\n", line(chat())).repeat(2000));
    for args in [
        &["explain", "--config", "gateway.toml", "--batch", "batch.jsonl"][..],
        &["schema", "--json"],
        &["check", "--config", "gateway.toml", "--json"],
    ] {
        let mut command = kvgate(folder.path(), args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        if args[0] == "explain" {
            let mut first = String::new();
            out.read_line(&mut first).unwrap();
            assert!(first.starts_with("{\"rule\":\"one\""), "{first}");
        }
        drop(out);
        let status = wait(&mut child);
        let err = std::io::read_to_string(child.stderr.unwrap()).unwrap();
        assert_eq!((status.code(), err.as_str()), (Some(0), ""), "{args:?}");
    }
    let mut command = kvgate(folder.path(), &["check", "--config", "none.toml"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(wait(&mut child).code(), Some(1), "nobody reads the errors");
}

#[test]
fn one_simulated_engine() {
    let tokenizers = tokenizers();
    let args = ["sim", "--model", "tiny-words", "--tokenizers", tokenizers.to_str().unwrap()];
    let mut command = kvgate(&tokenizers, &args);
    let mut sim = Spawned(command.stdout(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(sim.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let lines: Vec<_> = lines.take(3).collect();
    assert!(lines[1].starts_with("events tcp://") && lines[2].starts_with("replay tcp://"), "{lines:?}");
    let address = lines[0].strip_prefix("engine http://").unwrap();
    assert!(std::net::TcpStream::connect(address).is_ok());
    signal(&sim.0, "TERM");
    assert_eq!(wait(&mut sim.0).code(), Some(0));
    let none = run(&tokenizers, &["sim", "--model", "unheard-of", "--tokenizers", "."]);
    assert!(none.code == 1 && none.err.starts_with("kvgate: no tokenizer for unheard-of"), "{}", none.err);
}

#[test]
fn check_lists_every_value_and_where_it_comes_from() {
    let folder = folder("tiers = [\"kv-exact\"]\n[tier.kv-exact]\nzero_hit_requests = 9\n");
    let check = |args: &[&str]| -> Done {
        let all: Vec<_> = ["check", "--config", "gateway.toml"].iter().chain(args).copied().collect();
        let mut command = kvgate(folder.path(), &all);
        command.env("LLB_KV_MIN_MATCH_TOKENS", "32").env("LOXILB_KV_ZERO_HIT_N", "7");
        command.env("LOXILB_KV_MAX_BLOCKS", "many").output().unwrap().into()
    };
    let done = check(&["--effective"]);
    for line in [
        "gateway.toml",
        "  server.threads = 0  # default",
        "  inventory.max_blocks = 1000000  # default",
        "rule one, rules/one.toml",
        "  id = absent  # default",
        "  tier.kv-exact.zero_hit_requests = 9  # rules/one.toml:3",
        "  tier.kv-exact.min_match_tokens = 32  # LLB_KV_MIN_MATCH_TOKENS",
        "  endpoint[0].address = \"127.0.0.1:8001\"  # rules/one.toml:8",
    ] {
        assert!(done.out.lines().any(|l| l == line), "{line} in {}", done.out);
    }
    assert_eq!(done.code, 0);
    assert!(done.err.contains("LOXILB_KV_MAX_BLOCKS") && done.err.contains("many"), "{}", done.err);
    let done = check(&["--effective", "--json"]);
    let report: Value = serde_json::from_str(&done.out).unwrap();
    let keys = report["effective"]["rules"][0]["keys"].as_array().unwrap();
    let named = |key: &str| keys.iter().find(|k| k["key"] == key).unwrap().clone();
    assert_eq!(
        named("tier.kv-exact.min_match_tokens"),
        json!({
            "key": "tier.kv-exact.min_match_tokens", "value": 32,
            "from": "environment", "variable": "LLB_KV_MIN_MATCH_TOKENS"
        })
    );
    assert_eq!(
        named("tier.kv-exact.zero_hit_requests"),
        json!({
            "key": "tier.kv-exact.zero_hit_requests", "value": 9,
            "from": "file", "file": "rules/one.toml", "line": 3
        })
    );
    assert_eq!(named("explain"), json!({"key": "explain", "value": false, "from": "default"}));
    assert!(check(&["--json"]).out.find("\"effective\"").is_none());
    folder.write("rules/one.toml", "oops = 1");
    let refused = check(&["--effective"]);
    assert_eq!((refused.code, refused.out.as_str()), (1, ""));
}
