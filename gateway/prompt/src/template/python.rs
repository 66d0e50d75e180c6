//! Values as Python prints them: `str`, `repr`, `json.dumps`.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use crate::json::Json;

/// An integer beyond 128 bits; printed as it was written.
#[derive(Debug)]
struct BigInt(String);

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

/// Appends `repr(value)`.
pub(crate) fn write_repr(value: &Value, out: &mut String) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => repr_str(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => out.push_str(&float_repr(f64::try_from(value.clone())?)),
        ValueKind::Seq | ValueKind::Iterable => {
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

/// How `json.dumps` is asked to write.
#[derive(Debug, Clone)]
pub(crate) struct Dumps {
    /// Spaces (or the text itself) per level; `None` writes one line.
    pub indent: Option<String>,
    /// Between items.
    pub item: String,
    /// Between key and value.
    pub key: String,
    /// Escape everything beyond ASCII.
    pub ascii: bool,
    /// Keys in order.
    pub sort: bool,
}

impl Dumps {
    /// Appends `json.dumps(value)`.
    pub fn write(&self, value: &Value, out: &mut String) -> Result<(), Error> {
        self.at(value, out, 0)
    }

    fn at(&self, value: &Value, out: &mut String, level: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Number if !value.is_integer() => {
                out.push_str(&json_float(f64::try_from(value.clone())?))
            }
            ValueKind::Number => out.push_str(&value.to_string()),
            ValueKind::Seq => self.list(value, out, level)?,
            ValueKind::Map => self.dict(value, out, level)?,
            ValueKind::Plain if value.downcast_object_ref::<BigInt>().is_some() => {
                out.push_str(&value.to_string())
            }
            kind => {
                let reason = format!("Object of type {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        }
        Ok(())
    }

    fn list(&self, value: &Value, out: &mut String, level: usize) -> Result<(), Error> {
        let mut empty = true;
        out.push('[');
        for item in value.try_iter()?.checked() {
            if !empty {
                out.push_str(&self.item);
            }
            empty = false;
            self.line(out, level + 1);
            self.at(&item?, out, level + 1)?;
        }
        if !empty {
            self.line(out, level);
        }
        out.push(']');
        Ok(())
    }

    fn dict(&self, value: &Value, out: &mut String, level: usize) -> Result<(), Error> {
        let mut keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
        if self.sort {
            keys.sort();
        }
        out.push('{');
        for (i, key) in keys.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item);
            }
            self.line(out, level + 1);
            self.string(&json_key(key)?, out);
            out.push_str(&self.key);
            self.at(&value.get_item(key)?, out, level + 1)?;
        }
        if !keys.is_empty() {
            self.line(out, level);
        }
        out.push('}');
        Ok(())
    }

    fn line(&self, out: &mut String, level: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), level));
        }
    }

    fn string(&self, s: &str, out: &mut String) {
        out.push('"');
        for c in s.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
                c if self.ascii && !c.is_ascii() => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn json_float(f: f64) -> String {
    if f.is_nan() {
        "NaN".into()
    } else if f.is_infinite() {
        if f > 0.0 { "Infinity".into() } else { "-Infinity".into() }
    } else {
        float_repr(f)
    }
}

fn json_key(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number if !key.is_integer() => Ok(json_float(f64::try_from(key.clone())?)),
        ValueKind::Number => Ok(key.to_string()),
        kind => Err(Error::new(ErrorKind::InvalidOperation, format!("keys must be strings, not {kind}"))),
    }
}
