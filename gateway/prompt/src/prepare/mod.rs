//! From a request to what the engine computes on: engine by engine, since each prepares in its own way.

mod opening;
pub mod vllm;

pub use opening::{Opening, opening};

use futures::FutureExt;

use crate::json::{Sink, Stop};
use crate::{Fields, Model, Prompt, PromptError, TokenizeError};

/// The prompt of a request as vLLM would compute on it.
///
/// `path` is the request's path, query or not. Fails with [`PromptError::Text`] where there is no text to find (other
/// paths, missing members) and with [`PromptError::Tokenize`] where it cannot be turned into the engine's ids or the
/// engine would refuse the request.
pub fn prompt(model: &Model, path: &str, fields: &Fields<'_>) -> Result<Prompt, PromptError> {
    let prepared = vllm::prompt(model, path, fields, false).now_or_never();
    prepared.unwrap_or_else(|| Err(TokenizeError::from("it waits for another request").into()))
}

/// As [`prompt`], for many requests at a time: a turn that many have is tokenised once, as
/// [`Model::encode_shared`] does.
///
/// # Errors
/// As [`prompt`].
pub async fn prompt_shared(model: &Model, path: &str, fields: &Fields<'_>) -> Result<Prompt, PromptError> {
    vllm::prompt(model, path, fields, true).await
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
/// completions prompt; token ids as numbers. Of all that the first `limit` bytes, and no more than is said in the first
/// `2 * limit` bytes as written: about a millisecond for each MiB. A conversation that goes on extends the text it had
/// before. `None` where there is none.
pub fn plain_text(
    path: &str,
    tools: Option<&str>,
    messages: Option<&str>,
    prompt: Option<&str>,
    limit: usize,
) -> Option<String> {
    let (tools, raw) = match Api::of(path) {
        Api::Chat => (tools, messages?),
        Api::Completions => (None, prompt?),
        Api::Other => return None,
    };
    let looked_at = raw.get(..raw.floor_char_boundary(limit.saturating_mul(2)))?;
    let mut text =
        String::with_capacity(limit.min(looked_at.len() + tools.map_or(0, |tools| tools.len() + 1)));
    let mut sink = Sink::new(&mut text, limit);
    if let Some(tools) = tools
        && sink.push(tools).and_then(|()| sink.push("\n")).is_err()
    {
        return Some(text);
    }
    let read = sink.strings(looked_at);
    if read == Err(Stop::Broken) && looked_at.len() == raw.len() {
        return None;
    }
    let start = tools.map_or(0, |tools| tools.len() + 1);
    (text.len() > start).then_some(text)
}
