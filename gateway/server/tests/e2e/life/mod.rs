//! The process from its start to its end, as an operator and a service manager have it.

mod drain;
mod ready;
mod reloads;
mod resources;
mod upgrade;

use std::os::unix::net::UnixDatagram;

use kvgate_sim::Sim;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{
    Answer, Connection, Gateway, MODEL, PATIENCE, Replay, Request, Rule, Setup, completion, prompt, until,
};

/// A completion that streams so many tokens.
fn stream(seed: u32, tokens: u32) -> Request {
    let mut body = completion(MODEL, &prompt(seed, 40));
    (body["stream"], body["max_tokens"]) = (true.into(), tokens.into());
    Request::json("/v1/completions", &body)
}

/// One that does not.
fn short(seed: u32) -> Request {
    Request::json("/v1/completions", &completion(MODEL, &prompt(seed, 40)))
}

/// A client that has the head of its stream.
async fn streams(gateway: &Gateway, seed: u32, tokens: u32) -> (Connection, Answer) {
    let mut client = Connection::open(gateway.address).await;
    client.send(&stream(seed, tokens)).await;
    let head = client.head().await.expect("a head");
    assert_eq!(head.status, 200, "{head:?}");
    (client, head)
}

/// A stream that came to its end in order, with all of its tokens.
fn is_whole(answer: &Answer, tokens: usize) {
    let text = String::from_utf8_lossy(&answer.body);
    assert!(answer.complete && text.ends_with("data: [DONE]\n\n"), "{answer:?}");
    assert_eq!(text.matches("data: ").count(), tokens + 1, "{text}");
}

/// A rule of an engine whose replay does not come to its end.
async fn endless_replay(engine: &Sim) -> (Rule, Replay) {
    let (events, replay) = (engine.events_endpoint().unwrap(), Replay::endless().await);
    let keys = format!("kv_events = {events:?}\nkv_replay = {:?}", replay.endpoint());
    (Rule::kv("words").endpoint(engine.address(), &keys), replay)
}

/// Waits until so many requests have reached the engine.
async fn reached(engine: &Sim, requests: usize) {
    until("the engine has them", async || engine.log().len() == requests).await;
}

/// What `/readyz` says, with its status.
async fn readiness(gateway: &Gateway) -> (u16, Value) {
    let answer = gateway.ask("/readyz").await;
    (answer.status, answer.json())
}

/// Waits until it is ready.
async fn is_ready(gateway: &Gateway) {
    until("it is ready", async || readiness(gateway).await.0 == 200).await;
}

/// Whether nobody listens where clients connect.
async fn is_closed(gateway: &Gateway) -> bool {
    tokio::net::TcpStream::connect(gateway.address).await.is_err()
}

/// What a service manager is told.
struct Manager(UnixDatagram, TempDir);

impl Manager {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(folder.path().join("notify")).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(socket, folder)
    }

    /// A gateway that is told of it.
    fn over(&self, setup: Setup) -> Setup {
        setup.environment("NOTIFY_SOCKET", self.1.path().join("notify").to_str().unwrap())
    }

    /// The next message that is no sign of life.
    async fn hears(&self) -> String {
        loop {
            let message = self.next().await;
            if message != "WATCHDOG=1" {
                return message;
            }
        }
    }

    async fn next(&self) -> String {
        let socket = self.0.try_clone().unwrap();
        let heard = tokio::task::spawn_blocking(move || {
            let mut buffer = [0; 512];
            socket.recv(&mut buffer).map(|n| String::from_utf8(buffer[..n].to_vec()).unwrap())
        });
        heard.await.unwrap().expect("a message in time")
    }
}
