//! Answers in vLLM 0.32's shapes, member for member.

use super::request::{Asked, Kind};
use serde_json::{Map, Value, json};

/// What is the same in all parts of an answer.
pub(crate) struct Shape {
    pub kind: Kind,
    pub id: String,
    pub created: u64,
    pub model: String,
    pub fingerprint: String,
}

/// One choice so far.
#[derive(Clone, Default)]
pub(crate) struct Choice {
    pub text: String,
    pub tokens: Vec<u32>,
    /// Prompt tokens that were not computed, and those of them that were received.
    pub cached_tokens: usize,
    pub received_tokens: usize,
    pub done: bool,
}

/// What is said of the tokens.
#[derive(Clone, Copy, Default)]
pub(crate) struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub cached_tokens: usize,
    /// Those of them that a prefill engine handed over; no answer says it.
    pub received_tokens: usize,
    /// Tokens of full prompt blocks that were not cached; chat alone says it.
    pub created_tokens: usize,
}

impl Usage {
    /// Adds up the choices of an answer; a prompt counts once, with its first choice.
    pub fn of(asked: &Asked, choices: &[Choice], block_size: usize) -> Self {
        let mut usage = Self { prompt_tokens: asked.prompt_tokens(), ..Self::default() };
        usage.completion_tokens = choices.iter().map(|choice| choice.tokens.len()).sum();
        for (prompt, choice) in asked.prompts.iter().zip(choices.iter().step_by(asked.n)) {
            usage.cached_tokens += choice.cached_tokens;
            usage.received_tokens += choice.received_tokens;
            usage.created_tokens +=
                (prompt.len() / block_size * block_size).saturating_sub(choice.cached_tokens);
        }
        usage
    }

    fn counts(self, details: Value) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": details,
        })
    }

    fn whole(self, kind: Kind) -> Value {
        let created = (kind == Kind::Chat).then_some(self.created_tokens);
        let mut usage = self.counts(json!({
            "cached_tokens": self.cached_tokens,
            "created_cache_tokens": created,
            "multimodal_tokens": null,
        }));
        usage["completion_tokens_details"] = Value::Null;
        usage
    }

    fn streamed(self, kind: Kind) -> Value {
        let mut details = json!({ "cached_tokens": self.cached_tokens });
        if kind == Kind::Chat {
            details["created_cache_tokens"] = self.created_tokens.into();
        }
        self.counts(details)
    }
}

impl Shape {
    fn object(&self, chunk: bool) -> &'static str {
        match (self.kind, chunk) {
            (Kind::Completions, _) => "text_completion",
            (Kind::Chat, false) => "chat.completion",
            (Kind::Chat, true) => "chat.completion.chunk",
        }
    }

    fn start(&self, chunk: bool, choices: Value) -> Map<String, Value> {
        let mut answer = Map::new();
        answer.insert("id".into(), self.id.clone().into());
        answer.insert("object".into(), self.object(chunk).into());
        answer.insert("created".into(), self.created.into());
        answer.insert("model".into(), self.model.clone().into());
        answer.insert("choices".into(), choices);
        answer
    }

    /// The whole answer; `transfer` is what the decode engine is to know.
    pub fn whole(&self, asked: &Asked, choices: &[Choice], usage: Usage, transfer: Value) -> Value {
        let ids = |tokens: &[u32]| if asked.return_token_ids { json!(tokens) } else { Value::Null };
        let prompt =
            |index: usize| asked.prompts.get(index / asked.n).map_or(Value::Null, |tokens| ids(tokens));
        let listed = choices.iter().enumerate().map(|(index, choice)| match self.kind {
            Kind::Completions => json!({
                "index": index, "text": choice.text, "logprobs": null, "finish_reason": "length", "stop_reason": null,
                "token_ids": ids(&choice.tokens), "prompt_logprobs": null, "prompt_token_ids": prompt(index),
                "routed_experts": null,
            }),
            Kind::Chat => json!({
                "index": index,
                "message": {
                    "role": "assistant", "content": choice.text, "refusal": null, "annotations": null, "audio": null,
                    "function_call": null, "reasoning": null,
                },
                "logprobs": null, "finish_reason": "length", "stop_reason": null, "token_ids": ids(&choice.tokens),
                "routed_experts": null,
            }),
        });
        let mut answer = self.start(false, listed.collect());
        answer.insert("service_tier".into(), Value::Null);
        answer.insert("system_fingerprint".into(), self.fingerprint.clone().into());
        answer.insert("usage".into(), usage.whole(self.kind));
        if self.kind == Kind::Chat {
            answer.insert("prompt_logprobs".into(), Value::Null);
            answer.insert("prompt_token_ids".into(), prompt(0));
            answer.insert("prompt_text".into(), Value::Null);
        }
        answer.insert("kv_transfer_params".into(), transfer);
        answer.insert("ec_transfer_params".into(), Value::Null);
        answer.insert("metrics".into(), Value::Null);
        answer.into()
    }

    /// A chat stream's first chunk of a choice.
    pub fn role(&self, asked: &Asked, index: usize) -> Value {
        let delta = json!({ "role": "assistant", "content": "" });
        let choice = json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null });
        let mut chunk = self.start(true, json!([choice]));
        let prompt = asked.prompts.first().filter(|_| asked.return_token_ids);
        chunk.insert("prompt_token_ids".into(), json!(prompt));
        chunk.insert("prompt_text".into(), Value::Null);
        chunk.into()
    }

    /// A stream's chunk with the token `id` of a choice, its `position`th.
    pub fn token(
        &self,
        asked: &Asked,
        index: usize,
        text: &str,
        id: u32,
        position: usize,
        last: bool,
    ) -> Value {
        let ids = asked.return_token_ids.then_some([id]);
        let finish = last.then_some("length");
        let choice = match self.kind {
            Kind::Completions => {
                let prompt =
                    asked.prompts.get(index / asked.n).filter(|_| asked.return_token_ids && position == 0);
                json!({
                    "index": index, "text": text, "logprobs": null, "finish_reason": finish, "stop_reason": null,
                    "prompt_token_ids": prompt, "token_ids": ids,
                })
            }
            Kind::Chat => {
                let mut choice = json!({
                    "index": index, "delta": { "content": text }, "logprobs": null, "finish_reason": finish,
                });
                if last {
                    choice["stop_reason"] = Value::Null;
                }
                choice["token_ids"] = json!(ids);
                choice
            }
        };
        let mut chunk = self.start(true, json!([choice]));
        if last && !asked.include_usage {
            chunk.insert("system_fingerprint".into(), self.fingerprint.clone().into());
        }
        chunk.into()
    }

    /// The chunk with the usage, where it was asked for.
    pub fn usage(&self, usage: Usage) -> Value {
        let mut chunk = self.start(true, json!([]));
        chunk.insert("usage".into(), usage.streamed(self.kind));
        chunk.insert("system_fingerprint".into(), self.fingerprint.clone().into());
        chunk.into()
    }
}
