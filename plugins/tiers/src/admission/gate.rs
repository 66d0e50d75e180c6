//! The endpoints of one role, and who waits for them.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvgate_core::{
    Availability, BuildContext, Counter, Gauge, Mask, Queue, Refusal, Role, Routing, Seat, Verdict, WaitEnd,
};

use super::config::Config;

/// How many waits `Retry-After` is measured by.
const RECENT: usize = 64;

/// What outlives a plan.
struct Kept {
    queue: Arc<Queue>,
    /// Of tenants their hash is kept, whose seed no client knows.
    tenants: RandomState,
    waits: Mutex<VecDeque<Duration>>,
    /// How many each endpoint may have in flight, by the plan in force.
    cap: Arc<AtomicU64>,
    /// Gates that were built, and the last of them that was in force.
    built: AtomicU64,
    in_force: AtomicU64,
    renewal: Mutex<()>,
}

pub struct Gate {
    pub role: Role,
    /// How many each of its endpoints may have in flight, by its own plan.
    cap: u64,
    number: u64,
    seats: Vec<(usize, Seat)>,
    kept: Arc<Kept>,
    pub counts: Counts,
}

impl Gate {
    /// Of the endpoints of this role; `None` where there is none.
    pub fn new(role: Role, config: &Config, context: &BuildContext<'_>) -> Option<Self> {
        let of_role = context.endpoints.iter().enumerate().filter(|(_, e)| e.role == role);
        let cap = config.cap(role).unwrap_or(u64::MAX);
        let engines: Vec<_> = of_role.map(|(at, e)| (at, e.engine.clone())).collect();
        if engines.is_empty() {
            return None;
        }
        let labels = [("service", context.rule), ("role", role.name())];
        let help = "Requests that wait for a place.";
        let kept = context.state(&format!("admission/{}", role.name()), "", || Kept {
            queue: Arc::new(Queue::new(context.gauge("kvgate_admission_queue_length", help, &labels))),
            tenants: RandomState::new(),
            waits: Mutex::default(),
            cap: Arc::new(cap.into()),
            built: AtomicU64::new(0),
            in_force: AtomicU64::new(0),
            renewal: Mutex::default(),
        });
        let seats: Vec<_> =
            engines.into_iter().map(|(at, engine)| (at, Seat { engine, cap: kept.cap.clone() })).collect();
        seats.iter().for_each(|(_, seat)| seat.engine.serve_queue(&kept.queue));
        let counts = Counts::new(context, &labels);
        counts.depth.set(config.depth.total as u64);
        let number = kept.built.fetch_add(1, Ordering::Relaxed) + 1;
        Some(Self { role, cap, number, seats, kept, counts })
    }

    /// Its plan is in force: its cap goes for those too who wait already, and who have room by it need wait no longer.
    pub fn comes_into_force(&self) {
        let Kept { queue, cap, in_force, renewal, .. } = &*self.kept;
        if in_force.load(Ordering::Acquire) >= self.number {
            return;
        }
        let renewal = renewal.lock().unwrap_or_else(PoisonError::into_inner);
        if in_force.fetch_max(self.number, Ordering::AcqRel) < self.number
            && cap.swap(self.cap, Ordering::AcqRel) < self.cap
        {
            self.seats.iter().for_each(|(_, seat)| queue.serve(&seat.engine));
        }
        drop(renewal);
    }

    /// How many each of its endpoints may have in flight, by the plan in force.
    pub fn cap(&self) -> Option<u64> {
        Some(self.kept.cap.load(Ordering::Acquire)).filter(|cap| *cap < u64::MAX)
    }

    pub fn queue(&self) -> &Arc<Queue> {
        &self.kept.queue
    }

    /// Those that a newcomer may take.
    pub fn open(&self, eligible: &Mask) -> Mask {
        self.kept.queue.open(self.among(eligible))
    }

    /// Those that have room, whoever waits.
    pub fn with_room(&self, among: &Mask) -> Mask {
        let room = self.among(among).filter(|(_, seat)| seat.engine.in_flight() < seat.cap());
        room.map(|(at, _)| at).collect()
    }

    fn among<'s>(&'s self, mask: &'s Mask) -> impl Iterator<Item = (usize, &'s Seat)> {
        self.seats.iter().filter(|(at, _)| mask.contains(*at)).map(|(at, seat)| (*at, seat))
    }

    /// Those that a request may wait for: well or not, because they may get well; but none that an earlier tier leaves
    /// out, whose place it would be handed again and again.
    pub fn acceptable(&self, routing: &Routing<'_>) -> Arc<[Seat]> {
        let well = |at, seat: &Seat| {
            routing.granted == Some(at) || seat.engine.availability(routing.now) == Availability::Free
        };
        let fits = |(at, seat): &&(usize, Seat)| {
            routing.eligible.contains(*at) || !routing.tried.contains(*at) && !well(*at, seat)
        };
        self.seats.iter().filter(fits).map(|(_, seat)| seat.clone()).collect()
    }

    /// Whether one of them was tried in vain for the request.
    pub fn tried(&self, routing: &Routing<'_>) -> bool {
        self.among(routing.tried).next().is_some()
    }

    /// Who a request is for.
    pub fn tenant(&self, config: &Config, routing: &Routing<'_>) -> u64 {
        let Some(header) = &config.tenant else { return 0 };
        let named = routing.request().headers.get(header).map(http::HeaderValue::as_bytes);
        self.kept.tenants.hash_one(named.unwrap_or_default())
    }

    /// A request is refused.
    pub fn sheds(&self, refusal: Refusal) -> Verdict {
        self.counts.shed.inc();
        Verdict::Reject(refusal)
    }

    /// A request waits no longer.
    pub fn waited(&self, waited: Duration, end: WaitEnd) {
        self.counts.waited(waited, end);
        if end != WaitEnd::NoEndpoint {
            let mut waits = self.kept.waits.lock().unwrap_or_else(PoisonError::into_inner);
            waits.truncate(RECENT - 1);
            waits.push_front(waited);
        }
    }

    /// In how many seconds to come again: the mean of the recent waits, rounded up, 1 to 30.
    pub fn retry_after(&self) -> u32 {
        let waits = self.kept.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let all: Duration = waits.iter().sum();
        let mean = all.checked_div(u32::try_from(waits.len()).unwrap_or(u32::MAX)).unwrap_or_default();
        u32::try_from(mean.as_millis().div_ceil(1000)).unwrap_or(u32::MAX).clamp(1, 30)
    }
}

/// What is counted of a role.
pub struct Counts {
    pub shed: Arc<Counter>,
    pub queued: Arc<Counter>,
    pub would_shed: Arc<Counter>,
    pub would_queue: Arc<Counter>,
    depth: Arc<Gauge>,
    wait_ms: Arc<Counter>,
    granted: Arc<Counter>,
    late: Arc<Counter>,
    no_endpoint: Arc<Counter>,
}

impl Counts {
    fn new(context: &BuildContext<'_>, labels: &[(&str, &str); 2]) -> Self {
        let of = |name: &str, help: &str, more: &[(&str, &str)]| {
            let labels: Vec<_> = labels.iter().chain(more).copied().collect();
            context.counter(name, help, &labels)
        };
        let observed = |verdict| {
            let help = "Requests that admission would have held back, were it not only observing.";
            of("kvgate_admission_observed_total", help, &[("verdict", verdict)])
        };
        let ended = |end| {
            let help = "Requests that waited for a place until the end of it; not those whose clients left.";
            of("kvgate_admission_waits_total", help, &[("end", end)])
        };
        Self {
            shed: of("loxilb_pd_admission_shed_total", "Requests refused for want of a place.", &[]),
            queued: of("loxilb_pd_admission_queued_total", "Requests that had to wait for a place.", &[]),
            would_shed: observed("shed"),
            would_queue: observed("queue"),
            depth: context.gauge("kvgate_admission_queue_depth", "Requests that may wait.", labels),
            wait_ms: of("kvgate_admission_wait_milliseconds_total", "Time that these waits took.", &[]),
            granted: ended("granted"),
            late: ended("late"),
            no_endpoint: ended("no_endpoint"),
        }
    }

    fn waited(&self, waited: Duration, end: WaitEnd) {
        self.wait_ms.add(u64::try_from(waited.as_millis()).unwrap_or(u64::MAX));
        match end {
            WaitEnd::Granted => self.granted.inc(),
            WaitEnd::Late => self.late.inc(),
            WaitEnd::NoEndpoint => self.no_endpoint.inc(),
        }
    }
}
