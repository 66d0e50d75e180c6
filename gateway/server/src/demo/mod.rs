//! `kvgate demo`: what KV-aware routing is worth, seen on a laptop.
//!
//! Three simulated engines, and a gateway before them that is the real one, reading real files, following real KV
//! events. The same conversations, in the same order and as many at a time, are led twice on fresh engines: routed
//! by `kv-exact`, then by `round-robin`.

mod client;
mod fleet;
mod talk;
mod tell;

use clap::Args;
use kvgate_sim::{Sim, SimConfig};

use fleet::Fleet;
use talk::Talk;

/// How much more kv-exact must hit than round-robin does for the demo to be won.
const FACTOR: f64 = 1.5;

/// What to show.
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Prints the result as JSON and nothing else.
    #[arg(long)]
    json: bool,
    /// Leaves the engines and the gateway running for requests of your own, until Ctrl-C.
    #[arg(long)]
    serve: bool,
    /// Has the gateway compare the engines' own hashes, by a strict contract.
    #[arg(long)]
    strict: bool,
    /// What the gateway takes for the engines' PYTHONHASHSEED under --strict; the engines' is "0".
    #[arg(long, value_name = "SEED", default_value = "0", requires = "strict")]
    none_hash_seed: String,
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
    runtime.block_on(async {
        let stage = fleet::Stage::new()?;
        let say = |text: &str| {
            if !args.json {
                println!("{text}");
            }
        };
        say(tell::OPENING);
        let exact = Fleet::start(&stage, &fleet::kv_exact(args)).await?;
        let shown = Shown {
            exact: talk::lead(&exact).await,
            robin: {
                let robin = Fleet::start(&stage, fleet::ROUND_ROBIN).await?;
                let talk = talk::lead(&robin).await;
                robin.stop().await;
                talk
            },
        };
        let won = shown.is_won();
        if args.json {
            println!("{}", tell::json(&shown));
        } else {
            println!("{}", tell::text(&shown, won));
        }
        if args.serve {
            say(&tell::serving(&exact));
            let _ = tokio::signal::ctrl_c().await;
        }
        exact.stop().await;
        Ok(won)
    })
}

/// Runs one simulated engine until Ctrl-C.
///
/// # Errors
/// In words, when it cannot be started.
pub fn sim(args: &SimArgs) -> Result<bool, String> {
    runtime()?.block_on(async {
        let sim = Sim::start(args.sim.clone()).await.map_err(|e| e.to_string())?;
        println!("engine http://{}", sim.address());
        if let (Some(events), Some(replay)) = (sim.events_endpoint(), sim.replay_endpoint()) {
            println!("events {events}\nreplay {replay}");
        }
        let _ = tokio::signal::ctrl_c().await;
        sim.stop().await;
        Ok(true)
    })
}

fn runtime() -> Result<tokio::runtime::Runtime, String> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.enable_all().build().map_err(|e| format!("no threads to run on: {e}"))
}
