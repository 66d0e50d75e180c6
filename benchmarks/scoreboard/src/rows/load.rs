//! Rows 1, 3, 4, 5 and 12: load and loss.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::join_all;
use kvgate_rig::hist::Hist;
use tokio::time::sleep;

use super::{Lab, MODEL, engines};
use crate::Result;
use crate::board::Board;
use crate::client::{completion, once};
use crate::engine::{Engine, Script};
use crate::load::Load;
use crate::publisher::Publisher;
use crate::soak;

/// 2,000 short requests per second: none is lost, and what the gateway adds is small.
pub async fn steady(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(8, Script::default()).await?;
    let gateway = lab.pool("", "tiers = [\"least-connections\"]", &engines).await?;
    let wire = |_| completion(MODEL, "one two three", false, 1);
    let load = |address, seconds| Load { address, rate: 2000.0, time: seconds, connections: 64 };
    let first = engines.first().ok_or("no engine")?;
    let straight = load(first.address, lab.seconds(30)).run(wire, |_, _| ()).await;
    let through = load(gateway.address, lab.seconds(60)).run(wire, |_, _| ()).await;
    board.exactly("requests lost", through.lost as f64, 0.0);
    board.exactly("answers 5xx", through.failed as f64, 0.0);
    board.most("p99 added", through.ms(0.99) - straight.ms(0.99), "ms", 3.0);
    gateway.settle(board, Some(through.sent)).await;
    Ok(())
}

/// The soak, as long as the list asks.
pub async fn soak(lab: &Lab, board: &mut Board) -> Result {
    soak::run(&lab.kvgate, lab.seconds(900), board).await
}

/// 2,000 requests of one prompt at once on a fleet that holds nothing: they are spread, and the prompt is read once.
pub async fn herd(lab: &Lab, board: &mut Board) -> Result {
    const HERD: usize = 2000;
    let held = Script { delay: Duration::from_secs(3), ..Script::default() };
    let engines = engines(8, held).await?;
    let mut rule =
        "tiers = [\"kv-exact\", \"chwbl\"]\n[events]\nport = 0\nreplay_port_offset = 0\n".to_owned();
    let mut publishers = Vec::new();
    for engine in &engines {
        let publisher = Publisher::start().await?;
        let (address, events) = (engine.address, &publisher.address);
        rule.push_str(&format!("[[endpoint]]\naddress = \"{address}\"\nkv_events = \"{events}\"\n"));
        publishers.push(publisher);
    }
    let gateway = lab.pool("", &rule, &[]).await?;
    gateway
        .until("feeds and tokenizer", Duration::from_secs(30), |m| {
            m.sum("loxilb_kv_subscriber_connected", &[]) == 8.0
        })
        .await?;
    let prompt = "one two three four five six seven eight nine ten ".repeat(40);
    // the tokenizer is loaded by the first request that needs it
    let warm = completion(
        MODEL,
        "one two three four five six seven eight nine ten eleven twelve thirteen",
        false,
        1,
    );
    gateway.until("the tokenizer", Duration::from_secs(60), |_| true).await?;
    once(gateway.address, &warm).await;
    let ready = |m: &crate::metrics::Metrics| m.sum("kvgate_tokenizer_ready", &[]) == 1.0;
    gateway.until("the tokenizer", Duration::from_secs(60), ready).await?;
    let before = gateway.metrics().await.sum("kvgate_tokenizer_cache_misses_total", &[]);
    let wire = Arc::new(completion(MODEL, &prompt, false, 1));
    let start = Instant::now();
    let asks = (0..HERD).map(|number| {
        let (wire, address) = (wire.clone(), gateway.address);
        tokio::spawn(async move {
            let due = Duration::from_micros(number as u64 * 100_000 / HERD as u64);
            sleep(due.saturating_sub(start.elapsed())).await;
            once(address, &wire).await.kept()
        })
    });
    let kept = join_all(asks).await.into_iter().filter(|kept| matches!(kept, Ok(true))).count();
    let peak = engines.iter().map(|e| e.seen().peak.load(Relaxed)).max().unwrap_or(0);
    let bound = (1.75 * HERD as f64 / engines.len() as f64).ceil() + 1.0;
    board.exactly("requests lost", (HERD - kept) as f64, 0.0);
    board.most("most requests in flight on one engine", peak as f64, "", bound);
    let read = gateway.metrics().await.sum("kvgate_tokenizer_cache_misses_total", &[]) - before;
    board.most("segments tokenised, of one prompt", read, "", 1.0);
    gateway.settle(board, Some(HERD as u64 + 1)).await;
    Ok(())
}

/// Two of eight engines at a twentieth of their speed: who goes to the others does not notice.
pub async fn slow(lab: &Lab, board: &mut Board) -> Result {
    let fast = Script { delay: Duration::from_millis(20), ..Script::default() };
    let engines = engines(8, fast).await?;
    let gateway = lab.pool("", "tiers = [\"least-connections\"]", &engines).await?;
    let load = Load {
        address: gateway.address,
        rate: 400.0,
        time: lab.seconds(20).max(Duration::from_secs(4)),
        connections: 256,
    };
    let wire = |_| completion(MODEL, "one two three", false, 1);
    let alone = load.run(wire, |_, _| ()).await;
    for engine in engines.iter().take(2) {
        engine.script(Script { delay: fast.delay * 20, ..fast });
    }
    let (times, slow, late) = (Arc::new(Mutex::new(Hist::default())), AtomicU64::new(0), AtomicU64::new(0));
    let (slow, late) = (Arc::new(slow), Arc::new(late));
    let counts = (times.clone(), slow.clone(), late.clone());
    let mixed = load
        .run(wire, move |number, answer| {
            let is_slow = matches!(answer.header("x-backend"), Some("e0" | "e1"));
            if !is_slow {
                let nanos = u64::try_from(answer.total.as_nanos()).unwrap_or(u64::MAX);
                counts.0.lock().unwrap_or_else(PoisonError::into_inner).add(nanos);
            }
            // from two seconds on
            if number >= 800 {
                counts.2.fetch_add(1, Relaxed);
                counts.1.fetch_add(u64::from(is_slow), Relaxed);
            }
        })
        .await;
    let others = times.lock().unwrap_or_else(PoisonError::into_inner).quantile(0.99) as f64 / 1e6;
    let share = slow.load(Relaxed) as f64 / late.load(Relaxed).max(1) as f64;
    board.exactly("requests lost", (alone.lost + mixed.lost) as f64, 0.0);
    board.most("p99 of the other engines, of what it was", others / alone.ms(0.99) * 100.0, "%", 110.0);
    board.most("share of the slow engines after 2 s, of a fair one", share / 0.25 * 100.0, "%", 100.0 / 3.0);
    gateway.settle(board, Some(alone.sent + mixed.sent)).await;
    Ok(())
}

/// Nobody is there: a quick answer in JSON, and no spinning.
pub async fn down(lab: &Lab, board: &mut Board) -> Result {
    let mut engines = engines(8, Script::default()).await?;
    let gateway = lab.pool("", "tiers = [\"least-connections\"]", &engines).await?;
    join_all(engines.iter_mut().map(Engine::stop)).await;
    let wire = completion(MODEL, "one two three", false, 1);
    let (mut worst, mut wrong, mut sent) = (Duration::ZERO, 0, 0);
    for _ in 0..lab.scaled(200) {
        let answer = once(gateway.address, &wire).await;
        worst = worst.max(answer.total);
        wrong += u32::from(answer.status != 503 || answer.error().is_none());
        sent += 1;
    }
    board.exactly("answers that are no 503 with an error in JSON", wrong.into(), 0.0);
    board.most("slowest answer", worst.as_secs_f64() * 1e3, "ms", 20.0);
    let (before, time) = (gateway.computed(), lab.seconds(20));
    sleep(time).await;
    let share = (gateway.computed() - before) / time.as_secs_f64() * 100.0;
    board.most("CPU while nobody asks, of a core", share, "%", 5.0);
    gateway.settle(board, Some(sent)).await;
    Ok(())
}
