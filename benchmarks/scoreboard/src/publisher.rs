//! An engine's event socket: nothing but batches of stored blocks, as many as asked for.

use std::time::Duration;

use rmp::encode;
use tokio::time::Instant;
use zeromq::{PubSocket, Socket, SocketSend, ZmqMessage};

use crate::Result;

/// Tokens of a block.
const BLOCK: u32 = 16;

/// Publishes from a port of its own.
pub struct Publisher {
    /// `tcp://` and so on.
    pub address: String,
    socket: PubSocket,
    sequence: u64,
    next: u64,
}

impl Publisher {
    /// On a free port.
    ///
    /// # Errors
    /// There is none.
    pub async fn start() -> Result<Self> {
        let mut socket = PubSocket::new();
        let address = socket.bind("tcp://127.0.0.1:0").await?.to_string();
        Ok(Self { address, socket, sequence: 0, next: 1 })
    }

    /// Publishes a batch of so many events, each a new block that follows the one before.
    ///
    /// # Errors
    /// The socket fails.
    pub async fn stored(&mut self, events: u32) -> Result {
        let payload = batch(self.next, events)?;
        self.next += u64::from(events);
        let mut message = ZmqMessage::from(Vec::new());
        message.push_back(self.sequence.to_be_bytes().to_vec().into());
        message.push_back(payload.into());
        self.sequence += 1;
        Ok(self.socket.send(message).await?)
    }

    /// Batches published.
    pub fn batches(&self) -> u64 {
        self.sequence
    }

    /// Publishes at this rate for this time; how many events it really were.
    ///
    /// # Errors
    /// The socket fails.
    pub async fn flood(&mut self, events_per_second: u32, time: Duration) -> Result<u64> {
        const TICK: Duration = Duration::from_millis(5);
        let (start, first) = (Instant::now(), self.next);
        let mut ticks = tokio::time::interval(TICK);
        while start.elapsed() < time {
            ticks.tick().await;
            self.stored(events_per_second / 200).await?;
        }
        Ok(self.next - first)
    }
}

/// `[timestamp, [{type: "BlockStored", ...}, ...], rank]`, as vLLM 0.24 and later publish it.
fn batch(first: u64, events: u32) -> Result<Vec<u8>> {
    let mut to = Vec::with_capacity(events as usize * 160);
    encode::write_array_len(&mut to, 3)?;
    encode::write_f64(&mut to, 1.0)?;
    encode::write_array_len(&mut to, events)?;
    for hash in first..first + u64::from(events) {
        encode::write_map_len(&mut to, 6)?;
        encode::write_str(&mut to, "type")?;
        encode::write_str(&mut to, "BlockStored")?;
        encode::write_str(&mut to, "block_hashes")?;
        encode::write_array_len(&mut to, 1)?;
        encode::write_uint(&mut to, hash)?;
        encode::write_str(&mut to, "parent_block_hash")?;
        // chains of a thousand blocks
        match hash % 1000 {
            0 => encode::write_nil(&mut to)?,
            _ if hash == 1 => encode::write_nil(&mut to)?,
            _ => {
                encode::write_uint(&mut to, hash - 1)?;
            }
        }
        encode::write_str(&mut to, "token_ids")?;
        encode::write_array_len(&mut to, BLOCK)?;
        for token in 0..BLOCK {
            encode::write_uint(&mut to, (hash * 31 + u64::from(token)) % 50_000)?;
        }
        encode::write_str(&mut to, "block_size")?;
        encode::write_uint(&mut to, BLOCK.into())?;
        encode::write_str(&mut to, "medium")?;
        encode::write_str(&mut to, "GPU")?;
    }
    encode::write_uint(&mut to, 0)?;
    Ok(to)
}
