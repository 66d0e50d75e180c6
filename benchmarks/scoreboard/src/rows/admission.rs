//! Row 6: four times the load that is admitted.

use std::time::{Duration, Instant};

use super::{Lab, MODEL, engines};
use crate::Result;
use crate::board::Board;
use crate::client::{Client, completion};
use crate::engine::Script;
use crate::load::Load;

/// The gauge of those that wait.
const WAITING: &str = "kvgate_admission_queue_length";

/// What is over the cap is told so at once, the rest is served as if alone; who waits is counted and may leave.
pub async fn row(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(8, Script { delay: Duration::from_millis(100), ..Script::default() }).await?;
    let rule = |depth: u32| {
        format!(
            "tiers = [\"admission\", \"least-connections\"]\n[tier.admission]\nmax_in_flight = 2\nqueue_depth = {depth}\nqueue_wait = \"30s\""
        )
    };
    let gateway = lab.pool("", &rule(0), &engines).await?;
    let wire = |_| completion(MODEL, "one two three", false, 1);
    let load =
        |rate, connections| Load { address: gateway.address, rate, time: lab.seconds(20), connections };
    // the cap: 8 engines, 2 places, 10 answers a second each
    let (within, beyond) = (load(80.0, 32), load(640.0, 128));
    let alone = within.run(wire, |_, _| ()).await;
    let over = beyond.run(wire, |_, _| ()).await;
    within.offered(board, "within the cap", &alone);
    beyond.offered(board, "over the cap", &over);
    board.exactly("requests lost", (alone.lost + over.lost) as f64, 0.0);
    board.least("requests refused of those offered", over.busy as f64 / over.sent as f64 * 100.0, "%", 50.0);
    board.exactly("refusals without Retry-After or an error in JSON", over.rude as f64, 0.0);
    board.most(
        "p99 of the accepted, of what it is alone",
        over.ms(0.99) / alone.ms(0.99) * 100.0,
        "%",
        120.0,
    );
    gateway.settle(board, Some(alone.sent + over.sent)).await;
    drop(gateway);

    for engine in &engines {
        engine.script(Script { delay: Duration::from_secs(3600), ..Script::default() });
    }
    let gateway = lab.pool("", &rule(16), &engines).await?;
    let (mut clients, mut refused) = (Vec::new(), 0);
    for number in 0..64 {
        let mut client = Client::connect(gateway.address).await?;
        client.send(&wire(0)).await?;
        if number < 32 {
            // 16 are at work, 16 wait
            let served = f64::from(number.min(15) + 1);
            let waiting = f64::from(number) - 15.0;
            gateway
                .until("taken", Duration::from_secs(10), |m| {
                    m.sum("kvgate_leases_open", &[]) >= served && m.sum(WAITING, &[]) >= waiting
                })
                .await?;
            clients.push(client);
        } else {
            refused += u32::from(client.answer(|_| ()).await.status == 429);
        }
    }
    board.most("most that wait", gateway.metrics().await.sum(WAITING, &[]), "", 16.0);
    board.exactly("refused, of 32 that found the queue full", refused.into(), 32.0);
    let waiting = clients.split_off(16);
    let left = Instant::now();
    drop(waiting);
    gateway.until("nobody waits", Duration::from_secs(10), |m| m.sum(WAITING, &[]) == 0.0).await?;
    board.most("until 16 that left are out of the queue", left.elapsed().as_secs_f64() * 1e3, "ms", 50.0);
    drop(clients);
    gateway.settle(board, Some(64)).await;
    Ok(())
}
