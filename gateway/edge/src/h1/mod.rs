//! Where each HTTP/1 request ends, and whether everybody would agree on it (RFC 9112).
//!
//! A [`Framer`] is shown the bytes of a connection as they come and finds the same however they are cut. It is
//! strict where a reader behind could be of another mind: line ends, field names, lengths, codings, chunks, Host.
//! It does no input or output and keeps nothing of what passes.

mod body;
mod chars;
mod chunks;
mod head;
mod target;

pub use body::Framer;

/// What a request's head may take up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the head, the empty line at its end included.
    pub head: usize,
    /// Fields of the head, and of the trailer section.
    pub fields: usize,
    /// Bytes of the request target.
    pub uri: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { head: 64 * 1024, fields: 128, uri: 8 * 1024 }
    }
}
