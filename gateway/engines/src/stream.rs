//! How event streams say that they are over, or that something went wrong: by the path they are asked for on.

use memchr::memmem;
use serde_json::{Value, json};

/// The API that an event stream belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI chat and completions: a chunk with a `finish_reason`, perhaps one with the usage, then `data: [DONE]`
    /// (<https://platform.openai.com/docs/api-reference/chat-streaming>).
    Completions,
    /// OpenAI responses: `response.completed`, `response.incomplete` or `response.failed` comes last
    /// (<https://platform.openai.com/docs/api-reference/responses-streaming>).
    Responses,
    /// Anthropic messages: `message_stop` comes last (<https://docs.anthropic.com/en/docs/build-with-claude/streaming>).
    Messages,
    /// Nothing is known of it: it ends as it likes.
    Other,
}

/// What an event says of the stream's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// Nothing.
    None,
    /// A choice is complete; more may follow.
    Finish,
    /// The answer is complete: what follows does not belong to it.
    End,
    /// The engine itself says that something went wrong.
    Error,
}

impl Dialect {
    /// That of a path, without its query.
    pub fn of(path: &str) -> Self {
        match path.strip_prefix("/v1").unwrap_or(path) {
            "/chat/completions" | "/completions" => Self::Completions,
            "/responses" => Self::Responses,
            "/messages" => Self::Messages,
            _ => Self::Other,
        }
    }

    /// What an event says, by its `event` (empty where it has none) and its `data`.
    pub fn mark(self, name: &[u8], data: &[u8]) -> Mark {
        // engines differ in whether they write it for the other two
        if self != Self::Other && data == b"[DONE]" {
            return Mark::End;
        }
        if self != Self::Other && name == b"error" {
            return Mark::Error;
        }
        match self {
            Self::Completions if begins(data, "error") => Mark::Error,
            Self::Completions if finishes(data) => Mark::Finish,
            Self::Responses if is_any(name, data, &RESPONSE_ENDS) => Mark::End,
            Self::Messages if is_any(name, data, &["message_stop"]) => Mark::End,
            _ => Mark::None,
        }
    }

    /// The event by which a client learns that its stream is broken, in the shape its library looks for: `code` is one
    /// of the gateway's, `kind` the type of OpenAI's errors.
    pub fn farewell(self, status: u16, kind: &str, code: &str, message: &str) -> String {
        let error = json!({"message": message, "type": kind, "param": null, "code": code});
        let data = match self {
            Self::Messages => {
                let kind = if status == 504 { "timeout_error" } else { "api_error" };
                json!({"type": "error", "error": {"type": kind, "message": message, "code": code}})
            }
            Self::Responses => {
                json!({"type": "error", "code": code, "message": message, "param": null, "error": error})
            }
            Self::Completions | Self::Other => json!({"error": error}),
        };
        format!("event: error\ndata: {data}\n\n")
    }
}

const RESPONSE_ENDS: [&str; 3] = ["response.completed", "response.incomplete", "response.failed"];

/// Whether the event is one of these: by its name, or where it has none, by the `type` of its data.
fn is_any(name: &[u8], data: &[u8], names: &[&str]) -> bool {
    if !name.is_empty() {
        return names.iter().any(|n| n.as_bytes() == name);
    }
    let typed = |data| serde_json::from_slice::<Value>(data).ok()?.get("type")?.as_str().map(str::to_owned);
    names.iter().any(|n| memmem::find(data, n.as_bytes()).is_some())
        && typed(data).is_some_and(|kind| names.contains(&kind.as_str()))
}

/// Whether an object's first member has this name, and a value.
fn begins(data: &[u8], name: &str) -> bool {
    let value = || {
        let rest = data.trim_ascii_start().strip_prefix(b"{")?.trim_ascii_start().strip_prefix(b"\"")?;
        let rest = rest.strip_prefix(name.as_bytes())?.strip_prefix(b"\"")?.trim_ascii_start();
        Some(rest.strip_prefix(b":")?.trim_ascii_start())
    };
    value().is_some_and(|value| !value.starts_with(b"null"))
}

/// Whether some `finish_reason` is a text. Within a JSON text its quotes would have backslashes before them.
fn finishes(data: &[u8]) -> bool {
    const NAME: &[u8] = b"\"finish_reason\"";
    memmem::find_iter(data, NAME).any(|at| {
        let rest = data.get(at + NAME.len()..).unwrap_or_default().trim_ascii_start();
        rest.strip_prefix(b":").is_some_and(|value| value.trim_ascii_start().starts_with(b"\""))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_their_dialects() {
        for (path, dialect) in [
            ("/v1/chat/completions", Dialect::Completions),
            ("/completions", Dialect::Completions),
            ("/v1/responses", Dialect::Responses),
            ("/v1/messages", Dialect::Messages),
            ("/v1/messages/count_tokens", Dialect::Other),
            ("/v1/embeddings", Dialect::Other),
        ] {
            assert_eq!(Dialect::of(path), dialect, "{path}");
        }
    }

    #[test]
    fn ends_are_told_from_what_only_looks_like_them() {
        use Dialect::{Completions, Messages, Other, Responses};
        for (dialect, name, data, mark) in [
            (Completions, "", "[DONE]", Mark::End),
            (
                Completions,
                "",
                r#"{"choices":[{"delta":{"content":"[DONE]"},"finish_reason":null}]}"#,
                Mark::None,
            ),
            (Completions, "", r#"{"choices":[{"text":"\"finish_reason\": \"stop\""}]}"#, Mark::None),
            (Completions, "", r#"{"choices":[{"finish_reason" : "stop"}]}"#, Mark::Finish),
            (
                Completions,
                "",
                r#"{"choices":[{"finish_reason":null},{"finish_reason":"length"}]}"#,
                Mark::Finish,
            ),
            (Completions, "", r#" { "error" : {"message":"no"}}"#, Mark::Error),
            (Completions, "", r#"{"error":null,"choices":[]}"#, Mark::None),
            (Completions, "", r#"{"choices":[{"delta":{"content":"{\"error\":1}"}}]}"#, Mark::None),
            (Completions, "error", "{}", Mark::Error),
            (Completions, "message_stop", "{}", Mark::None),
            (Responses, "response.completed", "{}", Mark::End),
            (Responses, "response.incomplete", "{}", Mark::End),
            (Responses, "response.created", r#"{"type":"response.completed"}"#, Mark::None),
            (Responses, "", r#"{"sequence_number":9,"type":"response.failed"}"#, Mark::End),
            (
                Responses,
                "",
                r#"{"type":"response.output_text.delta","delta":"response.completed"}"#,
                Mark::None,
            ),
            (Messages, "message_stop", r#"{"type":"message_stop"}"#, Mark::End),
            (Messages, "", r#"{"type":"message_stop"}"#, Mark::End),
            (Messages, "content_block_delta", r#"{"text":"message_stop"}"#, Mark::None),
            (Messages, "error", r#"{"type":"error"}"#, Mark::Error),
            (Messages, "", "[DONE]", Mark::End),
            (Other, "", "[DONE]", Mark::None),
            (Other, "error", "{}", Mark::None),
        ] {
            assert_eq!(dialect.mark(name.as_bytes(), data.as_bytes()), mark, "{dialect:?} {name} {data}");
        }
    }

    #[test]
    fn farewells_are_one_event_each() {
        for dialect in [Dialect::Completions, Dialect::Responses, Dialect::Messages, Dialect::Other] {
            let event = dialect.farewell(502, "server_error", "engine_error", "it \"broke\"\noff");
            let data = event.strip_prefix("event: error\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
            assert!(!data.contains('\n'));
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(data["error"]["code"], "engine_error");
            assert_eq!(data["error"]["message"], "it \"broke\"\noff");
            let typed = matches!(dialect, Dialect::Responses | Dialect::Messages);
            assert_eq!(data["type"] == "error", typed, "{dialect:?}");
        }
    }
}
