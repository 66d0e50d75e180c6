//! The few fields of a request body that routing needs, borrowed from the body.

use std::borrow::Cow;

use crate::json::{self, Items, Json, Members};

/// The members of a request body, as written.
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
    /// `cache_salt`, if it is a string.
    pub cache_salt: Option<Cow<'a, str>>,
    /// An adapter named beside the model, if it is a string: `lora_path` (SGLang), else `lora_adapter`.
    pub adapter: Option<Cow<'a, str>>,
    /// `prompt` of a completions request, as written.
    pub prompt: Option<&'a str>,
    /// `messages` of a chat request, as written.
    pub messages: Option<&'a str>,
    /// Everything else that may shape the prompt, as written.
    pub(crate) other: [Option<&'a str>; OTHER.len()],
}

/// Names of [`Fields::other`]: what engines read of a request before they tokenise.
const OTHER: [&str; 21] = [
    "add_generation_prompt",
    "add_special_tokens",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "lora_adapter",
    "lora_path",
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
        fields.adapter =
            ["lora_path", "lora_adapter"].iter().find_map(|name| fields.raw(name).and_then(string));
        Some(fields)
    }

    /// `tools`, as written; `None` where there are none.
    pub fn tools(&self) -> Option<&'a str> {
        self.raw("tools").filter(|raw| *raw != "null" && Items::new(raw).next().is_some())
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn model(body: &str) -> Option<String> {
        Fields::read(body.as_bytes())?.model.map(Cow::into_owned)
    }

    #[test]
    fn reads_what_is_there() {
        let body = br#" {"model": "m\u00e9", "stream":true, "user":"u","user_id": "i", "cache_salt": "s\n",
            "messages": [{"role": "user", "content": "a\\"}], "prompt": "p" , "x": {"model": "inner"}} "#;
        let fields = Fields::read(body).unwrap();
        assert_eq!(fields.model.as_deref(), Some("mé"));
        assert_eq!(fields.user.as_deref(), Some("u"));
        assert_eq!(fields.user_id.as_deref(), Some("i"));
        assert_eq!(fields.cache_salt.as_deref(), Some("s\n"));
        assert_eq!(fields.messages, Some(r#"[{"role": "user", "content": "a\\"}]"#));
        assert_eq!(fields.prompt, Some(r#""p""#));
        assert!(fields.stream);
        assert!(matches!(fields.user, Some(Cow::Borrowed(_))));
    }

    #[test]
    fn wrong_types_are_absent_fields() {
        let fields =
            Fields::read(br#"{"model": 7, "stream": "true", "user": null, "cache_salt": []}"#).unwrap();
        assert_eq!(fields.model, None);
        assert!(!fields.stream);
        assert_eq!((fields.user, fields.cache_salt), (None, None));
    }

    #[test]
    fn tools_and_adapters_are_there_or_not() {
        let read = |body: &'static str| Fields::read(body.as_bytes()).unwrap();
        for none in [r#"{}"#, r#"{"tools":null}"#, r#"{"tools":[ ]}"#] {
            assert_eq!(read(none).tools(), None, "{none}");
        }
        assert_eq!(read(r#"{"tools": [{"type":"function"}] }"#).tools(), Some(r#"[{"type":"function"}]"#));
        assert_eq!(read(r#"{"lora_adapter":"a"}"#).adapter.as_deref(), Some("a"));
        assert_eq!(read(r#"{"lora_adapter":"a","lora_path":"p"}"#).adapter.as_deref(), Some("p"));
        assert_eq!(read(r#"{"lora_adapter":"a","lora_path":null}"#).adapter.as_deref(), Some("a"));
        assert_eq!(read(r#"{"lora_path":["p"]}"#).adapter, None);
    }

    #[test]
    fn the_last_of_equal_keys_counts() {
        assert_eq!(model(r#"{"model":"a","model":"b"}"#).as_deref(), Some("b"));
        assert_eq!(model(r#"{"model":"a","m\u006fdel":"c"}"#).as_deref(), Some("c"));
        assert_eq!(model(r#"{"model":"a","model":1}"#), None);
    }

    #[test]
    fn bodies_that_python_reads_too() {
        assert_eq!(model("\u{feff}{\"model\":\"a\"}").as_deref(), Some("a"));
        for odd in
            ["NaN", "-Infinity", "1e999", "123456789012345678901234567890", "\"\\ud800\"", "\"\u{7f}\""]
        {
            assert_eq!(model(&format!("{{\"x\":{odd},\"model\":\"a\"}}")).as_deref(), Some("a"), "{odd}");
        }
        assert_eq!(model(r#"{"model":"\ud800"}"#), None);
    }

    #[test]
    fn bodies_that_are_no_json_objects() {
        for body in [
            "",
            " ",
            "[]",
            "\"model\"",
            "null",
            "{",
            "{\"model\":\"a\"",
            "{\"model\":\"a\"} x",
            "{\"model\" \"a\"}",
            "model=a",
        ] {
            assert_eq!(Fields::read(body.as_bytes()), None, "{body}");
        }
        assert_eq!(Fields::read(b"{\"model\":\"\xff\"}"), None);
        assert_eq!(Fields::read(b"\xff\xfe{\0}\0"), None);
    }

    /// Size alone must cost nothing but time in proportion: these would not end, or overflow the stack, otherwise.
    #[test]
    fn hostile_sizes() {
        let deep = format!("{{\"a\":{}{},\"model\":\"m\"}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(model(&deep).as_deref(), Some("m"));
        let objects =
            format!("{{\"a\":{}1{},\"model\":\"m\"}}", "{\"a\":".repeat(100_000), "}".repeat(100_000));
        assert_eq!(model(&objects).as_deref(), Some("m"));
        let keys: String = (0..1_000_000).map(|i| format!("\"k{i}\":1,")).collect();
        assert_eq!(model(&format!("{{{keys}\"model\":\"m\"}}")).as_deref(), Some("m"));
        let same = "\"model\":\"x\",".repeat(1_000_000);
        assert_eq!(model(&format!("{{{same}\"model\":\"m\"}}")).as_deref(), Some("m"));
        let escapes = "\\\\".repeat(1 << 20);
        assert_eq!(model(&format!("{{\"model\":\"{escapes}\"}}")).map(|m| m.len()), Some(1 << 20));
    }

    proptest! {
        #[test]
        fn never_panics(body in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Fields::read(&body);
        }

        #[test]
        fn truncated_bodies_have_no_fields(cut in 0..77_usize) {
            let body = br#"{"model":"m","messages":[{"role":"user","content":"a\"b"}],"x":{"y":[1,2,3]}}"#;
            prop_assert_eq!(body.len(), 77);
            prop_assert_eq!(Fields::read(&body[..cut]), None);
        }
    }
}
