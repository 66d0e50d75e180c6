//! `kvgate demo`: what KV-aware routing is worth, seen on a laptop.
//!
//! Three simulated engines, and a gateway before them that is the real one, reading real files, following real KV
//! events. The same conversations, in the same order, are led twice on fresh engines: routed by `kv-exact`, then by
//! `round-robin`. One request at a time, so that nothing but the routing differs, and a busy machine changes nothing.
//!
//! With `--shape prefill-decode`: five engines, three for prompts and two for answers, and requests of which every tier
//! of the ladder gets some.

mod client;
mod fleet;
mod pair;
mod talk;
mod tell;

use std::sync::Arc;

use clap::{Args, ValueEnum};
use kvgate_sim::{Sim, SimConfig};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::console::{print, tell};
use fleet::{Fleet, Stage};
use talk::Talk;

/// How much more kv-exact must hit than round-robin does for the demo to be won.
const FACTOR: f64 = 1.5;

/// What to show.
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// What the rule is: a pool, or pairs of endpoints for prefill and decode.
    #[arg(long, value_enum, default_value = "pool")]
    shape: Shape,
    /// Prints the result as JSON and nothing else.
    #[arg(long)]
    json: bool,
    /// Leaves the engines and the gateway running for requests of your own, until Ctrl-C or SIGTERM.
    #[arg(long)]
    serve: bool,
    /// Has the gateway compare the engines' own hashes, by a strict contract.
    #[arg(long, conflicts_with = "shape")]
    strict: bool,
    /// What the gateway takes for the engines' PYTHONHASHSEED under --strict; the engines' is "0".
    #[arg(long, value_name = "SEED", default_value = "0", requires = "strict")]
    none_hash_seed: String,
}

/// The shape of the demo's rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Shape {
    /// Every engine does everything.
    Pool,
    /// One for the prompt, another for the answer.
    PrefillDecode,
}

/// The engine to simulate.
#[derive(Debug, Clone, Args)]
pub struct SimArgs {
    #[command(flatten)]
    sim: SimConfig,
}

/// How the policies did.
pub struct Shown {
    /// By kv-exact.
    pub exact: Talk,
    /// By round robin.
    pub robin: Talk,
}

impl Shown {
    /// KV-aware routing hits at least [`FACTOR`] times as much, and answers sooner, and nothing failed.
    fn is_won(&self) -> bool {
        self.exact.errors + self.robin.errors == 0
            && self.exact.hit_rate() >= FACTOR * self.robin.hit_rate()
            && self.exact.hit_rate() > 0.0
            && self.exact.ttft_ms(50) < self.robin.ttft_ms(50)
    }
}

/// Runs the demo; whether KV-aware routing won it.
///
/// # Errors
/// In words, when something cannot be started.
pub fn demo(args: &DemoArgs) -> Result<bool, String> {
    let runtime = runtime()?;
    let mut end = runtime.block_on(End::listen())?;
    let stage = Arc::new(Stage::new()?);
    if !args.json {
        print(if args.shape == Shape::Pool { tell::OPENING } else { pair::OPENING })?;
    }
    let show = runtime.spawn(show(args.clone(), stage.clone()));
    let shown = runtime.block_on(async {
        tokio::select! {
            shown = show => Some(shown),
            () = end.told() => None,
        }
    });
    let Some(shown) = shown else {
        // what is under way is not waited for: it ends with the process
        stage.remove();
        runtime.shutdown_background();
        return Err("ended before there was a result".into());
    };
    let (result, won, fleet) = shown.map_err(|e| e.to_string())??;
    print(&result)?;
    if args.serve {
        let addresses = tell::serving(&fleet, args.shape == Shape::PrefillDecode);
        if args.json {
            tell(&addresses);
        } else {
            print(&addresses)?;
        }
        runtime.block_on(end.told());
    }
    runtime.block_on(fleet.stop());
    Ok(won)
}

/// What is to be told, whether the demo is won, and a fleet that still runs.
async fn show(args: DemoArgs, stage: Arc<Stage>) -> Result<(String, bool, Fleet), String> {
    if args.shape == Shape::PrefillDecode {
        let fleet = Fleet::start(&stage, fleet::PREFILL_DECODE, fleet::PAIR).await?;
        let shown = pair::lead(&fleet).await;
        let result = if args.json { shown.json().to_string() } else { shown.text() };
        return Ok((result, shown.is_won(), fleet));
    }
    let exact = Fleet::start(&stage, &fleet::kv_exact(&args), fleet::POOL).await?;
    let by_exact = talk::lead(&exact).await;
    let robin = Fleet::start(&stage, fleet::ROUND_ROBIN, fleet::POOL).await?;
    let by_robin = talk::lead(&robin).await;
    robin.stop().await;
    let shown = Shown { exact: by_exact, robin: by_robin };
    let won = shown.is_won();
    let result = if args.json { tell::json(&shown).to_string() } else { tell::text(&shown, won) };
    Ok((result, won, exact))
}

/// Runs one simulated engine until it is told to end.
///
/// # Errors
/// In words, when it cannot be started.
pub fn sim(args: &SimArgs) -> Result<bool, String> {
    runtime()?.block_on(async {
        let mut end = End::listen().await?;
        let sim = Sim::start(args.sim.clone()).await.map_err(|e| e.to_string())?;
        let mut addresses = format!("engine http://{}", sim.address());
        if let (Some(events), Some(replay)) = (sim.events_endpoint(), sim.replay_endpoint()) {
            addresses.push_str(&format!("\nevents {events}\nreplay {replay}"));
        }
        print(&addresses)?;
        end.told().await;
        sim.stop().await;
        Ok(true)
    })
}

fn runtime() -> Result<Runtime, String> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.enable_all().build().map_err(|e| format!("no threads to run on: {e}"))
}

/// Ctrl-C and SIGTERM, which end the process no more by themselves once this listens.
struct End {
    interrupt: Signal,
    terminate: Signal,
}

impl End {
    async fn listen() -> Result<Self, String> {
        let listen = |kind| signal(kind).map_err(|e| format!("signals cannot be received: {e}"));
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// Waits for one of them.
    async fn told(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
