//! Every built-in tier passes the suite.
#![allow(clippy::unwrap_used)]

use kvgate_core::{TierConfig, TierKind, conformance};

/// The keys as the gateway fills them in where the rule is silent.
fn defaults(kind: &TierKind) -> TierConfig {
    let given = kind.schema.iter().filter(|field| !field.default.is_empty());
    TierConfig(
        given.map(|field| (field.key.to_owned(), serde_json::from_str(field.default).unwrap())).collect(),
    )
}

#[test]
fn every_tier_conforms() {
    // kv-exact needs an inventory and has the suite in its own tests
    for kind in kvgate_tiers::TIERS.iter().filter(|kind| kind.name != "kv-exact") {
        conformance::check(kind, &defaults(kind), &Default::default());
    }
}

#[test]
fn admission_conforms_with_caps() {
    let kind = kvgate_tiers::TIERS.iter().find(|kind| kind.name == "admission").unwrap();
    let mut config = defaults(kind);
    for (key, value) in [("max_in_flight", 1), ("max_total", 1000), ("queue_depth", 8)] {
        config.0.insert(key.into(), value.into());
    }
    conformance::check(kind, &config, &Default::default());
}

#[test]
fn names_and_reasons_are_unique_and_documented() {
    let mut names = std::collections::BTreeSet::new();
    for kind in kvgate_tiers::TIERS {
        assert!(names.insert(kind.name), "{} stands twice", kind.name);
        assert!(kind.doc.ends_with('.') && kind.misses.iter().all(|m| m.doc.ends_with('.')), "{}", kind.name);
        assert!(kind.schema.iter().all(|f| f.doc.ends_with('.')), "{}", kind.name);
    }
}
