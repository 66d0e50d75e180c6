//! What an engine tells of itself on its metrics page.
//!
//! The page is read in Prometheus' text format (version 0.0.4, and OpenMetrics as far as samples go). Only the lines
//! of the families that are asked for are looked at closely.
//!
//! An engine with several data-parallel ranks has a series for each. What the ranks say is added up. Series of one
//! rank that differ in other labels say the same thing more than once (the tensor-parallel ranks of SGLang) if they
//! are gauges: of them the largest counts. Counters and histograms that differ in other labels count different things
//! (streams and whole answers of SGLang) and are added up. Of the usage, a share, the fullest rank's counts.

mod family;
mod histogram;
mod reading;
mod sample;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use family::Family;
pub use histogram::Histogram;
pub use reading::Reading;

use histogram::Buckets;
use sample::{Sample, name, whole};

/// Where an engine's page is and what is read from it. A name that is empty is of a family that the engine lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metrics {
    /// Where the engine serves the page.
    pub path: &'static str,
    /// How to make the engine serve it, in words, for whoever finds that it does not.
    pub hint: &'static str,
    /// What the names of all of its own families begin with: a page without one of them is another's.
    pub prefix: &'static str,
    /// The gauge of requests that run.
    pub running: &'static str,
    /// The gauge of requests that wait.
    pub waiting: &'static str,
    /// The gauge of the share of the KV cache in use, 0 to 1, by its names: the first that is on the page.
    pub usage: &'static [&'static str],
    /// Where the number of KV blocks stands: the first place that is on the page.
    pub blocks: &'static [Blocks],
    /// The counter of tokens of prompts.
    pub prompt_tokens: &'static str,
    /// The counter of generated tokens.
    pub generation_tokens: &'static str,
    /// The histogram of seconds to the first token, without `_bucket`.
    pub ttft: &'static str,
    /// The label that tells data-parallel ranks apart; empty where there is none.
    pub rank: &'static str,
}

/// A place where a number of KV blocks stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks {
    /// The value of this gauge.
    Gauge(&'static str),
    /// This label of this family: `vllm:cache_config_info{num_gpu_blocks="1024"} 1`.
    Label(&'static str, &'static str),
    /// A gauge of tokens, and one of tokens per block.
    Tokens(&'static str, &'static str),
}

/// Why a page says nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unreadable {
    /// It is not text in the format.
    Garbage,
    /// It is, but nothing in it is of an engine of this kind.
    Nothing,
}

/// One number for each rank.
type Ranks = BTreeMap<String, u64>;

impl Metrics {
    /// Reads a page.
    ///
    /// # Errors
    /// It is not of such an engine, or a line that would be used is broken: then none of it is.
    pub fn read(&self, page: &[u8]) -> Result<Reading, Unreadable> {
        let page = std::str::from_utf8(page).map_err(|_| Unreadable::Garbage)?;
        let mut found = Found {
            usage: vec![None; self.usage.len()],
            blocks: vec![Default::default(); self.blocks.len()],
            ..Found::default()
        };
        let mut own = false;
        for line in page.lines() {
            let declared = line.strip_prefix("# TYPE ");
            if declared.unwrap_or(line).starts_with(self.prefix) {
                own = true;
                if declared.is_none() {
                    found.line(self, line).ok_or(Unreadable::Garbage)?;
                }
            }
        }
        if own { Ok(found.reading(self)) } else { Err(Unreadable::Nothing) }
    }
}

/// What was found so far.
#[derive(Default)]
struct Found {
    running: Ranks,
    waiting: Ranks,
    /// By name.
    usage: Vec<Option<f64>>,
    /// By place: the numbers, and the tokens per block.
    blocks: Vec<(Ranks, Ranks)>,
    prompt_tokens: Option<u64>,
    generation_tokens: Option<u64>,
    ttft: Buckets,
}

impl Found {
    /// Looks at a line; `None` if it is looked for and broken.
    fn line(&mut self, metrics: &Metrics, line: &str) -> Option<()> {
        let name = name(line);
        let sample = || Sample::read(line, name);
        let gauge = |ranks: &mut Ranks| {
            let sample = sample()?;
            note(ranks, metrics, &sample, whole(sample.value));
            Some(())
        };
        if name == metrics.running {
            return gauge(&mut self.running);
        } else if name == metrics.waiting {
            return gauge(&mut self.waiting);
        } else if name == metrics.prompt_tokens {
            return add(&mut self.prompt_tokens, sample()?.value);
        } else if name == metrics.generation_tokens {
            return add(&mut self.generation_tokens, sample()?.value);
        } else if let Some(part) = histogram::part(name, metrics.ttft) {
            return self.ttft.note(part, &sample()?);
        }
        if let Some(at) = metrics.usage.iter().position(|usage| *usage == name) {
            let share = sample()?.value;
            let known = self.usage.get_mut(at)?;
            if share.is_finite() && share >= 0.0 {
                *known = Some(known.unwrap_or(0.0).max(share));
            }
        }
        for (place, (ranks, sizes)) in metrics.blocks.iter().zip(&mut self.blocks) {
            match *place {
                Blocks::Gauge(blocks) if blocks == name => gauge(ranks)?,
                Blocks::Label(family, label) if family == name => {
                    let sample = sample()?;
                    let blocks = sample.label(label).and_then(|text| text.parse().ok());
                    note(ranks, metrics, &sample, blocks);
                }
                Blocks::Tokens(tokens, _) if tokens == name => gauge(ranks)?,
                Blocks::Tokens(_, per_block) if per_block == name => gauge(sizes)?,
                _ => {}
            }
        }
        Some(())
    }

    fn reading(self, metrics: &Metrics) -> Reading {
        let found = metrics.blocks.iter().zip(self.blocks).map(|(place, (ranks, sizes))| match place {
            Blocks::Tokens(..) => divided(&ranks, &sizes),
            _ => ranks.into_values().collect(),
        });
        let blocks: Vec<u64> = found.map(positive).find(|ranks| !ranks.is_empty()).unwrap_or_default();
        Reading {
            running: sum(self.running.into_values()),
            waiting: sum(self.waiting.into_values()),
            usage: self.usage.into_iter().flatten().next(),
            rank_blocks: blocks.iter().copied().max(),
            blocks: sum(blocks),
            prompt_tokens: self.prompt_tokens,
            generation_tokens: self.generation_tokens,
            ttft: self.ttft.whole(),
        }
    }
}

/// Keeps what a rank says. "None" while the engine starts, NaN where nobody counts: not known.
fn note(ranks: &mut Ranks, metrics: &Metrics, sample: &Sample<'_>, number: Option<u64>) {
    if let Some(number) = number {
        let rank = sample.label(metrics.rank).unwrap_or_default().to_owned();
        let known = ranks.entry(rank).or_default();
        *known = number.max(*known);
    }
}

/// Adds a series of a counter to the others.
fn add(counter: &mut Option<u64>, value: f64) -> Option<()> {
    if let Some(more) = whole(value) {
        *counter = Some(counter.unwrap_or(0).saturating_add(more));
    }
    Some(())
}

fn divided(tokens: &Ranks, per_block: &Ranks) -> Vec<u64> {
    let of = |(rank, tokens): (&String, &u64)| tokens.checked_div(*per_block.get(rank)?);
    tokens.iter().filter_map(of).collect()
}

fn positive(mut blocks: Vec<u64>) -> Vec<u64> {
    blocks.retain(|n| *n > 0);
    blocks
}

/// `None` of nothing.
fn sum(numbers: impl IntoIterator<Item = u64>) -> Option<u64> {
    numbers.into_iter().reduce(u64::saturating_add)
}
