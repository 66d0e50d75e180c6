//! The process: from a configuration to requests being served, and to the end.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use kvgate_core::{Alarms, Engines, Registry, Services, StateStore, TierKind};
use kvgate_edge::{Edge, Listener};
use kvgate_feed::plane::{Plane, PlaneConfig};
use kvgate_feed::zmtp::Backoff;
use kvgate_kv::holdings::Holdings;
use kvgate_kv::inventory;
use kvgate_tiers::kv_exact;
use pingora_core::connectors::ConnectorOptions;
use pingora_core::connectors::http::Connector;
use pingora_core::server::configuration::ServerConf;
use pingora_proxy::http_proxy;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::admin;
use crate::budget::Budget;
use crate::config::{Config, GatewayConfig, ListenerConfig};
use crate::control::{Control, TICK};
use crate::explain::tokenizers;
use crate::facts::Prompts;
use crate::plan::Plan;
use crate::proxy::Proxy;
use crate::relay::{Buffers, Code};
use crate::watch::Watch;
use crate::world::{CLIENT_GONE, Decisions, Reloads, Unrouted, World};

/// Idle connections to engines kept at most.
const IDLE_CONNECTIONS: usize = 512;
/// Connections that wait to be accepted, at most.
const BACKLOG: u32 = 1024;

/// How the process is told to stop: dropped or set to true.
pub type Stop = watch::Receiver<bool>;

/// A gateway that is serving, in threads of its own.
pub struct Running {
    /// Its world.
    pub world: Arc<World>,
    stop: watch::Sender<bool>,
    server: Option<std::thread::JoinHandle<()>>,
    /// What runs beside the requests; `None` once it was told to end.
    control: Option<Runtime>,
}

impl Running {
    /// Ends it: at once for whoever is still being served.
    pub fn stop(mut self) {
        self.end();
        drop(self.control.take());
    }

    /// Waits until it ends by a signal.
    pub fn wait(mut self) {
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }

    fn end(&mut self) {
        let _ = self.stop.send(true);
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
        if let Some(control) = self.control.take() {
            // where this is dropped may be a place that must not wait for a runtime
            control.shutdown_background();
        }
    }
}

/// Starts a gateway: everything is bound and in force when this returns. With `signals` it follows its files and
/// the process's signals; without, only [`Running::stop`] ends it.
///
/// # Errors
/// In words: what cannot be bound, built or started.
pub fn start(file: &Path, config: Config, kinds: &[TierKind], signals: bool) -> Result<Running, String> {
    let gateway = config.gateway.clone();
    let listeners = bind(&gateway)?;
    let control = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("control")
        .enable_all()
        .build()
        .map_err(|e| format!("no threads to run on: {e}"))?;
    let token = token(&gateway)?;
    let guard = control.enter();
    // first of all: without it SIGHUP ends the process
    let mut watch = signals
        .then(|| Watch::new(file))
        .transpose()
        .map_err(|e| format!("SIGHUP cannot be received: {e}"))?;
    let world = Arc::new(world(&config)?);
    let mut controller = Control::new(world.clone(), file, kinds.to_vec());
    if !controller.apply(config) {
        return Err(world.reloads.problem().unwrap_or_default());
    }
    let admin = control
        .block_on(admin::bind(gateway.admin.address))
        .map_err(|e| format!("admin at {}: {e}", gateway.admin.address))?;
    let (stop, stopped) = watch::channel(false);
    if let Some(watch) = watch.as_mut() {
        follow(watch, &gateway);
    }
    control.spawn(attend(controller, watch, stopped.clone()));
    drop(guard);
    let shutdown = Shutdown { stopped, signals, grace: gateway.server.grace_period, world: world.clone() };
    let server = serve(&gateway, world.clone(), listeners, shutdown)?;
    // whoever asks before is answered when requests are
    control.spawn(admin::serve(admin, world.clone(), token));
    Ok(Running { world, stop, server: Some(server), control: Some(control) })
}

/// Watches the folders that a configuration names.
fn follow(watch: &mut Watch, gateway: &GatewayConfig) {
    let server = &gateway.server;
    watch.follow(&server.rules, &server.tokenizers, server.reload_debounce);
}

/// Reloads when the files change, and looks at the alarms every second.
async fn attend(mut control: Control, mut watch: Option<Watch>, mut stopped: Stop) {
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let request = async {
            match watch.as_mut() {
                Some(watch) => watch.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            why = request => {
                tracing::info!(?why, "reading the configuration");
                control.refresh_tokenizers();
                tokio::task::block_in_place(|| control.reload_safely());
                if let Some(watch) = watch.as_mut() {
                    follow(watch, &control.gateway());
                }
            }
            _ = tick.tick() => control.tick(Instant::now()),
            _ = stopped.wait_for(|stop| *stop) => return,
        }
    }
}

fn world(config: &Config) -> Result<World, String> {
    let gateway = &config.gateway;
    let bytes = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let plane = Plane::start(PlaneConfig {
        inventory: inventory::Config {
            max_caches: gateway.inventory.max_caches,
            max_orphans: gateway.inventory.max_orphans,
        },
        backoff: Backoff { first: gateway.feed.backoff_min, max: gateway.feed.backoff_max },
        queue_bytes: u32::try_from(gateway.feed.queue).unwrap_or(u32::MAX),
        ..PlaneConfig::default()
    })
    .map_err(|e| format!("the event plane cannot start: {e}"))?;
    let registry = Registry::default();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Ok(World {
        engines: Engines::default(),
        store: StateStore::default(),
        kv_misses: kv_exact::Misses::new(&registry),
        unrouted: Unrouted::new(&registry, Code::ALL.iter().map(|code| code.name).chain([CLIENT_GONE])),
        budget: Budget::default(),
        registry,
        alarms: Alarms::default(),
        services: Services::default().with::<Holdings>(plane.holdings()),
        plane,
        prompts: Prompts::new(tokenizers(config), bytes(gateway.tokenizer.inline_text), threads),
        connector: Connector::new(Some(ConnectorOptions::new(IDLE_CONNECTIONS))),
        buffers: Buffers::new(bytes(gateway.server.body_memory)),
        feeds: ArcSwap::default(),
        scraping: Connector::new(None),
        telemetry: ArcSwap::default(),
        plan: ArcSwap::from_pointee(Plan::empty(gateway.clone())),
        decisions: Decisions::new(gateway.decisions.keep, gateway.decisions.prompt_hashes),
        reloads: Reloads::default(),
        listeners: gateway.listeners.clone(),
        edge: Arc::new(kvgate_edge::Stats::new(gateway.listeners.iter().map(|l| l.name.as_str()))),
        requests: AtomicU64::new(0),
        draining: AtomicBool::new(false),
    })
}

fn token(gateway: &GatewayConfig) -> Result<Option<String>, String> {
    let Some(file) = &gateway.admin.token_file else { return Ok(None) };
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    match text.trim() {
        "" => Err(format!("{}: the token is empty", file.display())),
        token => Ok(Some(token.to_owned())),
    }
}

/// Binds every listener, before anything else is started.
fn bind(gateway: &GatewayConfig) -> Result<Vec<Listener>, String> {
    let bind = |listener: &ListenerConfig| {
        let socket = kvgate_edge::bind(listener.address, BACKLOG)
            .map_err(|e| format!("listener {} at {}: {e}", listener.name, listener.address))?;
        Ok(Listener { name: listener.name.clone(), socket })
    };
    gateway.listeners.iter().map(bind).collect()
}

/// The data plane, on a thread that ends with it.
fn serve(
    gateway: &GatewayConfig,
    world: Arc<World>,
    listeners: Vec<Listener>,
    shutdown: Shutdown,
) -> Result<std::thread::JoinHandle<()>, String> {
    let threads = match gateway.server.threads {
        0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        n => n,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name("data-plane")
        .enable_all()
        .build()
        .map_err(|e| format!("no threads to serve on: {e}"))?;
    let conf =
        ServerConf { threads, upstream_keepalive_pool_size: IDLE_CONNECTIONS, ..ServerConf::default() };
    let stats = world.edge.clone();
    let app = Arc::new(http_proxy(&Arc::new(conf), Proxy::new(world)));
    let guard = runtime.enter();
    let edge = Edge::start(app, listeners, edge_config(), stats)
        .map_err(|e| format!("the listeners cannot be served: {e}"))?;
    drop(guard);
    let run = move || {
        runtime.block_on(shutdown.told());
        edge.stop_accepting();
        runtime.shutdown_timeout(Duration::from_secs(1));
    };
    let thread = std::thread::Builder::new().name("data-plane".into()).spawn(run);
    thread.map_err(|e| format!("no thread to serve on: {e}"))
}

/// What connections may take up.
fn edge_config() -> kvgate_edge::Config {
    kvgate_edge::Config {
        connections: 16_384,
        connections_per_address: 4_096,
        head: Duration::from_secs(10),
        keep_alive: Duration::from_secs(60),
    }
}

/// Ends the data plane: SIGINT at once; SIGTERM when nobody is being served any more, or the grace period is over.
struct Shutdown {
    stopped: Stop,
    signals: bool,
    grace: Duration,
    world: Arc<World>,
}

impl Shutdown {
    /// Waits until the data plane is to end.
    async fn told(self) {
        use tokio::signal::unix::{SignalKind, signal};
        let mut stopped = self.stopped.clone();
        let told = async move {
            let _ = stopped.wait_for(|stop| *stop).await;
        };
        if !self.signals {
            return told.await;
        }
        let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
        else {
            tracing::error!("signals cannot be received");
            return told.await;
        };
        tokio::select! {
            () = told => return,
            _ = int.recv() => return,
            _ = term.recv() => {}
        }
        self.world.draining.store(true, Ordering::Release);
        tracing::info!(grace = ?self.grace, "told to stop: waiting for the requests under way");
        let until = tokio::time::Instant::now() + self.grace;
        while self.world.requests.load(Ordering::Acquire) > 0 && tokio::time::Instant::now() < until {
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(20)) => {}
                _ = int.recv() => break,
            }
        }
        let cut = self.world.requests.load(Ordering::Acquire);
        if cut > 0 {
            tracing::warn!(requests = cut, "the grace period is over: requests under way are cut");
        }
    }
}
