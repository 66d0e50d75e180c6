//! A publisher of KV events that says what it is told to, and a replay that answers likewise: the `zeromq` crate
//! speaks for both.

use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, XPubSocket, ZmqMessage};

use super::{BLOCK, PATIENCE, host};

/// Blocks that are held now, `BLOCK` tokens each.
pub fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> Value {
    assert_eq!(tokens.len(), hashes.len() * BLOCK);
    json!({
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": BLOCK, "lora_id": null, "medium": "GPU",
    })
}

/// Blocks that are held no more.
pub fn removed(hashes: &[u64]) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"})
}

/// Nothing is held any more.
pub fn cleared() -> Value {
    json!({"type": "AllBlocksCleared"})
}

/// The payload of a batch.
pub fn batch(events: &[Value]) -> Vec<u8> {
    rmp_serde::to_vec(&json!([1.5, events, 0])).unwrap()
}

fn message(frames: impl IntoIterator<Item = Bytes>) -> ZmqMessage {
    let mut frames = frames.into_iter();
    let mut message = ZmqMessage::from(frames.next().expect("a frame"));
    frames.for_each(|frame| message.push_back(frame));
    message
}

/// A publisher on a port of its own.
pub struct Publisher {
    listener: TcpListener,
    socket: XPubSocket,
}

impl Publisher {
    pub async fn bind() -> Self {
        let listener = TcpListener::bind((host(), 0)).unwrap();
        let mut publisher = Self { listener, socket: XPubSocket::new() };
        publisher.open().await;
        publisher
    }

    async fn open(&mut self) {
        self.socket.bind_listener(self.listener.try_clone().unwrap()).await.unwrap();
    }

    /// As a rule file has it.
    pub fn endpoint(&self) -> String {
        format!("tcp://{}", self.listener.local_addr().unwrap())
    }

    /// Waits for a subscription: what is published from now on arrives.
    pub async fn subscribed(&mut self) {
        let subscription =
            timeout(PATIENCE, self.socket.recv()).await.expect("a subscription in time").unwrap();
        assert_eq!(subscription.into_vec(), [Bytes::from_static(b"\x01")], "to everything");
    }

    /// Publishes a batch of events.
    pub async fn publish(&mut self, seq: u64, events: &[Value]) {
        self.send(vec![vec![], seq.to_be_bytes().to_vec(), batch(events)]).await;
    }

    /// Publishes these frames.
    pub async fn send(&mut self, frames: Vec<Vec<u8>>) {
        self.socket.send(message(frames.into_iter().map(Bytes::from))).await.unwrap();
    }

    /// Ends all connections and goes on as a new process on the same port.
    pub async fn restart(&mut self) {
        let old = std::mem::replace(&mut self.socket, XPubSocket::new());
        old.close().await;
        self.open().await;
    }
}

/// Batches with their numbers.
type Batches = Arc<Mutex<Vec<(u64, Vec<u8>)>>>;

/// A replay of batches that may be changed as it runs.
pub struct Replay {
    endpoint: String,
    batches: Batches,
    task: JoinHandle<()>,
}

impl Replay {
    pub async fn bind() -> Self {
        let listener = TcpListener::bind((host(), 0)).unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let batches: Batches = Arc::default();
        let mut router = RouterSocket::new();
        router.bind_listener(listener).await.unwrap();
        let shared = batches.clone();
        let task = tokio::spawn(async move {
            loop {
                let Ok(request) = router.recv().await else {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    continue;
                };
                let [client, empty, from] = &request.into_vec()[..] else { continue };
                let from = u64::from_be_bytes(from[..].try_into().unwrap());
                let wanted: Vec<_> = shared.lock().unwrap().iter().filter(|b| b.0 >= from).cloned().collect();
                for (seq, payload) in wanted.into_iter().chain([(u64::MAX, Vec::new())]) {
                    let seq = Bytes::copy_from_slice(&seq.to_be_bytes());
                    let reply = [client.clone(), empty.clone(), Bytes::new(), seq, payload.into()];
                    let _ = router.send(message(reply)).await;
                }
            }
        });
        Self { endpoint, batches, task }
    }

    /// One that goes on and on.
    pub async fn endless() -> Self {
        let listener = TcpListener::bind((host(), 0)).unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let mut router = RouterSocket::new();
        router.bind_listener(listener).await.unwrap();
        let task = tokio::spawn(async move {
            let mut clients = Vec::new();
            loop {
                let request = timeout(Duration::from_millis(200), router.recv()).await;
                if let Ok(Ok(request)) = request {
                    clients.push(request.into_vec()[0].clone());
                }
                for client in &clients {
                    let (seq, payload) = (Bytes::from_static(&[0; 8]), batch(&[]).into());
                    let reply = [client.clone(), Bytes::new(), Bytes::new(), seq, payload];
                    let _ = router.send(message(reply)).await;
                }
            }
        });
        Self { endpoint, batches: Arc::default(), task }
    }

    /// As a rule file has it.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Adds a batch to what it remembers.
    pub fn remember(&self, seq: u64, events: &[Value]) {
        self.batches.lock().unwrap().push((seq, batch(events)));
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        self.task.abort();
    }
}
