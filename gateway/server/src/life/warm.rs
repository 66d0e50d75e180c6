//! Whether what engines held before this process began is known.

use std::time::Duration;

use kvgate_feed::plane::Warmth;

use crate::world::World;

/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);

/// Engines whose blocks are about to be learnt, by address, and how far that has come. Those that cannot be reached,
/// or fail to tell, hold nobody up.
pub fn cold(world: &World) -> Vec<(String, Warmth)> {
    let plan = world.plan.load();
    let mut cold: Vec<_> = plan
        .rules
        .iter()
        .flat_map(|rule| &rule.endpoints)
        .filter_map(|endpoint| {
            let warmth = world.feed(endpoint.engine.id())?.warmth();
            warmth.is_coming().then(|| (endpoint.engine.address().to_owned(), warmth))
        })
        .collect();
    cold.sort_by(|a, b| a.0.cmp(&b.0));
    cold.dedup();
    cold
}

/// Waits until there are none, for so long at most.
pub async fn warm(world: &World, most: Duration) {
    let until = tokio::time::Instant::now() + most;
    loop {
        let cold = cold(world);
        if cold.is_empty() {
            return;
        }
        if tokio::time::Instant::now() >= until {
            let engines: Vec<_> =
                cold.iter().map(|(address, how)| format!("{address} {}", how.name())).collect();
            tracing::warn!(
                engines = engines.join(", "),
                "it goes on without knowing what these hold: `server.warm_up` is over"
            );
            return;
        }
        tokio::time::sleep(LOOK).await;
    }
}
