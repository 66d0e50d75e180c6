//! The built-in tiers, one file each, and the table that lists them.

mod choose;
pub mod kv_exact;
mod least_connections;
mod min_load;
mod persist;
mod radix_trie;
mod round_robin;
mod weighted_round_robin;

use kvgate_core::TierKind;

/// Every built-in tier, in the order they are documented. A new one is a file and a line here.
pub const TIERS: &[TierKind] = &[
    kv_exact::KIND,
    least_connections::KIND,
    min_load::KIND,
    persist::KIND,
    radix_trie::KIND,
    round_robin::KIND,
    weighted_round_robin::KIND,
];
