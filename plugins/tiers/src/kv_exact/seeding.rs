//! Cold-start seeding: an empty engine beside warm ones holds nothing, so nothing is sent to it, so it stays empty.

use std::sync::atomic::{AtomicU64, Ordering};

use kvgate_core::{Candidate, Routing};
use kvgate_kv::holdings::Holdings;

use super::config::SeedingConfig;
use super::query::Progress;

pub struct Seeding {
    config: SeedingConfig,
    choices: AtomicU64,
}

impl Seeding {
    pub fn new(config: SeedingConfig) -> Self {
        Self { config, choices: AtomicU64::new(0) }
    }

    /// The first cold candidate beside `winner`, where it is a cold one's turn. A request keeps its turn, or its lack
    /// of one, over every choice made for it. A cap, where the law has one, holds here too.
    pub fn cold<'a>(
        &self,
        progress: &mut Progress,
        holdings: &Holdings,
        routing: &Routing<'_>,
        candidates: &'a [Candidate],
        winner: &Candidate,
    ) -> Option<&'a Candidate> {
        let SeedingConfig { every, min_blocks } = self.config;
        let turn = || every > 0 && (self.choices.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(every);
        if !*progress.seeds.get_or_insert_with(turn) {
            return None;
        }
        let caches = holdings.caches();
        let cold = |c: &&Candidate| {
            let engine = routing.endpoints.get(c.endpoint).map(|e| e.engine.id().0);
            engine.is_some_and(|key| caches.blocks(key) < min_blocks)
        };
        let open = |c: &&Candidate| c.endpoint != winner.endpoint && c.has_room();
        candidates.iter().filter(open).filter(cold).min_by_key(|c| c.endpoint)
    }
}
