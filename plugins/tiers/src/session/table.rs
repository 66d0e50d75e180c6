//! Which engines a session is pinned to.

use std::hash::{BuildHasher, Hash, RandomState};
use std::time::{Duration, Instant};

use kvgate_core::{EngineId, Role};
use lru::LruCache;

/// Sessions given up at a time: more than an answer ever adds, so that their number comes down to a lower limit, and a
/// bound on the time this takes.
const TRIMMED: usize = 4;

/// A session's engines, one for each role.
#[derive(Debug, Clone, Copy)]
struct Session {
    pins: [Option<EngineId>; 3],
    used: Instant,
}

impl Session {
    fn pin(&mut self, role: Role) -> &mut Option<EngineId> {
        let [any, prefill, decode] = &mut self.pins;
        match role {
            Role::Any => any,
            Role::Prefill => prefill,
            Role::Decode => decode,
        }
    }
}

/// Sessions in the order in which they were last used. Of a session's key its hash is kept, whose seed no client knows:
/// how long a key is costs nothing.
#[derive(Debug)]
pub struct Sessions {
    hash: RandomState,
    known: LruCache<u64, Session>,
}

/// What a session is known by here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Id(u64);

impl Default for Sessions {
    fn default() -> Self {
        Self { hash: RandomState::new(), known: LruCache::unbounded() }
    }
}

impl Sessions {
    /// The session of this key.
    pub fn id(&self, key: impl Hash) -> Id {
        Id(self.hash.hash_one(key))
    }

    /// The engine that a session is pinned to. Counts as a use of it. A session that was not used for `ttl` is
    /// forgotten.
    pub fn pinned(&mut self, id: Id, role: Role, now: Instant, ttl: Duration) -> Option<EngineId> {
        *self.alive(id, now, ttl)?.pin(role)
    }

    /// Pins a session to an engine, in place of the one before.
    pub fn pin(&mut self, id: Id, role: Role, engine: EngineId, now: Instant, ttl: Duration) {
        *self.begun(id, now, ttl).pin(role) = Some(engine);
    }

    /// Counts as a use of a session; pins it to this engine if it is pinned to none.
    pub fn keep(&mut self, id: Id, role: Role, engine: EngineId, now: Instant, ttl: Duration) {
        self.begun(id, now, ttl).pin(role).get_or_insert(engine);
    }

    /// Takes a session off this engine, if that is where it is pinned. One without any pin left is forgotten.
    pub fn unpin(&mut self, id: Id, role: Role, engine: EngineId) {
        let Some(session) = self.known.peek_mut(&id.0) else { return };
        let pin = session.pin(role);
        if *pin == Some(engine) {
            *pin = None;
        }
        if session.pins.iter().all(Option::is_none) {
            self.known.pop(&id.0);
        }
    }

    /// Forgets the least recently used beyond `most` and, of the oldest, those that have run out: up to [`TRIMMED`] of
    /// them. How many had not run out.
    pub fn trim(&mut self, most: usize, now: Instant, ttl: Duration) -> u64 {
        let mut evicted = 0;
        for _ in 0..TRIMMED {
            let Some((_, oldest)) = self.known.peek_lru() else { break };
            let over_age = now.saturating_duration_since(oldest.used) >= ttl;
            if !over_age && self.known.len() <= most {
                break;
            }
            evicted += u64::from(!over_age);
            self.known.pop_lru();
        }
        evicted
    }

    /// How many are kept.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// A session that has not run out, used now.
    fn alive(&mut self, id: Id, now: Instant, ttl: Duration) -> Option<&mut Session> {
        let used = self.known.peek(&id.0)?.used;
        if now.saturating_duration_since(used) >= ttl {
            self.known.pop(&id.0);
            return None;
        }
        let session = self.known.get_mut(&id.0)?;
        session.used = used.max(now);
        Some(session)
    }

    fn begun(&mut self, id: Id, now: Instant, ttl: Duration) -> &mut Session {
        self.alive(id, now, ttl);
        self.known.get_or_insert_mut(id.0, || Session { pins: [None; 3], used: now })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TTL: Duration = Duration::from_secs(10);

    #[derive(Clone, Debug)]
    enum Op {
        Pinned,
        Pin(u64),
        Keep(u64),
        Unpin(u64),
        Trim(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            Just(Op::Pinned),
            (1u64..4).prop_map(Op::Pin),
            (1u64..4).prop_map(Op::Keep),
            (1u64..4).prop_map(Op::Unpin),
            (1usize..6).prop_map(Op::Trim),
        ]
    }

    /// Key, pins and last use; the last used at the end.
    #[derive(Default)]
    struct Naive(Vec<(u8, [Option<u64>; 3], Instant)>);

    impl Naive {
        fn used(&mut self, key: u8, now: Instant, begin: bool) -> Option<&mut [Option<u64>; 3]> {
            self.0.retain(|(k, _, used)| *k != key || now - *used < TTL);
            let at = self.0.iter().position(|(k, ..)| *k == key);
            let mut session = at.map(|at| self.0.remove(at)).or(begin.then_some((key, [None; 3], now)))?;
            session.2 = now;
            self.0.push(session);
            self.0.last_mut().map(|(_, pins, _)| pins)
        }
    }

    proptest! {
        #[test]
        fn behaves_as_a_list_by_last_use(ops in prop::collection::vec((op(), 0u8..7, 0usize..3, 0u64..4), 1..200)) {
            let (mut sessions, mut naive, mut now) = (Sessions::default(), Naive::default(), Instant::now());
            for (op, key, role, passes) in ops {
                now += Duration::from_secs(passes);
                let id = sessions.id(key);
                let named = [Role::Any, Role::Prefill, Role::Decode][role];
                match op {
                    Op::Pinned => {
                        let pin = naive.used(key, now, false).and_then(|pins| pins[role]);
                        prop_assert_eq!(sessions.pinned(id, named, now, TTL), pin.map(EngineId));
                    }
                    Op::Pin(engine) => {
                        sessions.pin(id, named, EngineId(engine), now, TTL);
                        naive.used(key, now, true).unwrap()[role] = Some(engine);
                    }
                    Op::Keep(engine) => {
                        sessions.keep(id, named, EngineId(engine), now, TTL);
                        naive.used(key, now, true).unwrap()[role].get_or_insert(engine);
                    }
                    Op::Unpin(engine) => {
                        sessions.unpin(id, named, EngineId(engine));
                        for (_, pins, _) in naive.0.iter_mut().filter(|(k, ..)| *k == key) {
                            if pins[role] == Some(engine) { pins[role] = None; }
                        }
                        naive.0.retain(|(_, pins, _)| pins.iter().any(Option::is_some));
                    }
                    Op::Trim(most) => {
                        let mut evicted = 0;
                        for _ in 0..TRIMMED {
                            let Some((_, _, used)) = naive.0.first() else { break };
                            let over_age = now - *used >= TTL;
                            if !over_age && naive.0.len() <= most { break; }
                            evicted += u64::from(!over_age);
                            naive.0.remove(0);
                        }
                        prop_assert_eq!(sessions.trim(most, now, TTL), evicted);
                    }
                }
                prop_assert_eq!(sessions.len(), naive.0.len());
            }
        }
    }
}
