//! Every built-in tier passes the suite.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use kvgate_core::conformance::{check, keys};
use kvgate_tiers::TIERS;
use serde_json::{Value, json};

#[test]
fn every_tier_conforms() {
    // kv-exact needs an inventory and has the suite in its own tests
    for kind in TIERS.iter().filter(|kind| kind.name != "kv-exact") {
        let picks = check(kind, &keys(kind, &Value::Null), &Default::default());
        // this one chooses nobody
        if kind.name != "admission" {
            assert!(picks > 50, "{} chose {picks} times", kind.name);
        }
    }
}

#[test]
fn admission_conforms_with_caps() {
    let kind = TIERS.iter().find(|kind| kind.name == "admission").unwrap();
    let caps = json!({"max_in_flight": 1, "max_total": 1000, "queue_depth": 8});
    check(kind, &keys(kind, &caps), &Default::default());
}

#[test]
fn names_and_reasons_are_unique_and_documented() {
    let mut names = BTreeSet::new();
    for kind in TIERS {
        assert!(names.insert(kind.name), "{} stands twice", kind.name);
        assert!(kind.doc.ends_with('.') && kind.misses.iter().all(|m| m.doc.ends_with('.')), "{}", kind.name);
        assert!(kind.schema.iter().all(|f| f.doc.ends_with('.')), "{}", kind.name);
    }
}
