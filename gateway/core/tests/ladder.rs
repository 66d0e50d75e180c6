//! The ladder with tiers that do as they are told.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::executor::block_on;
use kvgate_core::conformance::{Known, endpoints};
use kvgate_core::*;

/// `true`: every deadline has run out at once; `false`: none ever does.
struct Clock(bool);

impl Timer for Clock {
    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        if self.0 { async {}.boxed() } else { futures::future::pending().boxed() }
    }
}

type Script = Box<dyn Fn(&mut Routing<'_>) -> Verdict + Send + Sync>;

struct Scripted {
    script: Script,
    slow: bool,
    told: Mutex<Vec<String>>,
}

impl Tier for Scripted {
    fn prepare<'a>(&'a self, _: &'a Facts) -> Option<BoxFuture<'a, Result<(), Miss>>> {
        self.slow.then(|| futures::future::pending().boxed())
    }
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        (self.script)(routing)
    }
    fn on_miss(&self, miss: Miss) {
        self.told.lock().unwrap().push(miss.0.to_owned());
    }
    fn on_waited(&self, _: Role, _: Duration, end: WaitEnd) {
        self.told.lock().unwrap().push(format!("waited {end:?}"));
    }
    fn on_dispatch(&self, dispatch: &Dispatch<'_>) {
        self.told.lock().unwrap().push(format!("dispatch {} by {}", dispatch.endpoint.index, dispatch.tier));
    }
}

fn tier(script: impl Fn(&mut Routing<'_>) -> Verdict + Send + Sync + 'static) -> Arc<Scripted> {
    Arc::new(Scripted { script: Box::new(script), slow: false, told: Mutex::default() })
}

fn ladder(tiers: &[&Arc<Scripted>]) -> Ladder {
    let rung = |(at, tier): (usize, &&Arc<Scripted>)| Rung {
        name: ["first", "second", "third"][at],
        tier: (*tier).clone(),
        misses: vec![("scripted", Arc::default()), ("deadline", Arc::default())],
        picks: Arc::default(),
    };
    Ladder::new(tiers.iter().enumerate().map(rung).collect(), Duration::from_millis(50))
}

struct Setup {
    endpoints: Vec<Endpoint>,
    facts: Facts,
    tried: Mask,
    clock: Clock,
}

impl Setup {
    fn new(count: usize) -> Self {
        let facts = Known::default().facts(Request::default());
        Self {
            endpoints: endpoints(&Engines::default(), &vec![1; count]),
            facts,
            tried: Mask::none(),
            clock: Clock(false),
        }
    }

    fn selection(&self) -> Selection<'_> {
        Selection {
            rule: "rule",
            role: Role::Any,
            endpoints: &self.endpoints,
            tried: &self.tried,
            facts: &self.facts,
            prefill: None,
            seed: 1,
            now: std::time::Instant::now(),
            timer: &self.clock,
        }
    }

    fn choose(&self, ladder: &Ladder) -> (Result<Chosen, Refused>, Attempt) {
        let mut record = Attempt::default();
        (block_on(ladder.choose(&self.selection(), &mut record)), record)
    }
}

#[test]
fn the_first_that_picks_wins_and_passes_are_told_and_recorded() {
    let setup = Setup::new(3);
    let passes = tier(|_| Verdict::Pass(Miss("scripted")));
    let picks = tier(|_| Verdict::Pick(Choice::of(2)));
    let ladder = ladder(&[&passes, &picks]);
    let (chosen, record) = setup.choose(&ladder);
    let chosen = chosen.unwrap();
    assert_eq!((chosen.endpoint, chosen.tier), (2, "second"));
    assert_eq!(*passes.told.lock().unwrap(), ["scripted"]);
    assert_eq!(
        serde_json::to_value(&record).unwrap(),
        serde_json::json!({
            "role": "any",
            "steps": [{"tier": "first", "miss": "scripted"}, {"tier": "second"}],
            "winner": {"endpoint": 2, "address": "10.0.0.2:8000", "tier": "second"},
        })
    );
    assert_eq!(setup.endpoints[2].engine.in_flight(), 1);
    drop(chosen);
    assert_eq!(setup.endpoints[2].engine.in_flight(), 0);
}

#[test]
fn ends_with_min_load_and_turns_among_equals_only() {
    let mut setup = Setup::new(3);
    let ladder = ladder(&[]);
    let busy = Lease::try_take(&setup.endpoints[1].engine, None).unwrap();
    let turns: Vec<_> = (0..4).map(|_| setup.choose(&ladder).0.unwrap().endpoint).collect();
    assert_eq!(turns, [0, 2, 0, 2]);
    drop(busy);
    setup.tried = Mask::first(3);
    assert_eq!(setup.choose(&ladder).0.unwrap_err(), Refused::NoEndpoint);
}

#[test]
fn down_draining_and_tried_endpoints_are_out() {
    let mut setup = Setup::new(4);
    setup.endpoints[0].engine.set_healthy(false);
    setup.endpoints[1].engine.set_admin(Admin::Draining);
    setup.tried.insert(2);
    let seen = Arc::new(Mutex::new((Mask::none(), Mask::none())));
    let looks = {
        let seen = seen.clone();
        tier(move |routing| {
            *seen.lock().unwrap() = (routing.eligible.clone(), routing.pinnable.clone());
            Verdict::Pick(Choice::of(0))
        })
    };
    let (chosen, record) = setup.choose(&ladder(&[&looks]));
    assert_eq!(chosen.unwrap().endpoint, 3, "a pick outside the mask is a miss");
    assert_eq!(record.steps[0].miss, Some(Miss("not_eligible")));
    let (eligible, pinnable) = seen.lock().unwrap().clone();
    assert_eq!(eligible.iter().collect::<Vec<_>>(), [3]);
    assert_eq!(pinnable.iter().collect::<Vec<_>>(), [1, 3]);
}

#[test]
fn narrowing_narrows_and_an_empty_narrow_keeps_the_mask() {
    let setup = Setup::new(3);
    let empty = tier(|_| Verdict::Narrow([7].into_iter().collect(), Miss("scripted")));
    let narrow = tier(|_| Verdict::Narrow([1, 9].into_iter().collect(), Miss("scripted")));
    let ladder = ladder(&[&empty, &narrow]);
    let picks: Vec<_> = (0..3).map(|_| setup.choose(&ladder).0.unwrap().endpoint).collect();
    assert_eq!(picks, [1, 1, 1]);
    assert_eq!(empty.told.lock().unwrap().len(), 3);
}

#[test]
fn a_tier_that_takes_too_long_is_a_miss() {
    let mut setup = Setup::new(1);
    setup.clock = Clock(true);
    let slow = Arc::new(Scripted {
        script: Box::new(|_| Verdict::Pick(Choice::of(0))),
        slow: true,
        told: Mutex::default(),
    });
    let (chosen, record) = setup.choose(&ladder(&[&slow]));
    assert_eq!(chosen.unwrap().tier, "min-load");
    assert_eq!(record.steps[0].miss, Some(Miss::DEADLINE));
}

#[test]
fn a_choice_lost_to_another_request_is_made_again() {
    let setup = Setup::new(2);
    let calls = Arc::new(AtomicU32::new(0));
    let counted = calls.clone();
    let full = Lease::try_take(&setup.endpoints[0].engine, None).unwrap();
    let stubborn = tier(move |_| match counted.fetch_add(1, Ordering::Relaxed) {
        0 | 1 => Verdict::Pick(Choice { endpoint: 0, limit: Some(1), why: None }),
        _ => Verdict::Pick(Choice { endpoint: 1, limit: Some(1), why: None }),
    });
    let (chosen, record) = setup.choose(&ladder(&[&stubborn]));
    assert_eq!((chosen.unwrap().endpoint, record.raced), (1, 2));
    drop(full);
}

#[test]
fn a_limit_that_can_never_be_met_ends_with_load_alone() {
    let setup = Setup::new(1);
    let impossible = tier(|_| Verdict::Pick(Choice { endpoint: 0, limit: Some(0), why: None }));
    let (chosen, _) = setup.choose(&ladder(&[&impossible]));
    assert_eq!(chosen.unwrap().tier, "min-load");
}

#[test]
fn a_refusal_ends_the_ladder() {
    let setup = Setup::new(1);
    let refusal = Refusal { status: 429, code: "pd_overloaded", detail: "full".into(), retry_after: Some(1) };
    let answer = refusal.clone();
    let (chosen, _) = setup.choose(&ladder(&[&tier(move |_| Verdict::Reject(answer.clone()))]));
    assert_eq!(chosen.unwrap_err(), Refused::Tier(refusal));
}

fn queue(setup: &Setup) -> Arc<Queue> {
    let queue = Arc::new(Queue::new(Arc::default()));
    setup.endpoints.iter().for_each(|e| e.engine.serve_queue(&queue));
    queue
}

fn late() -> Refusal {
    Refusal { status: 504, code: "late", detail: "late".into(), retry_after: None }
}

/// Holds until it is handed a place, or one is open.
fn waits(setup: &Setup, queue: &Arc<Queue>) -> Arc<Scripted> {
    let seats = setup
        .endpoints
        .iter()
        .map(|e| Seat { engine: e.engine.clone(), cap: Arc::new(1.into()) })
        .collect::<Arc<[_]>>();
    let queue = queue.clone();
    tier(move |routing| {
        routing.cap = Some(1);
        let fits = seats.iter().enumerate().filter(|(at, _)| routing.eligible.contains(*at));
        let open = match routing.granted.filter(|at| routing.eligible.contains(*at)) {
            Some(endpoint) => [endpoint].into_iter().collect(),
            None => queue.open(fits),
        };
        if !open.is_empty() {
            routing.pinnable.intersect(&open);
            return Verdict::Narrow(open, Miss("scripted"));
        }
        let ticket = queue.enter(seats.clone(), 0, Depth { total: 9, tenant: 9 }).unwrap();
        Verdict::Hold(Hold { ticket, wait: Duration::from_secs(1), late: late() })
    })
}

#[test]
fn a_held_request_gets_the_freed_slot_whoever_picks() {
    let setup = Setup::new(2);
    let (queue, first) = (queue(&setup), tier(|_| Verdict::Pick(Choice::of(0))));
    let waits = waits(&setup, &queue);
    let ladder = ladder(&[&waits, &first]);
    let held: Vec<_> = setup.endpoints.iter().map(|e| Lease::try_take(&e.engine, Some(1)).unwrap()).collect();
    let selection = setup.selection();
    let mut record = Attempt::default();
    let mut waiting = Box::pin(ladder.choose(&selection, &mut record));
    assert!((&mut waiting).now_or_never().is_none());
    assert_eq!(queue.len(), 1);
    let mut held = held.into_iter().rev();
    held.next().unwrap().end(Outcome::complete(200));
    assert_eq!(setup.endpoints[1].engine.in_flight(), 1, "handed over");
    let chosen = waiting.now_or_never().unwrap().unwrap();
    assert_eq!((chosen.endpoint, chosen.tier), (1, "min-load"));
    assert_eq!(record.steps[1].miss, Some(Miss("not_eligible")));
    assert_eq!(*waits.told.lock().unwrap(), ["waited Granted", "scripted"]);
    drop((chosen, held));
    assert_eq!(setup.endpoints.iter().map(|e| e.engine.in_flight()).sum::<u64>(), 0);
}

#[test]
fn whoever_is_held_too_long_is_refused_and_leaves_the_queue() {
    let mut setup = Setup::new(1);
    setup.clock = Clock(true);
    let queue = queue(&setup);
    let waits = waits(&setup, &queue);
    let held = Lease::try_take(&setup.endpoints[0].engine, None).unwrap();
    let (chosen, record) = setup.choose(&ladder(&[&waits]));
    assert_eq!(chosen.unwrap_err(), Refused::Tier(late()));
    assert_eq!((record.steps.len(), record.steps[0].tier), (1, "first"));
    assert_eq!(*waits.told.lock().unwrap(), ["waited Late"]);
    assert_eq!(queue.len(), 0);
    drop(held);
}

/// A second that passes in four naps, with something done before the second of them.
struct Naps(AtomicU32, Arc<dyn Fn() + Send + Sync>);

impl Timer for Naps {
    fn sleep(&self, _: Duration) -> BoxFuture<'static, ()> {
        match self.0.fetch_add(1, Ordering::Relaxed) {
            0 => {
                let change = self.1.clone();
                async move { change() }.boxed()
            }
            1 => async {}.boxed(),
            _ => futures::future::pending().boxed(),
        }
    }
}

#[test]
fn nobody_waits_for_engines_that_are_gone() {
    let setup = Setup::new(2);
    let queue = queue(&setup);
    let waits = waits(&setup, &queue);
    let held: Vec<_> = setup.endpoints.iter().map(|e| Lease::try_take(&e.engine, None).unwrap()).collect();
    let engines: Vec<_> = setup.endpoints.iter().map(|e| e.engine.clone()).collect();
    let naps = Naps(0.into(), Arc::new(move || engines.iter().for_each(|e| e.set_healthy(false))));
    let selection = Selection { timer: &naps, ..setup.selection() };
    let ladder = ladder(&[&waits]);
    let chosen = block_on(ladder.choose(&selection, &mut Attempt::default()));
    assert_eq!(chosen.unwrap_err(), Refused::NoEndpoint);
    assert_eq!(*waits.told.lock().unwrap(), ["waited NoEndpoint"]);
    drop(held);
}

#[test]
fn whoever_waits_notices_an_engine_that_is_back() {
    let setup = Setup::new(2);
    let queue = queue(&setup);
    let waits = waits(&setup, &queue);
    let held = Lease::try_take(&setup.endpoints[0].engine, None).unwrap();
    // the head of the queue, which will not have the one that comes back
    let seat = Seat { engine: setup.endpoints[0].engine.clone(), cap: Arc::new(1.into()) };
    let _head = queue.enter([seat].into(), 0, Depth { total: 9, tenant: 9 }).unwrap();
    let back = setup.endpoints[1].engine.clone();
    back.set_healthy(false);
    let naps = Naps(0.into(), Arc::new(move || back.set_healthy(true)));
    let selection = Selection { timer: &naps, ..setup.selection() };
    let ladder = ladder(&[&waits]);
    let chosen = block_on(ladder.choose(&selection, &mut Attempt::default()));
    assert_eq!(chosen.unwrap().endpoint, 1);
    drop(held);
}

fn broken() -> Outcome {
    Outcome { phase: Phase::Connect, status: None, cause: Cause::EngineBroken }
}

/// Fails the engine once, which opens its breaker; it is half open at once.
fn half_open(engine: &Arc<Engine>) {
    engine.set_breaker_policy(BreakerPolicy { failures: 1, ..BreakerPolicy::OFF });
    Lease::try_take(engine, None).unwrap().end(broken());
    assert_eq!(engine.breaker(std::time::Instant::now()), BreakerState::HalfOpen);
}

#[test]
fn the_only_place_of_a_half_open_breaker_is_its_holder_s() {
    // the other engine stays, and is full; it goes; it goes, and the place was handed over already
    for (goes, served) in [(false, false), (true, false), (true, true)] {
        let setup = Setup::new(2);
        let queue = queue(&setup);
        let (descents, waits) = (AtomicU32::new(0), waits(&setup, &queue));
        let counts = tier(move |_| {
            assert!(descents.fetch_add(1, Ordering::Relaxed) < 9, "it runs in a circle");
            Verdict::Pass(Miss("scripted"))
        });
        let [full, back] = [0, 1].map(|at| setup.endpoints[at].engine.clone());
        let held = Lease::try_take(&full, None).unwrap();
        back.set_admin(Admin::Disabled);
        half_open(&back);
        let change = {
            let (full, back, queue) = (full.clone(), back.clone(), queue.clone());
            move || {
                full.set_healthy(!goes);
                back.set_admin(Admin::Active);
                if served {
                    queue.serve(&back);
                }
            }
        };
        let naps = Naps(0.into(), Arc::new(change));
        let selection = Selection { timer: &naps, ..setup.selection() };
        let chosen =
            block_on(ladder(&[&counts, &waits]).choose(&selection, &mut Attempt::default())).unwrap();
        assert_eq!((chosen.endpoint, back.in_flight(), queue.len()), (1, 1, 0));
        assert!(!back.takes_new(naps.now()), "it is the one that is let through");
        assert_eq!(chosen.lease.end(Outcome::complete(200)), Some(Change::Closed));
        drop(held);
    }
}

#[test]
fn a_place_on_an_engine_that_failed_since_is_nobody_s() {
    let setup = Setup::new(2);
    let queue = queue(&setup);
    let waits = waits(&setup, &queue);
    let [failing, other] = [0, 1].map(|at| setup.endpoints[at].engine.clone());
    let held = [&failing, &other].map(|engine| Lease::try_take(engine, None).unwrap());
    let selection = setup.selection();
    let ladder = ladder(&[&waits]);
    let mut record = Attempt::default();
    let mut waiting = Box::pin(ladder.choose(&selection, &mut record));
    assert!((&mut waiting).now_or_never().is_none());
    let [first, second] = held;
    first.end(Outcome::complete(200));
    assert_eq!(failing.in_flight(), 1, "handed over");
    half_open(&failing);
    failing.set_admin(Admin::Draining);
    assert!((&mut waiting).now_or_never().is_none());
    assert_eq!((failing.in_flight(), queue.len()), (0, 1), "it waits for the other");
    second.end(Outcome::complete(200));
    assert_eq!(waiting.now_or_never().unwrap().unwrap().endpoint, 1);
}

#[test]
fn a_cap_holds_whichever_tier_picks() {
    let setup = Setup::new(2);
    let calls = Arc::new(AtomicU32::new(0));
    let counted = calls.clone();
    let caps = tier(move |routing| {
        counted.fetch_add(1, Ordering::Relaxed);
        routing.cap = Some(1);
        Verdict::Pass(Miss("scripted"))
    });
    let full = Lease::try_take(&setup.endpoints[0].engine, None).unwrap();
    let stubborn = tier(|_| Verdict::Pick(Choice { endpoint: 0, limit: Some(9), why: None }));
    let (chosen, record) = setup.choose(&ladder(&[&caps, &stubborn]));
    // it is not the stubborn one's place to go over the cap: load alone decides in the end, under it
    assert_eq!((chosen.unwrap().endpoint, record.raced), (1, 65));
    assert_eq!(calls.load(Ordering::Relaxed), 66);
    drop(full);
}

#[test]
fn min_load_counts_what_engines_have_queued() {
    let setup = Setup::new(4);
    let ladder = ladder(&[]);
    let told = |at: usize, waiting: Option<u64>, fresh: bool| {
        let now = std::time::Instant::now();
        let until = if fresh { now + Duration::from_secs(60) } else { now };
        let told = Telemetry { blocks: None, running: Some(0), waiting, until };
        setup.endpoints[at].engine.set_telemetry(Some(told));
    };
    let pick = || {
        let (chosen, record) = setup.choose(&ladder);
        let mut loads: Vec<_> = record.candidates.iter().map(|c| (c.endpoint, c.load)).collect();
        loads.sort_unstable();
        (chosen.unwrap().endpoint, loads.into_iter().map(|(_, load)| load).collect::<Vec<_>>())
    };
    let busy = Lease::try_take(&setup.endpoints[1].engine, None).unwrap();
    assert_eq!(pick(), (0, vec![0, 1, 0, 0]), "nobody tells");
    told(0, Some(5), true);
    told(1, Some(0), true);
    told(2, None, true); // does not say: the mean of 5 and 0, rounded
    told(3, Some(0), false); // too long ago: the same
    assert_eq!(pick(), (1, vec![5, 1, 3, 3]));
    told(1, Some(2), true); // the mean is 3.5
    assert_eq!(pick(), (1, vec![5, 3, 4, 4]));
    drop(busy);
}

#[test]
fn facts_are_computed_once_and_failures_are_remembered() {
    let facts = Known::default().facts(Request::default());
    let calls = AtomicU32::new(0);
    for _ in 0..3 {
        let fact =
            block_on(facts.memo("count", async { Ok::<_, Miss>(calls.fetch_add(1, Ordering::Relaxed)) }));
        assert_eq!(*fact.unwrap(), 0);
        let failed = block_on(facts.memo::<u64>("fails", async {
            calls.fetch_add(100, Ordering::Relaxed);
            Err(Miss("hashes"))
        }));
        assert_eq!(failed.unwrap_err(), Miss("hashes"));
    }
    assert_eq!(calls.into_inner(), 101);
    assert_eq!(block_on(facts.tokens()).unwrap_err(), Miss("tokenize"));
    assert!(facts.known::<u32>("count").unwrap().is_ok());
    assert!(facts.known::<u32>("other").is_none());
}
