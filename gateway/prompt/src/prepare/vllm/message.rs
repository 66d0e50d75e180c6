//! Messages as vLLM hands them to the chat template (`chat_utils.parse_chat_messages`).

use std::borrow::Cow;

use minijinja::value::Value;

use super::options::refused;
use crate::TokenizeError;
use crate::json::{Json, JsonError};
use crate::template::{ContentFormat, python};

/// One message.
#[derive(Debug)]
pub(super) struct Message<'a> {
    pub role: Cow<'a, str>,
    pub content: Content<'a>,
    /// Further keys in the order vLLM sets them.
    extra: Vec<(&'static str, Value)>,
}

/// The content, by the template's format.
#[derive(Debug)]
pub(super) enum Content<'a> {
    Text(Cow<'a, str>),
    Parts(Vec<Part<'a>>),
}

/// A part of a content. Media have no place: a text model refuses them, and a media model's tokens depend on them.
#[derive(Debug)]
pub(super) enum Part<'a> {
    Text(Cow<'a, str>),
    ToolReference(Cow<'a, str>),
}

/// Takes the member `key` out of an object, the last one of that name.
pub(super) fn take<'a>(json: &mut Json<'a>, key: &str) -> Option<Json<'a>> {
    let Json::Dict(members) = json else { return None };
    let at = members.iter().rposition(|(k, _)| k == key)?;
    members.get_mut(at).map(|(_, v)| std::mem::replace(v, Json::Null))
}

impl<'a> Message<'a> {
    pub fn read(mut json: Json<'a>, format: ContentFormat) -> Result<Self, TokenizeError> {
        let Some(Json::Str(role)) = take(&mut json, "role") else {
            return Err(refused("a message without a role"));
        };
        let mut content = content(take(&mut json, "content").unwrap_or(Json::Null), format)?;
        let mut extra = Vec::new();
        if role == "assistant" {
            if let Some(calls) = take(&mut json, "tool_calls").filter(|c| !c.is_null()) {
                extra.extend(tool_calls(calls)?.map(|calls| ("tool_calls", calls)));
            }
            let reasoning = ["reasoning", "reasoning_content"]
                .iter()
                .find_map(|k| take(&mut json, k).filter(|r| !r.is_null()));
            match reasoning {
                None => (),
                Some(Json::Str(reasoning)) => {
                    let reasoning = Value::from(reasoning.as_ref());
                    // transformers adds `thinking` for templates that read it
                    extra.push(("reasoning", reasoning.clone()));
                    extra.push(("reasoning_content", reasoning.clone()));
                    extra.push(("thinking", reasoning));
                }
                Some(_) => return Err(refused("reasoning that is not a string")),
            }
        } else if role == "tool" {
            if let Some(id) = take(&mut json, "tool_call_id").filter(|id| !id.is_null()) {
                extra.push(("tool_call_id", python::value(id)));
            }
            content = plain_if_text(content);
        }
        for key in ["name", "task"] {
            if let Some(Json::Str(text)) = take(&mut json, key) {
                extra.push((key, Value::from(text.as_ref())));
            }
        }
        if role == "developer"
            && let Some(tools) = take(&mut json, "tools").filter(|t| !t.is_null())
        {
            extra.push(("tools", python::value(tools)));
        }
        Ok(Self { role, content, extra })
    }

    /// A system message.
    pub fn system(content: String) -> Self {
        Self { role: "system".into(), content: Content::Text(content.into()), extra: Vec::new() }
    }

    /// Makes a developer message a system message.
    pub fn into_system(mut self) -> Self {
        self.role = "system".into();
        self.extra.retain(|(key, _)| *key != "tools");
        self
    }

    /// Lets `tag` follow the last text of the content; the text it follows, `None` if there is no text.
    pub fn mark_end(&mut self, tag: &str) -> Option<String> {
        let text = match &mut self.content {
            Content::Text(text) => text,
            Content::Parts(parts) => parts.iter_mut().rev().find_map(|part| match part {
                Part::Text(text) => Some(text),
                Part::ToolReference(_) => None,
            })?,
        };
        let plain = text.to_string();
        text.to_mut().push_str(tag);
        Some(plain)
    }

    pub fn into_value(self) -> Value {
        let content = match self.content {
            Content::Text(text) => Value::from(text.as_ref()),
            Content::Parts(parts) => parts.into_iter().map(Part::into_value).collect(),
        };
        let known = [("role", Value::from(self.role.as_ref())), ("content", content)];
        Value::from_pairs(known.into_iter().chain(self.extra))
    }
}

impl Part<'_> {
    fn into_value(self) -> Value {
        let (kind, key, text) = match self {
            Self::Text(text) => ("text", "text", text),
            Self::ToolReference(name) => ("tool_reference", "name", name),
        };
        Value::from_pairs([("type", Value::from(kind)), (key, Value::from(text.as_ref()))])
    }
}

impl Content<'_> {
    /// The texts alone, joined as vLLM joins them when it merges system messages.
    pub fn joined(&self) -> String {
        match self {
            Self::Text(text) => text.to_string(),
            Self::Parts(parts) => {
                let texts: Vec<&str> = parts
                    .iter()
                    .filter_map(|part| match part {
                        Part::Text(text) => Some(text.as_ref()),
                        Part::ToolReference(_) => None,
                    })
                    .collect();
                texts.join("\n")
            }
        }
    }
}

fn content(json: Json<'_>, format: ContentFormat) -> Result<Content<'_>, TokenizeError> {
    let parts = match json {
        Json::Null => Vec::new(),
        Json::Str(text) if format == ContentFormat::String => return Ok(Content::Text(text)),
        Json::Str(text) => vec![Part::Text(text)],
        Json::List(items) => {
            items.into_iter().filter_map(|item| part(item).transpose()).collect::<Result<_, _>>()?
        }
        _ => return Err(refused("content that is neither text nor parts")),
    };
    if format == ContentFormat::OpenAi {
        return Ok(Content::Parts(parts));
    }
    let texts = parts.into_iter().map(|part| match part {
        Part::Text(text) | Part::ToolReference(text) => text,
    });
    let texts: Vec<_> = texts.filter(|text| !text.is_empty()).collect(); // an empty part leaves no line behind
    Ok(Content::Text(texts.join("\n").into()))
}

/// Most templates take only plain text as the content of a tool's answer.
fn plain_if_text(content: Content<'_>) -> Content<'_> {
    match &content {
        Content::Parts(parts) if parts.iter().all(|p| matches!(p, Part::Text(_))) => {
            Content::Text(content.joined().into())
        }
        _ => content,
    }
}

fn part(mut json: Json<'_>) -> Result<Option<Part<'_>>, TokenizeError> {
    if let Json::Str(text) = json {
        return Ok(Some(Part::Text(text)));
    }
    if json.get("uuid").is_some_and(|uuid| !uuid.is_null()) {
        return Err(refused("a content part with a uuid"));
    }
    let kind = take(&mut json, "type");
    let kind = kind.as_ref().and_then(Json::as_str).unwrap_or_default();
    let key = match kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" | "thinking" => kind,
        "tool_reference" => "name",
        _ => return Err(format!("a content part of type {kind:?}: only text has known tokens").into()),
    };
    match take(&mut json, key).unwrap_or(Json::Null) {
        Json::Null if matches!(kind, "text" | "refusal") => Ok(None),
        Json::Str(name) if kind == "tool_reference" => Ok(Some(Part::ToolReference(name))),
        Json::Str(text) => Ok(Some(Part::Text(text))),
        _ => Err(refused("a content part whose text is not a string")),
    }
}

/// Tool calls with their arguments parsed, for templates expect them as objects (`_postprocess_messages`). Keys come
/// in the order of the request schema. An empty list is as good as none.
fn tool_calls(json: Json<'_>) -> Result<Option<Value>, TokenizeError> {
    let Json::List(items) = json else { return Err(refused("tool_calls that are not a list")) };
    if items.is_empty() {
        return Ok(None);
    }
    items.into_iter().map(tool_call).collect::<Result<Vec<_>, _>>().map(|calls| Some(Value::from(calls)))
}

fn tool_call(mut json: Json<'_>) -> Result<Value, TokenizeError> {
    let Some(mut function @ Json::Dict(_)) = take(&mut json, "function") else {
        return Err(refused("a tool call without function"));
    };
    let arguments = match take(&mut function, "arguments") {
        Some(Json::Str(text)) => match Json::parse(&text) {
            Ok(arguments) => python::value(arguments),
            Err(JsonError::Syntax) => python::value(Json::Dict(Vec::new())),
            Err(e) => return Err(format!("arguments of a tool call: {e}").into()),
        },
        Some(arguments @ (Json::Dict(_) | Json::List(_))) => python::value(arguments),
        _ => python::value(Json::Dict(Vec::new())),
    };
    let mut inner = vec![("arguments", arguments)];
    inner.extend(take(&mut function, "name").map(|name| ("name", python::value(name))));
    let mut call = Vec::new();
    call.extend(take(&mut json, "id").map(|id| ("id", python::value(id))));
    call.push(("function", Value::from_pairs(inner)));
    call.extend(take(&mut json, "type").map(|kind| ("type", python::value(kind))));
    Ok(Value::from_pairs(call))
}
