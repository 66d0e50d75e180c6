//! Chunked bodies (RFC 9112 section 7.1), byte for byte.

use super::Limits;
use super::chars::{is_token, is_value};
use crate::refusal::Refusal;

/// Digits of a chunk's size: 4 GiB, more than any body may have.
const MAX_DIGITS: u8 = 8;
/// Bytes that the extensions and trailers of one body may have.
const MAX_EXTRA: usize = 8 * 1024;
/// Fields that say how a message is to be read or where it goes: after it, they come too late (RFC 9110 section
/// 6.5.1).
const NOT_IN_TRAILERS: [&[u8]; 14] = [
    b"authorization",
    b"connection",
    b"content-encoding",
    b"content-length",
    b"content-range",
    b"content-type",
    b"cookie",
    b"expect",
    b"host",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"x-request-id",
];
/// The longest of them.
const MAX_NAME: usize = 17;

/// A chunked body that has come so far.
#[derive(Debug)]
pub(super) struct Chunks {
    state: State,
    /// Bytes of the chunk still to come; while its size is read, that.
    size: u64,
    digits: u8,
    extra: usize,
    fields: usize,
    /// The name of the trailer being read, in lower case, as much as can matter.
    name: [u8; MAX_NAME],
    named: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Size,
    /// After the semicolon.
    Extension,
    ExtensionName,
    /// After the equals sign.
    ExtensionValue,
    ExtensionToken,
    Quoted,
    QuotedPair,
    /// After the closing quote.
    QuotedEnd,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    Line,
    Name,
    Value,
    ValueLf,
    EndLf,
    Done,
}

impl Chunks {
    pub fn new() -> Self {
        Self { state: State::Size, size: 0, digits: 0, extra: 0, fields: 0, name: [0; MAX_NAME], named: 0 }
    }

    /// How many of these bytes belong to the body, its framing included; fewer than all: it is done.
    pub fn scan(&mut self, bytes: &[u8], limits: &Limits) -> Result<usize, Refusal> {
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            match self.state {
                State::Done => break,
                State::Data => {
                    let left = usize::try_from(self.size).unwrap_or(usize::MAX);
                    let some = left.min(bytes.len() - at);
                    at += some;
                    self.size -= some as u64;
                    if self.size == 0 {
                        self.state = State::DataCr;
                    }
                    continue;
                }
                State::Size => self.state = self.size(byte)?,
                State::SizeLf | State::DataCr | State::DataLf => self.state = self.end(byte)?,
                State::Line | State::Name | State::Value | State::ValueLf | State::EndLf => {
                    self.spend("trailers are too long")?;
                    self.state = self.trailer(byte, limits)?;
                }
                _ => {
                    self.spend("chunk extensions are too long")?;
                    self.state = self.extension(byte)?;
                }
            }
            at += 1;
        }
        Ok(at)
    }

    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    fn spend(&mut self, over: &'static str) -> Result<(), Refusal> {
        self.extra += 1;
        if self.extra > MAX_EXTRA { Err(Refusal::bad(over)) } else { Ok(()) }
    }

    fn size(&mut self, byte: u8) -> Result<State, Refusal> {
        let digit = char::from(byte).to_digit(16);
        match (digit, byte) {
            (Some(digit), _) if self.digits < MAX_DIGITS => {
                self.digits += 1;
                self.size = self.size * 16 + u64::from(digit);
                Ok(State::Size)
            }
            (Some(_), _) => Err(Refusal::bad("a chunk size is too long")),
            _ if self.digits == 0 => Err(Refusal::bad("a chunk without a size")),
            (_, b'\r') => Ok(State::SizeLf),
            (_, b';') => Ok(State::Extension),
            _ => Err(Refusal::bad("a chunk size is no hexadecimal number")),
        }
    }

    /// The line ends round a chunk.
    fn end(&mut self, byte: u8) -> Result<State, Refusal> {
        match (self.state, byte) {
            (State::DataCr, b'\r') => Ok(State::DataLf),
            (State::DataLf, b'\n') => {
                (self.size, self.digits) = (0, 0);
                Ok(State::Size)
            }
            (State::SizeLf, b'\n') => Ok(if self.size == 0 { State::Line } else { State::Data }),
            (State::SizeLf, _) => Err(Refusal::bad("CR without LF after a chunk size")),
            _ => Err(Refusal::bad("a chunk is longer than its size")),
        }
    }

    fn extension(&mut self, byte: u8) -> Result<State, Refusal> {
        use State::{
            Extension, ExtensionName, ExtensionToken, ExtensionValue, Quoted, QuotedEnd, QuotedPair,
        };
        let after = matches!(self.state, ExtensionName | ExtensionToken | QuotedEnd);
        Ok(match (self.state, byte) {
            (_, b'\r') if after => State::SizeLf,
            (_, b';') if after => Extension,
            (ExtensionName, b'=') => ExtensionValue,
            (Extension | ExtensionName, _) if is_token(byte) => ExtensionName,
            (ExtensionValue, b'"') => Quoted,
            (ExtensionValue | ExtensionToken, _) if is_token(byte) => ExtensionToken,
            (Quoted, b'"') => QuotedEnd,
            (Quoted, b'\\') => QuotedPair,
            (Quoted | QuotedPair, _) if is_value(byte) => Quoted,
            _ => return Err(Refusal::bad("a chunk extension is malformed")),
        })
    }

    fn trailer(&mut self, byte: u8, limits: &Limits) -> Result<State, Refusal> {
        let bad = |why| Err(Refusal::bad(why));
        match (self.state, byte) {
            (State::Line, b'\r') => Ok(State::EndLf),
            (State::EndLf, b'\n') => Ok(State::Done),
            (State::ValueLf, b'\n') => Ok(State::Line),
            (State::Line, _) if is_token(byte) && byte != b'_' => {
                self.fields += 1;
                if self.fields > limits.fields {
                    return bad("too many trailers");
                }
                self.named = 0;
                self.remember(byte);
                Ok(State::Name)
            }
            (State::Name, b':') => {
                let name = self.name.get(..self.named).unwrap_or_default();
                if NOT_IN_TRAILERS.contains(&name) {
                    return bad("a field that may not come after the body");
                }
                Ok(State::Value)
            }
            (State::Name, _) if is_token(byte) && byte != b'_' => {
                self.remember(byte);
                Ok(State::Name)
            }
            (State::Value, b'\r') => Ok(State::ValueLf),
            (State::Value, _) if is_value(byte) => Ok(State::Value),
            _ => bad("a trailer is malformed"),
        }
    }

    /// A name longer than there is room for is none of those that matter.
    fn remember(&mut self, byte: u8) {
        if let Some(slot) = self.name.get_mut(self.named) {
            *slot = byte.to_ascii_lowercase();
        }
        self.named += 1;
    }
}
