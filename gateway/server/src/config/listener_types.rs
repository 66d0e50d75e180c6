//! The configuration of listeners and of what their connections may take up.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvgate_core::schema::{duration, size};
use kvgate_edge::network::Network;
use kvgate_edge::tls::{MinVersion, TlsFiles};
use serde::Deserialize;

/// `[[listener]]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenerConfig {
    /// What rules call it; unique.
    pub name: String,
    /// Where it listens; unique.
    pub address: SocketAddr,
    /// Whether answers say which endpoint and tier they come from.
    pub expose_routing: bool,
    /// Who may tell whose connection or request it is.
    #[serde(deserialize_with = "networks")]
    pub trusted_proxies: Vec<Network>,
    /// Whether connections begin with a PROXY header.
    pub proxy_protocol: bool,
    /// Whether engines are told whose request it is.
    pub forwarded: bool,
    /// The port of TLS to which requests are sent instead of being served.
    pub redirect_https: Option<u16>,
    /// The value of `Strict-Transport-Security`.
    pub hsts: Option<String>,
    /// TLS, if there is any.
    pub tls: ListenerTls,
}

fn networks<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<Network>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    let parse = |text: &String| text.parse().map_err(|()| serde::de::Error::custom("is not a network"));
    texts.iter().map(parse).collect()
}

/// `[listener.tls]`; files are joined to the folder of `gateway.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenerTls {
    /// Certificates and their chains; none: no TLS.
    pub certificates: Vec<PathBuf>,
    /// Their keys; none: each is in the file of its certificate.
    pub keys: Vec<PathBuf>,
    /// The authorities that vouch for clients.
    pub client_ca: Option<PathBuf>,
    /// `1.2` or `1.3`.
    pub min_version: String,
    /// Whether HTTP/2 is offered.
    pub http2: bool,
}

impl ListenerTls {
    /// What is to be read; `None` without TLS.
    pub fn files(&self) -> Option<TlsFiles> {
        if self.certificates.is_empty() {
            return None;
        }
        let key =
            |(at, chain): (usize, &PathBuf)| (chain.clone(), self.keys.get(at).unwrap_or(chain).clone());
        Some(TlsFiles {
            certificates: self.certificates.iter().enumerate().map(key).collect(),
            client_ca: self.client_ca.clone(),
            min_version: if self.min_version == "1.3" { MinVersion::Tls13 } else { MinVersion::Tls12 },
            http2: self.http2,
        })
    }

    /// All its files.
    pub fn all(&self) -> impl Iterator<Item = &PathBuf> {
        self.certificates.iter().chain(&self.keys).chain(&self.client_ca)
    }

    /// With its files in this folder, where they have none.
    pub(super) fn within(&mut self, folder: &Path) {
        let files = self.certificates.iter_mut().chain(&mut self.keys).chain(&mut self.client_ca);
        files.for_each(|file| *file = folder.join(&*file));
    }
}

/// `[http2]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Http2Config {
    /// Requests at once on a connection.
    pub streams: u32,
    /// Bytes of one body ahead of its reader.
    #[serde(deserialize_with = "size")]
    pub stream_window: u64,
    /// Bytes of all bodies of a connection.
    #[serde(deserialize_with = "size")]
    pub connection_window: u64,
    /// Frames without a request a second.
    pub control_frames: u32,
    /// Requests taken back a second.
    pub resets: u32,
}

/// `[connections]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectionsConfig {
    /// The most at once.
    pub max: usize,
    /// The most of one client; 0 is no limit.
    pub max_per_address: usize,
    /// The most that wait to be accepted.
    pub backlog: u32,
    /// For a request's head.
    #[serde(deserialize_with = "duration")]
    pub head_timeout: Duration,
    /// Between two requests.
    #[serde(deserialize_with = "duration")]
    pub keep_alive: Duration,
    /// Bytes of a head.
    #[serde(deserialize_with = "size")]
    pub head: u64,
    /// Fields of a head.
    pub fields: usize,
    /// Bytes of a request target.
    #[serde(deserialize_with = "size")]
    pub uri: u64,
}
