//! Log-linear histogram of nanoseconds: 64 sub-buckets per power of two, so under 1.6 % error.
use serde_json::{Value, json};

const SUB: u64 = 64;
const SUB_BITS: u32 = 6;

/// A histogram.
#[derive(Clone)]
pub struct Hist {
    counts: Vec<u64>,
    n: u64,
    max: u64,
    sum: u128,
}

impl Default for Hist {
    fn default() -> Self {
        Hist { counts: vec![0; (SUB as usize) * 60], n: 0, max: 0, sum: 0 }
    }
}

fn index(v: u64) -> usize {
    if v < SUB {
        return v as usize;
    }
    let shift = 63 - v.leading_zeros() - SUB_BITS;
    ((shift as u64 + 1) * SUB + ((v >> shift) - SUB)) as usize
}

/// Middle of a bucket.
fn value(i: usize) -> u64 {
    let (row, col) = (i as u64 / SUB, i as u64 % SUB);
    if row == 0 {
        return col;
    }
    let shift = row - 1;
    ((SUB + col) << shift) + ((1u64 << shift) >> 1)
}

impl Hist {
    /// Counts `v` nanoseconds.
    pub fn add(&mut self, v: u64) {
        let i = index(v).min(self.counts.len() - 1);
        self.counts[i] += 1;
        self.n += 1;
        self.sum += v as u128;
        self.max = self.max.max(v);
    }

    /// Counts what another counted.
    pub fn merge(&mut self, other: &Self) {
        for (own, others) in self.counts.iter_mut().zip(&other.counts) {
            *own += others;
        }
        self.n += other.n;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.n
    }

    /// The value that a share `q` of all are at most.
    pub fn quantile(&self, q: f64) -> u64 {
        if q >= 1.0 {
            return self.max;
        }
        let want = ((self.n as f64 * q).ceil() as u64).max(1);
        let mut seen = 0;
        for (i, c) in self.counts.iter().enumerate() {
            seen += c;
            if seen >= want {
                return value(i).min(self.max);
            }
        }
        self.max
    }

    /// JSON object, in microseconds.
    pub fn json(&self) -> Value {
        let us = |v: u64| v as f64 / 1e3;
        let mean = if self.n == 0 { 0.0 } else { self.sum as f64 / self.n as f64 / 1e3 };
        json!({
            "n": self.n,
            "mean_us": mean,
            "p50_us": us(self.quantile(0.5)),
            "p90_us": us(self.quantile(0.9)),
            "p99_us": us(self.quantile(0.99)),
            "p999_us": us(self.quantile(0.999)),
            "max_us": us(self.max),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_two_percent() {
        let mut h = Hist::default();
        for v in 1..=100_000u64 {
            h.add(v * 37);
        }
        for q in [0.01, 0.5, 0.9, 0.99, 0.999] {
            let want = 100_000.0 * 37.0 * q;
            let got = h.quantile(q) as f64;
            assert!((got - want).abs() / want < 0.02, "{q}: {got} vs {want}");
        }
        assert_eq!(h.quantile(1.0), 3_700_000);
    }

    #[test]
    fn two_are_as_one_that_counted_all() {
        let (mut a, mut b, mut all) = (Hist::default(), Hist::default(), Hist::default());
        for v in 0..1000u64 {
            if v % 3 == 0 {
                a.add(v * v)
            } else {
                b.add(v * v)
            }
            all.add(v * v);
        }
        a.merge(&b);
        assert_eq!((a.count(), a.json()), (1000, all.json()));
    }

    #[test]
    fn small_values_are_exact() {
        let mut h = Hist::default();
        for v in [0, 1, 63] {
            h.add(v);
        }
        assert_eq!(h.quantile(0.5), 1);
        assert_eq!(h.quantile(1.0), 63);
    }
}
