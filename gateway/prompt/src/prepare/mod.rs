//! From a request to what the engine computes on: engine by engine, since each prepares in its own way.

pub mod vllm;

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

/// The prompt's text without template or tokenizer, for tiers that compare prompts by their text alone: the strings of
/// a chat's messages, roles included, or of a completions prompt, in order. `None` where there is none.
pub fn plain_text(path: &str, fields: &Fields<'_>) -> Option<String> {
    let raw = match Api::of(path) {
        Api::Chat => fields.messages?,
        Api::Completions => fields.prompt?,
        Api::Other => return None,
    };
    let mut text = String::with_capacity(raw.len());
    strings(&Json::parse(raw).ok()?, &mut text);
    (!text.is_empty()).then_some(text)
}

fn strings(json: &Json<'_>, out: &mut String) {
    match json {
        Json::Str(s) => {
            out.push_str(s);
            out.push('\n');
        }
        Json::List(items) => items.iter().for_each(|item| strings(item, out)),
        Json::Dict(members) => members.iter().for_each(|(_, v)| strings(v, out)),
        _ => (),
    }
}
