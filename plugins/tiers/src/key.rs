//! What the hash selectors know a request by: how its prompt begins, else its conversation, else its turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use futures::FutureExt;
use http::HeaderName;
use kvgate_core::schema::{Field, Kind};
use kvgate_core::{
    BoxFuture, BuildContext, BuildError, Completion, Dispatch, Facts, Miss, Opening, Request, Role, Routing,
};
use serde::Deserialize;
use xxhash_rust::xxh3::Xxh3Default;

/// Key: how much of a request is its prefix.
pub const LEVEL: Field = Field {
    key: "prefix_hash_level",
    kind: Kind::Int { min: 1, max: 3 },
    default: "1",
    doc: "What of a request besides its model, adapter, `cache_salt` and tools is its prefix, which one endpoint serves. \
          1: the system messages a chat begins with, else its first message or the prompt; where more requests of one \
          prefix are in flight than its endpoint may have, the next ones go by level 2. 2: the system messages and the \
          first message after them, so that each conversation is one. 3: who asks, too: the conversation's header, \
          else `user_id` or `user`.",
};

/// Key: how much of a text counts.
pub const BYTES: Field = Field {
    key: "prefix_bytes",
    kind: Kind::Int { min: 1, max: Opening::LONGEST as i64 },
    default: "512",
    doc: "How many bytes count of the system messages, and of the first message or prompt. Prompts that differ only \
          after that have one prefix.",
};

/// Key: the header that names a conversation.
pub const CONVERSATION: Field = Field {
    key: "conversation_header",
    kind: Kind::Text,
    default: "\"X-Conversation-Id\"",
    doc: "The header that names the conversation: what a request goes by whose prompt is not known. Those without go \
          in turn.",
};

/// The values of these keys.
#[derive(Debug, Clone, Deserialize)]
pub struct KeyConfig {
    prefix_hash_level: u8,
    prefix_bytes: usize,
    conversation_header: String,
}

/// What a request is known by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// The hash of its prefix.
    Prefix(u64),
    /// The hash of its conversation's name.
    Conversation(u64),
    /// Its number among those without either.
    Turn(u64),
}

impl Key {
    /// Its kind in a word, for the decision record.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Prefix(_) => "prefix",
            Self::Conversation(_) => "conversation",
            Self::Turn(_) => "turn",
        }
    }
}

/// The prefix of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    /// By the configured level.
    hash: u64,
    /// By level 2, where the level is 1 and that differs.
    finer: Option<u64>,
}

/// Slots of [`Crowd`].
const SLOTS: usize = 4096;

/// How many requests are in flight of each prefix. Prefixes that share a slot by chance count as one.
struct Crowd(Box<[AtomicU32]>);

impl Default for Crowd {
    fn default() -> Self {
        Self((0..SLOTS).map(|_| AtomicU32::new(0)).collect())
    }
}

impl Crowd {
    /// Of the requests of one leg: the ladders of a rule have one crowd between them.
    fn of(&self, hash: u64, role: Role) -> Option<&AtomicU32> {
        self.0.get((hash.wrapping_add(role as u64) % SLOTS as u64) as usize)
    }
}

/// Tells requests' keys, for the tier of one rule.
pub struct Keys {
    level: u8,
    bytes: usize,
    conversation: HeaderName,
    /// The tier: the prefix is kept with the request's facts under this name.
    tier: &'static str,
    crowd: Arc<Crowd>,
    /// For each role.
    turns: Arc<[AtomicU64; 3]>,
}

impl Keys {
    /// For the tier of this name.
    ///
    /// # Errors
    /// When `conversation_header` is not the name of a header.
    pub fn new(
        tier: &'static str,
        config: &KeyConfig,
        context: &BuildContext<'_>,
    ) -> Result<Self, BuildError> {
        let conversation = HeaderName::from_bytes(config.conversation_header.as_bytes()).map_err(|_| {
            BuildError { key: CONVERSATION.key.into(), message: "is not the name of a header".into() }
        })?;
        Ok(Self {
            level: config.prefix_hash_level,
            bytes: config.prefix_bytes,
            conversation,
            tier,
            // what is in flight counts by the keys it was counted under
            crowd: context.state(tier, &format!("{config:?}"), Crowd::default),
            turns: context.state(tier, "", Default::default),
        })
    }

    /// Reads how the prompt begins. A request without a prompt is no miss: there are other keys.
    pub fn prepare<'a>(&'a self, facts: &'a Facts) -> BoxFuture<'a, Result<(), Miss>> {
        let prefix = async { facts.opening().await.map(|opening| self.prefix(&facts.request, &opening)) };
        async move {
            let _ = facts.memo(self.tier, prefix).await;
            Ok(())
        }
        .boxed()
    }

    /// The request's key. `bound` is how many requests the endpoint of a prefix may have in flight: a prefix of which
    /// there are as many is split.
    pub fn of(&self, routing: &Routing<'_>, bound: impl FnOnce(u64) -> u64) -> Key {
        if let Some(Ok(prefix)) = routing.facts.known::<Prefix>(self.tier) {
            return match prefix.finer {
                Some(finer) if self.in_flight(&prefix, routing.role) >= bound(prefix.hash) => {
                    Key::Prefix(finer)
                }
                _ => Key::Prefix(prefix.hash),
            };
        }
        match self.conversation(routing.request()) {
            Some(name) => Key::Conversation(hash(&[name])),
            None => {
                let turn = self.turns.get(routing.role as usize);
                Key::Turn(turn.map_or(0, |turn| turn.fetch_add(1, Ordering::Relaxed)))
            }
        }
    }

    /// Counts the request in, if this tier chose for it.
    pub fn on_dispatch(&self, dispatch: &Dispatch<'_>) {
        if let Some(crowd) = self.counted(dispatch) {
            crowd.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts it out.
    pub fn on_complete(&self, completion: &Completion<'_>) {
        if let Some(crowd) = self.counted(&completion.dispatch) {
            crowd.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn counted(&self, dispatch: &Dispatch<'_>) -> Option<&AtomicU32> {
        let known = || dispatch.facts.known::<Prefix>(self.tier)?.ok();
        let prefix = (dispatch.tier == self.tier).then(known)??;
        prefix.finer?;
        self.crowd.of(prefix.hash, dispatch.role)
    }

    fn in_flight(&self, prefix: &Prefix, role: Role) -> u64 {
        self.crowd.of(prefix.hash, role).map_or(0, |crowd| u64::from(crowd.load(Ordering::Relaxed)))
    }

    fn conversation<'a>(&self, request: &'a Request) -> Option<&'a [u8]> {
        request
            .headers
            .get(&self.conversation)
            .map(http::HeaderValue::as_bytes)
            .filter(|name| !name.is_empty())
    }

    fn prefix(&self, request: &Request, opening: &Opening) -> Prefix {
        let (model, adapter, salt) =
            (named(&request.model), named(&request.adapter), named(&request.cache_salt));
        let tools = request.tools.as_deref().unwrap_or_default();
        let (system, first) = (start(&opening.system, self.bytes), start(&opening.first, self.bytes));
        let who: &[u8] = match self.level {
            3 => {
                self.conversation(request).or(request.user.as_deref().map(str::as_bytes)).unwrap_or_default()
            }
            _ => &[],
        };
        let of = |first: &[u8]| hash(&[model, adapter, salt, tools, system, first, who]);
        let shared = self.level == 1 && !system.is_empty();
        Prefix {
            hash: of(if shared { &[] } else { first }),
            finer: (shared && !first.is_empty()).then(|| of(first)),
        }
    }
}

fn named(name: &Option<Arc<str>>) -> &[u8] {
    name.as_deref().unwrap_or_default().as_bytes()
}

fn start(text: &str, bytes: usize) -> &[u8] {
    text.as_bytes().get(..bytes).unwrap_or(text.as_bytes())
}

/// The hash of some texts; where one ends and the next begins counts.
fn hash(parts: &[&[u8]]) -> u64 {
    let mut hasher = Xxh3Default::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.digest()
}
