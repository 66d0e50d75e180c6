//! `min-load`: the least loaded endpoint.

use std::sync::Arc;

use kvgate_core::{MinLoad, MissKind, TierKind};

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "min-load",
    doc: "Picks the endpoint with the fewest requests in flight and queued, in turn among true equals only. What is \
          queued is what the engine last told; where its word is out of date or it does not say, the mean of those \
          that do. Every ladder ends with it, named or not.",
    misses: &[MissKind::NO_ENDPOINT],
    schema: &[],
    build: |_, _| Ok(Arc::new(MinLoad::default())),
};
