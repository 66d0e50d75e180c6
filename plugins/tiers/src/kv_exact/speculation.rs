//! What engines are about to hold: the gap between a dispatch and the events it leads to.

use std::sync::Arc;
use std::time::Instant;

use kvgate_core::{BuildContext, Counter, EngineId};
use kvgate_kv::speculative::{Credit, Speculative};

use super::config::SpeculativeConfig;
use super::counters;
use super::query::{Basis, Query};

pub struct Speculation {
    table: Arc<Speculative>,
    config: SpeculativeConfig,
    entered: Arc<Counter>,
    evicted: Arc<Counter>,
}

impl Speculation {
    /// `None` where the rule wants none. The table is kept over reloads.
    pub fn new(config: SpeculativeConfig, context: &BuildContext<'_>) -> Option<Self> {
        let (entered, evicted) = counters::speculative_blocks(context);
        let slots = config.slots;
        let table = || context.state("kv-exact/speculative", &slots.to_string(), || Speculative::new(slots));
        config.enabled.then(|| Self { table: table(), config, entered, evicted })
    }

    /// The request is about to be sent to this engine, which has blocks of these sizes and holds `held` tokens of it.
    pub fn credit(
        &self,
        query: &Query,
        engine: EngineId,
        sizes: &[u32],
        held: u64,
        now: Instant,
    ) -> Vec<Credit> {
        let until = now.checked_add(self.config.ttl).unwrap_or(now);
        let mut credits = Vec::new();
        for (size, chains) in query.chains.iter().filter(|(size, _)| sizes.contains(size)) {
            for chain in chains {
                // of several prompts it is not known how much is held of which
                let held = if chains.len() == 1 { held / u64::from(*size).max(1) } else { 0 };
                let held = usize::try_from(held).unwrap_or(usize::MAX);
                let credit = self.table.enter(chain, held, engine.0, now, until);
                self.entered.add(credit.entered() as u64);
                self.evicted.add(credit.evicted() as u64);
                credits.push(credit);
            }
        }
        credits
    }

    /// Adds to `bases` what these engines are about to hold; `uses` says whether an engine has blocks of a size.
    pub fn add_expected(
        &self,
        query: &Query,
        engines: &[EngineId],
        uses: impl Fn(EngineId, u32) -> bool,
        now: Instant,
        bases: &mut [Basis],
    ) {
        if self.table.is_empty() {
            return;
        }
        let mut found = Vec::new();
        for (size, chains) in &query.chains {
            // several prompts add up
            let mut by_engine: Vec<(EngineId, u64)> = Vec::new();
            for chain in chains {
                self.table.longest(chain, now, &mut found);
                for (engine, blocks) in found.iter().map(|(e, blocks)| (EngineId(*e), u64::from(*blocks))) {
                    match by_engine.iter_mut().find(|(e, _)| *e == engine) {
                        Some((_, sum)) => *sum += blocks,
                        None => by_engine.push((engine, blocks)),
                    }
                }
            }
            for (engine, blocks) in by_engine.into_iter().filter(|(engine, _)| uses(*engine, *size)) {
                let places = engines.iter().zip(&mut *bases).filter(|(e, _)| **e == engine);
                places.for_each(|(_, basis)| basis.expected = basis.expected.max(blocks * u64::from(*size)));
            }
        }
    }

    /// What the tokens that are held are worth, with those that are about to be.
    pub fn worth(&self, Basis { held, expected }: Basis) -> u64 {
        let more = expected.saturating_sub(held);
        held + more * (100_u64.saturating_sub(self.config.discount_pct)) / 100
    }
}
