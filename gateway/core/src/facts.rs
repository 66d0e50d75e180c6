//! What is known of a request. Each fact is computed when a tier first asks for it, and then never again.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::future::Future;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::FutureExt;
use http::{HeaderMap, Method};

use crate::BoxFuture;
use crate::tier::Miss;

/// A request, whole, as the client sent it.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// `x-request-id`: the client's, else ours.
    pub id: String,
    /// The method.
    pub method: Method,
    /// The path, without its query.
    pub path: String,
    /// The query as written, without its question mark; `None` if there is none.
    pub query: Option<String>,
    /// The headers.
    pub headers: HeaderMap,
    /// Who asks.
    pub client: Option<IpAddr>,
    /// The body, untouched.
    pub body: Bytes,
    /// The model asked for: the header `X-Model`, else the body's `model`. Never inferred from the rule.
    pub model: Option<Arc<str>>,
    /// The body's `user_id`, else its `user`.
    pub user: Option<Arc<str>>,
    /// The body's `cache_salt`: what is cached under one salt serves no other.
    pub cache_salt: Option<Arc<str>>,
    /// The adapter that the body names beside its model: its `lora_path`, else its `lora_adapter`.
    pub adapter: Option<Arc<str>>,
    /// The body's `messages`, as written: a slice of the body, as the next two are.
    pub messages: Option<Bytes>,
    /// The body's `prompt`, as written.
    pub prompt: Option<Bytes>,
    /// The body's `tools`, as written; absent where there are none.
    pub tools: Option<Bytes>,
    /// Whether the body is a JSON object, as every OpenAI request is.
    pub is_json: bool,
}

impl Request {
    /// A header's value, if it is there and readable.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// A prompt as the engine will see it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tokens {
    /// The token ids; several sequences where one request holds several prompts.
    pub sequences: Vec<Arc<[u32]>>,
}

impl Tokens {
    /// Tokens of all sequences.
    pub fn len(&self) -> usize {
        self.sequences.iter().map(|s| s.len()).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How a prompt begins: the part that other requests are likely to begin with too. It stays the same over the turns of
/// a conversation. Each text ends after [`Opening::LONGEST`] bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Opening {
    /// The system messages that a chat begins with; empty where there are none, and where the request is no chat.
    pub system: String,
    /// The message after these; the prompt, where the request is no chat.
    pub first: String,
}

impl Opening {
    /// Bytes of each text.
    pub const LONGEST: usize = 16 * 1024;

    /// The opening of a prompt of which no more is known than its text.
    pub fn of_text(text: &str) -> Self {
        let (first, _) = text.split_at(text.floor_char_boundary(Self::LONGEST));
        Self { system: String::new(), first: first.to_owned() }
    }
}

/// Where facts come from. The gateway renders and tokenises; tests hand out what they like.
pub trait FactSource: Send + Sync {
    /// The prompt's text, without templates: no more than [`Facts::LONGEST_TEXT`] is needed. Had without waiting, so
    /// that it can be asked for once an endpoint answers; else what is asked then is not told.
    fn text<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Arc<str>, Miss>>;

    /// How the prompt begins. Here: with its text.
    fn opening<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Arc<Opening>, Miss>> {
        async { self.text(request).await.map(|text| Arc::new(Opening::of_text(&text))) }.boxed()
    }

    /// The prompt's token ids, as the engine will compute them.
    fn tokens<'a>(&'a self, request: &'a Request) -> BoxFuture<'a, Result<Arc<Tokens>, Miss>>;
}

type Known = Result<Arc<dyn Any + Send + Sync>, Miss>;

/// The facts of one request, kept over its retries and legs; failures are remembered like answers.
pub struct Facts {
    /// The request itself.
    pub request: Arc<Request>,
    source: Arc<dyn FactSource>,
    memo: Mutex<HashMap<(TypeId, &'static str), Known>>,
}

impl Facts {
    /// Bytes of a prompt's text that are looked at: about a quarter of a million tokens.
    pub const LONGEST_TEXT: usize = 1 << 20;

    /// The facts of `request`, to be had from `source`.
    pub fn new(request: Arc<Request>, source: Arc<dyn FactSource>) -> Self {
        Self { request, source, memo: Mutex::default() }
    }

    /// The prompt's text.
    ///
    /// # Errors
    /// The miss that says why there is none.
    pub async fn text(&self) -> Result<Arc<str>, Miss> {
        let text = self.memo("text", async { self.source.text(&self.request).await }).await?;
        Ok(Arc::clone(&text))
    }

    /// The prompt's text, as [`Facts::known`].
    pub fn known_text(&self) -> Option<Result<Arc<str>, Miss>> {
        self.known::<Arc<str>>("text").map(|known| known.map(|text| Arc::<str>::clone(&text)))
    }

    /// How the prompt begins.
    ///
    /// # Errors
    /// The miss that says why there is none.
    pub async fn opening(&self) -> Result<Arc<Opening>, Miss> {
        let opening = self.memo("opening", async { self.source.opening(&self.request).await }).await?;
        Ok(Arc::clone(&opening))
    }

    /// The prompt's token ids.
    ///
    /// # Errors
    /// The miss that says why there are none.
    pub async fn tokens(&self) -> Result<Arc<Tokens>, Miss> {
        let tokens = self.memo("tokens", async { self.source.tokens(&self.request).await }).await?;
        Ok(Arc::clone(&tokens))
    }

    /// A fact of a tier's own, computed by `init` the first time. Two tiers that use one type and key share it.
    ///
    /// # Errors
    /// The miss that `init` gave, the first time and ever after.
    pub async fn memo<T: Any + Send + Sync>(
        &self,
        key: &'static str,
        init: impl Future<Output = Result<T, Miss>>,
    ) -> Result<Arc<T>, Miss> {
        if let Some(known) = self.known(key) {
            return known;
        }
        let fact = init.await.map(Arc::new);
        let mut memo = self.memo.lock().unwrap_or_else(PoisonError::into_inner);
        memo.insert((TypeId::of::<T>(), key), fact.clone().map(|f| f as Arc<dyn Any + Send + Sync>));
        fact
    }

    /// A fact that was computed before, or why it could not be; `None` if nobody asked yet. For `decide`,
    /// which may not wait.
    pub fn known<T: Any + Send + Sync>(&self, key: &'static str) -> Option<Result<Arc<T>, Miss>> {
        let memo = self.memo.lock().unwrap_or_else(PoisonError::into_inner);
        match memo.get(&(TypeId::of::<T>(), key))? {
            Ok(fact) => fact.clone().downcast().ok().map(Ok),
            Err(miss) => Some(Err(*miss)),
        }
    }
}

impl std::fmt::Debug for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Facts").field("request", &self.request.id).finish_non_exhaustive()
    }
}
