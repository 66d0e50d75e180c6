//! The gateway under test: choose round robin, relay, count. Request fields beginning with `x-` set its limits.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use http::header;
use kvgate::relay::{
    Answer, Body, BodyLimits, Buffers, Code, Deadlines, Ending, Failure, HostPolicy, Leg, LegError, Limits,
    Refusals, Relayed, Route, Side, Sink, answer, codes, lint, read, serve, tell, to_engine,
};
use kvgate_core::{Engine as Claimed, Engines, Identity, Lease, Outcome, Role};
use kvgate_engines::stream::Dialect;
use pingora_core::apps::{HttpServerOptions, ServerApp};
use pingora_core::connectors::ConnectorOptions;
use pingora_core::connectors::http::Connector;
use pingora_core::protocols::ALPN;
use pingora_core::protocols::http::ServerSession;
use pingora_core::server::configuration::ServerConf;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_core::{Error, ErrorType};
use pingora_http::{RequestHeader, ResponseHeader};
use pingora_proxy::{FailToProxy, ProxyHttp, Session, http_proxy};
use std::sync::Mutex;
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::{Engine, until};

pub const MAX_BODY: usize = 32 << 20;
const STREAMS: usize = 100;
const WINDOW: u32 = 256 << 10;

/// The gateway, and two engines. Engines 0 and 1 of the gateway are they by h1, 2 and 3 the same by h2c; 4 refuses
/// connections.
pub struct Gateway {
    pub address: SocketAddr,
    pub engines: [Arc<Engine>; 2],
    pub state: Arc<State>,
    _stop: tokio::sync::watch::Sender<bool>,
}

pub struct State {
    fleet: Vec<(Arc<Claimed>, HttpPeer)>,
    next: AtomicUsize,
    connector: Connector,
    pub buffers: Buffers,
    pub outcomes: Mutex<Vec<Outcome>>,
    pub counts: Counts,
}

#[derive(Default)]
pub struct Counts {
    pub logged: AtomicUsize,
    pub served: AtomicUsize,
    pub gone: AtomicUsize,
    pub told: AtomicUsize,
    pub unfinished: AtomicUsize,
}

impl Gateway {
    pub async fn start() -> Self {
        Self::with_buffers(64 << 20).await
    }

    /// With so many bytes for request bodies.
    pub async fn with_buffers(buffers: usize) -> Self {
        let engines = [Engine::start().await, Engine::start().await];
        let refusing = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let [a, b] = [&engines[0], &engines[1]].map(|e| e.address);
        let peers = vec![peer(a, false), peer(b, false), peer(a, true), peer(b, true), peer(refusing, false)];
        let (address, state, stop) = start(peers, buffers).await;
        Self { address, engines, state, _stop: stop }
    }

    /// Scripts a path on both engines.
    pub fn on<F>(&self, path: &str, script: F)
    where
        F: for<'a> Fn(&'a mut super::Call) -> futures::future::BoxFuture<'a, std::io::Result<()>>
            + Clone
            + Send
            + Sync
            + 'static,
    {
        for engine in &self.engines {
            engine.on(path, script.clone());
        }
    }

    /// Waits until nothing is in flight.
    pub async fn drained(&self) {
        until("all leases ended", || self.in_flight() == 0).await;
    }

    pub fn in_flight(&self) -> u64 {
        self.state.in_flight()
    }

    /// Waits until so many requests are over in all, and thus counted: clients have their answers a little sooner.
    pub async fn settled(&self, requests: usize) {
        until("all requests are over", || self.count(|c| &c.logged) == requests).await;
    }

    /// How the last `n` attempts ended; waits for them.
    pub async fn outcomes(&self, n: usize) -> Vec<Outcome> {
        until("all attempts ended", || self.state.outcomes.lock().unwrap().len() >= n).await;
        std::mem::take(&mut *self.state.outcomes.lock().unwrap())
    }

    pub fn count(&self, which: impl Fn(&Counts) -> &AtomicUsize) -> usize {
        which(&self.state.counts).load(Ordering::SeqCst)
    }
}

/// A gateway in front of these peers.
pub async fn start(
    peers: Vec<HttpPeer>,
    buffers: usize,
) -> (SocketAddr, Arc<State>, tokio::sync::watch::Sender<bool>) {
    let known = Engines::default();
    let fleet = peers
        .into_iter()
        .enumerate()
        .map(|(i, peer)| (known.get(&Identity { address: format!("{i}"), tls: None }), peer));
    let state = Arc::new(State {
        fleet: fleet.collect(),
        next: AtomicUsize::new(0),
        connector: Connector::new(Some(ConnectorOptions::new(512))),
        buffers: Buffers::new(buffers),
        outcomes: Mutex::default(),
        counts: Counts::default(),
    });
    let mut proxy = http_proxy(&Arc::new(ServerConf::default()), Proxy(state.clone()));
    let mut options = HttpServerOptions::default();
    options.h2c = true;
    proxy.server_options = Some(options);
    let proxy = Arc::new(proxy);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (proxy, stopped) = (proxy.clone(), stopped.clone());
            let _ = stream.set_nodelay(true);
            tokio::spawn(async move {
                let mut stream: pingora_core::protocols::Stream =
                    Box::new(pingora_core::protocols::l4::stream::Stream::from(stream));
                while let Some(again) = proxy.process_new(stream, &stopped).await {
                    stream = again;
                }
            });
        }
    });
    (address, state, stop)
}

pub fn peer(address: SocketAddr, h2: bool) -> HttpPeer {
    let mut peer = HttpPeer::new(address, false, String::new());
    if h2 {
        peer.options.alpn = ALPN::H2;
        // By default one stream may use up the connection's window: two stalled clients stall all others.
        peer.options.max_h2_streams = STREAMS;
        peer.options.h2_stream_window_size = Some(WINDOW);
        peer.options.h2_connection_window_size = Some(WINDOW * STREAMS as u32);
    }
    peer
}

impl State {
    pub fn in_flight(&self) -> u64 {
        self.fleet.iter().map(|(engine, _)| engine.in_flight()).sum()
    }
}

/// Round robin from a first engine, without those tried.
struct RoundRobin<'a> {
    state: &'a State,
    first: usize,
    tried: Vec<usize>,
    current: Option<(usize, Lease)>,
    /// Never chooses, as if all places were taken.
    hold: bool,
}

impl RoundRobin<'_> {
    fn end(&mut self, outcome: Outcome) {
        if let Some((_, lease)) = self.current.take() {
            lease.end(outcome);
            self.state.outcomes.lock().unwrap().push(outcome);
        }
    }
}

impl Route for RoundRobin<'_> {
    type Refused = ();

    async fn choose(&mut self) -> Result<HttpPeer, ()> {
        if self.hold {
            // who waits in a queue holds a place in it, which the tests see given back
            let _place = Lease::try_take(&self.state.fleet[0].0, None);
            return std::future::pending().await;
        }
        let n = self.state.fleet.len();
        let free = (0..n).map(|i| (self.first + i) % n).find(|i| !self.tried.contains(i)).ok_or(())?;
        let (engine, peer) = &self.state.fleet[free];
        self.tried.push(free);
        self.current = Some((free, Lease::try_take(engine, None).ok_or(())?));
        Ok(peer.clone())
    }

    fn answered(&mut self, head: &mut ResponseHeader) {
        if let Some((endpoint, _)) = &self.current {
            let _ = head.insert_header("x-served-by", endpoint.to_string());
            assert!(!head.headers.contains_key("x-panic"), "a panic on purpose");
        }
    }

    fn ended(&mut self, status: u16) {
        self.end(Outcome::complete(status));
    }

    fn failed(&mut self, error: &LegError) {
        self.end(error.outcome());
    }
}

/// A number in a request field.
fn number(head: &RequestHeader, name: &str) -> Option<u64> {
    head.headers.get(name)?.to_str().ok()?.parse().ok()
}

fn limits(head: &RequestHeader) -> Limits {
    let limit = |name, default| Duration::from_millis(number(head, name).unwrap_or(default));
    let deadlines = Deadlines {
        connect: limit("x-connect", 10_000),
        first_byte: limit("x-first-byte", 60_000),
        idle: limit("x-idle", 60_000),
        client: limit("x-client-idle", 60_000),
        total: Instant::now() + limit("x-total", 600_000),
    };
    Limits {
        deadlines,
        attempts: number(head, "x-attempts").unwrap_or(8) as u32,
        resend: head.headers.contains_key("x-resend"),
    }
}

pub struct Proxy(Arc<State>);

impl Proxy {
    async fn relay(&self, client: &mut ServerSession, body: &Body) -> Result<Relayed, Failure<()>> {
        let limits = limits(client.req_header());
        let request = client.req_header();
        let host = match request.headers.get("x-host").and_then(|v| v.to_str().ok()) {
            Some(host) => HostPolicy::Rewrite(host.into()),
            None => HostPolicy::Preserve,
        };
        let first = number(request, "x-engine")
            .map_or_else(|| self.0.next.fetch_add(1, Ordering::SeqCst), |n| n as usize);
        let statuses: &[u16] = if request.headers.contains_key("x-refuse") { &[429, 503] } else { &[] };
        let refuse = Refusals { statuses, busy: request.headers.contains_key("x-busy"), lost: None };
        let head = to_engine(request, body.bytes.len(), &host).map_err(|_| Failure::Refused(()))?;
        let hold = request.headers.contains_key("x-hold");
        let prefill = request.headers.contains_key("x-prefill");
        let dialect = Dialect::of(request.uri.path());
        let role = Role::Any;
        let mut leg = Leg {
            head,
            body: body.bytes.clone(),
            sink: Sink::Client,
            ending: &Ending::default(),
            refuse,
            once: request.headers.contains_key("x-once"),
            role,
            dialect,
        };
        if prefill {
            let mut route = RoundRobin { state: &self.0, first, tried: Vec::new(), current: None, hold };
            leg.head.insert_header("x-role", "prefill").unwrap();
            leg.sink = Sink::Memory(1 << 20);
            let done = serve(client, &self.0.connector, &mut route, &mut leg, &limits).await?;
            route.end(done.outcome());
            leg.head.remove_header("x-role");
            leg.head.insert_header("x-prefilled", done.kept.map_or(0, |kept| kept.body.len())).unwrap();
            leg.sink = Sink::Client;
        }
        let mut route = RoundRobin { state: &self.0, first, tried: Vec::new(), current: None, hold };
        let done = serve(client, &self.0.connector, &mut route, &mut leg, &limits).await;
        match done {
            Ok(done) => {
                route.end(done.outcome());
                Ok(done)
            }
            Err(Failure::Leg(error)) => Err(Failure::Leg(tell(client, error).await)),
            refused => refused,
        }
    }
}

async fn say(client: &mut ServerSession, code: Code, message: &str) -> pingora_core::Result<bool> {
    let says = Answer { request_id: Some("r-1"), ..Answer::new(code, message) };
    answer(client, &says).await.map(|()| true)
}

#[async_trait]
impl ProxyHttp for Proxy {
    type CTX = ();
    fn new_ctx(&self) {}

    async fn request_filter(&self, session: &mut Session, _: &mut ()) -> pingora_core::Result<bool> {
        let client = session.as_downstream_mut();
        let count = &self.0.counts;
        if let Some(why) = lint(client) {
            return say(client, codes::BAD_REQUEST, why).await;
        }
        if client.get_header(header::UPGRADE).is_some() || client.get_header("x-stock").is_some() {
            return Ok(false);
        }
        if client.req_header().uri.path() == "/early-no-route" {
            return say(client, codes::NO_ROUTE, "no rule matches").await;
        }
        let bodies = BodyLimits {
            max: number(client.req_header(), "x-max-body").map_or(MAX_BODY, |n| n as usize),
            deadline: Duration::from_secs(120),
            grace: Duration::from_millis(number(client.req_header(), "x-grace").unwrap_or(60_000)),
            rate: 1000,
        };
        let body = match read(client, &bodies, &self.0.buffers).await {
            Ok(body) => body,
            Err(e) => match e.code() {
                Some(code) => return say(client, code, code.doc).await,
                None => {
                    count.gone.fetch_add(1, Ordering::SeqCst);
                    return Err(Error::new(ErrorType::ConnectionClosed).into_down());
                }
            },
        };
        match self.relay(client, &body).await {
            Ok(done) => {
                count.served.fetch_add(1, Ordering::SeqCst);
                count.unfinished.fetch_add(done.unfinished.into(), Ordering::SeqCst);
                Ok(true)
            }
            Err(Failure::Leg(e)) if e.side == Side::Client => {
                count.gone.fetch_add(1, Ordering::SeqCst);
                Err(e.into_pingora())
            }
            Err(Failure::Leg(e)) if e.told => {
                count.told.fetch_add(1, Ordering::SeqCst);
                Ok(true)
            }
            // `Ok(true)` would end a cut answer in order
            Err(Failure::Leg(e)) if e.head_sent => Err(e.into_pingora()),
            Err(Failure::Leg(e)) => {
                say(client, codes::of(&e, Role::Any), &format!("{:?} {:?}", e.phase, e.fault)).await
            }
            Err(Failure::Refused(())) => say(client, codes::NO_HEALTHY_BACKEND, "nobody").await,
        }
    }

    async fn upstream_peer(&self, _: &mut Session, _: &mut ()) -> pingora_core::Result<Box<HttpPeer>> {
        Ok(Box::new(self.0.fleet[0].1.clone()))
    }

    async fn fail_to_proxy(&self, _: &mut Session, _: &Error, _: &mut ()) -> FailToProxy {
        FailToProxy { error_code: 0, can_reuse_downstream: false }
    }

    fn suppress_error_log(&self, _: &Session, _: &(), _: &Error) -> bool {
        true
    }

    async fn logging(&self, _: &mut Session, _: Option<&Error>, _: &mut ()) {
        self.0.counts.logged.fetch_add(1, Ordering::SeqCst);
    }
}
