//! The demo's engines and the gateway before them.

use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvgate_sim::{Role, Sim, SimConfig};

use super::DemoArgs;
use crate::run::{self, Running};
use crate::{Gateway, config};

/// Fewer than there are system prompts.
pub const POOL: &[Role] = &[Role::Any; 3];
/// Three for prompts, two for answers.
pub const PAIR: &[Role] = &[Role::Prefill, Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
pub const MODEL: &str = "tiny-qwen3";
/// What a prompt token that is not cached costs: a cold prompt some 150 ms more than a warm one, which the noise of a
/// busy machine does not hide.
const PREFILL_US: f64 = 200.0;
pub const ROUND_ROBIN: &str = "tiers = [\"round-robin\"]\n";
/// The ladder is the usual one.
pub const PREFILL_DECODE: &str = "shape = \"prefill-decode\"\n";

/// The tokenizer and chat template of Qwen3 (Alibaba Cloud, Apache License 2.0).
const FILES: [(&str, &[u8]); 2] = [
    ("tokenizer.json", include_bytes!("../../../../tests/fixtures/models/tiny-qwen3/tokenizer.json.gz")),
    (
        "tokenizer_config.json",
        include_bytes!("../../../../tests/fixtures/models/tiny-qwen3/tokenizer_config.json.gz"),
    ),
];

/// The rule's ladder under KV-aware routing.
pub fn kv_exact(args: &DemoArgs) -> String {
    let mut rule = "tiers = [\"kv-exact\"]\n".to_owned();
    if args.strict {
        rule.push_str(&format!(
            "[tier.kv-exact.contract]\nmode = \"strict\"\nalgorithm = \"sha256_cbor\"\nblock_size = 16\n\
             none_hash_seed = {:?}\n",
            args.none_hash_seed
        ));
    }
    rule
}

/// A folder of the demo's own, gone when this is dropped.
pub struct Stage(PathBuf);

impl Stage {
    /// With the model's tokenizer staged in it.
    pub fn new() -> Result<Self, String> {
        let stage = Self(std::env::temp_dir().join(format!("kvgate-demo-{}", std::process::id())));
        let model = stage.tokenizers().join(MODEL);
        make(&model)?;
        for (name, packed) in FILES {
            let mut bytes = Vec::new();
            let read = flate2::read::GzDecoder::new(packed).read_to_end(&mut bytes);
            read.and_then(|_| std::fs::write(model.join(name), bytes)).map_err(|e| format!("{name}: {e}"))?;
        }
        Ok(stage)
    }

    /// Removes it.
    pub fn remove(&self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }

    fn tokenizers(&self) -> PathBuf {
        self.0.join("tokenizers")
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.remove();
    }
}

fn make(folder: &Path) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))
}

/// Engines and a gateway.
pub struct Fleet {
    pub engines: Vec<Sim>,
    pub gateway: SocketAddr,
    pub admin: SocketAddr,
    running: Running,
}

impl Fleet {
    /// Starts fresh engines of these roles and a gateway that routes by this ladder, and waits until it follows their
    /// events.
    pub async fn start(stage: &Stage, ladder: &str, roles: &[Role]) -> Result<Self, String> {
        let config = SimConfig {
            models: vec![MODEL.into()],
            tokenizers: stage.tokenizers(),
            none_hash_seed: Some("0".into()),
            cache_blocks: 600,
            prefill_us: PREFILL_US,
            decode_us: 1_000.0,
            ..SimConfig::default()
        };
        let model = kvgate_sim::load(&config).await.map_err(|e| e.to_string())?;
        let mut engines = Vec::new();
        for role in roles {
            let config = SimConfig { role: *role, ..config.clone() };
            let engine = Sim::with_model(config, model.clone()).await;
            engines.push(engine.map_err(|e| e.to_string())?);
        }
        let [gateway, admin] = free_ports()?;
        let file = write(stage, ladder, &engines, gateway, admin)?;
        let kinds = Gateway::new().kinds().to_vec();
        let started = tokio::task::spawn_blocking(move || {
            let config = config::load(&file, &kinds).map_err(|e| e.to_string())?;
            run::start(&file, config, &kinds, None)
        });
        let running = started.await.map_err(|e| e.to_string())??;
        let fleet = Self { engines, gateway, admin, running };
        fleet.ready().await?;
        Ok(fleet)
    }

    /// Waits for the tokenizer, and for every feed.
    async fn ready(&self) -> Result<(), String> {
        let until = tokio::time::Instant::now() + Duration::from_secs(30);
        loop {
            let world = &self.running.world;
            let feeds = world.feeds.load();
            let connected = feeds.values().all(|status| status.connected.get());
            let held = world.prompts.tokenizers().held();
            let loaded = held.iter().all(|(_, state)| matches!(state, kvgate_prompt::State::Ready(_)));
            if connected && loaded {
                return Ok(());
            }
            if tokio::time::Instant::now() > until {
                return Err("the gateway does not get to follow the engines".into());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Ends all of it.
    pub async fn stop(self) {
        let running = self.running;
        let _ = tokio::task::spawn_blocking(move || running.stop()).await;
        for engine in self.engines {
            engine.stop().await;
        }
    }
}

/// Two addresses that nobody listens on.
fn free_ports() -> Result<[SocketAddr; 2], String> {
    let bind = || TcpListener::bind("127.0.0.1:0").and_then(|l| Ok((l.local_addr()?, l)));
    // both are held until both are known
    let both = bind().and_then(|one| Ok((one, bind()?)));
    let ((one, _held), (other, _held_too)) = both.map_err(|e| format!("no free port: {e}"))?;
    Ok([one, other])
}

fn write(
    stage: &Stage,
    ladder: &str,
    engines: &[Sim],
    gateway: SocketAddr,
    admin: SocketAddr,
) -> Result<PathBuf, String> {
    let folder = stage.0.join(format!("conf-{}", gateway.port()));
    make(&folder.join("rules"))?;
    let mut rule = format!("name = \"demo\"\n{ladder}");
    // keys of the top come before tables
    let tables = rule.find("[tier").map(|at| rule.split_off(at)).unwrap_or_default();
    rule.push_str(&format!("explain = true\n{tables}[match]\nmodels = [{MODEL:?}]\n"));
    for engine in engines {
        let role = match engine.config().role {
            Role::Any => "any",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        };
        rule.push_str(&format!("[[endpoint]]\naddress = \"{}\"\nrole = {role:?}\n", engine.address()));
        if let (Some(events), Some(replay)) = (engine.events_endpoint(), engine.replay_endpoint()) {
            rule.push_str(&format!("kv_events = {events:?}\nkv_replay = {replay:?}\n"));
        }
    }
    let process = format!(
        "[server]\ntokenizers = {:?}\n[[listener]]\naddress = \"{gateway}\"\nexpose_routing = true\n\
         [admin]\naddress = \"{admin}\"\n[timeouts]\nprepare = \"5s\"\n",
        stage.tokenizers()
    );
    let file = folder.join("gateway.toml");
    for (path, text) in [(&file, process), (&folder.join("rules/demo.toml"), rule)] {
        std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(file)
}
