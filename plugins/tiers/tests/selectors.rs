//! `chwbl`, `wrr-hash` and `gpu-aware`, in a real ladder.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use futures::executor::block_on;
use kvgate_core::conformance::{self, Ground, Known};
use kvgate_core::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn rung(name: &str, keys: &Value, endpoints: &[Endpoint]) -> Result<Rung, BuildError> {
    let kind = kvgate_tiers::TIERS.iter().find(|kind| kind.name == name).unwrap();
    Ground::default().rung(kind, &conformance::keys(kind, keys), endpoints)
}

/// A tier over engines.
struct Fleet {
    endpoints: Vec<Endpoint>,
    ladder: Ladder,
    name: &'static str,
}

/// A request that is being answered.
struct Flight {
    endpoint: usize,
    why: Option<&'static str>,
    record: Attempt,
    chosen: Chosen,
    facts: Facts,
}

impl Fleet {
    fn new(name: &'static str, weights: &[u32], keys: Value) -> Self {
        let engines = Engines::default();
        let all = (0..weights.len()).map(|n| (n, weights[n])).collect::<Vec<_>>();
        Self::of(name, &engines, &all, &keys)
    }

    /// Of these engines, by number and weight, in this order.
    fn of(name: &'static str, engines: &Engines, numbers: &[(usize, u32)], keys: &Value) -> Self {
        let endpoint = |(index, (number, weight)): (usize, &(usize, u32))| Endpoint {
            index,
            ..conformance::endpoint(engines, *number, Role::Any, *weight)
        };
        let endpoints: Vec<_> = numbers.iter().enumerate().map(endpoint).collect();
        let rung = rung(name, keys, &endpoints).unwrap();
        Self { endpoints, ladder: conformance::ladder(vec![rung]), name }
    }

    fn send_past(&self, request: Request, opening: Option<Opening>, tried: &Mask) -> Flight {
        let opening = opening.map(Arc::new).ok_or(Miss("text_empty"));
        let facts = Known { opening, ..Known::default() }.facts(request);
        let selection = conformance::selection(&self.endpoints, tried, &facts);
        let mut record = Attempt::default();
        let chosen = block_on(self.ladder.choose(&selection, &mut record)).unwrap();
        assert_eq!(chosen.tier, self.name, "{record:?}");
        let endpoint = &self.endpoints[chosen.endpoint];
        self.ladder.on_dispatch(&conformance::dispatch(endpoint, &chosen, &facts, selection.now));
        Flight { endpoint: chosen.endpoint, why: chosen.why, record, chosen, facts }
    }

    fn send(&self, request: Request, opening: Option<Opening>) -> Flight {
        self.send_past(request, opening, &Mask::none())
    }

    fn chat(&self, system: &str, first: &str) -> Flight {
        self.send(asks(), begins(system, first))
    }

    fn land(&self, flight: Flight) -> usize {
        let outcome = Outcome::complete(200);
        let endpoint = &self.endpoints[flight.endpoint];
        let dispatch = conformance::dispatch(endpoint, &flight.chosen, &flight.facts, Instant::now());
        self.ladder.on_complete(&Completion { dispatch, outcome });
        flight.chosen.lease.end(outcome);
        flight.endpoint
    }

    /// Where it goes while nothing else is in flight.
    fn whose(&self, system: &str, first: &str) -> usize {
        self.land(self.chat(system, first))
    }

    fn load(&self, endpoint: usize) -> u64 {
        self.endpoints[endpoint].engine.in_flight()
    }

    fn loads(&self) -> Vec<u64> {
        (0..self.endpoints.len()).map(|at| self.load(at)).collect()
    }
}

fn begins(system: &str, first: &str) -> Option<Opening> {
    Some(Opening { system: system.into(), first: first.into() })
}

fn asks() -> Request {
    Request { model: Some("m".into()), is_json: true, ..Request::default() }
}

fn talks(header: &'static str, name: &str) -> Request {
    let mut request = asks();
    request.headers.insert(header, name.parse().unwrap());
    request
}

const ALL: [&str; 3] = ["chwbl", "wrr-hash", "gpu-aware"];

#[test]
fn prompts_that_begin_alike_meet_and_others_spread() {
    for name in ALL {
        let fleet = Fleet::new(name, &[1; 4], json!({}));
        let mut used = [0; 4];
        for n in 0..200 {
            let system = format!("You are number {n}.");
            let first = fleet.chat(&system, "one");
            assert_eq!(first.why, Some("prefix"));
            let first = fleet.land(first);
            assert_eq!(first, fleet.whose(&system, "another"), "{name}");
            used[first] += 1;
        }
        assert!(used.iter().all(|n| (25..=75).contains(n)), "{name}: {used:?}");
    }
}

/// In a fleet of 300, what differs goes elsewhere, and for these texts it does.
#[test]
fn what_a_prefix_is_made_of() {
    for (name, level) in [("chwbl", 1), ("wrr-hash", 2), ("gpu-aware", 3)] {
        let fleet = Fleet::new(name, &[1; 300], json!({"prefix_hash_level": level, "prefix_bytes": 8}));
        let whose = |request: Request, system: &str, first: &str| {
            fleet.land(fleet.send(request, begins(system, first)))
        };
        let base = whose(asks(), "system", "first");
        let same = |request, system, first| whose(request, system, first) == base;
        assert!(!same(Request { model: Some("n".into()), ..asks() }, "system", "first"));
        assert!(!same(Request { adapter: Some("sql".into()), ..asks() }, "system", "first"));
        assert!(!same(Request { cache_salt: Some("t1".into()), ..asks() }, "system", "first"));
        assert!(!same(Request { tools: Some("[1]".into()), ..asks() }, "system", "first"));
        assert!(!same(asks(), "other", "first"));
        assert_eq!(same(asks(), "system", "later"), level == 1);
        assert_eq!(same(Request { user: Some("u".into()), ..asks() }, "system", "first"), level < 3);
        assert_eq!(same(talks("x-conversation-id", "c"), "system", "first"), level < 3);
        // where one text ends and the next begins, and where both do
        assert!(!same(asks(), "systemfirst", ""));
        assert!(!same(asks(), "", "systemfirst"));
        assert_eq!(
            whose(asks(), "12345678", "12345678"),
            whose(asks(), "12345678 and on", "12345678 and on")
        );
        assert!(whose(asks(), "1234567", "") != whose(asks(), "12345678", ""));
        assert!(whose(asks(), "", "hello") != whose(asks(), "", "goodbye"));
    }
}

#[test]
fn without_a_prompt_the_conversation_counts_and_without_one_the_turn() {
    for name in ALL {
        let fleet = Fleet::new(name, &[1; 4], json!({}));
        let mut used = BTreeSet::new();
        for n in 0..40 {
            let conversation = || fleet.send(talks("x-conversation-id", &format!("c{n}")), None);
            let first = conversation();
            assert_eq!(first.why, Some("conversation"));
            let first = fleet.land(first);
            assert_eq!(first, fleet.land(conversation()), "{name}");
            used.insert(first);
        }
        assert_eq!(used.len(), 4, "{name}");
        for none in
            [asks(), talks("x-conversation-id", ""), talks("x-session-id", "c1"), talks("x-request-id", "c1")]
        {
            let turns: Vec<_> = (0..4).map(|_| fleet.send(none.clone(), None)).collect();
            assert!(turns.iter().all(|turn| turn.why == Some("turn")), "{name}");
            let turns: BTreeSet<_> = turns.into_iter().map(|turn| fleet.land(turn)).collect();
            assert_eq!(turns.len(), 4, "{name}");
        }
        let named = Fleet::new(name, &[1; 4], json!({"conversation_header": "X-Session"}));
        assert_eq!(named.send(talks("x-session", "c1"), None).why, Some("conversation"));
        assert_eq!(named.send(talks("x-conversation-id", "c1"), None).why, Some("turn"));
        let wrong = rung(name, &json!({"conversation_header": "a header"}), &[]).err().unwrap();
        assert_eq!(wrong.key, "conversation_header");
    }
}

/// The order in which a key meets the endpoints: those tried before are left out.
fn order(fleet: &Fleet, first: &str) -> Vec<usize> {
    let mut tried = Mask::none();
    (0..fleet.endpoints.len())
        .map(|_| {
            let at = fleet.land(fleet.send_past(asks(), begins("", first), &tried));
            tried.insert(at);
            at
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Against the definition: the key's owner while it has less than
    /// max(1, ceil(factor * load * share / (100 * shares))), else whoever has least of those that have less.
    #[test]
    fn the_owner_is_chosen_while_under_its_bound(
        weights in prop::collection::vec(1u32..5, 1..7),
        weighted: bool,
        factor in prop::sample::select(vec![100u64, 125, 175, 1000]),
        steps in prop::collection::vec((0usize..4, 0usize..40, 0u32..3), 1..120),
    ) {
        let name = if weighted { "wrr-hash" } else { "chwbl" };
        let fleet = Fleet::new(name, &weights, json!({"load_factor_pct": factor}));
        let shares: Vec<u64> = weights.iter().map(|w| if weighted { u64::from(*w) } else { 1 }).collect();
        let prompts = ["a", "b", "c", "d"];
        let orders = prompts.map(|prompt| order(&fleet, prompt));
        let mut flights: Vec<Flight> = Vec::new();
        for (prompt, ended, ends) in steps {
            if ends == 0 && !flights.is_empty() {
                fleet.land(flights.swap_remove(ended % flights.len()));
                continue;
            }
            let loads = fleet.loads();
            let total: u64 = loads.iter().sum();
            let all: u64 = shares.iter().sum();
            let bound = |at: usize| (factor * total * shares[at]).div_ceil(100 * all).max(1);
            let under = |at: &usize| loads[*at] < bound(*at);
            let flight = fleet.chat("", prompts[prompt]);
            // 2520 is a multiple of every share there is
            let load = |at: &usize| 2520 / shares[*at] * loads[*at];
            let owner = orders[prompt][0];
            let (expected, why) = match orders[prompt].iter().copied().filter(under).min_by_key(load) {
                Some(_) if under(&owner) => (owner, "prefix"),
                Some(least) => (least, "spill"),
                None => (orders[prompt].iter().copied().min_by_key(load).unwrap(), "saturated"),
            };
            prop_assert_eq!((flight.endpoint, flight.why), (expected, Some(why)));
            prop_assert!(why == "saturated" || fleet.load(expected) <= bound(expected));
            flights.push(flight);
        }
        flights.into_iter().for_each(|flight| { fleet.land(flight); });
        prop_assert_eq!(fleet.loads().iter().sum::<u64>(), 0);
    }
}

/// Forty-eight at once with one prefix on two engines: the bound holds however their choices interleave.
#[test]
fn the_bound_is_exact_when_all_choose_at_once() {
    for (name, factor, most) in [("chwbl", 175, 42), ("wrr-hash", 100, 24), ("gpu-aware", 125, 30)] {
        for _ in 0..20 {
            let fleet = Fleet::new(name, &[1; 2], json!({"load_factor_pct": factor}));
            let start = Barrier::new(48);
            let flights = std::thread::scope(|scope| {
                let sends: Vec<_> = (0..48)
                    .map(|_| {
                        scope.spawn(|| {
                            start.wait();
                            fleet.chat("", "hot")
                        })
                    })
                    .collect();
                sends.into_iter().map(|send| send.join().unwrap()).collect::<Vec<_>>()
            });
            assert_eq!(fleet.loads().iter().sum::<u64>(), 48);
            assert!(fleet.loads().iter().all(|load| *load <= most), "{name}: {:?}", fleet.loads());
            flights.into_iter().for_each(|flight| {
                fleet.land(flight);
            });
            assert_eq!(fleet.loads(), [0, 0]);
        }
    }
}

/// One system prompt for everybody: its conversations spread over all engines, each stays on its own, and when the
/// rush is over they meet again.
#[test]
fn a_prefix_too_many_share_is_split_by_conversation() {
    for name in ALL {
        let fleet = Fleet::new(name, &[1; 8], json!({}));
        let home = fleet.whose("system", "anything");
        let mut flights: Vec<_> =
            (0..160).map(|n| fleet.chat("system", &format!("conversation {n}"))).collect();
        let loads = fleet.loads();
        assert!(loads.iter().all(|load| (8..=36).contains(load)), "{name}: {loads:?}");
        let mut stayed = 0;
        for (n, flight) in flights.iter_mut().enumerate() {
            let turn = fleet.chat("system", &format!("conversation {n}"));
            stayed += usize::from(turn.endpoint == flight.endpoint);
            fleet.land(std::mem::replace(flight, turn));
        }
        assert!(stayed > 140, "{name}: {stayed}");
        // another prompt, alone in a crowd, keeps its place
        let alone = fleet.whose("other", "one");
        assert_eq!(alone, fleet.whose("other", "two"), "{name}");
        flights.into_iter().for_each(|flight| {
            fleet.land(flight);
        });
        assert_eq!(fleet.loads(), [0; 8]);
        for n in 0..20 {
            assert_eq!(fleet.whose("system", &format!("conversation {n}")), home, "{name}");
        }
    }
}

#[test]
fn a_reload_in_another_order_moves_nothing_and_a_loss_moves_its_own() {
    let engines = Engines::default();
    let numbered: Vec<_> = (0..6).map(|n| (n, [1, 2, 3][n % 3])).collect();
    let reversed: Vec<_> = numbered.iter().rev().copied().collect();
    for name in ALL {
        let (fleet, turned) = (
            Fleet::of(name, &engines, &numbered, &json!({})),
            Fleet::of(name, &engines, &reversed, &json!({})),
        );
        let smaller = Fleet::of(name, &engines, &numbered[..5], &json!({}));
        let mut moved = 0;
        for n in 0..200 {
            let prompt = format!("prompt {n}");
            let before = fleet.whose("", &prompt);
            assert_eq!(before, 5 - turned.whose("", &prompt), "{name}");
            moved += usize::from(before != 5 && before != smaller.whose("", &prompt));
        }
        // a modulus moves most of them
        assert_eq!(moved == 0, name != "gpu-aware", "{name}: {moved}");
    }
}

#[test]
fn weights_count_in_the_ring_the_bounds_and_the_turns() {
    let fleet = Fleet::new("wrr-hash", &[3, 1], json!({}));
    let heavy = (0..400).filter(|n| fleet.whose("", &format!("prompt {n}")) == 0).count();
    assert!((260..=340).contains(&heavy), "{heavy}");
    let turns: Vec<_> = (0..40).map(|_| fleet.land(fleet.send(asks(), None))).collect();
    assert!((29..=31).contains(&turns.iter().filter(|at| **at == 0).count()), "{turns:?}");
    assert!(turns.windows(6).all(|six| six.contains(&0) && six.contains(&1)), "{turns:?}");
    let light = (0..).map(|n| format!("prompt {n}")).find(|prompt| fleet.whose("", prompt) == 1).unwrap();
    let flights: Vec<_> = (0..40).map(|_| fleet.chat("", &light)).collect();
    assert_eq!(fleet.loads(), [26, 14], "ceil(1.4 * 39 / 4) for the light one");
    assert!(
        flights
            .iter()
            .all(|flight| flight.why == Some(if flight.endpoint == 1 { "prefix" } else { "spill" }))
    );
    let next = fleet.chat("", &light);
    let shown: Vec<_> = next.record.candidates.iter().map(|c| (c.endpoint, c.load, c.capacity)).collect();
    assert_eq!(shown, [(0, 26, 3), (1, 14, 1)], "those that were looked at, the winner first");
}

#[test]
fn gpu_aware_goes_by_capacity_and_work_where_the_prefix_has_no_room() {
    let fleet = Fleet::new("gpu-aware", &[1, 1, 1, 2], json!({"load_factor_pct": 100}));
    let home = |at: usize| (0..).map(|n| format!("p{n}")).find(|p| fleet.whose("", p) == at).unwrap();
    let prompt = home(0);
    let tell = |at: usize, blocks: Option<u64>, waiting: Option<u64>| {
        let until = Instant::now() + Duration::from_secs(3600);
        fleet.endpoints[at].engine.set_telemetry(Some(Telemetry { blocks, running: None, waiting, until }));
    };
    let next = || {
        let first = fleet.chat("", &prompt);
        assert_eq!((first.endpoint, first.why), (0, Some("prefix")));
        let second = fleet.chat("", &prompt);
        assert_eq!(second.why, Some("spill"));
        fleet.land(first);
        fleet.land(second)
    };
    assert_eq!(next(), 1, "nobody has anything to do: the first by address");
    tell(1, None, Some(1));
    assert_eq!(
        next(),
        3,
        "the others' queues are as long as far as one knows, and this one has the capacity"
    );
    tell(2, None, Some(0));
    assert_eq!(next(), 2);
    tell(3, None, Some(1));
    tell(2, None, Some(1));
    assert_eq!(next(), 3);
    (0..4).for_each(|at| tell(at, Some([900, 100, 4000, 100][at]), Some(1)));
    assert_eq!(next(), 2, "blocks count once all tell them");
    let candidates = {
        let _first = fleet.chat("", &prompt);
        fleet.chat("", &prompt).record.candidates
    };
    assert_eq!(candidates.len(), 4);
    assert_eq!(candidates[0].capacity, 4000);
}
