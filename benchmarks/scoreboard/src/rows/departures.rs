//! Row 11: clients that leave, in every phase of a request.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::{Lab, MODEL, engines};
use crate::Result;
use crate::board::Board;
use crate::client::{Client, PATIENCE, completion};
use crate::engine::{Engine, Script, times};
use crate::gateway::Gateway;

const FOREVER: Duration = Duration::from_secs(3600);

/// A hundred clients each leave while they are streamed to, while the engine is silent, while they wait for a place,
/// and while they send their body.
pub async fn row(lab: &Lab, board: &mut Board) -> Result {
    let count = usize::try_from(lab.scaled(100))?;
    let streaming = Script { pace: Duration::from_millis(50), ..Script::default() };
    engines_see(lab, board, "streaming", streaming, count).await?;
    engines_see(lab, board, "silent", Script { delay: FOREVER, ..Script::default() }, count).await?;
    waiting(lab, board, count).await?;
    uploading(lab, board, count).await
}

/// Leaves so many clients one by one; how long the slowest, of 99 in 100, took to be noticed by `so`.
async fn leave(clients: Vec<Client>, mut noticed: impl AsyncFnMut(usize) -> bool) -> (f64, usize) {
    let (mut late, mut missed) = (Vec::new(), 0);
    for (number, client) in clients.into_iter().enumerate() {
        let left = Instant::now();
        drop(client);
        while !noticed(number + 1).await {
            if left.elapsed() > Duration::from_secs(4) {
                missed += 1;
                break;
            }
            sleep(Duration::from_micros(200)).await;
        }
        late.push(left.elapsed().as_secs_f64() * 1e3);
    }
    late.sort_by(f64::total_cmp);
    (late.get(late.len() * 99 / 100).copied().unwrap_or_default(), missed)
}

fn report(board: &mut Board, phase: &str, count: usize, (late, missed): (f64, usize)) {
    board.most(&format!("{phase}: p99 from leaving to the end"), late, "ms", 50.0);
    board.exactly(&format!("{phase}: missed, of {count}"), missed as f64, 0.0);
}

async fn engines_see(lab: &Lab, board: &mut Board, phase: &str, script: Script, count: usize) -> Result {
    let engines = engines(8, script).await?;
    let gateway = lab.pool("", "tiers = [\"least-connections\"]", &engines).await?;
    let mut clients = Vec::new();
    for _ in 0..count {
        let mut client = Client::connect(gateway.address).await?;
        client.send(&completion(MODEL, "one two three", true, 1_000_000)).await?;
        clients.push(client);
    }
    if script.delay.is_zero() {
        for client in &mut clients {
            client.begin().await?;
        }
    }
    let running = |engines: &[Engine]| engines.iter().map(|e| e.seen().running.load(Relaxed)).sum::<usize>();
    let start = Instant::now();
    while running(&engines) < count && start.elapsed() < PATIENCE {
        sleep(Duration::from_millis(5)).await;
    }
    let left = |engines: &[Engine]| engines.iter().map(|e| times(&e.seen().left).len()).sum::<usize>();
    let found = leave(clients, async |gone| left(&engines) >= gone).await;
    report(board, phase, count, found);
    gateway.settle(board, Some(count as u64)).await;
    Ok(())
}

/// Waits until the gateway has so many requests.
async fn open(gateway: &Gateway, count: usize) -> Result {
    let all = |m: &crate::metrics::Metrics| m.sum("kvgate_requests_open", &[]) >= count as f64;
    gateway.until("requests under way", PATIENCE, all).await
}

async fn waiting(lab: &Lab, board: &mut Board, count: usize) -> Result {
    let engines = engines(1, Script { delay: FOREVER, ..Script::default() }).await?;
    let rule = "tiers = [\"admission\"]\n[tier.admission]\nmax_in_flight = 1\nqueue_depth = 1000\nqueue_wait = \"1h\"";
    let gateway = lab.pool("", rule, &engines).await?;
    let mut clients = Vec::new();
    for number in 0..=count {
        let mut client = Client::connect(gateway.address).await?;
        client.send(&completion(MODEL, "one two three", false, 1)).await?;
        open(&gateway, number + 1).await?;
        clients.push(client);
    }
    let served = clients.remove(0);
    let found = leave(clients, async |gone| {
        gateway.metrics().await.sum("kvgate_admission_queue_length", &[]) <= (count - gone) as f64
    })
    .await;
    report(board, "waiting", count, found);
    drop(served);
    gateway.settle(board, Some(count as u64 + 1)).await;
    Ok(())
}

async fn uploading(lab: &Lab, board: &mut Board, count: usize) -> Result {
    let engines = engines(1, Script::default()).await?;
    let gateway = lab.pool("", "tiers = [\"least-connections\"]", &engines).await?;
    let mut clients = Vec::new();
    for _ in 0..count {
        let mut client = Client::connect(gateway.address).await?;
        let head =
            b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: 100000\r\n\r\n{\"model\":";
        client.send(head).await?;
        clients.push(client);
    }
    open(&gateway, count).await?;
    let found = leave(clients, async |gone| {
        gateway.metrics().await.sum("kvgate_requests_open", &[]) <= (count - gone) as f64
    })
    .await;
    report(board, "uploading", count, found);
    let asked: usize = engines.iter().map(|engine| engine.seen().requests.load(Relaxed)).sum();
    board.exactly("uploading: requests that reached an engine", asked as f64, 0.0);
    gateway.settle(board, Some(count as u64)).await;
    Ok(())
}
