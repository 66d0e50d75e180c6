//! Faults that a test asks for.

use axum::http::HeaderMap;
use bytes::Bytes;
use futures::future::pending;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The request header that asks for a fault of this request alone; its value is a [`Fault`] in JSON. Where a gateway
/// splits a request, both legs carry it: [`crate::Sim::fault`] and `POST /sim/faults` are meant for one engine.
pub const FAULT_HEADER: &str = "x-sim-fault";

/// How long a fault waits for what was sent before.
const FLUSH: Duration = Duration::from_millis(10);

/// How a completions or chat request goes wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fault {
    /// Wait so long before doing anything, in milliseconds: a stall before the head.
    pub delay_ms: u64,
    /// Answer with this status and an error, without serving.
    pub status: Option<u16>,
    /// `Retry-After` of that answer, in seconds.
    pub retry_after: Option<u64>,
    /// Serve, but close the connection instead of answering.
    pub no_answer: bool,
    /// Close the connection after so many events of a stream, or half the body of any other answer.
    pub die_after: Option<usize>,
    /// Close the connection after so many bytes of the answer's body.
    pub die_after_bytes: Option<usize>,
    /// Send nothing more after so many events of a stream, or half the body of any other answer, until the client leaves.
    pub stall_after: Option<usize>,
    /// End a stream in order after so many events, as if it were complete.
    pub end_after: Option<usize>,
    /// Where the connection is to be closed, reset it instead.
    pub reset: bool,
    /// Hand nothing over: a prefill answer without `kv_transfer_params`.
    pub no_params: bool,
}

impl Fault {
    /// Whether the answer's body may end early.
    pub(crate) fn cuts(&self) -> bool {
        let Self { die_after, die_after_bytes, stall_after, end_after, .. } = self;
        [die_after, die_after_bytes, stall_after, end_after].iter().any(|after| after.is_some())
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }
}

/// Whether the connection of a request is to be reset when it is closed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reset(Arc<AtomicBool>);

impl Reset {
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a fault lets through of an answer's body.
pub(crate) struct Gate {
    fault: Fault,
    reset: Reset,
    parts: usize,
    bytes: usize,
}

impl Gate {
    pub fn new(fault: Fault, reset: Reset) -> Self {
        Self { fault, reset, parts: 0, bytes: 0 }
    }

    /// Whether there is more to send. Waits for ever, or fails, where nothing more may be sent.
    ///
    /// # Errors
    /// The connection is to be closed; what was sent before had time to get out.
    pub async fn open(&self) -> io::Result<bool> {
        let due = |after: Option<usize>, sent: usize| after.is_some_and(|after| sent >= after);
        if due(self.fault.die_after, self.parts) || due(self.fault.die_after_bytes, self.bytes) {
            tokio::time::sleep(FLUSH).await;
            if self.fault.reset {
                self.reset.set();
            }
            return Err(io::Error::other("a fault that was asked for"));
        }
        if due(self.fault.stall_after, self.parts) {
            pending::<()>().await;
        }
        Ok(!due(self.fault.end_after, self.parts))
    }

    /// The next part as far as it may be sent.
    pub fn pass(&mut self, part: Bytes) -> Bytes {
        let room = self.fault.die_after_bytes.map_or(usize::MAX, |after| after.saturating_sub(self.bytes));
        let part = part.slice(..part.len().min(room));
        self.parts += 1;
        self.bytes += part.len();
        part
    }
}

/// Faults that wait for a request, each with the number of requests it is meant for.
#[derive(Clone, Default)]
pub(crate) struct Faults(Arc<Mutex<VecDeque<(Fault, usize)>>>);

impl Faults {
    pub fn push(&self, fault: Fault, times: usize) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push_back((fault, times));
    }

    pub fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The fault of a request: what its header asks for, else the next that waits.
    pub fn take(&self, headers: &HeaderMap) -> Fault {
        let asked = headers.get(FAULT_HEADER).and_then(|value| serde_json::from_slice(value.as_bytes()).ok());
        asked.or_else(|| self.next()).unwrap_or_default()
    }

    fn next(&self) -> Option<Fault> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((fault, times)) = waiting.front_mut() {
            if let Some(left) = times.checked_sub(1) {
                *times = left;
                return Some(*fault);
            }
            waiting.pop_front();
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_taken_in_order_and_used_up() {
        let faults = Faults::default();
        let fault = |status| Fault { status: Some(status), ..Fault::default() };
        faults.push(fault(500), 2);
        faults.push(fault(400), 0);
        faults.push(fault(503), usize::MAX);
        let none = HeaderMap::new();
        let taken: Vec<_> = (0..4).map(|_| faults.take(&none).status).collect();
        assert_eq!(taken, [Some(500), Some(500), Some(503), Some(503)]);
        faults.clear();
        assert_eq!(faults.take(&none), Fault::default());
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_are_counted_within_parts() {
        let reset = Reset::default();
        let fault = Fault { die_after_bytes: Some(5), reset: true, ..Fault::default() };
        let mut gate = Gate::new(fault, reset.clone());
        gate.open().await.unwrap();
        assert_eq!(gate.pass(Bytes::from_static(b"abc")), "abc");
        gate.open().await.unwrap();
        assert_eq!(gate.pass(Bytes::from_static(b"def")), "de");
        assert!(!reset.is_set());
        assert!(gate.open().await.is_err());
        assert!(reset.is_set());
    }
}
