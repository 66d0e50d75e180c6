//! A request's head, byte for byte.

use std::ops::Range;

use super::Limits;
use super::chars::{is_authority, is_method, is_target, is_token, is_value};
use super::target;
use crate::refusal::{Code, Refusal};

/// The longest method that is registered, with some room.
const MAX_METHOD: usize = 24;
const VERSION: &[u8; 8] = b"HTTP/1.1";

/// How a body is delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// So many bytes follow.
    Length(u64),
    Chunked,
}

/// A head that has come so far.
#[derive(Debug, Default)]
pub(super) struct Head {
    /// Bytes looked at.
    at: usize,
    state: State,
    /// Where the current element begins.
    start: usize,
    method: Range<usize>,
    target: Range<usize>,
    name: Range<usize>,
    pub is_http_10: bool,
    fields: usize,
    host: Option<Range<usize>>,
    authority: Option<Range<usize>>,
    length: Option<u64>,
    chunked: bool,
    websocket: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// An empty line may stand before a request (RFC 9112 section 2.2).
    #[default]
    Start,
    StartLf,
    Method,
    Target,
    Version,
    VersionLf,
    Line,
    Name,
    Value,
    ValueLf,
    EndLf,
}

impl Head {
    /// Looks at what is new of `bytes`, which begin where the head begins. `Some`: its length.
    pub fn scan(&mut self, bytes: &[u8], limits: &Limits) -> Result<Option<usize>, Refusal> {
        while let Some(&byte) = bytes.get(self.at) {
            if self.state == State::Target && self.at - self.start >= limits.uri && byte != b' ' {
                return Err(Refusal::of(Code::URI_TOO_LONG));
            }
            if self.at >= limits.head {
                return Err(Refusal::of(Code::HEAD_TOO_LARGE));
            }
            let was = self.state;
            self.step(byte, bytes, limits)?;
            self.at += 1;
            if was == State::EndLf {
                self.finish(bytes)?;
                return Ok(Some(self.at));
            }
        }
        Ok(None)
    }

    fn step(&mut self, byte: u8, bytes: &[u8], limits: &Limits) -> Result<(), Refusal> {
        let at = self.at;
        let bad = |why| Err(Refusal::bad(why));
        self.state = match (self.state, byte) {
            (State::Start, b'\r') if at == 0 => State::StartLf,
            (State::StartLf, b'\n') => State::Start,
            (State::Start, _) if is_method(byte) => {
                self.start = at;
                State::Method
            }
            (State::Start, _) => return bad("the request does not begin with a method"),
            (State::Method, b' ') => self.method(bytes)?,
            (State::Method, _) if is_method(byte) && at - self.start < MAX_METHOD => State::Method,
            (State::Method, _) => return bad("the method is none"),
            (State::Target, b' ') => self.target(bytes)?,
            (State::Target, _) if is_target(byte) => State::Target,
            (State::Target, 0) => return bad("NUL in the request target"),
            (State::Target, b'\r' | b'\n') => return bad("the request line has no version"),
            (State::Target, _) => return bad("a character that no request target holds"),
            (State::Version, b'\r') if at - self.start == VERSION.len() => State::VersionLf,
            (State::Version, _) => self.version(byte)?,
            (State::VersionLf | State::ValueLf, b'\n') => {
                if self.state == State::ValueLf {
                    self.field(bytes)?;
                }
                State::Line
            }
            (State::Line, b'\r') => State::EndLf,
            (State::Line, b' ' | b'\t') => return bad("a folded line, or a space before a field name"),
            (State::Line, _) => {
                self.fields += 1;
                if self.fields > limits.fields {
                    return Err(Refusal::of(Code::HEAD_TOO_LARGE));
                }
                self.start = at;
                self.name(byte)?
            }
            (State::Name, b':') if at > self.start => {
                self.name = self.start..at;
                self.start = at + 1;
                State::Value
            }
            (State::Name, _) => self.name(byte)?,
            (State::Value, b'\r') => State::ValueLf,
            (State::Value, _) if is_value(byte) => State::Value,
            (State::Value, b'\n') => return bad("a line ends without CR"),
            (State::Value, 0) => return bad("NUL in a field value"),
            (State::Value, _) => return bad("a control character in a field value"),
            (State::EndLf, b'\n') => State::EndLf,
            (State::StartLf | State::VersionLf | State::ValueLf | State::EndLf, _) => {
                return bad("CR without LF");
            }
        };
        Ok(())
    }

    fn method(&mut self, bytes: &[u8]) -> Result<State, Refusal> {
        self.method = self.start..self.at;
        if bytes.get(self.method.clone()) == Some(b"CONNECT") {
            return Err(Refusal::of(Code::METHOD_NOT_ALLOWED));
        }
        self.start = self.at + 1;
        Ok(State::Target)
    }

    fn target(&mut self, bytes: &[u8]) -> Result<State, Refusal> {
        self.target = self.start..self.at;
        let slice = |range: &Range<usize>| bytes.get(range.clone()).unwrap_or_default();
        let authority = target::authority(slice(&self.method), slice(&self.target)).map_err(Refusal::bad)?;
        let offset = self.target.start;
        self.authority = authority.map(|range| range.start + offset..range.end + offset);
        self.start = self.at + 1;
        Ok(State::Version)
    }

    fn version(&mut self, byte: u8) -> Result<State, Refusal> {
        match (self.at - self.start, byte) {
            (7, b'0' | b'1') => self.is_http_10 = byte == b'0',
            (at, _) if at < 7 && VERSION.get(at) == Some(&byte) => {}
            _ => return Err(Refusal::bad("the version is neither HTTP/1.1 nor HTTP/1.0")),
        }
        Ok(State::Version)
    }

    fn name(&mut self, byte: u8) -> Result<State, Refusal> {
        match byte {
            b'_' => Err(Refusal::bad("underscore in a field name")),
            _ if is_token(byte) => Ok(State::Name),
            b' ' | b'\t' => Err(Refusal::bad("a space in a field name, or before its colon")),
            b'\r' | b'\n' => Err(Refusal::bad("a line without a field name")),
            _ => Err(Refusal::bad("a character that no field name holds")),
        }
    }

    /// A field line is whole.
    fn field(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        let bad = |why| Err(Refusal::bad(why));
        let name = bytes.get(self.name.clone()).unwrap_or_default();
        // the CR is at the end of it
        let raw = bytes.get(self.start..self.at - 1).unwrap_or_default();
        let value = raw.trim_ascii();
        if name.eq_ignore_ascii_case(b"host") {
            if self.host.is_some() {
                return bad("several Host fields");
            }
            if !is_authority(value) {
                return bad("Host is no host and port");
            }
            let start = self.start + (raw.len() - raw.trim_ascii_start().len());
            self.host = Some(start..start + value.len());
        } else if name.eq_ignore_ascii_case(b"content-length") {
            if self.length.is_some() {
                return bad("several Content-Length fields");
            }
            self.length = Some(length(value).ok_or(Refusal::bad("Content-Length is no number"))?);
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if self.chunked {
                return bad("several Transfer-Encoding fields");
            }
            if self.is_http_10 {
                return bad("Transfer-Encoding in HTTP/1.0");
            }
            if !value.eq_ignore_ascii_case(b"chunked") {
                return bad("Transfer-Encoding other than chunked");
            }
            self.chunked = true;
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            self.websocket |= value.eq_ignore_ascii_case(b"websocket");
        }
        if self.length.is_some() && self.chunked {
            return bad("both Content-Length and Transfer-Encoding");
        }
        Ok(())
    }

    fn finish(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        match (&self.host, &self.authority) {
            (None, _) if !self.is_http_10 => Err(Refusal::bad("no Host field")),
            (Some(host), Some(authority)) if bytes.get(host.clone()) != bytes.get(authority.clone()) => {
                Err(Refusal::bad("Host is not the host of the request target"))
            }
            _ => Ok(()),
        }
    }

    /// How the body after the head is delimited.
    pub fn framing(&self) -> Framing {
        if self.chunked { Framing::Chunked } else { Framing::Length(self.length.unwrap_or(0)) }
    }

    /// Whether it asks for WebSocket, without a body.
    pub fn is_upgrade(&self, bytes: &[u8]) -> bool {
        self.websocket
            && !self.is_http_10
            && self.framing() == Framing::Length(0)
            && bytes.get(self.method.clone()) == Some(b"GET")
    }
}

/// A number of decimal digits, no sign, no list.
fn length(value: &[u8]) -> Option<u64> {
    let digits = (1..=19).contains(&value.len()) && value.iter().all(u8::is_ascii_digit);
    digits.then(|| std::str::from_utf8(value).ok()?.parse().ok()).flatten()
}
