//! Where the facts about a request come from: rendering and tokenising.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use futures::FutureExt;
use kvgate_core::{BoxFuture, FactSource, Miss, Request, Tokens};
use kvgate_prompt::{Fields, Model, PromptError, State, Tokenizers};
use tokio::sync::Semaphore;

const TOKENIZE: Miss = Miss("tokenize");
const TEXT_EMPTY: Miss = Miss("text_empty");

/// What all rules share of it.
#[derive(Clone)]
pub struct Prompts {
    tokenizers: Tokenizers,
    /// Requests whose body is longer are tokenised on threads of their own.
    inline: usize,
    /// How many of these may run at once; the others wait, within their tier's deadline.
    pool: Arc<Semaphore>,
}

impl Prompts {
    /// `inline` in bytes; `threads` for the long ones.
    pub fn new(tokenizers: Tokenizers, inline: usize, threads: usize) -> Self {
        Self { tokenizers, inline, pool: Arc::new(Semaphore::new(threads.max(1))) }
    }

    /// The tokenizers.
    pub fn tokenizers(&self) -> &Tokenizers {
        &self.tokenizers
    }
}

/// The facts of one rule's requests.
pub struct RulePrompts {
    prompts: Prompts,
    /// Adapters by name, each with the model whose tokenizer it uses when it has none of its own.
    adapters: BTreeMap<String, String>,
}

impl RulePrompts {
    /// The source for a rule with these adapters.
    pub fn new(prompts: Prompts, adapters: BTreeMap<String, String>) -> Self {
        Self { prompts, adapters }
    }

    fn model(&self, name: &str) -> Result<Arc<Model>, Miss> {
        let mut state = self.prompts.tokenizers.get(name);
        if let (State::Missing(_), Some(base)) = (&state, self.adapters.get(name)) {
            state = self.prompts.tokenizers.get(base);
        }
        match state {
            State::Ready(model) => Ok(model),
            State::Loading | State::Missing(_) | State::Failed(_) => Err(TOKENIZE),
        }
    }
}

impl FactSource for RulePrompts {
    fn text<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Arc<str>, Miss>> {
        async move {
            let fields = Fields::read(&request.body).ok_or(TEXT_EMPTY)?;
            let text = kvgate_prompt::plain_text(&request.path, &fields);
            text.filter(|t| !t.is_empty()).map(Arc::from).ok_or(TEXT_EMPTY)
        }
        .boxed()
    }

    fn tokens<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Arc<Tokens>, Miss>> {
        async move {
            let name = request.model.as_deref().ok_or(TOKENIZE)?;
            let model = self.model(name);
            if request.body.len() <= self.prompts.inline {
                return tokenise(model, &request.path, &request.body);
            }
            let permit = self.prompts.pool.clone().acquire_owned().await.map_err(|_| TOKENIZE)?;
            let (path, body) = (request.path.clone(), request.body.clone());
            let task = tokio::task::spawn_blocking(move || {
                let tokens = tokenise(model, &path, &body);
                drop(permit);
                tokens
            });
            task.await.unwrap_or(Err(TOKENIZE))
        }
        .boxed()
    }
}

/// As [`tokens`]; a panic of the tokenizer is a miss like any other of its failures.
fn tokenise(model: Result<Arc<Model>, Miss>, path: &str, body: &[u8]) -> Result<Arc<Tokens>, Miss> {
    catch_unwind(AssertUnwindSafe(|| tokens(model, path, body))).unwrap_or_else(|_| {
        tracing::error!(path, "the tokenizer or the chat template panicked");
        Err(TOKENIZE)
    })
}

/// A request without a prompt is told from one whose model is unknown, whichever is true first.
fn tokens(model: Result<Arc<Model>, Miss>, path: &str, body: &[u8]) -> Result<Arc<Tokens>, Miss> {
    let fields = Fields::read(body).ok_or(TEXT_EMPTY)?;
    let model = match model {
        Ok(model) => model,
        Err(miss) => return Err(if has_prompt(path, &fields) { miss } else { TEXT_EMPTY }),
    };
    match kvgate_prompt::prompt(&model, path, &fields) {
        Ok(prompt) => {
            let sequences = prompt.sequences.into_iter().map(|s| s.tokens).collect();
            Ok(Arc::new(Tokens { sequences }))
        }
        Err(error) => {
            tracing::debug!(%error, "no tokens");
            Err(match error {
                PromptError::Text(_) => TEXT_EMPTY,
                PromptError::Tokenize(_) => TOKENIZE,
            })
        }
    }
}

fn has_prompt(path: &str, fields: &Fields<'_>) -> bool {
    match path {
        "/v1/chat/completions" => fields.messages.is_some(),
        "/v1/completions" => fields.prompt.is_some(),
        _ => false,
    }
}
