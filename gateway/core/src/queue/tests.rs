use super::*;
use crate::breaker::BreakerPolicy;
use crate::engine::{Admin, Engines, Identity};
use crate::lease::{Cause, Outcome, Phase};
use futures::FutureExt;
use proptest::prelude::*;

const ANY: Depth = Depth { total: usize::MAX, tenant: usize::MAX };

/// Engines with these caps, all serving one queue.
fn setup(caps: &[u64]) -> (Vec<Seat>, Arc<Queue>) {
    let (engines, queue) = (Engines::default(), Arc::new(Queue::new(Arc::default())));
    let seat = |(at, cap): (usize, &u64)| {
        let engine = engines.get(&Identity { address: format!("e{at}:1"), tls: None });
        engine.serve_queue(&queue);
        Seat { engine, cap: Arc::new((*cap).into()) }
    };
    (caps.iter().enumerate().map(seat).collect(), queue)
}

fn open(queue: &Queue, seats: &[Seat]) -> Vec<usize> {
    queue.open(seats.iter().enumerate()).iter().collect()
}

#[test]
fn first_come_first_served_and_no_barging() {
    let (seats, queue) = setup(&[1]);
    let accepts: Arc<[Seat]> = seats.clone().into();
    let held = Lease::try_take(&seats[0].engine, Some(1)).unwrap();
    let enter = || queue.enter(accepts.clone(), 0, Depth { total: 2, tenant: 9 });
    let mut first = enter().unwrap();
    let mut second = enter().unwrap();
    assert_eq!(enter().unwrap_err(), Full::Queue);
    assert_eq!(queue.length.get(), 2);
    held.end(Outcome::complete(200));
    assert!(open(&queue, &seats).is_empty(), "the place went to the first");
    let grant = (&mut first).now_or_never().unwrap().unwrap();
    assert!((&mut second).now_or_never().is_none());
    drop(grant);
    drop(second.now_or_never().unwrap().unwrap().into_lease());
    assert_eq!((seats[0].engine.in_flight(), queue.length.get()), (0, 0));
    assert_eq!(open(&queue, &seats), [0]);
}

#[test]
fn a_half_open_breaker_lets_one_through_who_waits() {
    let (seats, queue) = setup(&[9]);
    let engine = seats[0].engine.clone();
    engine.set_breaker_policy(BreakerPolicy { failures: 1, ..BreakerPolicy::OFF });
    let broken = Outcome { phase: Phase::Connect, status: None, cause: Cause::EngineBroken };
    Lease::try_take(&engine, None).unwrap().end(broken);
    let accepts: Arc<[Seat]> = seats.into();
    let mut tickets = [0; 3].map(|_| queue.enter(accepts.clone(), 0, ANY).unwrap());
    let mut granted = |queue: &Queue| {
        queue.serve(&engine);
        tickets.iter_mut().filter_map(|t| t.now_or_never()).flatten().collect::<Vec<_>>()
    };
    let mut first = granted(&queue);
    assert_eq!((first.len(), queue.len()), (1, 2), "there is room for all of them");
    assert!(granted(&queue).is_empty());
    // it ends in nothing: the next may see
    drop(first.pop());
    assert_eq!((engine.in_flight(), queue.len()), (1, 1));
    let second = granted(&queue).pop().unwrap();
    assert_eq!(second.lease().availability(Instant::now()), crate::Availability::Free);
    second.into_lease().end(Outcome::complete(200));
    assert_eq!((granted(&queue).len(), queue.len()), (1, 0));
}

#[test]
fn a_dropped_ticket_leaves_the_queue_and_loses_no_slot() {
    let (seats, queue) = setup(&[1]);
    let accepts: Arc<[Seat]> = seats.clone().into();
    let held = Lease::try_take(&seats[0].engine, Some(1)).unwrap();
    let first = queue.enter(accepts.clone(), 0, ANY).unwrap();
    let second = queue.enter(accepts, 0, ANY).unwrap();
    drop(held); // handed to the first, which never looks
    drop(first);
    assert!(second.now_or_never().unwrap().is_some());
    assert_eq!((seats[0].engine.in_flight(), queue.len()), (0, 0));
}

#[test]
fn a_newcomer_may_take_what_nobody_waits_for() {
    let (seats, queue) = setup(&[1, 1]);
    let held = Lease::try_take(&seats[0].engine, Some(1)).unwrap();
    let waits = queue.enter([seats[0].clone()].into(), 0, ANY).unwrap();
    assert_eq!(open(&queue, &seats), [1]);
    drop(held);
    assert_eq!(open(&queue, &seats), [1]);
    drop(waits);
    assert_eq!(open(&queue, &seats), [0, 1]);
}

#[test]
fn tenants_have_their_share_of_the_places() {
    let (seats, queue) = setup(&[0]);
    let accepts: Arc<[Seat]> = seats.into();
    let enter = |tenant| queue.enter(accepts.clone(), tenant, Depth { total: 4, tenant: 2 });
    let first = enter(7).unwrap();
    let _second = enter(7).unwrap();
    assert_eq!(enter(7).unwrap_err(), Full::Tenant);
    let _other = enter(8).unwrap();
    drop(first);
    let _third = enter(7).unwrap();
    let _fourth = enter(9).unwrap();
    assert_eq!(enter(10).unwrap_err(), Full::Queue);
    assert_eq!(queue.lock().tenants.values().sum::<usize>(), 4);
}

#[test]
fn the_queue_that_has_waited_longest_is_served_first() {
    let (seats, one) = setup(&[1]);
    let other = Arc::new(Queue::new(Arc::default()));
    seats[0].engine.serve_queue(&other);
    let accepts: Arc<[Seat]> = seats.clone().into();
    let held = Lease::try_take(&seats[0].engine, Some(1)).unwrap();
    let first = other.enter(accepts.clone(), 0, ANY).unwrap();
    let second = one.enter(accepts.clone(), 0, ANY).unwrap();
    let third = other.enter(accepts, 0, ANY).unwrap();
    drop(held);
    for ticket in [first, second, third] {
        assert!(ticket.now_or_never().unwrap().is_some());
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Finds an open engine, else waits for one of these.
    Come(u8),
    /// Somebody of a rule without caps.
    Intrude(usize),
    Collect(usize),
    Leave(usize),
    End(usize),
    Admin(usize, bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1u8..8).prop_map(Op::Come),
        1 => (0usize..3).prop_map(Op::Intrude),
        2 => any::<usize>().prop_map(Op::Collect),
        1 => any::<usize>().prop_map(Op::Leave),
        3 => any::<usize>().prop_map(Op::End),
        1 => (0usize..3, any::<bool>()).prop_map(|(at, on)| Op::Admin(at, on)),
    ]
}

/// The queue as one would write it without threads or wake-ups.
#[derive(Default)]
struct Naive {
    caps: Vec<u64>,
    in_flight: Vec<u64>,
    active: Vec<bool>,
    /// Mask of engines, and the one granted.
    waiting: Vec<(u8, Option<usize>)>,
}

impl Naive {
    fn first(&mut self, at: usize) -> Option<&mut (u8, Option<usize>)> {
        self.waiting.iter_mut().find(|(mask, granted)| granted.is_none() && mask & (1 << at) != 0)
    }

    fn serve(&mut self, at: usize) {
        while self.active[at] && self.in_flight[at] < self.caps[at] {
            let Some(first) = self.first(at) else { return };
            first.1 = Some(at);
            self.in_flight[at] += 1;
        }
    }

    fn end(&mut self, at: usize) {
        self.in_flight[at] -= 1;
        self.serve(at);
    }

    fn open(&mut self, at: usize) -> bool {
        self.serve(at);
        self.active[at] && self.in_flight[at] < self.caps[at] && self.first(at).is_none()
    }
}

proptest! {
    #[test]
    fn behaves_as_the_naive_queue(caps in prop::collection::vec(0u64..3, 3), ops in prop::collection::vec(op(), 1..80)) {
        let (seats, queue) = setup(&caps);
        let mut naive = Naive { in_flight: vec![0; 3], active: vec![true; 3], caps, ..Naive::default() };
        let (mut tickets, mut leases) = (Vec::new(), Vec::new());
        for op in ops {
            match op {
                Op::Come(mask) => {
                    let mine = |at: &usize| mask & (1 << *at) != 0;
                    let new = seats.iter().enumerate().filter(|(at, s)| mine(at) && s.engine.takes_new(std::time::Instant::now()));
                    let found = queue.open(new).iter().next();
                    prop_assert_eq!(found, (0..3).filter(mine).filter(|at| naive.open(*at)).collect::<Vec<_>>().first().copied());
                    if let Some(at) = found {
                        naive.in_flight[at] += 1;
                        leases.push((at, Lease::try_take(&seats[at].engine, Some(seats[at].cap())).unwrap()));
                    } else {
                        let accepts: Vec<_> = (0..3).filter(mine).map(|at| seats[at].clone()).collect();
                        tickets.push(queue.enter(accepts.into(), 0, ANY).unwrap());
                        naive.waiting.push((mask, None));
                        (0..3).filter(mine).for_each(|at| naive.serve(at));
                    }
                }
                Op::Intrude(at) => {
                    naive.in_flight[at] += 1;
                    leases.push((at, Lease::try_take(&seats[at].engine, None).unwrap()));
                }
                Op::Collect(_) | Op::Leave(_) if tickets.is_empty() => {}
                Op::Collect(n) => {
                    let n = n % tickets.len();
                    let grant = (&mut tickets[n]).now_or_never().map(Option::unwrap);
                    let at = naive.waiting[n].1;
                    prop_assert_eq!(grant.as_ref().map(|g| g.lease().engine().unwrap().id()), at.map(|at| seats[at].engine.id()));
                    if let (Some(grant), Some(at)) = (grant, at) {
                        leases.push((at, grant.into_lease()));
                        tickets.remove(n);
                        naive.waiting.remove(n);
                    }
                }
                Op::Leave(n) => {
                    let n = n % tickets.len();
                    drop(tickets.remove(n));
                    let (_, granted) = naive.waiting.remove(n);
                    if let Some(at) = granted { naive.end(at); }
                }
                Op::End(_) if leases.is_empty() => {}
                Op::End(n) => {
                    let (at, lease) = leases.remove(n % leases.len());
                    drop(lease);
                    naive.end(at);
                }
                Op::Admin(at, on) => {
                    seats[at].engine.set_admin(if on { Admin::Active } else { Admin::Draining });
                    naive.active[at] = on;
                    queue.serve(&seats[at].engine);
                    naive.serve(at);
                }
            }
            let in_flight: Vec<_> = seats.iter().map(|s| s.engine.in_flight()).collect();
            prop_assert_eq!(&in_flight, &naive.in_flight);
            let waiting = naive.waiting.iter().filter(|(_, granted)| granted.is_none()).count();
            prop_assert_eq!((queue.len(), queue.length.get()), (waiting, waiting as u64));
        }
        drop((tickets, leases));
        prop_assert!(seats.iter().all(|s| s.engine.in_flight() == 0) && queue.lock().tenants.is_empty());
    }
}

#[test]
fn caps_are_exact_and_nobody_is_forgotten_under_threads() {
    let (seats, queue) = setup(&[2, 1]);
    let accepts: Arc<[Seat]> = seats.clone().into();
    let served = AtomicU64::new(0);
    std::thread::scope(|s| {
        for thread in 0..8 {
            let (seats, queue, accepts, served) = (&seats, &queue, &accepts, &served);
            s.spawn(move || {
                for i in 0..400 {
                    let mut open = open(queue, seats).into_iter();
                    let lease = open.find_map(|at| Lease::try_take(&seats[at].engine, Some(seats[at].cap())));
                    let lease = lease.or_else(|| {
                        let ticket = queue.enter(accepts.clone(), 0, ANY).unwrap();
                        if (i + thread) % 5 == 0 {
                            return None; // leaves at once
                        }
                        futures::executor::block_on(ticket).map(Grant::into_lease)
                    });
                    for seat in seats {
                        assert!(seat.engine.in_flight() <= seat.cap());
                    }
                    served.fetch_add(u64::from(lease.is_some()), Ordering::Relaxed);
                }
            });
        }
    });
    assert!(served.into_inner() >= 8 * 320);
    assert_eq!(seats.iter().map(|s| s.engine.in_flight()).sum::<u64>() + queue.len() as u64, 0);
}
