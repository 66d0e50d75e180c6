//! What must agree within a listener, and its certificates.

use std::path::Path;

use http::HeaderValue;
use kvgate_edge::pem::{Certificate, is_public};
use kvgate_edge::tls::Tls;

use super::document::Document;
use super::listener_types::ListenerConfig;
use super::types::GatewayConfig;

/// Days before its end from which a certificate is warned of.
const SOON: i64 = 14;

/// Checks every listener whose keys are in order.
pub(super) fn check(document: &mut Document, config: &GatewayConfig) {
    for (at, listener) in config.listeners.iter().enumerate() {
        let table = format!("listener[{at}]");
        if !document.is_broken(&table) {
            proxies(document, &table, listener);
            answers(document, &table, listener);
            redirect(document, &table, listener, config);
            tls(document, &table, listener);
        }
    }
}

fn proxies(document: &mut Document, table: &str, listener: &ListenerConfig) {
    if listener.proxy_protocol && listener.trusted_proxies.is_empty() {
        let error = document
            .error(&format!("{table}.proxy_protocol"), "is spoken by nobody: `trusted_proxies` is empty")
            .hint("name the networks of the balancers in `trusted_proxies`");
        document.report(error);
    }
}

fn answers(document: &mut Document, table: &str, listener: &ListenerConfig) {
    let encrypted = !listener.tls.certificates.is_empty();
    if encrypted && listener.redirect_https.is_some() {
        let error = document
            .error(
                &format!("{table}.redirect_https"),
                "is for listeners without TLS, and this one has certificates",
            )
            .hint("put it at the listener of port 80");
        document.report(error);
    }
    let Some(hsts) = &listener.hsts else { return };
    let key = format!("{table}.hsts");
    if HeaderValue::from_str(hsts).is_err() || !hsts.to_ascii_lowercase().contains("max-age=") {
        let error = document.error(&key, "is no Strict-Transport-Security").found(format!("{hsts:?}"));
        document.report(error.allowed("\"max-age=<seconds>\", and what may follow it"));
    } else if !encrypted && listener.trusted_proxies.is_empty() {
        let unused = document.error(&key, "is never sent: the listener has no TLS");
        document.report(unused.hint("put it at the listener with certificates").warning());
    }
}

/// A redirect to where nobody listens; whether TLS is spoken by a proxy in front is for the operator to know.
fn redirect(document: &mut Document, table: &str, listener: &ListenerConfig, config: &GatewayConfig) {
    let Some(port) = listener.redirect_https else { return };
    let serves = |other: &ListenerConfig| other.address.port() == port && !other.tls.certificates.is_empty();
    let proxied = !listener.trusted_proxies.is_empty();
    if proxied || document.is_broken("listener") || config.listeners.iter().any(serves) {
        return;
    }
    let nowhere = document
        .error(
            &format!("{table}.redirect_https"),
            "leads to a port where no listener of this file speaks TLS",
        )
        .found(port.to_string())
        .hint("name the port of a listener with certificates; right as it is where a balancer listens there");
    document.report(nowhere.warning());
}

fn tls(document: &mut Document, table: &str, listener: &ListenerConfig) {
    let tls = &listener.tls;
    if !tls.keys.is_empty() && tls.keys.len() != tls.certificates.len() {
        let error = document
            .error(&format!("{table}.tls.keys"), "does not hold one key for each certificate")
            .found(format!("{} for {}", tls.keys.len(), tls.certificates.len()))
            .hint(
                "list them in the order of `certificates`, or leave `keys` out if they are in the same files",
            );
        return document.report(error);
    }
    let Some(files) = tls.files() else {
        if tls.client_ca.is_some() {
            let error = document
                .error(&format!("{table}.tls.client_ca"), "is of no use without `certificates`")
                .hint("add `certificates`");
            document.report(error);
        }
        return;
    };
    let key_of = |file: &Path| {
        let index = |list: &[std::path::PathBuf]| list.iter().position(|other| other == file);
        match (index(&tls.certificates), index(&tls.keys)) {
            (Some(at), _) => format!("{table}.tls.certificates[{at}]"),
            (_, Some(at)) => format!("{table}.tls.keys[{at}]"),
            _ if tls.client_ca.as_deref() == Some(file) => format!("{table}.tls.client_ca"),
            _ => format!("{table}.tls"),
        }
    };
    match Tls::load(&files) {
        Ok(read) => {
            for (certificate, (_, key)) in read.certificates().iter().zip(&files.certificates) {
                self::certificate(document, &key_of(&certificate.file), certificate, (&key_of(key), key));
            }
        }
        Err(problems) => {
            for problem in problems {
                let error = document.error(&key_of(&problem.file), problem.problem);
                let error = error.found(problem.file.display().to_string());
                document.report(error.hint("name a PEM file; the path is relative to this one"));
            }
        }
    }
}

/// What is to be said of a certificate that can be used: it is too old, or everybody may read its key.
pub(super) fn certificate(
    document: &mut Document,
    at: &str,
    certificate: &Certificate,
    (key_at, key): (&str, &Path),
) {
    let days = (certificate.expires - unix_seconds()).div_euclid(24 * 3600);
    if days < SOON {
        let message = match days {
            ..0 => format!("expired {} days ago", -days),
            days => format!("expires within {} days", days + 1),
        };
        let warning = document.error(at, message).found(certificate.file.display().to_string());
        document.report(warning.hint("renew it: the files are read again when they change").warning());
    }
    if is_public(key) {
        let warning = document.error(key_at, "can be read by everybody on this machine");
        let warning = warning.found(key.display().to_string());
        document.report(warning.hint("chmod o-r, or 0600 for the user that runs the gateway").warning());
    }
}

fn unix_seconds() -> i64 {
    i64::try_from(crate::world::unix_millis() / 1000).unwrap_or(i64::MAX)
}
