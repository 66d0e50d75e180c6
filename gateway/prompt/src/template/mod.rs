//! Chat templates, rendered as the engine's Python stack (transformers over Jinja2) renders them.

mod dumps;
mod env;
mod filters;
mod iterables;
mod methods;
mod operators;
pub(crate) mod python;
mod rewrite;
mod source;

use std::time::SystemTime;

use minijinja::Environment;
use minijinja::value::Value;
use thiserror::Error;

use crate::json::Json;

pub use env::Limits;
pub use source::ContentFormat;

/// Why a template does not compile, or refuses a chat.
#[derive(Debug, Error)]
#[error("{}", describe(.0))]
pub struct TemplateError(#[from] minijinja::Error);

fn describe(error: &minijinja::Error) -> String {
    let line = error.line().map(|line| format!(" (line {line} of the template)")).unwrap_or_default();
    format!("{error}{line}")
}

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
    pub fn compile(source: &str, limits: Limits, clock: fn() -> SystemTime) -> Result<Self, TemplateError> {
        let mut env = env::environment(limits, clock);
        // Jinja2 reads every kind of line end as one
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let format = source::content_format(&source, env::syntax());
        env.add_template_owned(NAME, rewrite::rewrite(&source, env::syntax()))?;
        Ok(Self { env, format, knows_developer: source::knows_developer(&source) })
    }

    /// Renders with the members of `context` as variables, as `render_jinja_template` of transformers 5 does: a
    /// message's reasoning can be read under any of its names.
    pub fn render(&self, context: Json<'_>) -> Result<String, TemplateError> {
        let Json::Dict(members) = context else { return self.render_value(python::value(context)) };
        let variables = members.into_iter().map(|(name, json)| {
            let messages = name == "messages";
            let variable = match json {
                Json::List(items) if messages => {
                    items.into_iter().map(alias_reasoning).map(python::value).collect()
                }
                json => python::value(json),
            };
            (name.into_owned(), variable)
        });
        self.render_value(Value::from_pairs(variables))
    }

    pub(crate) fn render_value(&self, context: Value) -> Result<String, TemplateError> {
        Ok(self.env.get_template(NAME)?.render(context)?)
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

fn alias_reasoning(message: Json<'_>) -> Json<'_> {
    let names = ["reasoning_content", "thinking", "reasoning"];
    let Some(reasoning) = names.iter().find_map(|name| message.get(name).filter(|r| !r.is_null())).cloned()
    else {
        return message;
    };
    let Json::Dict(members) = message else { return message };
    let aliased = [("thinking".into(), reasoning.clone())].into_iter().chain(members);
    Json::Dict(aliased.chain([("reasoning_content".into(), reasoning)]).collect())
}
