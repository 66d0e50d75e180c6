//! Every built-in tier passes the suite.

use kvgate_core::conformance;

#[test]
fn every_tier_conforms() {
    // kv-exact needs an inventory and has the suite in its own tests
    for kind in kvgate_tiers::TIERS.iter().filter(|kind| kind.name != "kv-exact") {
        conformance::check(kind, &Default::default(), &Default::default());
    }
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
