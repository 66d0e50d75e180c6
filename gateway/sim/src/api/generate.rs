//! Completions and chat.

use super::ApiState;
use super::answer::{Choice, Shape, Usage};
use super::error::ApiError;
use super::request::{Asked, Kind, is_json};
use super::transfer;
use crate::engine::Job;
use crate::fault::{Fault, Gate, Reset};
use crate::log::{Record, Served};
use crate::scheduler::Sampled;
use crate::server::NoAnswer;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use serde_json::Value;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;
use xxhash_rust::xxh3::xxh3_64;

pub(crate) async fn completions(State(state): State<Arc<ApiState>>, request: Request) -> Response {
    generate(state, Kind::Completions, request).await
}

pub(crate) async fn chat(State(state): State<Arc<ApiState>>, request: Request) -> Response {
    generate(state, Kind::Chat, request).await
}

async fn generate(state: Arc<ApiState>, kind: Kind, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let Ok(body) = to_bytes(body, state.max_body).await else {
        return ApiError::failed(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large").into_response();
    };
    let request_id = head.headers.get("x-request-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
    let id = format!("{prefix}-{}", request_id.clone().unwrap_or_else(|| state.next_id()));
    let record = Arc::new(state.log.begin(Served {
        id: id.clone(),
        request_id,
        path: kind.path().into(),
        body_bytes: body.len(),
        body_hash: xxh3_64(&body),
        body: Some(body.clone()),
        ..Served::default()
    }));
    let fault = state.faults.take(&head.headers);
    tokio::time::sleep(Duration::from_millis(fault.delay_ms)).await;
    if let Some(status) = fault.status {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut answer = refuse(&record, ApiError::failed(status, "a fault that was asked for"));
        let retry = fault.retry_after.map(|seconds| (header::RETRY_AFTER, HeaderValue::from(seconds)));
        answer.headers_mut().extend(retry);
        return answer;
    }
    let outcome =
        if is_json(&head.headers) { read(&state, kind, body).await } else { Err(ApiError::media_type()) };
    let mut asked = match outcome {
        Ok(asked) => asked,
        Err(error) => return refuse(&record, error),
    };
    record.update(|served| {
        served.model = Some(asked.model.clone());
        served.prompt_tokens = asked.prompt_tokens();
    });
    match transfer::fetch(&state, &asked).await {
        Ok(received) => asked.received = received,
        Err(error) => {
            tracing::warn!(error, "blocks were not handed over");
            return refuse(&record, ApiError::transfer_failed());
        }
    }
    let Some(tokens) = submit(&state, &asked).await else { return refuse(&record, ApiError::engine_dead()) };
    let shape = Shape {
        kind,
        id,
        created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        model: asked.model.clone(),
        fingerprint: format!("vllm-{}-sim", state.config.version),
    };
    let reset = head.extensions.get::<Reset>().cloned().unwrap_or_default();
    let choices = vec![Choice::default(); asked.choices()];
    let answer = Answer { choices, state, asked, shape, record, tokens, reset };
    if answer.asked.stream { answer.stream(fault).await } else { answer.whole(fault).await }
}

fn refuse(record: &Record, error: ApiError) -> Response {
    record.update(|served| served.status = error.status());
    record.finish();
    error.into_response()
}

/// Reading means tokenising: off the runtime's threads.
async fn read(state: &Arc<ApiState>, kind: Kind, body: Bytes) -> Result<Asked, ApiError> {
    let state = state.clone();
    let read = tokio::task::spawn_blocking(move || Asked::read(&state, kind, &body)).await;
    read.unwrap_or_else(|_| Err(ApiError::engine_dead()))
}

/// Hands the choices to the engine; `None` when it is gone.
async fn submit(state: &ApiState, asked: &Asked) -> Option<mpsc::Receiver<(usize, Sampled)>> {
    let (sender, tokens) = mpsc::channel(asked.all_tokens().max(1));
    for choice in 0..asked.choices() {
        let request = asked.request(choice);
        let bytes: Vec<u8> = request.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let seed = xxh3_64(&bytes) ^ state.config.seed.wrapping_add((choice % asked.n) as u64);
        state.engine.submit(Job { request, seed, choice, tokens: sender.clone() }).await.then_some(())?;
    }
    Some(tokens)
}

/// An answer on its way. Dropping it ends the requests.
struct Answer {
    state: Arc<ApiState>,
    asked: Asked,
    shape: Shape,
    record: Arc<Record>,
    choices: Vec<Choice>,
    tokens: mpsc::Receiver<(usize, Sampled)>,
    /// Of its connection.
    reset: Reset,
}

impl Answer {
    fn done(&self) -> bool {
        self.choices.iter().all(|choice| choice.done)
    }

    /// The next token; `None` when the engine died.
    async fn next(&mut self) -> Option<(usize, Sampled)> {
        let (index, token) = self.tokens.recv().await?;
        let choice = self.choices.get_mut(index)?;
        choice.text.push_str(self.state.words.text(token.token));
        choice.tokens.push(token.token);
        choice.cached_tokens = token.cached_tokens;
        choice.received_tokens = token.received_tokens;
        choice.done = token.last;
        let usage = self.usage();
        self.record.update(|served| {
            served.cached_tokens = usage.cached_tokens;
            served.received_tokens = usage.received_tokens;
            served.output_tokens = usage.completion_tokens;
        });
        Some((index, token))
    }

    fn usage(&self) -> Usage {
        Usage::of(&self.asked, &self.choices, self.state.config.block_size as usize)
    }

    async fn whole(mut self, fault: Fault) -> Response {
        while !self.done() {
            if self.next().await.is_none() {
                return refuse(&self.record, ApiError::engine_dead());
            }
        }
        let handed = if fault.no_params {
            Value::Null
        } else {
            transfer::offer(&self.state, &self.asked, &self.shape.id)
        };
        let body: Bytes =
            self.shape.whole(&self.asked, &self.choices, self.usage(), handed).to_string().into();
        if fault.no_answer {
            return no_answer(fault, &self.reset);
        }
        let kind = HeaderValue::from_static("application/json");
        let head = [(header::CONTENT_TYPE, kind), (header::CONTENT_LENGTH, HeaderValue::from(body.len()))];
        self.record.update(|served| served.status = 200);
        let half_way = |after: Option<usize>| after.map(|_| 1);
        let fault = Fault {
            die_after: half_way(fault.die_after),
            stall_after: half_way(fault.stall_after),
            end_after: None,
            die_after_bytes: fault.die_after_bytes.filter(|after| *after < body.len()),
            ..fault
        };
        if !fault.cuts() {
            self.record.finish();
            return (head, body).into_response();
        }
        let half = body.len() / 2;
        let parts = stream::iter([body.slice(..half), body.slice(half..)]).map(Ok);
        (head, Body::from_stream(cut(parts, Gate::new(fault, self.reset), self.record))).into_response()
    }

    /// The head goes out with the first token, as from the engine.
    async fn stream(mut self, fault: Fault) -> Response {
        let mut parts = VecDeque::new();
        if !self.advance(&mut parts).await {
            return refuse(&self.record, ApiError::engine_dead());
        }
        if fault.no_answer {
            return no_answer(fault, &self.reset);
        }
        let (record, gate) = (self.record.clone(), Gate::new(fault, self.reset.clone()));
        record.update(|served| served.status = 200);
        let events = stream::unfold((self, parts), move |(mut answer, mut parts)| async move {
            if parts.is_empty() && answer.done() {
                return None;
            }
            if parts.is_empty() && !answer.advance(&mut parts).await {
                return Some((Err(io::Error::other("the engine died")), (answer, parts)));
            }
            let part = parts.pop_front()?;
            if parts.is_empty() && answer.done() && !fault.cuts() {
                answer.record.finish();
            }
            Some((Ok(part), (answer, parts)))
        });
        let kind = [(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"))];
        let body = if fault.cuts() {
            Body::from_stream(cut(events, gate, record))
        } else {
            Body::from_stream(events)
        };
        (kind, body).into_response()
    }

    /// Adds the events of the next token to `parts`; `false` when the engine died.
    async fn advance(&mut self, parts: &mut VecDeque<Bytes>) -> bool {
        let Some((index, token)) = self.next().await else { return false };
        let Sampled { token: id, position, last, .. } = token;
        if self.asked.kind == Kind::Chat && position == 0 {
            parts.push_back(event(&self.shape.role(&self.asked, index)));
        }
        let text = self.state.words.text(id);
        parts.push_back(event(&self.shape.token(&self.asked, index, text, id, position, last)));
        if self.done() {
            if self.asked.include_usage {
                parts.push_back(event(&self.shape.usage(self.usage())));
            }
            parts.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        }
        true
    }
}

/// An answer's parts as far as the fault lets them through; `record` ends well only if all of them were sent.
fn cut(
    parts: impl Stream<Item = io::Result<Bytes>> + Send + 'static,
    gate: Gate,
    record: Arc<Record>,
) -> impl Stream<Item = io::Result<Bytes>> + Send {
    stream::unfold((Box::pin(parts), gate, record), |(mut parts, mut gate, record)| async {
        let part = match gate.open().await {
            Ok(true) => parts.next().await,
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        };
        match part {
            Some(part) => Some((part.map(|part| gate.pass(part)), (parts, gate, record))),
            None => {
                record.finish();
                None
            }
        }
    })
}

/// A closed connection; the request counts as aborted.
fn no_answer(fault: Fault, reset: &Reset) -> Response {
    if fault.reset {
        reset.set();
    }
    let mut answer = Response::default();
    answer.extensions_mut().insert(NoAnswer);
    answer
}

fn event(chunk: &Value) -> Bytes {
    format!("data: {chunk}\n\n").into()
}
