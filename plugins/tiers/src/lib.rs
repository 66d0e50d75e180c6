//! The built-in tiers, one file each, and the table that lists them.

pub mod kv_exact;
mod min_load;
mod round_robin;

use kvgate_core::TierKind;

/// Every built-in tier, in the order they are documented. A new one is a file and a line here.
pub const TIERS: &[TierKind] = &[kv_exact::KIND, min_load::KIND, round_robin::KIND];
