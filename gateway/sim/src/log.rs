//! What requests a simulated engine got.

use bytes::Bytes;
use serde::{Serialize, Serializer};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Requests remembered; the oldest are forgotten first.
const REMEMBERED: usize = 10_000;
/// Bytes of their bodies remembered; the oldest are forgotten first.
const BODIES: usize = 16 << 20;

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ended {
    /// Not yet.
    #[default]
    Open,
    /// With a whole answer, an error's included.
    Finished,
    /// The client left, the engine restarted, or a fault was asked for.
    Aborted,
}

/// A completions or chat request: a POST. `GET /sim/log` lists them in JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Served {
    /// The answer's id.
    pub id: String,
    /// `X-Request-Id`, where the request had one.
    pub request_id: Option<String>,
    /// The path.
    pub path: String,
    /// The model asked for.
    pub model: Option<String>,
    /// The whole body; `None` once it is forgotten: the last 16 MiB of them are kept.
    #[serde(serialize_with = "text")]
    pub body: Option<Bytes>,
    /// Length of the body, in bytes.
    pub body_bytes: usize,
    /// XXH3-64 of the body.
    pub body_hash: u64,
    /// Tokens of all its prompts.
    pub prompt_tokens: usize,
    /// Those of them that were not prefilled here: found in the cache, or received. Set with the first token.
    pub cached_tokens: usize,
    /// Those of them that a prefill engine handed over. Where there are any, no prefill was paid.
    pub received_tokens: usize,
    /// Tokens sent.
    pub output_tokens: usize,
    /// The answer's status; 0 before there is one.
    pub status: u16,
    /// How it ended.
    pub ended: Ended,
    /// Requests that had not ended when it came, itself included.
    pub concurrent: usize,
}

fn text<S: Serializer>(body: &Option<Bytes>, serializer: S) -> Result<S::Ok, S::Error> {
    body.as_ref().map(|body| String::from_utf8_lossy(body)).serialize(serializer)
}

#[derive(Default)]
struct Entries {
    first: u64,
    entries: VecDeque<Served>,
    /// Bytes of the bodies kept, and the number of the first entry that may have one.
    bytes: usize,
    bodied: u64,
    /// Requests that have not ended.
    open: usize,
}

impl Entries {
    fn get_mut(&mut self, number: u64) -> Option<&mut Served> {
        let index = number.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        index.and_then(|index| self.entries.get_mut(index))
    }

    /// Forgets the oldest bodies until at most `limit` bytes are left.
    fn forget_bodies(&mut self, limit: usize) {
        while self.bytes > limit && self.bodied < self.first + self.entries.len() as u64 {
            let body = self.get_mut(self.bodied).and_then(|served| served.body.take());
            self.bytes -= body.map_or(0, |body| body.len());
            self.bodied += 1;
        }
    }
}

/// The requests of an engine, oldest first.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Entries>>);

impl Log {
    /// Notes a request that just came; it counts as aborted unless [`Record::finish`] says otherwise.
    pub fn begin(&self, mut served: Served) -> Record {
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        log.open += 1;
        served.concurrent = log.open;
        log.bytes += served.body.as_ref().map_or(0, Bytes::len);
        log.entries.push_back(served);
        log.forget_bodies(BODIES);
        if log.entries.len() > REMEMBERED {
            let body = log.entries.pop_front().and_then(|served| served.body);
            log.bytes -= body.map_or(0, |body| body.len());
            log.first += 1;
            log.bodied = log.bodied.max(log.first);
        }
        let number = log.first + log.entries.len() as u64 - 1;
        Record { log: self.clone(), number, open: true.into() }
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
    open: AtomicBool,
}

impl Record {
    pub fn update(&self, change: impl FnOnce(&mut Served)) {
        let mut log = self.log.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(served) = log.get_mut(self.number) {
            change(served);
        }
    }

    /// The whole answer is on its way.
    pub fn finish(&self) {
        self.end(Ended::Finished);
    }

    /// The first end counts.
    fn end(&self, ended: Ended) {
        if self.open.swap(false, Ordering::Relaxed) {
            self.log.0.lock().unwrap_or_else(PoisonError::into_inner).open -= 1;
            self.update(|served| served.ended = ended);
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.end(Ended::Aborted);
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
    fn those_that_have_not_ended_are_counted() {
        let log = Log::default();
        let (first, second) = (log.begin(Served::default()), log.begin(Served::default()));
        first.finish();
        let third = log.begin(Served::default());
        drop((first, second, third));
        log.begin(Served::default());
        let concurrent: Vec<usize> = log.entries().iter().map(|served| served.concurrent).collect();
        assert_eq!(concurrent, [1, 2, 2, 1]);
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

    #[test]
    fn old_bodies_are_forgotten_before_their_requests() {
        let log = Log::default();
        let body = Bytes::from(vec![b'x'; BODIES / 2]);
        for _ in 0..3 {
            log.begin(Served { body: Some(body.clone()), ..Served::default() });
        }
        let kept: Vec<bool> = log.entries().iter().map(|served| served.body.is_some()).collect();
        assert_eq!(kept, [false, true, true]);
        let small = || Served { body: Some(Bytes::from_static(b"x")), ..Served::default() };
        (0..REMEMBERED).for_each(|_| drop(log.begin(small())));
        assert_eq!(log.0.lock().unwrap().bytes, REMEMBERED);
        log.begin(Served { body: Some(Bytes::from(vec![b'x'; BODIES + 1])), ..Served::default() });
        assert!(log.entries().iter().all(|served| served.body.is_none()));
    }
}
