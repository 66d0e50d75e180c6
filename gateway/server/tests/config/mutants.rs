//! The shipped configuration with one thing wrong: an error that names file, line and key, and never a panic.

use std::fs;

use kvgate::config;
use kvgate_tiers::TIERS;

use crate::shipped::shipped;

const GATEWAY: &str = "gateway.toml";
const RULE: &str = "rules/qwen3.toml";

/// File, what stands in it, what stands there instead, and the keys that are named; none where the TOML is broken.
type Mutant = (&'static str, &'static str, &'static str, &'static str);

const MUTANTS: &[Mutant] = &[
    (GATEWAY, "[server]", "[servr]", "servr"),
    (GATEWAY, "[server]", "[[server]]", "server"),
    (GATEWAY, "[server]", "[server", ""),
    (GATEWAY, "rules      = \"rules\"", "rules = \"\"", "server.rules"),
    (GATEWAY, "rules      = \"rules\"", "rules = \"nowhere\"", "server.rules"),
    (GATEWAY, "rules      = \"rules\"", "rule = \"rules\"", "server.rule"),
    (GATEWAY, "rules      = \"rules\"", "rules = \"gateway.toml\"", "server.rules"),
    (GATEWAY, "tokenizers = \"tokenizers\"", "tokenizers = [\"tokenizers\"]", "server.tokenizers"),
    (GATEWAY, "tokenizers = \"tokenizers\"", "tokenizers = \"nowhere\"", "server.tokenizers"),
    (GATEWAY, "# threads         = 0", "threads = -1", "server.threads"),
    (GATEWAY, "# threads         = 0", "threads = \"4\"", "server.threads"),
    (GATEWAY, "# threads         = 0", "threads = 4.0", "server.threads"),
    (GATEWAY, "# grace_period    = \"30s\"", "grace_period = 30", "server.grace_period"),
    (GATEWAY, "# grace_period    = \"30s\"", "grace_period = \"30 s\"", "server.grace_period"),
    (GATEWAY, "# grace_period    = \"30s\"", "grace_period = \"1000h\"", "server.grace_period"),
    (GATEWAY, "# reload_debounce = \"200ms\"", "reload_debounce = \"0ms\"", "server.reload_debounce"),
    (GATEWAY, "[[listener]]", "[listener]", "listener"),
    (GATEWAY, "[[listener]]", "[[listeners]]", "listeners"),
    (GATEWAY, "name    = \"edge\"", "name = \"the edge\"", "listener[0].name"),
    (GATEWAY, "address = \"127.0.0.1:8080\"", "address = \"127.0.0.1\"", "listener[0].address"),
    (GATEWAY, "address = \"127.0.0.1:8080\"", "address = \"localhost:8080\"", "listener[0].address"),
    (GATEWAY, "address = \"127.0.0.1:8080\"", "address = 8080", "listener[0].address"),
    (GATEWAY, "address = \"127.0.0.1:8080\"", "address = \"127.0.0.1:80800\"", "listener[0].address"),
    (GATEWAY, "# expose_routing = false", "expose_routing = \"no\"", "listener[0].expose_routing"),
    (GATEWAY, "address = \"127.0.0.1:11111\"", "address = \"0.0.0.0:11111\"", "admin.address"),
    (GATEWAY, "address = \"127.0.0.1:11111\"", "address = \"127.0.0.1:8080\"", "admin.address"),
    (GATEWAY, "# token_file = \"admin.token\"", "token_file = \"admin.token\"", "admin.token_file"),
    (GATEWAY, "# format = \"text\"", "format = \"yaml\"", "log.format"),
    (GATEWAY, "# body      = \"16MiB\"", "body = \"16MB\"", "limits.body"),
    (GATEWAY, "# body      = \"16MiB\"", "body = \"2GiB\"", "limits.body"),
    (GATEWAY, "# attempts = 3", "attempts = 0", "retry.attempts"),
    (GATEWAY, "# statuses = []", "statuses = [200]", "retry.statuses[0]"),
    (GATEWAY, "# statuses = []", "statuses = 503", "retry.statuses"),
    (GATEWAY, "# percent = 20", "percent = -1", "retry_budget.percent"),
    (GATEWAY, "# connect    = \"500ms\"", "connect = \"500\"", "timeouts.connect"),
    (GATEWAY, "# idle       = \"2m\"", "idle = \"2min\"", "timeouts.idle"),
    (GATEWAY, "# total      = \"1h\"", "total = \"\"", "timeouts.total"),
    (GATEWAY, "# total      = \"1h\"", "total = \"1h\"\ntotal = \"2h\"", ""),
    (GATEWAY, "# cache = \"64MiB\"", "cache = -1", "tokenizer.cache"),
    (GATEWAY, "# max_caches = 575", "max_caches = 1023", "inventory.max_caches"),
    (GATEWAY, "# max_blocks = 1_000_000", "max_blocks = 1__0", ""),
    (
        GATEWAY,
        "# events_missing_after    = \"30s\"",
        "events_missing_after = \"0s\"",
        "alarms.events_missing_after",
    ),
    (RULE, "name   = \"qwen3\"", "name = \"qwen/3\"", "name"),
    (RULE, "name   = \"qwen3\"", "name = qwen3", ""),
    (RULE, "engine = \"vllm\"", "engine = \"vlm\"", "engine"),
    (RULE, "engine = \"vllm\"", "engines = \"vllm\"", "engines"),
    (RULE, "tiers  = [\"kv-exact\"]", "tiers = [\"kv_exact\"]", "tiers[0]"),
    (RULE, "tiers  = [\"kv-exact\"]", "tiers = \"kv-exact\"", "tiers"),
    (RULE, "tiers  = [\"kv-exact\"]", "tiers = [\"kv-exact\", \"kv-exact\"]", "tiers[1]"),
    (RULE, "tiers  = [\"kv-exact\"]", "tiers = [\"kv-exact\", 1]", "tiers[1]"),
    (RULE, "tiers  = [\"kv-exact\"]", "tiers = [\"kv-exact\"]\nshape = \"prefill_decode\"", "shape"),
    (
        RULE,
        "tiers  = [\"kv-exact\"]",
        "tiers = [\"kv-exact\"]\ndecode_tiers = [\"min_load\"]",
        "decode_tiers[0]",
    ),
    (RULE, "# id      = 3", "id = 0", "id"),
    (RULE, "# explain = false", "explain = 1", "explain"),
    (RULE, "[match]", "[macth]", "macth"),
    (RULE, "models = [\"Qwen/Qwen3-0.6B\"]", "models = \"Qwen/Qwen3-0.6B\"", "match.models"),
    (RULE, "models = [\"Qwen/Qwen3-0.6B\"]", "models = [\"Qwen/../Qwen3\"]", "match.models[0]"),
    (RULE, "models = [\"Qwen/Qwen3-0.6B\"]", "models = [\"\"]", "match.models[0]"),
    (RULE, "# listener    = \"edge\"", "listener = \"edg\"", "match.listener"),
    (RULE, "# hosts       = [\"llm.example.com\"]", "hosts = [\"*.example.com\"]", "match.hosts[0]"),
    (RULE, "# hosts       = [\"llm.example.com\"]", "hosts = [\"llm.example.com:8080\"]", "match.hosts[0]"),
    (RULE, "# path_prefix = \"/\"", "path_prefix = \"v1\"", "match.path_prefix"),
    (RULE, "# path_prefix = \"/\"", "prefix = \"/v1\"", "match.prefix"),
    (RULE, "# port               = 5557", "port = 65536", "events.port"),
    (RULE, "# replay_port_offset = 1000", "replay_port_offset = 60000", "events.replay_port_offset"),
    (RULE, "# min_match_tokens = 16", "min_match_tokens = \"16\"", "tier.kv-exact.min_match_tokens"),
    (RULE, "# min_match_tokens = 16", "min_tokens = 16", "tier.kv-exact.min_tokens"),
    (RULE, "[tier.kv-exact]", "[tier.kvexact]", "tier.kvexact"),
    (RULE, "mode = \"auto\"", "mode = \"automatic\"", "tier.kv-exact.contract.mode"),
    (RULE, "# block_size     = 16", "block_size = 0", "tier.kv-exact.contract.block_size"),
    (
        RULE,
        "# algorithm      = \"sha256_cbor\"",
        "algorithm = \"sha-256\"",
        "tier.kv-exact.contract.algorithm",
    ),
    (RULE, "# sql = \"/adapters/sql\"", "sql = 1", "tier.kv-exact.lora.sql"),
    (RULE, "address   = \"127.0.0.1:8002\"", "address = \"127.0.0.1:8001\"", "endpoint[1].address"),
    (RULE, "address   = \"127.0.0.1:8001\"", "address = \"http://127.0.0.1:8001\"", "endpoint[0].address"),
    (RULE, "address   = \"127.0.0.1:8001\"", "addres = \"127.0.0.1:8001\"", "endpoint[0].addres"),
    (RULE, "address   = \"127.0.0.1:8001\"", "address = \"127.0.0.1:8080\"", "endpoint[0].address"),
    (
        RULE,
        "kv_events = \"tcp://127.0.0.1:5558\"",
        "kv_events = \"tcp://127.0.0.1:5557\"",
        "endpoint[1].kv_events",
    ),
    (RULE, "kv_events = \"tcp://127.0.0.1:5558\"", "kv_events = \"127.0.0.1:5558\"", "endpoint[1].kv_events"),
    (
        RULE,
        "kv_events = \"tcp://127.0.0.1:5558\"",
        "kv_events = \"tcp://127.0.0.1:65000\"",
        "endpoint[1].kv_events",
    ),
    (RULE, "# weight  = 1", "weight = 0", "endpoint[0].weight"),
    (RULE, "# tls     = \"engine-0.example.com\"", "tls = true", "endpoint[0].tls"),
    (
        RULE,
        "kv_events = \"tcp://127.0.0.1:5558\"",
        "kv_events = \"tcp://127.0.0.1:5558\"\nrole = \"decode\"",
        "endpoint[1].role",
    ),
    (
        RULE,
        "kv_events = \"tcp://127.0.0.1:5558\"",
        "kv_events = \"tcp://127.0.0.1:5558\"\nkv_replay = \"6558\"",
        "endpoint[1].kv_replay",
    ),
];

fn copy() -> (tempfile::TempDir, [String; 2]) {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("rules")).unwrap();
    fs::create_dir(folder.path().join("tokenizers")).unwrap();
    let texts = [GATEWAY, RULE].map(|name| {
        let text = fs::read_to_string(shipped().join(name)).unwrap();
        fs::write(folder.path().join(name), &text).unwrap();
        text
    });
    (folder, texts)
}

#[test]
fn every_mutant_is_named_by_file_line_and_key() {
    assert!(MUTANTS.len() >= 80, "{}", MUTANTS.len());
    let (folder, [gateway, rule]) = copy();
    let main = folder.path().join(GATEWAY);
    config::load(&main, TIERS).expect("without a mutation it is valid");
    let mut wrong = Vec::new();
    for (name, from, to, keys) in MUTANTS {
        let text = if *name == GATEWAY { &gateway } else { &rule };
        let at = text.find(from).unwrap_or_else(|| panic!("{name} does not hold {from}"));
        let line = 1 + text[..at].matches('\n').count() + to.matches('\n').count();
        fs::write(folder.path().join(name), text.replacen(from, to, 1)).unwrap();
        let problems = config::load(&main, TIERS).expect_err(to);
        let named = problems.0.iter().filter(|p| p.is_error() && p.file == folder.path().join(name));
        let places: Vec<_> = named.map(|p| (p.line, p.key.as_str())).collect();
        let expected: Vec<_> = keys.split(' ').map(|key| (line, key)).collect();
        if places != expected {
            wrong.push(format!("{from} -> {to}: {expected:?} expected, {problems}"));
        }
        let rendered = problems.render(false);
        for problem in &problems.0 {
            let place = format!("{}:{}", problem.file.display(), problem.line);
            assert!(rendered.contains(&place), "{place} is not in {rendered}");
            assert!(!problem.message.is_empty());
            assert!(
                problem.hint.is_some() || problem.allowed.is_some() || problem.key.is_empty(),
                "{problem}"
            );
        }
        fs::write(folder.path().join(name), text).unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Every line left out, doubled and cut at every place: taken or refused, but never a panic.
#[test]
fn no_cut_is_fatal() {
    let (folder, texts) = copy();
    let main = folder.path().join(GATEWAY);
    let mut seen = [0, 0];
    for (name, text) in [GATEWAY, RULE].into_iter().zip(texts) {
        let lines: Vec<&str> =
            text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
        let mut attempt = |lines: &[&str]| {
            fs::write(folder.path().join(name), lines.join("\n")).unwrap();
            let loaded = config::load(&main, TIERS);
            seen[usize::from(loaded.is_err())] += 1;
            config::CheckReport::new(&main, loaded, false).render(false)
        };
        for (at, line) in lines.iter().enumerate() {
            attempt(&[&lines[..at], &lines[at + 1..]].concat());
            attempt(&[&lines[..at], &[*line], &lines[at..]].concat());
            for (cut, _) in line.char_indices().take_while(|(_, c)| *c != '#') {
                attempt(&[&lines[..at], &[&line[..cut]], &lines[at + 1..]].concat());
                attempt(&[&lines[..at], &[&line[cut..]], &lines[at + 1..]].concat());
            }
        }
        fs::write(folder.path().join(name), text).unwrap();
    }
    assert!(seen[0] > 20 && seen[1] > 500, "{seen:?}");
}
