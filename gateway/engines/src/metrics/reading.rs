//! What a page said.

use super::Histogram;

/// What a page said; `None` is what it did not say.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    /// Requests that run, of all ranks.
    pub running: Option<u64>,
    /// Requests that wait, of all ranks.
    pub waiting: Option<u64>,
    /// The share of the KV cache in use, of the rank where it is largest; 0 to 1.
    pub usage: Option<f64>,
    /// KV blocks, of all ranks; never 0.
    pub blocks: Option<u64>,
    /// KV blocks of the rank that has most.
    pub rank_blocks: Option<u64>,
    /// Tokens of prompts since the engine's start.
    pub prompt_tokens: Option<u64>,
    /// Tokens generated since the engine's start.
    pub generation_tokens: Option<u64>,
    /// Seconds to the first token since the engine's start.
    pub ttft: Option<Histogram>,
}

impl Reading {
    /// Whether the engine has had a request since its start, as far as the page shows.
    pub fn shows_work(&self) -> bool {
        let numbers = self.counters().into_iter().chain([self.running, self.waiting]);
        numbers.flatten().any(|n| n > 0) || self.usage.is_some_and(|share| share > 0.0)
    }

    /// Whether the engine was started anew since the page before this one, as far as both show: one of its counters
    /// is lower, or all that counted something are gone.
    pub fn restarted_since(&self, before: &Self) -> bool {
        let mut pairs = before.counters().into_iter().zip(self.counters());
        let counted = before.counters().into_iter().flatten().any(|n| n > 0);
        pairs.any(|pair| matches!(pair, (Some(before), Some(now)) if now < before))
            || counted && self.counters().into_iter().flatten().next().is_none()
    }

    /// What only grows while the engine lives.
    fn counters(&self) -> [Option<u64>; 3] {
        [self.prompt_tokens, self.generation_tokens, self.ttft.as_ref().map(|ttft| ttft.count)]
    }
}
