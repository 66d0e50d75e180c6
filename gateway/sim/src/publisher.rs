//! KV events on the wire: a ZeroMQ PUB socket for the live stream, a ROUTER that replays the last batches.

use crate::config::{ReplayFrames, SimConfig};
use crate::event::{Event, Wire};
use bytes::Bytes;
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::oneshot;
use tokio::task::{JoinSet, yield_now};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage, ZmqResult};

/// How long a handshake that had begun may still take when connections are cut: one that ended later would stay
/// attached to a socket that nobody publishes on.
const HANDSHAKE: Duration = Duration::from_millis(20);
/// How long a replay waits for a client that takes nothing.
const REPLAY_STALL: Duration = Duration::from_secs(5);
/// The sequence number that ends a replay.
const END: [u8; 8] = [0xff; 8];

/// The last batches, by sequence number.
type Buffer = Arc<Mutex<VecDeque<(u64, Bytes)>>>;

/// Publishes batches and replays them. Never waits for a subscriber: one that is slow or dead loses batches.
///
/// Both ports are held as long as this lives, also while their connections are cut.
pub(crate) struct Publisher {
    wire: Wire,
    topic: Bytes,
    frames: ReplayFrames,
    limit: usize,
    seq: u64,
    buffer: Buffer,
    events: (TcpListener, PubSocket),
    replay: (TcpListener, Replay),
}

/// The task that replays; it ends when asked by dropping `stop`.
#[derive(Default)]
struct Replay {
    stop: Option<oneshot::Sender<()>>,
    task: JoinSet<()>,
}

impl Publisher {
    /// Binds both sockets on `host`.
    pub async fn bind(config: &SimConfig, host: IpAddr) -> ZmqResult<Self> {
        let events = TcpListener::bind((host, config.event_port))?;
        let replay = TcpListener::bind((host, config.replay_port))?;
        let mut publisher = Self {
            wire: Wire { encoding: config.event_encoding, hashes: config.hash_form },
            topic: Bytes::copy_from_slice(config.topic.as_bytes()),
            frames: config.replay_frames,
            limit: config.buffer_steps,
            seq: 0,
            buffer: Buffer::default(),
            events: (events, PubSocket::new()),
            replay: (replay, Replay::default()),
        };
        publisher.open().await?;
        Ok(publisher)
    }

    /// Where events are published.
    pub fn events_address(&self) -> std::io::Result<SocketAddr> {
        self.events.0.local_addr()
    }

    /// Where batches are replayed.
    pub fn replay_address(&self) -> std::io::Result<SocketAddr> {
        self.replay.0.local_addr()
    }

    /// Publishes one batch, unless it is empty.
    pub async fn publish(&mut self, events: &[Event]) {
        if events.is_empty() {
            return;
        }
        let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let payload = match self.wire.encode(timestamp, events) {
            Ok(payload) => Bytes::from(payload),
            Err(error) => return tracing::error!(%error, "a batch could not be encoded"),
        };
        {
            let mut buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
            buffer.push_back((self.seq, payload.clone()));
            let surplus = buffer.len().saturating_sub(self.limit);
            buffer.drain(..surplus);
        }
        let seq = Bytes::copy_from_slice(&self.seq.to_be_bytes());
        self.seq += 1;
        // queues or drops, never waits
        if let Err(error) = self.events.1.send(message([self.topic.clone(), seq, payload])).await {
            tracing::warn!(%error, "a batch could not be published");
        }
        // turns for the tasks that hand out and write: so that, as mostly with real engines, events leave before tokens
        yield_now().await;
        yield_now().await;
    }

    /// Drops all connections and listens on the same ports again; what was published stays known.
    pub async fn cut(&mut self) -> ZmqResult<()> {
        self.replay.1.stop = None;
        self.events.1.unbind_all().await;
        tokio::time::sleep(HANDSHAKE).await;
        while self.replay.1.task.join_next().await.is_some() {}
        self.events.1 = PubSocket::new();
        self.open().await
    }

    /// As a new process on the same ports: connections dropped, sequence back to 0, nothing to replay.
    pub async fn restart(&mut self) -> ZmqResult<()> {
        self.seq = 0;
        self.buffer = Buffer::default();
        self.cut().await
    }

    async fn open(&mut self) -> ZmqResult<()> {
        self.events.1.bind_listener(self.events.0.try_clone()?).await?;
        let mut router = RouterSocket::new();
        router.bind_listener(self.replay.0.try_clone()?).await?;
        let (stop, stopped) = oneshot::channel();
        let (buffer, topic, frames) = (self.buffer.clone(), self.topic.clone(), self.frames);
        self.replay.1.stop = Some(stop);
        self.replay.1.task.spawn(async move {
            tokio::select! {
                () = serve_replay(&mut router, &buffer, &topic, frames) => {}
                _ = stopped => {}
            }
            router.unbind_all().await;
            tokio::time::sleep(HANDSHAKE).await;
        });
        Ok(())
    }
}

async fn serve_replay(router: &mut RouterSocket, buffer: &Buffer, topic: &Bytes, frames: ReplayFrames) {
    loop {
        let request = match router.recv().await {
            Ok(request) => request.into_vec(),
            Err(error) => {
                tracing::debug!(%error, "replay");
                tokio::time::sleep(HANDSHAKE).await;
                continue;
            }
        };
        let [client, delimiter, start] = request.as_slice() else { continue };
        let Ok(start) = <[u8; 8]>::try_from(start.as_ref()).map(u64::from_be_bytes) else { continue };
        let batches: Vec<(u64, Bytes)> = {
            let buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
            buffer.iter().filter(|(seq, _)| *seq >= start).cloned().collect()
        };
        let batches = batches.into_iter().map(|(seq, payload)| (topic.clone(), seq.to_be_bytes(), payload));
        for (topic, seq, payload) in batches.chain([(Bytes::new(), END, Bytes::new())]) {
            let seq = Bytes::copy_from_slice(&seq);
            let (client, delimiter) = (client.clone(), delimiter.clone());
            let reply = match frames {
                ReplayFrames::New => message([client, delimiter, topic, seq, payload]),
                ReplayFrames::Old => message([client, delimiter, seq, payload]),
            };
            let sent = tokio::time::timeout(REPLAY_STALL, router.send(reply)).await;
            if !matches!(sent, Ok(Ok(()))) {
                tracing::debug!(?sent, "a replay client left or takes nothing");
                break;
            }
        }
    }
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    let [first, rest @ ..] = &frames[..] else { return ZmqMessage::from(Bytes::new()) };
    let mut message = ZmqMessage::from(first.clone());
    rest.iter().for_each(|frame| message.push_back(frame.clone()));
    message
}
