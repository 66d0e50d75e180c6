//! Prompts of live vLLM engines: same text, same ids.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::LazyLock;

use kvgate_prompt::{Fields, Model, PromptError, TokenizersConfig, prompt};
use serde_json::Value;

static QWEN: LazyLock<Model> = LazyLock::new(|| {
    Model::load(&kvgate_tests::tokenizers().join("tiny-qwen3"), &TokenizersConfig::default()).unwrap()
});

fn load(folder: &Path) -> Model {
    Model::load(folder, &TokenizersConfig::default()).unwrap()
}

/// One id list for a single prompt, a list of lists for several.
fn id_lists(ids: &Value) -> Vec<Vec<u32>> {
    let list = |v: &Value| {
        v.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
    };
    if ids[0].is_array() { ids.as_array().unwrap().iter().map(list).collect() } else { vec![list(ids)] }
}

/// Runs one record; what it compared.
fn run(model: &Model, name: &str, path: &str, record: &Value, body: &Value) -> [usize; 3] {
    let body = serde_json::to_vec(body).unwrap();
    let fields = Fields::read(&body).unwrap();
    let result = prompt(model, path, &fields);
    if record["status"] != 200 {
        assert!(matches!(result, Err(PromptError::Tokenize(_) | PromptError::Text(_))), "{name}: {result:?}");
        return [1, 0, 0];
    }
    if path != "/v1/completions" && path != "/v1/chat/completions" {
        assert_eq!(result.unwrap_err().miss(), "text_empty", "{name}");
        return [0, 1, 0];
    }
    let got = result.unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(
        got.cache_salt.as_deref(),
        serde_json::from_slice::<Value>(&body).unwrap()["cache_salt"].as_str()
    );
    let Some(want) = ids_of(record) else { return [0, 0, 0] };
    assert_eq!(got.sequences.len(), want.len(), "{name}");
    for (sequence, want) in got.sequences.iter().zip(&want) {
        assert_eq!(*sequence.tokens, **want, "{name}");
    }
    [0, 0, 1]
}

/// The engine's own prompt ids, wherever the record has them.
fn ids_of(record: &Value) -> Option<Vec<Vec<u32>>> {
    if !record["prompt_token_ids"].is_null() {
        return Some(id_lists(&record["prompt_token_ids"]));
    }
    let response: Value = serde_json::from_str(record["response"].as_str()?).ok()?;
    let ids = [&response["prompt_token_ids"], &response["choices"][0]["prompt_token_ids"]];
    ids.into_iter().find(|ids| ids.is_array()).map(id_lists)
}

fn run_all(model: &Model, file: &str, records: &Value) -> [usize; 3] {
    let mut counts = [0; 3];
    for record in records.as_array().unwrap() {
        let request = if record["request"].is_object() { &record["request"] } else { record };
        let name = format!("{file} {}", record["name"].as_str().unwrap());
        let ran = run(model, &name, request["path"].as_str().unwrap(), record, &request["body"]);
        for (count, n) in counts.iter_mut().zip(ran) {
            *count += n;
        }
        check_text(model, &name, record, request);
    }
    counts
}

/// The rendered text, where the record has it decoded.
fn check_text(model: &Model, name: &str, record: &Value, request: &Value) {
    let want: Vec<&str> = match &record["decoded_prompt"] {
        Value::String(s) => vec![s],
        Value::Array(a) => a.iter().map(|s| s.as_str().unwrap()).collect(),
        _ => return,
    };
    let body = serde_json::to_vec(&request["body"]).unwrap();
    let got = prompt(model, request["path"].as_str().unwrap(), &Fields::read(&body).unwrap()).unwrap();
    for (sequence, want) in got.sequences.iter().zip(want) {
        let Some(text) = &sequence.text else { continue };
        let truncated = !request["body"]["truncate_prompt_tokens"].is_null();
        // decoding gives back the normalised text, and the special tokens around it
        let normal = |s: &str| unicode_nfc(s.trim_start_matches("<|begin_of_text|>"));
        if truncated {
            assert!(normal(text).ends_with(&normal(want)), "{name}");
        } else {
            assert_eq!(normal(text), normal(want), "{name}");
        }
    }
}

/// The few compositions that the records hold.
fn unicode_nfc(s: &str) -> String {
    s.replace("e\u{301}", "é")
        .replace("A\u{30a}", "Å")
        .replace('\u{212b}', "Å")
        .replace("\u{1112}\u{1161}\u{11ab}", "한")
}

#[test]
fn qwen3_records() {
    let run = |file: &str| run_all(&QWEN, file, &kvgate_tests::fixture_json(&format!("vllm/{file}.json")));
    // refused, other paths, ids compared
    assert_eq!(run("e2e_bs16_sha256cbor_seed0"), [2, 0, 55]);
    assert_eq!(run("e2e_extra_bs16"), [3, 2, 3]);
    assert_eq!(run("e2e_extra2_bs16"), [1, 0, 9]);
}

#[test]
fn llama3_records() {
    let (Some(folder), Some(records)) = (
        kvgate_tests::golden_model("tiny-llama3"),
        kvgate_tests::golden("vllm/e2e_llama3_bs16_sha256cbor_seed0.json"),
    ) else {
        return;
    };
    assert_eq!(run_all(&load(&folder), "llama3", &serde_json::from_slice(&records).unwrap()), [0, 0, 22]);
}

#[test]
fn tokenize_endpoint() {
    for (file, path, body) in [
        ("post_tokenize_chat", "/v1/chat/completions", r#"{"messages":[{"role":"user","content":"Hello"}]}"#),
        ("post_tokenize_prompt", "/v1/completions", r#"{"prompt":"Hello, world"}"#),
    ] {
        let answer = String::from_utf8(kvgate_tests::fixture(&format!("vllm/http/{file}.txt"))).unwrap();
        let answer: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
        let got = prompt(&QWEN, path, &Fields::read(body.as_bytes()).unwrap()).unwrap();
        assert_eq!(*got.sequences[0].tokens, *id_lists(&answer["tokens"])[0], "{file}");
    }
}
