//! A client of the OpenAI API that measures what its users wait for.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// What came of a streamed chat request.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// Tokens of the prompt, as the engine counts them.
    pub prompt_tokens: u64,
    /// Those of them that it held.
    pub cached_tokens: u64,
    /// To the first token.
    pub ttft: Duration,
    /// `x-kvgate-endpoint`.
    pub endpoint: String,
    /// `x-kvgate-tier`.
    pub tier: String,
    /// Why the tier before it passed.
    pub miss: Option<String>,
    /// `x-kvgate-prefill-endpoint`, where the prompt went elsewhere.
    pub prefill: String,
    /// `x-kvgate-prefill-tier`.
    pub prefill_tier: String,
    /// `x-request-id`.
    pub id: String,
}

/// Asks for a chat completion as a stream.
///
/// # Errors
/// In words.
pub async fn chat(
    gateway: SocketAddr,
    model: &str,
    messages: &[Value],
    conversation: Option<&str>,
) -> Result<Answer, String> {
    let body = serde_json::json!({
        "model": model, "messages": messages, "stream": true, "max_tokens": 16, "temperature": 0,
        "stream_options": {"include_usage": true},
    });
    let asked = Instant::now();
    let stream = TcpStream::connect(gateway).await.map_err(|e| e.to_string())?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
    let connection = tokio::spawn(connection);
    let mut request = Request::post("/v1/chat/completions")
        .header(header::HOST, gateway.to_string())
        .header(header::CONTENT_TYPE, "application/json")
        .header("x-kvgate-explain", "1");
    if let Some(conversation) = conversation {
        request = request.header("x-conversation-id", conversation);
    }
    let request = request.body(Full::new(Bytes::from(body.to_string()))).map_err(|e| e.to_string())?;
    let mut response = sender.send_request(request).await.map_err(|e| e.to_string())?;
    let named = |name: &str| {
        response.headers().get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned()
    };
    let mut answer = Answer {
        endpoint: named("x-kvgate-endpoint"),
        tier: named("x-kvgate-tier"),
        prefill: named("x-kvgate-prefill-endpoint"),
        prefill_tier: named("x-kvgate-prefill-tier"),
        id: named("x-request-id"),
        miss: last_miss(&named("x-kvgate-decision")),
        ..Answer::default()
    };
    let status = response.status();
    let (mut events, mut first) = (Vec::new(), None);
    while let Some(frame) = response.frame().await {
        let frame = frame.map_err(|e| e.to_string())?;
        if let Some(data) = frame.data_ref() {
            first.get_or_insert_with(|| asked.elapsed());
            events.extend_from_slice(data);
        }
    }
    connection.abort();
    let text = String::from_utf8_lossy(&events);
    if status != 200 {
        return Err(format!("{status}: {text}"));
    }
    answer.ttft = first.unwrap_or_default();
    read(&text, &mut answer)?;
    Ok(answer)
}

/// The miss before the choice, in a decision record.
fn last_miss(decision: &str) -> Option<String> {
    let decision: Value = serde_json::from_str(decision).ok()?;
    let steps = decision["attempts"].as_array()?.last()?["steps"].as_array()?;
    steps.iter().rev().find_map(|step| step["miss"].as_str().map(str::to_owned))
}

/// Reads the events of a stream.
fn read(text: &str, answer: &mut Answer) -> Result<(), String> {
    let mut done = false;
    for data in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if data == "[DONE]" {
            done = true;
            continue;
        }
        let event: Value = serde_json::from_str(data).map_err(|e| format!("{e}: {data}"))?;
        if event.get("error").is_some() {
            return Err(data.to_owned());
        }
        if let Some(piece) = event["choices"][0]["delta"]["content"].as_str() {
            answer.text.push_str(piece);
        }
        if let Some(prompt) = event["usage"]["prompt_tokens"].as_u64() {
            answer.prompt_tokens = prompt;
            answer.cached_tokens =
                event["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        }
    }
    if done { Ok(()) } else { Err("the stream ended without [DONE]".into()) }
}
