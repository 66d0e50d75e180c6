//! Chat templates, rendered as the engine's Python stack (transformers over Jinja2) renders them.

mod env;
pub(crate) mod python;
mod source;

use std::time::SystemTime;

use minijinja::value::Value;
use minijinja::{Environment, Error};

pub use env::Limits;
pub use source::ContentFormat;

/// A compiled chat template.
pub struct ChatTemplate {
    env: Environment<'static>,
    format: ContentFormat,
    knows_developer: bool,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("format", &self.format).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a template; `clock` answers `strftime_now`.
    pub fn compile(source: &str, limits: Limits, clock: fn() -> SystemTime) -> Result<Self, Error> {
        let mut env = env::environment(limits, clock);
        let compiled = env::source(source);
        let format = source::content_format(&compiled, env::syntax());
        env.add_template_owned(NAME, compiled)?;
        Ok(Self { env, format, knows_developer: source::knows_developer(source) })
    }

    /// Renders with `context`, a map of variables.
    pub fn render(&self, context: Value) -> Result<String, Error> {
        self.env.get_template(NAME)?.render(context)
    }

    /// How the template wants the content of messages.
    pub fn content_format(&self) -> ContentFormat {
        self.format
    }

    /// Does the template know the role `developer`?
    pub fn knows_developer(&self) -> bool {
        self.knows_developer
    }
}

const NAME: &str = "chat";
