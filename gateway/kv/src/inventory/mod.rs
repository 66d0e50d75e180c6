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
//! Shared with readers: a slab of (key, holders) in chunks (module `slab`) and an open-addressed index over it in
//! segments (module `index`), both changed in place by atomics and swapped whole, as a snapshot, when they
//! grow. Private to the ingest thread: per cache, engine hash to slab entry and copies (module `table`), and the
//! orphans (module `orphans`).
//!
//! Longest pauses of the ingest thread, as measured: growth rebuilds one of 256 index segments, one to three
//! milliseconds at eight million blocks, or a cache's own table, some twenty at a million blocks, unless its size
//! was known in advance. Compaction, after more than half of the blocks are gone, rebuilds what is left in one go,
//! about a quarter of a second at four million. Readers wait for none of it.
//!
//! Figures to watch, at 8 caches of 100,000 blocks, 64 of 20,000 and 256 of 10,000: stores per second in events
//! of 64 blocks, lookups per second of a chain of 2048 blocks that is held whole, half and not at all, bytes per
//! pair ([`Stats::bytes`] by [`Stats::pairs`]), and the longest single call of [`Ingest::stored`] and
//! [`Ingest::upkeep`].

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
mod types;
mod verify;

pub use ingest::Ingest;
pub use overlap::Inventory;
pub use types::{Config, Counts, Effect, MAX_CACHES, Row, Stats};

/// A cache, stable over clears. The id of a removed cache may be given to another one later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheId(pub u16);
