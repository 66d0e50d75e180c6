//! Pages of real engines, and pages that are none.

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
        ..Reading::default()
    }
}

#[test]
fn pages_of_real_engines() {
    for (page, blocks, prompts, generated, firsts, took) in [
        ("metrics_vllm", 262_144, 13_262, 199, 70, 4.346_465_587_615_967),
        ("metrics_vllm_cold", 262_144, 0, 0, 0, 0.0),
        ("metrics_vllm_v0.28.0", 2048, 411, 35, 6, 4.846_885_442_733_765),
    ] {
        let page = kvgate_tests::fixture(&format!("vllm/http/{page}.txt"));
        let told = metrics("vllm").read(&page).unwrap();
        // an engine that is cold tells of every family too
        assert!(Family::ALL.iter().all(|family| told.tells(*family)), "{told:?}");
        let ttft = told.ttft.clone().unwrap();
        assert_eq!((ttft.buckets.len(), ttft.count, ttft.sum), (23, firsts, took));
        assert_eq!((ttft.buckets[0], ttft.buckets[22]), ((0.001, 0), (f64::INFINITY, firsts)));
        assert!(ttft.buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{ttft:?}");
        assert_eq!(told.shows_work(), firsts > 0);
        let (prompt_tokens, generation_tokens) = (Some(prompts), Some(generated));
        let plain = reading(0, 0, &[blocks]);
        let expected =
            Reading { usage: Some(0.0), prompt_tokens, generation_tokens, ttft: Some(ttft), ..plain };
        assert_eq!(told, expected);
        assert_eq!(metrics("sglang").read(&page), Err(Unreadable::Nothing));
        // every cut is a page that ended early: read, or refused, and never more than there is
        for end in (0..page.len()).step_by(331) {
            if let Ok(part) = metrics("vllm").read(&page[..end]) {
                assert!(part.blocks.is_none_or(|n| n == blocks), "{end}");
                assert!(part.ttft.is_none() || part.ttft == told.ttft, "{end}");
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
    // an engine of this kind that has had nothing to tell yet
    for page in ["# TYPE vllm:num_requests_running gauge\n", "vllm:other 1\n"] {
        assert_eq!(read("vllm", page), Ok(Reading::default()), "{page}");
    }
    for line in [
        "vllm:num_requests_running",
        "vllm:num_requests_running x",
        "vllm:num_requests_running{engine=\"0\" 1",
        "vllm:num_requests_running{engine=\"0} 1",
        "vllm:num_requests_running{engine=0} 1",
        "vllm:num_requests_running{engine=\"0\\",
        "vllm:cache_config_info{num_gpu_blocks=\"7\"}",
        "vllm:kv_cache_usage_perc{} x",
        "vllm:prompt_tokens_total{a=\"} 1",
        "vllm:time_to_first_token_seconds_bucket{} 1",
        "vllm:time_to_first_token_seconds_sum",
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
    let page = "vllm:kv_cache_usage_perc NaN\nvllm:prompt_tokens_total -1\nvllm:generation_tokens_total 1\n";
    let told = read("vllm", page).unwrap();
    assert_eq!((told.usage, told.prompt_tokens, told.generation_tokens), (None, None, Some(1)));
}

/// A histogram of two bounds.
fn ttft(labels: &str, counts: [&str; 2], sum: &str, count: &str) -> String {
    let name = "sglang:time_to_first_token_seconds";
    format!(
        "{name}_bucket{{le=\"0.1\",{labels}}} {}\n{name}_bucket{{{labels},le=\"+Inf\"}} {}\n\
         {name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {count}\n{name}_created{{{labels}}} 1.7e9\n",
        counts[0], counts[1],
    )
}

#[test]
fn counters_and_histograms_add_up_over_all_series() {
    let streams = "model_name=\"m\",is_streaming=\"true\"";
    let whole = "model_name=\"m\",is_streaming=\"false\"";
    let page = format!(
        "sglang:prompt_tokens_total{{{streams}}} 10\nsglang:prompt_tokens_total{{{whole}}} 5\n\
         sglang:generation_tokens_total{{{whole}}} 3\n\
         sglang:token_usage{{tp_rank=\"0\",dp_rank=\"0\"}} 0.25\nsglang:token_usage{{tp_rank=\"0\",dp_rank=\"1\"}} 0.5\n{}{}",
        ttft(streams, ["1", "4"], "2.5", "4"),
        ttft(whole, ["2", "2"], "0.125", "2"),
    );
    let told = read("sglang", &page).unwrap();
    let expected = Histogram { buckets: vec![(0.1, 3), (f64::INFINITY, 6)], sum: 2.625, count: 6 };
    assert_eq!((told.prompt_tokens, told.generation_tokens), (Some(15), Some(3)));
    assert_eq!((told.usage, &told.ttft), (Some(0.5), &Some(expected)));
    assert_eq!((told.running, told.blocks), (None, None));
    let page = "llamacpp:prompt_tokens_total 7\nllamacpp:tokens_predicted_total 8\n";
    let told = read("llamacpp", page).unwrap();
    assert_eq!((told.prompt_tokens, told.generation_tokens), (Some(7), Some(8)));
    let page = "trtllm_prompt_tokens_total{model_name=\"m\"} 7\ntrtllm_kv_cache_utilization{model_name=\"m\"} 0.75\n";
    let told = read("trtllm", page).unwrap();
    assert_eq!((told.prompt_tokens, told.usage), (Some(7), Some(0.75)));
}

#[test]
fn a_histogram_is_known_whole_or_not_at_all() {
    let good = ttft("", ["1", "4"], "2.5", "4");
    assert!(read("sglang", &good).unwrap().ttft.is_some());
    for part in ["_bucket{le", "_bucket{,le", "_sum", "_count"] {
        let page: String =
            good.lines().filter(|line| !line.contains(part)).map(|l| format!("{l}\n")).collect();
        assert!(page.len() < good.len(), "{part}");
        // without its lower bounds it is still one
        assert_eq!(read("sglang", &page).unwrap().ttft.is_some(), part == "_bucket{le", "{part}");
    }
    for (value, spoilt) in [("4", "NaN"), ("2.5", "NaN"), ("2.5", "-1")] {
        let page = good.replacen(&format!(" {value}\n"), &format!(" {spoilt}\n"), 1);
        assert_eq!(read("sglang", &page).unwrap().ttft, None, "{page}");
    }
    for bound in ["", "x", "-1", "NaN"] {
        let page = good.replace("0.1", bound);
        assert_eq!(read("sglang", &page), Err(Unreadable::Garbage), "{bound}");
    }
    let bucket = |n: u32| format!("sglang:time_to_first_token_seconds_bucket{{le=\"{n}\"}} 1\n");
    let many = |n: u32| (0..n).map(bucket).collect::<String>();
    assert!(read("sglang", &many(256)).is_ok());
    assert_eq!(read("sglang", &many(257)), Err(Unreadable::Garbage));
}

#[test]
fn usage_has_an_older_name() {
    let old = "vllm:gpu_cache_usage_perc{engine=\"0\"} 0.75\n";
    assert_eq!(read("vllm", old).unwrap().usage, Some(0.75));
    let both = format!("{old}vllm:kv_cache_usage_perc{{engine=\"0\"}} 0.5\n");
    assert_eq!(read("vllm", &both).unwrap().usage, Some(0.5));
}

#[test]
fn families_are_those_that_an_engine_has() {
    let lacking = |engine: &str| {
        let has: Vec<_> = metrics(engine).families().collect();
        Family::ALL.into_iter().filter(|family| !has.contains(family)).collect::<Vec<_>>()
    };
    for engine in ["vllm", "sglang", "trtllm"] {
        assert_eq!(lacking(engine), []);
    }
    assert_eq!(lacking("llamacpp"), [Family::Usage, Family::Blocks, Family::Ttft]);
    assert_eq!(metrics("vllm").names(Family::Blocks), ["vllm:cache_config_info{num_gpu_blocks}"]);
    for kind in crate::ENGINES {
        for family in Family::ALL {
            let names = kind.metrics.names(family);
            assert!(names.iter().all(|name| name.starts_with(kind.metrics.prefix)), "{names:?}");
        }
    }
}

#[test]
fn work_and_restarts_show() {
    for line in [
        "num_requests_running 1",
        "num_requests_waiting 1",
        "kv_cache_usage_perc 0.001",
        "prompt_tokens_total 1",
        "generation_tokens_total 1",
    ] {
        assert!(read("vllm", &format!("vllm:{line}\n")).unwrap().shows_work(), "{line}");
    }
    assert!(!read("vllm", "vllm:num_requests_running 0\nvllm:prompt_tokens_total 0\n").unwrap().shows_work());
    let counted = |prompts, generated| Reading {
        prompt_tokens: prompts,
        generation_tokens: generated,
        ..Reading::default()
    };
    for (before, now, restarted) in [
        ((Some(5), Some(5)), (Some(5), Some(5)), false),
        ((Some(5), Some(5)), (Some(6), Some(9)), false),
        ((Some(5), Some(5)), (Some(9), Some(4)), true),
        ((Some(5), Some(5)), (Some(5), None), false),
        ((Some(5), None), (None, Some(1)), false),
        ((Some(5), Some(5)), (None, None), true),
        ((Some(0), None), (None, None), false),
        ((None, None), (None, None), false),
    ] {
        let (before, now) = (counted(before.0, before.1), counted(now.0, now.1));
        assert_eq!(now.restarted_since(&before), restarted, "{before:?} {now:?}");
    }
}
