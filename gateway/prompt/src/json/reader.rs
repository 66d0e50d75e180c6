//! The one reader behind trees and walks.

use std::borrow::Cow;

use super::{Json, JsonError, MAX_DEPTH, MAX_VALUES};

/// A text and how far it has been read.
pub(super) struct Reader<'a> {
    pub text: &'a str,
    pub at: usize,
    /// Values that may still be made.
    room: usize,
}

impl<'a> Reader<'a> {
    pub fn new(text: &'a str) -> Self {
        Self { text, at: 0, room: MAX_VALUES }
    }

    fn rest(&self) -> &'a [u8] {
        self.text.as_bytes().get(self.at..).unwrap_or_default()
    }

    pub fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    pub fn require(&mut self, byte: u8) -> Result<(), JsonError> {
        if self.peek() == Some(byte) {
            self.at += 1;
            Ok(())
        } else {
            Err(JsonError::Syntax)
        }
    }

    pub fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\t' | b'\r')) {
            self.at += 1;
        }
    }

    /// Steps over a value; brackets are counted, not matched by kind: a body that is wrong there is the engine's to refuse.
    pub fn skip(&mut self) -> Result<(), JsonError> {
        let mut depth = 0_usize;
        loop {
            match self.peek().ok_or(JsonError::Syntax)? {
                b'"' => self.skip_string()?,
                b'{' | b'[' => {
                    depth += 1;
                    self.at += 1;
                }
                b'}' | b']' => {
                    depth = depth.checked_sub(1).ok_or(JsonError::Syntax)?;
                    self.at += 1;
                }
                b',' | b':' | b' ' | b'\n' | b'\t' | b'\r' if depth > 0 => self.at += 1,
                _ => self.skip_bare()?,
            }
            if depth == 0 {
                return Ok(());
            }
        }
    }

    /// Steps over a number or a word.
    fn skip_bare(&mut self) -> Result<(), JsonError> {
        let bare = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
        let len = self.rest().iter().take_while(|b| bare(b)).count();
        self.at += len;
        if len == 0 { Err(JsonError::Syntax) } else { Ok(()) }
    }

    fn skip_string(&mut self) -> Result<(), JsonError> {
        self.require(b'"')?;
        loop {
            let found = memchr::memchr2(b'"', b'\\', self.rest()).ok_or(JsonError::Syntax)?;
            self.at += found;
            if self.peek() == Some(b'"') {
                self.at += 1;
                return Ok(());
            }
            self.at += 2; // the backslash and what it escapes; a quote or a backslash cannot be part of a longer escape
            if self.at > self.text.len() {
                return Err(JsonError::Syntax);
            }
        }
    }

    /// Reads a string, unescaping only where there is something to unescape.
    pub fn string(&mut self) -> Result<Cow<'a, str>, JsonError> {
        self.require(b'"')?;
        let mut owned: Option<String> = None;
        let mut lone = false;
        loop {
            let found = memchr::memchr2(b'"', b'\\', self.rest()).ok_or(JsonError::Syntax)?;
            let chunk = self.text.get(self.at..self.at + found).ok_or(JsonError::Syntax)?;
            // no early exit: this way it is done many bytes at a time
            if chunk.bytes().fold(false, |found, b| found | (b < 0x20)) {
                return Err(JsonError::Syntax);
            }
            self.at += found + 1;
            if self.text.as_bytes().get(self.at - 1) == Some(&b'"') {
                if lone {
                    return Err(JsonError::Surrogate);
                }
                return Ok(match owned {
                    None => Cow::Borrowed(chunk),
                    Some(s) => Cow::Owned(s + chunk),
                });
            }
            let text = owned.get_or_insert_with(|| String::with_capacity(2 * chunk.len() + 64));
            text.push_str(chunk);
            match self.escape()? {
                Some(c) => text.push(c),
                None => lone = true,
            }
        }
    }

    /// What a string says up to its end or its next escape, and which of the two follows, which is stepped over:
    /// neither where the text ends before.
    pub fn chunk(&mut self) -> (&'a str, Option<u8>) {
        let start = self.at;
        let end = memchr::memchr2(b'"', b'\\', self.rest()).map_or(self.text.len(), |found| start + found);
        let chunk = self.text.get(start..end).unwrap_or_default();
        let follows = self.text.as_bytes().get(end).copied();
        self.at = end + usize::from(follows.is_some());
        (chunk, follows)
    }

    /// What follows a backslash; `None` for half a surrogate pair.
    pub fn escape(&mut self) -> Result<Option<char>, JsonError> {
        let byte = self.peek().ok_or(JsonError::Syntax)?;
        self.at += 1;
        Ok(Some(match byte {
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let high = self.hex4()?;
                if !(0xD800..0xDC00).contains(&high) || !self.rest().starts_with(b"\\u") {
                    return Ok(char::from_u32(high));
                }
                let back = self.at;
                self.at += 2;
                let low = self.hex4()?;
                if !(0xDC00..0xE000).contains(&low) {
                    self.at = back; // the high half stands alone; what follows is read for itself
                    return Ok(None);
                }
                return Ok(char::from_u32(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)));
            }
            _ => return Err(JsonError::Syntax),
        }))
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let digits = self.text.get(self.at..self.at + 4).ok_or(JsonError::Syntax)?;
        if !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(JsonError::Syntax);
        }
        self.at += 4;
        u32::from_str_radix(digits, 16).map_err(|_| JsonError::Syntax)
    }

    pub fn value(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        if depth > MAX_DEPTH {
            return Err(JsonError::Depth);
        }
        self.room = self.room.checked_sub(1).ok_or(JsonError::Size)?;
        self.space();
        match self.peek().ok_or(JsonError::Syntax)? {
            b'"' => Ok(Json::Str(self.string()?)),
            b'{' => self.dict(depth),
            b'[' => self.list(depth),
            _ => self.bare(),
        }
    }

    /// Whether a list or an object goes on, after its opening bracket or one of its members: stands before the next
    /// one then, else behind the closing bracket.
    pub fn more(&mut self, first: bool, close: u8) -> Result<bool, JsonError> {
        self.space();
        if self.peek() == Some(close) {
            self.at += 1;
            return Ok(false);
        }
        if !first {
            self.require(b',')?;
            self.space();
        }
        Ok(true)
    }

    /// The key of a member, and the colon after it: stands before the value then. `None`: a lone surrogate is in it.
    pub fn key(&mut self) -> Result<Option<Cow<'a, str>>, JsonError> {
        let key = match self.string() {
            Ok(key) => Some(key),
            Err(JsonError::Surrogate) => None,
            Err(e) => return Err(e),
        };
        self.space();
        self.require(b':')?;
        self.space();
        Ok(key)
    }

    fn list(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        self.require(b'[')?;
        let mut items = Vec::new();
        while self.more(items.is_empty(), b']')? {
            items.push(self.value(depth + 1)?);
        }
        Ok(Json::List(items))
    }

    fn dict(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        self.require(b'{')?;
        let mut members = Vec::new();
        while self.more(members.is_empty(), b'}')? {
            let key = self.key()?.ok_or(JsonError::Surrogate)?;
            members.push((key, self.value(depth + 1)?));
        }
        Ok(Json::Dict(members))
    }

    fn bare(&mut self) -> Result<Json<'a>, JsonError> {
        let start = self.at;
        self.skip_bare()?;
        let word = self.text.get(start..self.at).ok_or(JsonError::Syntax)?;
        match word {
            "null" => Ok(Json::Null),
            "true" => Ok(Json::Bool(true)),
            "false" => Ok(Json::Bool(false)),
            "NaN" => Ok(Json::Float(f64::NAN)),
            "Infinity" => Ok(Json::Float(f64::INFINITY)),
            "-Infinity" => Ok(Json::Float(f64::NEG_INFINITY)),
            _ => number(word).ok_or(JsonError::Syntax),
        }
    }
}

/// A number by JSON's grammar; the standard parser alone would also take `+1`, `1.` or `inf`.
fn number(word: &str) -> Option<Json<'_>> {
    let digits = word.strip_prefix('-').unwrap_or(word);
    let whole = digits.bytes().take_while(u8::is_ascii_digit).count();
    if whole == 0 || (whole > 1 && digits.starts_with('0')) {
        return None;
    }
    let mut rest = digits.get(whole..)?;
    if rest.is_empty() {
        return Some(Json::Int(word));
    }
    if let Some(fraction) = rest.strip_prefix('.') {
        let len = fraction.bytes().take_while(u8::is_ascii_digit).count();
        rest = fraction.get(len..).filter(|_| len > 0)?;
    }
    if let Some(exponent) = rest.strip_prefix(['e', 'E']) {
        let exponent = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        rest =
            if !exponent.is_empty() && exponent.bytes().all(|b| b.is_ascii_digit()) { "" } else { exponent };
        if exponent.is_empty() {
            return None;
        }
    }
    if !rest.is_empty() {
        return None;
    }
    word.parse().ok().map(Json::Float)
}
