//! Row 22: bodies of every kind, byte for byte.

use kvgate_tests::{JsonCase, heavy_json_cases, json_cases};

use super::{Lab, MODEL, engines};
use crate::Result;
use crate::board::Board;
use crate::client::post;
use crate::engine::{Engine, Script, digest};
use crate::load::send;
use crate::ping::Pinger;

/// Each case alone and as a member of a request: the engine gets the same bytes, and nobody else waits for it.
pub async fn row(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(2, Script::default()).await?;
    let quiet = Engine::start("quiet", Script::default()).await?;
    let gateway = lab.pool("", "tiers = [\"session\", \"radix-trie\", \"chwbl\"]", &engines).await?;
    // beside it one straight to an engine: what the machine itself keeps waiting
    let (pinger, straight) = (Pinger::start(gateway.address), Pinger::start(quiet.address));
    let (mut changed, mut lost, mut sent, mut open) = (0u32, 0u32, 0u64, None);
    let mut worst = (std::time::Duration::ZERO, String::new());
    let mut cases = json_cases();
    let small = cases.len();
    if !lab.quick {
        cases.extend(heavy_json_cases());
    } else {
        cases.extend(heavy_json_cases().into_iter().step_by(3));
    }
    let heavy = cases.len() - small;
    for case in &cases {
        for body in bodies(case) {
            let answer = send(&mut open, gateway.address, &post("/v1/completions", "", &body)).await;
            sent += 1;
            let whole = answer.kept() && answer.status == 200;
            lost += u32::from(!whole);
            let same = answer.header("x-body") == Some(digest(&body).as_str());
            if !whole || !same {
                changed += u32::from(whole);
                eprintln!("{}: status {} {:?}", case.name, answer.status, answer.error());
            }
            if answer.total > worst.0 {
                worst = (answer.total, case.name.clone());
            }
        }
    }
    let (times, pings) = pinger.stop()?;
    let (machine, _) = straight.stop()?;
    board.least("small cases", small as f64, "", 318.0);
    board.least("heavy cases", heavy as f64, "", if lab.quick { 10.0 } else { 30.0 });
    board.exactly("cases not answered by the engine", lost.into(), 0.0);
    board.exactly("bodies that reached the engine changed", changed.into(), 0.0);
    board.most(&format!("slowest case ({})", worst.1), worst.0.as_secs_f64() * 1e3, "ms", 1000.0);
    let added = |share| (times.quantile(share) as f64 - machine.quantile(share) as f64).max(0.0) / 1e6;
    board.most("p99.9 that is added to a request each millisecond beside", added(0.999), "ms", 10.0);
    board.most("most that is added to one", added(1.0), "ms", 10.0);
    gateway.settle(board, Some(sent + pings)).await;
    Ok(())
}

/// The case, and if it is small a request that holds it.
fn bodies(case: &JsonCase) -> Vec<Vec<u8>> {
    let mut bodies = vec![case.text.clone()];
    if case.text.len() < 1000 {
        bodies.push(case.in_request(MODEL));
    }
    bodies
}
