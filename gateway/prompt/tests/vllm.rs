//! What vLLM does to a chat before the template sees it, on a template that shows all of it.
#![allow(clippy::unwrap_used)]

use kvgate_prompt::{Fields, Model, PromptError, TokenizersConfig, prompt};
use proptest::prelude::*;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Prints every message with all it has, then the variables.
const SHOW: &str = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}{{ tools | tojson }}";

fn model(template: &str, config: Value) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let words = kvgate_tests::tokenizers().join("tiny-words/tokenizer.json");
    std::fs::copy(words, folder.path().join("tokenizer.json")).unwrap();
    let mut settings = config;
    settings["chat_template"] = template.into();
    std::fs::write(folder.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    Model::load(folder.path(), &TokenizersConfig::default()).unwrap()
}

fn render(template: &str, body: &Value) -> Result<String, PromptError> {
    let model = model(template, json!({"eos_token": {"content": "<|end|>"}, "pad_token": null}));
    let body = body.to_string();
    let got = prompt(&model, CHAT, &Fields::read(body.as_bytes()).unwrap())?;
    Ok(got.sequences[0].text.clone().unwrap())
}

fn show(messages: &Value) -> String {
    render(SHOW, &json!({"messages": messages})).unwrap()
}

#[test]
fn messages_keep_known_keys_only() {
    assert_eq!(
        show(&json!([
            {"content": "s", "role": "system", "x": 1, "name": "n", "tool_calls": []},
            {"role": "user", "content": null},
            {"role": "assistant", "content": "a", "tool_calls": [], "reasoning_content": "r", "name": 7},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
            {"role": "other", "tool_call_id": "c"},
        ])),
        concat!(
            "{\"role\": \"system\", \"content\": \"s\", \"name\": \"n\"}\n",
            "{\"role\": \"user\", \"content\": \"\"}\n",
            "{\"role\": \"assistant\", \"content\": \"a\", \"reasoning\": \"r\", \"reasoning_content\": \"r\", \"thinking\": \"r\"}\n",
            "{\"role\": \"tool\", \"content\": \"x\\ny\", \"tool_call_id\": \"c\"}\n",
            "{\"role\": \"other\", \"content\": \"\"}\nnull",
        )
    );
}

#[test]
fn tool_calls_are_read_and_written_again() {
    let calls = |arguments: Value| {
        show(&json!([{"role": "assistant", "tool_calls": [
            {"type": "function", "z": 1, "function": {"name": "f", "arguments": arguments, "q": 2}, "id": "c"}]}]))
    };
    let want = |arguments: &str| {
        format!(
            "{{\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{{\"id\": \"c\", \"function\": \
             {{\"arguments\": {arguments}, \"name\": \"f\"}}, \"type\": \"function\"}}]}}\nnull"
        )
    };
    for (arguments, dumped) in [
        (
            json!("{ \"b\" :1.0,\"a\": 1E5, \"b\":10000000000000000000000 }"),
            "{\"b\": 10000000000000000000000, \"a\": 100000.0}",
        ),
        (json!(""), "{}"),
        (json!("{"), "{}"),
        (json!(" "), "{}"),
        (json!(null), "{}"),
        (json!(7), "{}"),
        (json!("[1]"), "[1]"),
        (json!("NaN"), "NaN"),
        (json!({"a": "é"}), "{\"a\": \"é\"}"),
    ] {
        assert_eq!(calls(arguments.clone()), want(dumped), "{arguments}");
    }
}

#[test]
fn content_follows_the_template() {
    let messages = json!([{"role": "user", "content": "a"}, {"role": "user", "content": ["b", {"type": "text", "text": ""},
        {"type": "input_text", "text": "c"}, {"type": "refusal", "refusal": null}, {"type": "thinking", "thinking": "t"}]},
        {"role": "tool", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "user", "content": null}]);
    let text = "{% for m in messages %}{{ m.content | tojson }};{% endfor %}";
    assert_eq!(render(text, &json!({"messages": messages})).unwrap(), r#""a";"b\nc\nt";"x\ny";"";"#);
    let parts = text.to_owned()
        + "{% for m in [] %}{% for c in m.content %}{% endfor %}{% endfor %}{% for c in content %}{% endfor %}";
    let part = |text: &str| format!("{{\"type\": \"text\", \"text\": \"{text}\"}}");
    assert_eq!(
        render(&parts, &json!({"messages": messages})).unwrap(),
        format!("[{}];[{}, {}, {}, {}];\"x\\ny\";[];", part("a"), part("b"), part(""), part("c"), part("t"))
    );
}

#[test]
fn developer_messages_are_system_messages_to_templates_that_do_not_know_them() {
    let roles = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    let body = json!({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "u"},
        {"role": "developer", "content": "b", "tools": [1]}]});
    assert_eq!(render(roles, &body).unwrap(), "system:a\n\nb;user:u;");
    let knows = roles.to_owned() + "{% if 'developer' %}{% endif %}";
    assert_eq!(render(&knows, &body).unwrap(), "system:a;user:u;developer:b;");
    // without a developer message nothing is merged
    let two = json!({"messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]});
    assert_eq!(render(roles, &two).unwrap(), "system:a;system:b;");
    let first =
        json!({"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]});
    assert_eq!(render(roles, &first).unwrap(), "system:d;user:u;");
}

#[test]
fn variables_and_who_wins() {
    let names = "add_generation_prompt,enable_thinking,reasoning_effort,documents,tools,eos_token,bos_token,pad_token,x,y";
    let shown: String = names.split(',').map(|n| format!("{{{{ {n} | default('-') }}}},")).collect();
    let run = |extra: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "u"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        render(&shown, &body).unwrap()
    };
    assert_eq!(run(json!({})), "True,-,-,None,None,<|end|>,-,-,-,-,");
    assert_eq!(
        run(
            json!({"chat_template_kwargs": {"x": 1.0, "y": null, "eos_token": "E", "enable_thinking": "auto", "add_generation_prompt": false}})
        ),
        "True,-,-,None,None,E,-,-,1.0,-,"
    );
    assert_eq!(run(json!({"enable_thinking": false, "x": 1})), "True,-,-,None,None,<|end|>,-,-,-,-,");
    assert_eq!(run(json!({"reasoning_effort": "none"})), "True,False,none,None,None,<|end|>,-,-,-,-,");
    assert_eq!(
        run(
            json!({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": false, "reasoning_effort": "high"}})
        ),
        "True,False,low,None,None,<|end|>,-,-,-,-,"
    );
    assert_eq!(
        run(json!({"add_generation_prompt": false, "documents": [{"title": "t"}]})),
        "False,-,-,[{'title': 't'}],None,<|end|>,-,-,-,-,"
    );
}

#[test]
fn tools_choose_the_template() {
    let named = json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]);
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(
        kvgate_tests::tokenizers().join("tiny-words/tokenizer.json"),
        folder.path().join("tokenizer.json"),
    )
    .unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), json!({"chat_template": named}).to_string())
        .unwrap();
    let text = |body: Value| {
        let model = Model::load(folder.path(), &TokenizersConfig::default()).unwrap();
        let body = body.to_string();
        prompt(&model, CHAT, &Fields::read(body.as_bytes()).unwrap()).unwrap().sequences[0]
            .text
            .clone()
            .unwrap()
    };
    let messages = json!([{"role": "user", "content": "u"}]);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    assert_eq!(text(json!({"messages": messages})), "plain");
    assert_eq!(text(json!({"messages": messages, "tools": tools})), "tools");
    assert_eq!(text(json!({"messages": messages, "tools": tools, "tool_choice": "none"})), "tools");
    std::fs::write(folder.path().join("chat_template.jinja"), "file").unwrap();
    assert_eq!(text(json!({"messages": messages})), "file");
}

#[test]
fn a_message_is_continued() {
    let template = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}";
    let run = |template: &str, content: Value| {
        render(
            template,
            &json!({"add_generation_prompt": false, "continue_final_message": true,
            "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": content}]}),
        )
    };
    assert_eq!(run(template, json!("a b ")).unwrap(), "<u><a b");
    assert_eq!(
        run("{% for m in messages %}<{{ m.content }}>{% endfor %}", json!("a b ")).unwrap(),
        "<u><a b "
    );
    assert!(run("{% for m in messages %}{{ m.role }}{% endfor %}", json!("a")).is_err());
    let parts = "{% for m in messages %}{% for c in m.content %}<{{ c.text }}>{% endfor %}{% endfor %}";
    assert_eq!(
        run(parts, json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).unwrap(),
        "<u><a><b"
    );
    assert!(run(parts, json!([])).is_err());
}

#[test]
fn refused_requests() {
    let messages = json!([{"role": "user", "content": "u"}]);
    for extra in [
        json!({"chat_template": "x"}),
        json!({"chat_template_kwargs": {"chat_template": "x"}}),
        json!({"continue_final_message": true}),
        json!({"cache_salt": ""}),
        json!({"cache_salt": 7}),
        json!({"tools": []}),
        json!({"tools": [{"type": "function", "function": {}}]}),
        json!({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}),
        json!({"tool_choice": "auto"}),
        json!({"n": 2, "temperature": 0}),
        json!({"stream_options": {"include_usage": true}}),
        json!({"truncate_prompt_tokens": 0}),
        json!({"truncate_prompt_tokens": -2}),
        json!({"add_special_tokens": null}),
        json!({"messages": []}),
        json!({"messages": "u"}),
        json!({"messages": [{"content": "u"}]}),
        json!({"messages": [{"role": "user", "content": 7}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "audio", "text": "x"}]}]}),
        json!({"messages": [{"role": "user", "content": [{"text": "x"}]}]}),
        json!({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}),
    ] {
        let mut body = json!({"messages": messages});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        assert!(matches!(render(SHOW, &body), Err(PromptError::Tokenize(_))), "{extra}");
    }
    let body = r#"{"messages": [{"role": "user", "content": "\ud800"}]}"#;
    let model = model(SHOW, json!({}));
    assert_eq!(prompt(&model, CHAT, &Fields::read(body.as_bytes()).unwrap()).unwrap_err().miss(), "tokenize");
    for (path, body) in [
        (CHAT, "{}"),
        ("/v1/completions", "{}"),
        ("/v1/completions", r#"{"prompt": ""}"#),
        ("/v1/embeddings", r#"{"prompt": "a"}"#),
    ] {
        assert_eq!(
            prompt(&model, path, &Fields::read(body.as_bytes()).unwrap()).unwrap_err().miss(),
            "text_empty",
            "{path} {body}"
        );
    }
}

#[test]
fn no_request_makes_it_panic() {
    let model = model(SHOW, json!({}));
    let leaf = prop::sample::select(vec![
        json!(null),
        json!(true),
        json!(1),
        json!(-1.5),
        json!("user"),
        json!("text"),
        json!(""),
    ]);
    let keys = |names: &'static [&'static str]| prop::sample::select(names).prop_map(str::to_owned);
    let value = leaf.prop_recursive(5, 40, 5, move |inner| {
        let members =
            keys(&["role", "content", "tool_calls", "function", "type", "text", "arguments", "name"]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(members, inner, 0..6).prop_map(|m| m.into_iter().collect()),
        ]
    });
    let fields = keys(&[
        "messages",
        "prompt",
        "tools",
        "n",
        "cache_salt",
        "stream",
        "chat_template_kwargs",
        "documents",
        "truncate_prompt_tokens",
        "model",
        "tool_choice",
        "add_special_tokens",
        "reasoning_effort",
    ]);
    let bodies =
        prop::collection::btree_map(fields, value, 0..8).prop_map(|m| m.into_iter().collect::<Value>());
    proptest!(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) }, |(body in bodies, chat in any::<bool>())| {
        let body = body.to_string();
        let fields = Fields::read(body.as_bytes()).unwrap();
        let path = if chat { CHAT } else { "/v1/completions" };
        let _ = prompt(&model, path, &fields);
    });
}

#[test]
fn truncation_keeps_the_tail_or_the_head() {
    let model = model(SHOW, json!({}));
    let ids = |extra: Value| {
        let mut body = json!({"prompt": [5, 6, 7, 8.0]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let body = body.to_string();
        prompt(&model, "/v1/completions?x", &Fields::read(body.as_bytes()).unwrap()).unwrap().sequences[0]
            .tokens
            .to_vec()
    };
    assert_eq!(ids(json!({})), [5, 6, 7, 8]);
    assert_eq!(ids(json!({"truncate_prompt_tokens": 2})), [7, 8]);
    assert_eq!(ids(json!({"truncate_prompt_tokens": 2, "truncation_side": "right"})), [5, 6]);
    assert_eq!(ids(json!({"truncate_prompt_tokens": -1})), [5, 6, 7, 8]);
    assert_eq!(ids(json!({"truncate_prompt_tokens": 9})), [5, 6, 7, 8]);
}

#[test]
fn truncation_keeps_what_the_tokenizer_sets_around_a_text() {
    let Some(folder) = kvgate_tests::golden_model("tiny-llama3") else { return };
    let model = Model::load(&folder, &TokenizersConfig::default()).unwrap();
    // `AutoTokenizer` with truncation_side "left" and max_length 3
    let body = json!({"prompt": "hello world foo bar baz qux", "truncate_prompt_tokens": 3}).to_string();
    let got = prompt(&model, "/v1/completions", &Fields::read(body.as_bytes()).unwrap()).unwrap();
    assert_eq!(*got.sequences[0].tokens, [128_000, 934, 87]);
}
