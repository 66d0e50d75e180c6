//! JSON as Python's `json.loads` reads it, which is how the engines read a request.
//!
//! What differs from a strict reader: `NaN`, `Infinity` and `-Infinity` are numbers, integers have no bounds, a float
//! too big is infinite, the last of several equal keys wins, a UTF-8 byte order mark is skipped. Two depths of use:
//! [`Members`] walks the members of one object and leaves their values as raw text (linear, no recursion, nothing
//! built), [`Items`] those of an array, [`Json`] is a tree that borrows from the text.

mod reader;
mod strings;
mod walk;

use std::borrow::Cow;

use thiserror::Error;

use reader::Reader;
pub(crate) use strings::{Sink, Stop};
pub use walk::{Items, Member, Members};

/// Deepest nesting that [`Json::parse`] follows. Python stops near 1,000; no prompt needs a tenth of that.
pub const MAX_DEPTH: usize = 128;

/// Most values that [`Json::parse`] makes: a tree takes many times the memory of a text of small values.
pub const MAX_VALUES: usize = 1 << 20;

/// Why a text was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum JsonError {
    /// Not JSON, not even as Python reads it.
    #[error("not JSON")]
    Syntax,
    /// Nested deeper than [`MAX_DEPTH`].
    #[error("nested deeper than {MAX_DEPTH}")]
    Depth,
    /// More than [`MAX_VALUES`] values.
    #[error("more than {MAX_VALUES} values")]
    Size,
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
        let mut reader = Reader::new(text);
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

/// The body as text: UTF-8, without a byte order mark. `None` where Python would refuse it too.
pub fn text(body: &[u8]) -> Option<&str> {
    std::str::from_utf8(body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body)).ok()
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
            if let serde_json::Value::Array(array) = &value {
                let items: Vec<_> = Items::new(&text).map(Result::unwrap).collect();
                prop_assert_eq!(items.len(), array.len());
                for (item, theirs) in items.into_iter().zip(array) {
                    prop_assert!(same(&Json::parse(item).unwrap(), theirs));
                }
            }
            if let serde_json::Value::Object(object) = &value {
                let members: Vec<_> = Members::new(&text).map(Result::unwrap).collect();
                prop_assert_eq!(members.len(), object.len());
                for m in members {
                    prop_assert_eq!(&text[m.at..m.at + m.value.len()], m.value);
                    let follows = text[..m.start].trim_end().ends_with(['{', ',']);
                    prop_assert!(follows, "{} in {}", m.start, text);
                    let key = text[m.start..m.at].trim_end().strip_suffix(':').unwrap();
                    let key = Json::parse(key).unwrap();
                    prop_assert_eq!(key.as_str(), m.key.as_deref());
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
                let _ = Items::new(text).count();
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
    fn depth_and_size_are_bounded() {
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        assert_eq!(Json::parse(&deep), Err(JsonError::Depth));
        let text = format!("{{\"a\":{deep},\"b\":1}}");
        assert_eq!(Members::new(&text).filter(Result::is_ok).count(), 2);
        let many = format!("[{}0]", "0,".repeat(MAX_VALUES));
        assert_eq!(Json::parse(&many), Err(JsonError::Size));
        assert_eq!(Items::new(&many).filter(Result::is_ok).count(), MAX_VALUES + 1);
        assert!(Json::parse(&("[".repeat(MAX_DEPTH) + &"]".repeat(MAX_DEPTH))).is_ok());
    }
}
