use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;

use super::{Connection, Endpoint, Error, Options};

/// libzmq's default high-water mark, in messages. Engines leave it on the ROUTER that serves replays,
/// and a ROUTER drops what exceeds it without a word, the end marker included.
const ROUTER_HWM: u64 = 1000;
/// Silence after so many answers that means that the rest was dropped: engines send a replay in one go.
const DROPPED_AFTER: Duration = Duration::from_millis(100);

/// The end marker is -1 and an empty payload; no batch is empty, and no engine counts this far.
const MAX_SEQ: u64 = i64::MAX as u64;

/// One replayed message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Its sequence number. The engine's buffer is finite: the first may be later than asked for.
    pub seq: u64,
    /// Its payload.
    pub payload: Bytes,
}

/// A replay: the request `["", start]`, then answers up to the end marker.
///
/// Answers are read from the end, so both `["", seq, payload]` (older engines) and
/// `["", topic, seq, payload]` are understood. What the ROUTER dropped at its high-water mark is asked
/// for again, on a fresh connection: a gap between two replies is a gap in the engine's buffer.
#[derive(Debug)]
pub struct Replay {
    to: Endpoint,
    options: Options,
    conn: Connection,
    next: u64,
    answers: u64,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Reading,
    AskAgain,
    Ended,
}

impl Replay {
    /// Connects and asks for everything from `start` on.
    pub async fn request(to: &Endpoint, start: u64, options: &Options) -> Result<Self, Error> {
        let conn = ask(to, start, options).await?;
        let (to, options) = (to.clone(), options.clone());
        Ok(Self { to, options, conn, next: start, answers: 0, state: State::Reading })
    }

    /// The next answer; `None` once there is no more. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<Reply>, Error> {
        loop {
            if self.state == State::AskAgain {
                self.conn = ask(&self.to, self.next, &self.options).await?;
                (self.answers, self.state) = (0, State::Reading);
            }
            if self.state == State::Ended {
                return Ok(None);
            }
            let full = self.answers >= ROUTER_HWM;
            let wait = if full { DROPPED_AFTER } else { self.options.reply_timeout };
            let parts = match timeout(wait, self.conn.recv()).await {
                Ok(parts) => parts?,
                Err(_) if full => {
                    self.state = State::AskAgain; // even the end marker was dropped
                    continue;
                }
                Err(_) => return Err(Error::ReplyTimeout(wait)),
            };
            let [.., seq, payload] = parts.as_slice() else {
                return Err(Error::Protocol("replay answer of one part"));
            };
            let seq =
                <[u8; 8]>::try_from(&seq[..]).map_err(|_| Error::Protocol("replay sequence not 8 bytes"))?;
            let seq = u64::from_be_bytes(seq);
            if seq > MAX_SEQ || payload.is_empty() {
                // Fewer answers than the mark cannot have passed it.
                self.state = if self.answers < ROUTER_HWM { State::Ended } else { State::AskAgain };
            } else if seq < self.next {
                continue; // not asked for
            } else if seq > self.next && self.answers > 0 {
                self.state = State::AskAgain; // each request brings at least one more: this ends
            } else {
                (self.next, self.answers) = (seq + 1, self.answers + 1);
                return Ok(Some(Reply { seq, payload: payload.clone() }));
            }
        }
    }
}

async fn ask(to: &Endpoint, start: u64, options: &Options) -> Result<Connection, Error> {
    let mut conn = Connection::dealer(to, options).await?;
    conn.send(&[b"", &start.to_be_bytes()]).await?;
    Ok(conn)
}
