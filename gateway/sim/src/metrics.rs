//! The engine's metrics page: the families of vLLM that a router reads, under vLLM's names and labels.

use crate::config::SimConfig;
use std::fmt::Write;
use std::time::Duration;

/// Upper bounds of vLLM's time-to-first-token histogram, in seconds.
const TTFT_BOUNDS: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];

/// What the engine counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// Requests that run.
    pub running: usize,
    /// Requests that wait.
    pub waiting: usize,
    /// Share of the cache's blocks used by running requests, 0 to 1.
    pub cache_usage: f64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Those of them found in the cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Requests that ended with all their tokens.
    pub finished: u64,
    /// Requests whose client left.
    pub aborted: u64,
    /// Requests that lost their blocks to others.
    pub preempted: u64,
    ttft: [u64; TTFT_BOUNDS.len()],
    ttft_count: u64,
    ttft_sum: f64,
}

impl Stats {
    pub(crate) fn first_token(&mut self, after: Duration) {
        let seconds = after.as_secs_f64();
        for (count, bound) in self.ttft.iter_mut().zip(TTFT_BOUNDS) {
            *count += u64::from(seconds <= bound);
        }
        self.ttft_count += 1;
        self.ttft_sum += seconds;
    }

    /// The page, in Prometheus' text format.
    pub(crate) fn page(&self, config: &SimConfig) -> String {
        let model = config.models.first().map_or("", String::as_str);
        let labels = format!("engine=\"0\",model_name=\"{}\"", escaped(model));
        let mut page = String::with_capacity(8192);
        let mut family = |name: &str, kind: &str, help: &str, samples: &[(&str, &str, f64)]| {
            let _ = writeln!(page, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}");
            for (suffix, more, value) in samples {
                let value = if value.fract() == 0.0 { format!("{value:.1}") } else { value.to_string() };
                let _ = writeln!(page, "vllm:{name}{suffix}{{{more}{labels}}} {value}");
            }
        };
        let reasons = [("", "reason=\"capacity\",", self.waiting as f64), ("", "reason=\"deferred\",", 0.0)];
        let ends = [
            ("", "finished_reason=\"length\",", self.finished as f64),
            ("", "finished_reason=\"abort\",", self.aborted as f64),
        ];
        let gauges = [
            ("num_requests_running", "Number of requests in model execution batches.", self.running as f64),
            ("num_requests_waiting", "Number of requests waiting to be processed.", self.waiting as f64),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", self.cache_usage),
        ];
        for (name, help, value) in gauges {
            family(name, "gauge", help, &[("", "", value)]);
        }
        family("num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.", &reasons);
        let counters = [
            ("prefix_cache_queries_total", "Prefix cache queries, in number of tokens.", self.prompt_tokens),
            ("prefix_cache_hits_total", "Prefix cache hits, in number of tokens.", self.cached_tokens),
            ("num_preemptions_total", "Cumulative number of preemption from the engine.", self.preempted),
            ("prompt_tokens_total", "Number of prefill tokens processed.", self.prompt_tokens),
            ("prompt_tokens_cached_total", "Number of cached prompt tokens.", self.cached_tokens),
            ("generation_tokens_total", "Number of generation tokens processed.", self.generated_tokens),
        ];
        for (name, help, value) in counters {
            family(name, "counter", help, &[("", "", value as f64)]);
        }
        family("request_success_total", "counter", "Count of successfully processed requests.", &ends);
        let bounds: Vec<String> = TTFT_BOUNDS.iter().map(|bound| format!("le=\"{bound:?}\",")).collect();
        let buckets =
            bounds.iter().zip(self.ttft).map(|(bound, count)| ("_bucket", bound.as_str(), count as f64));
        let mut samples: Vec<_> = buckets.collect();
        samples.push(("_bucket", "le=\"+Inf\",", self.ttft_count as f64));
        samples.push(("_count", "", self.ttft_count as f64));
        samples.push(("_sum", "", self.ttft_sum));
        family("time_to_first_token_seconds", "histogram", "Time to first token in seconds.", &samples);
        let block_size = config.block_size;
        let cache = format!(
            "block_size=\"{block_size}\",effective_attention_block_size=\"{block_size}\",enable_prefix_caching=\"True\",num_gpu_blocks=\"{}\",prefix_caching_hash_algo=\"{}\",",
            config.cache_blocks, config.algorithm
        );
        family(
            "cache_config_info",
            "gauge",
            "Information of the LLMEngine CacheConfig",
            &[("", &cache, 1.0)],
        );
        page
    }
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The names of a page's series, with their labels' names.
    fn series(page: &str) -> BTreeSet<String> {
        let lines = page.lines().filter(|line| line.starts_with("vllm:"));
        lines
            .map(|line| {
                let (name, labels) = line.split_once('{').unwrap();
                let bucket = labels.split(',').find(|label| label.starts_with("le="));
                format!("{name}{}", bucket.unwrap_or_default())
            })
            .collect()
    }

    #[test]
    fn every_series_exists_on_a_real_engine_that_is_cold() {
        let real = String::from_utf8(kvgate_tests::fixture("vllm/http/metrics_vllm_cold.txt")).unwrap();
        let (ours, theirs) = (series(&Stats::default().page(&SimConfig::default())), series(&real));
        let missing: Vec<_> = ours.difference(&theirs).collect();
        assert!(missing.is_empty(), "{missing:?}");
        assert_eq!(ours.len(), 4 + 6 + 1 + 25 + 1);
        for line in real.lines().filter(|line| line.starts_with("vllm:time_to_first_token_seconds_bucket")) {
            let bound = line.split("le=").nth(1).unwrap().split(',').next().unwrap();
            assert!(ours.contains(&format!("vllm:time_to_first_token_seconds_bucketle={bound}")), "{bound}");
        }
    }

    #[test]
    fn a_first_token_counts_in_every_bucket_that_holds_it() {
        let mut stats = Stats::default();
        stats.first_token(Duration::from_millis(10));
        stats.first_token(Duration::from_secs(9999));
        let page = stats.page(&SimConfig::default());
        let value =
            |start: &str| page.lines().find(|l| l.starts_with(start)).unwrap().rsplit(' ').next().unwrap();
        assert_eq!(value("vllm:time_to_first_token_seconds_bucket{le=\"0.005\""), "0.0");
        assert_eq!(value("vllm:time_to_first_token_seconds_bucket{le=\"0.01\""), "1.0");
        assert_eq!(value("vllm:time_to_first_token_seconds_bucket{le=\"2560.0\""), "1.0");
        assert_eq!(value("vllm:time_to_first_token_seconds_bucket{le=\"+Inf\""), "2.0");
        assert_eq!(value("vllm:time_to_first_token_seconds_sum"), "9999.01");
    }
}
