//! What is found for a prompt, and what is missed.

use kvgate_core::conformance::{self, RULE};
use kvgate_core::*;
use kvgate_kv::hash::Namespace;
use kvgate_kv::mirror::View;
use kvgate_tiers::kv_exact::KIND;
use serde_json::json;

use crate::support::*;

#[test]
fn the_longest_held_prefix_wins_and_the_first_among_equals() {
    let mut fleet = Fleet::new(4);
    let plain = Namespace::default();
    fleet.holds(1, View::Own, 16, &tokens(32), &plain);
    fleet.holds(2, View::Own, 16, &tokens(64), &plain);
    fleet.holds(3, View::Own, 16, &tokens(64), &plain);
    let ladder = fleet.ladder(json!({}));
    let record = fleet.ask(&ladder, chat(), &Mask::none(), prompt(Ok(vec![tokens(100)])));
    assert_eq!(outcome(&record), Ok(2));
    let scored: Vec<_> = record.candidates.iter().map(|c| (c.endpoint, c.overlap)).collect();
    assert_eq!(scored, [(2, 64), (3, 64), (1, 32), (0, 0)], "the winner, then the best");
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_hits_total", "2"), 1);
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_hits_total", "3"), 0);
}

#[test]
fn an_excluded_holder_falls_to_the_second_best_and_then_to_excluded() {
    let mut fleet = Fleet::new(3);
    fleet.holds(0, View::Own, 16, &tokens(64), &Namespace::default());
    fleet.holds(1, View::Own, 16, &tokens(32), &Namespace::default());
    let ladder = fleet.ladder(json!({}));
    let ask = |tried: &[usize]| {
        let tried = tried.iter().copied().collect();
        outcome(&fleet.ask(&ladder, chat(), &tried, prompt(Ok(vec![tokens(64)]))))
    };
    assert_eq!(ask(&[0]), Ok(1));
    assert_eq!(ask(&[0, 1]), Err("excluded"));
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_miss_reason_total", "excluded"), 1);
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_fallthrough_total", ""), 1);
}

#[test]
fn every_miss_has_its_reason_and_the_model_comes_first() {
    let mut fleet = Fleet::new(1);
    let ladder = fleet.ladder(json!({}));
    let ask = |model: Option<&str>, sequences| {
        let request = Request { model: model.map(Into::into), ..Request::default() };
        outcome(&fleet.ask(&ladder, request, &Mask::none(), prompt(sequences)))
    };
    assert_eq!(ask(None, Err(Miss("text_empty"))), Err("model_empty"));
    assert_eq!(ask(Some(""), Err(Miss("text_empty"))), Err("model_empty"));
    assert_eq!(ask(Some("m"), Err(Miss("text_empty"))), Err("text_empty"));
    assert_eq!(ask(Some("m"), Err(Miss("tokenize"))), Err("tokenize"));
    assert_eq!(ask(Some("m"), Ok(vec![tokens(15)])), Err("shallow"));
    assert_eq!(ask(Some("m"), Ok(vec![tokens(16)])), Err("no_worker"));
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_fallthrough_total", ""), 6);
    for reason in ["mode_off", "warmup", "hashes", "excluded", "deadline"] {
        assert_eq!(fleet.count("loxilb_pd_kv_tier15_miss_reason_total", reason), 0, "{reason}");
    }
    fleet.holds(0, View::Own, 16, &tokens(15), &Namespace::default());
    let all = fleet.ladder(json!({"min_match_tokens": 0}));
    assert_eq!(fleet.route(&all, &tokens(15)), Err("no_worker"), "no full block, nothing to hold");
}

#[test]
fn block_sizes_are_each_engines_own() {
    let mut fleet = Fleet::new(3);
    fleet.holds(0, View::Own, 16, &tokens(48), &Namespace::default());
    fleet.holds(1, View::Own, 32, &tokens(64), &Namespace::default());
    fleet.holds(2, View::Own, 128, &tokens(100), &Namespace::default());
    let ladder = fleet.ladder(json!({}));
    assert_eq!(fleet.route(&ladder, &tokens(64)), Ok(1));
    assert_eq!(fleet.route(&ladder, &tokens(60)), Ok(0));
}

#[test]
fn the_best_rank_counts_and_several_prompts_add_up() {
    let mut fleet = Fleet::new(2);
    let other: Vec<u32> = (5000..5048).collect();
    fleet.holds(0, View::Own, 16, &tokens(32), &Namespace::default());
    fleet.holds(0, View::Own, 16, &other, &Namespace::default());
    fleet.holds(1, View::Own, 16, &tokens(32), &Namespace::default());
    let ladder = fleet.ladder(json!({}));
    let record = fleet.ask(&ladder, chat(), &Mask::none(), prompt(Ok(vec![tokens(32), other.clone()])));
    let scored: Vec<_> = record.candidates.iter().map(|c| c.overlap).collect();
    assert_eq!(scored, [48, 32]);
}

#[test]
fn a_strict_contract_with_the_wrong_seed_never_matches_and_says_so() {
    let mut fleet = Fleet::new(1);
    fleet.holds(0, View::Published, 16, &tokens(32), &Namespace::default());
    let contract = |seed: &str| json!({"zero_hit_requests": 3, "contract": {"mode": "strict", "algorithm": "sha256_cbor", "block_size": 16, "none_hash_seed": seed, "extra_keys": "tagged"}});
    let wrong = fleet.ladder(contract("1"));
    for _ in 0..4 {
        assert_eq!(fleet.route(&wrong, &tokens(32)), Err("no_worker"));
    }
    let alarm = fleet.ground.alarms.get(RULE, "kv_zero_hits");
    let detail = alarm.detail().unwrap();
    assert!(detail.starts_with("4 requests in a row") && detail.contains("none_hash_seed"), "{detail}");
    assert_eq!(fleet.count("loxilb_pd_kv_zero_hit_watchdog_total", RULE), 2);
    // after a change the advice is that of the new settings
    let again = fleet.ladder(json!({"zero_hit_requests": 3}));
    fleet.holds(0, View::Own, 16, &[7; 32], &Namespace::default());
    (0..3).for_each(|_| assert_eq!(fleet.route(&again, &tokens(32)), Err("no_worker")));
    let detail = alarm.detail().unwrap();
    assert!(detail.starts_with("3 requests in a row") && detail.contains("tokenizer"), "{detail}");
    let right = fleet.ladder(contract("0"));
    assert_eq!(fleet.route(&right, &tokens(32)), Ok(0));
    assert_eq!(alarm.detail(), None);
}

#[test]
fn a_contract_that_cannot_be_used_misses_hashes() {
    let mut fleet = Fleet::new(1);
    fleet.holds(0, View::Published, 16, &tokens(32), &Namespace::default());
    let unusable =
        json!({"mode": "strict", "algorithm": "xxhash_cbor", "block_size": 16, "extra_keys": "tagged"});
    let ladder = fleet.ladder(json!({"contract": unusable}));
    assert_eq!(fleet.route(&ladder, &tokens(32)), Err("hashes"));
}

#[test]
fn an_empty_inventory_raises_no_alarm() {
    let fleet = Fleet::new(1);
    let ladder = fleet.ladder(json!({"zero_hit_requests": 3}));
    for _ in 0..10 {
        assert_eq!(fleet.route(&ladder, &tokens(32)), Err("no_worker"));
    }
    assert_eq!(fleet.ground.alarms.get(RULE, "kv_zero_hits").detail(), None);
}

#[test]
fn an_engine_that_may_have_restarted_gets_no_credit() {
    let mut fleet = Fleet::new(2);
    fleet.holds(0, View::Own, 16, &tokens(64), &Namespace::default());
    fleet.holds(1, View::Own, 16, &tokens(32), &Namespace::default());
    let ladder = fleet.ladder(json!({}));
    fleet.standing[0].set_trusted(false);
    assert_eq!(fleet.route(&ladder, &tokens(64)), Ok(1));
    fleet.standing[1].set_trusted(false);
    assert_eq!(fleet.route(&ladder, &tokens(64)), Err("no_worker"));
    fleet.standing[0].set_trusted(true);
    assert_eq!(fleet.route(&ladder, &tokens(64)), Ok(0));
}

#[test]
fn conforms() {
    let services = Fleet::new(0).ground.services;
    conformance::check(&KIND, &conformance::keys(&KIND, &json!({})), &services);
}
