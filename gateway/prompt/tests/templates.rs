//! Templates against what transformers and Jinja2 render.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use kvgate_prompt::json::Json;
use kvgate_prompt::template::{ChatTemplate, ContentFormat, Limits, TemplateError};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

/// 2026-11-29 12:00 UTC, when the renderings were made.
fn clock() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(1_795_953_600)
}

fn compile(source: &str) -> Result<ChatTemplate, TemplateError> {
    ChatTemplate::compile(source, Limits::default(), clock)
}

/// The cases of a matrix that do not render as they should, and how many there are. A case holds the text, or that the
/// template refuses the chat.
fn differences(matrix: &str) -> (Vec<(String, String)>, usize) {
    let matrix = Json::parse(matrix).unwrap();
    let Some(Json::Dict(sources)) = matrix.get("templates") else { unreachable!() };
    let templates: BTreeMap<&str, ChatTemplate> = sources
        .iter()
        .map(|(name, source)| (name.as_ref(), compile(source.as_str().unwrap()).unwrap()))
        .collect();
    let Some(Json::List(cases)) = matrix.get("cases") else { unreachable!() };
    let mut different = Vec::new();
    for case in cases {
        let text = |key| case.get(key).and_then(Json::as_str);
        let template = text("template").unwrap();
        let got = templates[template].render(case.get("ctx").unwrap().clone());
        if got.ok().as_deref() != text("ok") {
            different.push((template.to_owned(), text("case").unwrap().to_owned()));
        }
    }
    (different, cases.len())
}

fn fixture(name: &str) -> String {
    String::from_utf8(kvgate_tests::fixture(name)).unwrap()
}

#[test]
fn permissive_templates_render_as_transformers_renders_them() {
    assert_eq!(differences(&fixture("templates/permissive.json")), (Vec::new(), 560));
}

#[test]
fn all_templates_render_as_transformers_renders_them() {
    let Some(matrix) = kvgate_tests::golden("templates/matrix.json") else { return };
    assert_eq!(differences(&String::from_utf8(matrix).unwrap()), (Vec::new(), 1400));
}

#[test]
fn expressions_mean_what_they_mean_in_jinja2() {
    let text = fixture("templates/snippets.json");
    let snippets = Json::parse(&text).unwrap();
    let context = snippets.get("context").unwrap();
    let Some(Json::List(list)) = snippets.get("snippets") else { unreachable!() };
    let mut wrong = Vec::new();
    for pair in list {
        let Json::List(pair) = pair else { unreachable!() };
        let (source, want) = (pair[0].as_str().unwrap(), pair[1].as_str());
        let got = compile(source).and_then(|template| template.render(context.clone()));
        if got.as_deref().ok() != want {
            wrong.push((source, want, got.map_err(|e| e.to_string())));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(list.len(), 7973);
}

/// Values as clients may send them anywhere in a chat.
fn anything() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::json;
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<f64>().prop_map(Into::into),
        any::<String>().prop_map(Into::into),
        prop::sample::select(vec![
            json!("user"),
            json!("assistant"),
            json!("system"),
            json!("tool"),
            json!("text")
        ]),
    ];
    let keys = "role|content|tool_calls|function|name|arguments|parameters|properties|items|type|text|description|required|[a-z]";
    leaf.prop_recursive(6, 48, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Into::into),
            prop::collection::vec((keys, inner), 0..6)
                .prop_map(|m| serde_json::Value::Object(m.into_iter().collect())),
        ]
    })
}

#[test]
fn no_chat_makes_a_template_panic() {
    let text = fixture("templates/permissive.json");
    let matrix = Json::parse(&text).unwrap();
    let Some(Json::Dict(sources)) = matrix.get("templates") else { unreachable!() };
    let templates: Vec<_> =
        sources.iter().map(|(_, source)| compile(source.as_str().unwrap()).unwrap()).collect();
    let mut runner = TestRunner::deterministic();
    let mut rendered = 0;
    for _ in 0..100 {
        let [messages, tools, other] =
            std::array::from_fn(|_| anything().new_tree(&mut runner).unwrap().current());
        let messages = if messages.is_array() { messages } else { serde_json::json!([messages, other]) };
        let context =
            serde_json::json!({"messages": messages, "tools": tools, "documents": other}).to_string();
        for template in &templates {
            rendered += usize::from(template.render(Json::parse(&context).unwrap()).is_ok());
        }
    }
    assert!(rendered > 100, "{rendered}");
}

#[test]
fn runaway_templates_end() {
    let render = |source: &str, context: &str| compile(source).unwrap().render(Json::parse(context).unwrap());
    let long = format!(r#"{{"s": "{}"}}"#, "x".repeat(1 << 20));
    for source in [
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in range(99999) %}{{ s }}{% endfor %}",
        "{% set n = namespace(t='') %}{% for a in range(99999) %}{% set n.t = n.t ~ s %}{% endfor %}",
        "{% for a in range(99999) %}{% set x = s | upper | tojson %}{% endfor %}",
        "{{ 'x' * 9999999999 }}",
        "{% set n = namespace(l=[1]) %}{% for a in range(40) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l | tojson }}",
        "{% set n = namespace(l=[1]) %}{% for a in range(40) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
    ] {
        assert!(render(source, &long).is_err(), "{source}");
    }
}

#[test]
fn templates_say_how_they_want_content() {
    let format = |source: &str| compile(source).unwrap().content_format();
    for source in [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in other %}{% for c in m.content %}{% endfor %}{% endfor %}",
        "{% set ns.messages = messages %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
    ] {
        assert_eq!(format(source), ContentFormat::String, "{source}");
    }
    for source in [
        "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}",
        "{% for m in messages[1:] %}{% for c in m['content'] | list %}{{ c.text }}{% endfor %}{% endfor %}",
        "{% set l = messages %}{% for m in l %}{% generation %}{% for c in m.content %}{% endfor %}{% endgeneration %}{% endfor %}",
        "{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}",
    ] {
        assert_eq!(format(source), ContentFormat::OpenAi, "{source}");
    }
    assert!(compile("{% if m.role == 'developer' %}{% endif %}").unwrap().knows_developer());
    assert!(!compile("{# developer #}").unwrap().knows_developer());
}
