//! Row 16: an engine that publishes more than anyone can use.

use std::time::Duration;

use super::{Lab, MODEL, engines};
use crate::Result;
use crate::board::Board;
use crate::client::completion;
use crate::engine::Script;
use crate::load::Load;
use crate::publisher::Publisher;

/// Blocks that a cache may have, of whom no engine told more.
const BLOCKS: f64 = 5e6;

/// 200,000 events per second, while requests are served: they hardly notice, and what is kept is bounded.
pub async fn flood(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(8, Script::default()).await?;
    let mut rule =
        "tiers = [\"kv-exact\", \"least-connections\"]\n[events]\nport = 0\nreplay_port_offset = 0\n"
            .to_owned();
    let mut publisher = Publisher::start().await?;
    for (number, engine) in engines.iter().enumerate() {
        let events =
            if number == 0 { format!("kv_events = {:?}\n", publisher.address) } else { String::new() };
        rule.push_str(&format!("[[endpoint]]\naddress = \"{}\"\n{events}", engine.address));
    }
    let process = format!("[inventory]\nmax_blocks = {BLOCKS:.0}\n");
    let gateway = lab.pool(&process, &rule, &[]).await?;
    let connected = |m: &crate::metrics::Metrics| m.sum("loxilb_kv_subscriber_connected", &[]) >= 1.0;
    gateway.until("the feed", Duration::from_secs(30), connected).await?;
    let load = Load { address: gateway.address, rate: 200.0, time: lab.seconds(30), connections: 32 };
    let wire = |number| completion(MODEL, &format!("one two three {number}"), false, 1);
    load.run(wire, |_, _| ()).await;
    let quiet = load.run(wire, |_, _| ()).await;
    let time = load.time;
    let flooding = std::thread::spawn(move || -> Result<u64> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(publisher.flood(200_000, time))
    });
    let loud = load.run(wire, |_, _| ()).await;
    let published = flooding.join().map_err(|_| "the publisher panicked")?? as f64;
    board.least("events published", published / time.as_secs_f64(), "/s", 150_000.0);
    board.exactly("requests lost", (quiet.lost + loud.lost) as f64, 0.0);
    board.most("p99, of what it is in quiet", loud.ms(0.99) / quiet.ms(0.99) * 100.0, "%", 200.0);
    let settled = |m: &crate::metrics::Metrics| m.sum("kvgate_feed_queued", &[]) == 0.0;
    gateway.until("the queue is empty", Duration::from_secs(10), settled).await?;
    let metrics = gateway.metrics().await;
    let (applied, dropped) =
        (metrics.sum("kvgate_feed_events_total", &[]), metrics.sum("kvgate_feed_dropped_total", &[]));
    board.most("blocks held", metrics.sum("kvgate_inventory_pairs", &[]), "", BLOCKS);
    // what is missing is told: dropped by us, or lost on the way, seen as gaps
    let told =
        dropped + metrics.sum("kvgate_feed_gaps_total", &[]) + metrics.sum("kvgate_feed_lost_total", &[]);
    board.exactly(
        "events that vanished untold",
        if applied >= published || told > 0.0 { 0.0 } else { published - applied },
        0.0,
    );
    gateway.settle(board, None).await;
    Ok(())
}
