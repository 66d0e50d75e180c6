//! Row 16: an engine that publishes more than anyone can use.

use std::time::Duration;

use tokio::time::sleep;

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
    let flooding = std::thread::spawn(move || -> Result<(u64, Publisher)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let events = publisher.flood(200_000, time).await?;
            // by the number of one that comes when all is quiet it is seen that those before it are missing
            sleep(Duration::from_secs(2)).await;
            publisher.stored(1).await?;
            Ok((events, publisher))
        })
    });
    let loud = load.run(wire, |_, _| ()).await;
    // whoever drops it at once takes along what is not sent yet
    let (events, publisher) = flooding.join().map_err(|_| "the publisher panicked")??;
    let batches = publisher.batches();
    load.offered(board, "in quiet", &quiet);
    load.offered(board, "in the flood", &loud);
    board.least("events published", events as f64 / time.as_secs_f64(), "/s", 150_000.0);
    board.exactly("requests lost", (quiet.lost + loud.lost) as f64, 0.0);
    board.most("p99, of what it is in quiet", loud.ms(0.99) / quiet.ms(0.99) * 100.0, "%", 200.0);
    // every batch is applied, or overtaken by a clear, or passed over
    let untold = |m: &crate::metrics::Metrics| {
        let told = ["kvgate_feed_batches_total", "kvgate_feed_ignored_total", "kvgate_feed_lost_total"];
        batches as f64 - told.iter().map(|name| m.sum(name, &[])).sum::<f64>()
    };
    let settled = |m: &crate::metrics::Metrics| m.sum("kvgate_feed_queued", &[]) == 0.0 && untold(m) == 0.0;
    let drained = gateway.until("all is told", Duration::from_secs(20), settled).await;
    drained.unwrap_or_else(|error| eprintln!("{error}"));
    let metrics = gateway.metrics().await;
    board.exactly("batches left in the queue", metrics.sum("kvgate_feed_queued", &[]), 0.0);
    board.most("blocks held", metrics.sum("kvgate_inventory_pairs", &[]), "", BLOCKS);
    board.least("batches applied", metrics.sum("kvgate_feed_batches_total", &[]), "", 1.0);
    board.exactly("batches published less those told of", untold(&metrics), 0.0);
    gateway.settle(board, None).await;
    drop(publisher);
    Ok(())
}
