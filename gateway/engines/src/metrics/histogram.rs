//! Histograms of a page.

use std::collections::BTreeMap;

use super::sample::{Sample, whole};

/// Buckets of a histogram, at most; engines have some 20.
const MOST_BUCKETS: usize = 256;

/// A histogram, of all its series together.
#[derive(Debug, Clone, PartialEq)]
pub struct Histogram {
    /// Upper bounds, rising, and how many were at most that; the last bound is infinite.
    pub buckets: Vec<(f64, u64)>,
    /// The sum of all.
    pub sum: f64,
    /// How many there were.
    pub count: u64,
}

/// What a line of a histogram tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Bucket,
    Sum,
    Count,
}

/// What a series tells of the histogram of this name.
pub(super) fn part(series: &str, histogram: &str) -> Option<Part> {
    match series.strip_prefix(histogram).filter(|_| !histogram.is_empty())? {
        "_bucket" => Some(Part::Bucket),
        "_sum" => Some(Part::Sum),
        "_count" => Some(Part::Count),
        _ => None,
    }
}

/// A histogram that is being read.
#[derive(Debug, Default)]
pub(super) struct Buckets {
    /// By the bits of the upper bound: bounds that are not negative are in the order of their bits.
    counts: BTreeMap<u64, u64>,
    sum: Option<f64>,
    count: Option<u64>,
    /// A number in it was none that anything can be counted with.
    spoilt: bool,
}

impl Buckets {
    /// Adds a series; `None` if it cannot be of a histogram of times, or there are too many.
    pub fn note(&mut self, part: Part, sample: &Sample<'_>) -> Option<()> {
        let counted = whole(sample.value);
        self.spoilt |= counted.is_none();
        match part {
            Part::Sum => self.sum = Some(self.sum.unwrap_or(0.0) + sample.value),
            Part::Count => self.count = Some(self.count.unwrap_or(0).saturating_add(counted.unwrap_or(0))),
            Part::Bucket => {
                let bound: f64 = sample.label("le")?.parse().ok().filter(|bound| *bound >= 0.0)?;
                // 0 has two forms
                let known = self.counts.entry((bound + 0.0).to_bits()).or_default();
                *known = known.saturating_add(counted.unwrap_or(0));
            }
        }
        (self.counts.len() <= MOST_BUCKETS).then_some(())
    }

    /// The histogram, if all of it is there.
    pub fn whole(self) -> Option<Histogram> {
        let buckets: Vec<_> =
            self.counts.into_iter().map(|(bound, count)| (f64::from_bits(bound), count)).collect();
        let ends = buckets.last().is_some_and(|(bound, _)| bound.is_infinite());
        let found = Histogram { buckets, sum: self.sum?, count: self.count? };
        Some(found).filter(|_| ends && !self.spoilt)
    }
}
