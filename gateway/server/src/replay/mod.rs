//! `kvgate replay`: what a policy would have made of a trace of requests.
//!
//! The ladder, its tiers, the inventory and the leases are the gateway's own; the engines are
//! [`kvgate_sim::clocked`]'s, and time is virtual: an hour of requests takes seconds, and comes out the same each time.

mod drive;
mod policy;
mod report;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use kvgate_core::TierKind;
use kvgate_sim::clocked::Model;
use kvgate_sim::trace::{Answer, Asked, Trace};

use crate::console::print;
use policy::Policy;

/// The most engines of the built-in fleet.
const MAX_ENGINES: i64 = 300;

/// What to replay.
#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    /// The trace: JSON lines of Mooncake's form, or decision records of the gateway, from its log or from /decisions.
    trace: PathBuf,
    /// A rule to replay it with, in place of the built-in policies: its file, or its name in the configuration.
    #[arg(long, value_name = "RULE")]
    rule: Option<String>,
    /// A second rule, to compare with.
    #[arg(long, value_name = "RULE", requires = "rule")]
    against: Option<String>,
    /// The configuration in which rules are looked up by name.
    #[arg(long, value_name = "FILE", default_value = "conf/gateway.toml")]
    config: PathBuf,
    #[command(flatten)]
    fleet: FleetArgs,
    /// Seeds what tiers draw at random: same seed, same result.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Prints a JSON line for each policy and nothing else.
    #[arg(long)]
    json: bool,
}

/// The simulated engines.
#[derive(Debug, Clone, Args)]
pub struct FleetArgs {
    /// Engines of the built-in policies; a rule has its own endpoints.
    #[arg(long, default_value_t = 8, conflicts_with = "rule", value_parser = clap::value_parser!(u16).range(1..=MAX_ENGINES))]
    engines: u16,
    /// Blocks of each engine's cache, of 16 tokens each.
    #[arg(long, default_value_t = 40_000, value_parser = clap::value_parser!(u32).range(2..=10_000_000))]
    blocks: u32,
    /// Prompt tokens that an engine computes in a second, one prompt after the other.
    #[arg(long, value_name = "TOKENS", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    prefill_rate: u32,
    /// Prompt tokens of one step: what a step computes is held, and announced, at its end.
    #[arg(long, value_name = "TOKENS", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    step_tokens: u32,
    /// Tokens of an answer generated in a second, beside all else.
    #[arg(long, value_name = "TOKENS", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    decode_rate: u32,
    /// Milliseconds until the gateway has heard of what an engine holds.
    #[arg(long, value_name = "MS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    event_delay: u64,
}

/// How requests are served, the same for every policy.
#[derive(Debug, Clone, Copy)]
struct Setting {
    engine: Model,
    decode_rate: u32,
    event_delay: Duration,
    seed: u64,
}

impl Setting {
    fn new(args: &ReplayArgs) -> Self {
        let fleet = &args.fleet;
        let engine = Model {
            blocks: fleet.blocks as usize,
            prefill_rate: f64::from(fleet.prefill_rate),
            step_tokens: fleet.step_tokens as usize,
        };
        let event_delay = Duration::from_millis(fleet.event_delay);
        Self { engine, decode_rate: fleet.decode_rate, event_delay, seed: args.seed }
    }

    /// Tokens of the answer, and how long it takes after the first of them.
    fn answer(&self, asked: &Asked) -> (usize, Duration) {
        let rate = f64::from(self.decode_rate);
        match asked.answer {
            Answer::Tokens(tokens) => {
                let after = Duration::try_from_secs_f64(tokens.saturating_sub(1) as f64 / rate);
                (usize::try_from(tokens).unwrap_or(usize::MAX), after.unwrap_or(Duration::MAX))
            }
            Answer::Took(took) => ((took.as_secs_f64() * rate) as usize + 1, took),
        }
    }

    fn fits(&self, asked: &Asked) -> bool {
        self.engine.fits(asked.prompt.len().saturating_add(self.answer(asked).0))
    }
}

/// Replays a trace.
///
/// # Errors
/// In words, when the trace or a rule cannot be read, or a tier does what cannot be replayed.
pub fn replay(args: &ReplayArgs, kinds: &[TierKind]) -> Result<bool, String> {
    let setting = Setting::new(args);
    let policies = match &args.rule {
        Some(rule) => policy::of_rules(rule, args.against.as_deref(), &args.config, kinds)?,
        None => policy::built_in(args.fleet.engines, kinds)?,
    };
    let mut trace = read(&args.trace)?;
    let all = trace.requests.len();
    trace.requests.retain(|asked| setting.fits(asked));
    let too_long = all - trace.requests.len();
    if trace.requests.is_empty() {
        return Err(format!(
            "{}: no request fits a cache of {} blocks",
            args.trace.display(),
            args.fleet.blocks
        ));
    }
    if !args.json {
        print(&report::head(&trace, too_long, &setting, &policies))?;
    }
    let results = run_all(&policies, &trace, &setting)?;
    print(&if args.json { report::json(&results) } else { report::table(&results) })?;
    Ok(true)
}

/// How a gzip file begins (RFC 1952).
const GZIP: &[u8] = &[0x1f, 0x8b];

fn read(path: &Path) -> Result<Trace, String> {
    let name = path.display().to_string();
    let file = File::open(path).map_err(|e| format!("{name}: {e}"))?;
    let mut lines = BufReader::new(file);
    if lines.fill_buf().is_ok_and(|start| start.starts_with(GZIP)) {
        return Err(format!("{name}: is compressed: gunzip it first"));
    }
    Trace::read(&name, lines).map_err(|e| e.to_string())
}

/// Policies side by side, as many at a time as there are cores; the results in their order.
fn run_all(policies: &[Policy], trace: &Trace, setting: &Setting) -> Result<Vec<report::Row>, String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut rows = Vec::new();
    for some in policies.chunks(cores) {
        let done: Result<Vec<_>, String> = std::thread::scope(|scope| {
            let start = |policy| scope.spawn(move || drive::run(policy, trace, setting));
            let running: Vec<_> = some.iter().map(start).collect();
            let panicked = |_| Err("a policy panicked".to_owned());
            running.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
        });
        rows.extend(some.iter().zip(done?).map(|(policy, seen)| report::Row::new(&policy.name, &seen)));
    }
    Ok(rows)
}
