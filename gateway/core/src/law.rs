//! Laws: how overlap and load are traded against each other. `docs/laws.md` has the formulas with worked numbers.
//!
//! Bounded loads follow Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (SODA 2018),
//! weighted by capacity. All arithmetic is on whole numbers of 128 bits, rounded down unless said otherwise.

use std::cmp::Reverse;

use serde::Deserialize;

use crate::tier::Candidate;

/// Which law.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Most overlap wins, whatever the load; among equals the first endpoint.
    Off,
    /// Most overlap wins while it carries no more than its bounded share of the load.
    #[default]
    Hard,
    /// The least cost wins: blocks to compute plus a price for load.
    Soft,
    /// [`Mode::Hard`] with a bound that widens as the fleet fills.
    Adaptive,
    /// [`Mode::Soft`] with a price of load that rises as the fleet fills.
    AdaptiveSoft,
}

/// A law with its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Law {
    /// Which one.
    pub mode: Mode,
    /// For [`Mode::Hard`]: how much of its fair share of the load an endpoint may carry, in percent.
    pub mean_load_factor_pct: u32,
    /// For [`Mode::Soft`]: the price of one request in flight, in thousandths of a block to compute.
    pub load_penalty: u32,
    /// Whether endpoints without overlap may be taken to relieve those with.
    pub relief: bool,
}

impl Default for Law {
    /// Hard, 175 %, with relief.
    fn default() -> Self {
        Self { mode: Mode::Hard, mean_load_factor_pct: 175, load_penalty: 32, relief: true }
    }
}

/// What is to be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Tokens in its full blocks: what could be held of it.
    pub tokens: u64,
    /// Tokens per block.
    pub block: u64,
}

/// What a law chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selected {
    /// The position in the candidates.
    pub at: usize,
    /// For [`Choice::limit`](crate::Choice::limit): what keeps the cap exact when others choose at the same time.
    pub limit: Option<u64>,
    /// The endpoint with the most overlap was passed over for its load.
    pub spilled: bool,
}

/// The candidate to take, of every eligible endpoint, with overlap or without; `None` when none of them overlaps.
/// Laws with caps write them to the candidates.
pub fn select(law: &Law, prompt: Prompt, candidates: &mut [Candidate]) -> Option<Selected> {
    candidates.iter().find(|c| c.overlap > 0)?;
    let fleet = Fleet::of(candidates.iter().map(|c| (c.load, c.capacity)));
    match law.mode {
        Mode::Off => most(candidates),
        Mode::Hard => hard(law.mean_load_factor_pct.into(), law.relief, fleet, candidates),
        Mode::Adaptive => hard(fleet.load_factor(), law.relief, fleet, candidates),
        Mode::Soft => soft(law.load_penalty.into(), law.relief, prompt, fleet, candidates),
        Mode::AdaptiveSoft => soft(fleet.load_penalty(), law.relief, prompt, fleet, candidates),
    }
}

/// What all that may be chosen carry, and can carry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fleet {
    count: u128,
    load: u128,
    capacity: u128,
}

/// A capacity of 0 counts as 1.
fn capacity(candidate: &Candidate) -> u128 {
    candidate.capacity.max(1).into()
}

impl Fleet {
    /// Of these loads and capacities.
    pub fn of(all: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let add = |sum: Self, (load, capacity): (u64, u64)| Self {
            count: sum.count + 1,
            load: sum.load + u128::from(load),
            capacity: sum.capacity + u128::from(capacity.max(1)),
        };
        all.into_iter().fold(Self::default(), add)
    }

    /// How many requests one of this capacity may carry before it is passed over:
    /// `max(1, ceil(pct * load * capacity / (100 * total)))`.
    pub fn cap(self, pct: u64, capacity: u64) -> u64 {
        let share = u128::from(pct).saturating_mul(self.load).saturating_mul(capacity.max(1).into());
        u64::try_from(share.div_ceil(self.capacity.saturating_mul(100).max(1))).unwrap_or(u64::MAX).max(1)
    }

    /// Requests in flight beyond the 16 at which the laws were calibrated; negative below.
    fn beyond_16(self) -> i128 {
        i128::try_from(self.load).unwrap_or(i128::MAX).saturating_sub(16)
    }

    fn load_factor(self) -> u64 {
        let pct = self.beyond_16().saturating_mul(125) / 10;
        u64::try_from(pct.saturating_add(175).clamp(175, 300)).unwrap_or(175)
    }

    fn load_penalty(self) -> u128 {
        let penalty = self.beyond_16().saturating_mul(5_000);
        penalty.saturating_add(50_000).clamp(50_000, 100_000).unsigned_abs()
    }

    /// `uncached_blocks * 1000 + penalty * load / c`, where `c` is the capacity over the mean capacity.
    fn cost(self, penalty: u128, prompt: Prompt, candidate: &Candidate) -> u128 {
        let uncached = prompt.tokens.saturating_sub(candidate.overlap) / prompt.block.max(1);
        let load = penalty.saturating_mul(candidate.load.into()).saturating_mul(self.capacity);
        u128::from(uncached) * 1000 + load / self.count.saturating_mul(capacity(candidate)).max(1)
    }
}

fn most(candidates: &[Candidate]) -> Option<Selected> {
    let (at, _) = candidates.iter().enumerate().max_by_key(|(_, c)| (c.overlap, Reverse(c.endpoint)))?;
    Some(Selected { at, limit: None, spilled: false })
}

fn hard(pct: u64, relief: bool, fleet: Fleet, candidates: &mut [Candidate]) -> Option<Selected> {
    for candidate in candidates.iter_mut() {
        candidate.cap = Some(fleet.cap(pct, candidate.capacity));
    }
    let all = candidates.iter().enumerate();
    let holders = all.clone().filter(|(_, c)| c.overlap > 0);
    let best = |(_, c): &(usize, &Candidate)| (c.overlap, c.has_room(), Reverse(c.load), Reverse(c.endpoint));
    let least = |(_, c): &(usize, &Candidate)| (c.load, Reverse(c.overlap), c.endpoint);
    let (winner, top) = holders.clone().max_by_key(best)?;
    let chosen = match top.has_room() {
        true => Some((winner, top)),
        false if relief => all.filter(|(_, c)| c.has_room()).min_by_key(least),
        false => holders.clone().filter(|(_, c)| c.has_room()).max_by_key(best),
    };
    if let Some((at, candidate)) = chosen {
        return Some(Selected { at, limit: candidate.cap, spilled: at != winner });
    }
    // all are over their caps: at least nobody else may get in first
    let (at, candidate) = holders.min_by_key(least)?;
    Some(Selected { at, limit: Some(candidate.load.saturating_add(1)), spilled: at != winner })
}

fn soft(
    penalty: u128,
    relief: bool,
    prompt: Prompt,
    fleet: Fleet,
    candidates: &[Candidate],
) -> Option<Selected> {
    let cost = |c: &Candidate| (fleet.cost(penalty, prompt, c), Reverse(c.overlap), c.load, c.endpoint);
    let open = candidates.iter().enumerate().filter(|(_, c)| relief || c.overlap > 0);
    let (at, chosen) = open.min_by_key(|(_, c)| cost(c))?;
    let most = candidates.iter().map(|c| c.overlap).max()?;
    Some(Selected { at, limit: None, spilled: chosen.overlap < most })
}

#[cfg(test)]
mod tests;
