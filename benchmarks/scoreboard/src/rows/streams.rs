//! Rows 2 and 9: streams, whole and broken.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::time::sleep;

use super::{Lab, MODEL, engines, pool};
use crate::Result;
use crate::board::Board;
use crate::client::{Answer, Client, completion};
use crate::engine::{Break, Engine, Script, numbers, times};
use crate::gateway::{Gateway, free};

/// 1,000 streams of 200 events: every event once, in order, and little memory.
pub async fn many(lab: &Lab, board: &mut Board) -> Result {
    let (streams, events) = (1000, usize::try_from(lab.scaled(200))?);
    let engines = engines(8, Script { pace: Duration::from_millis(50), ..Script::default() }).await?;
    let gateway = lab.pool("", "tiers = [\"least-connections\"]", &engines).await?;
    let wire = Arc::new(completion(MODEL, "one two three", true, events));
    let asks = (0..streams).map(|number| {
        let (wire, address) = (wire.clone(), gateway.address);
        tokio::spawn(async move {
            sleep(Duration::from_millis(number)).await;
            let mut client = Client::connect(address).await.ok()?;
            Some(client.ask(&wire).await)
        })
    });
    let (mut lost, mut wrong) = (0u32, 0usize);
    for answer in join_all(asks).await {
        let answer = answer?.unwrap_or_default();
        lost += u32::from(!answer.kept() || answer.status != 200);
        let came = numbers(&answer.body);
        wrong += (0..events).zip(&came).filter(|(wanted, number)| wanted != *number).count();
        wrong += came.len().abs_diff(events);
    }
    board.exactly("streams lost", lost.into(), 0.0);
    board.exactly("events lost, doubled or out of order", wrong as f64, 0.0);
    board.most("most memory", gateway.memory("VmHWM") / 1e6, "MB", 150.0);
    gateway.settle(board, Some(streams)).await;
    Ok(())
}

/// A hundred streams each whose engine resets, is killed, or falls silent.
pub async fn broken(lab: &Lab, board: &mut Board) -> Result {
    let count = usize::try_from(lab.scaled(100))?;
    resets(lab, board, count).await?;
    kills(lab, board, count).await?;
    stalls(lab, board, count).await
}

/// Whether a client was told properly: all events before, then one error event, then the end of the message.
fn told(answer: &Answer, events: usize) -> bool {
    let errors = memchr::memmem::find_iter(&answer.body, b"event: error\n").count();
    answer.whole && answer.error().is_some() && errors == 1 && numbers(&answer.body).len() == events
}

/// Streams at once; each with the time of its end.
async fn streams(gateway: &Gateway, count: usize) -> Result<Vec<(Answer, Instant)>> {
    let wire = Arc::new(completion(MODEL, "one two three", true, 1000));
    let asks = (0..count).map(|_| {
        let (wire, address) = (wire.clone(), gateway.address);
        tokio::spawn(async move {
            let Ok(mut client) = Client::connect(address).await else {
                return (Answer::default(), Instant::now());
            };
            let answer = client.ask(&wire).await;
            (answer, Instant::now())
        })
    });
    Ok(join_all(asks).await.into_iter().collect::<std::result::Result<_, _>>()?)
}

/// The longest that an end came after the fault before it, when both are in order.
fn latest(ends: &[(Answer, Instant)], mut faults: Vec<Instant>) -> f64 {
    let mut ends: Vec<_> = ends.iter().map(|(_, at)| *at).collect();
    ends.sort_unstable();
    faults.sort_unstable();
    let late = ends.iter().zip(faults).map(|(end, fault)| end.saturating_duration_since(fault));
    late.max().unwrap_or_default().as_secs_f64() * 1e3
}

fn report(board: &mut Board, how: &str, ends: &[(Answer, Instant)], wrong: usize) {
    board.exactly(
        &format!("{how}: streams without one error event and a clean end, of {}", ends.len()),
        wrong as f64,
        0.0,
    );
}

async fn resets(lab: &Lab, board: &mut Board, count: usize) -> Result {
    let script =
        Script { pace: Duration::from_millis(20), breaks: Some((10, Break::Reset)), ..Script::default() };
    let engines = engines(8, script).await?;
    let gateway = lab.pool("", "tiers = [\"least-connections\"]\n[retry]\nattempts = 1", &engines).await?;
    let ends = streams(&gateway, count).await?;
    // what is in flight when a reset comes may be lost with it: the error event is not
    let wrong = ends.iter().filter(|(a, _)| !told(a, numbers(&a.body).len())).count();
    report(board, "reset", &ends, wrong);
    let faults = engines.iter().flat_map(|engine| times(&engine.seen().broke)).collect();
    board.most("reset: slowest end after the fault", latest(&ends, faults), "ms", 100.0);
    gateway.settle(board, Some(count as u64)).await;
    Ok(())
}

/// An engine in a process of its own, so that it can be killed.
struct Victim(Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn kills(lab: &Lab, board: &mut Board, count: usize) -> Result {
    let (mut victims, mut text) = (Vec::new(), pool("tiers = [\"least-connections\"]", &[]));
    for _ in 0..4 {
        let address = free()?;
        let child = Command::new(std::env::current_exe()?)
            .args(["engine", &address.to_string(), "--pace-ms", "20"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        victims.push(Victim(child));
        text.push_str(&format!("[[endpoint]]\naddress = \"{address}\"\n"));
        while tokio::net::TcpStream::connect(address).await.is_err() {
            sleep(Duration::from_millis(5)).await;
        }
    }
    let setup = lab.setup()?;
    setup.rule("pool", &text)?;
    let gateway = setup.start().await?;
    let killed = async {
        sleep(Duration::from_secs(1)).await;
        let at = Instant::now();
        victims.iter_mut().for_each(|victim| drop(victim.0.kill()));
        at
    };
    let (ends, at) = futures::future::join(streams(&gateway, count), killed).await;
    let ends = ends?;
    let wrong = ends.iter().filter(|(a, _)| !told(a, numbers(&a.body).len())).count();
    report(board, "killed", &ends, wrong);
    board.most("killed: slowest end after the fault", latest(&ends, vec![at; count]), "ms", 100.0);
    gateway.settle(board, Some(count as u64)).await;
    Ok(())
}

async fn stalls(lab: &Lab, board: &mut Board, count: usize) -> Result {
    const IDLE: f64 = 2000.0;
    let script =
        Script { pace: Duration::from_millis(5), breaks: Some((10, Break::Stall)), ..Script::default() };
    let engines = engines(8, script).await?;
    let gateway =
        lab.pool("", "tiers = [\"least-connections\"]\n[timeouts]\nidle = \"2s\"", &engines).await?;
    let wire = Arc::new(completion(MODEL, "one two three", true, 1000));
    let asks = (0..count).map(|_| {
        let (wire, address) = (wire.clone(), gateway.address);
        tokio::spawn(async move {
            let mut client = Client::connect(address).await.ok()?;
            client.send(&wire).await.ok()?;
            let (mut last, mut silent) = (Instant::now(), Duration::ZERO);
            let answer = client
                .answer(|_| {
                    silent = last.elapsed();
                    last = Instant::now();
                })
                .await;
            Some((answer, silent))
        })
    });
    let mut ends = Vec::new();
    for asked in join_all(asks).await {
        ends.push(asked?.unwrap_or_default());
    }
    let wrong = ends.iter().filter(|(answer, _)| !told(answer, 10)).count();
    let silent: Vec<_> = ends.iter().map(|(_, silent)| silent.as_secs_f64() * 1e3).collect();
    board.exactly(
        &format!("silent: streams without one error event and a clean end, of {count}"),
        wrong as f64,
        0.0,
    );
    let (least, most) = silent.iter().fold((f64::MAX, 0.0_f64), |(a, b), ms| (a.min(*ms), b.max(*ms)));
    board.within("silent: earliest end, idle limit 2000 ms", least, "ms", IDLE * 0.9, IDLE * 1.1);
    board.within("silent: latest end, idle limit 2000 ms", most, "ms", IDLE * 0.9, IDLE * 1.1);
    gateway.settle(board, Some(count as u64)).await;
    drop::<Vec<Engine>>(engines);
    Ok(())
}
