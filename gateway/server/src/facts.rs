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
                return tokenise(model, &request.path, &request.body).await;
            }
            let permit = self.prompts.pool.clone().acquire_owned().await.map_err(|_| TOKENIZE)?;
            let (path, body) = (request.path.clone(), request.body.clone());
            let task = tokio::task::spawn_blocking(move || {
                let tokens = futures::executor::block_on(tokenise(model, &path, &body));
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

impl NoPrompt {
    /// A panic of the tokenizer is a miss like any other of its failures.
    fn panicked(path: &str) -> Self {
        let why = "the tokenizer or the chat template panicked";
        tracing::error!(path, "{why}");
        Self { miss: TOKENIZE, why: why.into() }
    }
}

impl From<PromptError> for NoPrompt {
    fn from(error: PromptError) -> Self {
        let miss = match error {
            PromptError::Text(_) => TEXT_EMPTY,
            PromptError::Tokenize(_) => TOKENIZE,
        };
        Self { miss, why: error.to_string().into() }
    }
}

/// The prompt of a request, without waiting for what others tokenise.
fn prompt(model: Result<Arc<Model>, NoPrompt>, path: &str, body: &[u8]) -> Result<Prompt, NoPrompt> {
    let found = catch_unwind(AssertUnwindSafe(|| {
        let (model, fields) = find(model, path, body)?;
        kvgate_prompt::prompt(&model, path, &fields).map_err(NoPrompt::from)
    }));
    found.unwrap_or_else(|_| Err(NoPrompt::panicked(path)))
}

/// A request without a prompt is told from one whose model is unknown, whichever is true first.
fn find<'b>(
    model: Result<Arc<Model>, NoPrompt>,
    path: &str,
    body: &'b [u8],
) -> Result<(Arc<Model>, Fields<'b>), NoPrompt> {
    let empty = |why: &str| NoPrompt { miss: TEXT_EMPTY, why: why.into() };
    let fields = Fields::read(body).ok_or_else(|| empty("the body is not a JSON object"))?;
    match model {
        Ok(model) => Ok((model, fields)),
        Err(unknown) if has_prompt(path, &fields) => Err(unknown),
        Err(_) => Err(empty("no prompt in the request, or in a place that is not known")),
    }
}

async fn tokenise(model: Result<Arc<Model>, NoPrompt>, path: &str, body: &[u8]) -> Result<Arc<Tokens>, Miss> {
    let found = AssertUnwindSafe(async {
        let (model, fields) = find(model, path, body)?;
        kvgate_prompt::prompt_shared(&model, path, &fields).await.map_err(NoPrompt::from)
    });
    match found.catch_unwind().await.unwrap_or_else(|_| Err(NoPrompt::panicked(path))) {
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

    /// As the threads of the server do: each turn is tokenised by one of them, however many ask at a time.
    #[test]
    fn a_herd_tokenises_its_prompt_once() {
        const HERD: usize = 16;
        let tokenizers = Tokenizers::new(kvgate_tests::tokenizers(), TokenizersConfig::default());
        let State::Ready(model) = tokenizers.load("tiny-words") else { panic!("no model") };
        let before = model.cache_stats();
        // the second half is served by threads beside
        let sources = [1 << 20, 0].map(|inline| {
            let prompts = Prompts::new(tokenizers.clone(), inline, HERD);
            Arc::new(RulePrompts { prompts, adapters: BTreeMap::new() })
        });
        let prompt = "one two three four five six seven eight nine ten ".repeat(4000);
        let body = Bytes::from(json!({"model": "tiny-words", "prompt": prompt}).to_string());
        let request = Request {
            path: "/v1/completions".into(),
            model: Some("tiny-words".into()),
            body,
            ..Request::default()
        };
        let start = std::sync::Barrier::new(HERD);
        std::thread::scope(|scope| {
            for number in 0..HERD {
                let (source, request, start) = (sources[number % 2].clone(), &request, &start);
                scope.spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                    start.wait();
                    let tokens = runtime.block_on(source.tokens(request)).unwrap();
                    assert!(tokens.sequences[0].len() >= 40_000);
                });
            }
        });
        let after = model.cache_stats();
        assert_eq!((after.misses - before.misses, after.hits - before.hits), (1, HERD as u64 - 1));
    }
}
