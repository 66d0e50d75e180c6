//! The process: from a configuration to requests being served, and to the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use kvgate_core::{Alarms, Engines, Registry, Services, StateStore, TierKind};
use kvgate_edge::tls::Tls;
use kvgate_edge::{Edge, Listener, Opening, Refusal, h1};
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
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::admin::Admin;
use crate::budget::Budget;
use crate::config::{Config, GatewayConfig, ListenerConfig};
use crate::control::{Control, TICK};
use crate::explain::tokenizers;
use crate::facts::Prompts;
use crate::life::{self, Cycle, Inherited, Notifier, Signals, Stage};
use crate::plan::Plan;
use crate::proxy::Proxy;
use crate::relay::{Buffers, codes};
use crate::sockets::{Place, Sockets};
use crate::told::unique;
use crate::watch::Watch;
use crate::world::{CLIENT_GONE, Decisions, Reloads, Unrouted, World};

/// Stack of a thread, in bytes: a request that is split, retried and connected by TLS nests deeply, the more so unoptimised.
/// Pages that are never touched take no memory.
const STACK: usize = 8 << 20;
/// Idle connections to engines kept at most.
const IDLE_CONNECTIONS: usize = 512;

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

/// A process of the gateway's own, which follows its files, the process's signals and a service manager. To be made before
/// the configuration is read: no change that comes after is missed, and `SIGHUP` does not end it.
pub struct Process {
    control: Runtime,
    watch: Watch,
    inherited: Option<Inherited>,
}

impl Process {
    /// One whose configuration will be read from this file.
    ///
    /// # Errors
    /// In words: it has no threads, or signals cannot be received.
    pub fn new(file: &Path) -> Result<Self, String> {
        let control = control()?;
        let guard = control.enter();
        let watch = Watch::new(file).map_err(|e| format!("SIGHUP cannot be received: {e}"))?;
        drop(guard);
        Ok(Self { control, watch, inherited: None })
    }

    /// Waits for the listeners of the process that serves. The configuration may have changed meanwhile.
    ///
    /// # Errors
    /// In words: nobody hands them over.
    pub fn inherit(&mut self, gateway: &GatewayConfig) -> Result<(), String> {
        let path = gateway.server.upgrade_socket.as_deref();
        let path =
            path.ok_or("an upgrade wants `server.upgrade_socket`, the same as the process before has")?;
        let guard = self.control.enter();
        // whoever sends it to both means the other one
        let _quit = signal(SignalKind::quit()).map_err(|e| format!("SIGQUIT cannot be received: {e}"))?;
        drop(guard);
        tracing::info!(path = %path.display(), "listeners are awaited: send SIGQUIT to the process that serves");
        self.inherited = Some(Inherited::receive(path)?);
        Ok(())
    }
}

/// The threads beside those that serve.
fn control() -> Result<Runtime, String> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let builder = builder.worker_threads(2).thread_name("control").thread_stack_size(STACK).enable_all();
    builder.build().map_err(|e| format!("no threads to run on: {e}"))
}

/// Starts a gateway: everything is bound and in force when this returns. Without a process of its own it follows neither
/// files nor signals, and is ended by [`Running::stop`] alone.
///
/// # Errors
/// In words: what cannot be bound, built or started.
pub fn start(
    file: &Path,
    config: Config,
    kinds: &[TierKind],
    process: Option<Process>,
) -> Result<Running, String> {
    let gateway = config.gateway.clone();
    let (control, mut watch, mut inherited) = match process {
        Some(process) => (process.control, Some(process.watch), process.inherited),
        None => (control()?, None, None),
    };
    let own = watch.is_some();
    let sockets = Sockets::bind(&gateway, &mut inherited, &Place { file, kinds })?;
    let token = token(&gateway)?;
    let guard = control.enter();
    if own {
        life::raise_descriptors();
    }
    let world = Arc::new(world(&config)?);
    let mut controller = Control::new(world.clone(), file, kinds.to_vec());
    if !controller.apply(config) {
        return Err(world.reloads.problem().unwrap_or_default());
    }
    if let Some(watch) = watch.as_mut() {
        follow(watch, &controller);
    }
    let notifier = Arc::new(if own { Notifier::from_environment() } else { Notifier::default() });
    let (stop, stopped) = watch::channel(false);
    control.spawn(attend(controller, watch, notifier.clone(), stopped.clone()));
    if inherited.is_some() {
        // the process before serves meanwhile
        control.block_on(warm_up(&world, gateway.server.warm_up));
    }
    let signals =
        own.then(Signals::new).transpose().map_err(|e| format!("signals cannot be received: {e}"))?;
    let copies = sockets.copies().map_err(|e| format!("listeners cannot be copied: {e}"))?;
    let admin = tokio::net::TcpListener::from_std(sockets.admin).map_err(|e| format!("admin: {e}"))?;
    let admin = Admin::serve(admin, world.clone(), token);
    let cycle = |edge| Cycle {
        world: world.clone(),
        edge,
        sockets: copies,
        admin,
        notifier: notifier.clone(),
        stopped,
    };
    let server = serve(&gateway, &world, sockets.edge, signals, cycle)?;
    match inherited {
        Some(inherited) => {
            inherited.serving();
            notifier.ready();
        }
        None => {
            let (world, most) = (world.clone(), gateway.server.warm_up);
            control.spawn(async move {
                warm_up(&world, most).await;
                if world.life.stage() == Stage::Serving {
                    notifier.ready();
                }
            });
        }
    }
    drop(guard);
    Ok(Running { world, stop, server: Some(server), control: Some(control) })
}

/// Waits until it is known what engines hold, and says so.
async fn warm_up(world: &World, most: Duration) {
    life::warm(world, most).await;
    world.life.reach(Stage::Serving);
}

/// Watches the folders and files that the configuration in force names.
fn follow(watch: &mut Watch, control: &Control) {
    let server = control.gateway().server;
    watch.follow(&server.rules, &server.tokenizers, control.files(), server.reload_debounce);
}

/// Reloads when the files change, looks at the alarms every second, and shows the service manager that it does.
async fn attend(mut control: Control, mut watch: Option<Watch>, notifier: Arc<Notifier>, mut stopped: Stop) {
    let mut tick = tokio::time::interval(notifier.every().map_or(TICK, |every| every.min(TICK)));
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
                tracing::info!(%why, "reading the configuration");
                notifier.reloading();
                control.refresh_tokenizers();
                let good = tokio::task::block_in_place(|| control.reload_safely());
                notifier.reloaded(good);
                if let Some(watch) = watch.as_mut() {
                    follow(watch, &control);
                }
            }
            _ = tick.tick() => {
                notifier.alive();
                control.tick(Instant::now());
            }
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
        unrouted: Unrouted::new(&registry, codes::ALL.iter().map(|code| code.name).chain([CLIENT_GONE])),
        budget: Budget::default(),
        registry,
        alarms: Alarms::default(),
        services: Services::default().with::<Holdings>(plane.holdings()),
        plane,
        prompts: Prompts::new(tokenizers(config), bytes(gateway.tokenizer.inline_text), threads),
        connector: Connector::new(Some(ConnectorOptions::new(IDLE_CONNECTIONS))),
        buffers: Buffers::new(bytes(life::body_memory(gateway.server.body_memory))),
        feeds: ArcSwap::default(),
        scraping: Connector::new(None),
        telemetry: ArcSwap::default(),
        probes: ArcSwap::default(),
        plan: ArcSwap::from_pointee(Plan::empty(gateway.clone())),
        decisions: Decisions::new(gateway.decisions.keep, gateway.decisions.prompt_hashes),
        reloads: Reloads::default(),
        listeners: gateway.listeners.clone(),
        tls: listeners_tls(gateway)?,
        edge: Arc::new(kvgate_edge::Stats::new(gateway.listeners.iter().map(|l| l.name.as_str()))),
        life: Arc::default(),
    })
}

/// TLS of the listeners that have it, by name.
fn listeners_tls(gateway: &GatewayConfig) -> Result<BTreeMap<String, Arc<ArcSwap<Tls>>>, String> {
    let with = gateway.listeners.iter().filter_map(|listener| Some((listener, listener.tls.files()?)));
    let load = |(listener, files): (&ListenerConfig, _)| match Tls::load(&files) {
        Ok(tls) => Ok((listener.name.clone(), Arc::new(ArcSwap::from_pointee(tls)))),
        Err(problems) => {
            let problems: Vec<_> = problems.iter().map(ToString::to_string).collect();
            Err(format!("listener {}: {}", listener.name, problems.join("; ")))
        }
    };
    with.map(load).collect()
}

fn token(gateway: &GatewayConfig) -> Result<Option<String>, String> {
    let Some(file) = &gateway.admin.token_file else { return Ok(None) };
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    match text.trim() {
        "" => Err(format!("{}: the token is empty", file.display())),
        token => Ok(Some(token.to_owned())),
    }
}

/// The data plane, on a thread that ends with it.
fn serve(
    gateway: &GatewayConfig,
    world: &Arc<World>,
    mut listeners: Vec<Listener>,
    signals: Option<Signals>,
    cycle: impl FnOnce(Edge) -> Cycle,
) -> Result<std::thread::JoinHandle<()>, String> {
    let threads = match gateway.server.threads {
        0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        n => n,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name("data-plane")
        .thread_stack_size(STACK)
        .enable_all()
        .build()
        .map_err(|e| format!("no threads to serve on: {e}"))?;
    let conf =
        ServerConf { threads, upstream_keepalive_pool_size: IDLE_CONNECTIONS, ..ServerConf::default() };
    let refusing = world.clone();
    let refused = move |refusal: Refusal| {
        refusing.unrouted.count(refusal.code.name);
        format!("{:032x}", unique())
    };
    for (listener, config) in listeners.iter_mut().zip(&gateway.listeners) {
        let proxies = config.proxy_protocol.then(|| config.trusted_proxies.clone());
        listener.opening = Opening { proxies, tls: world.tls.get(&config.name).cloned() };
    }
    let app = Arc::new(http_proxy(&Arc::new(conf), Proxy::new(world.clone())));
    let guard = runtime.enter();
    let mut limits = edge_config(gateway);
    limits.connections = life::connections(limits.connections);
    let edge = Edge::start(app, listeners, limits, world.edge.clone(), Arc::new(refused))
        .map_err(|e| format!("the listeners cannot be served: {e}"))?;
    drop(guard);
    let cycle = cycle(edge);
    let run = move || {
        runtime.block_on(cycle.run(signals));
        runtime.shutdown_timeout(Duration::from_secs(1));
    };
    let thread = std::thread::Builder::new().name("data-plane".into()).spawn(run);
    thread.map_err(|e| format!("no thread to serve on: {e}"))
}

/// What connections may take up.
fn edge_config(gateway: &GatewayConfig) -> kvgate_edge::Config {
    let config = &gateway.connections;
    let http2 = &gateway.http2;
    let window = |bytes| u32::try_from(bytes).unwrap_or(u32::MAX);
    let bytes = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    kvgate_edge::Config {
        connections: config.max,
        connections_per_address: config.max_per_address,
        head: config.head_timeout,
        keep_alive: config.keep_alive,
        requests: h1::Limits { head: bytes(config.head), fields: config.fields, uri: bytes(config.uri) },
        http2: kvgate_edge::Http2 {
            streams: http2.streams,
            stream_window: window(http2.stream_window),
            connection_window: window(http2.connection_window),
            allowance: kvgate_edge::Allowance { control_frames: http2.control_frames, resets: http2.resets },
        },
    }
}
