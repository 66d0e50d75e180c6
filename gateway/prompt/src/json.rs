//! JSON as Python's `json.loads` reads it, which is how the engines read a request.
//!
//! What differs from a strict reader: `NaN`, `Infinity` and `-Infinity` are numbers, integers have no bounds, a float
//! too big is infinite, the last of several equal keys wins, a UTF-8 byte order mark is skipped. Two depths of use:
//! [`Members`] walks the members of one object and leaves their values as raw text (linear, no recursion, nothing
//! built), [`Json`] is a tree that borrows from the text.

use std::borrow::Cow;

use thiserror::Error;

/// Deepest nesting that [`Json::parse`] follows. Python stops near 1,000; no prompt needs a tenth of that.
pub const MAX_DEPTH: usize = 128;

/// Why a text was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum JsonError {
    /// Not JSON, not even as Python reads it.
    #[error("not JSON")]
    Syntax,
    /// Nested deeper than [`MAX_DEPTH`].
    #[error("nested deeper than {MAX_DEPTH}")]
    Depth,
    /// A string with half a surrogate pair: Python holds it, but no engine can encode it.
    #[error("a string with a lone surrogate")]
    Surrogate,
}

/// A value, borrowing from the text where it can.
#[derive(Debug, Clone, PartialEq)]
pub enum Json<'a> {
    /// `null`
    Null,
    /// `true`, `false`
    Bool(bool),
    /// An integer of any size, as written (`-0` included).
    Int(&'a str),
    /// A number with a fraction or an exponent, `NaN` or an infinity.
    Float(f64),
    /// A string, unescaped.
    Str(Cow<'a, str>),
    /// An array.
    List(Vec<Json<'a>>),
    /// An object's members as written; for equal keys the last one counts, in the place of the first.
    Dict(Vec<(Cow<'a, str>, Json<'a>)>),
}

impl<'a> Json<'a> {
    /// Reads a whole text.
    pub fn parse(text: &'a str) -> Result<Self, JsonError> {
        let mut reader = Reader { text, at: 0 };
        let value = reader.value(0)?;
        reader.space();
        if reader.at == text.len() { Ok(value) } else { Err(JsonError::Syntax) }
    }

    /// The value as a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(s) => Some(s),
            _ => None,
        }
    }

    /// The member `key` of an object, the last one of that name.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Dict(members) => members.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// Is this `null`?
    pub fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }

    /// Python's truth of the value.
    pub fn is_truthy(&self) -> bool {
        match self {
            Self::Null => false,
            Self::Bool(b) => *b,
            Self::Int(digits) => digits.bytes().any(|b| matches!(b, b'1'..=b'9')),
            Self::Float(f) => *f != 0.0,
            Self::Str(s) => !s.is_empty(),
            Self::List(items) => !items.is_empty(),
            Self::Dict(members) => !members.is_empty(),
        }
    }
}

/// One member of an object: the key, unescaped (`None`: it holds a lone surrogate), and its value as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member<'a> {
    /// The key.
    pub key: Option<Cow<'a, str>>,
    /// The value's text, without surrounding white space. Nested values are checked for balance only.
    pub value: &'a str,
    /// Where `value` begins in the text given to [`Members::new`], in bytes.
    pub at: usize,
}

/// The members of one object, in order. Ends with an error where the text is not an object.
pub struct Members<'a> {
    reader: Reader<'a>,
    state: State,
}

#[derive(PartialEq)]
enum State {
    Start,
    Inside,
    Done,
}

impl<'a> Members<'a> {
    /// Walks the object that `text` holds; white space around it is allowed, anything else is an error.
    pub fn new(text: &'a str) -> Self {
        Self { reader: Reader { text, at: 0 }, state: State::Start }
    }

    fn step(&mut self) -> Result<Option<Member<'a>>, JsonError> {
        let reader = &mut self.reader;
        reader.space();
        match (&self.state, reader.peek()) {
            (State::Start, Some(b'{')) => {
                reader.at += 1;
                reader.space();
                if reader.peek() == Some(b'}') {
                    return self.finish();
                }
            }
            (State::Inside, Some(b',')) => {
                reader.at += 1;
                reader.space();
            }
            (State::Inside, Some(b'}')) => return self.finish(),
            _ => return Err(JsonError::Syntax),
        }
        self.state = State::Inside;
        let key = match reader.string() {
            Ok(key) => Some(key),
            Err(JsonError::Surrogate) => None,
            Err(e) => return Err(e),
        };
        reader.space();
        reader.expect(b':')?;
        reader.space();
        let at = reader.at;
        reader.skip()?;
        let value = reader.text.get(at..reader.at).ok_or(JsonError::Syntax)?;
        Ok(Some(Member { key, value, at }))
    }

    fn finish(&mut self) -> Result<Option<Member<'a>>, JsonError> {
        self.reader.at += 1;
        self.reader.space();
        self.state = State::Done;
        if self.reader.at == self.reader.text.len() { Ok(None) } else { Err(JsonError::Syntax) }
    }
}

impl<'a> Iterator for Members<'a> {
    type Item = Result<Member<'a>, JsonError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.state == State::Done {
            return None;
        }
        match self.step() {
            Ok(member) => member.map(Ok),
            Err(e) => {
                self.state = State::Done;
                Some(Err(e))
            }
        }
    }
}

/// The body as text: UTF-8, without a byte order mark. `None` where Python would refuse it too.
pub fn text(body: &[u8]) -> Option<&str> {
    std::str::from_utf8(body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body)).ok()
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a [u8] {
        self.text.as_bytes().get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn expect(&mut self, byte: u8) -> Result<(), JsonError> {
        if self.peek() == Some(byte) {
            self.at += 1;
            Ok(())
        } else {
            Err(JsonError::Syntax)
        }
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\t' | b'\r')) {
            self.at += 1;
        }
    }

    /// Steps over a value; brackets are counted, not matched by kind: a body that is wrong there is the engine's to refuse.
    fn skip(&mut self) -> Result<(), JsonError> {
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
        self.expect(b'"')?;
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
    fn string(&mut self) -> Result<Cow<'a, str>, JsonError> {
        self.expect(b'"')?;
        let mut owned: Option<String> = None;
        let mut lone = false;
        loop {
            let found = memchr::memchr2(b'"', b'\\', self.rest()).ok_or(JsonError::Syntax)?;
            let chunk = self.text.get(self.at..self.at + found).ok_or(JsonError::Syntax)?;
            if chunk.bytes().any(|b| b < 0x20) {
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
            let text = owned.get_or_insert_default();
            text.push_str(chunk);
            match self.escape()? {
                Some(c) => text.push(c),
                None => lone = true,
            }
        }
    }

    /// What follows a backslash; `None` for half a surrogate pair.
    fn escape(&mut self) -> Result<Option<char>, JsonError> {
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

    fn value(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        if depth > MAX_DEPTH {
            return Err(JsonError::Depth);
        }
        self.space();
        match self.peek().ok_or(JsonError::Syntax)? {
            b'"' => Ok(Json::Str(self.string()?)),
            b'{' => self.dict(depth),
            b'[' => self.list(depth),
            _ => self.bare(),
        }
    }

    fn list(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        self.expect(b'[')?;
        let mut items = Vec::new();
        self.space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Json::List(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.space();
            if self.peek() == Some(b']') {
                self.at += 1;
                return Ok(Json::List(items));
            }
            self.expect(b',')?;
        }
    }

    fn dict(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        self.expect(b'{')?;
        let mut members = Vec::new();
        self.space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Json::Dict(members));
        }
        loop {
            self.space();
            let key = self.string()?;
            self.space();
            self.expect(b':')?;
            members.push((key, self.value(depth + 1)?));
            self.space();
            if self.peek() == Some(b'}') {
                self.at += 1;
                return Ok(Json::Dict(members));
            }
            self.expect(b',')?;
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn same(ours: &Json<'_>, theirs: &serde_json::Value) -> bool {
        use serde_json::Value as V;
        match (ours, theirs) {
            (Json::Null, V::Null) => true,
            (Json::Bool(a), V::Bool(b)) => a == b,
            (Json::Int(a), V::Number(b)) => a.parse::<i128>().ok() == b.as_i128() || b.is_f64(),
            (Json::Float(a), V::Number(b)) => Some(*a) == b.as_f64(),
            (Json::Str(a), V::String(b)) => a == b,
            (Json::List(a), V::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
            (Json::Dict(_), V::Object(b)) => b.iter().all(|(k, v)| ours.get(k).is_some_and(|o| same(o, v))),
            _ => false,
        }
    }

    fn tree() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<u64>().prop_map(Into::into),
            any::<f64>().prop_map(Into::into),
            any::<String>().prop_map(Into::into),
        ];
        leaf.prop_recursive(5, 64, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
                prop::collection::vec((any::<String>(), inner), 0..6)
                    .prop_map(|m| serde_json::Value::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn reads_what_a_strict_reader_reads(value in tree(), pretty in any::<bool>()) {
            let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.unwrap();
            prop_assert!(same(&Json::parse(&text).unwrap(), &value));
            if let serde_json::Value::Object(object) = &value {
                let members: Vec<_> = Members::new(&text).map(Result::unwrap).collect();
                prop_assert_eq!(members.len(), object.len());
                for m in members {
                    prop_assert_eq!(&text[m.at..m.at + m.value.len()], m.value);
                    let theirs = &object[m.key.unwrap().as_ref()];
                    prop_assert!(same(&Json::parse(m.value).unwrap(), theirs));
                }
            }
        }

        #[test]
        fn agrees_on_what_is_json(text in "[\\[\\]{}:,\"\\\\0-9eE+\\-.truefalsn u\\n]{0,24}") {
            let strict = serde_json::from_str::<serde_json::Value>(&text);
            match Json::parse(&text) {
                Ok(ours) => prop_assert!(strict.is_err() || same(&ours, &strict.unwrap())),
                Err(JsonError::Surrogate) => (),
                Err(_) => prop_assert!(strict.is_err(), "{}", text),
            }
        }

        #[test]
        fn never_panics(body in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Some(text) = text(&body) {
                let _ = Json::parse(text);
                let _ = Members::new(text).count();
            }
        }
    }

    #[test]
    fn python_only_values() {
        for (text, want) in [
            ("NaN", None),
            ("Infinity", Some(f64::INFINITY)),
            ("-Infinity", Some(f64::NEG_INFINITY)),
            ("1e999", Some(f64::INFINITY)),
            ("1E5", Some(100_000.0)),
        ] {
            let Ok(Json::Float(f)) = Json::parse(text) else { panic!("{text}") };
            assert!(want.map_or(f.is_nan(), |w| w == f), "{text}");
        }
        assert_eq!(Json::parse("10000000000000000000000"), Ok(Json::Int("10000000000000000000000")));
        for wrong in [
            "01",
            "+1",
            "1.",
            ".5",
            "1e",
            "nan",
            "inf",
            "\"\u{1}\"",
            "[1,]",
            "{\"a\":1,}",
            "1 2",
            "",
            "\"\\x\"",
        ] {
            assert_eq!(Json::parse(wrong), Err(JsonError::Syntax), "{wrong}");
        }
        assert_eq!(Json::parse(r#""\ud83d\ude00""#), Ok(Json::Str("😀".into())));
        assert_eq!(Json::parse(r#""\ud83dx""#), Err(JsonError::Surrogate));
        assert_eq!(Json::parse(r#""\ud83d\ud83d\ude00""#), Err(JsonError::Surrogate));
    }

    #[test]
    fn depth_is_bounded() {
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        assert_eq!(Json::parse(&deep), Err(JsonError::Depth));
        let text = format!("{{\"a\":{deep},\"b\":1}}");
        assert_eq!(Members::new(&text).filter(Result::is_ok).count(), 2);
        assert!(Json::parse(&("[".repeat(MAX_DEPTH) + &"]".repeat(MAX_DEPTH))).is_ok());
    }
}
