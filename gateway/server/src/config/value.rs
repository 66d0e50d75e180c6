//! One value of a file against the kind its key is declared with.

use std::collections::HashSet;

use kvgate_core::schema::{Kind, parse_duration, parse_size};
use serde_json::Value;
use toml::de::{DeInteger, DeString, DeTable, DeValue};

use super::table::{Form, nearest};

/// The most texts of a list.
const MAX_TEXTS: usize = 4096;
/// The most numbers of one.
const MAX_NUMBERS: usize = 64;

/// A value that is not allowed where it stands.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// What the value's key goes on with where a part of the value is meant: `[1]`, `.name`; else empty.
    pub part: String,
    pub message: String,
    pub allowed: String,
    pub hint: Option<String>,
}

impl Refused {
    fn new(message: &str, allowed: impl Into<String>, hint: Option<String>) -> Self {
        Self { part: String::new(), message: message.into(), allowed: allowed.into(), hint }
    }

    fn of(self, part: String) -> Self {
        Self { part, ..self }
    }
}

/// What a value is, in words.
pub(super) fn kind_of(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

fn integer(number: &DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(number.as_str(), number.radix()).ok()
}

/// The value as the typed configuration reads it: durations and sizes stay texts. Everything that is wrong with it,
/// if anything is.
pub(super) fn convert(value: &DeValue<'_>, kind: &Kind, form: Option<Form>) -> Result<Value, Vec<Refused>> {
    let allowed = || form.map_or_else(|| kind.allowed(), |form| form.allowed().to_owned());
    match (kind, value) {
        (Kind::TextList, DeValue::Array(list)) if list.len() > MAX_TEXTS => {
            Err(vec![Refused::new("lists too many", format!("a list of {MAX_TEXTS} texts at most"), None)])
        }
        (Kind::TextList, DeValue::Array(list)) => {
            let mut seen = HashSet::new();
            let one = |(index, value): (usize, &toml::Spanned<DeValue<'_>>)| {
                let refused = match value.get_ref() {
                    // one key may be that of several certificates
                    DeValue::String(text) if !seen.insert(text.to_string()) && form != Some(Form::Key) => {
                        Refused::new("stands in the list twice", allowed(), Some("remove one".into()))
                    }
                    DeValue::String(text) => match self::text(text, form) {
                        Ok(text) => return Ok(Value::from(text)),
                        Err(refused) => refused,
                    },
                    other => {
                        Refused::new(&format!("is {} in a list of texts", kind_of(other)), allowed(), None)
                    }
                };
                Err(refused.of(format!("[{index}]")))
            };
            all(list.iter().enumerate().map(one)).map(Value::Array)
        }
        (Kind::IntList { .. }, DeValue::Array(list)) if list.len() > MAX_NUMBERS => Err(vec![Refused::new(
            "lists too many",
            format!("a list of {MAX_NUMBERS} numbers at most"),
            None,
        )]),
        (Kind::IntList { min, max }, DeValue::Array(list)) => {
            let one = |(index, value): (usize, &toml::Spanned<DeValue<'_>>)| {
                single(value.get_ref(), &Kind::Int { min: *min, max: *max }, None)
                    .map_err(|refused| refused.of(format!("[{index}]")))
            };
            all(list.iter().enumerate().map(one)).map(Value::Array)
        }
        (Kind::TextMap, DeValue::Table(map)) => {
            let one = |(key, value): (&toml::Spanned<DeString<'_>>, &toml::Spanned<DeValue<'_>>)| {
                let key = key.get_ref().to_string();
                let refused = match value.get_ref() {
                    DeValue::String(text) => match self::text(text, form) {
                        Ok(text) => return Ok((key, Value::from(text))),
                        Err(refused) => refused,
                    },
                    other => {
                        Refused::new(&format!("is {} in a table of texts", kind_of(other)), allowed(), None)
                    }
                };
                Err(refused.of(format!(".{key}")))
            };
            all(map.iter().map(one)).map(|pairs| Value::Object(pairs.into_iter().collect()))
        }
        _ => single(value, kind, form).map_err(|refused| vec![refused]),
    }
}

/// All parts, or all that is wrong with them.
fn all<T>(parts: impl Iterator<Item = Result<T, Refused>>) -> Result<Vec<T>, Vec<Refused>> {
    let (mut good, mut refused) = (Vec::new(), Vec::new());
    for part in parts {
        match part {
            Ok(part) => good.push(part),
            Err(part) => refused.push(part),
        }
    }
    if refused.is_empty() { Ok(good) } else { Err(refused) }
}

fn single(value: &DeValue<'_>, kind: &Kind, form: Option<Form>) -> Result<Value, Refused> {
    let allowed = || form.map_or_else(|| kind.allowed(), |form| form.allowed().to_owned());
    let wrong = || {
        let hint = instead(value, kind, form);
        Refused::new(&format!("is {}, which is not allowed here", kind_of(value)), allowed(), hint)
    };
    let range = || Refused::new("is out of range", allowed(), None);
    match (kind, value) {
        (Kind::Bool, DeValue::Boolean(b)) => Ok(Value::Bool(*b)),
        (Kind::Int { min, max }, DeValue::Integer(n)) => {
            integer(n).filter(|n| (min..=max).contains(&n)).map(Value::from).ok_or_else(range)
        }
        (Kind::Duration { min, max }, DeValue::String(text)) => match parse_duration(text) {
            Some(d) if (min..=max).contains(&&d) => Ok(Value::from(text.as_ref())),
            Some(_) => Err(range()),
            None => {
                let hint = instead(value, kind, form);
                let hint = hint.unwrap_or_else(|| "write a whole number and ms, s, m or h".into());
                Err(Refused::new("is not a duration", allowed(), Some(hint)))
            }
        },
        (Kind::Size { min, max }, DeValue::String(text)) => match parse_size(text) {
            Some(n) if (min..=max).contains(&&n) => Ok(Value::from(text.as_ref())),
            Some(_) => Err(range()),
            None => {
                let hint = "write a whole number and B, KiB, MiB or GiB".to_owned();
                Err(Refused::new("is not a size", allowed(), Some(hint)))
            }
        },
        (Kind::Size { min, max }, DeValue::Integer(n)) => {
            let bytes = integer(n).and_then(|n| u64::try_from(n).ok()).filter(|n| (min..=max).contains(&n));
            bytes.map(|n| Value::from(format!("{n}B"))).ok_or_else(range)
        }
        (Kind::Text, DeValue::String(text)) => self::text(text, form).map(Value::from),
        (Kind::Choice(words), DeValue::String(text)) if words.contains(&text.as_ref()) => {
            Ok(Value::from(text.as_ref()))
        }
        (Kind::Choice(words), DeValue::String(text)) => {
            let hint = nearest(text, words.iter().copied()).map(|w| format!("did you mean \"{w}\"?"));
            Err(Refused::new("is not one of the words allowed here", allowed(), hint))
        }
        _ => Err(wrong()),
    }
}

/// What to write instead, if it can be guessed: nothing is proposed that would not be taken.
fn instead(value: &DeValue<'_>, kind: &Kind, form: Option<Form>) -> Option<String> {
    let written = match value {
        DeValue::String(text) => text.trim().to_string(),
        DeValue::Integer(number) => integer(number)?.to_string(),
        DeValue::Float(number) => number.as_str().to_owned(),
        DeValue::Boolean(yes) => yes.to_string(),
        _ => String::new(),
    };
    let quoted = |text: &str| Value::from(text).to_string();
    let guesses = match (kind, value) {
        (Kind::Bool, DeValue::String(_) | DeValue::Integer(_)) => match written.to_lowercase().as_str() {
            "true" | "yes" | "on" | "1" => vec!["true".into()],
            "false" | "no" | "off" | "0" => vec!["false".into()],
            _ => return None,
        },
        (Kind::Int { .. }, DeValue::String(_)) => vec![written],
        (Kind::Duration { .. }, _) if written.bytes().all(|b| b.is_ascii_digit()) => {
            ["s", "ms", "m"].map(|unit| quoted(&format!("{written}{unit}"))).into()
        }
        (Kind::IntList { .. }, DeValue::String(_) | DeValue::Integer(_)) => vec![format!("[{written}]")],
        (Kind::TextList, DeValue::String(_)) => {
            let parts: Vec<_> = written.split(',').map(|part| quoted(part.trim())).collect();
            vec![format!("[{}]", parts.join(", "))]
        }
        (Kind::Choice(_), DeValue::Boolean(false)) => vec![quoted("off")],
        (Kind::Text, _) if form == Some(Form::Certified) => return Some(NAME_HINT.into()),
        (Kind::Text | Kind::Choice(_), DeValue::Integer(_) | DeValue::Float(_)) => {
            vec![quoted(&written), quoted(&format!("127.0.0.1:{written}"))]
        }
        _ => return None,
    };
    let taken = |guess: &String| {
        let text = format!("x = {guess}");
        let table = DeTable::parse(&text).ok();
        let value = table.as_ref().and_then(|table| table.get_ref().iter().next());
        value.is_some_and(|(_, value)| convert(value.get_ref(), kind, form).is_ok())
    };
    let guess = guesses.into_iter().find(taken)?;
    Some(match (kind, value) {
        (Kind::Duration { .. }, _) => format!("give it a unit: {guess}"),
        (Kind::Bool | Kind::Int { .. }, DeValue::String(_)) => format!("write {guess} without quotes"),
        _ => format!("write {guess}"),
    })
}

/// For `tls` of an endpoint, where `true` or a table is likely to be written.
const NAME_HINT: &str = "write the name in the engine's certificate, as \"engine-0.svc\"";

fn text(text: &str, form: Option<Form>) -> Result<&str, Refused> {
    if text.is_empty() {
        // the address of an endpoint has none
        let hint = (form != Some(Form::Peer)).then(|| "leave the key out to have the default".to_owned());
        return Err(Refused::new("is empty", form.map_or("a text", Form::allowed), hint));
    }
    match form.map(|form| (form, form.check(text))) {
        Some((form, Err(hint))) => Err(Refused::new("does not have the right form", form.allowed(), hint)),
        _ => Ok(text),
    }
}
