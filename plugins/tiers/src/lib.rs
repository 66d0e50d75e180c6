//! The built-in tiers, one file each, and the table that lists them.

pub mod admission;
mod choose;
mod chwbl;
mod gpu_aware;
mod key;
pub mod kv_exact;
mod least_connections;
mod min_load;
mod persist;
mod radix_trie;
mod ring;
mod round_robin;
mod session;
mod weighted_round_robin;
mod wrr_hash;

use kvgate_core::TierKind;

/// Every built-in tier, in the order they are documented. A new one is a file and a line here.
pub const TIERS: &[TierKind] = &[
    kv_exact::KIND,
    admission::KIND,
    chwbl::KIND,
    gpu_aware::KIND,
    least_connections::KIND,
    min_load::KIND,
    persist::KIND,
    radix_trie::KIND,
    round_robin::KIND,
    session::KIND,
    weighted_round_robin::KIND,
    wrr_hash::KIND,
];
