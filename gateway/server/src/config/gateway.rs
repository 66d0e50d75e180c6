//! `gateway.toml`: from what is written to [`GatewayConfig`], and the checks that need more than one key.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use kvgate_core::schema::show_size;
use serde_json::{Map, Value};

use super::diagnostic::Diagnostic;
use super::document::{Document, complete};
use super::gateway_fields::GATEWAY;
use super::source::Origin;
use super::types::{GatewayConfig, ProbeConfig, ProbeMode, RetryConfig, TelemetryConfig};

/// The configuration, and its tables for rules to stand over. Problems are left in the document; keys with
/// problems have their defaults.
pub(super) fn gateway(document: &mut Document, folder: &Path) -> Option<(GatewayConfig, Map<String, Value>)> {
    let mut tables = complete(document.given.clone(), GATEWAY, &Map::new());
    let listeners = tables.get_mut("listener").and_then(Value::as_array_mut);
    if let Some(listeners) = listeners.filter(|list| list.is_empty()) {
        let one = GATEWAY.iter().find(|t| t.name == "listener")?;
        listeners.push(Value::Object(super::document::with_defaults(Map::new(), one.fields)));
    }
    let mut config: GatewayConfig = match serde_json::from_value(Value::Object(tables.clone())) {
        Ok(config) => config,
        Err(e) => {
            let error = document.error("", format!("does not fit the gateway's own structure: {e}"));
            document.report(error);
            return None;
        }
    };
    config.server.rules = folder.join(&config.server.rules);
    config.server.tokenizers = folder.join(&config.server.tokenizers);
    config.server.upgrade_socket = config.server.upgrade_socket.map(|socket| folder.join(socket));
    config.admin.token_file = config.admin.token_file.map(|file| folder.join(file));
    config.listeners.iter_mut().for_each(|listener| listener.tls.within(folder));
    listener_checks(document, &config);
    super::listener_checks::check(document, &config);
    admin_checks(document, &config);
    folder_checks(document, &config);
    if config.feed.backoff_min > config.feed.backoff_max && !document.is_broken("feed") {
        let error = document
            .error("feed.backoff_min", "is longer than `feed.backoff_max`")
            .found(document.origin.text("feed.backoff_min"))
            .hint("make it the shorter of the two");
        document.report(error);
    }
    telemetry(document, &config.telemetry);
    probe(document, &config.probe);
    connections(document, &config);
    if config.limits.body > config.server.body_memory
        && !document.is_broken("limits")
        && !document.is_broken("server")
    {
        document.report(body_limit(&document.origin, &config));
    }
    Some((config, tables))
}

/// An answer that is too old before the next may come.
pub(super) fn telemetry(document: &mut Document, telemetry: &TelemetryConfig) {
    if telemetry.max_age > telemetry.interval || document.is_broken("telemetry") {
        return;
    }
    let keys = ["telemetry.max_age", "telemetry.interval"];
    let key = keys.into_iter().find(|key| document.origin.has(key)).unwrap_or(keys[0]);
    let show = kvgate_core::schema::show_duration;
    let error = document
        .error(key, "makes every answer too old before the next: `max_age` is not longer than `interval`")
        .found(format!("{} and {}", show(telemetry.max_age), show(telemetry.interval)))
        .hint("make `max_age` some three times `interval`");
    document.report(error);
}

/// Probes that no engine can pass, that are never sent as they are described, or that take longer than they are apart.
pub(super) fn probe(document: &mut Document, probe: &ProbeConfig) {
    if document.is_broken("probe") {
        return;
    }
    if probe.codes.as_ref().is_some_and(Vec::is_empty) {
        let error = document
            .error("probe.codes", "leaves no status that an engine could answer: all of them would be down")
            .found("[]")
            .allowed("at least one status")
            .hint("leave it out: any answer but a 5xx is then well");
        document.report(error);
    }
    let of_http = ["probe.path", "probe.codes"].into_iter().filter(|_| probe.mode == ProbeMode::Tcp);
    for key in of_http.filter(|key| document.origin.has(key)).collect::<Vec<_>>() {
        let unused = document
            .error(key, "is not used: a probe of the mode \"tcp\" asks for nothing")
            .found(document.origin.text(key))
            .hint("remove it, or write mode = \"http\"");
        document.report(unused.warning());
    }
    let given = ["probe.timeout", "probe.interval"].into_iter().find(|key| document.origin.has(key));
    if let Some(key) = given.filter(|_| probe.mode != ProbeMode::Off && probe.timeout > probe.interval) {
        let show = kvgate_core::schema::show_duration;
        let late = document
            .error(key, "makes `timeout` longer than `interval`: an engine that hangs is asked less often")
            .found(format!("{} and {}", show(probe.timeout), show(probe.interval)))
            .hint("make `timeout` the shorter of the two");
        document.report(late.warning());
    }
}

/// Reasons to ask another endpoint where none is asked, in a pool.
pub(super) fn retry(document: &mut Document, retry: &RetryConfig) {
    if document.is_broken("retry") || retry.attempts > 1 {
        return;
    }
    let on =
        |value: &Value| *value == Value::Bool(true) || value.as_array().is_some_and(|list| !list.is_empty());
    // `resend` is also of use on the same endpoint, whose connection broke
    for key in ["busy", "statuses"] {
        let given = document.given.get("retry").and_then(|table| table.get(key));
        if given.is_some_and(on) {
            let unused = document
                .error(
                    &format!("retry.{key}"),
                    "is not used: `attempts` is 1, so that no other endpoint is asked",
                )
                .hint("remove it, or raise `attempts`");
            document.report(unused.warning());
        }
    }
}

fn connections(document: &mut Document, config: &GatewayConfig) {
    let (key, connections) = ("connections.max_per_address", &config.connections);
    if connections.max_per_address <= connections.max
        || !document.origin.has(key)
        || document.is_broken("connections")
    {
        return;
    }
    let unused = document
        .error(key, format!("bounds nobody: it is more than `connections.max`, {}", connections.max))
        .found(document.origin.text(key))
        .hint("lower it, or write 0 for no limit but `max`");
    document.report(unused.warning());
}

/// A limit that no request can reach.
pub(super) fn body_limit(origin: &Origin, gateway: &GatewayConfig) -> Diagnostic {
    let memory = show_size(gateway.server.body_memory);
    origin
        .error("limits.body", format!("is more than all requests share, `server.body_memory`, {memory}"))
        .found(origin.text("limits.body"))
        .hint("lower it, or raise `server.body_memory` in gateway.toml")
}

fn listener_checks(document: &mut Document, config: &GatewayConfig) {
    for (at, listener) in config.listeners.iter().enumerate() {
        let (name, address) = (format!("listener[{at}].name"), format!("listener[{at}].address"));
        for (before, other) in config.listeners.iter().take(at).enumerate() {
            if document.is_broken(&format!("listener[{at}]"))
                || document.is_broken(&format!("listener[{before}]"))
            {
                continue;
            }
            if other.name == listener.name {
                let error = document
                    .error(&name, format!("is also the name of listener[{before}]"))
                    .found(format!("\"{}\"", listener.name))
                    .hint("give each [[listener]] a `name` of its own");
                document.report(error);
            }
            if collide(other.address, listener.address) {
                let error = document
                    .error(&address, format!("is taken by listener[{before}], {}", other.address))
                    .found(format!("\"{}\"", listener.address))
                    .hint("give each [[listener]] an `address` of its own");
                document.report(error);
            }
        }
        if collide(config.admin.address, listener.address) && !document.is_broken("admin") {
            let error = document
                .error("admin.address", format!("is taken by listener[{at}], {}", listener.address))
                .found(format!("\"{}\"", config.admin.address))
                .hint("the admin surface has an address of its own");
            document.report(error);
        }
    }
}

/// Whether both cannot be bound at once.
fn collide(a: SocketAddr, b: SocketAddr) -> bool {
    let everything = |one: IpAddr, other: IpAddr| {
        one.is_unspecified() && (one.is_ipv6() || one.is_ipv4() == other.is_ipv4())
    };
    a.port() == b.port() && (a.ip() == b.ip() || everything(a.ip(), b.ip()) || everything(b.ip(), a.ip()))
}

fn admin_checks(document: &mut Document, config: &GatewayConfig) {
    if document.is_broken("admin") {
        return;
    }
    let admin = &config.admin;
    match &admin.token_file {
        None if !admin.address.ip().is_loopback() => {
            let error = document
                .error("admin.address", "is not a loopback address, and there is no `admin.token_file`")
                .found(format!("\"{}\"", admin.address))
                .allowed("an address in 127.0.0.0/8 or [::1]; any with `token_file`")
                .hint("add `token_file`, or listen on 127.0.0.1");
            document.report(error);
        }
        None => {}
        Some(file) => {
            let token = std::fs::read_to_string(file);
            let wrong = match &token {
                Err(e) => format!("cannot be read: {e}"),
                Ok(text) if text.trim().is_empty() => "holds no token".into(),
                Ok(_) => return,
            };
            let error = document
                .error("admin.token_file", wrong)
                .found(file.display().to_string())
                .hint("write the token into it, in one line");
            document.report(error);
        }
    }
}

fn folder_checks(document: &mut Document, config: &GatewayConfig) {
    let mut check = |key: &str, folder: &PathBuf, needed: bool| {
        if folder.is_dir() || document.is_broken(key) || !(needed || document.origin.has(key)) {
            return;
        }
        let wrong = if folder.exists() { "is not a folder" } else { "is missing" };
        let error = document
            .error(key, wrong)
            .found(folder.display().to_string())
            .hint("make the folder, or name another; the path is relative to this file");
        document.report(error);
    };
    check("server.rules", &config.server.rules, true);
    check("server.tokenizers", &config.server.tokenizers, false);
}
