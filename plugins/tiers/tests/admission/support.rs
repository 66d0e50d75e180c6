//! Rules with admission, asked as the gateway asks them, by the paused clock of tokio.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use kvgate_core::conformance::{self, Ground, Known};
use kvgate_core::*;
use serde_json::Value;
use tokio::task::JoinHandle;

struct Paused;

impl Timer for Paused {
    fn now(&self) -> Instant {
        tokio::time::Instant::now().into_std()
    }
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        tokio::time::sleep(duration).boxed()
    }
}

/// What outlives plans.
#[derive(Default)]
pub struct World {
    engines: Engines,
    ground: Ground,
}

/// A rule's endpoints and a ladder of it, with admission first.
pub struct Rule {
    name: &'static str,
    pub endpoints: Vec<Endpoint>,
    ladder: Ladder,
}

/// A request under way.
#[derive(Debug)]
pub struct Flight {
    pub endpoint: usize,
    pub tier: &'static str,
    pub record: Attempt,
    pub facts: Facts,
    _lease: Lease,
}

impl Flight {
    /// What admission did.
    pub fn admission(&self) -> &'static str {
        self.record.steps[0].miss.unwrap().0
    }
}

pub fn facts(headers: &[(&str, &str)]) -> Facts {
    let header = |(name, value): &(&str, &str)| (name.parse().unwrap(), value.parse().unwrap());
    let request = Request { headers: headers.iter().map(header).collect(), ..Request::default() };
    Known::default().facts(request)
}

impl World {
    /// A rule of these endpoints, by number of engine, with these keys for admission and these tiers after it.
    pub fn rule_of(
        &self,
        name: &'static str,
        numbers: &[(usize, Role)],
        admission: &Value,
        tiers: &[(&str, Value)],
    ) -> Arc<Rule> {
        let endpoint = |(index, (number, role)): (usize, &(usize, Role))| Endpoint {
            index,
            ..conformance::endpoint(&self.engines, *number, *role, 1)
        };
        let endpoints: Vec<_> = numbers.iter().enumerate().map(endpoint).collect();
        let first = [("admission", admission.clone())];
        let rungs = first.iter().chain(tiers).map(|(tier, keys)| self.rung(name, &endpoints, tier, keys));
        let ladder = conformance::ladder(rungs.collect());
        Arc::new(Rule { name, endpoints, ladder })
    }

    /// A pool of two engines, with this tier before admission.
    pub fn behind(&self, tier: Arc<dyn Tier>, admission: &Value) -> Arc<Rule> {
        let endpoints: Vec<_> =
            (0..2).map(|at| conformance::endpoint(&self.engines, at, Role::Any, 1)).collect();
        let first = Rung { name: "first", tier, misses: Vec::new(), picks: Arc::default() };
        let rungs = vec![first, self.rung("rule", &endpoints, "admission", admission)];
        Arc::new(Rule { name: "rule", endpoints, ladder: conformance::ladder(rungs) })
    }

    /// A pool of the first so many engines.
    pub fn pool(&self, count: usize, admission: Value) -> Arc<Rule> {
        let all: Vec<_> = (0..count).map(|at| (at, Role::Any)).collect();
        self.rule_of("rule", &all, &admission, &[])
    }

    fn rung(&self, rule: &str, endpoints: &[Endpoint], tier: &str, keys: &Value) -> Rung {
        let kind = kvgate_tiers::TIERS.iter().find(|kind| kind.name == tier).unwrap();
        self.ground.rung_of(rule, kind, &conformance::keys(kind, keys), endpoints).unwrap()
    }

    /// The series of this name whose labels hold all of these values.
    pub fn metric(&self, name: &str, values: &[&str]) -> u64 {
        self.ground.metric(name, values).unwrap()
    }

    /// Requests in flight, on all engines.
    pub fn in_flight(&self) -> u64 {
        self.engines.all().iter().map(|engine| engine.in_flight()).sum()
    }
}

impl Rule {
    pub async fn choose(&self, facts: Facts, role: Role, tried: &Mask) -> Result<Flight, Refused> {
        let selection = Selection {
            rule: self.name,
            role,
            now: Paused.now(),
            timer: &Paused,
            ..conformance::selection(&self.endpoints, tried, &facts)
        };
        let mut record = Attempt::default();
        let Chosen { endpoint, tier, lease, .. } = self.ladder.choose(&selection, &mut record).await?;
        Ok(Flight { endpoint, tier, record, facts, _lease: lease })
    }

    pub async fn ask(&self) -> Result<Flight, Refused> {
        self.choose(facts(&[]), Role::Any, &Mask::none()).await
    }

    /// Asks beside the test; returns once the request waits, or is answered.
    pub async fn park(self: &Arc<Self>, headers: &[(&str, &str)]) -> JoinHandle<Result<Flight, Refused>> {
        let (rule, facts) = (self.clone(), facts(headers));
        let task = tokio::spawn(async move { rule.choose(facts, Role::Any, &Mask::none()).await });
        settle().await;
        task
    }
}

/// Lets every task do what it can do now.
pub async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

pub fn refusal(answer: Result<Flight, Refused>) -> Refusal {
    match answer {
        Err(Refused::Tier(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

pub fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}
