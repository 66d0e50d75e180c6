//! How a configuration file is declared: tables of fields, from which validation, defaults, `kvgate schema` and
//! the documentation come.

use std::net::{IpAddr, SocketAddr};

use kvgate_core::schema::Field;
use kvgate_edge::network::Network;

/// A table of a configuration file.
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// Its name: `server` for `[server]`; empty for the keys above all tables.
    pub name: &'static str,
    /// How often it stands in the file.
    pub times: Times,
    /// What it is for.
    pub doc: &'static str,
    /// Its keys.
    pub fields: &'static [Field],
    /// The keys without which it means nothing.
    pub required: &'static [&'static str],
    /// The texts that must have a form.
    pub forms: &'static [(&'static str, Form)],
}

/// How often a table stands in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// `[name]`, or not at all.
    Once,
    /// `[[name]]`, any number of times.
    Many,
    /// `[name]` in a rule, over the table of the same name in gateway.toml: an absent key is taken from there.
    Over,
}

impl Table {
    /// As it is written in a file: `[server]`, `[[listener]]`.
    pub fn header(&self) -> String {
        match (self.name, self.times) {
            ("", _) => "top of the file".into(),
            (name, Times::Many) => format!("[[{name}]]"),
            (name, _) => format!("[{name}]"),
        }
    }

    /// The form of a text, if it must have one.
    pub fn form(&self, key: &str) -> Option<Form> {
        self.forms.iter().find(|(name, _)| *name == key).map(|(_, form)| *form)
    }
}

/// A form that a text, or each text of a list, must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A name for metrics, logs and paths.
    Name,
    /// An address to listen on.
    Socket,
    /// An address to connect to.
    Peer,
    /// A ZMQ address.
    Zmq,
    /// A host as clients name it.
    Host,
    /// The name in an engine's certificate.
    Certified,
    /// The file of a key, which may be that of several certificates.
    Key,
    /// The start of a path.
    Path,
    /// A network of addresses.
    Network,
}

impl Form {
    /// The form in words.
    pub fn allowed(self) -> &'static str {
        match self {
            Self::Name => "1 to 64 letters, digits, `.`, `_` or `-`",
            Self::Socket => "an IP address and a port, \"127.0.0.1:8080\" or \"[::1]:8080\"",
            Self::Peer => "a host and a port, \"10.0.0.7:8000\" or \"engine-0.svc:8000\"",
            Self::Zmq => "a ZMQ address, \"tcp://10.0.0.7:5557\"",
            Self::Host | Self::Certified => "a host name or IP address without port or wildcard",
            Self::Key => "a file",
            Self::Path => "a path that begins with `/`",
            Self::Network => "an address, or a network as \"10.0.0.0/8\" or \"fd00::/8\"",
        }
    }

    /// Whether the text has the form; else what to do about it, if that can be said.
    pub fn check(self, text: &str) -> Result<(), Option<String>> {
        match self {
            Self::Name => is_name(text).then_some(()).ok_or(None),
            Self::Socket => socket(text),
            Self::Peer => peer(text),
            Self::Zmq => match text.strip_prefix("tcp://") {
                Some(rest) => split_peer(rest).map(drop).ok_or(None),
                None if text.contains("://") => Err(Some("only tcp:// is spoken".into())),
                None => Err(split_peer(text).map(|_| format!("write \"tcp://{text}\""))),
            },
            Self::Host => host(text),
            Self::Certified => match split_peer(text) {
                Some((host, _)) => Err(Some(format!("write \"{host}\""))),
                None => host(text),
            },
            Self::Key => Ok(()),
            Self::Network => text.parse::<Network>().map(drop).map_err(|()| None),
            Self::Path => path(text),
        }
    }
}

/// The start of a path, without query.
fn path(text: &str) -> Result<(), Option<String>> {
    let good =
        |text: &str| text.starts_with('/') && !text.contains(|c: char| c.is_control() || " ?#".contains(c));
    if good(text) {
        return Ok(());
    }
    let rest = match text.split_once("://") {
        Some((_, rest)) => rest.split_once('/').map_or("", |(_, path)| path),
        None => text,
    };
    let guess = format!("/{}", rest.split(['?', '#']).next().unwrap_or_default().trim_start_matches('/'));
    Err(good(&guess).then(|| format!("write \"{guess}\"")))
}

fn is_name(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
        && text != "."
        && text != ".."
}

fn socket(text: &str) -> Result<(), Option<String>> {
    if let Ok(address) = text.parse::<std::net::SocketAddr>() {
        return if address.port() == 0 { Err(Some("name a port".into())) } else { Ok(()) };
    }
    if text.parse::<std::net::IpAddr>().is_ok() {
        return Err(Some("add a port".into()));
    }
    let guess = match text.rsplit_once(':') {
        Some(("" | "*", port)) => {
            return Err(port_of(port).map(|port| format!("for every address write \"0.0.0.0:{port}\"")));
        }
        Some(("localhost", port)) => port,
        _ => text,
    };
    Err(port_of(guess).map(|port| format!("write \"127.0.0.1:{port}\"")))
}

/// A port that is written as one: `80`, never `080`.
fn port_of(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|port| digits && *port > 0)
}

fn peer(text: &str) -> Result<(), Option<String>> {
    if let Some((scheme, rest)) = text.split_once("://") {
        let rest = rest.split('/').next().unwrap_or_default();
        let port = if scheme == "https" { 443 } else { 80 };
        let guess = if is_host(rest) { format!("{rest}:{port}") } else { rest.to_owned() };
        return Err(split_peer(&guess).map(|_| match scheme {
            "https" => format!("write \"{guess}\", and the name in the engine's certificate as `tls`"),
            _ => format!("write \"{guess}\""),
        }));
    }
    match split_peer(text) {
        Some(_) => Ok(()),
        None if port_of(text).is_some() => Err(Some(format!("write \"127.0.0.1:{text}\""))),
        None if is_host(text) => Err(Some(format!("add a port: \"{text}:8000\""))),
        None => Err(None),
    }
}

/// `host:port` with a port of 1 to 65535; the host of an IPv6 address keeps its brackets.
pub(super) fn split_peer(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let port = port_of(port)?;
    is_host(host).then_some((host, port))
}

/// `host:port` as everybody writes it, for one engine must not pass for two: in lower case, IPv6 in its short form, and
/// what is IPv4 within IPv6 as IPv4.
pub(super) fn canonical_peer(text: &str) -> Option<String> {
    let (host, port) = split_peer(text)?;
    let ip = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')?.parse::<IpAddr>().ok());
    Some(match ip {
        Some(ip) => SocketAddr::new(ip.to_canonical(), port).to_string(),
        None => format!("{}:{port}", host.to_ascii_lowercase()),
    })
}

/// A name of letters, digits, `-`, `_` and dots, an IPv4 address, or an IPv6 address in brackets. What resolvers would
/// take for a number is none but in the usual form (WHATWG URL, "ends in a number"): `2130706433` and `0x7f.1` are not.
fn is_host(text: &str) -> bool {
    if let Some(inner) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
        return inner.parse::<std::net::Ipv6Addr>().is_ok();
    }
    let label = |l: &str| {
        (1..=63).contains(&l.len())
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
            && !l.starts_with('-')
            && !l.ends_with('-')
    };
    text.len() <= 253 && text.split('.').all(label) && (!ends_in_number(text) || is_ipv4(text))
}

fn ends_in_number(text: &str) -> bool {
    let last = text.rsplit('.').next().unwrap_or_default();
    let hex = last.strip_prefix("0x").or_else(|| last.strip_prefix("0X"));
    last.bytes().all(|b| b.is_ascii_digit())
        || hex.is_some_and(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()))
}

fn is_ipv4(text: &str) -> bool {
    text.parse::<std::net::Ipv4Addr>().is_ok()
}

fn host(text: &str) -> Result<(), Option<String>> {
    if text.contains('*') {
        return Err(Some("wildcards are not matched: list the hosts, or leave `hosts` out for any".into()));
    }
    if let Some((_, rest)) = text.split_once("://") {
        let rest = rest.split('/').next().unwrap_or_default();
        let guess = split_peer(rest).map_or(rest, |(host, _)| host);
        return Err(is_host(guess).then(|| format!("write \"{guess}\"")));
    }
    if let Some((host, _)) = split_peer(text) {
        return Err(Some(format!("write \"{host}\": the port is the listener's matter (`listener`)")));
    }
    if text.parse::<std::net::Ipv6Addr>().is_ok() {
        return Err(Some(format!("write \"[{text}]\"")));
    }
    is_host(text).then_some(()).ok_or(None)
}

/// The nearest of `words` to what was written, if one is near enough to have been meant.
pub(super) fn nearest<'a>(found: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let found = found.to_lowercase().replace('_', "-");
    words
        .into_iter()
        .map(|word| (strsim::damerau_levenshtein(&found, &word.replace('_', "-")), word))
        .filter(|(distance, word)| *distance <= 1 + word.len().max(found.len()) / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, word)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let good = [
            (Form::Name, &["a", "qwen3", "a.b_c-1"] as &[&str]),
            (Form::Socket, &["127.0.0.1:8080", "0.0.0.0:1", "[::1]:65535"]),
            (
                Form::Peer,
                &[
                    "127.0.0.1:1",
                    "h:65535",
                    "engine-0.svc.cluster.local:8000",
                    "[::1]:80",
                    "a_b:1",
                    "1a.2b:1",
                ],
            ),
            (Form::Zmq, &["tcp://127.0.0.1:5557", "tcp://h:1"]),
            (Form::Host, &["llm.example.com", "localhost", "10.0.0.1", "[::1]"]),
            (Form::Path, &["/", "/v1", "/v1/", "/a%20b"]),
        ];
        for (form, texts) in good {
            for text in texts {
                assert_eq!(form.check(text), Ok(()), "{form:?} {text}");
            }
        }
        let bad = [
            (Form::Name, &["", "a b", "a/b", "é", "..", &"x".repeat(65)] as &[&str]),
            (Form::Socket, &["127.0.0.1", ":80", "localhost:80", "127.0.0.1:0", "1.2.3.4:99999", "x", ""]),
            (
                Form::Peer,
                &[
                    "h",
                    "h:0",
                    "h:65536",
                    "h:+1",
                    "h:",
                    ":1",
                    "http://h:1",
                    "::1:80",
                    "1.2.3:80",
                    "a..b:1",
                    "h:080",
                    "2130706433:1",
                    "h.1:1",
                    "0x7f000001:1",
                ],
            ),
            (Form::Zmq, &["127.0.0.1:5557", "ipc:///x", "tcp://*:5557", "tcp://h"]),
            (Form::Host, &["*.example.com", "h:80", "https://h", "a b", "::1", ""]),
            (Form::Path, &["v1", "/v1?x", "/a b", "", "/#"]),
        ];
        for (form, texts) in bad {
            for text in texts {
                assert!(form.check(text).is_err(), "{form:?} {text}");
            }
        }
    }

    #[test]
    fn one_address_is_written_in_one_way() {
        for (text, canonical) in [
            ("Engine-0.Local:80", "engine-0.local:80"),
            ("127.0.0.1:80", "127.0.0.1:80"),
            ("[::FFFF:127.0.0.1]:80", "127.0.0.1:80"),
            ("[::ffff:7f00:1]:80", "127.0.0.1:80"),
            ("[0:0::1]:80", "[::1]:80"),
            ("[FD00::0A]:80", "[fd00::a]:80"),
        ] {
            assert_eq!(canonical_peer(text).as_deref(), Some(canonical), "{text}");
        }
        assert_eq!(canonical_peer("127.0.0.1:080"), None);
    }

    #[test]
    fn the_nearest_word_is_near() {
        let words = ["listener", "hosts", "path_prefix", "models"];
        assert_eq!(nearest("listner", words), Some("listener"));
        assert_eq!(nearest("host", words), Some("hosts"));
        assert_eq!(nearest("path-prefix", words), Some("path_prefix"));
        assert_eq!(nearest("Models", words), Some("models"));
        assert_eq!(nearest("timeout", words), None);
    }
}
