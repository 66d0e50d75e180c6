//! Which engine a key belongs to.

use std::hash::{BuildHasher, RandomState};
use std::time::Instant;

use kvgate_core::{EngineId, Role};
use lru::LruCache;

#[derive(Debug, Clone, Copy)]
struct Binding {
    engine: EngineId,
    until: Instant,
}

/// Keys and their engines, for each role apart, in the order in which they were last answered. Of a key its hash is
/// kept, whose seed no client knows: how long a key is costs nothing.
#[derive(Debug)]
pub struct Bindings {
    hash: RandomState,
    known: LruCache<(Role, u64), Binding>,
}

impl Default for Bindings {
    fn default() -> Self {
        Self { hash: RandomState::new(), known: LruCache::unbounded() }
    }
}

impl Bindings {
    /// The engine of a key, unless that has run out.
    pub fn get(&self, role: Role, key: &[u8], now: Instant) -> Option<EngineId> {
        let binding = self.known.peek(&(role, self.hash.hash_one(key)))?;
        (now < binding.until).then_some(binding.engine)
    }

    /// Gives a key to an engine.
    pub fn bind(&mut self, role: Role, key: &[u8], engine: EngineId, until: Instant) {
        self.known.put((role, self.hash.hash_one(key)), Binding { engine, until });
    }

    /// Forgets the least recently answered beyond `most`, and of the oldest what has run out.
    pub fn trim(&mut self, most: usize, now: Instant) {
        // two each time: more than are ever added at once, and a bound on the time this takes
        let mut out_of_date = 2;
        while let Some((_, oldest)) = self.known.peek_lru() {
            if self.known.len() <= most {
                if out_of_date == 0 || now < oldest.until {
                    return;
                }
                out_of_date -= 1;
            }
            self.known.pop_lru();
        }
    }

    /// How many are kept.
    pub fn len(&self) -> usize {
        self.known.len()
    }
}
