//! What a client's HTTP/2 frames cost: those that ask for work and carry no request are counted, and a connection
//! that sends too many of them is cut. Floods of PING, SETTINGS, PRIORITY, RST_STREAM, CONTINUATION, WINDOW_UPDATE and
//! empty DATA frames all end here, whatever the HTTP/2 library makes of them.
//!
//! Only heads of frames are looked at (RFC 9113 section 4.1); whether they are in order is the library's affair.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use crate::arrival::Transport;

/// What a client sends first (RFC 9113 section 3.4).
const PREFACE: usize = 24;
const HEAD: usize = 9;
/// Seconds of an allowance that may be used at once.
const BURST: u32 = 10;
/// WINDOW_UPDATE frames that are free; beyond them one for each so many bytes of answers.
const FREE_UPDATES: u64 = 1_000;
const BYTES_PER_UPDATE: u64 = 4;
/// The most of them saved up.
const MOST_UPDATES: u64 = 1 << 20;

/// How many frames a client may send that carry no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// PING, SETTINGS, PRIORITY, CONTINUATION, unknown and empty DATA frames a second, ten times as many at once.
    pub control_frames: u32,
    /// RST_STREAM frames a second, ten times as many at once.
    pub resets: u32,
}

/// What was too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Flood {
    #[error("too many control frames")]
    Control,
    #[error("too many streams reset")]
    Resets,
    #[error("too many window updates")]
    Updates,
}

/// So many a second, some seconds' worth at once.
#[derive(Debug)]
struct Bucket {
    left: u32,
    rate: u32,
    filled: Instant,
}

impl Bucket {
    fn new(rate: u32, now: Instant) -> Self {
        Self { left: rate.saturating_mul(BURST), rate, filled: now }
    }

    fn take(&mut self, now: Instant) -> bool {
        if self.left == 0 {
            let millis = now.saturating_duration_since(self.filled).as_millis();
            let due = millis * u128::from(self.rate) / 1000;
            let due = u32::try_from(due).unwrap_or(u32::MAX).min(self.rate.saturating_mul(BURST));
            if due == 0 {
                return false;
            }
            self.left = due;
            self.filled = now;
        } else if self.left == self.rate.saturating_mul(BURST) {
            // time counts from the first that is taken of a full one
            self.filled = now;
        }
        self.left -= 1;
        true
    }
}

/// Where in the client's bytes we are.
#[derive(Debug)]
enum At {
    Preface(usize),
    Head([u8; HEAD], usize),
    Payload(usize),
}

#[derive(Debug)]
struct Meter {
    at: At,
    control: Bucket,
    resets: Bucket,
    updates: u64,
    sent: u64,
}

impl Meter {
    fn new(allowance: Allowance, now: Instant) -> Self {
        Self {
            at: At::Preface(0),
            control: Bucket::new(allowance.control_frames, now),
            resets: Bucket::new(allowance.resets, now),
            updates: FREE_UPDATES,
            sent: 0,
        }
    }

    fn sent(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        self.updates = (self.updates + self.sent / BYTES_PER_UPDATE).min(MOST_UPDATES);
        self.sent %= BYTES_PER_UPDATE;
    }

    fn received(&mut self, mut bytes: &[u8], now: Instant) -> Result<(), Flood> {
        while !bytes.is_empty() {
            let took = match &mut self.at {
                At::Preface(have) => {
                    let took = bytes.len().min(PREFACE - *have);
                    *have += took;
                    if *have == PREFACE {
                        self.at = At::Head([0; HEAD], 0);
                    }
                    took
                }
                At::Payload(left) => {
                    let took = bytes.len().min(*left);
                    *left -= took;
                    if *left == 0 {
                        self.at = At::Head([0; HEAD], 0);
                    }
                    took
                }
                At::Head(head, have) => {
                    let free = head.get_mut(*have..).unwrap_or_default();
                    let took = bytes.len().min(free.len());
                    free.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
                    *have += took;
                    if *have == HEAD {
                        let [a, b, c, kind, flags, ..] = *head;
                        let length = u32::from_be_bytes([0, a, b, c]) as usize;
                        self.at = if length == 0 { At::Head([0; HEAD], 0) } else { At::Payload(length) };
                        self.frame(kind, flags, length, now)?;
                    }
                    took
                }
            };
            bytes = bytes.get(took..).unwrap_or_default();
        }
        Ok(())
    }

    fn frame(&mut self, kind: u8, flags: u8, length: usize, now: Instant) -> Result<(), Flood> {
        const END_STREAM: u8 = 0x1;
        let allowed = |yes: bool, flood| if yes { Ok(()) } else { Err(flood) };
        match kind {
            // DATA
            0x0 if length > 0 || flags & END_STREAM != 0 => Ok(()),
            // HEADERS
            0x1 => Ok(()),
            // RST_STREAM
            0x3 => allowed(self.resets.take(now), Flood::Resets),
            // WINDOW_UPDATE
            0x8 => {
                let allowance = self.updates.checked_sub(1);
                self.updates = allowance.unwrap_or(0);
                allowed(allowance.is_some(), Flood::Updates)
            }
            _ => allowed(self.control.take(now), Flood::Control),
        }
    }
}

/// A connection that speaks HTTP/2, metered.
#[derive(Debug)]
pub(crate) struct Metered {
    io: Box<dyn Transport>,
    meter: Meter,
    /// Set when the connection is cut for what it sent.
    flooded: Arc<AtomicBool>,
}

impl Metered {
    pub fn new(io: Box<dyn Transport>, allowance: Allowance, flooded: Arc<AtomicBool>) -> Self {
        Self { io, meter: Meter::new(allowance, Instant::now()), flooded }
    }
}

impl AsyncRead for Metered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        std::task::ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        let new = buf.filled().get(before..).unwrap_or_default();
        Poll::Ready(self.meter.received(new, Instant::now()).map_err(|flood| {
            self.flooded.store(true, Ordering::Relaxed);
            tracing::debug!("an HTTP/2 connection is cut: {flood}");
            io::Error::new(io::ErrorKind::InvalidData, flood)
        }))
    }
}

impl AsyncWrite for Metered {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = std::task::ready!(Pin::new(&mut self.io).poll_write(cx, buf))?;
        self.meter.sent(written);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = std::task::ready!(Pin::new(&mut self.io).poll_write_vectored(cx, bufs))?;
        self.meter.sent(written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const ALLOWANCE: Allowance = Allowance { control_frames: 10, resets: 2 };

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let [_, a, b, c] = u32::try_from(payload).unwrap().to_be_bytes();
        [&[a, b, c, kind, flags, 0, 0, 0, 1][..], &vec![0xaa; payload]].concat()
    }

    fn meter() -> (Meter, Instant) {
        let now = Instant::now();
        let mut meter = Meter::new(ALLOWANCE, now);
        meter.received(&[0; PREFACE], now).unwrap();
        (meter, now)
    }

    /// How many of these pass at once.
    fn passes(meter: &mut Meter, frame: &[u8], now: Instant) -> usize {
        (0..5_000).take_while(|_| meter.received(frame, now).is_ok()).count()
    }

    #[tokio::test]
    async fn each_kind_has_its_allowance() {
        for (kind, flags, payload, most) in [
            (0x0, 0x0, 0, 100),
            (0x0, 0x1, 0, 5_000),
            (0x0, 0x0, 1, 5_000),
            (0x1, 0x4, 30, 5_000),
            (0x2, 0x0, 5, 100),
            (0x3, 0x0, 4, 20),
            (0x4, 0x0, 0, 100),
            (0x6, 0x0, 8, 100),
            (0x8, 0x0, 4, 1_000),
            (0x9, 0x0, 10, 100),
            (0xfa, 0x0, 0, 100),
        ] {
            let (mut meter, now) = meter();
            assert_eq!(passes(&mut meter, &frame(kind, flags, payload), now), most, "{kind}");
        }
    }

    #[tokio::test]
    async fn allowances_come_back_with_time_and_with_answers() {
        let (mut meter, now) = meter();
        let take = |meter: &mut Meter, kind, after| {
            (0..5_000)
                .take_while(|_| meter.frame(kind, 0, 4, now + Duration::from_millis(after)).is_ok())
                .count()
        };
        const PING: u8 = 0x6;
        const UPDATE: u8 = 0x8;
        for (after, most) in [(0, 100), (99, 0), (2_000, 20), (1_000_000, 100), (1_000_100, 1)] {
            assert_eq!(take(&mut meter, PING, after), most, "{after}");
        }
        assert_eq!(take(&mut meter, UPDATE, 0), 1000);
        for _ in 0..10 {
            meter.sent(10);
        }
        assert_eq!(take(&mut meter, UPDATE, 0), 25);
    }

    #[tokio::test]
    async fn splits_make_no_difference() {
        let all: Vec<u8> =
            [frame(0x6, 0, 8), frame(0x0, 0, 70_000), frame(0x4, 0, 0), frame(0x2, 0, 5)].concat();
        for piece in [1, 2, 7, 9, 10, 1_000, 100_000] {
            let (mut meter, now) = meter();
            for bytes in all.chunks(piece) {
                meter.received(bytes, now).unwrap();
            }
            assert_eq!(meter.control.left, 97, "{piece}");
        }
    }
}
