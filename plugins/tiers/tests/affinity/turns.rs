use kvgate_core::*;
use proptest::prelude::*;
use serde_json::json;

use crate::support::{Answered, Fleet};

fn ask(fleet: &Fleet, ladder: &Ladder) -> Answered {
    fleet.choose(ladder, Request::default(), None, Role::Any)
}

fn order(fleet: &Fleet, ladder: &Ladder, count: usize) -> Vec<usize> {
    (0..count).map(|_| ask(fleet, ladder).endpoint).collect()
}

fn weighted(fleet: &Fleet) -> Ladder {
    fleet.ladder(&[("weighted-round-robin", json!({}))])
}

/// The sequence in nginx's own description of the algorithm: weights 5, 1 and 1 give a a b a c a a.
#[test]
fn turns_are_smooth_as_nginx_has_them() {
    let fleet = Fleet::new(&[5, 1, 1]);
    let ladder = weighted(&fleet);
    assert_eq!(order(&fleet, &ladder, 14), [0, 0, 1, 0, 2, 0, 0].repeat(2));
}

#[test]
fn turns_go_on_over_a_reload_and_round_those_who_are_out() {
    let mut fleet = Fleet::new(&[2, 1, 1]);
    let before = weighted(&fleet);
    assert_eq!(order(&fleet, &before, 2), [0, 1]);
    let ladder = weighted(&fleet);
    drop(before);
    assert_eq!(order(&fleet, &ladder, 2), [2, 0], "and not from the start");
    fleet.endpoints[0].engine.set_admin(Admin::Draining);
    let alone = order(&fleet, &ladder, 10);
    assert_eq!(alone.iter().filter(|at| **at == 1).count(), 5, "{alone:?}");
    assert!(!alone.contains(&0));
    fleet.endpoints[0].engine.set_admin(Admin::Active);
    fleet.endpoints.remove(1);
    let ladder = weighted(&fleet);
    let both = order(&fleet, &ladder, 30);
    assert_eq!(both.iter().filter(|at| **at == 0).count(), 20, "{both:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    /// In every round each has exactly its share.
    #[test]
    fn shares_are_exact(weights in prop::collection::vec(1u32..20, 1..8), rounds in 1usize..4) {
        let fleet = Fleet::new(&weights);
        let ladder = weighted(&fleet);
        for _ in 0..rounds {
            let round = order(&fleet, &ladder, weights.iter().sum::<u32>() as usize);
            for (at, weight) in weights.iter().enumerate() {
                prop_assert_eq!(round.iter().filter(|n| **n == at).count(), *weight as usize);
            }
        }
    }

    /// Of all eligible endpoints none has less in flight for its weight.
    #[test]
    fn least_connections_are_the_least(
        weights in prop::collection::vec(1u32..6, 1..8),
        loads in prop::collection::vec(0usize..6, 8),
        down in prop::collection::vec(any::<bool>(), 8),
    ) {
        let fleet = Fleet::new(&weights);
        let mut held = Vec::new();
        for (endpoint, load) in fleet.endpoints.iter().zip(&loads) {
            held.extend((0..*load).filter_map(|_| Lease::try_take(&endpoint.engine, None)));
        }
        for (endpoint, down) in fleet.endpoints.iter().zip(&down).skip(1) {
            endpoint.engine.set_healthy(!down);
        }
        let ratio = |at: usize| loads[at] as f64 / f64::from(weights[at]);
        let eligible = (0..weights.len()).filter(|at| *at == 0 || !down[*at]);
        let least = eligible.map(ratio).fold(f64::MAX, f64::min);
        let ladder = fleet.ladder(&[("least-connections", json!({}))]);
        let chosen = ask(&fleet, &ladder);
        prop_assert_eq!(chosen.tier, "least-connections");
        prop_assert!((ratio(chosen.endpoint) - least).abs() < 1e-9);
    }
}

#[test]
fn equals_are_taken_in_turn() {
    let fleet = Fleet::new(&[1; 3]);
    let ladder = fleet.ladder(&[("least-connections", json!({}))]);
    assert_eq!(order(&fleet, &ladder, 6), [0, 1, 2, 0, 1, 2]);
    let busy = ask(&fleet, &ladder);
    assert_eq!(busy.endpoint, 0);
    assert_eq!(order(&fleet, &ladder, 4), [1, 2, 1, 2]);
    let reloaded = fleet.ladder(&[("least-connections", json!({}))]);
    assert_eq!(order(&fleet, &reloaded, 2), [1, 2]);
    drop(busy);
    let held: Vec<_> = (0..6).map(|_| ask(&fleet, &reloaded)).collect();
    assert!(fleet.endpoints.iter().all(|e| e.engine.in_flight() == 2), "{held:?}");
}

/// One instance in each ladder of a rule, whose requests alternate: nobody's turn is skipped for it.
#[test]
fn each_role_has_turns_of_its_own() {
    for tier in ["round-robin", "least-connections", "weighted-round-robin", "chwbl", "gpu-aware"] {
        let mut fleet = Fleet::new(&[]);
        let roles = [Role::Prefill, Role::Decode, Role::Prefill, Role::Decode, Role::Decode];
        fleet.endpoints = roles.iter().enumerate().map(|(at, role)| fleet.endpoint(at, *role, 1)).collect();
        let [prefill, decode] = [(); 2].map(|()| fleet.ladder(&[(tier, json!({}))]));
        let mut asked = [0; 5];
        for _ in 0..6 {
            for (ladder, role) in [(&prefill, Role::Prefill), (&decode, Role::Decode)] {
                asked[fleet.choose(ladder, Request::default(), None, role).endpoint] += 1;
            }
        }
        assert_eq!(asked, [3, 2, 3, 2, 2], "{tier}");
    }
}
