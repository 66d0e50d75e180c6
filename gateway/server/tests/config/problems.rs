//! What is wrong, in the words it is said: the whole text is asserted.

use std::os::unix::fs::symlink;

use kvgate::config::MAX_FILE;

use crate::folder::{Folder, RULE};

#[test]
fn problems_of_all_files_come_at_once() {
    insta::assert_snapshot!(Folder::new().write("gateway.toml", "[server]\nthreds = 4\n[limits]\nbody = \"16MB\"\n").write("rules/one.toml", "tiers = []\nshape = \"pol\"\n[[endpoint]]\naddress = \"http://127.0.0.1:8001\"\n").write("rules/two.toml", "name = = 1\nid = \n").problems(), @r#"
    refused
    gateway.toml:2:1: server.threds: unknown key; found threds; allowed: rules, tokenizers, threads, body_memory, grace_period, drain_delay, warm_up, upgrade_socket, reload_debounce; did you mean `threads`?
    gateway.toml:4:8: limits.body: is not a size; found "16MB"; allowed: a size, "1KiB" to "1GiB"; write a whole number and B, KiB, MiB or GiB
    rules/one.toml:2:9: shape: is not one of the words allowed here; found "pol"; allowed: "pool", "prefill-decode"; did you mean "pool"?
    rules/one.toml:4:11: endpoint[0].address: does not have the right form; found "http://127.0.0.1:8001"; allowed: a host and a port, "10.0.0.7:8000" or "engine-0.svc:8000"; write "127.0.0.1:8001"
    rules/two.toml:1:8: TOML: extra `=`, expected nothing
    rules/two.toml:1:10: TOML: unexpected key or value, expected newline, `#`
    rules/two.toml:2:6: TOML: string values must be quoted, expected literal string
    "#);
}

#[test]
fn every_text_of_a_list_is_looked_at() {
    insta::assert_snapshot!(Folder::with("tiers = [\"round-robin\"]\n[match]\nhosts = [\"a:80\", \"b\", \"*.x\", \"\"]\n[[endpoint]]\naddress = \"127.0.0.1:8001\"\n").problems(), @r#"
    refused
    rules/one.toml:3:10: match.hosts[0]: does not have the right form; found "a:80"; allowed: a host name or IP address without port or wildcard; write "a": the port is the listener's matter (`listener`)
    rules/one.toml:3:23: match.hosts[2]: does not have the right form; found "*.x"; allowed: a host name or IP address without port or wildcard; wildcards are not matched: list the hosts, or leave `hosts` out for any
    rules/one.toml:3:30: match.hosts[3]: is empty; found ""; allowed: a host name or IP address without port or wildcard; leave the key out to have the default
    "#);
}

#[test]
fn more_engines_than_the_inventory_holds() {
    let rule = "tiers = [\"kv-exact\"]\n[[endpoint]]\naddress = \"127.0.0.1:8001\"\nkv_events = \"tcp://127.0.0.1:5557\"\n[[endpoint]]\naddress = \"127.0.0.1:8002\"\nkv_events = \"tcp://127.0.0.1:5558\"\n";
    let folder = Folder::with(rule).write("gateway.toml", "[inventory]\nmax_caches = 1\n");
    let told = folder.problems();
    assert!(
        told.contains("rules/one.toml:2:1: endpoint: brings more engines that publish KV events"),
        "{told}"
    );
    assert!(
        told.contains("found 2 engines, of all rules so far; allowed: 1, `inventory.max_caches`"),
        "{told}"
    );
    let folder = Folder::with(rule).write("gateway.toml", "[inventory]\nmax_caches = 2\n");
    assert!(!folder.problems().contains("max_caches"));
}

#[test]
fn values() {
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"[server]
threads = 2000
grace_period = 30
reload_debounce = "1d"
rules = ""
[log]
format = "jsn"
[admin]
address = "localhost:1"
"#).problems(), @r#"
    refused
    gateway.toml:2:11: server.threads: is out of range; found 2000; allowed: a whole number, 0 to 1024
    gateway.toml:3:16: server.grace_period: is a whole number, which is not allowed here; found 30; allowed: a duration, "0ms" to "24h"; give it a unit: "30s"
    gateway.toml:4:19: server.reload_debounce: is not a duration; found "1d"; allowed: a duration, "10ms" to "1m"; write a whole number and ms, s, m or h
    gateway.toml:5:9: server.rules: is empty; found ""; allowed: a text; leave the key out to have the default
    gateway.toml:7:10: log.format: is not one of the words allowed here; found "jsn"; allowed: "text", "json"; did you mean "json"?
    gateway.toml:9:11: admin.address: does not have the right form; found "localhost:1"; allowed: an IP address and a port, "127.0.0.1:8080" or "[::1]:8080"; write "127.0.0.1:1"
    "#);
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"[limits]
body = 5
[retry]
attempts = "3"
statuses = ["503", 99]
[timeouts]
connect = "500"
idle = "1ms"
body = 1.5
total = true
prepare = 99999999999999999999
"#).problems(), @r#"
    refused
    gateway.toml:2:8: limits.body: is out of range; found 5; allowed: a size, "1KiB" to "1GiB"
    gateway.toml:4:12: retry.attempts: is a text, which is not allowed here; found "3"; allowed: a whole number, 1 to 16; write 3 without quotes
    gateway.toml:5:13: retry.statuses[0]: is a text, which is not allowed here; found "503"; allowed: a whole number, 400 to 599; write 503 without quotes
    gateway.toml:5:20: retry.statuses[1]: is out of range; found 99; allowed: a whole number, 400 to 599
    gateway.toml:7:11: timeouts.connect: is not a duration; found "500"; allowed: a duration, "10ms" to "1m"; give it a unit: "500ms"
    gateway.toml:8:8: timeouts.idle: is out of range; found "1ms"; allowed: a duration, "100ms" to "24h"
    gateway.toml:9:8: timeouts.body: is a fraction, which is not allowed here; found 1.5; allowed: a duration, "100ms" to "1h"
    gateway.toml:10:9: timeouts.total: is true or false, which is not allowed here; found true; allowed: a duration, "100ms" to "168h"
    gateway.toml:11:11: timeouts.prepare: is a whole number, which is not allowed here; found 99999999999999999999; allowed: a duration, "1ms" to "10s"
    "#);
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"[[listener]]
address = ":80"
name = "a b"
expose_routing = "true"
[[listener]]
address = "127.0.0.1"
[[listener]]
address = "127.0.0.1:0"
name = 5
"#).problems(), @r#"
    refused
    gateway.toml:2:11: listener[0].address: does not have the right form; found ":80"; allowed: an IP address and a port, "127.0.0.1:8080" or "[::1]:8080"; for every address write "0.0.0.0:80"
    gateway.toml:3:8: listener[0].name: does not have the right form; found "a b"; allowed: 1 to 64 letters, digits, `.`, `_` or `-`
    gateway.toml:4:18: listener[0].expose_routing: is a text, which is not allowed here; found "true"; allowed: true or false; write true without quotes
    gateway.toml:6:11: listener[1].address: does not have the right form; found "127.0.0.1"; allowed: an IP address and a port, "127.0.0.1:8080" or "[::1]:8080"; add a port
    gateway.toml:8:11: listener[2].address: does not have the right form; found "127.0.0.1:0"; allowed: an IP address and a port, "127.0.0.1:8080" or "[::1]:8080"; name a port
    gateway.toml:9:8: listener[2].name: is a whole number, which is not allowed here; found 5; allowed: 1 to 64 letters, digits, `.`, `_` or `-`; write "5"
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = "round-robin"
id = 0
name = "é"
explain = 1
[match]
hosts = ["*.example.com", "h"]
models = [1]
path_prefix = "v1"
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r#"
    refused
    rules/one.toml:1:9: tiers: is a text, which is not allowed here; found "round-robin"; allowed: a list of texts; write ["round-robin"]
    rules/one.toml:2:6: id: is out of range; found 0; allowed: a whole number, 1 to 4294967295
    rules/one.toml:3:8: name: does not have the right form; found "é"; allowed: 1 to 64 letters, digits, `.`, `_` or `-`
    rules/one.toml:4:11: explain: is a whole number, which is not allowed here; found 1; allowed: true or false; write true
    rules/one.toml:6:10: match.hosts[0]: does not have the right form; found "*.example.com"; allowed: a host name or IP address without port or wildcard; wildcards are not matched: list the hosts, or leave `hosts` out for any
    rules/one.toml:7:11: match.models[0]: is a whole number in a list of texts; found 1; allowed: a list of texts
    rules/one.toml:8:15: match.path_prefix: does not have the right form; found "v1"; allowed: a path that begins with `/`; write "/v1"
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[match]
hosts = ["h:8080"]
models = ["m", "m"]
path_prefix = "/v1?x=1"
listener = 2026-01-01
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r#"
    refused
    rules/one.toml:3:10: match.hosts[0]: does not have the right form; found "h:8080"; allowed: a host name or IP address without port or wildcard; write "h": the port is the listener's matter (`listener`)
    rules/one.toml:4:16: match.models[1]: stands in the list twice; found "m"; allowed: a list of texts; remove one
    rules/one.toml:5:15: match.path_prefix: does not have the right form; found "/v1?x=1"; allowed: a path that begins with `/`; write "/v1"
    rules/one.toml:6:12: match.listener: is a date, which is not allowed here; found 2026-01-01; allowed: 1 to 64 letters, digits, `.`, `_` or `-`
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[[endpoint]]
address = "127.0.0.1"
[[endpoint]]
address = "https://h:443/"
[[endpoint]]
address = "h:99999"
weight = 0
kv_events = "127.0.0.1:5557"
kv_replay = "ipc:///x"
role = "Prefill"
"#).problems(), @r#"
    refused
    rules/one.toml:3:11: endpoint[0].address: does not have the right form; found "127.0.0.1"; allowed: a host and a port, "10.0.0.7:8000" or "engine-0.svc:8000"; add a port: "127.0.0.1:8000"
    rules/one.toml:5:11: endpoint[1].address: does not have the right form; found "https://h:443/"; allowed: a host and a port, "10.0.0.7:8000" or "engine-0.svc:8000"; write "h:443", and the name in the engine's certificate as `tls`
    rules/one.toml:7:11: endpoint[2].address: does not have the right form; found "h:99999"; allowed: a host and a port, "10.0.0.7:8000" or "engine-0.svc:8000"
    rules/one.toml:8:10: endpoint[2].weight: is out of range; found 0; allowed: a whole number, 1 to 1000
    rules/one.toml:9:13: endpoint[2].kv_events: does not have the right form; found "127.0.0.1:5557"; allowed: a ZMQ address, "tcp://10.0.0.7:5557"; write "tcp://127.0.0.1:5557"
    rules/one.toml:10:13: endpoint[2].kv_replay: does not have the right form; found "ipc:///x"; allowed: a ZMQ address, "tcp://10.0.0.7:5557"; only tcp:// is spoken
    rules/one.toml:11:8: endpoint[2].role: is not one of the words allowed here; found "Prefill"; allowed: "any", "prefill", "decode"; did you mean "prefill"?
    "#);
}

#[test]
fn tables() {
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"server = 3
listener = "edge"
[admn]
[limits.body]
x = 1
"#).problems(), @r#"
    refused
    gateway.toml:1:10: server: is a whole number, not [server]; found 3; allowed: [server]; write the header [server] above its keys
    gateway.toml:2:12: listener: is a text, not [[listener]]; found "edge"; allowed: [[listener]]; write the header [[listener]] above its keys
    gateway.toml:3:2: admn: unknown table; found admn; allowed: server, listener, connections, http2, admin, log, limits, timeouts, retry, retry_budget, breaker, probe, telemetry, tokenizer, inventory, feed, decisions, alarms; did you mean `admin`?
    gateway.toml:4:1: limits.body: is a table, which is not allowed here; found [limits.body]; allowed: a size, "1KiB" to "1GiB"
    "#);
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"[listener]
name = "edge"
[server.rules]
"#).problems(), @r"
    refused
    gateway.toml:1:1: listener: is a table, not [[listener]]; found [listener]; allowed: [[listener]]; write the header [[listener]] above its keys
    gateway.toml:3:1: server.rules: is a table, which is not allowed here; found [server.rules]; allowed: a text
    ");
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
endpoint = ["127.0.0.1:8001"]
"#).problems(), @r#"
    refused
    rules/one.toml:2:13: endpoint[0]: is a text, not [[endpoint]]; found "127.0.0.1:8001"; allowed: [[endpoint]]; write the header [[endpoint]] above its keys
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[endpoint]
address = "127.0.0.1:8001"
"#).problems(), @r"
    refused
    rules/one.toml:2:1: endpoint: is a table, not [[endpoint]]; found [endpoint]; allowed: [[endpoint]]; write the header [[endpoint]] above its keys
    ");
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
tier = 1
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r"
    refused
    rules/one.toml:2:8: tier: is a whole number, not a table; found 1; allowed: tables [tier.<name>]
    ");
    insta::assert_snapshot!(Folder::with(r#"tiers = ["kv-exact"]
[match]
models = ["m"]
[tier.kv-exact]
contract = "auto"
lora = { a = 1 }
[tier.kv-exact.contrat]
[tier.sessions]
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r#"
    refused
    rules/one.toml:5:12: tier.kv-exact.contract: is a text, not a table; found "auto"; allowed: [tier.kv-exact.contract]; remove it, and write the header [tier.kv-exact.contract] above the table's keys
    rules/one.toml:6:14: tier.kv-exact.lora.a: is a whole number in a table of texts; found 1; allowed: a table of texts
    rules/one.toml:7:16: tier.kv-exact.contrat: unknown table; found contrat; allowed: min_match_tokens, contract, lora, cache; did you mean `contract`?
    rules/one.toml:8:7: tier.sessions: unknown table; found sessions; allowed: session, kv-exact, round-robin, chwbl; did you mean `session`?
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["session", "kv-exact"]
[match]
models = ["m"]
[tier.session]
ttl = "0s"
time = 1
[tier.kv-exact.contract]
mode = "Strict"
blocksize = 16
[[endpoint]]
address = "127.0.0.1:8001"
"#).problems(), @r#"
    refused
    rules/one.toml:5:7: tier.session.ttl: is out of range; found "0s"; allowed: a duration, "1s" to "1h"
    rules/one.toml:6:1: tier.session.time: unknown key; found time; allowed: ttl
    rules/one.toml:8:8: tier.kv-exact.contract.mode: is not one of the words allowed here; found "Strict"; allowed: "auto", "strict"; did you mean "strict"?
    rules/one.toml:9:1: tier.kv-exact.contract.blocksize: unknown key; found blocksize; allowed: mode, algorithm, block_size, none_hash_seed; did you mean `block_size`?
    "#);
    insta::assert_snapshot!(Folder::with(r#"tiers = ["round-robin"]
[[endpoint]]
adress = "127.0.0.1:8001"
[[endpoint]]
weight = 2
"#).problems(), @r#"
    refused
    rules/one.toml:3:1: endpoint[0].adress: unknown key; found adress; allowed: address, role, weight, tls, kv_events, kv_replay, nixl_port; did you mean `address`?
    rules/one.toml:4:1: endpoint[1].address: is missing; allowed: a host and a port, "10.0.0.7:8000" or "engine-0.svc:8000"; add `address` to this [[endpoint]]
    "#);
}

#[test]
fn listeners_and_admin() {
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"[[listener]]
[[listener]]
"#).problems(), @r#"
    refused
    gateway.toml:2:1: listener[1].name: is also the name of listener[0]; found "edge"; give each [[listener]] a `name` of its own
    gateway.toml:2:1: listener[1].address: is taken by listener[0], 127.0.0.1:8080; found "127.0.0.1:8080"; give each [[listener]] an `address` of its own
    "#);
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"[[listener]]
name = "a"
address = "0.0.0.0:80"
[[listener]]
name = "b"
address = "10.0.0.1:80"
[[listener]]
name = "c"
address = "[::1]:80"
"#).problems(), @r#"
    refused
    gateway.toml:6:11: listener[1].address: is taken by listener[0], 0.0.0.0:80; found "10.0.0.1:80"; give each [[listener]] an `address` of its own
    "#);
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"[admin]
address = "127.0.0.1:8080"
"#).problems(), @r#"
    refused
    gateway.toml:2:11: admin.address: is taken by listener[0], 127.0.0.1:8080; found "127.0.0.1:8080"; the admin surface has an address of its own
    "#);
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"[admin]
address = "0.0.0.0:11111"
"#).problems(), @r#"
    refused
    gateway.toml:2:11: admin.address: is not a loopback address, and there is no `admin.token_file`; found "0.0.0.0:11111"; allowed: an address in 127.0.0.0/8 or [::1]; any with `token_file`; add `token_file`, or listen on 127.0.0.1
    "#);
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"[admin]
address = "0.0.0.0:11111"
token_file = "missing"
"#).problems(), @r"
    refused
    gateway.toml:3:14: admin.token_file: cannot be read: No such file or directory (os error 2); found missing; write the token into it, in one line
    ");
    insta::assert_snapshot!(Folder::with(RULE).write("token", " \n").write("gateway.toml", "admin.token_file = \"token\"").problems(), @r"
    refused
    gateway.toml:1:20: admin.token_file: holds no token; found token; write the token into it, in one line
    ");
    insta::assert_snapshot!(Folder::with(RULE).write("token", "secret\n").write("gateway.toml", "admin = { address = \"0.0.0.0:11111\", token_file = \"token\" }").problems(), @r"taken");
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"[feed]
backoff_min = "2s"
backoff_max = "1s"
"#).problems(), @r#"
    refused
    gateway.toml:2:15: feed.backoff_min: is longer than `feed.backoff_max`; found "2s"; make it the shorter of the two
    "#);
}

#[test]
fn bodies_and_the_memory_they_share() {
    let rule = format!("{RULE}[limits]\nbody = \"128MiB\"\n");
    let gateway = "[server]\nbody_memory = \"64MiB\"\n[limits]\nbody = \"65MiB\"\n";
    insta::assert_snapshot!(Folder::with(&rule).write("gateway.toml", gateway).problems(), @r#"
    refused
    gateway.toml:4:8: limits.body: is more than all requests share, `server.body_memory`, 64MiB; found "65MiB"; lower it, or raise `server.body_memory` in gateway.toml
    rules/one.toml:5:8: limits.body: is more than all requests share, `server.body_memory`, 64MiB; found "128MiB"; lower it, or raise `server.body_memory` in gateway.toml
    "#);
    let gateway = "[server]\nbody_memory = \"128MiB\"\n[limits]\nbody = \"65MiB\"\n";
    assert_eq!(
        Folder::with(&rule).write("gateway.toml", gateway).load().unwrap().gateway.server.body_memory,
        128 << 20
    );
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", "server.body_memory = \"1MiB\"").problems(), @r#"
    refused
    gateway.toml:1:22: server.body_memory: is out of range; found "1MiB"; allowed: a size, "16MiB" to "64GiB"
    "#);
}

#[test]
fn folders_and_files() {
    insta::assert_snapshot!(Folder::with(RULE).write("gateway.toml", r#"[server]
rules = "nowhere"
tokenizers = "gateway.toml"
"#).problems(), @r"
    refused
    gateway.toml:2:9: server.rules: is missing; found nowhere; make the folder, or name another; the path is relative to this file
    gateway.toml:3:14: server.tokenizers: is not a folder; found gateway.toml; make the folder, or name another; the path is relative to this file
    ");
    insta::assert_snapshot!(Folder::new().problems(), @r"
    taken
    gateway.toml:1:1: warning: server.rules: holds no rule: every request is answered 503; found rules; put a file <name>.toml into it for each service
    ");
}

/// Files that are no TOML, or no files: named, and no more.
#[test]
fn what_cannot_be_read() {
    let folder = Folder::with(RULE)
        .write("rules/1-latin.toml", b"name = \"caf\xe9\"\n")
        .write("rules/2-huge.toml", "#".repeat(usize::try_from(MAX_FILE).unwrap() + 1))
        .write("rules/3-folder.toml/x", "")
        .write("rules/4-empty.toml", "")
        .write("rules/5-nul.toml", "name = \"a\"\0\n")
        .write("rules/6-unclosed.toml", "[match\nmodels = [\"m\"\n")
        .write("rules/7-twice.toml", "id = 1\nid = 2\n");
    symlink("nowhere", folder.path("rules/8-dangling.toml")).unwrap();
    symlink("9-loop.toml", folder.path("rules/9-loop.toml")).unwrap();
    insta::assert_snapshot!(folder.problems(), @r#"
    refused
    rules/1-latin.toml:1:12: is not UTF-8; found byte 0xe9; save it as UTF-8
    rules/2-huge.toml:1:1: is larger than 1 MiB; split it: one rule per file, and no data in it
    rules/3-folder.toml:1:1: is a folder, not a file; rename or remove it: names ending in .toml are for files
    rules/4-empty.toml:1:1: endpoint: the rule has no endpoint; allowed: at least one [[endpoint]]; add [[endpoint]] with an `address`
    rules/5-nul.toml:1:11: TOML: unexpected key or value, expected newline, `#`
    rules/6-unclosed.toml:1:7: TOML: unclosed table, expected `]`
    rules/6-unclosed.toml:2:14: TOML: unclosed array, expected `]`
    rules/7-twice.toml:2:1: TOML: duplicate key
    rules/8-dangling.toml:1:1: is a symbolic link to nowhere, which is missing; mend or remove the link
    rules/9-loop.toml:1:1: cannot be read: Too many levels of symbolic links (os error 40); check its permissions and those of its folder
    rules/one.toml:1:1: match: is as specific as that of the rule "4-empty" in rules/4-empty.toml; found both match any host, path /, any model; make one differ by listener, host, path or model, or remove one
    "#);
    let missing = kvgate::config::load(&folder.path("missing.toml"), &[]).unwrap_err();
    insta::assert_snapshot!(folder.plain(missing), @r"missing.toml:1:1: is missing; name an existing file with --config");
    let folder = Folder::with("nme = \"one\"\n").write("gateway.toml", "[server");
    insta::assert_snapshot!(folder.problems(), @r"
    refused
    gateway.toml:1:8: TOML: unclosed table, expected `]`
    rules/one.toml:1:1: nme: unknown key; found nme; allowed: name, id, engine, shape, tiers, decode_tiers, explain, match, events, endpoint, tls, legs, limits, timeouts, retry, breaker, probe, telemetry, tier; did you mean `name`?
    rules/one.toml:1:1: endpoint: the rule has no endpoint; allowed: at least one [[endpoint]]; add [[endpoint]] with an `address`
    ");
}

#[test]
fn depth_and_length_are_refused_or_taken_but_never_fatal() {
    let deep = 100_000;
    for text in [
        format!("name = {}", "[".repeat(deep)),
        format!("name = {}{}", "[".repeat(deep), "]".repeat(deep)),
        format!("name = {}1{}", "{a=".repeat(deep), "}".repeat(deep)),
        format!("{}a = 1", "a.".repeat(deep)),
        format!("[{}a]", "a.".repeat(deep)),
        "[[endpoint]]\n".repeat(deep / 2),
        format!("name = \"{}\"", "x".repeat(deep)),
        format!("match.models = [{}]", (0..deep).map(|n| format!("\"{n}\",")).collect::<String>()),
    ] {
        let problems = Folder::with(&text).load().unwrap_err();
        assert!(problems.errors() > 0, "{}", &text[..20]);
        let shown = problems.render(false).len();
        assert!((1..200_000).contains(&shown), "{shown} bytes for a screen");
    }
}

#[test]
fn rendered_for_people() {
    let folder = Folder::with(&RULE.replace("round-robin", "roundrobin"))
        .write("gateway.toml", "[server]\nthreds = 4\n[limits]\nbody = \"16MB\"\n");
    insta::assert_snapshot!(folder.plain(folder.check(false).render(false)), @r#"
      × gateway.toml:2: server.threds: unknown key
       ╭─[gateway.toml:2:1]
     1 │ [server]
     2 │ threds = 4
       · ───┬──
       ·    ╰── found
     3 │ [limits]
       ╰────
      help: allowed: rules, tokenizers, threads, body_memory, grace_period, drain_delay, warm_up, upgrade_socket, reload_debounce
            did you mean `threads`?
      × gateway.toml:4: limits.body: is not a size
       ╭─[gateway.toml:4:8]
     3 │ [limits]
     4 │ body = "16MB"
       ·        ───┬──
       ·           ╰── found
       ╰────
      help: allowed: a size, "1KiB" to "1GiB"
            write a whole number and B, KiB, MiB or GiB
      × rules/one.toml:1: tiers[0]: is not a tier
       ╭─[rules/one.toml:1:10]
     1 │ tiers = ["roundrobin"]
       ·          ──────┬─────
       ·                ╰── found
     2 │ [[endpoint]]
       ╰────
      help: allowed: session, kv-exact, round-robin, chwbl
            did you mean "round-robin"?
    gateway.toml: invalid: 3 errors, 0 warnings
    "#);
    assert!(folder.check(false).render(true).contains("\u{1b}["), "colour for a terminal");
    let folder = Folder::new();
    insta::assert_snapshot!(folder.plain(folder.check(false).render(false)), @r"
      ⚠ gateway.toml:1: server.rules: holds no rule: every request is answered 503
      help: put a file <name>.toml into it for each service
    gateway.toml: valid: 0 rules with 0 endpoints, 1 warning
    ");
    insta::assert_snapshot!(folder.plain(folder.check(true).render(false)).lines().last().unwrap(), @r"gateway.toml: refused for its warnings: 0 rules with 0 endpoints, 1 warning");
}

#[test]
fn as_json() {
    let folder = Folder::with("shap = \"pool\"\n");
    let json = serde_json::to_string_pretty(&folder.check(false)).unwrap();
    insta::assert_snapshot!(folder.plain(json), @r#"
    {
      "file": "gateway.toml",
      "ok": false,
      "errors": 2,
      "warnings": 0,
      "rules": 0,
      "endpoints": 0,
      "problems": [
        {
          "severity": "error",
          "file": "rules/one.toml",
          "line": 1,
          "column": 1,
          "key": "shap",
          "message": "unknown key",
          "found": "shap",
          "allowed": "name, id, engine, shape, tiers, decode_tiers, explain, match, events, endpoint, tls, legs, limits, timeouts, retry, breaker, probe, telemetry, tier",
          "hint": "did you mean `shape`?"
        },
        {
          "severity": "error",
          "file": "rules/one.toml",
          "line": 1,
          "column": 1,
          "key": "endpoint",
          "message": "the rule has no endpoint",
          "allowed": "at least one [[endpoint]]",
          "hint": "add [[endpoint]] with an `address`"
        }
      ]
    }
    "#);
}
