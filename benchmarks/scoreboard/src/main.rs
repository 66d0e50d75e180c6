//! `make scoreboard` and `make soak`.
#![allow(missing_docs)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use kvgate_scoreboard::board::Board;
use kvgate_scoreboard::engine::{Engine, Script};
use kvgate_scoreboard::proxy::{Plan, Proxy};
use kvgate_scoreboard::rows::{self, Lab};
use kvgate_scoreboard::{Result, soak};

/// Shows from outside what a gateway holds under fire.
#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measures rows of the board; prints `row name value unit target pass`, and exits 1 if one misses its target.
    Rows {
        /// The gateway's command.
        #[arg(long)]
        kvgate: PathBuf,
        /// A tenth of the time and of the numbers; the targets stay.
        #[arg(long)]
        quick: bool,
        /// The page to write the table into.
        #[arg(long)]
        write: Option<PathBuf>,
        /// Their numbers; all without.
        rows: Vec<u32>,
    },
    /// Mixes load, faults and reloads, and asserts what must hold.
    Soak {
        /// The gateway's command.
        #[arg(long)]
        kvgate: PathBuf,
        /// How long, after a start of a fifth of it.
        #[arg(long, default_value_t = 600)]
        seconds: u64,
    },
    /// Passes connections on and breaks some of them.
    Proxy {
        /// Where to listen.
        from: SocketAddr,
        /// To whom to pass.
        to: SocketAddr,
        /// Same seed, same faults.
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Of connections.
        #[arg(long, default_value_t = 10)]
        percent: u64,
    },
    /// Answers as an engine does.
    Engine {
        /// Where to listen.
        address: SocketAddr,
        /// Between two events of a stream.
        #[arg(long, default_value_t = 0)]
        pace_ms: u64,
    },
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    match runtime.map_err(Into::into).and_then(|runtime| runtime.block_on(run(command))) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            eprintln!("{failed} figures miss their target");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

async fn run(command: Command) -> Result<usize> {
    let mut board = Board::default();
    match command {
        Command::Rows { kvgate, quick, write, rows } => {
            let lab = Lab { kvgate, quick };
            rows::run(&lab, &mut board, &rows).await;
            if let Some(page) = write {
                board.write(&page, &measured(quick))?;
            }
        }
        Command::Soak { kvgate, seconds } => {
            soak::run(&kvgate, Duration::from_secs(seconds), &mut board).await?;
        }
        Command::Proxy { from, to, seed, percent } => {
            let proxy = Proxy::start(from, to, Plan::Random { seed, percent }).await?;
            println!("{}", proxy.address);
            std::future::pending::<()>().await;
        }
        Command::Engine { address, pace_ms } => {
            let script = Script { pace: Duration::from_millis(pace_ms), ..Script::default() };
            let engine = Engine::at(address, "engine", script).await?;
            println!("{}", engine.address);
            std::future::pending::<()>().await;
        }
    }
    Ok(board.failed())
}

/// When and where.
fn measured(quick: bool) -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let date =
        std::process::Command::new("date").arg("+%Y-%m-%d").output().map_or(Vec::new(), |out| out.stdout);
    let short = if quick { ", a tenth of the time and of the numbers (`--quick`)" } else { "" };
    format!(
        "Measured on {}: {} cores of {}, Linux {}, clients and engines on the same machine{short}.",
        String::from_utf8_lossy(&date).trim(),
        cores,
        model.unwrap_or("an unnamed processor"),
        kernel.trim()
    )
}
