use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use super::python::{self, Dumps};

/// Bounds of one rendering: the template is the operator's, the messages are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Work: instructions, and one more per 64 bytes moved or written.
    pub fuel: u64,
    /// Nested calls of macros and recursive loops.
    pub recursion: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { fuel: 10_000_000, recursion: 200 }
    }
}

/// The template as Jinja2 reads it: newlines normalised, and without the `generation` markers that only training uses.
pub(super) fn source(source: &str) -> String {
    let mut text = source.replace("\r\n", "\n").replace('\r', "\n");
    for (tag, with) in [("generation", "if true"), ("endgeneration", "endif")] {
        for open in ["{% ", "{%- ", "{%", "{%-"] {
            for close in [" %}", " -%}", "%}", "-%}"] {
                text = text.replace(&format!("{open}{tag}{close}"), &format!("{open}{with}{close}"));
            }
        }
    }
    text
}

/// Jinja2 with the options that transformers sets.
pub(super) fn syntax() -> SyntaxConfig {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default()
}

pub(super) fn environment(limits: Limits, clock: fn() -> SystemTime) -> Environment<'static> {
    let mut env = Environment::new();
    env.set_syntax(syntax());
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_recursion_limit(limits.recursion);
    env.set_fuel(Some(limits.fuel));
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_formatter(|out, _, value| {
        match value.as_str() {
            Some(s) => out.write_str(s)?,
            None => out.write_str(&python::str(value)?)?,
        }
        Ok(())
    });
    env.add_function("raise_exception", |reason: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, reason))
    });
    env.add_function("strftime_now", move |_format: String| -> Result<String, Error> {
        let _ = clock();
        Err(Error::new(ErrorKind::InvalidOperation, "no clock yet"))
    });
    env.add_filter("tojson", tojson);
    env.add_filter("string", |v: Value| python::str(&v));
    env.add_filter("trim", |v: Value| -> Result<String, Error> {
        Ok(python::str(&v)?
            .trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
            .to_owned())
    });
    env.add_test("iterable", |v: Value| {
        matches!(
            v.kind(),
            ValueKind::Seq | ValueKind::Iterable | ValueKind::Map | ValueKind::String | ValueKind::Undefined
        )
    });
    env
}

fn tojson(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let indent = match indent {
        None => None,
        Some(v) if v.is_none() => None,
        Some(v) => Some(match v.as_str() {
            Some(s) => s.to_owned(),
            None => " ".repeat(usize::try_from(v.clone()).unwrap_or(0).min(64)),
        }),
    };
    let mut separators = separators.unwrap_or_default().into_iter();
    let dumps = Dumps {
        item: separators.next().unwrap_or_else(|| if indent.is_some() { "," } else { ", " }.into()),
        key: separators.next().unwrap_or_else(|| ": ".into()),
        indent,
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    dumps.write(&value, &mut out)?;
    Ok(Value::from_safe_string(out))
}
