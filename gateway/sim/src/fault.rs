//! Faults that a test asks for.

use axum::http::HeaderMap;
use serde::Deserialize;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// The request header that asks for a fault of this request alone; its value is a [`Fault`] in JSON.
pub const FAULT_HEADER: &str = "x-sim-fault";

/// How a completions or chat request goes wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fault {
    /// Wait so long before doing anything, in milliseconds.
    pub delay_ms: u64,
    /// Answer with this status and an error, without serving.
    pub status: Option<u16>,
    /// Close the connection after so many events of a stream, or half the body of any other answer.
    pub die_after: Option<usize>,
}

/// Faults that wait for a request.
#[derive(Clone, Default)]
pub(crate) struct Faults(Arc<Mutex<VecDeque<Fault>>>);

impl Faults {
    pub fn push(&self, fault: Fault, times: usize) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(std::iter::repeat_n(fault, times));
    }

    /// The fault of a request: what its header asks for, else the next that waits.
    pub fn take(&self, headers: &HeaderMap) -> Fault {
        let asked = headers.get(FAULT_HEADER).and_then(|value| serde_json::from_slice(value.as_bytes()).ok());
        asked
            .or_else(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front())
            .unwrap_or_default()
    }
}
