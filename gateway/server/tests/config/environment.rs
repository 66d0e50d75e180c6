//! The environment as a layer between files and defaults.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use kvgate::config::{self, Config, Effective, Environment, Provenance, Setting};
use kvgate_core::Role;
use kvgate_tiers::TIERS;
use serde_json::{Value, json};

use crate::folder::Folder;

const KV: &str = "tiers = [\"admission\", \"kv-exact\"]\nmatch.models = [\"m\"]\n[[endpoint]]\naddress = \"127.0.0.1:8001\"\n";

fn load<V: Into<OsString>>(
    folder: &Folder,
    variables: impl IntoIterator<Item = (&'static str, V)>,
) -> (Config, Effective) {
    let mut effective = Effective::default();
    let environment = Environment::of(variables);
    let config = config::load_over(&folder.path("gateway.toml"), TIERS, &environment, Some(&mut effective));
    (config.unwrap_or_else(|e| panic!("{e}")), effective)
}

/// A key of the first rule, or else of the gateway.
fn setting<'a>(effective: &'a Effective, key: &str) -> &'a Setting {
    let rule = effective.rules.iter().flat_map(|rule| &rule.keys);
    rule.chain(&effective.gateway).find(|setting| setting.key == key).unwrap_or_else(|| panic!("no {key}"))
}

/// Every variable, a value it may have, its key, and the value there.
fn cases() -> Vec<(&'static str, &'static str, &'static str, Value)> {
    vec![
        ("LLB_KV_NONE_HASH_SEED", "0", "tier.kv-exact.contract.none_hash_seed", json!("0")),
        ("LLB_KV_MIN_MATCH_TOKENS", "0", "tier.kv-exact.min_match_tokens", json!(0)),
        ("LLB_KV_REPLAY_PORT_OFFSET", "7", "events.replay_port_offset", json!(7)),
        ("LLB_KV_HASH_DEBUG", "1", "log.block_hashes", json!(true)),
        ("LOXILB_KV_LB_MODE", "Adaptive-Soft", "tier.kv-exact.law.mode", json!("adaptive-soft")),
        ("LOXILB_KV_UNIFIED_MODE", "no", "tier.kv-exact.law.mode", json!("off")),
        ("LOXILB_KV_MEAN_LOAD_FACTOR", "300", "tier.kv-exact.law.mean_load_factor_pct", json!(300)),
        ("LOXILB_KV_LOAD_PENALTY", "100000", "tier.kv-exact.law.load_penalty", json!(100_000)),
        ("LOXILB_KV_SPILL_RELIEF", "0", "tier.kv-exact.law.relief", json!("off")),
        ("LOXILB_KV_COLDSTART_SEED_N", "0", "tier.kv-exact.seeding.every", json!(0)),
        ("LOXILB_KV_COLDSTART_MIN_BLOCKS", "0", "tier.kv-exact.seeding.min_blocks", json!(1)),
        ("LLB_PD_MAX_INFLIGHT_PER_EP", "7", "tier.admission.max_in_flight", json!(7)),
        ("LLB_PD_MAX_TOTAL_INFLIGHT", "70", "tier.admission.max_total", json!(70)),
        ("LLB_PD_QUEUE_DEPTH_PER_EP", "64", "tier.admission.queue_depth", json!(64)),
        ("LLB_PD_MAX_PARK_SEC", "9", "tier.admission.queue_wait", json!("9s")),
        ("LLB_PD_ORIGIN_ERR_THRESHOLD", "0", "breaker.origin_errors", json!(0)),
        ("LLB_PD_PREFILL_TIMEOUT_SEC", "45", "timeouts.prefill", json!("45s")),
        ("LOXILB_KV_ZERO_HIT_N", "5", "tier.kv-exact.zero_hit_requests", json!(5)),
        ("LOXILB_KV_MAX_BLOCKS", "1000", "inventory.max_blocks", json!(1000)),
    ]
}

#[test]
fn a_variable_stands_between_the_file_and_the_default() {
    let plain = Folder::with(KV);
    let listed: Vec<_> = config::schema(TIERS).environment.iter().map(|v| (v.variable, v.key)).collect();
    assert_eq!(listed.len(), cases().len());
    for (variable, text, key, value) in cases() {
        assert!(listed.contains(&(variable, key)), "{variable}");
        let (config, effective) = load(&plain, [(variable, text)]);
        assert!(config.warnings.iter().all(|w| !w.to_string().contains(variable)), "{:?}", config.warnings);
        let set = setting(&effective, key);
        assert_eq!((&set.value, &set.from), (&value, &Provenance::Environment { variable }), "{variable}");
        let (_, effective) = load(&plain, [(variable, "")]);
        let unset = setting(&effective, key);
        assert_eq!(unset.from, Provenance::Default, "{variable}: empty is unset");
        assert_ne!(unset.value, value, "{variable}");
        // the file's own word wins, and is told with its line
        let (name, of_gateway) = (key.rsplit_once('.').unwrap(), ["log.", "inventory."]);
        let table = format!("[{}]\n{} = {}\n", name.0, name.1, unset_or(&unset.value, &value));
        let (file, folder) = match of_gateway.iter().any(|t| key.starts_with(t)) {
            true => ("gateway.toml", Folder::with(KV).write("gateway.toml", &table)),
            false => ("rules/one.toml", Folder::with(&table_first(&table))),
        };
        let (_, effective) = load(&folder, [(variable, text)]);
        let given = setting(&effective, key);
        assert_eq!(given.value, unset_or(&unset.value, &value), "{variable}");
        let Provenance::File { file: told, line } = &given.from else { panic!("{given:?}") };
        assert_eq!(*told, folder.path(file), "{variable}");
        let text = std::fs::read_to_string(told).unwrap();
        assert_eq!(text.lines().nth(line - 1), table.lines().nth(1), "{variable}");
    }
}

/// A value for the file: the default, or something else where there is none.
fn unset_or(default: &Value, value: &Value) -> Value {
    if let (true, Some(number)) = (default.is_null(), value.as_i64()) {
        json!(number + 1)
    } else if default.is_null() {
        json!(format!("{} in the file", value.as_str().unwrap()))
    } else {
        default.clone()
    }
}

/// The rule with a table.
fn table_first(table: &str) -> String {
    let (top, endpoint) = KV.split_once("[[").unwrap();
    format!("{top}{table}[[{endpoint}")
}

#[test]
fn what_is_in_force_is_what_is_listed() {
    let folder = Folder::with(KV);
    let (config, effective) = load(&folder, cases().into_iter().map(|(name, text, ..)| (name, text)));
    assert_eq!((config.gateway.inventory.max_blocks, config.gateway.log.block_hashes), (1000, true));
    let rule = &config.rules[0];
    assert_eq!(rule.endpoints[0].kv_replay.as_deref(), Some("tcp://127.0.0.1:5564"));
    assert_eq!(setting(&effective, "endpoint[0].kv_replay").value, "tcp://127.0.0.1:5564");
    let tier = &rule.tier["kv-exact"].0;
    for (_, _, key, value) in cases() {
        let Some(key) = key.strip_prefix("tier.kv-exact.") else { continue };
        // LOXILB_KV_UNIFIED_MODE gives way to LOXILB_KV_LB_MODE
        let value = if key == "law.mode" { json!("adaptive-soft") } else { value };
        let found = key.split('.').try_fold(&json!(tier), |value, name| value.get(name)).cloned();
        assert_eq!(found, Some(value), "{key}");
    }
    let derived = [("name", json!("one")), ("tiers", json!(["admission", "kv-exact"]))];
    for (key, value) in derived {
        assert_eq!(setting(&effective, key).value, value);
    }
    let from = |key: &str| setting(&effective, key).from.clone();
    assert_eq!((from("name"), from("timeouts.idle")), (Provenance::Default, Provenance::Default));
    assert_eq!(from("match.models"), Provenance::File { file: folder.path("rules/one.toml"), line: 2 });
}

#[test]
fn a_bad_value_is_warned_of_once_and_not_used() {
    let second = KV.replace("match", "match.path_prefix = \"/x\"\nmatch");
    let folder = Folder::with(KV).write("rules/two.toml", second);
    let bad = [
        ("LLB_KV_NONE_HASH_SEED", "x".repeat(24)),
        ("LLB_KV_MIN_MATCH_TOKENS", "4097".into()),
        ("LLB_KV_REPLAY_PORT_OFFSET", "65536".into()),
        ("LLB_KV_HASH_DEBUG", "yes".into()),
        ("LOXILB_KV_LB_MODE", "hardest".into()),
        ("LOXILB_KV_UNIFIED_MODE", "0".into()),
        ("LOXILB_KV_MEAN_LOAD_FACTOR", "99".into()),
        ("LOXILB_KV_LOAD_PENALTY", "0".into()),
        ("LOXILB_KV_SPILL_RELIEF", "maybe".into()),
        ("LOXILB_KV_COLDSTART_SEED_N", "-1".into()),
        ("LOXILB_KV_COLDSTART_MIN_BLOCKS", "1.5".into()),
        ("LOXILB_KV_ZERO_HIT_N", "0".into()),
        ("LOXILB_KV_MAX_BLOCKS", "999".into()),
    ];
    let (plain, expected) = load(&folder, [("LLB_KV_HASH_DEBUG", "")]);
    let (config, effective) = load(&folder, bad.clone());
    assert_eq!(json!(effective), json!(expected));
    let told = |config: &Config| -> Vec<String> { config.warnings.iter().map(ToString::to_string).collect() };
    let (told, before) = (told(&config), told(&plain));
    // LOXILB_KV_UNIFIED_MODE is not looked at while the other is set, however badly
    assert_eq!(told.len(), before.len() + bad.len() - 1, "{told:?}");
    for (line, (variable, value)) in
        bad.iter().filter(|(name, _)| *name != "LOXILB_KV_UNIFIED_MODE").enumerate()
    {
        let mut about = told.iter().filter(|text| text.contains(variable));
        let text = about.next().unwrap_or_else(|| panic!("{variable} in {told:?}"));
        assert!(about.next().is_none() && text.contains(&format!("found \"{value}\"; allowed: ")), "{text}");
        assert!(text.starts_with("environment:") && text.contains(": warning: "), "{line} {text}");
    }
    let odd = OsString::from_vec(vec![b'1', 0xff]);
    let (config, _) = load(&folder, [("LLB_KV_NONE_HASH_SEED", odd)]);
    assert_eq!(config.warnings.len(), before.len() + 1);
}

#[test]
fn a_tier_that_is_not_in_the_ladder_takes_nothing() {
    let folder = Folder::with("tiers = [\"round-robin\"]\n[[endpoint]]\naddress = \"127.0.0.1:8001\"\n");
    let (config, effective) = load(&folder, cases().into_iter().map(|(name, text, ..)| (name, text)));
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    assert!(effective.rules[0].keys.iter().all(|setting| !setting.key.starts_with("tier.kv-exact")));
    assert_eq!(config.rules[0].endpoints[0].kv_events, None, "the offset alone does not ask for events");
}

#[test]
fn an_offset_that_leads_nowhere_names_its_variable() {
    let folder = Folder::with(KV);
    let environment = Environment::of([("LLB_KV_REPLAY_PORT_OFFSET", "60000")]);
    let refused = config::load_over(&folder.path("gateway.toml"), TIERS, &environment, None).unwrap_err();
    assert!(refused.to_string().contains("LLB_KV_REPLAY_PORT_OFFSET"), "{refused}");
}

#[test]
fn variables_that_stand_for_nothing_are_told() {
    let folder = Folder::with(KV);
    let variables = [("LLB_KV_MIN_MATCH_TOKEN", "16"), ("LOXILB_ANYTHING", "1"), ("LLB_EMPTY", "")];
    let (config, _) = load(&folder, variables);
    let told: Vec<_> = config.warnings.iter().map(ToString::to_string).collect();
    let told = told.join("\n");
    assert!(
        told.contains("LLB_KV_MIN_MATCH_TOKEN") && told.contains("did you mean `LLB_KV_MIN_MATCH_TOKENS`?"),
        "{told}"
    );
    assert!(told.contains("LOXILB_ANYTHING: is not used: no key stands for it"), "{told}");
    assert!(!told.contains("LLB_EMPTY") && config.warnings.len() == 2, "{told}");
}

#[test]
fn endpoints_are_weighed_by_capacity_where_a_tier_does() {
    let weighed = |tiers: &str| {
        let endpoint = |port: u16, role: &str| {
            format!(
                "[[endpoint]]\naddress = \"127.0.0.1:{port}\"\nrole = {role:?}\nkv_events = \"tcp://127.0.0.1:{}\"\n",
                port + 100
            )
        };
        let rule = format!(
            "engine = \"vllm\"\nshape = \"prefill-decode\"\n{tiers}\n{}{}{}",
            endpoint(8001, "prefill"),
            endpoint(8002, "decode"),
            endpoint(8003, "any"),
        );
        let (config, _) = load(&Folder::with(&rule), [("LLB_KV_HASH_DEBUG", "")]);
        let rule = &config.rules[0];
        assert!(rule.asks_engines(), "min-load goes by what waits");
        [Role::Prefill, Role::Decode, Role::Any].map(|role| rule.weighs_capacity(role))
    };
    assert_eq!(weighed("tiers = [\"kv-exact\"]\ndecode_tiers = [\"min-load\"]"), [true, false, false]);
    assert_eq!(weighed("tiers = [\"min-load\"]\ndecode_tiers = [\"gpu-aware\"]"), [false, true, false]);
    assert_eq!(weighed("tiers = [\"min-load\"]"), [false; 3]);
}

#[test]
fn no_engine_can_be_well_where_no_status_is() {
    let wrong =
        "probe.codes: leaves no status that an engine could answer: all of them would be down; found []";
    let gateway = Folder::with(KV).write("gateway.toml", "[probe]\ncodes = []\n").problems();
    assert!(gateway.contains(&format!("gateway.toml:2:9: {wrong}")), "{gateway}");
    let rule = Folder::with(&format!("{KV}[probe]\ncodes = []\n")).problems();
    assert!(rule.contains(&format!("rules/one.toml:6:9: {wrong}")), "{rule}");
}

#[test]
fn telemetry_stands_over_that_of_the_gateway() {
    let gateway = "[telemetry]\ninterval = \"2s\"\nmax_age = \"1m\"\n";
    let folder = Folder::with(&format!("{KV}[telemetry]\nmax_age = \"9s\"\n")).write("gateway.toml", gateway);
    let (config, effective) = load(&folder, [("LLB_KV_HASH_DEBUG", "")]);
    let telemetry = &config.rules[0].telemetry;
    assert_eq!((telemetry.interval.as_secs(), telemetry.max_age.as_secs()), (2, 9));
    assert_eq!((telemetry.timeout.as_secs(), telemetry.max_size), (5, 4 << 20));
    assert!(config.rules[0].asks_engines());
    let rule = |key: &str| effective.rules[0].keys.iter().find(|s| s.key == key).unwrap().from.clone();
    let file = |name: &str, line| Provenance::File { file: folder.path(name), line };
    assert_eq!(rule("telemetry.interval"), file("gateway.toml", 2));
    assert_eq!(rule("telemetry.max_age"), file("rules/one.toml", 6));
    assert_eq!(rule("telemetry.timeout"), Provenance::Default);
    let refused = |gateway: &str, rule: &str| {
        Folder::with(&format!("{KV}{rule}")).write("gateway.toml", gateway).problems()
    };
    let old = "makes every answer too old before the next: `max_age` is not longer than `interval`";
    let hint = "make `max_age` some three times `interval`";
    assert!(
        refused("[telemetry]\nmax_age = \"10s\"\n", "")
            .contains(&format!("gateway.toml:2:11: telemetry.max_age: {old}; found 10s and 10s; {hint}"))
    );
    assert!(
        refused("", "[telemetry]\ninterval = \"1m\"\n")
            .contains(&format!("rules/one.toml:6:12: telemetry.interval: {old}; found 30s and 1m; {hint}"))
    );
}
