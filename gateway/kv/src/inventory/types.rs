//! What an inventory is told and what it answers.

/// The most caches an inventory can have. Holder sets name slots with ten bits, 0 for none; one slot is spare.
pub const MAX_CACHES: u16 = SLOTS - 1;
/// Slots there can be.
pub(super) const SLOTS: u16 = 1023;

/// How large an inventory may become.
#[derive(Clone, Debug)]
pub struct Config {
    /// Up to 63, a set of holders is one word; then steps at 319, 575 and [`MAX_CACHES`], which caps it. Some
    /// spare makes clearing cheaper: a cleared cache keeps a slot until it is swept.
    pub max_caches: u16,
    /// Orphans remembered per cache.
    pub max_orphans: usize,
}

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// All but `missed` of its blocks counted: stores of unknown parent for which there was no room among the
    /// orphans, or removals of blocks that are not known.
    Applied {
        /// Blocks without effect.
        missed: usize,
    },
    /// The cache would have gone past its bound, so removals were lost: it was cleared, and wants a resync.
    Overflow,
    /// No such cache, or no entry numbers left.
    Refused,
}

/// Totals of an [`Ingest`](super::Ingest); the lower half counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Caches there are.
    pub caches: usize,
    /// Different blocks, those of caches not yet swept included.
    pub blocks: usize,
    /// Engine hashes credited, over all caches.
    pub pairs: usize,
    /// Memory of blocks, index, holder sets and tables; not of orphans.
    pub bytes: usize,
    /// Blocks whose parent is unknown, over all caches.
    pub orphans: usize,
    /// Orphans for which there was no room.
    pub orphans_refused: u64,
    /// Removals of blocks that were not known.
    pub absent_removals: u64,
    /// Caches cleared because they went past their bound.
    pub overflows: u64,
    /// Caches for which there was no room.
    pub caches_refused: u64,
    /// Times the blocks were moved together to give memory back.
    pub compactions: u64,
}

/// What one cache holds, at no cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Engine hashes credited.
    pub blocks: usize,
    /// Blocks whose parent is unknown.
    pub orphans: usize,
    /// An audit caught it holding a block whose predecessor it does not hold: it is scanned, not bisected.
    pub gaps: bool,
}

/// One block of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row {
    /// The engine's name for it.
    pub engine_hash: u64,
    /// How many copies the engine has: it takes as many removals to forget the block.
    pub copies: u32,
    /// Its parent is unknown, so it is not credited.
    pub orphan: bool,
}
