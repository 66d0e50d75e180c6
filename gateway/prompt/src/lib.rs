//! From an OpenAI request body to the token ids the engine will see. Pure: no runtime, no network.
//!
//! One request goes through four steps, each usable alone: [`Fields::read`] finds the few members of the body that
//! matter, [`prepare`] does to them what the engine does before it tokenises, [`template`] renders a chat as the
//! engine's Python stack would, and [`Model::encode`] turns text into ids, reusing what it knows of earlier turns.
//! [`prompt`] is all of them. Everything here may take milliseconds for a large prompt and never waits, but for
//! [`prompt_shared`], which waits for what is being tokenised already.

mod error;
pub mod json;
pub mod prepare;
mod request;
pub mod template;
mod tokenizer;

pub use error::{PromptError, TextError, TokenizeError};
pub use prepare::{Opening, opening, plain_text, prompt, prompt_shared};
pub use request::Fields;
pub use tokenizer::{CacheStats, LoadError, Model, Slug, SlugError, State, Tokenizers, TokenizersConfig};

use std::sync::Arc;

/// What an engine will compute on for one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// One sequence per prompt: one for a chat, one or more for completions. Never empty.
    pub sequences: Vec<Sequence>,
    /// `cache_salt`: requests with different salts share no KV cache (vLLM).
    pub cache_salt: Option<String>,
}

/// One prompt of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// The text that was tokenised; `None` if the client sent token ids.
    pub text: Option<String>,
    /// The ids, special tokens included, after truncation. Never empty.
    pub tokens: Arc<[u32]>,
}
