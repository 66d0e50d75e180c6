//! The configuration as the rest of the gateway reads it: valid, complete, with units.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvgate_core::schema::{duration, size};
use kvgate_core::{BreakerPolicy, Endpoint, Engines, Identity, Role, TierConfig};
use kvgate_engines::EngineKind;
use kvgate_engines::pd::Connector;
use serde::Deserialize;

use super::diagnostic::Diagnostic;
use super::listener_types::{ConnectionsConfig, Http2Config, ListenerConfig};
use super::matching::Match;
use super::rule::KV_EXACT;
use super::source::Origin;

/// `gateway.toml`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatewayConfig {
    /// The process.
    pub server: ServerConfig,
    /// Where clients connect; never empty.
    #[serde(rename = "listener")]
    pub listeners: Vec<ListenerConfig>,
    /// What their connections may take up.
    pub connections: ConnectionsConfig,
    /// What clients' HTTP/2 connections may take up.
    pub http2: Http2Config,
    /// The admin surface.
    pub admin: AdminConfig,
    /// The log.
    pub log: LogConfig,
    /// What a request may take up.
    pub limits: Limits,
    /// How long its steps may take.
    pub timeouts: Timeouts,
    /// What is asked of another endpoint.
    pub retry: RetryConfig,
    /// How often, of all requests.
    pub retry_budget: BudgetConfig,
    /// When engines are left alone.
    pub breaker: BreakerConfig,
    /// How engines are asked whether they are well.
    pub probe: ProbeConfig,
    /// What engines are asked of themselves.
    pub telemetry: TelemetryConfig,
    /// Turning prompts into tokens.
    pub tokenizer: TokenizerConfig,
    /// The mirror of the engines' blocks.
    pub inventory: InventoryConfig,
    /// The connections on which engines publish them.
    pub feed: FeedConfig,
    /// The record of decisions.
    pub decisions: DecisionsConfig,
    /// When to say that something does not work.
    pub alarms: AlarmsConfig,
}

/// `[server]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerConfig {
    /// The folder of rules, joined to the folder of `gateway.toml`.
    pub rules: PathBuf,
    /// The folder of tokenizers, joined likewise.
    pub tokenizers: PathBuf,
    /// Threads that serve requests; 0 is one per core.
    pub threads: usize,
    /// The memory that the bodies of all requests in flight share, in bytes; no request's limit is above it.
    #[serde(deserialize_with = "size")]
    pub body_memory: u64,
    /// How long requests under way may take to finish at the end.
    #[serde(deserialize_with = "duration")]
    pub grace_period: Duration,
    /// How long requests are taken after that, before the grace period begins.
    #[serde(deserialize_with = "duration")]
    pub drain_delay: Duration,
    /// How long it may take until it is known what engines hold.
    #[serde(deserialize_with = "duration")]
    pub warm_up: Duration,
    /// Where listeners are handed over, joined to the folder of `gateway.toml`.
    pub upgrade_socket: Option<PathBuf>,
    /// How long files must be left alone before a change is read.
    #[serde(deserialize_with = "duration")]
    pub reload_debounce: Duration,
}

/// `[admin]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdminConfig {
    /// Where it listens; on loopback unless there is a token.
    pub address: SocketAddr,
    /// The file that holds the token, joined to the folder of `gateway.toml`.
    pub token_file: Option<PathBuf>,
}

/// `[log]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogConfig {
    /// How it is written.
    pub format: LogFormat,
    /// Whether it has a line for each block of a prompt that is hashed.
    pub block_hashes: bool,
}

/// How the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// A JSON object a line.
    Json,
}

/// `[limits]`, of the gateway or, completed from there, of a rule.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// The largest request body, in bytes.
    #[serde(deserialize_with = "size")]
    pub body: u64,
    /// Bytes per second, the least a client may send of it; 0 is no least rate.
    #[serde(deserialize_with = "size")]
    pub body_rate: u64,
}

/// `[retry]`, of the gateway or, completed from there, of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RetryConfig {
    /// Endpoints asked at most, 1 or more.
    pub attempts: u32,
    /// Whether a request that only computes may run twice: when its engine broke off without an answer.
    pub resend: bool,
    /// Whether others are asked when an engine says that it is busy, and for how long.
    pub busy: bool,
    /// The statuses upon which others are asked.
    pub statuses: Vec<u16>,
}

/// `[retry_budget]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetConfig {
    /// Retries to a hundred requests.
    pub percent: u64,
    /// Retries per second beside.
    pub floor: u64,
}

/// `[timeouts]`, of the gateway or, completed from there, of a rule.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timeouts {
    /// To connect to an engine.
    #[serde(deserialize_with = "duration")]
    pub connect: Duration,
    /// For a tier's `prepare`.
    #[serde(deserialize_with = "duration")]
    pub prepare: Duration,
    /// Of a prefill, to its answer.
    #[serde(deserialize_with = "duration")]
    pub prefill: Duration,
    /// To the first byte of an answer.
    #[serde(deserialize_with = "duration")]
    pub first_byte: Duration,
    /// Between two pieces of an answer.
    #[serde(deserialize_with = "duration")]
    pub idle: Duration,
    /// For the client to take a piece of its answer.
    #[serde(deserialize_with = "duration")]
    pub client_idle: Duration,
    /// For the whole request.
    #[serde(deserialize_with = "duration")]
    pub total: Duration,
    /// For the client to send its body.
    #[serde(deserialize_with = "duration")]
    pub body: Duration,
    /// How long a body may come slower than the least rate.
    #[serde(deserialize_with = "duration")]
    pub body_grace: Duration,
}

/// `[breaker]`, of the gateway or, completed from there, of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BreakerConfig {
    /// Failures in a row that open it; `None` goes by the rule's shape.
    pub failures: Option<u32>,
    /// Answers with a 5xx in a row that do; `None` is as many as failures.
    pub origin_errors: Option<u32>,
    /// How long it is open.
    #[serde(deserialize_with = "duration")]
    pub open_for: Duration,
    /// Requests let through at once when it is half open, 1 or more.
    pub half_open: u32,
    /// How long an engine that is back takes to have its whole share.
    #[serde(deserialize_with = "duration")]
    pub slow_start: Duration,
    /// The longest that an engine is left alone because it asked for it; zero is never.
    #[serde(deserialize_with = "duration")]
    pub cooling: Duration,
}

/// `[probe]`, of the gateway or, completed from there, of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeConfig {
    /// What is asked.
    pub mode: ProbeMode,
    /// What is asked for; `None` is the engine's own.
    pub path: Option<String>,
    /// The statuses of an engine that is well; `None` is all but a 5xx.
    pub codes: Option<Vec<u16>>,
    /// Between two questions.
    #[serde(deserialize_with = "duration")]
    pub interval: Duration,
    /// For one answer, connecting included.
    #[serde(deserialize_with = "duration")]
    pub timeout: Duration,
    /// Failures in a row that make it down, 1 or more.
    pub unhealthy_after: u32,
    /// Successes in a row that bring it back, 1 or more.
    pub healthy_after: u32,
}

/// What an engine is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeMode {
    /// For a page.
    Http,
    /// To take a connection.
    Tcp,
    /// Nothing.
    Off,
}

/// `[telemetry]`, of the gateway or, completed from there, of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TelemetryConfig {
    /// Between two questions to an engine; zero is off.
    #[serde(deserialize_with = "duration")]
    pub interval: Duration,
    /// For one answer, connecting included.
    #[serde(deserialize_with = "duration")]
    pub timeout: Duration,
    /// The largest answer, in bytes.
    #[serde(deserialize_with = "size")]
    pub max_size: u64,
    /// How long an answer is believed; longer than the interval.
    #[serde(deserialize_with = "duration")]
    pub max_age: Duration,
}

/// `[tokenizer]`; sizes in bytes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerConfig {
    /// Models held at once.
    pub max_models: usize,
    /// Memory per model for pieces already tokenised; 0 is off.
    #[serde(deserialize_with = "size")]
    pub cache: u64,
    /// The longest text that is tokenised.
    #[serde(deserialize_with = "size")]
    pub max_text: u64,
    /// The longest text that is tokenised where the request is served.
    #[serde(deserialize_with = "size")]
    pub inline_text: u64,
    /// How long a failed load is left alone.
    #[serde(deserialize_with = "duration")]
    pub retry: Duration,
}

/// `[inventory]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InventoryConfig {
    /// Caches mirrored at once.
    pub max_caches: u16,
    /// Blocks per cache where the engine does not say.
    pub max_blocks: usize,
    /// Blocks of unknown parent per cache.
    pub max_orphans: usize,
}

/// `[feed]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeedConfig {
    /// Bytes of events waiting per engine.
    #[serde(deserialize_with = "size")]
    pub queue: u64,
    /// The first wait before connecting again.
    #[serde(deserialize_with = "duration")]
    pub backoff_min: Duration,
    /// The longest such wait; at least the first.
    #[serde(deserialize_with = "duration")]
    pub backoff_max: Duration,
}

/// `[decisions]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecisionsConfig {
    /// The latest that are kept.
    pub keep: usize,
    /// Hashes of a prompt that its record holds at most; 0 is none, and no work for it.
    pub prompt_hashes: usize,
}

/// `[alarms]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AlarmsConfig {
    /// Requests an engine answered without publishing; 0 is off.
    pub events_missing_requests: u64,
    /// And for how long at least.
    #[serde(deserialize_with = "duration")]
    pub events_missing_after: Duration,
}

/// A rule file.
#[derive(Debug, Clone)]
pub struct RuleConfig {
    /// Its name; unique.
    pub name: String,
    /// Its number for the netlox API; unique.
    pub id: Option<u32>,
    /// What its endpoints run.
    pub engine: &'static EngineKind,
    /// The ladder, by names of kinds; the implicit `min-load` at its end not included.
    pub tiers: Vec<&'static str>,
    /// What a `prefill-decode` rule has more than a pool.
    pub pair: Option<PairConfig>,
    /// The keys of every tier of its ladders, defaults filled in.
    pub tier: BTreeMap<&'static str, TierConfig>,
    /// Whether a request may ask why.
    pub explain: bool,
    /// Which requests it serves.
    pub matches: Match,
    /// Its endpoints in the order of the file; never empty.
    pub endpoints: Vec<EndpointConfig>,
    /// What a request may take up.
    pub limits: Limits,
    /// How long its steps may take.
    pub timeouts: Timeouts,
    /// What is asked of another endpoint.
    pub retry: RetryConfig,
    /// When its engines are left alone.
    pub breaker: BreakerConfig,
    /// How its engines are asked whether they are well.
    pub probe: ProbeConfig,
    /// What its engines are asked of themselves.
    pub telemetry: TelemetryConfig,
    /// How those with a `tls` name are spoken to.
    pub tls: EngineTls,
    /// Where its keys stand.
    pub origin: Origin,
}

/// `[tls]` of a rule; files are joined to the folder of the rule's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineTls {
    /// The authorities that vouch for the engines; `None`: those of the system.
    pub ca: Option<PathBuf>,
    /// What the gateway shows the engines.
    pub client_certificate: Option<PathBuf>,
    /// Its key; `None`: in the same file.
    pub client_key: Option<PathBuf>,
    /// Whether HTTP/2 is offered to them.
    pub http2: bool,
}

impl EngineTls {
    /// The files of the certificate and of its key.
    pub fn certificate(&self) -> Option<(&Path, &Path)> {
        let chain = self.client_certificate.as_deref()?;
        Some((chain, self.client_key.as_deref().unwrap_or(chain)))
    }

    /// All its files.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        [&self.ca, &self.client_certificate, &self.client_key].into_iter().flatten().map(PathBuf::as_path)
    }

    /// With its files in this folder, where they have none.
    pub(super) fn within(self, folder: &Path) -> Self {
        let join = |file: Option<PathBuf>| file.map(|file| folder.join(file));
        Self {
            ca: join(self.ca),
            client_certificate: join(self.client_certificate),
            client_key: join(self.client_key),
            http2: self.http2,
        }
    }
}

/// What an engine is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeTarget<'a> {
    /// To take a connection.
    Connection,
    /// A page, by its path, and the statuses of an engine that is well.
    Page(&'a str, Option<&'a [u16]>),
}

/// What a rule has whose requests are served by two endpoints, one for the prompt and one for the answer.
#[derive(Debug, Clone)]
pub struct PairConfig {
    /// The ladder for decode, as [`RuleConfig::tiers`] is that for prefill.
    pub tiers: Vec<&'static str>,
    /// How its engines move blocks.
    pub connector: &'static Connector,
    /// Whether decode computes the prompt when prefill failed.
    pub recomputes: bool,
    /// Bytes of the largest answer to a prefill.
    pub prefill_answer: u64,
}

/// The tiers that go by what engines tell of themselves.
const BY_CAPACITY: &[&str] = &[KV_EXACT, "gpu-aware"];

/// Failures in a row that open a breaker: in pairs, and in pools.
const FAILURES: [u32; 2] = [3, 5];

impl RuleConfig {
    /// When the breakers of its engines open, as far as it has a say.
    pub fn breaker_policy(&self) -> BreakerPolicy {
        let [pair, pool] = FAILURES;
        let usual = if self.pair.is_some() { pair } else { pool };
        let failures = self.breaker.failures.unwrap_or(usual);
        BreakerPolicy {
            failures,
            origin_errors: self.breaker.origin_errors.unwrap_or(failures),
            open_for: self.breaker.open_for,
            half_open: self.breaker.half_open,
            slow_start: self.breaker.slow_start,
        }
    }

    /// What its engines are asked to find out whether they are well; `None`: they are not.
    pub fn probe_target(&self) -> Option<ProbeTarget<'_>> {
        let ProbeConfig { mode, path, codes, .. } = &self.probe;
        match mode {
            ProbeMode::Off => None,
            ProbeMode::Tcp => Some(ProbeTarget::Connection),
            ProbeMode::Http => {
                Some(ProbeTarget::Page(path.as_deref().unwrap_or(self.engine.health), codes.as_deref()))
            }
        }
    }

    /// Of the rules that probe an engine, the one with the least of these does: it asks most often, or its name comes
    /// first.
    pub fn probe_rank(&self) -> (Duration, &str) {
        (self.probe.interval, &self.name)
    }

    /// The tiers of all its ladders, each once.
    pub fn all_tiers(&self) -> Vec<&'static str> {
        let decode = self.pair.iter().flat_map(|pair| &pair.tiers);
        self.tiers.iter().chain(decode.filter(|name| !self.tiers.contains(name))).copied().collect()
    }

    /// Whether the tier of this name is in a ladder of the rule.
    pub fn uses(&self, tier: &str) -> bool {
        self.all_tiers().contains(&tier)
    }

    /// Whether its engines are asked how they are: somebody wants to know, and it is not turned off.
    pub fn asks_engines(&self) -> bool {
        !self.telemetry.interval.is_zero()
            && (self.pair.is_some() || BY_CAPACITY.iter().any(|tier| self.uses(tier)))
    }

    /// Whether endpoints of this role are weighed by what they can hold.
    pub fn weighs_capacity(&self, role: Role) -> bool {
        let tiers = match (&self.pair, role) {
            (Some(pair), Role::Decode) => &pair.tiers,
            (Some(_), Role::Any) => return false,
            _ => &self.tiers,
        };
        BY_CAPACITY.iter().any(|tier| tiers.contains(tier))
    }

    /// The model whose tokenizer its adapters share: the only one of `match.models` that is no adapter.
    pub fn base_model(&self) -> Option<&str> {
        let adapters = self.tier.get(KV_EXACT).and_then(|tier| tier.0.get("lora")?.as_object());
        let is_base = |model: &&String| !adapters.is_some_and(|adapters| adapters.contains_key(*model));
        let mut bases = self.matches.models.iter().filter(is_base);
        match (bases.next(), bases.next()) {
            (Some(base), None) => Some(base),
            _ => None,
        }
    }

    /// An error at a key of this rule, `tier.kv-exact.law.mode` say, found later than by [`super::load`].
    pub fn error(&self, key: &str, message: impl Into<String>) -> Diagnostic {
        self.origin.error(key, message)
    }
}

/// `[[endpoint]]`, with every address and name in lower case, and every address in its usual form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointConfig {
    /// `host:port` of the engine's API.
    pub address: String,
    /// Its part: `Any` in a pool.
    pub role: Role,
    /// Its share of the load, 1 or more.
    pub weight: u32,
    /// The name in its certificate; `None` is plain HTTP.
    pub tls: Option<String>,
    /// Where it publishes its blocks, as `tcp://host:port`; `None` when nobody in the rule listens or there is
    /// no such address.
    pub kv_events: Option<String>,
    /// Where missed events are fetched.
    pub kv_replay: Option<String>,
    /// The port by which its connector names it, if it is not its address's.
    pub nixl_port: Option<u16>,
}

impl EndpointConfig {
    /// What tells its engine from others.
    pub fn identity(&self) -> Identity {
        Identity { address: self.address.clone(), tls: self.tls.clone() }
    }

    /// What it is called by the engines it exchanges blocks with.
    pub fn transfer_address(&self) -> String {
        match (self.nixl_port, self.address.rsplit_once(':')) {
            (Some(port), Some((host, _))) => format!("{host}:{port}"),
            _ => self.address.clone(),
        }
    }

    /// The endpoint with this number.
    pub fn endpoint(&self, engines: &Engines, index: usize) -> Endpoint {
        Endpoint { engine: engines.get(&self.identity()), role: self.role, weight: self.weight, index }
    }
}
