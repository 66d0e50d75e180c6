//! The task that asks one engine.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use kvgate_core::{Engine, Telemetry};
use kvgate_engines::metrics::{Family, Reading, Unreadable};
use pingora_core::upstreams::peer::Peer;
use tokio::task::JoinHandle;
use tokio::time::{sleep, sleep_until, timeout};

use super::Wanted;
use super::families::FamilyState;
use super::page::{Failure, fetch};
use super::status::Status;
use crate::address::Address;
use crate::world::World;

/// The latest that an engine is asked for the first time.
const MOST_SPREAD: Duration = Duration::from_secs(1);

/// A running task. Dropping it ends it.
pub(super) struct Scraper {
    status: Arc<Status>,
    task: JoinHandle<()>,
}

impl Scraper {
    /// What is known of the engine stays known when it is asked otherwise from now on.
    pub fn start(engine: Arc<Engine>, wanted: &Wanted, world: Arc<World>) -> Self {
        let known = world.scraper(engine.id());
        let status = known.unwrap_or_else(|| Arc::new(Status::new(Instant::now())));
        let asking = Asking {
            address: Address::new(engine.address()),
            engine,
            wanted: wanted.clone(),
            world,
            status: status.clone(),
        };
        Self { status, task: tokio::spawn(asking.run()) }
    }

    pub fn status(&self) -> Arc<Status> {
        self.status.clone()
    }
}

impl Drop for Scraper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Asking {
    engine: Arc<Engine>,
    address: Address,
    wanted: Wanted,
    world: Arc<World>,
    status: Arc<Status>,
}

impl Asking {
    async fn run(self) {
        let interval = self.wanted.config.interval;
        // engines that start together are not asked together
        let spread = (interval / 10).min(MOST_SPREAD);
        sleep(spread.mul_f64(share(self.engine.id().0, 0))).await;
        for turn in 1.. {
            let next = Instant::now() + interval.mul_f64(0.9 + 0.2 * share(self.engine.id().0, turn));
            let limit = self.wanted.config.timeout;
            let asked = AssertUnwindSafe(timeout(limit, self.ask())).catch_unwind().await;
            match asked {
                Ok(Ok(Ok(reading))) => self.told(reading),
                Ok(Ok(Err(failure))) => self.status.failed(failure),
                Ok(Err(_)) => self.status.failed(Failure::Timeout(limit)),
                Err(_) => self.status.failed(Failure::Broken("its answer made the reader panic".into())),
            }
            sleep_until(next.into()).await;
        }
    }

    async fn ask(&self) -> Result<Reading, Failure> {
        let (engine, config) = (&self.engine, &self.wanted.config);
        // less than the whole has, so that an address that swallows connections is told from a slow engine
        let tls = engine.identity().tls.as_deref();
        let peer = self.address.peer(tls, &self.wanted.transport, config.timeout / 2).await;
        let peer = peer.ok_or_else(|| Failure::Connect("its name cannot be resolved".into()))?;
        let max = usize::try_from(config.max_size).unwrap_or(usize::MAX);
        let metrics = &self.wanted.metrics;
        let fetched = fetch(&self.world.scraping, &peer, engine.address(), metrics.path, max).await;
        if let (Err(Failure::Connect(_)), Some(socket)) = (&fetched, peer.address().as_inet()) {
            self.address.unreachable(*socket);
        }
        metrics.read(&fetched?).map_err(|unreadable| {
            Failure::Garbage(match unreadable {
                Unreadable::Garbage => "sends what is no metrics page",
                Unreadable::Nothing => "has a page without one metric of an engine of its kind",
            })
        })
    }

    fn told(&self, reading: Reading) {
        let now = Instant::now();
        let Reading { running, waiting, blocks, rank_blocks, .. } = reading;
        let until = now + self.wanted.config.max_age;
        self.engine.set_telemetry(Some(Telemetry { blocks, running, waiting, until }));
        // a cache is one rank's
        if let Some(blocks) = rank_blocks {
            let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
            self.world.plane.set_bound(self.engine.id().0, Some(blocks));
        }
        for (family, was, is) in self.status.told(&self.wanted.metrics, reading, now) {
            self.say(family, was, is);
        }
    }

    /// A line in the log when a family is missed, and when it no longer is.
    fn say(&self, family: Family, was: Option<FamilyState>, is: FamilyState) {
        let (engine, names) = (self.engine.address(), self.wanted.metrics.names(family).join(" or "));
        let family = family.name();
        match (was, is) {
            (_, FamilyState::Missing) => tracing::warn!(
                engine,
                family,
                "the engine has had requests, and its metrics page does not hold {names}"
            ),
            (Some(FamilyState::Missing), FamilyState::Known) => {
                tracing::info!(engine, family, "the engine's metrics page holds {names} again");
            }
            (Some(FamilyState::Missing), FamilyState::Cold) => tracing::info!(
                engine,
                family,
                "the engine is a new one: its metrics page need not hold {names} before its first request"
            ),
            _ => {}
        }
    }
}

/// A number from 0 up to 1, spread evenly over engines and turns.
pub(crate) fn share(engine: u64, turn: u64) -> f64 {
    // the finaliser of splitmix64
    let mut z = engine.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ turn.wrapping_mul(0xd1b5_4a32_d192_ed03);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_spread_evenly() {
        for of in [|n| share(n, 0), |n| share(1, n), |n| share(n, n)] {
            let shares: Vec<f64> = (0..1000).map(of).collect();
            assert!(shares.iter().all(|s| (0.0..1.0).contains(s)));
            for tenth in 0..10 {
                let from = f64::from(tenth) / 10.0;
                let there = shares.iter().filter(|s| (from..from + 0.1).contains(*s)).count();
                assert!((50..150).contains(&there), "{there} from {from}");
            }
        }
    }
}
