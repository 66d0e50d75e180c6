//! Who the client is, where proxies stand in front, and what engines are told of it: `X-Forwarded-For` and
//! `X-Forwarded-Proto`.
//!
//! What a peer says of who it speaks for is believed only of trusted proxies, and then up to the first address, from
//! the right, that is none of them. What anybody else says in these fields does not reach the engine.

use std::net::{IpAddr, SocketAddr};

use http::{HeaderMap, HeaderName};
use kvgate_edge::network::Network;
use pingora_core::Result;
use pingora_http::RequestHeader;

const FOR: &str = "x-forwarded-for";
const PROTO: &str = "x-forwarded-proto";
/// All that tell of a client: from strangers they are dropped. The first two are written anew.
const TOLD: [HeaderName; 7] = [
    HeaderName::from_static(FOR),
    HeaderName::from_static(PROTO),
    HeaderName::from_static("x-forwarded-host"),
    HeaderName::from_static("x-forwarded-port"),
    HeaderName::from_static("x-forwarded-server"),
    HeaderName::from_static("x-real-ip"),
    http::header::FORWARDED,
];

/// Whose request it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Origin {
    /// The client, beyond all trusted proxies.
    pub client: Option<IpAddr>,
    /// Whether the client speaks TLS: with us, or with the trusted proxy before us.
    pub secure: bool,
    /// Who connected to us, or whom the PROXY protocol names.
    peer: Option<IpAddr>,
    /// Whether it may tell of others.
    trusted: bool,
}

impl Origin {
    /// Of a request that came from this peer, by TLS or not.
    pub fn of(headers: &HeaderMap, peer: Option<IpAddr>, tls: bool, proxies: &[Network]) -> Self {
        let peer = peer.map(|peer| peer.to_canonical());
        let is_proxy = |address: IpAddr| proxies.iter().any(|network| network.contains(address));
        let trusted = peer.is_some_and(is_proxy);
        if !trusted {
            return Self { client: peer, secure: tls, peer, trusted };
        }
        let mut client = peer;
        for hop in hops(headers).rev() {
            // what cannot be read was not written by one of ours: whoever wrote it is the last that is known
            let Some(address) = address(hop) else { break };
            client = Some(address);
            if !is_proxy(address) {
                break;
            }
        }
        let told = headers.get(PROTO).map(|proto| proto.as_bytes().eq_ignore_ascii_case(b"https"));
        Self { client, secure: told.unwrap_or(tls), peer, trusted }
    }

    /// Writes into a request for an engine whose it is.
    ///
    /// # Errors
    /// Never, but that the head takes the fields.
    pub fn tell(&self, head: &mut RequestHeader) -> Result<()> {
        let proto = if self.secure { "https" } else { "http" };
        let peer = self.peer.map(|peer| peer.to_string());
        if !self.trusted {
            for name in &TOLD {
                head.remove_header(name);
            }
            if let Some(peer) = peer {
                head.insert_header(FOR, peer)?;
            }
            return head.insert_header(PROTO, proto).map(drop);
        }
        let before: Vec<_> = head.headers.get_all(FOR).iter().map(|line| line.as_bytes().to_vec()).collect();
        let all: Vec<_> = before.into_iter().chain(peer.map(String::into_bytes)).collect();
        head.insert_header(FOR, all.join(&b", "[..]))?;
        if !head.headers.contains_key(PROTO) {
            head.insert_header(PROTO, proto)?;
        }
        Ok(())
    }
}

/// The addresses of all lines, as they are written.
fn hops(headers: &HeaderMap) -> impl DoubleEndedIterator<Item = &[u8]> {
    let lines: Vec<_> = headers.get_all(FOR).iter().collect();
    let hops: Vec<_> = lines.iter().flat_map(|line| line.as_bytes().split(|b| *b == b',')).collect();
    hops.into_iter()
}

/// An address, perhaps with a port.
fn address(hop: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(hop).ok()?.trim();
    let plain = text.parse().ok();
    let bracketed = || text.strip_prefix('[')?.strip_suffix(']')?.parse().ok();
    let with_port = || text.parse::<SocketAddr>().ok().map(|socket| socket.ip());
    plain.or_else(bracketed).or_else(with_port).map(|address: IpAddr| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(fields: &[(&'static str, &str)]) -> RequestHeader {
        let mut head = RequestHeader::build("GET", b"/", None).unwrap();
        for (name, value) in fields {
            head.append_header(*name, *value).unwrap();
        }
        head
    }

    fn origin(head: &RequestHeader, peer: &str, tls: bool) -> Origin {
        let proxies: Vec<Network> = ["10.0.0.0/8", "fd00::/8"].iter().map(|n| n.parse().unwrap()).collect();
        Origin::of(&head.headers, Some(peer.parse().unwrap()), tls, &proxies)
    }

    #[test]
    fn the_client_is_the_last_one_that_no_proxy_of_ours_is() {
        for (peer, lines, client) in [
            ("203.0.113.7", &[][..], "203.0.113.7"),
            ("203.0.113.7", &["198.51.100.1"], "203.0.113.7"),
            ("10.0.0.1", &[], "10.0.0.1"),
            ("::ffff:10.0.0.1", &["198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["1.1.1.1, 198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["1.1.1.1, 198.51.100.1,10.9.9.9"], "198.51.100.1"),
            ("10.0.0.1", &["1.1.1.1", "198.51.100.1", " 10.9.9.9 "], "198.51.100.1"),
            ("fd00::1", &["198.51.100.1:4711"], "198.51.100.1"),
            ("fd00::1", &["[2001:db8::1]:4711"], "2001:db8::1"),
            ("fd00::1", &["[2001:db8::1]"], "2001:db8::1"),
            ("10.0.0.1", &["10.0.0.2, 10.0.0.3"], "10.0.0.2"),
            ("10.0.0.1", &["1.1.1.1, unknown"], "10.0.0.1"),
            ("10.0.0.1", &["1.1.1.1, unknown, 10.0.0.3"], "10.0.0.3"),
            ("10.0.0.1", &["1.1.1.1, , 10.0.0.3"], "10.0.0.3"),
            ("10.0.0.1", &[""], "10.0.0.1"),
        ] {
            let fields: Vec<_> = lines.iter().map(|line| (FOR, *line)).collect();
            let found = origin(&head(&fields), peer, false).client;
            assert_eq!(found, Some(client.parse().unwrap()), "{peer} {lines:?}");
        }
    }

    #[test]
    fn strangers_tell_nothing_and_proxies_are_added_to() {
        let told = [
            ("X-Forwarded-For", "1.1.1.1"),
            ("x-forwarded-for", "2.2.2.2"),
            ("X-Forwarded-Proto", "https"),
            ("X-Forwarded-Host", "bank.example"),
            ("Forwarded", "for=1.1.1.1"),
            ("X-Real-IP", "1.1.1.1"),
            ("Host", "a"),
        ];
        let text = |head: &RequestHeader, name: &str| {
            let all = head.headers.get_all(name).iter().map(|v| v.to_str().unwrap().to_owned());
            all.collect::<Vec<_>>()
        };
        for (tls, proto) in [(false, "http"), (true, "https")] {
            let mut stranger = head(&told);
            let seen = origin(&stranger, "203.0.113.7", tls);
            seen.tell(&mut stranger).unwrap();
            assert_eq!(seen.secure, tls);
            assert_eq!(text(&stranger, FOR), ["203.0.113.7"]);
            assert_eq!(text(&stranger, PROTO), [proto]);
            assert_eq!(stranger.headers.len(), 3, "{:?}", stranger.headers);
        }
        let mut proxied = head(&told);
        let seen = origin(&proxied, "10.0.0.1", false);
        seen.tell(&mut proxied).unwrap();
        assert!(seen.secure);
        assert_eq!(text(&proxied, FOR), ["1.1.1.1, 2.2.2.2, 10.0.0.1"]);
        assert_eq!(
            (text(&proxied, PROTO), text(&proxied, "x-forwarded-host")),
            (vec!["https".into()], vec!["bank.example".into()])
        );
        let mut plain = head(&[]);
        origin(&plain, "10.0.0.1", true).tell(&mut plain).unwrap();
        assert_eq!((text(&plain, FOR), text(&plain, PROTO)), (vec!["10.0.0.1".into()], vec!["https".into()]));
    }
}
