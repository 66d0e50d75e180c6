//! What an engine tells of itself on its metrics page.
//!
//! The page is read in Prometheus' text format (version 0.0.4, and OpenMetrics as far as samples go). Only the lines
//! of the families that are asked for are looked at closely.
//!
//! An engine with several data-parallel ranks has a series for each. What the ranks say is added up. Series of one
//! rank that differ in other labels say the same thing more than once (the tensor-parallel ranks of SGLang): of them
//! the largest counts.

use std::borrow::Cow;
use std::collections::BTreeMap;

/// Where an engine's page is and what is read from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metrics {
    /// Where the engine serves the page.
    pub path: &'static str,
    /// How to make the engine serve it, in words, for whoever finds that it does not.
    pub hint: &'static str,
    /// The gauge of requests that run.
    pub running: &'static str,
    /// The gauge of requests that wait.
    pub waiting: &'static str,
    /// Where the number of KV blocks stands: the first place that is on the page.
    pub blocks: &'static [Blocks],
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

/// What a page said.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// Requests that run, of all ranks.
    pub running: Option<u64>,
    /// Requests that wait, of all ranks.
    pub waiting: Option<u64>,
    /// KV blocks, of all ranks; never 0.
    pub blocks: Option<u64>,
    /// KV blocks of the rank that has most.
    pub rank_blocks: Option<u64>,
}

/// Why a page says nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unreadable {
    /// It is not text in the format.
    Garbage,
    /// It is, but holds none of what is looked for.
    Nothing,
}

/// One number for each rank.
type Ranks = BTreeMap<String, u64>;

impl Metrics {
    /// Reads a page.
    ///
    /// # Errors
    /// Nothing in it can be used, or a line that would be is broken: then none of it is.
    pub fn read(&self, page: &[u8]) -> Result<Reading, Unreadable> {
        let page = std::str::from_utf8(page).map_err(|_| Unreadable::Garbage)?;
        let (mut running, mut waiting) = (Ranks::new(), Ranks::new());
        let mut blocks = vec![(Ranks::new(), Ranks::new()); self.blocks.len()];
        for line in page.lines() {
            let name = name(line);
            let note = |ranks: &mut Ranks, label: Option<&str>| -> Result<(), Unreadable> {
                let sample = Sample::read(line, name).ok_or(Unreadable::Garbage)?;
                let number = match label {
                    Some(label) => sample.label(label).and_then(|text| text.parse().ok()),
                    None => whole(sample.value),
                };
                // "None" while the engine starts, NaN where nobody counts: not known
                if let Some(number) = number {
                    let rank = sample.label(self.rank).unwrap_or_default().to_owned();
                    let known = ranks.entry(rank).or_default();
                    *known = number.max(*known);
                }
                Ok(())
            };
            if name == self.running {
                note(&mut running, None)?;
            } else if name == self.waiting {
                note(&mut waiting, None)?;
            }
            for (place, (ranks, sizes)) in self.blocks.iter().zip(&mut blocks) {
                match *place {
                    Blocks::Gauge(gauge) if gauge == name => note(ranks, None)?,
                    Blocks::Label(family, label) if family == name => note(ranks, Some(label))?,
                    Blocks::Tokens(tokens, _) if tokens == name => note(ranks, None)?,
                    Blocks::Tokens(_, per_block) if per_block == name => note(sizes, None)?,
                    _ => {}
                }
            }
        }
        let found = self.blocks.iter().zip(blocks).map(|(place, (ranks, sizes))| match place {
            Blocks::Tokens(..) => divided(&ranks, &sizes),
            _ => ranks.into_values().collect(),
        });
        let blocks: Vec<u64> = found.map(positive).find(|ranks| !ranks.is_empty()).unwrap_or_default();
        let reading = Reading {
            running: sum(running.into_values()),
            waiting: sum(waiting.into_values()),
            rank_blocks: blocks.iter().copied().max(),
            blocks: sum(blocks),
        };
        if reading == Reading::default() { Err(Unreadable::Nothing) } else { Ok(reading) }
    }
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

/// A gauge that counts things. Not a number and below zero is nothing that can be counted.
fn whole(value: f64) -> Option<u64> {
    // above, an f64 holds no whole numbers any more
    (0.0..=9_007_199_254_740_992.0).contains(&value).then_some(value as u64)
}

/// The family a line belongs to; empty of comments and blank lines.
fn name(line: &str) -> &str {
    if line.starts_with('#') { "" } else { line.split(['{', ' ', '\t']).next().unwrap_or_default() }
}

/// A line of a page.
struct Sample<'a> {
    labels: Vec<(&'a str, Cow<'a, str>)>,
    value: f64,
}

impl<'a> Sample<'a> {
    /// `name{label="text",…} value [timestamp]`; the line begins with the name.
    fn read(line: &'a str, name: &str) -> Option<Self> {
        let mut rest = line.strip_prefix(name)?;
        let mut labels = Vec::new();
        if let Some(inside) = rest.strip_prefix('{') {
            rest = inside;
            loop {
                rest = rest.trim_start_matches([',', ' ', '\t']);
                if let Some(after) = rest.strip_prefix('}') {
                    rest = after;
                    break;
                }
                let (label, text) = rest.split_once("=\"")?;
                let (text, after) = quoted(text)?;
                labels.push((label.trim(), text));
                rest = after;
            }
        }
        let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
        Some(Self { labels, value })
    }

    fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| *label == name).map(|(_, text)| &**text)
    }
}

/// The text up to the closing quote, and what follows that.
fn quoted(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let mut read = String::new();
    let mut rest = text;
    loop {
        let (plain, from) = rest.split_at(rest.find(['"', '\\'])?);
        if let Some(after) = from.strip_prefix('"') {
            let whole = if read.is_empty() { Cow::Borrowed(plain) } else { Cow::Owned(read + plain) };
            return Some((whole, after));
        }
        read.push_str(plain);
        let mut escaped = from.strip_prefix('\\')?.chars();
        read.push(match escaped.next()? {
            'n' => '\n',
            other => other,
        });
        rest = escaped.as_str();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EngineKind;

    fn metrics(engine: &str) -> Metrics {
        EngineKind::by_name(engine).unwrap().metrics
    }

    fn read(engine: &str, page: &str) -> Result<Reading, Unreadable> {
        metrics(engine).read(page.as_bytes())
    }

    fn reading(running: u64, waiting: u64, blocks: &[u64]) -> Reading {
        Reading {
            running: Some(running),
            waiting: Some(waiting),
            blocks: sum(blocks.iter().copied()),
            rank_blocks: blocks.iter().copied().max(),
        }
    }

    #[test]
    fn pages_of_real_engines() {
        for (page, blocks) in
            [("metrics_vllm", 262_144), ("metrics_vllm_cold", 262_144), ("metrics_vllm_v0.28.0", 2048)]
        {
            let page = kvgate_tests::fixture(&format!("vllm/http/{page}.txt"));
            assert_eq!(metrics("vllm").read(&page), Ok(reading(0, 0, &[blocks])));
            assert_eq!(metrics("sglang").read(&page), Err(Unreadable::Nothing));
            // every cut is a page that ended early: read, or refused, and never more than there is
            for end in (0..page.len()).step_by(331) {
                if let Ok(part) = metrics("vllm").read(&page[..end]) {
                    assert!(part.blocks.is_none_or(|n| n == blocks), "{end}");
                }
            }
        }
    }

    #[test]
    fn ranks_add_up_and_repetitions_do_not() {
        let page = "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n\
                    vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 4.0\n\
                    vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 1e1 1700000000\n\
                    vllm:cache_config_info{engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n\
                    vllm:cache_config_info{engine=\"1\",num_gpu_blocks=\"None\"} 1.0\n\
                    vllm:cache_config_info{engine=\"1\",num_gpu_blocks=\"90\"} 1.0\n";
        assert_eq!(read("vllm", page), Ok(reading(7, 10, &[100, 90])));
        let page = "sglang:num_running_reqs{tp_rank=\"0\",dp_rank=\"0\"} 3\n\
                    sglang:num_running_reqs{tp_rank=\"1\",dp_rank=\"0\"} 3\n\
                    sglang:num_running_reqs{tp_rank=\"0\",dp_rank=\"1\"} 2\n\
                    sglang:num_queue_reqs{tp_rank=\"0\",dp_rank=\"0\"} 0\n\
                    sglang:max_total_num_tokens{tp_rank=\"0\",dp_rank=\"0\"} 6400\n\
                    sglang:max_total_num_tokens{tp_rank=\"1\",dp_rank=\"0\"} 6400\n\
                    sglang:page_size{tp_rank=\"0\",dp_rank=\"0\"} 64\n";
        assert_eq!(read("sglang", page), Ok(reading(5, 0, &[100])));
        let old = "sglang:num_running_reqs 1\nsglang:num_queue_reqs 2\n\
                   sglang:cache_config_info{page_size=\"16\",num_pages=\"77\"} 1\n";
        assert_eq!(read("sglang", old), Ok(reading(1, 2, &[77])));
        let page = "trtllm_num_requests_running{model_name=\"m\"} 1\ntrtllm_num_requests_waiting{} 2\n\
                    trtllm_kv_cache_max_blocks{model_name=\"m\"} 5000.0\n";
        assert_eq!(read("trtllm", page), Ok(reading(1, 2, &[5000])));
        let page = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n";
        assert_eq!(read("llamacpp", page), Ok(reading(1, 2, &[])));
    }

    #[test]
    fn labels_are_read_as_they_are_written() {
        let page = "vllm:cache_config_info{ a=\"},b=\\\"9\\\\\", num_gpu_blocks=\"7\" , n=\"\\n{é\",} 1\n";
        assert_eq!(read("vllm", page).unwrap().blocks, Some(7));
        // OpenMetrics' exemplars, and Windows' line ends
        let page = "vllm:num_requests_running{} 5 # {id=\"x\"} 1 2\r\nvllm:num_requests_waiting 6\r\n";
        assert_eq!(read("vllm", page), Ok(reading(5, 6, &[])));
    }

    #[test]
    fn what_is_no_page_is_told_from_one_that_says_nothing() {
        for page in ["", "\n", "{\"a\": 1}", "<html>", "# HELP vllm:num_requests_running x\n", "other 1\n"] {
            assert_eq!(read("vllm", page), Err(Unreadable::Nothing), "{page}");
        }
        for line in [
            "vllm:num_requests_running",
            "vllm:num_requests_running x",
            "vllm:num_requests_running{engine=\"0\" 1",
            "vllm:num_requests_running{engine=\"0} 1",
            "vllm:num_requests_running{engine=0} 1",
            "vllm:num_requests_running{engine=\"0\\",
            "vllm:cache_config_info{num_gpu_blocks=\"7\"}",
        ] {
            let page = format!("vllm:num_requests_waiting 1\n{line}\n");
            assert_eq!(read("vllm", &page), Err(Unreadable::Garbage), "{line}");
        }
        assert_eq!(metrics("vllm").read(b"vllm:num_requests_running 1\n\xff"), Err(Unreadable::Garbage));
        // numbers that count nothing are not known
        for value in ["NaN", "-1", "+Inf", "1e300"] {
            let page = format!("vllm:num_requests_running {value}\nvllm:num_requests_waiting 1\n");
            let told = read("vllm", &page).unwrap();
            assert_eq!((told.running, told.waiting), (None, Some(1)), "{value}");
        }
        let page = "vllm:num_requests_waiting 1\nvllm:cache_config_info{num_gpu_blocks=\"0\"} 1\n";
        assert_eq!(read("vllm", page).unwrap().blocks, None, "no engine has none");
    }
}
