use std::{fmt, path::PathBuf, str::FromStr};

use super::Error;

/// Where to connect: `tcp://host:port` (name, IPv4, IPv6 with or without brackets)
/// or `ipc://path` (`ipc://@name` for the abstract namespace).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// Resolved again at every connect.
    Tcp {
        /// Name or address, without brackets.
        host: String,
        /// Never 0.
        port: u16,
    },
    /// A Unix domain socket; an abstract name starts with NUL.
    Ipc(PathBuf),
}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = |why| Error::Endpoint(text.chars().take(200).collect(), why);
        if let Some(path) = text.strip_prefix("ipc://") {
            return match path.strip_prefix('@') {
                _ if path.contains('\0') => Err(bad("NUL in path")),
                Some("") => Err(bad("no path")),
                None if path.is_empty() || path == "*" => Err(bad("no path")),
                Some(name) => Ok(Self::Ipc(format!("\0{name}").into())),
                None => Ok(Self::Ipc(path.into())),
            };
        }
        let rest = text.strip_prefix("tcp://").ok_or_else(|| bad("want tcp:// or ipc://"))?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| bad("no port"))?;
        let port = match port.parse::<u16>() {
            Ok(port) if port > 0 && !rest.ends_with("+0") => port,
            _ => return Err(bad("bad port")),
        };
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or_else(|| bad("unclosed bracket"))?,
            None => host,
        };
        match host {
            "" | "*" => Err(bad("a wildcard can be bound, not connected to")),
            _ if host.contains([';', '/', '[', ']', ' ', '\0']) => Err(bad("bad host")),
            _ => Ok(Self::Tcp { host: host.into(), port }),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Self::Ipc(path) => write!(f, "ipc://{}", path.to_string_lossy().replacen('\0', "@", 1)),
        }
    }
}
