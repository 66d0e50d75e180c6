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
    rules/one.toml:4:8: endpoint[0].role: is a part of a pair, and this rule is a pool; found "prefill"; allowed: "any"; leave `role` out: every endpoint serves requests whole
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
shape = "prefill-decode"
[[endpoint]]
address = "h:1"
role = "prefill"
[[endpoint]]
address = "h:2"
role = "decode"
"#).problems(), @r#"
    refused
    rules/one.toml:2:9: shape: is not served by this version; found "prefill-decode"; allowed: "pool"; leave it out: every endpoint serves requests whole
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
    let without_seed = |algorithm: &str| {
        Folder::with(&format!(
            "tiers = [\"kv-exact\"]\n[match]\nmodels = [\"m\"]\n[tier.kv-exact.contract]\nmode = \"strict\"\n\
            algorithm = \"{algorithm}\"\nblock_size = 16\n[[endpoint]]\naddress = \"127.0.0.1:8001\"\n"
        ))
        .problems()
    };
    insta::assert_snapshot!(without_seed("sha256_cbor"), @r"
    taken
    rules/one.toml:4:1: warning: tier.kv-exact.contract.none_hash_seed: no none_hash_seed: right only if PYTHONHASHSEED is unset in the engine's environment; start the engines with a fixed PYTHONHASHSEED and give it here; with a random one nothing matches
    ");
    insta::assert_snapshot!(without_seed("xxhash_cbor"), @r"
    taken
    rules/one.toml:4:1: warning: tier.kv-exact.contract.none_hash_seed: xxhash_cbor without none_hash_seed can never match: the engine's root is random; set PYTHONHASHSEED there; start the engines with a fixed PYTHONHASHSEED and give it here; with a random one nothing matches
    ");
    insta::assert_snapshot!(Folder::with(r#"tiers = ["kv-exact"]
[match]
models = ["m"]
[tier.kv-exact.contract]
mode = "strict"
algorithm = "sha256_sglang"
block_size = 16
none_hash_seed = "0"
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r#"
    refused
    rules/one.toml:6:13: tier.kv-exact.contract.algorithm: is not one of vllm; found "sha256_sglang"; allowed: sha256, sha256_cbor, xxhash, xxhash_cbor; leave it out, or correct `engine`
    "#);
    insta::assert_snapshot!(Folder::with(r#"engine = "sglang"
tiers = ["kv-exact"]
[match]
models = ["m"]
[tier.kv-exact.contract]
mode = "strict"
algorithm = "sha256_sglang"
block_size = 16
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r"taken");
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
