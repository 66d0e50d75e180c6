use std::fmt::Write;
use std::time::SystemTime;

use chrono::{DateTime, Utc};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use super::{filters, methods, operators, python};

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
        Self { fuel: 4_000_000, recursion: 200 }
    }
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
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, _, value| {
        match value.as_str() {
            Some(s) => out.write_str(s)?,
            None => out.write_str(&python::str(value)?)?,
        }
        Ok(())
    });
    env.add_function("raise_exception", |reason: &Value| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, python::str(reason)?))
    });
    env.add_function("strftime_now", move |format: &str| strftime(clock(), format));
    env.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.to_vec()));
    env.add_function("joiner", minijinja_contrib::globals::joiner);
    operators::add(&mut env);
    filters::add(&mut env);
    env
}

/// `datetime.strftime` in UTC, where engines in containers live.
fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    let format = format.replace("%f", "%6f"); // microseconds
    let mut out = String::new();
    write!(out, "{}", DateTime::<Utc>::from(now).format(&format)).map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, "strftime_now: a directive that is not known")
    })?;
    Ok(out)
}
