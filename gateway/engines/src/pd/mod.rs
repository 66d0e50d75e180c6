//! The legs of a request that is split: one engine prefills the prompt, another one decodes.
//!
//! Sans-IO: a [`PdFlow`] says what each leg sends and what the prefill's answer means. Who is asked, how long, and how
//! often is the caller's. Bodies are edited by splicing their top-level members; every other byte stays.

mod splice;
mod vllm;

use std::fmt::Debug;

use bytes::Bytes;

pub use vllm::CONNECTORS as VLLM;

/// A way in which engines of one kind hand over KV cache: the row it is known by in a rule.
#[derive(Debug, Clone, Copy)]
pub struct Connector {
    /// Its name in rules.
    pub name: &'static str,
    /// What is worth knowing of it, in a sentence.
    pub doc: &'static str,
    /// How it is spoken.
    pub flow: &'static dyn PdFlow,
}

/// Names tell connectors of one kind of engine apart.
impl PartialEq for Connector {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Connector {}

/// How the prefill leg ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefillAnswer<'a> {
    /// With a whole answer.
    Answered {
        /// Its status.
        status: u16,
        /// Its body, without content encoding. Empty where it was longer than the caller keeps: another engine's would be as long.
        body: &'a [u8],
    },
    /// It took too long, broke off, or could not be asked.
    Failed,
}

/// What follows from the prefill's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// The decode leg starts, with this body, by which its engine finds the prefilled blocks.
    Decode(Bytes),
    /// The decode engine prefills by itself: [`PdFlow::alone`].
    Alone,
    /// The client gets the prefill's answer: the request itself is refused, or there is nothing left to decode.
    Relay,
    /// Another prefill engine may be asked. Where none is, the decode engine prefills: [`PdFlow::alone`].
    RetryPrefill,
}

/// How one connector splits requests. Stateless: what it needs to know of a request is in its body and answer.
pub trait PdFlow: Debug + Send + Sync {
    /// The body of the prefill leg of a POST to `path` (without query). `None`: this request cannot be split, and one
    /// engine serves it whole, as it came: the path does not generate, the body is no JSON object in UTF-8 (an engine may read it
    /// nevertheless), or it asks for what the connector cannot hand over.
    fn start(&self, path: &str, body: &Bytes) -> Option<Bytes>;

    /// Judges the prefill's answer to a request that [`PdFlow::start`] planned. Never fails: what cannot be used is
    /// as if it were not there.
    fn next(&self, body: &Bytes, answer: PrefillAnswer<'_>) -> Next;

    /// The body of a decode leg without a prefill before it: the engine prefills by itself.
    fn alone(&self, body: &Bytes) -> Bytes;

    /// The `X-Request-Id` of both legs, where the connector reads the engines' addresses (`host:port` of their KV
    /// transfer) from it; `None`: any id will do, the same one on both legs. `unique` makes it so. A decode leg without
    /// a prefill before it must not carry such an id: its engine would wait for blocks that nobody sends.
    fn request_id(&self, prefill: &str, decode: &str, unique: u128) -> Option<String>;
}

/// Whether answers to this path are generated text: what can be split.
pub fn generates(path: &str) -> bool {
    matches!(path, "/v1/chat/completions" | "/v1/completions")
}
