//! What the process listens on.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use kvgate_core::TierKind;
use kvgate_edge::{Listener, Opening};

use crate::config::{Effective, GatewayConfig, Provenance};
use crate::life::Inherited;

/// Where a configuration comes from.
pub struct Place<'a> {
    /// Its `gateway.toml`.
    pub file: &'a Path,
    /// The tiers it may name.
    pub kinds: &'a [TierKind],
}

impl Place<'_> {
    /// Where a key of `gateway.toml` stands.
    fn of(&self, key: &str) -> String {
        let found = Effective::read(self.file, self.kinds)
            .and_then(|effective| effective.gateway.into_iter().find(|setting| setting.key == key));
        match found.map(|setting| setting.from) {
            Some(Provenance::File { file, line }) => format!("{}:{line}: {key}", file.display()),
            Some(Provenance::Environment { variable }) => format!("{variable}: {key}"),
            Some(Provenance::Default) | None => format!("{key}, by default"),
        }
    }
}

/// Everything that is listened on.
pub struct Sockets {
    /// For clients.
    pub edge: Vec<Listener>,
    /// For operators.
    pub admin: TcpListener,
}

impl Sockets {
    /// Takes over what the process before had, and binds the rest, before anything else is started.
    ///
    /// # Errors
    /// In words: what cannot be bound, and where it is configured.
    pub fn bind(
        gateway: &GatewayConfig,
        inherited: &mut Option<Inherited>,
        place: &Place<'_>,
    ) -> Result<Self, String> {
        let mut bind = |address: SocketAddr, key: &str| {
            if let Some(socket) = inherited.as_mut().and_then(|inherited| inherited.take(address)) {
                return Ok(socket);
            }
            kvgate_edge::bind(address, gateway.connections.backlog).map_err(|e| {
                let hint = match e.kind() {
                    ErrorKind::AddrInUse => {
                        "; another process listens there: `kvgate run --upgrade` takes over from one"
                    }
                    ErrorKind::PermissionDenied => "; ports below 1024 want CAP_NET_BIND_SERVICE",
                    _ => "",
                };
                format!("{}: cannot listen on {address}: {e}{hint}", place.of(key))
            })
        };
        let edge = gateway.listeners.iter().enumerate().map(|(at, listener)| {
            let socket = bind(listener.address, &format!("listener[{at}].address"))?;
            Ok(Listener { name: listener.name.clone(), socket, opening: Opening::default() })
        });
        let edge = edge.collect::<Result<_, String>>()?;
        let admin = bind(gateway.admin.address, "admin.address")?;
        admin.set_nonblocking(true).map_err(|e| format!("admin: {e}"))?;
        Ok(Self { edge, admin })
    }

    /// The same sockets once more, to be handed over one day.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn copies(&self) -> std::io::Result<Vec<TcpListener>> {
        let edge = self.edge.iter().map(|listener| &listener.socket);
        edge.chain([&self.admin]).map(TcpListener::try_clone).collect()
    }
}
