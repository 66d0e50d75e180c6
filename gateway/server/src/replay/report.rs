//! What is printed.

use std::time::Duration;

use kvgate_sim::trace::{BLOCK, Trace};
use serde::Serialize;

use super::Setting;
use super::drive::Seen;
use super::policy::{ORACLE, Policy, ROUND_ROBIN};

/// A policy's line.
#[derive(Debug, Serialize)]
pub struct Row {
    policy: String,
    requests: usize,
    /// Prompt tokens cached, of all prompt tokens.
    hit_rate: f64,
    ttft_ms: Ttft,
    /// Requests on the busiest engine, over the mean.
    max_over_mean: f64,
    spills: u64,
}

/// Times to the first token, milliseconds.
#[derive(Debug, Serialize)]
struct Ttft {
    mean: f64,
    p50: f64,
    p99: f64,
}

impl Row {
    /// Of what a policy achieved.
    pub fn new(policy: &str, seen: &Seen) -> Self {
        let mut ttft = seen.ttft.clone();
        ttft.sort_unstable();
        let (requests, engines) = (ttft.len(), seen.served.len());
        let total: Duration = ttft.iter().sum();
        let busiest = seen.served.iter().max().copied().unwrap_or_default();
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        Self {
            policy: policy.to_owned(),
            requests,
            hit_rate: rounded(share(seen.cached as f64, seen.tokens as f64), 4),
            ttft_ms: Ttft {
                mean: rounded(share(total.as_secs_f64() * 1000.0, requests as f64), 1),
                p50: millis(percentile(&ttft, 50)),
                p99: millis(percentile(&ttft, 99)),
            },
            max_over_mean: rounded(share((busiest * engines as u64) as f64, requests as f64), 3),
            spills: seen.spills,
        }
    }

    /// How much of what the oracle saves of round robin's mean time to the first token this saves.
    fn gain(&self, robin: &Row, oracle: &Row) -> Option<f64> {
        let saved = |row: &Row| robin.ttft_ms.mean - row.ttft_ms.mean;
        (saved(oracle) > 0.0).then(|| saved(self) / saved(oracle))
    }
}

/// The nearest rank: the least value that so many percent are not above.
fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

fn millis(duration: Duration) -> f64 {
    rounded(duration.as_secs_f64() * 1000.0, 1)
}

fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

/// A JSON line for each policy.
pub fn json(rows: &[Row]) -> String {
    let lines = rows.iter().map(|row| serde_json::to_string(row).unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// What is replayed, on what.
pub fn head(trace: &Trace, too_long: usize, setting: &Setting, policies: &[Policy]) -> String {
    let requests = &trace.requests;
    let tokens: usize = requests.iter().map(|r| r.prompt.len()).sum();
    let span = requests.last().map(|r| r.at).unwrap_or_default();
    let mut text = format!(
        "{} requests in {} s, {} prompt tokens each on average\n",
        requests.len(),
        span.as_secs(),
        tokens / requests.len().max(1),
    );
    if too_long > 0 {
        text.push_str(&format!("left out: {too_long} requests that no cache can hold\n"));
    }
    if trace.without_prompt > 0 {
        text.push_str(&format!("left out: {} records without a prompt\n", trace.without_prompt));
    }
    let mut counts: Vec<_> = policies.iter().map(|p| p.rule.endpoints.len().to_string()).collect();
    counts.dedup();
    let engine = &setting.engine;
    text.push_str(&format!(
        "engines: {}, each with a cache of {} blocks of {BLOCK} tokens, evicted as vLLM does; prompts in order, one at \
         a time, {} tokens/s in steps of {}; answers beside that at {} tokens/s; events after {} ms\n",
        counts.join(" and "),
        engine.blocks,
        engine.prefill_rate,
        engine.step_tokens,
        setting.decode_rate,
        setting.event_delay.as_millis(),
    ));
    text
}

/// For people: a line for each policy, with its share of what the oracle gains over round robin.
pub fn table(rows: &[Row]) -> String {
    let find = |name: &str| rows.iter().find(|row| row.policy == name);
    let ends = find(ROUND_ROBIN).zip(find(ORACLE));
    let width = rows.iter().map(|row| row.policy.chars().count()).max().unwrap_or(0).max(6);
    let mut text = format!(
        "{:width$}  requests  hit rate  TTFT ms: mean     p50      p99  max/mean  spills{}\n",
        "policy",
        if ends.is_some() { "     gain" } else { "" },
    );
    for row in rows {
        let gain = ends.and_then(|(robin, oracle)| row.gain(robin, oracle));
        let percent = |gain: f64| match gain * 100.0 {
            percent if percent < -999.0 => "< -999%".to_owned(),
            percent => format!("{percent:.0}%"),
        };
        let gain = gain.map(|gain| format!("  {:>7}", percent(gain))).unwrap_or_default();
        text.push_str(&format!(
            "{:width$}  {:>8}  {:>7.1}%  {:>13.0}  {:>6.0}  {:>7.0}  {:>8.2}  {:>6}{gain}\n",
            row.policy,
            row.requests,
            row.hit_rate * 100.0,
            row.ttft_ms.mean,
            row.ttft_ms.p50,
            row.ttft_ms.p99,
            row.max_over_mean,
            row.spills,
        ));
    }
    if ends.is_some() {
        text.push_str(
            "\ngain: the part of round robin's mean TTFT that is saved, of what the oracle saves, which knows every \
             cache and queue and sends each request where its answer begins first\n",
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(ttft: &[u64]) -> Seen {
        Seen {
            tokens: 1000,
            cached: 250,
            ttft: ttft.iter().map(|ms| Duration::from_millis(*ms)).collect(),
            served: vec![3, 1],
            spills: 2,
        }
    }

    #[test]
    fn a_row_says_what_was_seen() {
        let row = Row::new("p", &seen(&[400, 100, 200, 300]));
        let told: serde_json::Value = serde_json::from_str(&json(&[row])).unwrap_or_default();
        let expected = serde_json::json!({
            "policy": "p", "requests": 4, "hit_rate": 0.25,
            "ttft_ms": {"mean": 250.0, "p50": 200.0, "p99": 400.0}, "max_over_mean": 1.5, "spills": 2,
        });
        assert_eq!(told, expected);
    }

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let all: Vec<_> = (1..=200).map(Duration::from_millis).collect();
        assert_eq!(percentile(&all, 50), Duration::from_millis(100));
        assert_eq!(percentile(&all, 99), Duration::from_millis(198));
        assert_eq!(percentile(&all[..1], 50), Duration::from_millis(1));
        assert_eq!(percentile(&[], 99), Duration::ZERO);
    }

    #[test]
    fn gains_are_measured_between_round_robin_and_the_oracle() {
        let rows = [("round-robin", 400), ("p", 200), ("worse", 500), ("oracle", 0)]
            .map(|(name, ms)| Row::new(name, &seen(&[ms])));
        let table = table(&rows);
        let gains: Vec<_> =
            table.lines().skip(1).take(4).map(|l| l.split(' ').next_back().unwrap_or("")).collect();
        assert_eq!(gains, ["0%", "50%", "-25%", "100%"]);
        assert!(!super::table(&rows[1..]).contains("gain"));
    }
}
