//! Laws, relief and seeding: what affinity may do to the load.

use std::sync::Mutex;
use std::time::Instant;

use kvgate_core::*;
use kvgate_kv::hash::Namespace;
use kvgate_kv::mirror::View;
use serde_json::{Value, json};

use crate::support::*;

fn unseeded(law: Value) -> Value {
    json!({"law": law, "seeding": {"every": 0}, "speculative": {"enabled": false}})
}

#[test]
fn affinity_is_bounded_and_spills_are_counted_where_they_went() {
    let mut fleet = Fleet::new(4);
    fleet.holds(1, View::Own, 16, &tokens(64), &Namespace::default());
    let ladder = fleet.ladder(unseeded(json!({})));
    assert_eq!([SPILLS, SEEDS, HITS].map(|name| fleet.counts(name)), [[0; 4]; 3], "there from the start");
    let mut flights = Vec::new();
    let mut expected = [0; 4];
    for n in 1..=64_u64 {
        let flight = fleet.send(&ladder, chat(), &tokens(64));
        flight.answer(&ladder);
        let (at, why) = flight.outcome().unwrap();
        assert_eq!(why, (at != 1).then_some("spill"));
        expected[at] += u64::from(at != 1);
        let candidate = flight.record.candidates[0];
        assert_eq!(candidate.endpoint, at, "the winner comes first");
        assert_eq!(candidate.cap, Some((175 * (n - 1)).div_ceil(400).max(1)));
        flights.push(flight);
        assert!(
            fleet.in_flight().iter().all(|load| *load <= (175 * n).div_ceil(400)),
            "{:?}",
            fleet.in_flight()
        );
    }
    assert_eq!(fleet.counts(SPILLS), expected);
    assert!(
        expected[0] > 0 && expected[2] > 0 && expected[3] > 0,
        "engines never heard of relieve: {expected:?}"
    );
    let holder = fleet.in_flight()[1];
    assert!(holder >= 64 * 175 / 400 - 1, "as much as it may: {holder}");
    assert_eq!(fleet.counts(HITS), [0, holder, 0, 0], "nobody else held any of it");
    flights.into_iter().for_each(|flight| flight.end(&ladder, Outcome::complete(200)));
    assert_eq!(fleet.in_flight(), [0; 4]);
}

#[test]
fn relief_is_for_pools_unless_told_otherwise() {
    for (role, relief, relieved) in [
        (Role::Any, "auto", true),
        (Role::Any, "off", false),
        (Role::Prefill, "auto", false),
        (Role::Prefill, "on", true),
    ] {
        let mut fleet = Fleet::of(role, 3);
        fleet.holds(0, View::Own, 16, &tokens(64), &Namespace::default());
        let ladder = fleet.ladder(unseeded(json!({"relief": relief})));
        let flights: Vec<_> = (0..9).map(|_| fleet.send(&ladder, chat(), &tokens(64))).collect();
        let elsewhere = flights.iter().filter(|f| f.endpoint() != 0).count();
        assert_eq!(elsewhere > 0, relieved, "{role:?} {relief}");
    }
}

#[test]
fn capacities_are_what_engines_tell_or_else_weights() {
    let mut fleet = Fleet::new(2);
    fleet.endpoints[0].weight = 3;
    fleet.holds(0, View::Own, 16, &tokens(64), &Namespace::default());
    let ladder = fleet.ladder(unseeded(json!({})));
    let now = Instant::now();
    let scored = |fleet: &Fleet| {
        let flight = fleet.send_at(&ladder, chat(), &tokens(64), now);
        let mut all = flight.record.candidates.clone();
        all.sort_by_key(|c| c.endpoint);
        all.iter().map(|c| c.capacity).collect::<Vec<_>>()
    };
    assert_eq!(scored(&fleet), [3, 1]);
    let until = now + std::time::Duration::from_secs(1);
    for (endpoint, blocks) in fleet.endpoints.iter().zip([1000, 500]) {
        let told = Telemetry { blocks: Some(blocks), running: None, waiting: None, until };
        endpoint.engine.set_telemetry(Some(told));
    }
    assert_eq!(scored(&fleet), [3000, 500]);
    // what an operator or a controller says comes on top
    fleet.endpoints[1].engine.set_weight_pct(50);
    assert_eq!(scored(&fleet), [300_000, 25_000]);
}

#[test]
fn an_empty_engine_beside_warm_ones_gets_its_share_to_start_with() {
    let mut fleet = Fleet::new(4);
    for endpoint in [0, 3] {
        fleet.holds(endpoint, View::Own, 16, &tokens(320), &Namespace::default());
    }
    let ladder = fleet.ladder(json!({"seeding": {"every": 4, "min_blocks": 20}}));
    let ask = |fleet: &Fleet, count: usize| -> Vec<usize> {
        (0..count).map(|_| fleet.route(&ladder, &tokens(320)).unwrap()).collect()
    };
    assert_eq!(ask(&fleet, 8), [0, 0, 0, 1, 0, 0, 0, 1], "the first cold one");
    assert_eq!(fleet.counts(SEEDS), [0, 2, 0, 0]);
    assert_eq!(fleet.counts(HITS), [6, 0, 0, 0]);
    fleet.holds(1, View::Own, 16, &tokens(320), &Namespace::default());
    assert_eq!(ask(&fleet, 4), [0, 0, 0, 2], "20 blocks are enough");
    fleet.holds(2, View::Own, 16, &tokens(319), &Namespace::default());
    assert_eq!(ask(&fleet, 4), [0, 0, 0, 2], "19 are not");
    assert_eq!(
        (fleet.counts(SEEDS), fleet.counts(HITS)[2]),
        (vec![0, 2, 2, 0], 1),
        "a seed that held some is a hit"
    );
    fleet.stores(2, 0, &(5000..5016).collect::<Vec<u32>>(), &Namespace::default());
    assert_eq!(ask(&fleet, 8), [0; 8]);
    let none = fleet.ladder(json!({"seeding": {"every": 0}}));
    fleet.standing.iter().for_each(|standing| standing.set_blocks(0));
    assert!((0..40).all(|_| fleet.route(&none, &tokens(320)) == Ok(0)));
}

/// Many threads at once, one prompt, on a fleet in several states: nobody is ever above the bound.
#[test]
fn a_herd_is_bounded_under_concurrency() {
    const HERD: usize = 2000;
    for (name, config, prepare) in [
        ("cold", json!({}), (|_| {}) as fn(&mut Fleet)),
        ("followed, cold", json!({}), |fleet| fleet.follows_all(View::Own)),
        ("one holder", json!({}), |fleet| {
            fleet.holds(2, View::Own, 16, &tokens(512), &Namespace::default());
        }),
        ("adaptive", json!({"law": {"mode": "adaptive", "mean_load_factor_pct": 100}}), |fleet| {
            fleet.holds(2, View::Own, 16, &tokens(512), &Namespace::default());
        }),
        ("unrelieved, followed, cold", json!({"law": {"relief": "off"}}), |fleet| {
            fleet.follows_all(View::Own);
        }),
    ] {
        let mut fleet = Fleet::new(8);
        prepare(&mut fleet);
        let ladder = fleet.ladder(config.clone());
        let (endpoints, flights) = (&fleet.endpoints, Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..HERD / 8 {
                        let prompt = prompt(Ok(vec![tokens(520)]));
                        let flight = start(endpoints, &ladder, chat(), &Mask::none(), prompt, Instant::now());
                        flight.answer(&ladder);
                        flights.lock().unwrap().push(flight);
                    }
                });
            }
        });
        let load = fleet.in_flight();
        let pct = if name == "adaptive" { 300 } else { 175 };
        assert_eq!(load.iter().sum::<u64>(), HERD as u64);
        let bound = (pct * HERD as u64).div_ceil(800) + 1;
        assert!(load.iter().all(|load| *load <= bound), "{name}: {load:?}");
        for flight in flights.into_inner().unwrap() {
            flight.end(&ladder, Outcome::complete(200));
        }
        assert_eq!(fleet.in_flight(), [0; 8], "{name}");
    }
}
