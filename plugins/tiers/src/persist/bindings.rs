//! Which engine a key belongs to.

use std::hash::{BuildHasher, RandomState};
use std::time::Instant;

use kvgate_core::{EngineId, Role};
use lru::LruCache;

/// Keys given up at a time: more than an answer ever adds, so that their number comes down to a lower limit, and a
/// bound on the time that an answer takes for it.
const TRIMMED: usize = 4;

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

    /// Forgets the least recently answered beyond `most` and, of the oldest, what has run out: up to [`TRIMMED`] of
    /// them.
    pub fn trim(&mut self, most: usize, now: Instant) {
        for _ in 0..TRIMMED {
            let over = self.known.len() > most;
            if !self.known.peek_lru().is_some_and(|(_, oldest)| over || oldest.until <= now) {
                return;
            }
            self.known.pop_lru();
        }
    }

    /// How many are kept.
    pub fn len(&self) -> usize {
        self.known.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_lower_limit_is_reached_by_and_by() {
        let (mut bindings, now) = (Bindings::default(), Instant::now());
        let (soon, late) = (now + Duration::from_secs(1), now + Duration::from_secs(9));
        for key in 0..100u8 {
            bindings.bind(Role::Any, &[key], EngineId(1), if key < 50 { soon } else { late });
        }
        bindings.trim(200, now);
        assert_eq!(bindings.len(), 100);
        for calls in 1..=10 {
            bindings.trim(60, now);
            assert_eq!(bindings.len(), 100 - calls * TRIMMED, "the same work for every answer");
        }
        assert_eq!(bindings.get(Role::Any, &[39], now), None, "the oldest went first");
        assert_eq!(bindings.get(Role::Any, &[40], now), Some(EngineId(1)));
        // within the limit what has run out goes, and nothing else
        for left in [56, 52, 50, 50] {
            bindings.trim(60, soon);
            assert_eq!(bindings.len(), left);
        }
    }
}
