//! Rows 7, 8 and 10: engines that are not there, break off before they answer, or answer with errors.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use futures::future::join;
use tokio::time::sleep;

use super::{Lab, MODEL, engines};
use crate::Result;
use crate::board::Board;
use crate::client::{completion, once};
use crate::engine::{Break, Engine, Script, heard};
use crate::gateway::Gateway;
use crate::load::Load;

/// Only requests tell how an engine is.
const UNASKED: &str = "[probe]\nmode = \"off\"";

/// Asks so many times in turn; the statuses.
async fn ask(gateway: &Gateway, count: u64) -> Vec<u16> {
    let mut statuses = Vec::new();
    for _ in 0..count {
        let answer = once(gateway.address, &completion(MODEL, "one two three", false, 1)).await;
        statuses.push(if answer.kept() { answer.status } else { 0 });
    }
    statuses
}

fn bad(statuses: &[u16]) -> f64 {
    statuses.iter().filter(|status| **status != 200).count() as f64
}

/// An engine that takes no connection: clients notice nothing, it is left alone, and tried again when that is over.
pub async fn refused(lab: &Lab, board: &mut Board) -> Result {
    let open_for = lab.scaled(30).max(3);
    let rule =
        format!("tiers = [\"round-robin\"]\n[breaker]\nfailures = 3\nopen_for = \"{open_for}s\"\n{UNASKED}");
    let mut engines = engines(8, Script { notes: true, ..Script::default() }).await?;
    let gateway = lab.pool("", &rule, &engines).await?;
    let first = engines.first_mut().ok_or("no engine")?;
    first.stop().await;
    let failures = |m: &crate::metrics::Metrics| m.sum("kvgate_endpoint_failures_total", &["ep_idx=\"0\""]);
    let statuses = ask(&gateway, 1000).await;
    board.exactly("errors that clients saw, of 1,000 requests", bad(&statuses), 0.0);
    // records come after answers
    gateway.until("all recorded", Duration::from_secs(10), |m| m.outcomes() >= 1000.0).await?;
    let metrics = gateway.metrics().await;
    board.exactly("connections tried until the breaker opened", failures(&metrics), 3.0);
    let attempts = metrics.sum("kvgate_endpoint_attempts_total", &[]);
    board.exactly("attempts beside the 1,000", attempts - 1000.0, 3.0);
    board.exactly("breaker, 1: open", metrics.sum("kvgate_endpoint_breaker", &["ep_idx=\"0\""]), 1.0);

    // again, so that the time it opened is known
    let fresh = lab.pool("", &rule, &engines).await?;
    let mut opened = None;
    for _ in 0..200 {
        ask(&fresh, 1).await;
        if failures(&fresh.metrics().await) >= 3.0 {
            opened = Some(Instant::now());
            break;
        }
    }
    let opened = opened.ok_or("the breaker does not open")?;
    let first = engines.first_mut().ok_or("no engine")?;
    first.restart().await?;
    heard(first);
    let load =
        Load { address: fresh.address, rate: 50.0, time: Duration::from_secs(open_for + 3), connections: 8 };
    let outcome = load.run(|_| completion(MODEL, "one two three", false, 1), |_, _| ()).await;
    let tried = heard(first).first().map(|(at, _)| at.duration_since(opened).as_secs_f64());
    let wanted = open_for as f64;
    board.within(
        "first request to it after it opened",
        tried.unwrap_or(0.0),
        "s",
        wanted - 1.0,
        wanted + 1.0,
    );
    board.exactly("requests lost meanwhile", (outcome.lost + outcome.failed) as f64, 0.0);
    gateway.settle(board, Some(1000)).await;
    fresh.settle(board, None).await;
    Ok(())
}

/// An engine that has read a request and breaks off: answered, or asked again where the rule allows it, never twice else.
pub async fn unanswered(lab: &Lab, board: &mut Board) -> Result {
    let count = lab.scaled(200).max(40);
    for (resend, fine) in [(false, false), (true, true)] {
        let engines = engines(8, Script::default()).await?;
        let breaks = Script { breaks: Some((0, Break::Close)), ..Script::default() };
        engines.first().ok_or("no engine")?.script(breaks);
        let rule = format!(
            "tiers = [\"round-robin\"]\n[retry]\nresend = {resend}\n[breaker]\nfailures = 0\n{UNASKED}"
        );
        let gateway = lab.pool("[retry_budget]\npercent = 100\n", &rule, &engines).await?;
        let statuses = ask(&gateway, count).await;
        let asked: usize = engines.iter().map(|engine| engine.seen().requests.load(Relaxed)).sum();
        let broken = engines.first().map_or(0, |engine| engine.seen().requests.load(Relaxed));
        let gone = statuses.iter().filter(|status| matches!(status, 502 | 504)).count();
        let others = statuses.iter().filter(|status| !matches!(status, 200 | 502 | 504)).count();
        let name = |what: &str| format!("resend = {resend}: {what}");
        board.least(&name("requests broken off"), broken as f64, "", 1.0);
        board.exactly(&name("answers but 200, 502 and 504"), others as f64, 0.0);
        board.exactly(&name("answers 502 or 504"), gone as f64, if fine { 0.0 } else { broken as f64 });
        let twice = asked as f64 - count as f64;
        board.exactly(
            &name("requests that engines read twice"),
            twice,
            if fine { broken as f64 } else { 0.0 },
        );
        gateway.settle(board, Some(count)).await;
    }
    Ok(())
}

/// An engine that answers with errors of its own: 5xx take it out, 4xx do not, and it comes back.
pub async fn errors(lab: &Lab, board: &mut Board) -> Result {
    let rule =
        "tiers = [\"round-robin\"]\n[breaker]\nfailures = 3\nopen_for = \"2s\"\n[probe]\nmode = \"off\"";
    let engines = engines(4, Script::default()).await?;
    let first = engines.first().ok_or("no engine")?;
    let requests = |engine: &Engine| engine.seen().requests.load(Relaxed) as f64;
    first.script(Script { status: 404, ..Script::default() });
    let gateway = lab.pool("", rule, &engines).await?;
    let statuses = ask(&gateway, 100).await;
    board.exactly("answers 404 of one of four engines, of 100 requests", bad(&statuses), 25.0);
    first.script(Script { status: 500, ..Script::default() });
    let before = requests(first);
    let statuses = ask(&gateway, 100).await;
    board.exactly("answers 500 until it is left alone", bad(&statuses), 3.0);
    board.exactly("requests it got", requests(first) - before, 3.0);
    first.script(Script::default());
    let seen = requests(first);
    let start = Instant::now();
    let back = async {
        while requests(first) <= seen && start.elapsed() < Duration::from_secs(10) {
            sleep(Duration::from_millis(10)).await;
        }
        start.elapsed()
    };
    let load = Load { address: gateway.address, rate: 50.0, time: Duration::from_secs(5), connections: 4 };
    let (outcome, back) = join(load.run(|_| completion(MODEL, "one", false, 1), |_, _| ()), back).await;
    board.most("until it is asked again, breaker 2 s", back.as_secs_f64(), "s", 3.0);
    board.exactly("requests lost meanwhile", (outcome.lost + outcome.failed) as f64, 0.0);
    gateway.settle(board, Some(200 + outcome.sent)).await;
    probed(lab, board).await
}

/// An engine that goes and comes back, as probes tell alone.
async fn probed(lab: &Lab, board: &mut Board) -> Result {
    let rule =
        "tiers = [\"round-robin\"]\n[breaker]\nfailures = 0\n[probe]\ninterval = \"1s\"\nunhealthy_after = 1";
    let mut engines = engines(4, Script { notes: true, ..Script::default() }).await?;
    let gateway = lab.pool("", rule, &engines).await?;
    let available = |m: &crate::metrics::Metrics| m.sum("kvgate_endpoint_available", &[]);
    gateway.until("all are there", Duration::from_secs(10), |m| available(m) == 4.0).await?;
    let first = engines.first_mut().ok_or("no engine")?;
    first.stop().await;
    let start = Instant::now();
    gateway.until("one is missed", Duration::from_secs(10), |m| available(m) == 3.0).await?;
    board.most(
        "until an engine that is gone is out, probes each 1 s",
        start.elapsed().as_secs_f64(),
        "s",
        1.2,
    );
    first.restart().await?;
    let start = Instant::now();
    gateway.until("it is back", Duration::from_secs(10), |m| available(m) == 4.0).await?;
    board.most("until one that is back is in", start.elapsed().as_secs_f64(), "s", 1.2);
    let first = engines.first().ok_or("no engine")?;
    heard(first);
    ask(&gateway, 8).await;
    board.exactly("requests it gets then, of 8 for four", heard(first).len() as f64, 2.0);
    gateway.settle(board, Some(8)).await;
    Ok(())
}
