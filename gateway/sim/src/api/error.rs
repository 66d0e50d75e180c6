//! Errors as vLLM words them.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// An error of the OpenAI API.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    param: Option<String>,
    message: String,
}

impl ApiError {
    /// A request that vLLM's own checks refuse.
    pub fn invalid(param: Option<&'static str>, message: impl Into<String>) -> Self {
        let (status, param) = (StatusCode::BAD_REQUEST, param.map(str::to_owned));
        Self { status, kind: "BadRequestError", param, message: message.into() }
    }

    /// A body that does not have the request's form.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self { kind: "Bad Request", ..Self::invalid(None, message) }
    }

    /// A body that is not JSON; `at` is where it stops being it.
    pub fn not_json(at: usize) -> Self {
        let message = format!(
            "1 validation error:\n  {{'type': 'json_invalid', 'loc': 'body.{at}', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {{'error': 'Expecting value'}}}}"
        );
        Self { param: Some(format!("body.{at}")), ..Self::malformed(message) }
    }

    /// A content type other than JSON.
    pub fn media_type() -> Self {
        Self::malformed("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
    }

    /// A model that is not served.
    pub fn no_model(asked: &str, served: &[String]) -> Self {
        let served = served.join(", ");
        let message = format!("The model `{asked}` does not exist. Valid aliases: {served}.");
        Self { status: StatusCode::NOT_FOUND, kind: "NotFoundError", param: Some("model".into()), message }
    }

    /// A prompt that the model cannot take.
    pub fn too_long(limit: usize, tokens: usize) -> Self {
        let message = format!(
            "This model's maximum context length is {limit} tokens. However, your prompt contains {tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value={tokens})"
        );
        Self::invalid(Some("input_tokens"), message)
    }

    /// An empty salt, or one that is no string.
    pub fn salt() -> Self {
        Self::invalid(
            Some("cache_salt"),
            "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
        )
    }

    /// No prompt.
    pub fn no_prompt() -> Self {
        Self::invalid(
            Some("prompt"),
            "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
        )
    }

    /// The engine died under the request.
    pub fn engine_dead() -> Self {
        Self::failed(
            StatusCode::INTERNAL_SERVER_ERROR,
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        )
    }

    /// Blocks that could not be fetched from the prefill engine, under `kv_load_failure_policy` "fail".
    pub fn transfer_failed() -> Self {
        Self::failed(StatusCode::INTERNAL_SERVER_ERROR, "Internal server error")
    }

    /// A status that a test asked for.
    pub fn failed(status: StatusCode, message: &str) -> Self {
        let kind = if status.is_client_error() { "BadRequestError" } else { "InternalServerError" };
        Self { status, kind, param: None, message: message.into() }
    }

    pub fn status(&self) -> u16 {
        self.status.as_u16()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let Self { status, kind, param, message } = self;
        let error = json!({ "message": message, "type": kind, "param": param, "code": status.as_u16() });
        (status, Json(json!({ "error": error }))).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn errors_are_worded_as_captured() {
        let cases = [
            ("err_badjson", ApiError::not_json(31)),
            ("err_model_404", ApiError::no_model("nope", &["tiny-qwen3".to_owned()])),
            ("err_text_plain", ApiError::media_type()),
            ("err_too_long", ApiError::too_long(8192, 9000)),
        ];
        for (name, error) in cases {
            let page = String::from_utf8(kvgate_tests::fixture(&format!("vllm/http/{name}.txt"))).unwrap();
            let page = page.replace('\r', "");
            let (head, body) = page.split_once("\n\n").unwrap();
            let response = error.into_response();
            assert!(head.starts_with(&format!("HTTP/1.1 {}", response.status().as_u16())), "{name}");
            let ours = axum::body::to_bytes(response.into_body(), 4096).await.unwrap();
            assert_eq!(String::from_utf8(ours.to_vec()).unwrap(), body.trim_end(), "{name}");
        }
    }
}
