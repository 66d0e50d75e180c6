//! The admin surface: metrics, health, and a look at the inventory.

mod engines;
mod health;
mod inventory;
mod metrics;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use serde_json::json;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::world::World;

/// The surface, served until it is closed or the runtime ends.
pub struct Admin {
    close: Arc<Notify>,
    served: JoinHandle<std::io::Result<()>>,
}

impl Admin {
    /// Serves it on this listener, on the runtime that this is called on.
    pub fn serve(listener: tokio::net::TcpListener, world: Arc<World>, token: Option<String>) -> Self {
        let close = Arc::new(Notify::new());
        let told = close.clone();
        let serve = axum::serve(listener, router(world, token));
        let serve = serve.with_graceful_shutdown(async move { told.notified().await });
        Self { close, served: tokio::spawn(serve.into_future()) }
    }

    /// Lets nobody in any more, closes the connections that are idle, and the others after the answer that they wait
    /// for; returns when all are closed, or so much later.
    pub async fn close(&mut self, most: Duration) {
        self.close.notify_one();
        let _ = timeout(most, &mut self.served).await;
    }
}

fn router(world: Arc<World>, token: Option<String>) -> Router {
    let pages = Router::new()
        .route("/metrics", get(metrics::page))
        .route("/netlox/v1/metrics", get(metrics::page))
        .route("/netlox/v1/config/ai/kv/inventory", get(inventory::page))
        .route("/decisions", get(health::decisions))
        .route("/readyz", get(health::ready))
        .route("/engines", get(engines::list))
        .route("/engines/{address}", put(engines::set))
        .with_state(world)
        .layer(middleware::from_fn_with_state(Arc::new(token), authorize));
    // whoever restarts the process needs no token to see that it lives
    let all = pages.route("/livez", get(|| async { "ok\n" }));
    all.fallback(|| async { error(StatusCode::NOT_FOUND, "no such page") }).method_not_allowed_fallback(
        || async {
            error(
                StatusCode::METHOD_NOT_ALLOWED,
                "this page is read with GET; only /engines/ADDRESS is set, with PUT",
            )
        },
    )
}

/// Asks for the token, if there is one.
async fn authorize(State(token): State<Arc<Option<String>>>, request: Request, next: Next) -> Response {
    if let Some(token) = token.as_deref() {
        let mut sent = request.headers().get_all(header::AUTHORIZATION).iter();
        let good = match (sent.next(), sent.next()) {
            (Some(only), None) => {
                // the scheme's case does not matter (RFC 9110 section 11.1)
                let sent = only.as_bytes().split_at_checked(b"Bearer ".len());
                sent.is_some_and(|(scheme, sent)| {
                    scheme.eq_ignore_ascii_case(b"Bearer ") && equal(sent, token.as_bytes())
                })
            }
            _ => false,
        };
        if !good {
            let refused = error(StatusCode::UNAUTHORIZED, "send the token as Authorization: Bearer");
            return ([(header::WWW_AUTHENTICATE, "Bearer")], refused).into_response();
        }
    }
    next.run(request).await
}

/// Compares in a time that depends on the lengths alone.
fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// An error as the reference system words it.
fn error(status: StatusCode, message: &str) -> Response {
    (status, axum::Json(json!({"error": message}))).into_response()
}
