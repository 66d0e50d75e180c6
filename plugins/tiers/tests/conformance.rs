//! Every built-in tier passes the suite.

use kvgate_core::conformance;

#[test]
fn every_tier_conforms() {
    for kind in kvgate_tiers::TIERS {
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
