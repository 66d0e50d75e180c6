//! The PROXY protocol, versions 1 and 2: a load balancer in front says whose connection it is
//! (<https://www.haproxy.org/download/1.8/doc/proxy-protocol.txt>).
//!
//! Strict: what is not exactly a header ends the connection. Never more is read than belongs to the header.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt};

/// The longest line of version 1, its end included (section 2.1).
const LONGEST_LINE: usize = 107;
/// The most bytes of addresses and TLVs in version 2; balancers send some hundreds at most.
const LONGEST_BODY: usize = 4096;
const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// The first bytes: all of version 2's signature, and less than the shortest line of version 1.
const FIRST: usize = 12;
/// The head of version 2.
const HEAD: usize = 16;

/// Whose connection it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The sender's own (a health check), or one without an address: the socket's addresses count.
    Local,
    /// Somebody else's.
    Proxied {
        /// Who connected.
        client: SocketAddr,
        /// To what.
        server: SocketAddr,
    },
}

/// Why a connection has no valid header.
#[derive(Debug, Error)]
pub enum ProxyError {
    /// Not the protocol, or not as it is written.
    #[error("{0}")]
    Malformed(&'static str),
    /// The connection broke, or ended within the header.
    #[error("the connection broke within the PROXY header: {0}")]
    Io(#[from] std::io::Error),
}

/// How far a header is.
#[derive(Debug, PartialEq, Eq)]
enum Parsed {
    /// At least so many bytes more belong to it.
    Needs(usize),
    Done(Origin),
}

/// Reads the header, and nothing behind it. Put a deadline round it.
///
/// # Errors
/// See [`ProxyError`].
pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Origin, ProxyError> {
    let mut bytes = Vec::with_capacity(LONGEST_LINE);
    loop {
        match parse(&bytes).map_err(ProxyError::Malformed)? {
            Parsed::Done(origin) => return Ok(origin),
            Parsed::Needs(more) => {
                let have = bytes.len();
                bytes.resize(have + more, 0);
                stream.read_exact(bytes.get_mut(have..).unwrap_or_default()).await?;
            }
        }
    }
}

fn parse(bytes: &[u8]) -> Result<Parsed, &'static str> {
    let Some((first, _)) = bytes.split_at_checked(FIRST) else {
        return Ok(Parsed::Needs(FIRST - bytes.len()));
    };
    if first == SIGNATURE {
        binary(bytes)
    } else if first.starts_with(b"PROXY ") {
        line(bytes)
    } else {
        Err("no PROXY header")
    }
}

/// Version 1: `PROXY TCP4 <client> <server> <client's port> <server's port>\r\n`.
fn line(bytes: &[u8]) -> Result<Parsed, &'static str> {
    let Some(text) = bytes.strip_suffix(b"\r\n") else {
        let ends = bytes.last() == Some(&b'\r');
        return match bytes.len() {
            LONGEST_LINE.. => Err("the PROXY line is too long"),
            _ if bytes.contains(&b'\n')
                || bytes.iter().filter(|b| **b == b'\r').count() > usize::from(ends) =>
            {
                Err("the PROXY line does not end with CR LF")
            }
            _ => Ok(Parsed::Needs(if ends { 1 } else { 2.min(LONGEST_LINE - bytes.len()) })),
        };
    };
    let text = std::str::from_utf8(text).map_err(|_| "the PROXY line is not ASCII")?;
    let words: Vec<&str> = text.split(' ').collect();
    match words.as_slice() {
        ["PROXY", "UNKNOWN", ..] => Ok(Parsed::Done(Origin::Local)),
        ["PROXY", family, client, server, client_port, server_port] => {
            let address = |text: &str| match *family {
                "TCP4" => text.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
                "TCP6" => text.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
                _ => None,
            };
            let socket = |text: &str, port: &str| Some(SocketAddr::new(address(text)?, self::port(port)?));
            let (client, server) = (socket(client, client_port), socket(server, server_port));
            let (Some(client), Some(server)) = (client, server) else {
                return Err("the PROXY line names no addresses of its family");
            };
            Ok(Parsed::Done(Origin::Proxied { client, server }))
        }
        _ => Err("the PROXY line has not the right number of words"),
    }
}

/// Decimal, without a sign or leading zeros.
fn port(text: &str) -> Option<u16> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|_| plain)
}

/// Version 2: signature, version and command, family and protocol, length; then addresses, then TLVs.
fn binary(bytes: &[u8]) -> Result<Parsed, &'static str> {
    let Some((head, body)) = bytes.split_at_checked(HEAD) else {
        return Ok(Parsed::Needs(HEAD - bytes.len()));
    };
    let [.., command, family, high, low] = head else { return Err("no PROXY header") };
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    if length > LONGEST_BODY {
        return Err("the PROXY header is too long");
    }
    let local = match command {
        0x20 => true,
        0x21 => false,
        _ => return Err("an unknown version or command of the PROXY protocol"),
    };
    if body.len() < length {
        return Ok(Parsed::Needs(length - body.len()));
    }
    let (addresses, origin) = match family {
        // what the family says of a local connection is to be ignored
        _ if local => (0, Some(Origin::Local)),
        0x00 => (0, Some(Origin::Local)),
        0x11 => (12, proxied::<4>(body)),
        0x21 => (36, proxied::<16>(body)),
        // a socket in the file system has no address to know a client by
        0x31 => (216, (body.len() >= 216).then_some(Origin::Local)),
        _ => return Err("a PROXY header for what is no TCP connection"),
    };
    let origin = origin.ok_or("the PROXY header is shorter than its addresses")?;
    if !local {
        tlvs(body.get(addresses..).unwrap_or_default())?;
    }
    Ok(Parsed::Done(origin))
}

/// Both addresses, then both ports.
fn proxied<const N: usize>(body: &[u8]) -> Option<Origin>
where
    IpAddr: From<[u8; N]>,
{
    let (client, rest) = body.split_first_chunk::<N>()?;
    let (server, rest) = rest.split_first_chunk::<N>()?;
    let (client_port, rest) = rest.split_first_chunk::<2>()?;
    let (server_port, _) = rest.split_first_chunk::<2>()?;
    let socket =
        |address: &[u8; N], port: &[u8; 2]| SocketAddr::new((*address).into(), u16::from_be_bytes(*port));
    Some(Origin::Proxied { client: socket(client, client_port), server: socket(server, server_port) })
}

/// Type, length, value, up to the end exactly; what they say is not looked at.
fn tlvs(mut rest: &[u8]) -> Result<(), &'static str> {
    while !rest.is_empty() {
        let [_, high, low, values @ ..] = rest else { return Err("a TLV of the PROXY header is cut") };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        rest = values.get(length..).ok_or("a TLV of the PROXY header is cut")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    fn v2(command: u8, family: u8, body: &[u8]) -> Vec<u8> {
        let length = u16::try_from(body.len()).unwrap().to_be_bytes();
        [&SIGNATURE[..], &[command, family], &length, body].concat()
    }

    fn v4_body() -> Vec<u8> {
        vec![203, 0, 113, 7, 10, 0, 0, 1, 0xd4, 0x31, 0x01, 0xbb]
    }

    fn v6_body() -> Vec<u8> {
        let (client, server): (Ipv6Addr, Ipv6Addr) =
            ("2001:db8::7".parse().unwrap(), "fd00::1".parse().unwrap());
        [&client.octets()[..], &server.octets(), &[0xd4, 0x31, 0x01, 0xbb]].concat()
    }

    fn proxied(client: &str, server: &str) -> Origin {
        Origin::Proxied { client: client.parse().unwrap(), server: server.parse().unwrap() }
    }

    fn good() -> Vec<(Vec<u8>, Origin)> {
        let (four, six) =
            (proxied("203.0.113.7:54321", "10.0.0.1:443"), proxied("[2001:db8::7]:54321", "[fd00::1]:443"));
        let longest = format!("PROXY UNKNOWN {}\r\n", "x".repeat(LONGEST_LINE - 16));
        assert_eq!(longest.len(), LONGEST_LINE);
        let tlv = |body: Vec<u8>, tlvs: &[u8]| [&body[..], tlvs].concat();
        vec![
            (b"PROXY TCP4 203.0.113.7 10.0.0.1 54321 443\r\n".to_vec(), four),
            (b"PROXY TCP6 2001:db8::7 fd00::1 54321 443\r\n".to_vec(), six),
            (b"PROXY TCP4 1.1.1.1 2.2.2.2 0 65535\r\n".to_vec(), proxied("1.1.1.1:0", "2.2.2.2:65535")),
            (b"PROXY UNKNOWN\r\n".to_vec(), Origin::Local),
            (longest.into_bytes(), Origin::Local),
            (v2(0x21, 0x11, &v4_body()), four),
            (v2(0x21, 0x21, &v6_body()), six),
            (v2(0x21, 0x11, &tlv(v4_body(), &[3, 0, 4, 1, 2, 3, 4, 0x20, 0, 0])), four),
            (v2(0x21, 0x21, &tlv(v6_body(), &[4, 0, 1, 0])), six),
            (v2(0x21, 0x11, &tlv(v4_body(), &[&[4, 0x0f, 0xf1][..], &[0; 4081]].concat())), four),
            (v2(0x20, 0x00, &[]), Origin::Local),
            (v2(0x20, 0x11, &v4_body()), Origin::Local),
            (v2(0x20, 0xff, &[1, 2, 3]), Origin::Local),
            (v2(0x21, 0x00, &[]), Origin::Local),
            (v2(0x21, 0x31, &[0; 216]), Origin::Local),
        ]
    }

    fn bad() -> Vec<Vec<u8>> {
        let mut bad: Vec<Vec<u8>> = [
            "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "\r\n\r\n\0\r\nQUIT\r",
            "proxy TCP4 1.1.1.1 2.2.2.2 1 2\r\n",
            "PROXY  TCP4 1.1.1.1 2.2.2.2 1 2\r\n",
            "PROXY TCP4 1.1.1.1 2.2.2.2 1 2\n",
            "PROXY TCP4 1.1.1.1 2.2.2.2 1 2 \r\n",
            "PROXY TCP4 1.1.1.1 2.2.2.2 1\r\n",
            "PROXY TCP4 1.1.1.1 2.2.2.2 1 2 3\r\n",
            "PROXY TCP4 1.1.1.1 2.2.2.2 01 2\r\n",
            "PROXY TCP4 1.1.1.1 2.2.2.2 +1 2\r\n",
            "PROXY TCP4 1.1.1.1 2.2.2.2 65536 2\r\n",
            "PROXY TCP4 1.1.1.256 2.2.2.2 1 2\r\n",
            "PROXY TCP4 ::1 ::1 1 2\r\n",
            "PROXY TCP6 1.1.1.1 2.2.2.2 1 2\r\n",
            "PROXY TCP5 1.1.1.1 2.2.2.2 1 2\r\n",
            "PROXY UDP4 1.1.1.1 2.2.2.2 1 2\r\n",
            "PROXY UNKNOWN\rx\r\n",
            "PROXY UNKNOWN \u{e9}\n\r\n",
            "PROXY \r\n\r\n\r\n\r\n",
        ]
        .iter()
        .map(|text| text.as_bytes().to_vec())
        .collect();
        bad.push(format!("PROXY UNKNOWN {}\r\n", "x".repeat(LONGEST_LINE - 15)).into_bytes());
        bad.push([b"PROXY UNKNOWN ".to_vec(), vec![b'x'; 1 << 20]].concat());
        bad.extend([
            v2(0x11, 0x11, &v4_body()),
            v2(0x22, 0x11, &v4_body()),
            v2(0x21, 0x12, &v4_body()),
            v2(0x21, 0x22, &v6_body()),
            v2(0x21, 0x41, &v4_body()),
            v2(0x21, 0x11, &v4_body()[..11]),
            v2(0x21, 0x21, &v6_body()[..35]),
            v2(0x21, 0x31, &[0; 215]),
            v2(0x21, 0x11, &[&v4_body()[..], &[3, 0]].concat()),
            v2(0x21, 0x11, &[&v4_body()[..], &[3, 0, 2, 1]].concat()),
            v2(0x21, 0x11, &[0; 4097]),
        ]);
        bad
    }

    /// Reads what comes in these pieces, and says what is left unread.
    async fn read_in(pieces: &[&[u8]]) -> (Result<Origin, ProxyError>, Vec<u8>) {
        let (mut from, mut to) = tokio::io::duplex(1);
        let pieces: Vec<Vec<u8>> = pieces.iter().map(|piece| piece.to_vec()).collect();
        let writer = tokio::spawn(async move {
            for piece in pieces {
                if from.write_all(&piece).await.is_err() {
                    return;
                }
                tokio::task::yield_now().await;
            }
        });
        let origin = read(&mut to).await;
        let mut rest = Vec::new();
        if origin.is_ok() {
            to.read_to_end(&mut rest).await.unwrap();
        }
        drop(to);
        writer.await.unwrap();
        (origin, rest)
    }

    #[tokio::test]
    async fn headers_are_read_in_every_split_and_nothing_behind_them() {
        for (header, origin) in good() {
            for at in 0..=header.len().min(300) {
                let (read, rest) = read_in(&[&header[..at], &header[at..], b"GET /"]).await;
                assert_eq!((read.unwrap(), &rest[..]), (origin, &b"GET /"[..]), "{header:?} at {at}");
            }
        }
    }

    #[tokio::test]
    async fn what_is_no_header_is_refused() {
        for header in bad() {
            let (read, _) = read_in(&[&header, b"GET / HTTP/1.1\r\n\r\n"]).await;
            assert!(matches!(read, Err(ProxyError::Malformed(_))), "{header:?} is {read:?}");
        }
    }

    #[tokio::test]
    async fn every_cut_header_is_refused() {
        for (header, _) in good() {
            for at in 0..header.len().min(300) {
                let (read, _) = read_in(&[&header[..at]]).await;
                assert!(matches!(read, Err(ProxyError::Io(_))), "{header:?} at {at}");
            }
        }
    }
}
