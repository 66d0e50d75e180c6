//! An edge before an app that tells what it was asked.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use kvgate_edge::{Config, Edge, Http2, Listener, Opening, Stats, h1};
use pingora_core::apps::{HttpPersistentSettings, HttpServerApp, ReusedHttpStream};
use pingora_core::protocols::http::ServerSession;
use pingora_core::server::ShutdownWatch;
use pingora_http::ResponseHeader;
use tokio::sync::Semaphore;

/// Bytes of the answers to `/deaf`.
pub const LONG: usize = 256 * 1024;

/// Requests, in order: method, target in origin form, and body.
pub struct App {
    pub asked: Mutex<Vec<String>>,
    /// Requests to `/wait`, which look out for their client's leaving, and to `/deaf`, which read nothing, that wait.
    pub waiting: AtomicUsize,
    /// Of them, those whose client has left.
    pub left: AtomicUsize,
    /// One permit for each that may go on.
    pub go: Semaphore,
}

impl App {
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.asked.lock().unwrap())
    }
}

async fn answer(session: &mut ServerSession, status: u16, fields: &[(&'static str, &str)], body: &str) {
    let mut head = ResponseHeader::build(status, None).unwrap();
    head.insert_header("Content-Length", body.len()).unwrap();
    for (name, value) in fields {
        head.insert_header(*name, *value).unwrap();
    }
    let _ = session.write_response_header(Box::new(head)).await;
    let _ = session.write_response_body(Bytes::from(body.to_owned()), true).await;
}

#[async_trait]
impl HttpServerApp for App {
    async fn process_new_http(
        self: &Arc<Self>,
        mut session: ServerSession,
        shutdown: &ShutdownWatch,
    ) -> Option<ReusedHttpStream> {
        assert!(session.read_request().await.unwrap(), "a request was promised");
        if *shutdown.borrow() {
            session.set_keepalive(None);
        }
        let head = session.req_header();
        let path = head.uri.path_and_query().map_or_else(String::new, |path| path.as_str().to_owned());
        let path = if path.is_empty() { String::from_utf8_lossy(head.raw_path()).into_owned() } else { path };
        let method = head.method.clone();
        if path == "/continue" {
            session.write_continue_response().await.unwrap();
        }
        let mut body = Vec::new();
        loop {
            match session.read_request_body().await {
                Ok(Some(piece)) => body.extend_from_slice(&piece),
                Ok(None) => break,
                Err(e) => {
                    let cause = e.root_cause().downcast_ref::<std::io::Error>();
                    if cause.is_some_and(|e| e.kind() == std::io::ErrorKind::InvalidData) {
                        session.set_keepalive(None);
                        let text = kvgate_edge::error_json(400, "bad_request", "the body is malformed");
                        answer(&mut session, 400, &[("x-request-id", "in-app")], &text).await;
                        session.shutdown().await;
                    }
                    return None;
                }
            }
        }
        self.asked.lock().unwrap().push(format!("{method} {path} {}", String::from_utf8_lossy(&body)));
        if path == "/wait" {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            tokio::select! {
                permit = self.go.acquire() => permit.unwrap().forget(),
                _ = session.read_body_or_idle(true) => {
                    self.left.fetch_add(1, Ordering::SeqCst);
                    return None;
                }
            }
        }
        if path == "/ws" {
            let head = ResponseHeader::build(101, None).unwrap();
            session.write_response_header(Box::new(head)).await.unwrap();
            while let Ok(Some(piece)) = session.read_request_body().await {
                session.write_response_body(piece, false).await.unwrap();
            }
            return None;
        }
        if path == "/deaf" {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            self.go.acquire().await.unwrap().forget();
            answer(&mut session, 200, &[], &"x".repeat(LONG)).await;
        } else {
            answer(&mut session, 200, &[], "ok").await;
        }
        let settings = HttpPersistentSettings::for_session(&session);
        let reused = session.finish().await.ok().flatten()?;
        Some(ReusedHttpStream::from_reusable_stream(reused, settings))
    }
}

pub struct Server {
    pub address: SocketAddr,
    pub app: Arc<App>,
    pub edge: Edge,
    pub stats: Arc<Stats>,
    /// The codes of refusals.
    pub refused: Arc<Mutex<Vec<&'static str>>>,
}

/// Limits that no test reaches unless it sets one of them.
pub fn config() -> Config {
    Config {
        connections: 10_000,
        connections_per_address: 0,
        head: Duration::from_secs(120),
        keep_alive: Duration::from_secs(120),
        requests: h1::Limits::default(),
        http2: Http2::default(),
    }
}

pub fn start(config: Config) -> Server {
    let socket = kvgate_edge::bind("127.0.0.1:0".parse().unwrap(), 1024).unwrap();
    let address = socket.local_addr().unwrap();
    let app = Arc::new(App {
        asked: Mutex::default(),
        waiting: AtomicUsize::new(0),
        left: AtomicUsize::new(0),
        go: Semaphore::new(0),
    });
    let refused: Arc<Mutex<Vec<&'static str>>> = Arc::default();
    let stats = Arc::new(Stats::new(["edge"]));
    let listeners = vec![Listener { name: "edge".into(), socket, opening: Opening::default() }];
    let seen = refused.clone();
    let observe = move |refusal: kvgate_edge::Refusal| {
        seen.lock().unwrap().push(refusal.code.name);
        "by-edge".to_owned()
    };
    let edge = Edge::start(app.clone(), listeners, config, stats.clone(), Arc::new(observe)).unwrap();
    Server { address, app, edge, stats, refused }
}

/// Waits until something holds.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}
