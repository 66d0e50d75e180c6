//! The built-in tiers, one file each, and the table that lists them.
