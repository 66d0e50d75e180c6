//! What became of a batch, counted by reason.

/// What is counted. The unit is named with each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Blocks of stores that were applied to a view at least, orphans included.
    Stored,
    /// Blocks of removals that were applied, absent ones included.
    Removed,
    /// Events that said that nothing is held any more.
    Cleared,
    /// Events about another medium than the engine's own GPU memory.
    IgnoredMedium,
    /// Events about another group of layers than the full-attention one.
    IgnoredGroup,
    /// Events of a type we do not know.
    UnknownEvent,
    /// Events that could not be decoded.
    BadEvent,
    /// Stores that did not tell the tokens, so that the own view misses them.
    NoTokens,
    /// Stores with other than block size x hashes tokens, so that the own view misses them.
    TokenCount,
    /// Stores with a block size of 0, dropped.
    BadBlockSize,
    /// Stores with another block size than before: the engine was restarted, its caches were cleared.
    BlockSizeChanged,
    /// Blocks whose parent is unknown and for which there was no room among the orphans.
    OrphanRefused,
    /// Removed blocks that were not known.
    AbsentRemoval,
    /// Stores that would have taken a cache past its bound: it was cleared instead, and wants a resync.
    Overflow,
    /// Events of a rank beyond the configured number of them, dropped.
    RankRefused,
    /// Events for which the inventory had no room: no cache left for the rank, or no block numbers.
    InventoryFull,
}

impl Reason {
    /// Every reason, in the order of declaration.
    pub const ALL: [Reason; 16] = [
        Reason::Stored,
        Reason::Removed,
        Reason::Cleared,
        Reason::IgnoredMedium,
        Reason::IgnoredGroup,
        Reason::UnknownEvent,
        Reason::BadEvent,
        Reason::NoTokens,
        Reason::TokenCount,
        Reason::BadBlockSize,
        Reason::BlockSizeChanged,
        Reason::OrphanRefused,
        Reason::AbsentRemoval,
        Reason::Overflow,
        Reason::RankRefused,
        Reason::InventoryFull,
    ];

    /// A stable short name, for labels.
    pub const fn name(self) -> &'static str {
        match self {
            Reason::Stored => "stored",
            Reason::Removed => "removed",
            Reason::Cleared => "cleared",
            Reason::IgnoredMedium => "ignored_medium",
            Reason::IgnoredGroup => "ignored_group",
            Reason::UnknownEvent => "unknown_event",
            Reason::BadEvent => "bad_event",
            Reason::NoTokens => "no_tokens",
            Reason::TokenCount => "token_count",
            Reason::BadBlockSize => "bad_block_size",
            Reason::BlockSizeChanged => "block_size_changed",
            Reason::OrphanRefused => "orphan_refused",
            Reason::AbsentRemoval => "absent_removal",
            Reason::Overflow => "overflow",
            Reason::RankRefused => "rank_refused",
            Reason::InventoryFull => "inventory_full",
        }
    }
}

/// Counts by [`Reason`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report([u64; Reason::ALL.len()]);

impl Report {
    /// How often a reason applied.
    pub fn get(&self, reason: Reason) -> u64 {
        self.0[reason as usize]
    }

    /// Every reason with its count.
    pub fn iter(&self) -> impl Iterator<Item = (Reason, u64)> {
        Reason::ALL.into_iter().zip(self.0)
    }

    /// A cache was cleared because removals had been lost: what the engine holds must be learnt anew.
    pub fn wants_resync(&self) -> bool {
        self.get(Reason::Overflow) > 0
    }

    pub(super) fn add(&mut self, reason: Reason, n: usize) {
        self.0[reason as usize] += n as u64;
    }
}
