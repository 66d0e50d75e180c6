//! A rule file: from what is written to [`RuleConfig`].

use std::collections::BTreeMap;
use std::path::Path;

use kvgate_core::{Role, TierConfig, TierKind};
use kvgate_engines::{ENGINES, EngineKind};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::compat::Layer;
use super::document::{Document, complete, with_defaults};
use super::matching::Match;
use super::rule_fields::RULE;
use super::table::{canonical_peer, split_peer};
use super::types::{
    BreakerConfig, EndpointConfig, EngineTls, Limits, PairConfig, ProbeConfig, RetryConfig, RuleConfig,
    TelemetryConfig, Timeouts,
};

/// The tier that routes by the blocks that engines announce.
pub(super) const KV_EXACT: &str = "kv-exact";
/// What pairs have more of it than pools: those that go before it, and those that sit in both ladders.
const BEFORE: &[&str] = &["admission", "session", "radix-trie"];
const IN_BOTH: &[&str] = &["admission", "session"];

#[derive(Deserialize)]
struct Raw {
    name: Option<String>,
    id: Option<u32>,
    engine: String,
    shape: String,
    tiers: Option<Vec<String>>,
    decode_tiers: Option<Vec<String>>,
    legs: RawLegs,
    explain: bool,
    #[serde(rename = "match")]
    matches: Match,
    events: RawEvents,
    #[serde(rename = "endpoint")]
    endpoints: Vec<RawEndpoint>,
    limits: Limits,
    timeouts: Timeouts,
    retry: RetryConfig,
    breaker: BreakerConfig,
    probe: ProbeConfig,
    telemetry: TelemetryConfig,
    tls: EngineTls,
}

#[derive(Deserialize)]
struct RawLegs {
    connector: String,
    without_prefill: String,
    #[serde(deserialize_with = "kvgate_core::schema::size")]
    prefill_answer: u64,
}

#[derive(Deserialize)]
struct RawEvents {
    port: u16,
    replay_port_offset: u16,
}

#[derive(Deserialize)]
struct RawEndpoint {
    /// Absent only where its absence, or its form, is reported already.
    address: Option<String>,
    role: String,
    weight: u32,
    tls: Option<String>,
    kv_events: Option<String>,
    kv_replay: Option<String>,
    nixl_port: Option<u16>,
}

/// The configuration of a rule; `gateway` are the tables of `gateway.toml`. Problems are left in the document; keys
/// with problems have their defaults.
pub(super) fn rule(
    document: &mut Document,
    gateway: &Map<String, Value>,
    kinds: &[TierKind],
    layer: &Layer,
) -> Option<RuleConfig> {
    let tables = complete(document.given.clone(), RULE, gateway);
    let raw: Raw = match serde_json::from_value(Value::Object(tables)) {
        Ok(raw) => raw,
        Err(e) => {
            let error = document.error("", format!("does not fit the gateway's own structure: {e}"));
            document.report(error);
            return None;
        }
    };
    let Some(engine) = EngineKind::by_name(&raw.engine) else {
        let error = document.error("engine", "is not known to this gateway").found(raw.engine);
        document.report(error);
        return None;
    };
    let is_pair = raw.shape == "prefill-decode";
    let tiers = ladder(document, "tiers", raw.tiers.as_deref(), kinds, || {
        let before = BEFORE.iter().copied().filter(|_| is_pair);
        before.chain(Some(KV_EXACT).filter(|_| engine.announces_blocks)).collect()
    });
    let decode = ladder(document, "decode_tiers", raw.decode_tiers.as_deref(), kinds, || {
        tiers.iter().copied().filter(|name| IN_BOTH.contains(name)).collect()
    });
    let used: Vec<_> = tiers.iter().chain(decode.iter().filter(|_| is_pair)).copied().collect();
    let tier = tier_configs(document, &used, kinds, layer);
    let pair = match is_pair {
        true => pair(document, engine, decode, &raw.legs),
        false => None,
    };
    let mut matches = raw.matches;
    matches.normalize();
    let listens = Listens {
        by_default: (tiers.contains(&KV_EXACT) && engine.name != "trtllm") || document.origin.has("events"),
        events: raw.events,
    };
    let endpoints = raw.endpoints.into_iter().enumerate();
    let endpoints = endpoints.filter_map(|(at, raw)| endpoint(document, at, raw, &listens)).collect();
    let name = raw.name.unwrap_or_else(|| {
        let path = &document.origin.source.path;
        path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
    });
    let folder = document.origin.source.path.parent().map(Path::to_owned);
    Some(RuleConfig {
        name,
        id: raw.id,
        engine,
        tiers,
        pair,
        tier,
        explain: raw.explain,
        matches,
        endpoints,
        limits: raw.limits,
        timeouts: raw.timeouts,
        retry: raw.retry,
        breaker: raw.breaker,
        probe: raw.probe,
        telemetry: raw.telemetry,
        tls: raw.tls.within(folder.as_deref().unwrap_or(Path::new(""))),
        origin: document.origin.clone(),
    })
}

/// What makes the rule a pair; an engine that cannot be one is reported.
fn pair(
    document: &mut Document,
    engine: &EngineKind,
    tiers: Vec<&'static str>,
    legs: &RawLegs,
) -> Option<PairConfig> {
    let Some(connector) = engine.connector(&legs.connector) else {
        let names = |kind: &EngineKind| kind.connectors.iter().map(|c| c.name).collect::<Vec<_>>().join(", ");
        let error = match engine.connectors {
            [] => {
                let able = ENGINES.iter().filter(|kind| !kind.connectors.is_empty()).map(|kind| kind.name);
                document
                    .error("shape", format!("is not served for {} by this version", engine.name))
                    .found("\"prefill-decode\"")
                    .allowed(format!(
                        "\"pool\"; \"prefill-decode\" for {}",
                        able.collect::<Vec<_>>().join(", ")
                    ))
                    .hint("leave it out: every endpoint serves requests whole")
            }
            _ => document
                .error("legs.connector", format!("is none of {}", engine.name))
                .found(format!("\"{}\"", legs.connector))
                .allowed(names(engine)),
        };
        document.report(error);
        return None;
    };
    Some(PairConfig {
        tiers,
        connector,
        recomputes: legs.without_prefill == "recompute",
        prefill_answer: legs.prefill_answer,
    })
}

/// The known names of a ladder; the unknown are reported.
fn ladder(
    document: &mut Document,
    key: &str,
    given: Option<&[String]>,
    kinds: &[TierKind],
    usual: impl FnOnce() -> Vec<&'static str>,
) -> Vec<&'static str> {
    let known = |name: &str| kinds.iter().find(|kind| kind.name == name).map(|kind| kind.name);
    let Some(given) = given else {
        return usual().into_iter().filter_map(known).collect();
    };
    let mut names = Vec::new();
    for (at, name) in given.iter().enumerate() {
        match known(name) {
            Some(name) => names.push(name),
            None => {
                let all: Vec<_> = kinds.iter().map(|kind| kind.name).collect();
                let mut error = document
                    .error(&format!("{key}[{at}]"), "is not a tier")
                    .found(format!("\"{name}\""))
                    .allowed(all.join(", "));
                let near = super::table::nearest(name, all.iter().copied());
                error.hint = near.map(|word| format!("did you mean \"{word}\"?"));
                document.report(error);
            }
        }
    }
    names
}

fn tier_configs(
    document: &mut Document,
    tiers: &[&'static str],
    kinds: &[TierKind],
    layer: &Layer,
) -> BTreeMap<&'static str, TierConfig> {
    let given = document.given.get("tier").and_then(Value::as_object).cloned().unwrap_or_default();
    let mut configs = BTreeMap::new();
    for kind in kinds {
        let keys = given.get(kind.name).and_then(Value::as_object);
        if tiers.contains(&kind.name) {
            let keys = layer.under_tier(document, kind, keys.cloned().unwrap_or_default());
            configs.insert(kind.name, TierConfig(with_defaults(keys, kind.schema)));
        } else if keys.is_some() && !document.is_broken("tiers") && !document.is_broken("decode_tiers") {
            let unused = document
                .error(&format!("tier.{}", kind.name), "is not used: the tier is not in the ladder")
                .hint(format!("add \"{}\" to `tiers`, or remove the table", kind.name));
            document.report(unused.warning());
        }
    }
    configs
}

/// Where a rule listens for events.
struct Listens {
    /// Whether endpoints without `kv_events` have the default.
    by_default: bool,
    events: RawEvents,
}

fn endpoint(
    document: &mut Document,
    at: usize,
    raw: RawEndpoint,
    listens: &Listens,
) -> Option<EndpointConfig> {
    let lower = |text: String| text.to_ascii_lowercase();
    let zmq = |text: String| match text.strip_prefix("tcp://").and_then(canonical_peer) {
        Some(peer) => format!("tcp://{peer}"),
        None => lower(text),
    };
    let address = canonical_peer(&raw.address?)?;
    let (host, _) = split_peer(&address)?;
    let by_default = listens.by_default && listens.events.port > 0 && raw.role != "decode";
    let broken = document.is_broken(&format!("endpoint[{at}].kv_events"));
    let by_default = by_default && !broken;
    let kv_events = raw
        .kv_events
        .map(zmq)
        .or_else(|| by_default.then(|| format!("tcp://{host}:{}", listens.events.port)));
    let kv_replay = match (raw.kv_replay, &kv_events) {
        (given, None) => {
            if given.is_some() && !broken {
                let error = document
                    .error(&format!("endpoint[{at}].kv_replay"), "is given, but the endpoint has no events")
                    .hint("add `kv_events`");
                document.report(error);
            }
            None
        }
        (Some(given), Some(_)) => Some(zmq(given)),
        (None, Some(events)) => replay(document, at, events, listens.events.replay_port_offset),
    };
    let role = Role::ALL.into_iter().find(|role| role.name() == raw.role).unwrap_or_default();
    let (weight, tls, nixl_port) = (raw.weight, raw.tls.map(lower), raw.nixl_port);
    Some(EndpointConfig { role, weight, tls, kv_events, kv_replay, nixl_port, address })
}

fn replay(document: &mut Document, at: usize, events: &str, offset: u16) -> Option<String> {
    if offset == 0 {
        return None;
    }
    let (host, port) = events.strip_prefix("tcp://").and_then(split_peer)?;
    if let Some(port) = port.checked_add(offset) {
        return Some(format!("tcp://{host}:{port}"));
    }
    let places = ["events.replay_port_offset".to_owned(), format!("endpoint[{at}].kv_events")];
    let key = places.into_iter().find(|key| document.origin.has(key));
    let key = key.unwrap_or_else(|| "events.port".to_owned());
    let sum = u32::from(port) + u32::from(offset);
    let error = document
        .error(&key, format!("leads to the replay port {sum}, and ports end at 65535"))
        .found(format!("{port} + {offset}"))
        .hint(match document.origin.environment.get("events.replay_port_offset") {
            Some(variable) => {
                format!("give `events.replay_port_offset`, which is {variable}'s; 0 means no replay")
            }
            None => {
                "lower `events.port` or `events.replay_port_offset`; 0 as the offset means no replay".into()
            }
        });
    if !document.problems.iter().any(|p| p.key == key) {
        document.report(error);
    }
    None
}
