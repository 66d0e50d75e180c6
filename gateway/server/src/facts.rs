//! Where the facts about a request come from: rendering and tokenising.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use kvgate_core::{BoxFuture, FactSource, Facts, Miss, Opening, Request, TierConfig, Tokens};
use kvgate_prompt::{Fields, Model, Prompt, PromptError, State, Tokenizers};
use kvgate_tiers::kv_exact;
use tokio::sync::Semaphore;

use crate::config::RuleConfig;

/// So many bytes of a request are read where it is served: well under a millisecond.
const READ_INLINE: usize = 512 * 1024;
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
    /// The source for this rule; `tier` is its kv-exact tier, which names its adapters.
    pub fn new(prompts: Prompts, rule: &RuleConfig, tier: Option<&TierConfig>) -> Self {
        Self { prompts, adapters: adapters(rule, tier) }
    }

    /// The prompt of a request to the model `name`. Loads the model's tokenizer in the caller's thread if need be.
    ///
    /// # Errors
    /// Why there is none.
    pub fn prompt(&self, name: &str, path: &str, body: &[u8]) -> Result<Prompt, NoPrompt> {
        prompt(self.model(name, Tokenizers::load), path, body)
    }

    fn model(&self, name: &str, look: fn(&Tokenizers, &str) -> State) -> Result<Arc<Model>, NoPrompt> {
        let mut state = look(&self.prompts.tokenizers, name);
        if let (State::Missing(_), Some(base)) = (&state, self.adapters.get(name)) {
            state = look(&self.prompts.tokenizers, base);
        }
        let why = match state {
            State::Ready(model) => return Ok(model),
            State::Loading => "the tokenizer is being loaded".into(),
            State::Missing(why) | State::Failed(why) => why,
        };
        Err(NoPrompt { miss: TOKENIZE, why })
    }
}

/// Adapters that share the tokenizer of the one model of the rule that is none.
fn adapters(rule: &RuleConfig, tier: Option<&TierConfig>) -> BTreeMap<String, String> {
    let (Some(Ok((_, lora))), Some(base)) = (tier.map(kv_exact::explained), rule.base_model()) else {
        return BTreeMap::new();
    };
    lora.into_keys().map(|adapter| (adapter, base.to_owned())).collect()
}

impl FactSource for RulePrompts {
    fn text<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Arc<str>, Miss>> {
        let raw = [&request.tools, &request.messages, &request.prompt];
        let [tools, messages, prompt] = raw.map(|raw| beginning(raw.as_ref()?));
        let text = kvgate_prompt::plain_text(&request.path, tools, messages, prompt, Facts::LONGEST_TEXT);
        futures::future::ready(text.map(Arc::from).ok_or(TEXT_EMPTY)).boxed()
    }

    fn opening<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Arc<Opening>, Miss>> {
        let request = Parts::of(request);
        async move {
            let opening = beside(request.len(), move || {
                let [_, messages, prompt] = request.raw();
                kvgate_prompt::opening(&request.path, messages, prompt, Opening::LONGEST)
            });
            let opening = opening.await.flatten();
            let opening = opening.map(|o| Arc::new(Opening { system: o.system, first: o.first }));
            opening.ok_or(TEXT_EMPTY)
        }
        .boxed()
    }

    fn tokens<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Arc<Tokens>, Miss>> {
        async move {
            let name = request.model.as_deref().ok_or(TOKENIZE)?;
            let model = self.model(name, Tokenizers::get);
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

/// As much of a part of a body as its text is read of, and a little. The body was read as UTF-8 before.
fn beginning(raw: &Bytes) -> Option<&str> {
    let beginning = raw.get(..2 * Facts::LONGEST_TEXT + 4).unwrap_or(raw);
    beginning.utf8_chunks().next().map(|chunk| chunk.valid())
}

/// The parts of a request that hold its prompt, as written.
struct Parts {
    path: String,
    raw: [Option<Bytes>; 3],
}

impl Parts {
    fn of(request: &Request) -> Self {
        let raw = [&request.tools, &request.messages, &request.prompt].map(Clone::clone);
        Self { path: request.path.clone(), raw }
    }

    fn len(&self) -> usize {
        self.raw.iter().flatten().map(Bytes::len).sum()
    }

    /// Tools, messages, prompt.
    fn raw(&self) -> [Option<&str>; 3] {
        self.raw.each_ref().map(|part| part.as_deref().and_then(|raw| std::str::from_utf8(raw).ok()))
    }
}

/// Does work on so many bytes: where the request is served while they are few, else beside the threads that serve.
/// `None` if it panicked there.
pub async fn beside<T: Send + 'static>(len: usize, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    if len <= READ_INLINE {
        return Some(work());
    }
    tokio::task::spawn_blocking(work).await.ok()
}

/// Why a request has no prompt.
#[derive(Debug)]
pub struct NoPrompt {
    /// As it is counted.
    pub miss: Miss,
    /// In words.
    pub why: Arc<str>,
}

/// As [`find`]; a panic of the tokenizer is a miss like any other of its failures.
fn prompt(model: Result<Arc<Model>, NoPrompt>, path: &str, body: &[u8]) -> Result<Prompt, NoPrompt> {
    catch_unwind(AssertUnwindSafe(|| find(model, path, body))).unwrap_or_else(|_| {
        let why = "the tokenizer or the chat template panicked";
        tracing::error!(path, "{why}");
        Err(NoPrompt { miss: TOKENIZE, why: why.into() })
    })
}

/// A request without a prompt is told from one whose model is unknown, whichever is true first.
fn find(model: Result<Arc<Model>, NoPrompt>, path: &str, body: &[u8]) -> Result<Prompt, NoPrompt> {
    let empty = |why: &str| NoPrompt { miss: TEXT_EMPTY, why: why.into() };
    let fields = Fields::read(body).ok_or_else(|| empty("the body is not a JSON object"))?;
    let model = match model {
        Ok(model) => model,
        Err(unknown) if has_prompt(path, &fields) => return Err(unknown),
        Err(_) => return Err(empty("no prompt in the request, or in a place that is not known")),
    };
    kvgate_prompt::prompt(&model, path, &fields).map_err(|error| NoPrompt {
        miss: match error {
            PromptError::Text(_) => TEXT_EMPTY,
            PromptError::Tokenize(_) => TOKENIZE,
        },
        why: error.to_string().into(),
    })
}

fn tokenise(model: Result<Arc<Model>, NoPrompt>, path: &str, body: &[u8]) -> Result<Arc<Tokens>, Miss> {
    match prompt(model, path, body) {
        Ok(prompt) => {
            let sequences = prompt.sequences.into_iter().map(|s| s.tokens).collect();
            Ok(Arc::new(Tokens { sequences }))
        }
        Err(none) => {
            tracing::debug!(why = &*none.why, "no tokens");
            Err(none.miss)
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

#[cfg(test)]
mod tests {
    use kvgate_prompt::TokenizersConfig;
    use serde_json::json;

    use super::*;

    /// Who asks once an endpoint answers cannot wait, however long the prompt.
    #[test]
    fn the_text_is_had_at_once_and_no_more_than_is_looked_at() {
        let tokenizers = Tokenizers::new("none", TokenizersConfig::default());
        let source: Arc<dyn FactSource> =
            Arc::new(RulePrompts { prompts: Prompts::new(tokenizers, 0, 1), adapters: BTreeMap::new() });
        // a character takes three bytes
        const LONGEST: usize = Facts::LONGEST_TEXT / 3 * 3;
        for (characters, bytes) in [(10, 31), (600 << 10, LONGEST), (4 << 20, LONGEST)] {
            let prompt = "\u{65e5}".repeat(characters);
            let request = Request {
                path: "/v1/completions".into(),
                prompt: Some(json!(prompt).to_string().into()),
                ..Request::default()
            };
            let text = Facts::new(Arc::new(request), source.clone()).text().now_or_never();
            let text = text.unwrap().unwrap();
            assert!(prompt.starts_with(text.trim_end()));
            assert_eq!(text.len(), bytes);
        }
    }
}
