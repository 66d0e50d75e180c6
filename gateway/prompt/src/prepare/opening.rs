//! How a prompt begins, read from the first of its messages alone.

use super::Api;
use crate::json::{Items, Members, Sink};

/// How a prompt begins. Both texts stay the same over the turns of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Opening {
    /// The texts of the system and developer messages that a chat begins with, each ended by a line feed; empty where
    /// there are none.
    pub system: String,
    /// The text of the message after these; of a completions request the prompt, the first where there are several.
    pub first: String,
}

/// How the prompt of a request begins: of its `messages` or `prompt`, as written, the first `limit` bytes of each text.
///
/// Token ids stand for themselves, in decimal; of content that is no text its JSON. What follows the first message
/// after the system messages is not looked at. `None` where there is no prompt, or none is known for this path.
pub fn opening(path: &str, messages: Option<&str>, prompt: Option<&str>, limit: usize) -> Option<Opening> {
    let opening = match Api::of(path) {
        Api::Chat => chat(messages?, limit)?,
        Api::Completions => Opening { system: String::new(), first: completion(prompt?, limit)? },
        Api::Other => return None,
    };
    (opening != Opening::default()).then_some(opening)
}

fn chat(messages: &str, limit: usize) -> Option<Opening> {
    let mut opening = Opening::default();
    for message in Items::new(messages) {
        let (mut role, mut content) = (None, None);
        for member in Members::new(message.ok()?) {
            let member = member.ok()?;
            match member.key.as_deref() {
                Some("role") => role = Some(member.value),
                Some("content") => content = Some(member.value),
                _ => (),
            }
        }
        let content = content.filter(|c| *c != "null");
        if !matches!(role, Some("\"system\"" | "\"developer\"")) {
            content.into_iter().for_each(|content| push_content(&mut opening.first, content, limit));
            break;
        }
        if let Some(content) = content {
            push_content(&mut opening.system, content, limit);
            push(&mut opening.system, "\n", limit);
        }
    }
    Some(opening)
}

fn completion(prompt: &str, limit: usize) -> Option<String> {
    let mut first = String::new();
    let mut list = prompt;
    if prompt.starts_with('[') {
        let item = Items::new(prompt).next()?.ok()?;
        if item.starts_with('"') {
            push_string(&mut first, item, limit);
            return Some(first);
        }
        list = if item.starts_with('[') { item } else { prompt };
    }
    if !list.starts_with('[') {
        push_string(&mut first, list, limit);
        return Some(first);
    }
    for id in Items::new(list) {
        if first.len() >= limit {
            break;
        }
        push(&mut first, id.ok()?, limit);
        push(&mut first, ",", limit);
    }
    Some(first)
}

/// A text, or parts of which most are texts.
fn push_content(out: &mut String, content: &str, limit: usize) {
    if !content.starts_with('[') {
        return push_string(out, content, limit);
    }
    for part in Items::new(content).map_while(Result::ok) {
        if out.len() >= limit {
            break;
        }
        let members = Members::new(part).map_while(Result::ok);
        match members.filter(|m| m.key.as_deref() == Some("text")).last() {
            Some(text) => push_string(out, text.value, limit),
            None => push_string(out, part, limit),
        }
    }
}

/// Adds what a JSON string says, and of anything else what is written.
fn push_string(out: &mut String, raw: &str, limit: usize) {
    if raw.starts_with('"') {
        let _ = Sink::new(out, limit).string(raw);
    } else {
        push(out, raw, limit);
    }
}

fn push(out: &mut String, text: &str, limit: usize) {
    let _ = Sink::new(out, limit).push(text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn of(path: &str, body: &Value) -> Option<(String, String)> {
        let raw = |key: &str| body.get(key).map(Value::to_string);
        let opening = opening(path, raw("messages").as_deref(), raw("prompt").as_deref(), 100)?;
        Some((opening.system, opening.first))
    }

    fn texts(system: &str, first: &str) -> Option<(String, String)> {
        Some((system.into(), first.into()))
    }

    fn chat_of(messages: Value) -> Option<(String, String)> {
        of("/v1/chat/completions", &json!({"messages": messages}))
    }

    #[test]
    fn a_chat_begins_with_its_system_messages_and_the_one_after() {
        let (system, user) =
            (json!({"role": "system", "content": "Be\nbrief."}), json!({"content": "hé", "role": "user"}));
        let developer = json!({"role": "developer", "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "pe"}]});
        let answer = json!({"role": "assistant", "content": "yes"});
        assert_eq!(chat_of(json!([system, user])), texts("Be\nbrief.\n", "hé"));
        assert_eq!(chat_of(json!([system, user, answer, user, system])), texts("Be\nbrief.\n", "hé"));
        assert_eq!(chat_of(json!([system, developer, user])), texts("Be\nbrief.\nnope\n", "hé"));
        assert_eq!(chat_of(json!([user, system])), texts("", "hé"));
        assert_eq!(chat_of(json!([system])), texts("Be\nbrief.\n", ""));
    }

    #[test]
    fn content_that_is_no_text_counts_as_written() {
        let image = json!({"type": "image_url", "image_url": {"url": "data:1"}});
        let messages =
            json!([{"role": "user", "content": [image, {"type": "text", "text": "what?"}, "bare"]}]);
        assert_eq!(chat_of(messages), texts("", &format!("{image}what?bare")));
        assert_eq!(chat_of(json!([{"role": "user", "content": {"a": 1}}])), texts("", "{\"a\":1}"));
        let lone = opening("/v1/completions", None, Some(r#""a\ud800b""#), 100).unwrap();
        assert_eq!(lone.first, "a\u{fffd}b");
    }

    #[test]
    fn the_last_of_equal_keys_counts() {
        let twice = r#"[{"role":"user","role":"system","content":"a","content":[{"text":"b","text":"c"}]}]"#;
        let opening = opening("/v1/chat/completions", Some(twice), None, 100).unwrap();
        assert_eq!((opening.system.as_str(), opening.first.as_str()), ("c\n", ""));
    }

    #[test]
    fn a_completion_begins_with_its_prompt_of_any_kind() {
        let of = |prompt: Value| of("/v1/completions?a=b", &json!({"prompt": prompt}));
        assert_eq!(of(json!("once\t")), texts("", "once\t"));
        assert_eq!(of(json!(["once", "twice"])), texts("", "once"));
        assert_eq!(of(json!([5, 17])), texts("", "5,17,"));
        assert_eq!(of(json!([[5, 17], [6]])), texts("", "5,17,"));
        assert_eq!(of(json!((0..999).collect::<Vec<_>>())).unwrap().1.len(), 100);
    }

    #[test]
    fn where_nothing_begins() {
        for (path, body) in [
            ("/v1/chat/completions", json!({"prompt": "p"})),
            ("/v1/chat/completions", json!({"messages": []})),
            ("/v1/chat/completions", json!({"messages": [{"role": "user"}]})),
            ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": null}]})),
            ("/v1/chat/completions", json!({"messages": "m"})),
            ("/v1/completions", json!({"messages": [{"role": "user", "content": "c"}]})),
            ("/v1/completions", json!({"prompt": ""})),
            ("/v1/completions", json!({"prompt": []})),
            ("/v1/embeddings", json!({"prompt": "p"})),
        ] {
            assert_eq!(of(path, &body), None, "{path} {body}");
        }
    }

    proptest! {
        /// However it is escaped and wherever it is cut: the first bytes of what it says.
        #[test]
        fn a_cut_text_is_the_start_of_the_whole(text in "(.|\\PC|\u{1}|\"|\\\\|😀){0,60}", limit in 1usize..40, ascii in any::<bool>()) {
            let mut raw = json!(text).to_string();
            if ascii {
                let escape = |c: char| match c {
                    ' '..='~' => c.to_string(),
                    c => c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
                };
                raw = raw.chars().map(escape).collect();
            }
            let mut out = String::new();
            push_string(&mut out, &raw, limit);
            prop_assert_eq!(out.as_str(), &text[..text.floor_char_boundary(limit)]);
        }

        #[test]
        fn never_panics(raw in "[\\[\\]{}\"a1,:\\\\]{0,40}", limit in 0usize..10) {
            opening("/v1/chat/completions", Some(&raw), None, limit);
            opening("/v1/completions", None, Some(&raw), limit);
        }
    }
}
