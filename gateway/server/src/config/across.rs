//! What must agree between rules.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::diagnostic::Diagnostic;
use super::matching::Match;
use super::types::{EndpointConfig, GatewayConfig, ProbeTarget, RuleConfig};

/// A rule whose values may be leant on, as far as `unsure` does not say otherwise.
pub(super) struct Checked {
    pub rule: RuleConfig,
    /// Whether something in `[match]` was refused, so that what it matches is not known.
    pub unsure: bool,
}

/// Checks the rules against each other and the listeners.
pub(super) fn check(
    gateway: &GatewayConfig,
    listeners_known: bool,
    rules: &[Checked],
    found: &mut Vec<Diagnostic>,
) {
    names(rules, found);
    bodies(gateway, rules, found);
    events(rules, found);
    engines(rules, found);
    probes(rules, found);
    caches(gateway, rules, found);
    loops(gateway, rules, found);
    let sure: Vec<&RuleConfig> = rules.iter().filter(|r| !r.unsure).map(|r| &r.rule).collect();
    if listeners_known {
        let names: Vec<&str> = gateway.listeners.iter().map(|l| l.name.as_str()).collect();
        listeners(&names, &sure, found);
        overlaps(&sure, found);
        unreachable(&names, &sure, found);
    }
}

fn file(rule: &RuleConfig) -> String {
    rule.origin.source.path.display().to_string()
}

fn names(rules: &[Checked], found: &mut Vec<Diagnostic>) {
    let mut names: BTreeMap<&str, &RuleConfig> = BTreeMap::new();
    let mut ids: BTreeMap<u32, &RuleConfig> = BTreeMap::new();
    for Checked { rule, .. } in rules {
        match names.get(rule.name.as_str()) {
            Some(other) => found.push(
                rule.error("name", format!("is also the name of the rule in {}", file(other)))
                    .found(format!("\"{}\"", rule.name))
                    .hint("give each rule a name of its own"),
            ),
            None => drop(names.insert(&rule.name, rule)),
        }
        let Some(id) = rule.id else { continue };
        match ids.get(&id) {
            Some(other) => found.push(
                rule.error("id", format!("is also the id of the rule \"{}\" in {}", other.name, file(other)))
                    .found(id.to_string())
                    .hint("give each rule an id of its own, or none"),
            ),
            None => drop(ids.insert(id, rule)),
        }
    }
}

/// Limits of rules that are above the memory all requests share; gateway.toml's own is checked there.
fn bodies(gateway: &GatewayConfig, rules: &[Checked], found: &mut Vec<Diagnostic>) {
    for Checked { rule, .. } in rules {
        if rule.origin.has("limits.body") && rule.limits.body > gateway.server.body_memory {
            found.push(super::gateway::body_limit(&rule.origin, gateway));
        }
    }
}

/// One event address belongs to one engine: else one engine would be credited with another's blocks.
fn events(rules: &[Checked], found: &mut Vec<Diagnostic>) {
    let mut engines: BTreeMap<&str, (&RuleConfig, usize)> = BTreeMap::new();
    for Checked { rule, .. } in rules {
        for (at, endpoint) in rule.endpoints.iter().enumerate() {
            let Some(events) = &endpoint.kv_events else { continue };
            let (other, index) = *engines.entry(events).or_insert((rule, at));
            let taken = other.endpoints.get(index).map(|e| e.address.as_str()).unwrap_or_default();
            if taken != endpoint.address {
                let own = format!("endpoint[{at}].kv_events");
                let place =
                    if other.name == rule.name { String::new() } else { format!(" in {}", file(other)) };
                found.push(
                    rule.error(&own, format!("is also where endpoint[{index}], {taken}{place}, publishes"))
                        .found(format!("\"{events}\""))
                        .hint(
                            "give each engine a port of its own for its events, and name it as `kv_events`",
                        ),
                );
            }
        }
    }
}

/// One engine publishes in one place, whichever rule names it: it is followed once for all of them.
fn engines(rules: &[Checked], found: &mut Vec<Diagnostic>) {
    let mut engines: BTreeMap<(&str, Option<&str>), (&RuleConfig, &EndpointConfig)> = BTreeMap::new();
    for Checked { rule, .. } in rules {
        for (at, endpoint) in rule.endpoints.iter().enumerate().filter(|(_, e)| e.kv_events.is_some()) {
            let (other, first) = *engines.entry(engine(endpoint)).or_insert((rule, endpoint));
            let (key, own, theirs) = match first.kv_events == endpoint.kv_events {
                true => ("kv_replay", &endpoint.kv_replay, &first.kv_replay),
                false => ("kv_events", &endpoint.kv_events, &first.kv_events),
            };
            if own == theirs || other.name == rule.name {
                continue;
            }
            let word = |place: &Option<String>| place.as_ref().map_or("none".into(), |p| format!("\"{p}\""));
            let message = format!("is not what {} says of this engine, {}", file(other), word(theirs));
            found.push(
                rule.error(&format!("endpoint[{at}].{key}"), message)
                    .found(word(own))
                    .hint("give an engine the same `kv_events` and `kv_replay` in every rule that names it"),
            );
        }
    }
}

/// What tells an engine from others.
fn engine(endpoint: &EndpointConfig) -> (&str, Option<&str>) {
    (&endpoint.address, endpoint.tls.as_deref())
}

/// One engine is asked by one rule.
fn probes(rules: &[Checked], found: &mut Vec<Diagnostic>) {
    let mut asked: BTreeMap<(&str, Option<&str>), &RuleConfig> = BTreeMap::new();
    let asking = || rules.iter().map(|checked| &checked.rule).filter(|rule| rule.probe_target().is_some());
    for rule in asking() {
        for engine in rule.endpoints.iter().map(engine) {
            let chosen = asked.entry(engine).or_insert(rule);
            if rule.probe_rank() < chosen.probe_rank() {
                *chosen = rule;
            }
        }
    }
    for rule in asking() {
        let other = rule.endpoints.iter().map(engine).find_map(|engine| {
            let other = asked.get(&engine).filter(|other| other.probe_target() != rule.probe_target())?;
            Some((engine.0, *other))
        });
        let Some((address, other)) = other else { continue };
        let keys = ["probe.path", "probe.codes", "probe.mode", "probe"];
        let key = keys.into_iter().find(|key| rule.origin.has(key)).unwrap_or("endpoint");
        let message = format!(
            "is not how {address} is asked: the probe of the rule \"{}\" in {} is used, and decides for both",
            other.name,
            file(other)
        );
        found.push(
            rule.error(key, message)
                .found(format!("{}, and there {}", shown(rule), shown(other)))
                .hint("give both rules the same `path`, `codes` and `mode`, or only one of them a probe")
                .warning(),
        );
    }
}

/// What a rule asks its engines, in words.
fn shown(rule: &RuleConfig) -> String {
    match rule.probe_target() {
        None => "nothing".into(),
        Some(ProbeTarget::Connection) => "a connection".into(),
        Some(ProbeTarget::Page(path, None)) => format!("GET {path}"),
        Some(ProbeTarget::Page(path, Some(codes))) => {
            let codes: Vec<_> = codes.iter().map(ToString::to_string).collect();
            format!("GET {path} for {}", codes.join(", "))
        }
    }
}

/// Every engine that publishes needs a cache in the mirror, and one for each further rank.
fn caches(gateway: &GatewayConfig, rules: &[Checked], found: &mut Vec<Diagnostic>) {
    let most = usize::from(gateway.inventory.max_caches);
    let mut engines = BTreeSet::new();
    for Checked { rule, .. } in rules {
        let before = engines.len();
        let publish = rule.endpoints.iter().filter(|e| e.kv_events.is_some());
        engines.extend(publish.map(engine));
        if before <= most && engines.len() > most {
            let message = "brings more engines that publish KV events than the inventory has room for";
            found.push(
                rule.error("endpoint", message)
                    .found(format!("{} engines, of all rules so far", engines.len()))
                    .allowed(format!("{most}, `inventory.max_caches` of gateway.toml"))
                    .hint("raise `inventory.max_caches`: one for each engine and rank"),
            );
        }
    }
}

/// An endpoint that is the gateway itself.
fn loops(gateway: &GatewayConfig, rules: &[Checked], found: &mut Vec<Diagnostic>) {
    let own: Vec<_> = gateway.listeners.iter().map(|l| l.address).chain([gateway.admin.address]).collect();
    for Checked { rule, .. } in rules {
        for (at, endpoint) in rule.endpoints.iter().enumerate() {
            if endpoint.address.parse().is_ok_and(|address| own.contains(&address)) {
                found.push(
                    rule.error(&format!("endpoint[{at}].address"), "is an address of the gateway itself")
                        .found(format!("\"{}\"", endpoint.address))
                        .hint("name the engine's address"),
                );
            }
        }
    }
}

fn listeners(names: &[&str], rules: &[&RuleConfig], found: &mut Vec<Diagnostic>) {
    for rule in rules {
        let Some(name) = rule.matches.listener.as_deref().filter(|name| !names.contains(name)) else {
            continue;
        };
        let mut error = rule
            .error("match.listener", "is no listener of gateway.toml")
            .found(format!("\"{name}\""))
            .allowed(names.join(", "));
        error.hint = super::table::nearest(name, names.iter().copied())
            .map(|near| format!("did you mean \"{near}\"?"));
        found.push(error);
    }
}

fn share(a: &[String], b: &[String]) -> Option<String> {
    if a.is_empty() && b.is_empty() {
        return Some(String::new());
    }
    let b: HashSet<&String> = b.iter().collect();
    a.iter().find(|text| b.contains(text)).cloned()
}

/// Two rules equally specific for one request; a rule is reported once.
fn overlaps(rules: &[&RuleConfig], found: &mut Vec<Diagnostic>) {
    for (at, rule) in rules.iter().enumerate() {
        for other in rules.iter().take(at) {
            let (a, b) = (&rule.matches, &other.matches);
            if a.listener != b.listener || a.path_prefix != b.path_prefix {
                continue;
            }
            let (Some(host), Some(model)) = (share(&a.hosts, &b.hosts), share(&a.models, &b.models)) else {
                continue;
            };
            let host = if host.is_empty() { "any host".into() } else { format!("host {host}") };
            let model = if model.is_empty() { "any model".into() } else { format!("model {model}") };
            let key = if rule.origin.has("match.models") { "match.models" } else { "match" };
            found.push(
                rule.error(
                    key,
                    format!("is as specific as that of the rule \"{}\" in {}", other.name, file(other)),
                )
                .found(format!("both match {host}, path {}, {model}", a.path_prefix))
                .hint("make one differ by listener, host, path or model, or remove one"),
            );
            break;
        }
    }
}

/// A rule all of whose requests go to more specific ones.
///
/// It is sought cell by cell, a cell being a listener, a host and a model that the rule matches; those it does not
/// list stand together as one cell, which only rules that take any can win.
fn unreachable(listeners: &[&str], rules: &[&RuleConfig], found: &mut Vec<Diagnostic>) {
    for rule in rules {
        let own = &rule.matches;
        let on: Vec<&str> = listeners
            .iter()
            .copied()
            .filter(|name| own.listener.as_deref().is_none_or(|listener| listener == *name))
            .collect();
        let better: Vec<_> =
            rules.iter().filter(|other| other.matches.specificity() > own.specificity()).collect();
        let mut winners = BTreeSet::new();
        let lost = on.iter().all(|listener| {
            cells(&own.hosts).all(|host| {
                cells(&own.models).all(|model| {
                    let wins = |other: &&&&RuleConfig| takes(&other.matches, own, listener, host, model);
                    let winner = better.iter().find(wins);
                    winners.extend(winner.map(|w| (w.name.as_str(), file(w))));
                    winner.is_some()
                })
            })
        });
        if !on.is_empty() && lost {
            let list: Vec<_> = winners.iter().map(|(name, file)| format!("\"{name}\" in {file}")).collect();
            let key = if rule.origin.has("match") { "match" } else { "" };
            found.push(
                rule.error(key, "is never reached: more specific rules take every request of it")
                    .found(format!("taken by {}", list.join(", ")))
                    .hint("listener comes before host, host before path, path before model"),
            );
        }
    }
}

fn cells(listed: &[String]) -> impl Iterator<Item = Option<&str>> {
    let rest = listed.is_empty().then_some(None);
    listed.iter().map(|text| Some(text.as_str())).chain(rest)
}

fn takes(other: &Match, own: &Match, listener: &str, host: Option<&str>, model: Option<&str>) -> bool {
    let lists = |list: &[String], text: Option<&str>| {
        list.is_empty() || text.is_some_and(|text| list.iter().any(|one| one == text))
    };
    other.listener.as_deref().is_none_or(|name| name == listener)
        && lists(&other.hosts, host)
        && lists(&other.models, model)
        && other.covers_path(&own.path_prefix)
}
