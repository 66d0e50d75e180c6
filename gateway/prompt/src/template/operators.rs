//! What [`super::rewrite`] puts in the place of operators.

use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};

use super::python;

pub(super) fn add(env: &mut Environment<'_>) {
    env.add_function("__iter", iter);
    env.add_function("__str", str);
    env.add_function("__ord", ord);
    env.add_function("__format", format);
    env.add_function("__escape", escape);
    env.add_function("__member", member);
}

fn wrong(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason.into())
}

/// What a loop may go over.
fn iter(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            Err(wrong(format!("'{}' object is not iterable", value.kind())))
        }
        _ => Ok(value),
    }
}

/// An operand of `~`.
fn str(value: Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::String { Ok(value) } else { python::str(&value).map(Value::from) }
}

/// An operand of `<` and the like.
fn ord(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined | ValueKind::None | ValueKind::Map => {
            Err(wrong(format!("'<' is not supported for {}", value.kind())))
        }
        _ => Ok(value),
    }
}

/// `format % values`.
fn format(state: &mut State, format: Value, values: Value) -> Result<Value, Error> {
    if format.kind() != ValueKind::String {
        return Err(wrong("% of something that is not a string"));
    }
    let mut args = vec![format];
    if values.is_tuple() {
        args.extend(values.try_iter()?);
    } else {
        args.push(values);
    }
    state.apply_filter("format", &args)
}

/// A string that is joined with markup.
fn escape(value: Value) -> Value {
    match value.as_str() {
        Some(text) if !value.is_safe() => Value::from_safe_string(escaped(text)),
        _ => value,
    }
}

/// HTML as markupsafe escapes it.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

/// A member named as one of a dict's methods: the method, which is there and true, whatever the dict holds.
fn member(value: Value, name: &str) -> Result<Value, Error> {
    let namespace = value.as_object().is_some_and(|o| o.type_name().contains("Namespace"));
    if value.kind() == ValueKind::Map && !namespace {
        Ok(Value::from_function(|| -> Result<Value, Error> {
            Err(wrong("a method that is not called by its name"))
        }))
    } else {
        value.get_attr(name)
    }
}
