//! What the files beside `tokenizer.json` say.

use minijinja::value::Value;
use serde_json::Value as Json;

/// The variables that templates see for special tokens: the named ones, and whatever else is called `..._token`
/// (transformers 5).
pub(super) fn special_tokens(settings: &Json) -> Vec<(String, Value)> {
    let named = settings.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
    let extra = settings.get("extra_special_tokens").and_then(Json::as_object).into_iter().flatten();
    named.chain(extra).filter_map(|(name, token)| Some((name.clone(), Value::from(text(token)?)))).collect()
}

/// The texts of all special tokens that the configuration names.
pub(super) fn special_texts(settings: &Json) -> impl Iterator<Item = &str> {
    let named = settings.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
    let listed = ["added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"];
    let listed = listed.into_iter().filter_map(|name| settings.get(name)).flat_map(|list| match list {
        Json::Array(items) => items.iter().collect::<Vec<_>>(),
        Json::Object(members) => members.values().collect(),
        _ => Vec::new(),
    });
    named.map(|(_, token)| token).chain(listed).filter_map(text).filter(|text| !text.is_empty())
}

/// A special token: a string, or an object that holds it.
fn text(token: &Json) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// The end-of-text token.
pub(super) fn end_of_text(settings: &Json) -> Option<&str> {
    text(settings.get("eos_token")?)
}

/// The templates of a configuration, by name: one text, or a list of named ones.
pub(super) fn templates(settings: &Json) -> Vec<(String, String)> {
    match settings.get("chat_template") {
        Some(Json::String(source)) => vec![("default".into(), source.clone())],
        Some(Json::Array(named)) => named
            .iter()
            .filter_map(|t| {
                Some((t.get("name")?.as_str()?.to_owned(), t.get("template")?.as_str()?.to_owned()))
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// The size of the engine's vocabulary, if `config.json` tells it.
pub(super) fn vocabulary(model: &Json) -> Option<u32> {
    let size = |json: &Json| json.get("vocab_size")?.as_u64()?.try_into().ok();
    size(model).or_else(|| size(model.get("text_config")?))
}

/// Why chats to this model are not prepared: vLLM renders some families in code, whatever their template says.
pub(super) fn rendered_in_code(model: &Json) -> Option<String> {
    let family = model.get("model_type")?.as_str()?;
    let in_code = ["gpt_oss", "deepseek_v32", "deepseek_v4", "kimi_k3", "inkling"];
    in_code.contains(&family).then(|| format!("vLLM renders chats of {family} in code, not by template"))
}

/// Does the tokenizer treat the start of a text differently (`"prepend_scheme": "first"`)?
pub(super) fn is_positional(canonical: &str) -> bool {
    let parts: Result<std::collections::HashMap<&str, &serde_json::value::RawValue>, _> =
        serde_json::from_str(canonical);
    let Ok(parts) = parts else { return true };
    let first = |json: &Json| {
        let mut stack = vec![json];
        while let Some(json) = stack.pop() {
            match json {
                Json::String(s) if s.eq_ignore_ascii_case("first") => return true,
                Json::Array(items) => stack.extend(items),
                Json::Object(members) => stack.extend(members.values()),
                _ => (),
            }
        }
        false
    };
    ["normalizer", "pre_tokenizer"]
        .iter()
        .filter_map(|part| parts.get(part))
        .any(|raw| serde_json::from_str(raw.get()).map_or(true, |json| first(&json)))
}
