//! What is shipped: the configuration and the page that documents it.

use std::path::{Path, PathBuf};

use kvgate::config;
use kvgate_tiers::TIERS;

pub fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conf")
}

#[test]
fn the_shipped_configuration_passes_its_check() {
    let report = config::check(&shipped().join("gateway.toml"), TIERS, false);
    assert!(report.ok, "{}", report.render(false));
    assert_eq!((report.rules, report.endpoints, report.errors), (1, 2, 0));
    let warned: Vec<_> = report.problems.0.iter().map(|p| p.key.as_str()).collect();
    assert_eq!(warned, ["match.models[0]"], "all that is missing is the tokenizer");
    assert!(
        !config::check(&shipped().join("gateway.toml"), TIERS, true).ok,
        "a warning refuses it when strict"
    );
}

/// What is commented out is shown as the default: it must be a key, and the default.
#[test]
fn what_is_commented_out_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let uncomment = |name: &str, keep: &dyn Fn(&str) -> bool| {
        let text = std::fs::read_to_string(shipped().join(name)).unwrap();
        let lines = text.lines().map(|line| match line.strip_prefix("# ") {
            Some(rest) if rest.split_whitespace().nth(1) == Some("=") && keep(rest) => rest,
            _ => line,
        });
        let lines: Vec<_> = lines.collect();
        let target = folder.path().join(name);
        std::fs::create_dir_all(target.parent().unwrap()).unwrap();
        std::fs::write(target, lines.join("\n")).unwrap();
    };
    uncomment("gateway.toml", &|line| !line.starts_with("token_file"));
    let own = ["id ", "hosts", "tls", "sql", "algorithm", "block_size", "none_hash_seed", "listener"];
    uncomment("rules/qwen3.toml", &|line| !own.iter().any(|key| line.starts_with(key)));
    std::fs::create_dir(folder.path().join("tokenizers")).unwrap();
    let all = config::load(&folder.path().join("gateway.toml"), TIERS).unwrap_or_else(|e| panic!("{e}"));
    let mut plain = config::load(&shipped().join("gateway.toml"), TIERS).unwrap();
    plain.gateway.server.rules = all.gateway.server.rules.clone();
    plain.gateway.server.tokenizers = all.gateway.server.tokenizers.clone();
    assert_eq!(all.gateway, plain.gateway);
    let (a, b) = (&all.rules[0], &plain.rules[0]);
    assert_eq!((&a.matches, &a.endpoints, a.explain), (&b.matches, &b.endpoints, b.explain));
    assert_eq!((&a.limits, &a.timeouts), (&b.limits, &b.timeouts));
    assert_eq!(a.tier["kv-exact"].0, b.tier["kv-exact"].0);
    assert!(a.origin.has("timeouts.first_byte") && !b.origin.has("timeouts.first_byte"));
}

#[test]
fn the_page_of_the_keys_is_up_to_date() {
    let page = shipped().join("../docs/configuration.md");
    let generated = config::schema(TIERS).markdown();
    let kept = std::fs::read_to_string(page).unwrap_or_default();
    assert!(
        kept == generated,
        "docs/configuration.md is not what `kvgate schema --markdown` prints: print it there"
    );
}

#[test]
fn listings_hold_every_key_and_miss() {
    let schema = config::schema(TIERS);
    let (text, tiers) = (schema.text(), config::tiers_text(&config::tiers(TIERS)));
    let json = serde_json::to_value(&schema).unwrap();
    assert_eq!(json["gateway"][0]["table"], "[server]");
    assert_eq!(json["gateway"][0]["keys"][0]["default"], "rules");
    assert_eq!(json["rule"][3]["keys"][0]["required"], true);
    for kind in TIERS {
        assert!(tiers.contains(kind.name) && text.contains(kind.name));
        for key in kind.schema {
            assert!(tiers.contains(key.key) && text.contains(key.key), "{} {}", kind.name, key.key);
        }
        for miss in kind.misses {
            assert!(tiers.contains(&format!("misses {}: ", miss.reason)), "{} {}", kind.name, miss.reason);
        }
    }
}

/// Keys that are each valid, but do not fit together.
#[test]
fn tiers_that_cannot_be_built_are_found_by_check() {
    let folder = crate::folder::Folder::with(
        "tiers = [\"persist\"]\n[tier.persist]\nby = \"header\"\n[[endpoint]]\naddress = \"127.0.0.1:8001\"\n",
    );
    let report = config::check(&folder.path("gateway.toml"), TIERS, false);
    let told: Vec<_> = report.problems.0.iter().map(|p| (p.key.as_str(), p.message.as_str())).collect();
    assert!(!report.ok);
    assert_eq!(told, [("tier.persist.name", "is missing: by = \"header\" needs it")]);
}
