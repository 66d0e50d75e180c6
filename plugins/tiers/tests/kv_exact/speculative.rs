//! What a request makes its engine compute counts before the events say so.

use std::time::{Duration, Instant};

use kvgate_core::conformance::RULE;
use kvgate_core::*;
use kvgate_kv::hash::Namespace;
use kvgate_kv::mirror::View;
use serde_json::{Value, json};

use crate::support::*;

/// With nothing but overlap to decide.
fn off(speculative: Value) -> Value {
    json!({"law": {"mode": "off"}, "seeding": {"every": 0}, "speculative": speculative})
}

fn followed(count: usize) -> Fleet {
    let mut fleet = Fleet::new(count);
    fleet.follows_all(View::Own);
    fleet
}

#[test]
fn the_gap_between_dispatch_and_event_is_covered_and_counts_as_no_hit() {
    let mut fleet = followed(3);
    let ladder = fleet.ladder(off(json!({})));
    let first = fleet.send(&ladder, chat(), &tokens(64));
    assert_eq!(first.outcome(), Err("no_worker"));
    let at = first.endpoint();
    first.answer(&ladder);
    // the prompt goes on: its first four blocks are on their way there
    let second = fleet.send(&ladder, chat(), &tokens(100));
    assert_eq!(second.outcome(), Ok((at, Some("speculative"))));
    second.answer(&ladder);
    let speculative = fleet.counts(SPECULATIVE);
    assert_eq!((speculative[at], speculative.iter().sum::<u64>()), (1, 1));
    assert_eq!(fleet.counts(HITS), [0, 0, 0]);
    assert_eq!(fleet.count("loxilb_pd_kv_tier15_fallthrough_total", ""), 1, "nor as a miss");
    assert!(fleet.count("kvgate_kv_speculative_blocks_total", RULE) >= 8);
    let done = |flight: Flight| flight.end(&ladder, Outcome::complete(200));
    done(first);
    done(second);
    // the event comes, and from then on the same is a hit
    fleet.stores(at, 0, &tokens(96), &Namespace::default());
    let third = fleet.send(&ladder, chat(), &tokens(100));
    assert_eq!(third.outcome(), Ok((at, None)));
    third.answer(&ladder);
    assert_eq!(fleet.counts(HITS)[at], 1);
    assert_eq!(fleet.counts(SPECULATIVE)[at], 1);
    third.end(&ladder, Outcome::complete(200));
}

/// Whatever ends a request, whoever answers it, nothing is expected of it any longer.
#[test]
fn a_request_that_is_over_leaves_no_credit() {
    let fleet = followed(2);
    let ladder = fleet.ladder(off(json!({})));
    for outcome in [
        Outcome { phase: Phase::Connect, status: None, cause: Cause::EngineBroken },
        Outcome { phase: Phase::FirstByte, status: None, cause: Cause::Deadline },
        Outcome { phase: Phase::Answer, status: Some(200), cause: Cause::ClientGone },
        Outcome { phase: Phase::Answer, status: Some(503), cause: Cause::Refused },
        Outcome::complete(200),
    ] {
        let first = fleet.send(&ladder, chat(), &tokens(64));
        assert_eq!(first.outcome(), Err("no_worker"), "{outcome:?}");
        first.end(&ladder, outcome);
        let next = fleet.send(&ladder, chat(), &tokens(64));
        assert_eq!(next.outcome(), Err("no_worker"), "{outcome:?}");
        // and one that is dropped without a word
        drop(next);
    }
    assert_eq!(fleet.in_flight(), [0, 0]);
}

#[test]
fn a_credit_expires_though_the_answer_goes_on() {
    let fleet = followed(2);
    let ladder = fleet.ladder(off(json!({"ttl": "10s"})));
    let start = Instant::now();
    let _first = fleet.send_at(&ladder, chat(), &tokens(64), start);
    let ask = |ms| {
        let flight = fleet.send_at(&ladder, chat(), &tokens(64), start + Duration::from_millis(ms));
        let outcome = flight.outcome();
        flight.end(&ladder, Outcome::complete(200));
        outcome.map(|(_, why)| why)
    };
    assert_eq!(ask(10_000), Err("no_worker"));
    let _second = fleet.send_at(&ladder, chat(), &tokens(64), start);
    assert_eq!(ask(9_999), Ok(Some("speculative")));
    assert_eq!(ask(9_999), Ok(Some("speculative")), "the end of the same request is not that of the first");
}

#[test]
fn nothing_is_expected_of_engines_that_are_not_followed() {
    let mut fleet = Fleet::new(2);
    let ladder = fleet.ladder(off(json!({})));
    let _never_heard_of = fleet.send(&ladder, chat(), &tokens(64));
    assert_eq!(fleet.route(&ladder, &tokens(64)), Err("no_worker"));
    drop(_never_heard_of);
    fleet.follows_all(View::Own);
    let ladder = fleet.ladder(off(json!({})));
    let first = fleet.send(&ladder, chat(), &tokens(64));
    fleet.standing.iter().for_each(|standing| standing.set_trusted(false));
    assert_eq!(fleet.route(&ladder, &tokens(64)), Err("no_worker"), "it may have restarted");
    drop(first);
}

/// Events that no longer come, though nobody has noticed: no hit is claimed.
#[test]
fn with_the_feed_cut_hits_stay_flat() {
    let fleet = followed(3);
    let ladder = fleet.ladder(json!({}));
    let mut flights = Vec::new();
    for _ in 0..50 {
        let flight = fleet.send(&ladder, chat(), &tokens(64));
        flight.answer(&ladder);
        flights.push(flight);
    }
    assert_eq!(fleet.counts(HITS), [0, 0, 0]);
    let picks: u64 = fleet.counts(SPECULATIVE).iter().sum();
    assert!(picks > 30, "{picks}");
    flights.into_iter().for_each(|flight| flight.end(&ladder, Outcome::complete(200)));
    assert_eq!(fleet.route(&ladder, &tokens(64)), Err("no_worker"));
    assert_eq!(fleet.in_flight(), [0, 0, 0]);
}

#[test]
fn what_is_held_beats_as_much_that_is_expected_by_the_discount() {
    for (discount, winner, worth) in [(10, 1, 57), (0, 0, 64), (100, 1, 0)] {
        let mut fleet = followed(2);
        let ladder = fleet.ladder(off(json!({"discount_pct": discount})));
        let (prompt, tried) = (prompt(Ok(vec![tokens(64)])), [1].into_iter().collect());
        let _first = start(&fleet.endpoints, &ladder, chat(), &tried, prompt, Instant::now());
        fleet.stores(1, 0, &tokens(64), &Namespace::default());
        let second = fleet.send(&ladder, chat(), &tokens(64));
        assert_eq!(second.endpoint(), winner, "{discount}");
        let overlaps = second.record.candidates.iter().map(|c| (c.endpoint, c.overlap));
        assert_eq!(overlaps.collect::<std::collections::BTreeMap<_, _>>(), [(0, worth), (1, 64)].into());
    }
}

#[test]
fn what_is_expected_outlives_a_reload() {
    let fleet = followed(3);
    let before = fleet.ladder(off(json!({})));
    let first = fleet.send(&before, chat(), &tokens(64));
    let after = fleet.ladder(off(json!({})));
    drop(before);
    let second = fleet.send(&after, chat(), &tokens(64));
    assert_eq!(second.outcome(), Ok((first.endpoint(), Some("speculative"))));
    let larger = fleet.ladder(off(json!({"slots": 1024})));
    assert_eq!(fleet.route(&larger, &tokens(64)), Err("no_worker"), "a table of another size is another");
}

#[test]
fn it_can_be_turned_off() {
    let fleet = followed(2);
    let ladder = fleet.ladder(off(json!({"enabled": false})));
    let first = fleet.send(&ladder, chat(), &tokens(64));
    assert_eq!(fleet.route(&ladder, &tokens(64)), Err("no_worker"));
    assert_eq!(fleet.counts(SPECULATIVE), [0, 0], "the series are there all the same");
    drop(first);
}

#[test]
fn a_table_that_is_too_small_says_so() {
    let fleet = followed(2);
    let ladder = fleet.ladder(off(json!({"slots": 8})));
    let flights: Vec<_> = (0..4)
        .map(|n| fleet.send(&ladder, chat(), &(n * 1000..n * 1000 + 64).collect::<Vec<u32>>()))
        .collect();
    assert_eq!(fleet.count("kvgate_kv_speculative_blocks_total", RULE), 16);
    assert_eq!(fleet.count("kvgate_kv_speculative_evictions_total", RULE), 8);
    drop(flights);
}
