//! Handing blocks over: both ends.

use super::ApiState;
use super::request::Asked;
use crate::config::Role;
use crate::transfer::Claim;
use axum::Json;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{Request, StatusCode, header};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;

/// Where a prefill engine is asked for blocks.
pub(crate) const PATH: &str = "/sim/transfer";
/// How long a transfer may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// Gives blocks away: 204, or 409 and what is wrong with the claim.
pub(crate) async fn give(
    State(state): State<Arc<ApiState>>,
    Json(claim): Json<Claim>,
) -> Result<StatusCode, (StatusCode, &'static str)> {
    let given = state.transfers.claim(&claim);
    given.map(|()| StatusCode::NO_CONTENT).map_err(|reason| (StatusCode::CONFLICT, reason))
}

/// The `kv_transfer_params` of an answer: `null` unless a prefill engine is asked for them and a block is full.
pub(crate) fn offer(state: &ApiState, asked: &Asked, id: &str) -> Value {
    let wanted = asked.transfer.get("do_remote_decode").and_then(Value::as_bool).unwrap_or(false);
    let (tokens, block_size) = (asked.prompt_tokens(), state.config.block_size as usize);
    let (Some(address), true) = (state.address.get(), wanted && tokens >= block_size) else {
        return Value::Null;
    };
    if state.config.role != Role::Prefill {
        return Value::Null;
    }
    let lease = Duration::from_millis(state.config.transfer_lease_ms);
    state.transfers.offer(id, asked.content(), tokens, block_size, lease, *address)
}

/// Fetches the blocks that a decode engine is told of. `false`: it is told of none, and prefills by itself.
///
/// # Errors
/// They are not to be had.
pub(crate) async fn fetch(state: &ApiState, asked: &Asked) -> Result<bool, String> {
    let told = asked.transfer.get("do_remote_prefill").and_then(Value::as_bool).unwrap_or(false);
    if state.config.role != Role::Decode || !told {
        return Ok(false);
    }
    let Some((claim, (host, port))) = Claim::read(&asked.transfer, asked.content()) else {
        tracing::warn!("kv_transfer_params lack what is needed to fetch blocks: prefilling");
        return Ok(false);
    };
    let body = serde_json::to_vec(&claim).map_err(|error| error.to_string())?;
    let fetched = tokio::time::timeout(PATIENCE, ask(&host, port, body)).await;
    fetched
        .map_err(|_| format!("{host}:{port} does not answer"))?
        .map_err(|error| error.to_string())
        .and_then(|(status, reason)| match status {
            StatusCode::NO_CONTENT => Ok(true),
            status => Err(format!("{host}:{port} says {status}: {reason}")),
        })
}

async fn ask(
    host: &str,
    port: u16,
    body: Vec<u8>,
) -> Result<(StatusCode, String), Box<dyn std::error::Error + Send + Sync>> {
    let stream = TcpStream::connect((host, port)).await?;
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    let connection = async {
        let _ = connection.await;
        std::future::pending().await
    };
    let request = Request::post(PATH)
        .header(header::HOST, format!("{host}:{port}"))
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body))?;
    let exchange = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let reason = to_bytes(Body::new(response.into_body()), 4096).await?;
        Ok((status, String::from_utf8_lossy(&reason).into_owned()))
    };
    tokio::select! {
        answer = exchange => answer,
        never = connection => never,
    }
}
