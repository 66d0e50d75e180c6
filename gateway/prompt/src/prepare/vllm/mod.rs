//! What vLLM does to a request before it tokenises, as its 0.32 does it.
//!
//! Measured on live engines, and read in vLLM's `entrypoints/openai` (request schemas), `entrypoints/chat_utils.py`
//! (messages) and `renderers` (templates, truncation). Where an engine's own settings decide (`--chat-template`,
//! `--trust-request-chat-template`, `--max-model-len`), its defaults are assumed.

mod chat;
mod message;
mod options;
mod tools;

use std::sync::Arc;

use crate::json::{Items, Json, JsonError};
use crate::prepare::Api;
use crate::{Fields, Model, Prompt, PromptError, Sequence, TextError, TokenizeError};
use options::Truncation;

/// The prompt of a request to vLLM; pends only where it may `share` what others tokenise.
pub(super) async fn prompt(
    model: &Model,
    path: &str,
    fields: &Fields<'_>,
    share: bool,
) -> Result<Prompt, PromptError> {
    let sequences = match Api::of(path) {
        Api::Chat => vec![chat(model, fields, share).await?],
        Api::Completions => completions(model, fields, share).await?,
        Api::Other => return Err(TextError("no preparation is known for this path").into()),
    };
    if sequences.is_empty() || sequences.iter().any(|s| s.tokens.is_empty()) {
        return Err(TokenizeError::from("refused by the engine: an empty prompt").into());
    }
    Ok(Prompt { sequences, cache_salt: fields.cache_salt.as_deref().map(str::to_owned) })
}

async fn chat(model: &Model, fields: &Fields<'_>, share: bool) -> Result<Sequence, PromptError> {
    let messages = fields.messages.ok_or(TextError("no messages"))?;
    options::check(fields)?;
    let text = chat::render(model, fields, messages)?;
    let special = options::flag(fields, "add_special_tokens", false)?;
    let tokens = encode(model, &text, special, Truncation::read(fields)?, share).await?;
    Ok(Sequence { text: Some(text), tokens })
}

async fn completions(model: &Model, fields: &Fields<'_>, share: bool) -> Result<Vec<Sequence>, PromptError> {
    let raw = fields.prompt.ok_or(TextError("no prompt"))?;
    options::check(fields)?;
    if options::given(fields, "suffix") || options::given(fields, "prompt_embeds") {
        return Err(TokenizeError::from("refused by the engine: suffix or prompt_embeds").into());
    }
    let special = options::flag(fields, "add_special_tokens", true)?;
    let truncation = Truncation::read(fields)?;
    let text = async |raw: &str| -> Result<Sequence, PromptError> {
        let Ok(Json::Str(text)) = Json::parse(raw) else {
            return Err(
                TokenizeError::from("refused by the engine: a prompt that is neither text nor ids").into()
            );
        };
        let tokens = encode(model, &text, special, truncation, share).await?;
        Ok(Sequence { text: Some(text.into_owned()), tokens })
    };
    let ids = |raw: &str| -> Result<Sequence, PromptError> {
        let tokens = ids(model, raw)?;
        Ok(Sequence { text: None, tokens: truncation.cut(&tokens).into() })
    };
    if !raw.starts_with('[') {
        return match raw {
            "null" | "\"\"" => Err(TextError("an empty prompt").into()),
            raw => Ok(vec![text(raw).await?]),
        };
    }
    match Items::new(raw).next() {
        Some(Ok(first)) if first.starts_with(|c: char| c == '-' || c.is_ascii_digit()) => Ok(vec![ids(raw)?]),
        _ => {
            let mut sequences = Vec::new();
            for item in Items::new(raw) {
                sequences.push(match item {
                    Ok(item) if item.starts_with('[') => ids(item)?,
                    Ok(item) => text(item).await?,
                    Err(e) => return Err(TokenizeError::from(format!("prompt: {e}")).into()),
                });
            }
            Ok(sequences)
        }
    }
}

/// Token ids as the client wrote them; whole floats are integers to the engine.
fn ids(model: &Model, raw: &str) -> Result<Vec<u32>, TokenizeError> {
    let id = |item: &str| -> Option<u32> {
        let whole = || {
            item.parse().ok().filter(|f: &f64| f.fract() == 0.0).and_then(|f| format!("{f:.0}").parse().ok())
        };
        item.parse().ok().or_else(whole).filter(|id| *id < model.vocabulary())
    };
    let read = |item: Result<&str, JsonError>| item.ok().and_then(id);
    Items::new(raw)
        .map(|item| read(item).ok_or("refused by the engine: an id outside the vocabulary".into()))
        .collect()
}

/// Tokenises and truncates. Without an explicit side the tokenizer itself truncates, before it adds special tokens: a
/// begin-of-text token then stays and one more of the text goes (`TokenizeParams.get_encode_kwargs`).
async fn encode(
    model: &Model,
    text: &str,
    special: bool,
    truncation: Truncation,
    share: bool,
) -> Result<Arc<[u32]>, TokenizeError> {
    let tokens =
        if share { model.encode_shared(text, special).await? } else { model.encode(text, special)? };
    let Some(keep) = truncation.keep.filter(|keep| *keep < tokens.len()) else { return Ok(tokens) };
    if truncation.explicit_side || !special {
        return Ok(truncation.cut(&tokens).into());
    }
    let (before, after) = model.frame();
    let room = keep.checked_sub(before.len() + after.len());
    let room = room.ok_or("refused by the engine: fewer tokens asked for than special tokens")?;
    let inner = tokens.get(before.len()..tokens.len() - after.len()).unwrap_or_default();
    let tail = inner.get(inner.len().saturating_sub(room)..).unwrap_or_default();
    Ok([before, tail, after].concat().into())
}
