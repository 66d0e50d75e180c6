//! HTTP/2 by hand: frames as a client of ours would never write them.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::{Authority, Client, Terms, client, connect};
use crate::support::PATIENCE;

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub const DATA: u8 = 0x0;
pub const HEADERS: u8 = 0x1;
pub const PRIORITY: u8 = 0x2;
pub const RST_STREAM: u8 = 0x3;
pub const SETTINGS: u8 = 0x4;
pub const PING: u8 = 0x6;
pub const GOAWAY: u8 = 0x7;
pub const WINDOW_UPDATE: u8 = 0x8;
pub const CONTINUATION: u8 = 0x9;

pub const END_STREAM: u8 = 0x1;
pub const ACK: u8 = 0x1;
pub const END_HEADERS: u8 = 0x4;

/// A frame (RFC 9113 section 4.1).
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Fields as literals that are never indexed, without Huffman's code (RFC 7541 section 6.2.3).
pub fn block(fields: &[(&[u8], &[u8])]) -> Vec<u8> {
    fn text(out: &mut Vec<u8>, text: &[u8]) {
        // an integer of seven bits and what follows it (section 5.1)
        match text.len() {
            n @ ..127 => out.push(n as u8),
            n => {
                out.push(127);
                let mut rest = n - 127;
                while rest >= 128 {
                    out.push((rest % 128) as u8 | 0x80);
                    rest /= 128;
                }
                out.push(rest as u8);
            }
        }
        out.extend_from_slice(text);
    }
    let mut out = Vec::new();
    for (name, value) in fields {
        out.push(0x10);
        text(&mut out, name);
        text(&mut out, value);
    }
    out
}

/// The pseudo fields of a request.
pub fn pseudo<'a>(method: &'a str, path: &'a str) -> Vec<(&'a [u8], &'a [u8])> {
    vec![
        (b":method", method.as_bytes()),
        (b":scheme", b"https"),
        (b":authority", b"a.test"),
        (b":path", path.as_bytes()),
    ]
}

/// A frame that came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Frame {
    /// The status of an answer's head, as our server writes it: indexed, or a literal with the name indexed.
    pub fn status(&self) -> Option<u16> {
        let indexed = [200, 204, 206, 304, 400, 404, 500];
        match (self.kind, self.payload.as_slice()) {
            (HEADERS, [first @ 0x88..=0x8e, ..]) => Some(indexed[usize::from(first - 0x88)]),
            // :status by its index, the value in Huffman's code or plain
            (HEADERS, [0x48 | 0x08, 0x82, a, b, ..]) => Some(huffman(*a, *b)),
            (HEADERS, [0x48 | 0x08, 3, a, b, c, ..]) => {
                std::str::from_utf8(&[*a, *b, *c]).unwrap().parse().ok()
            }
            _ => None,
        }
    }
}

/// Three digits in two bytes, as Huffman's code of RFC 7541 appendix B has those of our statuses.
fn huffman(a: u8, b: u8) -> u16 {
    let digits = [(0b00000, 5, 0), (0b00001, 5, 1), (0b00010, 5, 2)];
    let long = [
        (0b011001, 3),
        (0b011010, 4),
        (0b011011, 5),
        (0b011100, 6),
        (0b011101, 7),
        (0b011110, 8),
        (0b011111, 9),
    ];
    let bits = u16::from_be_bytes([a, b]);
    let (mut at, mut status) = (0, 0);
    for _ in 0..3 {
        let next = |n: u16| (bits << at) >> (16 - n);
        if let Some((_, n, digit)) = digits.iter().find(|(code, n, _)| next(*n) == *code) {
            (at, status) = (at + n, status * 10 + digit);
        } else if let Some((_, digit)) = long.iter().find(|(code, _)| next(6) == *code) {
            (at, status) = (at + 6, status * 10 + digit);
        }
    }
    status
}

/// A connection that speaks HTTP/2 by hand.
pub struct Raw {
    stream: Client,
    bytes: Vec<u8>,
}

impl Raw {
    /// Connects by TLS, and sends nothing yet.
    pub async fn silent(to: SocketAddr, ours: &Authority) -> Self {
        let tls = client(ours, &Terms { offers: &["h2"], ..Terms::default() });
        Self { stream: connect(to, "a.test", &tls).await.unwrap(), bytes: Vec::new() }
    }

    /// Connects and begins in order.
    pub async fn open(to: SocketAddr, ours: &Authority) -> Self {
        let mut raw = Self::silent(to, ours).await;
        assert!(raw.send(PREFACE).await && raw.send(&frame(SETTINGS, 0, 0, b"")).await);
        raw
    }

    /// Writes; `false` once the connection is gone.
    pub async fn send(&mut self, bytes: &[u8]) -> bool {
        let written = async {
            self.stream.write_all(bytes).await?;
            self.stream.flush().await
        };
        timeout(PATIENCE, written).await.expect("it takes bytes in time").is_ok()
    }

    /// The next frame; `None` at the connection's end.
    pub async fn frame(&mut self) -> Option<Frame> {
        loop {
            if let Some(([a, b, c, kind, flags, s, t, u, v], rest)) = self.bytes.split_first_chunk::<9>() {
                let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
                if rest.len() >= length {
                    let frame = Frame {
                        kind: *kind,
                        flags: *flags,
                        stream: u32::from_be_bytes([*s, *t, *u, *v]),
                        payload: rest[..length].to_vec(),
                    };
                    self.bytes.drain(..9 + length);
                    return Some(frame);
                }
            }
            let read = timeout(PATIENCE, self.stream.read_buf(&mut self.bytes)).await;
            if !read.expect("a frame, or the end, in time").is_ok_and(|n| n > 0) {
                return None;
            }
        }
    }

    /// Frames until one of this kind, or the end.
    pub async fn until(&mut self, wanted: impl Fn(&Frame) -> bool) -> Option<Frame> {
        while let Some(frame) = self.frame().await {
            if wanted(&frame) {
                return Some(frame);
            }
        }
        None
    }

    /// What becomes of a request on this stream: its status, or `None` if it or the connection is cut.
    pub async fn status(&mut self, stream: u32) -> Option<u16> {
        let ends = |frame: &Frame| {
            frame.kind == GOAWAY || frame.stream == stream && matches!(frame.kind, HEADERS | RST_STREAM)
        };
        self.until(ends).await?.status()
    }

    /// Sends the same again and again, and says how often before the connection was gone; `most` times at most.
    pub async fn flood(&mut self, most: usize, mut next: impl FnMut(usize) -> Vec<u8>) -> usize {
        for sent in 0..most {
            if !self.send(&next(sent)).await {
                return sent;
            }
            // what the server has to say is not waited for, but read, so that nothing stops for want of room
            while let Ok(Ok(1..)) = timeout(Duration::ZERO, self.stream.read_buf(&mut self.bytes)).await {}
            self.bytes.clear();
        }
        most
    }

    /// Whether the server ends the connection.
    pub async fn is_cut(&mut self) -> bool {
        self.until(|_| false).await.is_none()
    }
}
