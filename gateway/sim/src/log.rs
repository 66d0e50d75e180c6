//! What requests a simulated engine got.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Requests remembered; the oldest are forgotten first.
const REMEMBERED: usize = 10_000;

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ended {
    /// Not yet.
    #[default]
    Open,
    /// With a whole answer, an error's included.
    Finished,
    /// The client left, the engine restarted, or a fault was asked for.
    Aborted,
}

/// A completions or chat request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Served {
    /// The answer's id.
    pub id: String,
    /// `X-Request-Id`, where the request had one.
    pub request_id: Option<String>,
    /// The path.
    pub path: String,
    /// The model asked for.
    pub model: Option<String>,
    /// Length of the body, in bytes.
    pub body_bytes: usize,
    /// XXH3-64 of the body.
    pub body_hash: u64,
    /// Tokens of all its prompts.
    pub prompt_tokens: usize,
    /// Those of them found in the cache, as far as computed.
    pub cached_tokens: usize,
    /// Tokens sent.
    pub output_tokens: usize,
    /// The answer's status; 0 before there is one.
    pub status: u16,
    /// How it ended.
    pub ended: Ended,
}

#[derive(Default)]
struct Entries {
    first: u64,
    entries: VecDeque<Served>,
}

/// The requests of an engine, oldest first.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Entries>>);

impl Log {
    /// Notes a request that just came; it counts as aborted unless [`Record::finish`] says otherwise.
    pub fn begin(&self, served: Served) -> Record {
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        log.entries.push_back(served);
        if log.entries.len() > REMEMBERED {
            log.entries.pop_front();
            log.first += 1;
        }
        let number = log.first + log.entries.len() as u64 - 1;
        Record { log: self.clone(), number }
    }

    pub fn entries(&self) -> Vec<Served> {
        let log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        log.entries.iter().cloned().collect()
    }
}

/// One request's entry, while it is served.
pub(crate) struct Record {
    log: Log,
    number: u64,
}

impl Record {
    pub fn update(&self, change: impl FnOnce(&mut Served)) {
        let mut log = self.log.0.lock().unwrap_or_else(PoisonError::into_inner);
        let index = self.number.checked_sub(log.first).and_then(|index| usize::try_from(index).ok());
        if let Some(served) = index.and_then(|index| log.entries.get_mut(index)) {
            change(served);
        }
    }

    /// The whole answer is on its way.
    pub fn finish(&self) {
        self.update(|served| served.ended = Ended::Finished);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.update(|served| {
            if served.ended == Ended::Open {
                served.ended = Ended::Aborted;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_aborted_unless_it_finished() {
        let log = Log::default();
        let (first, second) = (log.begin(Served::default()), log.begin(Served::default()));
        first.finish();
        drop((first, second));
        let ended: Vec<Ended> = log.entries().iter().map(|served| served.ended).collect();
        assert_eq!(ended, [Ended::Finished, Ended::Aborted]);
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let log = Log::default();
        let oldest = log.begin(Served::default());
        for bytes in 1..=REMEMBERED {
            log.begin(Served { body_bytes: bytes, ..Served::default() });
        }
        oldest.update(|_| panic!("forgotten"));
        assert_eq!((log.entries().len(), log.entries()[0].body_bytes), (REMEMBERED, 1));
    }
}
