//! The rows of the board, each a function that measures a gateway of its own.

mod admission;
/// The edge's own table of what HTTP/1 may look like, and who plays it.
#[path = "../../../../gateway/edge/tests/cases/mod.rs"]
#[allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]
mod cases;
mod clock;
mod control;
mod departures;
mod edge;
mod events;
mod faults;
mod fuzz;
mod h2;
mod idle;
mod json;
mod life;
mod load;
mod names;
mod streams;

use std::path::PathBuf;
use std::time::Duration;

use futures::future::LocalBoxFuture;

use crate::Result;
use crate::board::Board;
use crate::engine::{Engine, Script};
use crate::gateway::{Gateway, Setup};

/// The model of requests that name one of their own nowhere.
const MODEL: &str = "tiny-words";

/// What rows measure with.
pub struct Lab {
    /// The gateway's command.
    pub kvgate: PathBuf,
    /// Shorter runs; the targets stay.
    pub quick: bool,
}

impl Lab {
    /// A time or a number of the full run, or a tenth of it.
    fn scaled(&self, full: u64) -> u64 {
        if self.quick { full.div_ceil(10) } else { full }
    }

    fn seconds(&self, full: u64) -> Duration {
        Duration::from_secs(self.scaled(full))
    }

    fn setup(&self) -> Result<Setup> {
        Setup::new(&self.kvgate)
    }

    /// A gateway with one rule, `pool`, of these lines and endpoints.
    async fn pool(&self, process: &str, lines: &str, engines: &[Engine]) -> Result<Gateway> {
        let mut setup = self.setup()?;
        setup.process.push_str(process);
        setup.rule("pool", &pool(lines, engines))?;
        setup.start().await
    }
}

/// A rule of these lines and endpoints.
fn pool(lines: &str, engines: &[Engine]) -> String {
    let mut text = format!("name = \"pool\"\n{lines}\n");
    for engine in engines {
        text.push_str(&format!("[[endpoint]]\naddress = \"{}\"\n", engine.address));
    }
    text
}

async fn engines(count: usize, script: Script) -> Result<Vec<Engine>> {
    let mut engines = Vec::new();
    for number in 0..count {
        engines.push(Engine::start(&format!("e{number}"), script).await?);
    }
    Ok(engines)
}

type Run = for<'a> fn(&'a Lab, &'a mut Board) -> LocalBoxFuture<'a, Result>;

/// A row of the list.
pub struct Row {
    /// Its number there.
    pub number: u32,
    /// What it is about.
    pub name: &'static str,
    run: Run,
}

/// Every row that is measured here, in order.
pub const ROWS: &[Row] = &[
    Row { number: 1, name: "steady load", run: |lab, board| Box::pin(load::steady(lab, board)) },
    Row { number: 2, name: "many streams", run: |lab, board| Box::pin(streams::many(lab, board)) },
    Row { number: 3, name: "soak", run: |lab, board| Box::pin(load::soak(lab, board)) },
    Row { number: 4, name: "thundering herd", run: |lab, board| Box::pin(load::herd(lab, board)) },
    Row { number: 5, name: "slow engines", run: |lab, board| Box::pin(load::slow(lab, board)) },
    Row { number: 6, name: "admission", run: |lab, board| Box::pin(admission::row(lab, board)) },
    Row { number: 7, name: "no connection", run: |lab, board| Box::pin(faults::refused(lab, board)) },
    Row { number: 8, name: "unanswered", run: |lab, board| Box::pin(faults::unanswered(lab, board)) },
    Row { number: 9, name: "streams that break", run: |lab, board| Box::pin(streams::broken(lab, board)) },
    Row { number: 10, name: "errors of engines", run: |lab, board| Box::pin(faults::errors(lab, board)) },
    Row { number: 11, name: "leaving clients", run: |lab, board| Box::pin(departures::row(lab, board)) },
    Row { number: 12, name: "all engines down", run: |lab, board| Box::pin(load::down(lab, board)) },
    Row { number: 16, name: "flood of events", run: |lab, board| Box::pin(events::flood(lab, board)) },
    Row { number: 18, name: "h1 framing", run: |lab, board| Box::pin(edge::framing(lab, board)) },
    Row { number: 19, name: "HTTP/2", run: |lab, board| Box::pin(h2::row(lab, board)) },
    Row { number: 20, name: "slow clients", run: |lab, board| Box::pin(edge::slow(lab, board)) },
    Row { number: 21, name: "large requests", run: |lab, board| Box::pin(edge::large(lab, board)) },
    Row { number: 22, name: "JSON", run: |lab, board| Box::pin(json::row(lab, board)) },
    Row { number: 23, name: "model names", run: |lab, board| Box::pin(names::models(lab, board)) },
    Row { number: 24, name: "cardinality", run: |lab, board| Box::pin(names::cardinality(lab, board)) },
    Row { number: 26, name: "fuzzing", run: |lab, board| Box::pin(async { fuzz::smoke(lab, board) }) },
    Row { number: 27, name: "broken configuration", run: |lab, board| Box::pin(control::broken(lab, board)) },
    Row { number: 28, name: "reloads under load", run: |lab, board| Box::pin(control::reloads(lab, board)) },
    Row { number: 29, name: "storm of signals", run: |lab, board| Box::pin(control::storm(lab, board)) },
    Row { number: 31, name: "end and upgrade", run: |lab, board| Box::pin(life::end(lab, board)) },
    Row { number: 32, name: "exhaustion", run: |lab, board| Box::pin(life::exhaustion(lab, board)) },
];

/// Measures these rows, or all.
pub async fn run(lab: &Lab, board: &mut Board, wanted: &[u32]) {
    for row in ROWS.iter().filter(|row| wanted.is_empty() || wanted.contains(&row.number)) {
        board.begin(row.number);
        eprintln!("row {}: {}", row.number, row.name);
        if let Err(error) = (row.run)(lab, board).await {
            board.broken(&error.to_string());
        }
    }
}
