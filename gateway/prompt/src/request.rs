//! The few fields of a request body that routing needs, borrowed from the body.

use std::borrow::Cow;

use crate::json::{self, Json, Members};

/// The members of a request body, as written. Read once per request and passed to everything that asks about it.
///
/// Reading is tolerant: a wrong type is an absent field, never an error. For equal keys the last one counts, as for
/// Python. Costs about one pass over the body and no tree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields<'a> {
    /// `model`, if it is a string.
    pub model: Option<Cow<'a, str>>,
    /// `stream`; `false` unless it is `true`.
    pub stream: bool,
    /// `user`, if it is a string.
    pub user: Option<Cow<'a, str>>,
    /// `user_id`, if it is a string.
    pub user_id: Option<Cow<'a, str>>,
    /// `session_id`, if it is a string.
    pub session_id: Option<Cow<'a, str>>,
    /// `cache_salt`, if it is a string.
    pub cache_salt: Option<Cow<'a, str>>,
    /// `prompt` of a completions request, as written.
    pub prompt: Option<&'a str>,
    /// `messages` of a chat request, as written.
    pub messages: Option<&'a str>,
    /// Everything else that may shape the prompt, as written.
    pub(crate) other: [Option<&'a str>; OTHER.len()],
}

/// Names of [`Fields::other`]: what vLLM reads of a request before it tokenises.
const OTHER: [&str; 25] = [
    "add_generation_prompt",
    "add_special_tokens",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "enable_thinking",
    "max_tokens",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "n",
    "prompt_embeds",
    "reasoning_effort",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "tool_choice",
    "tools",
    "truncate_prompt_tokens",
    "truncation_side",
    "use_beam_search",
    "min_tokens",
];

impl<'a> Fields<'a> {
    /// Reads a body; `None` if it is not a JSON object in UTF-8.
    pub fn read(body: &'a [u8]) -> Option<Self> {
        let mut fields = Self::default();
        for member in Members::new(json::text(body)?) {
            let member = member.ok()?;
            let Some(key) = member.key else { continue };
            match key.as_ref() {
                "model" => fields.model = string(member.value),
                "user" => fields.user = string(member.value),
                "user_id" => fields.user_id = string(member.value),
                "session_id" => fields.session_id = string(member.value),
                "prompt" => fields.prompt = Some(member.value),
                "messages" => fields.messages = Some(member.value),
                name => {
                    if let Some(slot) =
                        OTHER.iter().position(|n| *n == name).and_then(|i| fields.other.get_mut(i))
                    {
                        *slot = Some(member.value);
                    }
                }
            }
        }
        fields.stream = fields.raw("stream") == Some("true");
        fields.cache_salt = fields.raw("cache_salt").and_then(string);
        Some(fields)
    }

    /// A member as written; `None` also for names that are not kept.
    pub(crate) fn raw(&self, name: &str) -> Option<&'a str> {
        let at = OTHER.iter().position(|n| *n == name)?;
        self.other.get(at).copied().flatten()
    }
}

fn string(value: &str) -> Option<Cow<'_, str>> {
    if !value.starts_with('"') {
        return None;
    }
    match Json::parse(value) {
        Ok(Json::Str(s)) => Some(s),
        _ => None,
    }
}
