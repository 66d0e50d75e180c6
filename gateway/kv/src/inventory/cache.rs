//! What the ingest thread knows about one cache.
use super::orphans::Orphans;
use super::table::Table;
use std::collections::HashMap;

pub(crate) struct Cache {
    /// Its bit in every holder set.
    pub slot: u16,
    /// Blocks it will likely hold; 0: unknown.
    pub expected: usize,
    /// Blocks it may hold, orphans included.
    pub bound: usize,
    pub table: Table,
    pub orphans: Orphans,
    /// Copies beyond the four that a cell can count, by engine hash. Nearly always empty.
    pub excess: HashMap<u64, u32>,
    /// Further engine hashes that lead to the same entry. Nearly always empty.
    pub aliases: HashMap<u32, u32>,
}

/// The most copies a cell counts, less one.
const FULL: u32 = 3;

impl Cache {
    pub fn new(slot: u16, expected: usize, bound: usize) -> Self {
        Cache {
            slot,
            expected,
            bound,
            table: Table::with_room(expected.min(bound)),
            orphans: Orphans::default(),
            excess: HashMap::new(),
            aliases: HashMap::new(),
        }
    }

    pub fn len(&self) -> usize {
        self.table.len() + self.orphans.len()
    }

    /// Adds copies to a block that is already in the table, whose word is given.
    pub fn more(&mut self, engine: u64, word: u32, copies: u32) {
        let room = FULL - (word & FULL);
        self.table.set(engine, word + room.min(copies));
        if copies > room {
            let e = self.excess.entry(engine).or_default();
            *e = e.saturating_add(copies - room);
        }
    }

    /// Takes one copy away; true when it was the last.
    pub fn less(&mut self, engine: u64, word: u32) -> bool {
        if word & FULL == 0 {
            return true;
        }
        if word & FULL == FULL
            && let Some(e) = self.excess.get_mut(&engine)
        {
            *e -= 1;
            if *e == 0 {
                self.excess.remove(&engine);
            }
            return false;
        }
        self.table.set(engine, word - 1);
        false
    }

    /// Copies of a block in the table, whose word is given.
    pub fn copies(&self, engine: u64, word: u32) -> u32 {
        let excess = if word & FULL == FULL { self.excess.get(&engine).copied() } else { None };
        (word & FULL).saturating_add(1).saturating_add(excess.unwrap_or(0))
    }
}
