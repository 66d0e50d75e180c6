//! From a request to what the engine computes on: engine by engine, since each prepares in its own way.

mod opening;
pub mod vllm;

pub use opening::{Opening, opening};

use crate::json::Json;
use crate::{Fields, Model, Prompt, PromptError};

/// The prompt of a request as vLLM would compute on it.
///
/// `path` is the request's path, query or not. Fails with [`PromptError::Text`] where there is no text to find (other
/// paths, missing members) and with [`PromptError::Tokenize`] where it cannot be turned into the engine's ids or the
/// engine would refuse the request.
pub fn prompt(model: &Model, path: &str, fields: &Fields<'_>) -> Result<Prompt, PromptError> {
    vllm::prompt(model, path, fields)
}

/// What a path asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    Chat,
    Completions,
    Other,
}

impl Api {
    pub(crate) fn of(path: &str) -> Self {
        let path = path.split(['?', '#']).next().unwrap_or_default();
        match path.strip_suffix('/').unwrap_or(path) {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            _ => Self::Other,
        }
    }
}

/// The prompt's text without template or tokenizer, for tiers that compare prompts by their text alone: a chat's tools as
/// written, since engines put them first, then the strings of its messages, roles after contents; or those of a
/// completions prompt; token ids as numbers. A conversation that goes on extends the text it had before. `None` where there is none.
pub fn plain_text(
    path: &str,
    tools: Option<&str>,
    messages: Option<&str>,
    prompt: Option<&str>,
) -> Option<String> {
    let (tools, raw) = match Api::of(path) {
        Api::Chat => (tools, messages?),
        Api::Completions => (None, prompt?),
        Api::Other => return None,
    };
    let prompt = Json::parse(raw).ok()?;
    let mut text = String::with_capacity(raw.len() + tools.map_or(0, |tools| tools.len() + 1));
    if let Some(tools) = tools {
        text.push_str(tools);
        text.push('\n');
    }
    let start = text.len();
    strings(&prompt, &mut text);
    (text.len() > start).then_some(text)
}

fn strings(json: &Json<'_>, out: &mut String) {
    match json {
        Json::Str(s) => {
            out.push_str(s);
            out.push('\n');
        }
        Json::Int(digits) => {
            out.push_str(digits);
            out.push(' ');
        }
        Json::List(items) => items.iter().for_each(|item| strings(item, out)),
        Json::Dict(members) => {
            // what most messages have in common comes last: prompts that differ should do so from the start
            let (common, own): (Vec<_>, Vec<_>) =
                members.iter().partition(|(key, _)| matches!(key.as_ref(), "role" | "type"));
            own.iter().chain(&common).for_each(|(_, value)| strings(value, out));
        }
        _ => (),
    }
}
