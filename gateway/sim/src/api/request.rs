//! What a completions or chat request asks for.

use super::ApiState;
use super::error::ApiError;
use crate::config::Adapter;
use crate::scheduler::Request;
use axum::http::{HeaderMap, header};
use kvgate_kv::hash::{Lora, Namespace};
use kvgate_prompt::{Fields, PromptError};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Which of the two generating endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Completions,
    Chat,
}

impl Kind {
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    n: Option<usize>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_token_ids: Option<bool>,
    cache_salt: Option<Value>,
    session_id: Option<String>,
    kv_transfer_params: Option<Map<String, Value>>,
}

/// Most choices per prompt.
const MAX_N: usize = 16;

/// A request that can be served.
pub(crate) struct Asked {
    pub kind: Kind,
    /// As the request names it.
    pub model: String,
    pub stream: bool,
    pub include_usage: bool,
    pub return_token_ids: bool,
    /// The prompts, each to be answered `n` times.
    pub prompts: Vec<Arc<[u32]>>,
    pub n: usize,
    pub max_tokens: Vec<usize>,
    /// `kv_transfer_params`; empty where there are none.
    pub transfer: Map<String, Value>,
    /// Whether a prefill engine handed the prompt's blocks over.
    pub received: bool,
    namespace: Namespace,
    lora_id: Option<u32>,
    session: Option<String>,
}

impl Asked {
    /// Reads and checks a request as vLLM does, and tokenises its prompts.
    pub fn read(state: &ApiState, kind: Kind, body: &[u8]) -> Result<Self, ApiError> {
        let body_text = serde_json::from_slice::<Value>(body).map_err(|e| ApiError::not_json(e.column()))?;
        let asked: Body = serde_json::from_value(body_text)
            .map_err(|error| ApiError::malformed(format!("1 validation error:\n  {error}")))?;
        let config = &state.config;
        let model = asked.model.or_else(|| config.models.first().cloned()).unwrap_or_default();
        let lora = config.lora.iter().zip(1u32..).find(|(adapter, _)| adapter.name == model);
        if lora.is_none() && !config.models.contains(&model) {
            return Err(ApiError::no_model(&model, &config.models));
        }
        let cache_salt = match asked.cache_salt {
            None | Some(Value::Null) => None,
            Some(Value::String(salt)) if !salt.is_empty() => Some(salt),
            Some(_) => return Err(ApiError::salt()),
        };
        let prompts = prompts(state, kind, body)?;
        let context = config.context();
        if let Some(long) = prompts.iter().find(|prompt| prompt.len() >= context) {
            return Err(ApiError::too_long(context, long.len()));
        }
        let wanted = asked.max_completion_tokens.or(asked.max_tokens).unwrap_or(config.default_max_tokens);
        if wanted == 0 {
            return Err(ApiError::invalid(Some("max_tokens"), "max_tokens must be at least 1, got 0."));
        }
        let n = asked.n.unwrap_or(1);
        if !(1..=MAX_N).contains(&n) {
            return Err(ApiError::invalid(
                Some("n"),
                format!("n must be at least 1 and at most {MAX_N}, got {n}."),
            ));
        }
        let adapter = |adapter: &Adapter| Lora { name: adapter.name.clone(), path: adapter.path.clone() };
        Ok(Self {
            kind,
            model,
            stream: asked.stream.unwrap_or(false),
            include_usage: asked.stream_options.unwrap_or_default().include_usage,
            return_token_ids: asked.return_token_ids.unwrap_or(false),
            max_tokens: prompts.iter().map(|prompt| wanted.min(context - prompt.len())).collect(),
            prompts,
            n,
            transfer: asked.kv_transfer_params.unwrap_or_default(),
            received: false,
            namespace: Namespace { lora: lora.map(|(found, _)| adapter(found)), cache_salt },
            lora_id: lora.map(|(_, id)| id),
            session: asked.session_id,
        })
    }

    /// Choices of the answer.
    pub fn choices(&self) -> usize {
        self.prompts.len() * self.n
    }

    /// Tokens of all choices.
    pub fn all_tokens(&self) -> usize {
        self.max_tokens.iter().sum::<usize>() * self.n
    }

    /// Tokens of all prompts.
    pub fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.len()).sum()
    }

    /// What the blocks of all prompts hold, tokens and namespace: one prompt's are not those of another.
    pub fn content(&self) -> u64 {
        let mut content = Xxh3::new();
        for prompt in &self.prompts {
            content.update(&(prompt.len() as u64).to_le_bytes());
            prompt.iter().for_each(|token| content.update(&token.to_le_bytes()));
        }
        content.update(format!("{:?}", self.namespace).as_bytes());
        content.digest()
    }

    /// The engine's request for a choice.
    pub fn request(&self, choice: usize) -> Request {
        let prompt = choice / self.n;
        Request {
            tokens: self.prompts.get(prompt).map(|tokens| tokens.to_vec()).unwrap_or_default(),
            max_tokens: self.max_tokens.get(prompt).copied().unwrap_or(1),
            namespace: self.namespace.clone(),
            lora_id: self.lora_id,
            session: self.session.clone(),
            received: self.received,
        }
    }
}

/// Whether the body claims to be JSON.
pub(crate) fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

/// The token ids that the engine computes on, made by the crate that the gateway uses.
pub(crate) fn prompts(state: &ApiState, kind: Kind, body: &[u8]) -> Result<Vec<Arc<[u32]>>, ApiError> {
    let fields = Fields::read(body).ok_or_else(ApiError::no_prompt)?;
    let prompt = kvgate_prompt::prompt(&state.model, kind.path(), &fields).map_err(|error| match error {
        PromptError::Text(_) => ApiError::no_prompt(),
        PromptError::Tokenize(error) => ApiError::invalid(None, error.to_string()),
    })?;
    let prompts: Vec<_> = prompt.sequences.into_iter().map(|sequence| sequence.tokens).collect();
    if prompts.iter().any(|prompt| prompt.is_empty()) {
        return Err(ApiError::no_prompt());
    }
    Ok(prompts)
}
