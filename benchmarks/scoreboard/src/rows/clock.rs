//! Row 32: the machine's clock is set while the gateway runs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use tokio::time::sleep;

use super::{Lab, MODEL, engines, pool};
use crate::Result;
use crate::board::Board;
use crate::client::{completion, once};
use crate::engine::{Script, numbers};
use crate::load::Load;
use crate::metrics::Metrics;

/// By how much, from the true time.
const JUMPS: [&str; 4] = ["+1d", "-1d", "+400d", "-400d"];

const LINES: &str =
    "tiers = [\"session\", \"least-connections\"]\n[probe]\nmode = \"http\"\ninterval = \"500ms\"";

/// Forwards and backwards, by a day and by more than a year, amid requests, streams and conversations: nobody notices.
pub async fn jumps(lab: &Lab, board: &mut Board) -> Result {
    const STREAMS: usize = 50;
    const EVENTS: usize = 140;
    let Some(library) = faketime() else {
        board.broken("a clock that jumps: faketime is not installed");
        return Ok(());
    };
    let engines = engines(4, Script { pace: Duration::from_millis(50), ..Script::default() }).await?;
    let mut setup = lab.setup()?;
    let clock = setup.folder().join("clock");
    set(&clock, "+0")?;
    setup.rule("pool", &pool(LINES, &engines))?;
    // files keep their true times, and so does the clock that cannot be set
    setup.before = format!(
        "export LD_PRELOAD='{}' FAKETIME_TIMESTAMP_FILE='{}' FAKETIME_NO_CACHE=1 FAKETIME_DONT_FAKE_MONOTONIC=1 \
         NO_FAKE_STAT=1;",
        library.display(),
        clock.display()
    );
    let gateway = setup.start().await?;
    let probed = |m: &Metrics| m.sum("kvgate_probes_total", &[]);
    let before = probed(&gateway.metrics().await);
    let wire = Arc::new(completion(MODEL, "one two three", true, EVENTS));
    let streams: Vec<_> = (0..STREAMS)
        .map(|_| {
            let (wire, address) = (wire.clone(), gateway.address);
            tokio::spawn(async move { once(address, &wire).await })
        })
        .collect();
    let load = Load { address: gateway.address, rate: 200.0, time: Duration::from_secs(6), connections: 32 };
    let (homes, moved) = (Arc::new(Mutex::new(HashMap::new())), Arc::new(AtomicU64::new(0)));
    let counted = moved.clone();
    let conversations = load.run(said, move |number, answer| {
        let mut homes = homes.lock().unwrap_or_else(PoisonError::into_inner);
        let engine = answer.header("x-backend").unwrap_or_default().to_owned();
        let home = homes.entry(number % 50).or_insert_with(|| engine.clone());
        counted.fetch_add(u64::from(*home != engine), Relaxed);
    });
    let set_clock = async {
        let mut stale = 0u32;
        for (number, by) in JUMPS.into_iter().enumerate() {
            sleep(Duration::from_secs(1)).await;
            set(&clock, by)?;
            let reloads = |m: &Metrics| m.sum("kvgate_config_reloads_total", &["result=\"good\""]);
            let had = reloads(&gateway.metrics().await);
            gateway.setup.rule("pool", &format!("# {number}\n{}", pool(LINES, &engines)))?;
            let read = gateway.until("a reload", Duration::from_secs(10), |m| reloads(m) > had).await;
            stale += u32::from(read.is_err());
        }
        Ok::<_, crate::Error>(stale)
    };
    let (outcome, stale) = futures::future::join(conversations, set_clock).await;
    let stale = stale?;
    let mut cut = 0u32;
    for stream in join_all(streams).await {
        let answer = stream?;
        cut += u32::from(!answer.kept() || numbers(&answer.body).len() != EVENTS);
    }
    let log = gateway.log();
    let mut dates: Vec<_> = log.lines().filter_map(|line| line.get(..10)).collect();
    dates.sort_unstable();
    dates.dedup();
    let name = "clock set by a day and 400 days, to and fro";
    board.exactly(&format!("{name}: dates in the log"), dates.len() as f64, JUMPS.len() as f64 + 1.0);
    board.exactly(&format!("{name}: requests not served"), (outcome.sent - outcome.good) as f64, 0.0);
    board.exactly(&format!("{name}: streams cut, of {STREAMS}"), cut.into(), 0.0);
    board.exactly(&format!("{name}: conversations that moved"), moved.load(Relaxed) as f64, 0.0);
    board.exactly(&format!("{name}: changed rules not taken up"), stale.into(), 0.0);
    // two a second of each engine
    board.within(&format!("{name}: probes"), probed(&gateway.metrics().await) - before, "", 30.0, 80.0);
    gateway.settle(board, Some(outcome.sent + STREAMS as u64)).await;
    Ok(())
}

/// A request of one of fifty conversations.
fn said(number: u64) -> Vec<u8> {
    let body = format!(r#"{{"model":"{MODEL}","prompt":"one","max_tokens":1,"user":"c{}"}}"#, number % 50);
    crate::client::post("/v1/completions", "", body.as_bytes())
}

/// Sets the clock of who reads this file, at once.
fn set(clock: &Path, by: &str) -> Result {
    let aside = clock.with_extension("new");
    std::fs::write(&aside, format!("{by}\n"))?;
    Ok(std::fs::rename(aside, clock)?)
}

/// The library of `faketime` that does for threads, where it is installed.
fn faketime() -> Option<PathBuf> {
    let roots = ["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from);
    let below = roots.iter().flat_map(|root| std::fs::read_dir(root).into_iter().flatten().flatten());
    let folders: Vec<PathBuf> = roots.iter().cloned().chain(below.map(|entry| entry.path())).collect();
    let library = |folder: PathBuf| folder.join("faketime/libfaketimeMT.so.1");
    folders.into_iter().map(library).find(|path| path.is_file())
}
