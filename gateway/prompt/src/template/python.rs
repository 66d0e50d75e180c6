//! Values as Python prints them, and text as Python cuts it.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::iterables::DictView;
use crate::json::Json;

/// An integer beyond 128 bits; printed as it was written.
#[derive(Debug)]
pub(super) struct BigInt(String);

impl minijinja::value::Object for BigInt {
    fn repr(self: &std::sync::Arc<Self>) -> minijinja::value::ObjectRepr {
        minijinja::value::ObjectRepr::Plain
    }

    fn render(self: &std::sync::Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A JSON value as a template sees it.
pub(crate) fn value(json: Json<'_>) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(b),
        Json::Int(digits) => int(digits),
        Json::Float(f) => Value::from(f),
        Json::Str(s) => Value::from(s.into_owned()),
        Json::List(items) => items.into_iter().map(value).collect(),
        Json::Dict(members) => {
            Value::from_pairs(members.into_iter().map(|(k, v)| (k.into_owned(), value(v))))
        }
    }
}

fn int(digits: &str) -> Value {
    if let Ok(i) = digits.parse::<i64>() {
        Value::from(i)
    } else if let Ok(i) = digits.parse::<i128>() {
        Value::from(i)
    } else {
        Value::from_object(BigInt(digits.to_owned()))
    }
}

/// What Python's `str.isspace` holds for space.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// `str.strip()`.
pub(crate) fn strip(s: &str) -> &str {
    s.trim_matches(is_space)
}

/// `str.splitlines`.
pub(crate) fn lines(s: &str, keep_ends: bool) -> Vec<&str> {
    let ends = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = s;
    while let Some(at) = rest.find(ends) {
        let tail = rest.get(at..).unwrap_or_default();
        let len = if tail.starts_with("\r\n") { 2 } else { tail.chars().next().map_or(1, char::len_utf8) };
        lines.push(rest.get(..at + if keep_ends { len } else { 0 }).unwrap_or_default());
        rest = rest.get(at + len..).unwrap_or_default();
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// `repr(float)`: the shortest digits that read back the same, exponent form below 1e-4 and from 1e16.
pub(crate) fn float_repr(f: f64) -> String {
    if f.is_nan() {
        return "nan".into();
    }
    if f.is_infinite() {
        return if f > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{f:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if f != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = f.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// `str(value)`; undefined is empty, as Jinja prints it.
pub(crate) fn str(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_str(value, &mut out)?;
    Ok(out)
}

/// Appends `str(value)`.
pub(crate) fn write_str(value: &Value, out: &mut String) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(()),
        ValueKind::String => {
            out.push_str(value.as_str().unwrap_or_default());
            Ok(())
        }
        _ => write_repr(value, out),
    }
}

/// The most bytes that printing one value makes. A few lists in lists can stand for more than any memory holds.
const LONGEST: usize = 64 << 20;

/// Whether what was printed so far may go on.
pub(super) fn bounded(out: &str) -> Result<(), Error> {
    if out.len() > LONGEST {
        return Err(Error::new(ErrorKind::OutOfFuel, "a value is too long to print"));
    }
    Ok(())
}

/// Appends `repr(value)`.
pub(crate) fn write_repr(value: &Value, out: &mut String) -> Result<(), Error> {
    bounded(out)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => repr_str(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => out.push_str(&float_repr(f64::try_from(value.clone())?)),
        ValueKind::Seq | ValueKind::Iterable => {
            match value.downcast_object_ref::<DictView>().map(DictView::parts) {
                Some((name, items)) => {
                    out.push_str(name);
                    out.push('(');
                    write_repr(&Value::from(items.to_vec()), out)?;
                    out.push(')');
                }
                None => write_items(value, out)?,
            }
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.checked().enumerate() {
                let key = key?;
                if i > 0 {
                    out.push_str(", ");
                }
                write_repr(&key, out)?;
                out.push_str(": ");
                write_repr(&value.get_item(&key)?, out)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

fn write_items(value: &Value, out: &mut String) -> Result<(), Error> {
    let (open, close) = if value.is_tuple() { ('(', ")") } else { ('[', "]") };
    out.push(open);
    let mut len = 0;
    for item in value.try_iter()?.checked() {
        if len > 0 {
            out.push_str(", ");
        }
        write_repr(&item?, out)?;
        len += 1;
    }
    out.push_str(if value.is_tuple() && len == 1 { ",)" } else { close });
    Ok(())
}

fn repr_str(s: &str, out: &mut String) {
    let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in s.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if printable(c) => out.push(c),
            c if u32::from(c) < 0x100 => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c if u32::from(c) < 0x10000 => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push_str(&format!("\\U{:08x}", u32::from(c))),
        }
    }
    out.push(quote);
}

/// Close to Python's `str.isprintable`: control, format, separator (but the space), private and unassigned-like
/// characters are escaped. `char::escape_debug` follows the same Unicode classes but for combining marks.
fn printable(c: char) -> bool {
    match c {
        ' '..='~' => true,
        '\u{a0}' | '\u{ad}' => false,
        c if c.is_control() || c.is_whitespace() => false,
        '\u{e000}'..='\u{f8ff}' | '\u{f0000}'..='\u{10ffff}' => false,
        c => {
            c.escape_debug().count() == 1
                || !matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
        }
    }
}
