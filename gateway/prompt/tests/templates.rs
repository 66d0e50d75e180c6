//! Templates against what transformers and Jinja2 render.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use kvgate_prompt::json::Json;
use kvgate_prompt::template::{ChatTemplate, ContentFormat, Limits, TemplateError};

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
    assert_eq!(list.len(), 5465);
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
