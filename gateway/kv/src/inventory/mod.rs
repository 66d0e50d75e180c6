//! A mirror of the KV-cache blocks that a fleet of inference engines holds.
//!
//! One ingest thread owns [`Ingest`] and applies the engines' events; any number of threads hold an
//! [`Inventory`] and ask, without a lock, how long a prefix of a prompt each cache holds.
//!
//! Names. A *cache* is what one view of one engine and rank holds. An *engine hash* is the engine's own name
//! for a block, the key of removals and parents. A *key* is what prompts are looked up by: in the own view the
//! block's own hash, chained from token hashes by [`own`](crate::own); in the published view
//! the engine hash itself. A *slot* is the bit that a cache occupies in a holder set; clearing a cache moves
//! it to another slot, so that readers see it empty at once, however much it held.
//!
//! Shared with readers: a slab of (key, holders) in chunks ([`slab`]) and an open-addressed index over it in
//! segments ([`index`]), both changed in place by atomics and swapped whole, as a [`snapshot`], when they
//! grow. Private to the ingest thread: per cache, engine hash to slab entry and copies ([`table`]), and the
//! orphans ([`orphans`]).
//!
//! Longest pauses of the ingest thread: growth rebuilds one of 256 index segments, about a millisecond at
//! eight million blocks. Compaction, after more than half of the blocks are gone, rebuilds what is left in
//! one go. Readers wait for neither.

mod blocks;
mod cache;
mod holders;
mod index;
mod ingest;
mod orphans;
mod overlap;
mod slab;
mod snapshot;
mod table;

pub use ingest::{Config, Counts, Effect, Ingest, MAX_CACHES, Row, Stats};
pub use overlap::Inventory;

/// A cache, stable over clears. The id of a removed cache may be given to another one later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheId(pub u16);
