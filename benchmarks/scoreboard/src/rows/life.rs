//! Rows 31 and 32: how it ends, how it is replaced, and what it does when the system has nothing left.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures::future::{join, join_all};
use tokio::time::sleep;

use super::{Lab, MODEL, clock, engines, pool};
use crate::Result;
use crate::board::Board;
use crate::client::{Client, completion, get, once, post};
use crate::engine::{Engine, Script, numbers};

const LINES: &str = "tiers = [\"least-connections\"]";

/// SIGTERM amid 500 streams, and SIGQUIT amid 20,000 requests.
pub async fn end(lab: &Lab, board: &mut Board) -> Result {
    drain(lab, board).await?;
    upgrade(lab, board).await
}

async fn drain(lab: &Lab, board: &mut Board) -> Result {
    let (streams, events) = (500, 100);
    let engines = engines(8, Script { pace: Duration::from_millis(50), ..Script::default() }).await?;
    let mut setup = lab.setup()?;
    setup.rule("pool", &pool(LINES, &engines))?;
    setup.grace = "30s";
    setup.drain = "1s";
    let mut gateway = setup.start().await?;
    let wire = Arc::new(completion(MODEL, "one two three", true, events));
    let asks: Vec<_> = (0..streams)
        .map(|_| {
            let (wire, address) = (wire.clone(), gateway.address);
            tokio::spawn(async move { (once(address, &wire).await, Instant::now()) })
        })
        .collect();
    let open = |m: &crate::metrics::Metrics| m.sum("kvgate_leases_open", &[]) >= f64::from(streams);
    gateway.until("500 streams", Duration::from_secs(20), open).await?;
    gateway.signal("TERM", 1)?;
    let told = Instant::now();
    // what new clients and whoever asks for readiness see meanwhile
    let (mut unready, mut refused, mut rude) = (None, None, 0u32);
    let ends = join_all(asks);
    tokio::pin!(ends);
    let ends = loop {
        tokio::select! {
            ends = &mut ends => break ends,
            () = sleep(Duration::from_millis(5)) => {
                if unready.is_none() && gateway.page("/readyz").await.status != 200 {
                    unready = Some(told.elapsed());
                }
                let Ok(mut client) = Client::connect(gateway.address).await else {
                    // not let in; whoever is gets an answer
                    refused = refused.or(Some(told.elapsed()));
                    continue;
                };
                let answer = client.ask(&get("/v1/models")).await;
                match answer.status {
                    200 if answer.kept() => {}
                    503 if answer.kept() => refused = refused.or(Some(told.elapsed())),
                    _ => rude += 1,
                }
            }
        }
    };
    let (mut cut, mut last) = (0u32, told);
    for end in ends {
        let (answer, at) = end?;
        cut += u32::from(!answer.kept() || numbers(&answer.body).len() != events);
        last = last.max(at);
    }
    while gateway.ended().is_none() && last.elapsed() < Duration::from_secs(20) {
        sleep(Duration::from_millis(2)).await;
    }
    board.exactly("streams cut, of 500", cut.into(), 0.0);
    board.exactly("new connections let in, and requests there neither served nor told 503", rude.into(), 0.0);
    let order = unready
        .zip(refused)
        .map_or(f64::NAN, |(unready, refused)| refused.as_secs_f64() - unready.as_secs_f64());
    board.within("from not being ready to the first client not let in", order, "s", 0.0, 5.0);
    board.most(
        "from the end of the last stream to that of the process",
        last.elapsed().as_secs_f64(),
        "s",
        1.0,
    );
    board.exactly("panics in the log", gateway.log().matches("panicked at").count() as f64, 0.0);
    Ok(())
}

/// The process that took over.
struct Heir(std::process::Child);

impl Drop for Heir {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn upgrade(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(8, Script::default()).await?;
    let mut setup = lab.setup()?;
    setup.rule("pool", &pool(LINES, &engines))?;
    setup.upgrade = true;
    let mut gateway = setup.start().await?;
    let count = lab.scaled(20_000);
    let (failed, sent) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let stop = Arc::new(AtomicBool::new(false));
    // a connection for each request: none may be refused, reset or left unanswered
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let (address, failed, sent, stop) = (gateway.address, failed.clone(), sent.clone(), stop.clone());
            tokio::spawn(async move {
                while sent.fetch_add(1, Relaxed) < count || !stop.load(Relaxed) {
                    let answer = once(address, &get("/v1/models")).await;
                    failed.fetch_add(u64::from(answer.status != 200 || !answer.kept()), Relaxed);
                }
            })
        })
        .collect();
    let replaced = async {
        sleep(Duration::from_millis(200)).await;
        let folder = gateway.setup.folder().to_owned();
        let heir = Command::new(&lab.kvgate)
            .args(["run", "--upgrade", "--config"])
            .arg(folder.join("gateway.toml"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.join("heir"))?)
            .spawn()?;
        let heir = Heir(heir);
        sleep(Duration::from_millis(300)).await;
        gateway.signal("QUIT", 1)?;
        let (start, before) = (Instant::now(), sent.load(Relaxed));
        while gateway.ended().is_none() && start.elapsed() < Duration::from_secs(40) {
            sleep(Duration::from_millis(20)).await;
        }
        stop.store(true, Relaxed);
        let amid = sent.load(Relaxed) - before;
        Ok::<_, crate::Error>((heir, gateway.ended().is_some(), start.elapsed(), amid))
    };
    let (ends, replaced) = join(join_all(clients), replaced).await;
    let panicked = ends.iter().filter(|end| end.is_err()).count();
    let (heir, gone, time, amid) = replaced?;
    board.exactly("processes that did not give way", f64::from(u8::from(!gone)), 0.0);
    board.least("requests from SIGQUIT to the end of the old process", amid as f64, "", 100.0);
    let failed = failed.load(Relaxed) as f64 + panicked as f64;
    board.exactly("refused, reset or unanswered, before, amid and after", failed, 0.0);
    board.most("until the old process was gone", time.as_secs_f64(), "s", 35.0);
    let after = once(gateway.address, &get("/v1/models")).await;
    board.exactly("status from the new process", after.status.into(), 200.0);
    let said = std::fs::read_to_string(gateway.setup.folder().join("heir"))?;
    board.exactly("panics in the new process's log", said.matches("panicked at").count() as f64, 0.0);
    // the old one's log; what is held is the new one's, which has its admin surface
    gateway.settle(board, None).await;
    drop(heir);
    Ok(())
}

/// No descriptors, no memory, no room for the log, and no true clock: it lives, says so seldom, and recovers.
pub async fn exhaustion(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(2, Script::default()).await?;
    // one, so that its connection is there when there can be no new one
    descriptors(lab, board, engines.get(..1).unwrap_or_default()).await?;
    memory(lab, board).await?;
    disk(lab, board, &engines).await?;
    clock::jumps(lab, board).await
}

async fn served(address: SocketAddr) -> bool {
    once(address, &completion(MODEL, "one", false, 1)).await.status == 200
}

/// Clients are let in to half of the descriptors; the others are taken by the admin surface, whose connections nobody counts.
async fn descriptors(lab: &Lab, board: &mut Board, engines: &[Engine]) -> Result {
    let mut setup = lab.setup()?;
    setup.rule("pool", &pool(LINES, engines))?;
    setup.before = "ulimit -n 256;".into();
    let gateway = setup.start().await?;
    let mut early = Client::connect(gateway.address).await?;
    let wire = completion(MODEL, "one", false, 1);
    board.exactly("status before", early.ask(&wire).await.status.into(), 200.0);
    let mut idle = Vec::new();
    for _ in 0..400 {
        idle.push(Client::connect(gateway.admin).await?);
    }
    let start = Instant::now();
    while !gateway.log().contains("no connection can be accepted") {
        if start.elapsed() > Duration::from_secs(30) {
            return Err("descriptors do not run out".into());
        }
        idle.push(Client::connect(gateway.address).await?);
        sleep(Duration::from_millis(10)).await;
    }
    // it finds its files unreadable, and says so once
    sleep(Duration::from_secs(3)).await;
    let lines = gateway.log().lines().count();
    let (time, computed) = (Duration::from_secs(5), gateway.computed());
    sleep(time).await;
    let spent = (gateway.computed() - computed) / time.as_secs_f64() * 100.0;
    let said = (gateway.log().lines().count() - lines) as f64 / time.as_secs_f64();
    board.most("no descriptor left of 256: CPU, of a core", spent, "%", 5.0);
    board.most("lines of log", said, "/s", 1.0);
    board.exactly("status for who was in before", early.ask(&wire).await.status.into(), 200.0);
    drop(idle);
    let start = Instant::now();
    while !served(gateway.address).await && start.elapsed() < Duration::from_secs(30) {
        sleep(Duration::from_millis(10)).await;
    }
    board.most("until it serves again", start.elapsed().as_secs_f64(), "s", 1.5);
    gateway.settle(board, None).await;
    Ok(())
}

/// More bodies at a time than it may have memory: some are refused, and properly.
async fn memory(lab: &Lab, board: &mut Board) -> Result {
    const BODIES: usize = 24;
    let held = Script { delay: Duration::from_secs(5), ..Script::default() };
    let engines = engines(2, held).await?;
    let mut setup = lab.setup()?;
    setup.rule("pool", &pool(LINES, &engines))?;
    // memory that can be written to, in KiB
    setup.before = "ulimit -d 262144;".into();
    let mut gateway = setup.start().await?;
    let wire = Arc::new(post("/v1/completions", "", &vec![b'x'; 15 << 20]));
    let asks = (0..BODIES).map(|_| {
        let (wire, address) = (wire.clone(), gateway.address);
        tokio::spawn(async move { once(address, &wire).await })
    });
    let (mut refused, mut rude) = (0, 0);
    for answer in join_all(asks).await {
        let answer = answer?;
        rude += u32::from(!answer.kept());
        refused += u32::from(answer.error().as_deref() == Some("overloaded"));
    }
    let name = "256 MiB for 360 MB of bodies";
    board.least(&format!("{name}: refused as overloaded"), refused.into(), "", 1.0);
    board.exactly(&format!("{name}: neither served nor refused in JSON"), rude.into(), 0.0);
    board.exactly(
        &format!("{name}: processes that died"),
        f64::from(u8::from(gateway.ended().is_some())),
        0.0,
    );
    let after = once(gateway.address, &completion(MODEL, "one", false, 1)).await;
    board.exactly(&format!("{name}: status after"), after.status.into(), 200.0);
    gateway.settle(board, Some(BODIES as u64 + 1)).await;
    Ok(())
}

async fn disk(lab: &Lab, board: &mut Board, engines: &[Engine]) -> Result {
    let mut setup = lab.setup()?;
    setup.rule("pool", &pool(LINES, engines))?;
    // every write to it fails: no space left on device
    setup.log = Some(PathBuf::from("/dev/full"));
    let mut gateway = setup.start().await?;
    let mut failed = 0;
    for number in 0..lab.scaled(200) {
        if number % 10 == 0 {
            // something to log
            gateway.signal("HUP", 1)?;
        }
        failed += u32::from(!served(gateway.address).await);
    }
    board.exactly("no room for the log: requests not served", failed.into(), 0.0);
    board.exactly(
        "no room for the log: processes that died",
        f64::from(u8::from(gateway.ended().is_some())),
        0.0,
    );
    gateway.settle(board, Some(lab.scaled(200))).await;
    Ok(())
}
