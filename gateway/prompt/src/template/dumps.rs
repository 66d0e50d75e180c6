//! `json.dumps`.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::iterables::DictView;
use super::python::{BigInt, bounded, float_repr};

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
        bounded(out)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Number if !value.is_integer() => {
                out.push_str(&json_float(f64::try_from(value.clone())?))
            }
            ValueKind::Number => out.push_str(&value.to_string()),
            ValueKind::Seq => self.list(value, out, level)?,
            // a slice of a list
            ValueKind::Iterable
                if value.len().is_some() && value.downcast_object_ref::<DictView>().is_none() =>
            {
                self.list(value, out, level)?;
            }
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
