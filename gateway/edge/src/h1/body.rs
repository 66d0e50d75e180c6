//! Requests one after the other.

use super::Limits;
use super::chunks::Chunks;
use super::head::{Framing, Head};
use crate::refusal::Refusal;

/// Follows the requests of one connection.
#[derive(Debug)]
pub struct Framer {
    limits: Limits,
    part: Part,
    upgrade: bool,
    http_10: bool,
}

#[derive(Debug)]
enum Part {
    Head(Box<Head>),
    Length(u64),
    Chunked(Chunks),
    Done,
    /// Another protocol.
    Raw,
    Refused(Refusal),
}

impl Framer {
    /// At the beginning of a connection's first request.
    pub fn new(limits: Limits) -> Self {
        Self { limits, part: Part::Head(Box::default()), upgrade: false, http_10: false }
    }

    /// Looks for the end of a request's head. `bytes` are all since the end of the request before. `Some`: the
    /// head's length; what comes after it is for [`body`](Self::body). `Some(0)`: the head is known already.
    ///
    /// # Errors
    /// They are no request; nothing more is taken from the connection.
    pub fn head(&mut self, bytes: &[u8]) -> Result<Option<usize>, Refusal> {
        let head = match &mut self.part {
            Part::Head(head) => head,
            Part::Refused(refusal) => return Err(*refusal),
            _ => return Ok(Some(0)),
        };
        match head.scan(bytes, &self.limits) {
            Ok(None) => Ok(None),
            Ok(Some(end)) => {
                (self.upgrade, self.http_10) = (head.is_upgrade(bytes), head.is_http_10);
                self.part = match head.framing() {
                    Framing::Length(0) => Part::Done,
                    Framing::Length(bytes) => Part::Length(bytes),
                    Framing::Chunked => Part::Chunked(Chunks::new()),
                };
                Ok(Some(end))
            }
            Err(refusal) => Err(self.refuse(refusal)),
        }
    }

    /// How many of the next bytes belong to the request's body, its framing included. Fewer than all: the rest are of
    /// the next request.
    ///
    /// # Errors
    /// The body is malformed; nothing more is taken from the connection.
    pub fn body(&mut self, bytes: &[u8]) -> Result<usize, Refusal> {
        match &mut self.part {
            Part::Head(_) | Part::Done => Ok(0),
            Part::Raw => Ok(bytes.len()),
            Part::Refused(refusal) => Err(*refusal),
            Part::Length(left) => {
                let some = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                *left -= some as u64;
                if *left == 0 {
                    self.part = Part::Done;
                }
                Ok(some)
            }
            Part::Chunked(chunks) => match chunks.scan(bytes, &self.limits) {
                Ok(some) => {
                    if chunks.is_done() {
                        self.part = Part::Done;
                    }
                    Ok(some)
                }
                Err(refusal) => Err(self.refuse(refusal)),
            },
        }
    }

    fn refuse(&mut self, refusal: Refusal) -> Refusal {
        self.part = Part::Refused(refusal);
        refusal
    }

    /// Whether the request has come to its end.
    pub fn is_done(&self) -> bool {
        matches!(self.part, Part::Done)
    }

    /// Whether the request asks for another protocol: then [`upgraded`](Self::upgraded) may be called.
    pub fn is_upgrade(&self) -> bool {
        self.upgrade
    }

    /// Whether the request is one of HTTP/1.0.
    pub fn is_http_10(&self) -> bool {
        self.http_10
    }

    /// The connection speaks another protocol from here on: all that comes passes.
    pub fn upgraded(&mut self) {
        if self.upgrade && self.is_done() {
            self.part = Part::Raw;
        }
    }

    /// Whether all that comes passes.
    pub fn is_raw(&self) -> bool {
        matches!(self.part, Part::Raw)
    }

    /// After a request that is done: the next one. False: it is not.
    pub fn next_request(&mut self) -> bool {
        let done = self.is_done();
        if done {
            *self = Self::new(self.limits);
        }
        done
    }
}
