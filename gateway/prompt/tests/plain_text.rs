//! The prompt's text without template or tokenizer.
#![allow(clippy::unwrap_used)]

use kvgate_prompt::{Fields, plain_text};
use proptest::prelude::*;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn plain(path: &str, fields: &Fields<'_>) -> Option<String> {
    plain_text(path, fields.tools(), fields.messages, fields.prompt, 1 << 20)
}

#[test]
fn plain_text_is_all_strings_in_order() {
    let text = |path: &str, body: Value| {
        let body = body.to_string();
        plain(path, &Fields::read(body.as_bytes()).unwrap())
    };
    let chat = json!({"messages": [{"role": "user", "content": "a\nb"}, {"role": "x", "content": [{"type": "text", "text": "c"}]}]});
    assert_eq!(text(CHAT, chat.clone()).unwrap(), "a\nb\nuser\nc\ntext\nx\n");
    assert_eq!(text("/v1/completions", json!({"prompt": ["a", "b"]})).unwrap(), "a\nb\n");
    assert_eq!(text("/v1/completions", json!({"prompt": [1, 20]})).unwrap(), "1 20 ");
    let mut tools = chat.clone();
    tools["tools"] = json!([{"type": "function"}]);
    assert_eq!(text(CHAT, tools.clone()).unwrap(), "[{\"type\":\"function\"}]\na\nb\nuser\nc\ntext\nx\n");
    tools["messages"] = json!([]);
    assert_eq!(text(CHAT, tools), None, "tools alone are no prompt");
    assert_eq!(text("/v1/completions", chat), None);
    assert_eq!(text("/v1/models", json!({"prompt": "a"})), None);
    let odd =
        json!({"messages": [{"type": "t", "role": {"a": "r"}, "content": ["é😀", -5, 1.5, null, true]}]});
    assert_eq!(text(CHAT, odd).unwrap(), "r\né😀\n-5 t\n");
    let escaped = |prompt: &str| plain_text("/v1/completions", None, None, Some(prompt), 100);
    assert_eq!(escaped(r#""\u00e9\ud83d\ude00\n\ud800""#).unwrap(), "é😀\n\u{fffd}\n");
    for broken in [r#"["a""#, r#"["a"}"#, r#"{"a" "b"}"#, r#""\x""#, &"[".repeat(1000)] {
        assert_eq!(escaped(broken), None, "{broken}");
    }
}

/// However much there is of it, only so much is read.
#[test]
fn plain_text_is_bounded() {
    const LIMIT: usize = 1000;
    let of = |raw: &str| plain_text("/v1/completions", None, None, Some(raw), LIMIT);
    let long = "é".repeat(10_000);
    let text = of(&json!(long).to_string()).unwrap();
    assert_eq!((text.len(), long.starts_with(&text)), (LIMIT, true));
    let text = of(&json!(vec!["abc"; 10_000]).to_string()).unwrap();
    assert_eq!(text, "abc\n".repeat(LIMIT / 4));
    // what says little is not read to its end: there the text would not be JSON
    let nothing = format!("[\"a\",{} oh", "null,".repeat(10_000));
    assert_eq!(of(&nothing).as_deref(), Some("a\n"));
    assert_eq!(of(&format!("[{}", "null,".repeat(10_000))), None);
    assert_eq!(of("[\"a\",null, oh"), None);
    let tools = format!("[{}1]", "1,".repeat(1000));
    let text = plain_text(CHAT, Some(&tools), Some("[]"), None, LIMIT).unwrap();
    assert_eq!(text, tools[..LIMIT]);
}

fn tree() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<f64>().prop_map(Into::into),
        "(.|\\PC|\"|\\\\|😀){0,12}".prop_map(Into::into),
    ];
    leaf.prop_recursive(4, 32, 5, |inner| {
        let key = prop_oneof![Just("role".to_owned()), Just("type".to_owned()), "[a-c\"é]{0,3}"];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Into::into),
            prop::collection::vec((key, inner), 0..5).prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

/// What a tree of the same text says.
fn strings(value: &Value, out: &mut String) {
    match value {
        Value::String(text) => *out += &format!("{text}\n"),
        Value::Number(n) if !n.is_f64() => *out += &format!("{n} "),
        Value::Array(items) => items.iter().for_each(|item| strings(item, out)),
        Value::Object(members) => {
            let common = |key: &str| members.get(key).filter(|value| value.is_string());
            let rest = members
                .iter()
                .filter(|(key, _)| common(key).is_none() || !matches!(key.as_str(), "role" | "type"));
            rest.for_each(|(_, value)| strings(value, out));
            ["role", "type"].into_iter().filter_map(common).for_each(|value| strings(value, out));
        }
        _ => (),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1000) })]

    #[test]
    fn plain_text_is_the_start_of_what_a_tree_says(value in tree(), limit in 1usize..200, pretty: bool) {
        let raw = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.unwrap();
        let mut whole = String::new();
        strings(&value, &mut whole);
        let text = plain_text("/v1/completions", None, None, Some(&raw), limit).unwrap_or_default();
        prop_assert!(text.len() <= limit && whole.starts_with(&text), "{text:?} of {whole:?}");
        if raw.len() <= 2 * limit {
            prop_assert_eq!(text.as_str(), &whole[..whole.floor_char_boundary(limit)]);
        }
    }

    #[test]
    fn never_panics(raw in "[\\[\\]{}\"a1é,:\\\\u]{0,40}", limit in 0usize..60) {
        let _ = plain_text(CHAT, Some(&raw), Some(&raw), None, limit);
    }
}

#[test]
fn a_longer_conversation_extends_the_plain_text() {
    let mut messages = vec![
        json!({"role": "system", "content": "Be brief."}),
        json!({"role": "user", "content": [{"type": "text", "text": "héllo"}]}),
        json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}),
        json!({"role": "tool", "tool_call_id": "call-1", "content": "7"}),
        json!({"role": "user", "content": "and then?"}),
    ];
    let text = |messages: &[Value]| {
        let body = json!({"messages": messages, "tools": [{"type": "function"}]}).to_string();
        plain(CHAT, &Fields::read(body.as_bytes()).unwrap()).unwrap()
    };
    let mut longer = text(&messages);
    while messages.pop().is_some() && !messages.is_empty() {
        let shorter = text(&messages);
        assert!(longer.starts_with(&shorter) && longer.len() > shorter.len(), "{longer}");
        longer = shorter;
    }
}
