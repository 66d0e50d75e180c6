//! ZMTP on bytes alone: no sockets, no clocks. Everything here is safe on any input.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::Error;

/// Bytes of a greeting.
pub const GREETING: usize = 64;
/// No command we understand comes near this.
const MAX_COMMAND: usize = 8 * 1024;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What a peer may send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes in one frame.
    pub frame: usize,
    /// Bytes in all parts of one message.
    pub message: usize,
    /// Parts of one message.
    pub parts: usize,
}

/// What the decoder yields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// A whole multipart message.
    Message(Vec<Bytes>),
    /// A command's body: name length, name, data.
    Command(Bytes),
}

/// Incremental frame decoder. After an error the stream is lost: drop the connection.
#[derive(Debug)]
pub struct Decoder {
    limits: Limits,
    parts: Vec<Bytes>,
    size: usize,
    need: usize,
}

impl Decoder {
    /// An empty decoder.
    pub fn new(limits: Limits) -> Self {
        Self { limits, parts: Vec::new(), size: 0, need: 0 }
    }

    /// Bytes lacking to the current frame, as far as known when `decode` last gave `None`.
    pub fn need(&self) -> usize {
        self.need
    }

    /// Takes the next item off `buf`, or `None` if it is not complete. Limits are enforced
    /// on the announced size, before any byte of the body has arrived.
    pub fn decode(&mut self, buf: &mut BytesMut) -> Result<Option<Item>, Error> {
        loop {
            self.need = 1;
            let Some(&flags) = buf.first() else { return Ok(None) };
            if flags & !(MORE | LONG | COMMAND) != 0 {
                return Err(Error::Protocol("reserved flag bits"));
            }
            let (head, size) = if flags & LONG == 0 {
                let Some(&size) = buf.get(1) else { return Ok(None) };
                (2, u64::from(size))
            } else {
                let Some(size) = buf.get(1..9).and_then(|s| s.try_into().ok()) else { return Ok(None) };
                (9, u64::from_be_bytes(size))
            };
            let max = if flags & COMMAND == 0 { self.limits.frame } else { MAX_COMMAND };
            let size = match usize::try_from(size) {
                Ok(size) if size <= max => size,
                _ => return Err(Error::FrameTooBig { size, max }),
            };
            if flags & COMMAND == 0 {
                if self.parts.len() >= self.limits.parts {
                    return Err(Error::TooManyParts(self.limits.parts));
                }
                if size > self.limits.message - self.size {
                    return Err(Error::MessageTooBig(self.limits.message));
                }
            } else if flags & MORE != 0 {
                return Err(Error::Protocol("command with MORE"));
            }
            if buf.len() < head + size {
                self.need = head + size - buf.len();
                return Ok(None);
            }
            buf.advance(head);
            let body = buf.split_to(size).freeze();
            if flags & COMMAND != 0 {
                return Ok(Some(Item::Command(body)));
            }
            if self.parts.is_empty() {
                self.parts.reserve(self.limits.parts.min(4));
            }
            self.size += size;
            self.parts.push(body);
            if flags & MORE == 0 {
                self.size = 0;
                return Ok(Some(Item::Message(std::mem::take(&mut self.parts))));
            }
        }
    }
}

/// Our greeting.
pub fn greeting(minor: u8) -> [u8; GREETING] {
    let mut g = [0; GREETING];
    (g[0], g[8], g[9], g[10], g[11]) = (0xff, 1, 0x7f, 3, minor);
    g[12..16].copy_from_slice(b"NULL");
    g
}

/// Judges the peer's greeting as it grows: an error as soon as it can be known, the minor
/// version once 64 good bytes are there, else `None`.
pub fn check_greeting(got: &[u8]) -> Result<Option<u8>, Error> {
    let strange = || Error::NotZmtp(String::from_utf8_lossy(&got[..got.len().min(16)]).into_owned());
    if got.first().is_some_and(|b| *b != 0xff) || got.get(9).is_some_and(|b| b & 1 == 0) {
        return Err(strange());
    }
    if let Some(&major) = got.get(10).filter(|major| **major < 3) {
        return Err(Error::Version(major));
    }
    if let Some(name) = got.get(12..32).filter(|name| *name != b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") {
        return Err(Error::Mechanism(String::from_utf8_lossy(name).trim_end_matches('\0').into()));
    }
    Ok((got.len() >= GREETING).then(|| got[11]))
}

/// Appends one message.
pub fn put_message(out: &mut BytesMut, parts: &[&[u8]]) {
    for (i, part) in parts.iter().enumerate() {
        put_frame(out, if i + 1 < parts.len() { MORE } else { 0 }, &[part]);
    }
}

/// Appends one command.
pub fn put_command(out: &mut BytesMut, name: &'static str, data: &[u8]) {
    put_frame(out, COMMAND, &[&[name.len() as u8], name.as_bytes(), data]);
}

fn put_frame(out: &mut BytesMut, flags: u8, body: &[&[u8]]) {
    let size: usize = body.iter().map(|b| b.len()).sum();
    if let Ok(short) = u8::try_from(size) {
        out.put_slice(&[flags, short]);
    } else {
        out.put_u8(flags | LONG);
        out.put_u64(size as u64);
    }
    body.iter().for_each(|b| out.put_slice(b));
}

/// Appends our READY.
pub fn put_ready(out: &mut BytesMut, socket_type: &str) {
    let mut data = BytesMut::new();
    for (name, value) in [("Socket-Type", socket_type), ("Identity", "")] {
        data.put_u8(name.len() as u8);
        data.put_slice(name.as_bytes());
        data.put_u32(value.len() as u32);
        data.put_slice(value.as_bytes());
    }
    put_command(out, "READY", &data);
}

/// Splits a command's body into name and data.
pub fn command(body: &[u8]) -> Result<(&[u8], &[u8]), Error> {
    let (&len, rest) = body.split_first().ok_or(Error::Protocol("empty command"))?;
    rest.split_at_checked(len as usize).ok_or(Error::Protocol("truncated command name"))
}

/// The Socket-Type among a READY's properties (names are case-insensitive).
pub fn socket_type(mut data: &[u8]) -> Result<Option<&[u8]>, Error> {
    const CUT: Error = Error::Protocol("truncated READY property");
    let mut found = None;
    while let Some((&len, rest)) = data.split_first() {
        let (name, rest) = rest.split_at_checked(len as usize).ok_or(CUT)?;
        let (len, rest) = rest.split_first_chunk::<4>().ok_or(CUT)?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize).ok_or(CUT)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            found = Some(value);
        }
        data = rest;
    }
    Ok(found)
}

/// The reason in an ERROR command's data.
pub fn reason(data: &[u8]) -> String {
    let text = data.get(1..).unwrap_or_default();
    String::from_utf8_lossy(&text[..text.len().min(256)]).into_owned()
}
