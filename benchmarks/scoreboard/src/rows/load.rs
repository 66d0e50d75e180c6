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
use crate::client::{Answer, completion, once};
use crate::engine::{Engine, Script};
use crate::gateway::free;
use crate::load::Load;
use crate::metrics::Metrics;
use crate::publisher::Publisher;
use crate::soak;

/// 2,000 short requests per second: none is lost, and what the gateway adds is small.
pub async fn steady(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(8, Script::default()).await?;
    let gateway = lab.pool("", "tiers = [\"least-connections\"]", &engines).await?;
    let wire = |_| completion(MODEL, "one two three", false, 1);
    let load = |address, seconds| Load { address, rate: 2000.0, time: seconds, connections: 64 };
    let first = engines.first().ok_or("no engine")?;
    let (without, with) = (load(first.address, lab.seconds(30)), load(gateway.address, lab.seconds(60)));
    let straight = without.run(wire, |_, _| ()).await;
    let through = with.run(wire, |_, _| ()).await;
    without.offered(board, "without a gateway", &straight);
    with.offered(board, "with it", &through);
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
    let ready = |m: &Metrics| m.sum("kvgate_tokenizer_ready", &[]) == 1.0;
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
    load.offered(board, "all fast", &alone);
    load.offered(board, "two slow", &mixed);
    let others = times.lock().unwrap_or_else(PoisonError::into_inner).quantile(0.99) as f64 / 1e6;
    let share = slow.load(Relaxed) as f64 / late.load(Relaxed).max(1) as f64;
    board.exactly("requests lost", (alone.lost + mixed.lost) as f64, 0.0);
    board.most("p99 of the other engines, of what it was", others / alone.ms(0.99) * 100.0, "%", 110.0);
    board.most("share of the slow engines after 2 s, of a fair one", share / 0.25 * 100.0, "%", 100.0 / 3.0);
    gateway.settle(board, Some(alone.sent + mixed.sent)).await;
    Ok(())
}

/// Nobody is there, neither for requests nor for probes nor for events: a quick answer in JSON, and no spinning.
pub async fn down(lab: &Lab, board: &mut Board) -> Result {
    let mut engines = engines(8, Script::default()).await?;
    let mut rule =
        "tiers = [\"kv-exact\", \"least-connections\"]\n[probe]\nmode = \"http\"\ninterval = \"1s\"\n\
                    [events]\nport = 0\nreplay_port_offset = 0\n"
            .to_owned();
    for engine in &engines {
        // free, and nobody publishes there
        let (address, events) = (engine.address, free()?);
        rule.push_str(&format!("[[endpoint]]\naddress = \"{address}\"\nkv_events = \"tcp://{events}\"\n"));
    }
    let gateway = lab.pool("", &rule, &[]).await?;
    join_all(engines.iter_mut().map(Engine::stop)).await;
    let wire = completion(MODEL, "one two three", false, 1);
    let (probed, feeds) = (
        |m: &Metrics| m.sum("kvgate_probes_total", &[]),
        |m: &Metrics| m.sum("kvgate_feed_connect_errors_total", &[]),
    );
    let metrics = gateway.metrics().await;
    let (before, asked, tried) = (gateway.computed(), probed(&metrics), feeds(&metrics));
    let load = Load { address: gateway.address, rate: 10.0, time: lab.seconds(20), connections: 16 };
    let (worst, wrong) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let seen = (worst.clone(), wrong.clone());
    let each = move |_, answer: &Answer| {
        seen.0.fetch_max(u64::try_from(answer.total.as_micros()).unwrap_or(u64::MAX), Relaxed);
        seen.1.fetch_add(u64::from(answer.status != 503 || answer.error().is_none()), Relaxed);
    };
    let outcome = load.run(move |_| wire.clone(), each).await;
    let share = (gateway.computed() - before) / load.time.as_secs_f64() * 100.0;
    let metrics = gateway.metrics().await;
    load.offered(board, "nobody there", &outcome);
    board.exactly("answers that are no 503 with an error in JSON", wrong.load(Relaxed) as f64, 0.0);
    board.most("slowest answer", worst.load(Relaxed) as f64 / 1e3, "ms", 20.0);
    board.least("probes meanwhile", probed(&metrics) - asked, "", 1.0);
    board.least("attempts to follow events meanwhile", feeds(&metrics) - tried, "", 1.0);
    board.most("CPU at ten requests a second, of a core", share, "%", 5.0);
    gateway.settle(board, Some(outcome.sent)).await;
    Ok(())
}
