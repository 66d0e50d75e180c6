//! What is wrong with a rule, or between rules, in the words it is said: the whole text is asserted.

use crate::folder::{Folder, RULE};

#[test]
fn ladders() {
    insta::assert_snapshot!(Folder::with(r#"tiers = ["sesion", "round-robin", "x"]
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r#"
    refused
    rules/one.toml:1:10: tiers[0]: is not a tier; found "sesion"; allowed: session, kv-exact, round-robin, chwbl; did you mean "session"?
    rules/one.toml:1:35: tiers[2]: is not a tier; found "x"; allowed: session, kv-exact, round-robin, chwbl
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["session", "round-robin", "session"]
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r#"
    refused
    rules/one.toml:1:36: tiers[2]: stands in the list twice; found "session"; allowed: a list of texts; remove one
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin", "session"]
[tier.kv-exact]
min_match_tokens = 1
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r#"
    taken
    rules/one.toml:1:25: warning: tiers[1]: is never asked: "round-robin" before it always decides; put "round-robin" last
    rules/one.toml:2:1: warning: tier.kv-exact: is not used: the tier is not in the ladder; add "kv-exact" to `tiers`, or remove the table
    "#);
}

#[test]
fn shapes_and_roles() {
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[[endpoint]]
address = "h:1"
role = "prefill"
"#).problems(), @r#"
    refused
    rules/one.toml:4:8: endpoint[0].role: is a part of a pair, and this rule is a pool; found "prefill"; allowed: "any"; leave `role` out, or write shape = "prefill-decode"
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
shape = "prefill-decode"
[[endpoint]]
address = "h:1"
role = "prefill"
[[endpoint]]
address = "h:2"
role = "decode"
"#).problems(), @"taken");
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
shape = "prefill-decode"
[[endpoint]]
address = "h:1"
[[endpoint]]
address = "h:2"
role = "decode"
"#).problems(), @r#"
    refused
    rules/one.toml:3:1: endpoint: none has the role "prefill", and the rule is "prefill-decode"; allowed: at least one endpoint of each role; write role = "prefill" at the endpoints that do that part
    "#);
    insta::assert_snapshot!(Folder::with(r#"engine = "sglang"
shape = "prefill-decode"
tiers = ["round-robin"]
decode_tiers = ["min-load", "round-robin"]
[[endpoint]]
address = "h:1"
role = "prefill"
"#).problems(), @r#"
    refused
    rules/one.toml:2:9: shape: is not served for sglang by this version; found "prefill-decode"; allowed: "pool"; "prefill-decode" for vllm; leave it out: every endpoint serves requests whole
    rules/one.toml:4:17: decode_tiers[0]: is not a tier; found "min-load"; allowed: session, kv-exact, round-robin, chwbl
    rules/one.toml:5:1: endpoint: none has the role "decode", and the rule is "prefill-decode"; allowed: at least one endpoint of each role; write role = "decode" at the endpoints that do that part
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
decode_tiers = []
[[endpoint]]
address = "h:1"
[legs]
connector = "nixl"
"#).problems(), @r#"
    taken
    rules/one.toml:2:16: warning: decode_tiers: is not used: the rule is a pool; remove it, or write shape = "prefill-decode"
    rules/one.toml:5:1: warning: legs: is not used: the rule is a pool; remove it, or write shape = "prefill-decode"
    "#);
    insta::assert_snapshot!(Folder::with(r#"shape = "prefil-decode"
tiers = ["round-robin"]
[[endpoint]]
address = "h:1"
role = "prefill"
"#).problems(), @r#"
    refused
    rules/one.toml:1:9: shape: is not one of the words allowed here; found "prefil-decode"; allowed: "pool", "prefill-decode"; did you mean "prefill-decode"?
    "#);
}

#[test]
fn endpoints() {
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
"#).problems(), @r"
    refused
    rules/one.toml:1:1: endpoint: the rule has no endpoint; allowed: at least one [[endpoint]]; add [[endpoint]] with an `address`
    ");
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[[endpoint]]
address = "H:1"
[[endpoint]]
address = "h:2"
[[endpoint]]
address = "h:1"
"#).problems(), @r#"
    refused
    rules/one.toml:7:11: endpoint[2].address: is also that of endpoint[0]; found "h:1"; remove one; `weight` gives an endpoint a larger share
    "#);
}

#[test]
fn endpoints_that_are_written_differently() {
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[[endpoint]]
address = "127.0.0.1:21709"
[[endpoint]]
address = "[::FFFF:127.0.0.1]:21709"
[[endpoint]]
address = "[::1]:1"
[[endpoint]]
address = "[0:0::1]:1"
"#).problems(), @r#"
    refused
    rules/one.toml:5:11: endpoint[1].address: is also that of endpoint[0]; found "127.0.0.1:21709"; remove one; `weight` gives an endpoint a larger share
    rules/one.toml:9:11: endpoint[3].address: is also that of endpoint[2]; found "[::1]:1"; remove one; `weight` gives an endpoint a larger share
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[[endpoint]]
address = "127.0.0.1:021709"
[[endpoint]]
address = "2130706433:21709"
[[endpoint]]
address = "0x7F.1:21709"
"#).problems(), @r#"
    refused
    rules/one.toml:3:11: endpoint[0].address: does not have the right form; found "127.0.0.1:021709"; allowed: a host and a port, "10.0.0.7:8000" or "engine-0.svc:8000"
    rules/one.toml:5:11: endpoint[1].address: does not have the right form; found "2130706433:21709"; allowed: a host and a port, "10.0.0.7:8000" or "engine-0.svc:8000"
    rules/one.toml:7:11: endpoint[2].address: does not have the right form; found "0x7F.1:21709"; allowed: a host and a port, "10.0.0.7:8000" or "engine-0.svc:8000"
    "#);
}

#[test]
fn probes_of_one_engine() {
    let folder = |one: &str, two: &str| {
        let rule = |text: &str| {
            format!("tiers = [\"round-robin\"]\n{text}\n[[endpoint]]\naddress = \"127.0.0.1:8001\"\n")
        };
        let two = format!("[match]\nhosts = [\"two\"]\n[probe]\n{two}");
        let one = format!("[probe]\n{one}");
        Folder::new().write("rules/one.toml", rule(&one)).write("rules/two.toml", rule(&two))
    };
    insta::assert_snapshot!(folder("interval = \"4s\"", "path = \"/ready\"\ninterval = \"5s\"").problems(), @r#"
    taken
    rules/two.toml:5:8: warning: probe.path: is not how 127.0.0.1:8001 is asked: the probe of the rule "one" in rules/one.toml is used, and decides for both; found GET /ready, and there GET /health; give both rules the same `path`, `codes` and `mode`, or only one of them a probe
    "#);
    insta::assert_snapshot!(folder("codes = [200, 204]", "mode = \"tcp\"\ninterval = \"4s\"").problems(), @r#"
    taken
    rules/one.toml:3:9: warning: probe.codes: is not how 127.0.0.1:8001 is asked: the probe of the rule "two" in rules/two.toml is used, and decides for both; found GET /health for 200, 204, and there a connection; give both rules the same `path`, `codes` and `mode`, or only one of them a probe
    "#);
    for (one, two) in [
        ("path = \"/health\"", ""),
        ("interval = \"4s\"", "timeout = \"1s\""),
        ("path = \"/one\"", "mode = \"off\""),
    ] {
        assert_eq!(folder(one, two).problems().trim(), "taken", "{one} {two}");
    }
}

#[test]
fn endpoints_that_are_the_gateway() {
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[[endpoint]]
address = "127.0.0.1:8080"
[[endpoint]]
address = "127.0.0.1:11111"
"#).problems(), @r#"
    refused
    rules/one.toml:3:11: endpoint[0].address: is an address of the gateway itself; found "127.0.0.1:8080"; name the engine's address
    rules/one.toml:5:11: endpoint[1].address: is an address of the gateway itself; found "127.0.0.1:11111"; name the engine's address
    "#);
}

#[test]
fn events() {
    insta::assert_snapshot!(Folder::with(r#"tiers = ["kv-exact"]
[match]
models = ["m"]
[[endpoint]]
address = "127.0.0.1:8001"
[[endpoint]]
address = "127.0.0.1:8002"
"#).problems(), @r#"
    refused
    rules/one.toml:6:1: endpoint[1].kv_events: is also where endpoint[0], 127.0.0.1:8001, publishes; found "tcp://127.0.0.1:5557"; give each engine a port of its own for its events, and name it as `kv_events`
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["kv-exact"]
[match]
models = ["m"]
[events]
port = 65000
[[endpoint]]
address = "127.0.0.1:8001"
[[endpoint]]
address = "h:8001"
kv_events = "tcp://h:64999"
"#).problems(), @r"
    refused
    rules/one.toml:5:8: events.port: leads to the replay port 66000, and ports end at 65535; found 65000 + 1000; lower `events.port` or `events.replay_port_offset`; 0 as the offset means no replay
    rules/one.toml:10:13: endpoint[1].kv_events: leads to the replay port 65999, and ports end at 65535; found 64999 + 1000; lower `events.port` or `events.replay_port_offset`; 0 as the offset means no replay
    ");
    insta::assert_snapshot!(Folder::with(r#"tiers = ["kv-exact"]
[match]
models = ["m"]
[events]
port = 70000
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r"
    refused
    rules/one.toml:5:8: events.port: is out of range; found 70000; allowed: a whole number, 0 to 65535
    ");
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[[endpoint]]
address = "127.0.0.1:8001"
kv_replay = "tcp://h:1"
"#).problems(), @r"
    refused
    rules/one.toml:4:13: endpoint[0].kv_replay: is given, but the endpoint has no events; add `kv_events`
    ");
    insta::assert_snapshot!(Folder::pair("", "[match]\npath_prefix = \"/v2\"\n[events]").write("rules/three.toml", "tiers = []\nevents.port = 5557\nmatch.path_prefix = \"/v3\"\n[[endpoint]]\naddress = \"127.0.0.1:8003\"\n").problems(), @r#"
    refused
    rules/two.toml:5:1: endpoint[0].kv_events: is also where endpoint[0], 127.0.0.1:8003 in rules/three.toml, publishes; found "tcp://127.0.0.1:5557"; give each engine a port of its own for its events, and name it as `kv_events`
    "#);
}

#[test]
fn rules_that_share_an_engine() {
    let one =
        "[match]\nhosts = [\"a\"]\n[[endpoint]]\naddress = \"engine:1\"\nkv_events = \"tcp://engine:5557\"\n";
    let two =
        |events: &str| format!("[match]\nhosts = [\"b\"]\n[[endpoint]]\naddress = \"Engine:1\"\n{events}");
    let pair = |events: &str| Folder::pair(one, &two(events)).problems();
    insta::assert_snapshot!(pair("kv_events = \"tcp://engine:5558\""), @r#"
    refused
    rules/two.toml:6:13: endpoint[0].kv_events: is not what rules/one.toml says of this engine, "tcp://engine:5557"; found "tcp://engine:5558"; give an engine the same `kv_events` and `kv_replay` in every rule that names it
    "#);
    insta::assert_snapshot!(pair("kv_events = \"tcp://engine:5557\"\nkv_replay = \"tcp://engine:7\""), @r#"
    refused
    rules/two.toml:7:13: endpoint[0].kv_replay: is not what rules/one.toml says of this engine, "tcp://engine:6557"; found "tcp://engine:7"; give an engine the same `kv_events` and `kv_replay` in every rule that names it
    "#);
    insta::assert_snapshot!(pair("kv_events = \"tcp://engine:5557\"\n[events]\nreplay_port_offset = 0"), @r#"
    refused
    rules/two.toml:4:1: endpoint[0].kv_replay: is not what rules/one.toml says of this engine, "tcp://engine:6557"; found none; give an engine the same `kv_events` and `kv_replay` in every rule that names it
    "#);
    insta::assert_snapshot!(pair("kv_events = \"tcp://ENGINE:5557\""), @"taken");
    insta::assert_snapshot!(pair(""), @"taken");
}

#[test]
fn engines_that_announce_no_blocks() {
    insta::assert_snapshot!(Folder::with(r#"engine = "llamacpp"
tiers = ["session", "kv-exact"]
[events]
[[endpoint]]
address = "127.0.0.1:8001"
kv_events = "tcp://h:1"
"#).problems(), @r#"
    refused
    rules/one.toml:2:21: tiers[1]: cannot work: llamacpp announces no blocks; found "kv-exact"; allowed: session, round-robin, chwbl; leave it out: min-load ends every ladder
    rules/one.toml:3:1: events: cannot be read: llamacpp announces no blocks; remove it
    rules/one.toml:6:13: endpoint[0].kv_events: cannot be read: llamacpp announces no blocks; remove it
    "#);
}

#[test]
fn contracts() {
    insta::assert_snapshot!(Folder::with(r#"tiers = ["kv-exact"]
[match]
models = ["m"]
[tier.kv-exact.contract]
mode = "strict"
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r#"
    refused
    rules/one.toml:4:1: tier.kv-exact.contract.algorithm: is missing: mode = "strict" compares with the engine's own hashes; add `algorithm` as the engine is started with, or write mode = "auto"
    rules/one.toml:4:1: tier.kv-exact.contract.block_size: is missing: mode = "strict" compares with the engine's own hashes; add `block_size` as the engine is started with, or write mode = "auto"
    "#);
    let strict_folder = |top: &str, keys: &str| {
        let contract = format!("[tier.kv-exact.contract]\nmode = \"strict\"\nblock_size = 16\n{keys}\n");
        Folder::with(&format!(
            "{top}\ntiers = [\"kv-exact\"]\n{contract}[[endpoint]]\naddress = \"h:1\"\n[events]\n"
        ))
    };
    let checked = |keys: &str| {
        let folder = strict_folder("", keys);
        folder.plain(folder.check(false).problems)
    };
    let strict = |top: &str, keys: &str| strict_folder(top, keys).problems();
    insta::assert_snapshot!(strict("", "algorithm = \"sha256_cbor\"\nnone_hash_seed = \"0\""), @"taken");
    insta::assert_snapshot!(strict("", "algorithm = \"sha256_cbor\""), @r"
    taken
    rules/one.toml:3:1: warning: tier.kv-exact.contract.none_hash_seed: no none_hash_seed: right only if PYTHONHASHSEED is unset in the engine's environment; start the engines with a fixed PYTHONHASHSEED and give it here
    ");
    let never = "algorithm = \"xxhash\"";
    assert_eq!(strict("", never), "taken\n", "its requests miss for `hashes`");
    insta::assert_snapshot!(checked(never), @r"
    rules/one.toml:3:1: tier.kv-exact.contract.none_hash_seed: xxhash without none_hash_seed can never match: the engine's root is random; set PYTHONHASHSEED there; start the engines with a fixed PYTHONHASHSEED and give it here
    ");
    insta::assert_snapshot!(strict("", "algorithm = \"sha256_sglang\""), @r#"
    refused
    rules/one.toml:6:13: tier.kv-exact.contract.algorithm: is not one of the words allowed here; found "sha256_sglang"; allowed: "sha256_cbor", "xxhash_cbor", "sha256", "xxhash"
    "#);
    insta::assert_snapshot!(strict("engine = \"sglang\"", "algorithm = \"sha256_cbor\""), @r#"
    refused
    rules/one.toml:4:8: tier.kv-exact.contract.mode: "strict" is for vllm only; found "strict", and engine = "sglang"; allowed: "auto"; write mode = "auto", or correct `engine`
    "#);
    insta::assert_snapshot!(strict("engine = \"trtllm\"", ""), @r#"
    refused
    rules/one.toml:4:8: tier.kv-exact.contract.mode: "strict" is for vllm only; found "strict", and engine = "trtllm"; allowed: "auto"; write mode = "auto", or correct `engine`
    "#);
}

#[test]
fn models_and_tokenizers() {
    insta::assert_snapshot!(Folder::with(r#"tiers = ["kv-exact"]
[match]
models = ["m", "Qwen/Qwen3-0.6B", "../m", "a__b"]
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r#"
    refused
    rules/one.toml:3:16: warning: match.models[1]: has no tokenizer: kv-exact passes on its requests; found "Qwen/Qwen3-0.6B"; put its tokenizer.json and tokenizer_config.json into tokenizers/Qwen__Qwen3-0.6B
    rules/one.toml:3:35: match.models[2]: can have no tokenizer: a part of the model name is empty, "." or ".."; found "../m"; serve the model under another name, or leave kv-exact out of `tiers`
    rules/one.toml:3:43: match.models[3]: can have no tokenizer: the model name holds "__" or a "_" beside a "/", so that two models would share one folder; found "a__b"; serve the model under another name, or leave kv-exact out of `tiers`
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["kv-exact"]
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r"taken");
    insta::assert_snapshot!(Folder::new().write("rules/one.toml", "tiers = [\"kv-exact\"]\n[[endpoint]]\naddress = \"h:1\"\n").problems(), @r"
    taken
    rules/one.toml:1:9: warning: tiers: kv-exact can never hit: no tokenizer is staged; found tokenizers; put the model's tokenizer.json into <slug>/ there; the slug is its name with / written as __
    ");
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[match]
models = ["a model that needs no tokenizer"]
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r"taken");
}

#[test]
fn adapters_share_the_tokenizer_of_the_one_base() {
    let rule = |models: &str| {
        let text = format!(
            "tiers = [\"kv-exact\"]\n[match]\nmodels = {models}\n[tier.kv-exact.lora]\nsql = \"/sql\"\n\"a__b\" = \"/b\"\n"
        );
        Folder::with(&format!("{text}[[endpoint]]\naddress = \"h:1\"\n"))
    };
    let folder = rule("[\"m\", \"sql\", \"a__b\"]");
    assert_eq!(folder.problems(), "taken\n");
    assert_eq!(folder.load().unwrap().rules[0].base_model(), Some("m"));
    insta::assert_snapshot!(rule("[\"n\", \"sql\"]").problems(), @r#"
    taken
    rules/one.toml:3:11: warning: match.models[0]: has no tokenizer: kv-exact passes on its requests; found "n"; put its tokenizer.json and tokenizer_config.json into tokenizers/n
    "#);
    insta::assert_snapshot!(rule("[\"m\", \"n\", \"sql\"]").problems(), @r#"
    taken
    rules/one.toml:3:16: warning: match.models[1]: has no tokenizer: kv-exact passes on its requests; found "n"; put its tokenizer.json and tokenizer_config.json into tokenizers/n
    rules/one.toml:3:21: warning: match.models[2]: has no tokenizer: kv-exact passes on its requests; found "sql"; put its tokenizer.json and tokenizer_config.json into tokenizers/sql
    "#);
    insta::assert_snapshot!(rule("[\"sql\"]").problems(), @r#"
    taken
    rules/one.toml:3:11: warning: match.models[0]: has no tokenizer: kv-exact passes on its requests; found "sql"; put its tokenizer.json and tokenizer_config.json into tokenizers/sql
    "#);
}

#[test]
fn endpoints_that_publish_nothing() {
    let rule = |top: &str, two: &str| {
        let endpoints = format!("[[endpoint]]\naddress = \"h:1\"\n{two}\n[[endpoint]]\naddress = \"h:2\"\n");
        Folder::with(&format!("{top}\ntiers = [\"kv-exact\"]\nmatch.models = [\"m\"]\n{endpoints}"))
            .problems()
    };
    insta::assert_snapshot!(rule("events.port = 0", ""), @r"
    taken
    rules/one.toml:1:15: warning: events.port: kv-exact can never hit: no endpoint says where it publishes its blocks; give `events.port`, or `kv_events` of each endpoint
    ");
    insta::assert_snapshot!(rule("engine = \"trtllm\"", ""), @r"
    taken
    rules/one.toml:2:9: warning: tiers: kv-exact can never hit: no endpoint says where it publishes its blocks; give `events.port`, or `kv_events` of each endpoint
    ");
    insta::assert_snapshot!(rule("events.port = 0", "kv_events = \"tcp://h:3\""), @r"
    taken
    rules/one.toml:7:1: warning: endpoint[1].kv_events: is missing, and there is no `events.port`: kv-exact never chooses this endpoint; add `kv_events`
    ");
}

#[test]
fn check_loads_the_tokenizers_that_rules_name() {
    let words = kvgate_tests::tokenizers().join("tiny-words");
    let staged = |file: &str| std::fs::read(words.join(file)).unwrap();
    let rule = "tiers = [\"kv-exact\"]\n[match]\nmodels = [\"m\", \"good\", \"bare\"]\n[[endpoint]]\naddress = \"h:1\"\n";
    let mut folder = Folder::with(rule).write("tokenizers/bare/tokenizer.json", staged("tokenizer.json"));
    for file in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
        folder = folder.write(&format!("tokenizers/good/{file}"), staged(file));
    }
    assert_eq!(folder.problems(), "taken\n", "what is staged is not loaded where time matters");
    let report = folder.check(false);
    assert!(report.ok && !folder.check(true).ok, "the gateway would start");
    insta::assert_snapshot!(folder.plain(report.problems), @r#"
    rules/one.toml:3:11: warning: match.models[0]: has a tokenizer that cannot be used, kv-exact passes: tokenizer.json: the config has no `model`; found "m"; put the engine's own files there
    rules/one.toml:3:24: warning: match.models[2]: has a tokenizer to look at: no chat template: chats cannot be prepared; found "bare"; compare it with the engine's files
    rules/one.toml:3:24: warning: match.models[2]: has a tokenizer to look at: no token that ends a turn is safe to cut after: every turn is tokenised whole; found "bare"; compare it with the engine's files
    "#);
    let folder = folder.write("gateway.toml", "tokenizer.max_models = 1");
    insta::assert_snapshot!(folder.plain(folder.check(false).problems), @r#"
    rules/one.toml:3:11: warning: match.models[0]: has a tokenizer that cannot be used, kv-exact passes: tokenizer.json: the config has no `model`; found "m"; put the engine's own files there
    rules/one.toml:3:16: warning: match.models[1]: has no tokenizer: 1 are held at most, and rules name more; found "good"; raise `tokenizer.max_models` in gateway.toml
    rules/one.toml:3:24: warning: match.models[2]: has no tokenizer: 1 are held at most, and rules name more; found "bare"; raise `tokenizer.max_models` in gateway.toml
    "#);
    let folder = folder.write("rules/one.toml", rule.replace("\"kv-exact\"", ""));
    assert_eq!(folder.check(true).warnings, 0, "without the tier nobody needs one");
}

#[test]
fn names_and_ids() {
    insta::assert_snapshot!(Folder::pair("name = \"a\"\nid = 1", "name = \"a\"\nid = 1\nmatch.path_prefix = \"/v1\"").problems(), @r#"
    refused
    rules/two.toml:2:8: name: is also the name of the rule in rules/one.toml; found "a"; give each rule a name of its own
    rules/two.toml:3:6: id: is also the id of the rule "a" in rules/one.toml; found 1; give each rule an id of its own, or none
    "#);
    insta::assert_snapshot!(Folder::new().write("rules/a rule.toml", RULE).problems(), @r#"
    refused
    rules/a rule.toml:1:1: name: is taken from the file's name, which does not have the right form; found "a rule"; allowed: 1 to 64 letters, digits, `.`, `_` or `-`; add `name`, or rename the file
    "#);
}

#[test]
fn the_listener_of_a_rule() {
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[match]
listener = "edg"
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r#"
    refused
    rules/one.toml:3:12: match.listener: is no listener of gateway.toml; found "edg"; allowed: edge; did you mean "edge"?
    "#);
}

#[test]
fn rules_as_specific_as_each_other() {
    insta::assert_snapshot!(Folder::pair("", "").problems(), @r#"
    refused
    rules/two.toml:1:1: match: is as specific as that of the rule "one" in rules/one.toml; found both match any host, path /, any model; make one differ by listener, host, path or model, or remove one
    "#);
    insta::assert_snapshot!(Folder::pair("[match]\nhosts = [\"a\", \"B\"]\nmodels = [\"m\"]", "[match]\nhosts = [\"b\"]\nmodels = [\"n\", \"m\"]\npath_prefix = \"//\"").problems(), @r#"
    refused
    rules/two.toml:4:10: match.models: is as specific as that of the rule "one" in rules/one.toml; found both match host b, path /, model m; make one differ by listener, host, path or model, or remove one
    "#);
    insta::assert_snapshot!(Folder::pair("[match]\nhosts = [\"a\"]", "[match]\nhosts = [\"b\"]").problems(), @r"taken");
    insta::assert_snapshot!(Folder::pair("[match]\nmodels = [\"m\"]", "").problems(), @r"taken");
    insta::assert_snapshot!(Folder::pair("[match]\nlistener = \"edge\"\npath_prefix = \"/v1\"", "match.hosts = [\"a\"]").problems(), @r"taken");
}

#[test]
fn rules_never_reached() {
    insta::assert_snapshot!(Folder::pair("[match]\nlistener = \"edge\"", "[match]\nhosts = [\"a\"]\nmodels = [\"m\"]").problems(), @r#"
    refused
    rules/two.toml:2:1: match: is never reached: more specific rules take every request of it; found taken by "one" in rules/one.toml; listener comes before host, host before path, path before model
    "#);
    insta::assert_snapshot!(Folder::pair("[match]\nlistener = \"edge\"", "[match]\nhosts = [\"a\"]\nmodels = [\"m\"]").write("gateway.toml", "[[listener]]\n[[listener]]\nname = \"b\"\naddress = \"127.0.0.1:1\"").problems(), @r"taken");
    insta::assert_snapshot!(Folder::pair("[match]\nlistener = \"edge\"\nmodels = [\"m\"]", "[match]\nmodels = [\"m\", \"n\"]").write("rules/three.toml", "tiers = []\nmatch = { listener = \"edge\", models = [\"n\", \"o\"] }\n[[endpoint]]\naddress = \"h:1\"").problems(), @r#"
    refused
    rules/two.toml:2:1: match: is never reached: more specific rules take every request of it; found taken by "one" in rules/one.toml, "three" in rules/three.toml; listener comes before host, host before path, path before model
    "#);
    insta::assert_snapshot!(Folder::pair("[match]\nlistener = \"edge\"\npath_prefix = \"/v1\"", "match.path_prefix = \"/v1beta\"").problems(), @r"taken");
}
