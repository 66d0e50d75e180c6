use std::borrow::Cow;

use thiserror::Error;

/// The request holds no prompt text that we know how to find (miss `text_empty`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("no prompt text in the request: {0}")]
pub struct TextError(pub &'static str);

/// The prompt could not be turned into the engine's ids (miss `tokenize`), or the engine would refuse the request.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct TokenizeError(pub Cow<'static, str>);

impl From<&'static str> for TokenizeError {
    fn from(reason: &'static str) -> Self {
        Self(Cow::Borrowed(reason))
    }
}

impl From<String> for TokenizeError {
    fn from(reason: String) -> Self {
        Self(Cow::Owned(reason))
    }
}

/// Why a request has no token ids.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PromptError {
    /// No prompt text.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Text, but no ids.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
}

impl PromptError {
    /// The reason a tier counts: `text_empty` or `tokenize`.
    pub fn miss(&self) -> &'static str {
        match self {
            Self::Text(_) => "text_empty",
            Self::Tokenize(_) => "tokenize",
        }
    }
}
