//! `wrr-hash`: `chwbl` with the endpoints' weights in its ring and its bounds.

use kvgate_core::TierKind;

use crate::chwbl;

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "wrr-hash",
    doc: "As `chwbl`, with weights: an endpoint of twice the `weight` has twice the points on the ring, and twice the \
          bound.",
    misses: chwbl::MISSES,
    schema: chwbl::SCHEMA,
    build: |config, context| {
        chwbl::build(KIND.name, config, context, |endpoint| u64::from(endpoint.weight.max(1)))
    },
};
