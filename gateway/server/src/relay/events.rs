//! Server-sent events: forward only whole events, and know whether the stream said it was done.
//!
//! Lines end with LF, CR LF or CR; a blank line ends an event
//! (<https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation>).

use bytes::{Bytes, BytesMut};

/// An unfinished event longer than this is let go: it is no event stream we understand.
const HOLD: usize = 64 * 1024;

/// Splits an event stream at event boundaries.
#[derive(Default)]
pub(super) struct EventGate {
    tail: BytesMut,
    /// The forwarded bytes end inside an event.
    open: bool,
    done: bool,
}

impl EventGate {
    /// Takes a piece of the stream; returns all that ends in a whole event.
    pub(super) fn push(&mut self, piece: Bytes) -> Option<Bytes> {
        let ready = if self.tail.is_empty() {
            match boundary(&piece) {
                Some(n) if n == piece.len() => piece,
                Some(n) => {
                    self.tail.extend_from_slice(piece.get(n..).unwrap_or_default());
                    piece.slice(..n)
                }
                None => {
                    self.tail.extend_from_slice(&piece);
                    return self.overflow();
                }
            }
        } else {
            // the boundary may straddle the two
            let from = self.tail.len().saturating_sub(3);
            self.tail.extend_from_slice(&piece);
            match boundary(self.tail.get(from..).unwrap_or_default()) {
                Some(n) => self.tail.split_to(from + n).freeze(),
                None => return self.overflow(),
            }
        };
        self.open = false;
        self.note(&ready);
        Some(ready)
    }

    /// What was held back, for a stream that ended in order.
    pub(super) fn rest(&mut self) -> Option<Bytes> {
        let rest = self.tail.split().freeze();
        self.note(&rest);
        (!rest.is_empty()).then_some(rest)
    }

    /// Whether `data: [DONE]` was forwarded as the last event so far.
    pub(super) fn done(&self) -> bool {
        self.done
    }

    /// The event that tells the client why its stream ends. Where half an event had to be let go, a blank line
    /// ends that first.
    pub(super) fn farewell(&self, error: &[u8]) -> Bytes {
        let open: &[u8] = if self.open { b"\n\n" } else { b"" };
        [open, b"event: error\ndata: ", error, b"\n\n"].concat().into()
    }

    fn overflow(&mut self) -> Option<Bytes> {
        (self.tail.len() > HOLD).then(|| {
            self.open = true;
            self.tail.split().freeze()
        })
    }

    fn note(&mut self, ready: &[u8]) {
        let last = ready.trim_ascii_end();
        self.done |= last.ends_with(b"data: [DONE]") || last.ends_with(b"data:[DONE]");
    }
}

/// The length up to and including the last blank line.
fn boundary(text: &[u8]) -> Option<usize> {
    (2..=text.len()).rev().find(|end| {
        let text = text.get(..*end).unwrap_or_default();
        text.ends_with(b"\n\n") || text.ends_with(b"\n\r\n") || text.ends_with(b"\r\r")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the cuts, the gate forwards the same bytes and only whole events.
    #[test]
    fn every_cut() {
        let text = b"data: a\n\nid: 1\r\ndata: b\r\n\r\ndata: c\n\r\ndata: d\r\rdata: [DONE]\n\n";
        for i in 0..text.len() {
            for j in i..text.len() {
                let (mut gate, mut out) = (EventGate::default(), Vec::new());
                for cut in [&text[..i], &text[i..j], &text[j..]] {
                    if let Some(ready) = gate.push(Bytes::from_static(cut)) {
                        assert!(
                            ready.ends_with(b"\n\n")
                                || ready.ends_with(b"\n\r\n")
                                || ready.ends_with(b"\r\r")
                        );
                        out.extend_from_slice(&ready);
                    }
                }
                assert!(gate.done(), "cut at {i} and {j}");
                assert_eq!(gate.rest(), None);
                assert_eq!(out, text);
                assert!(gate.farewell(b"{}").starts_with(b"event: error\n"));
            }
        }
    }

    #[test]
    fn holds_the_tail_and_lets_go_of_the_endless() {
        let mut gate = EventGate::default();
        assert_eq!(gate.push(Bytes::from_static(b"data: a\n\ndata: b")).unwrap(), "data: a\n\n");
        assert_eq!(gate.farewell(b"{}"), "event: error\ndata: {}\n\n");
        assert_eq!(gate.push(vec![b'x'; HOLD - 7].into()), None);
        assert_eq!(gate.push(Bytes::from_static(b"y")).unwrap().len(), HOLD + 1);
        assert_eq!(gate.farewell(b"{}"), "\n\nevent: error\ndata: {}\n\n", "half an event is out");
        assert_eq!(gate.push(Bytes::from_static(b"z\n\n")).unwrap(), "z\n\n");
        assert_eq!(gate.farewell(b"{}"), "event: error\ndata: {}\n\n");
    }

    #[test]
    fn an_orderly_end_gives_up_the_tail() {
        let mut gate = EventGate::default();
        assert_eq!(gate.push(Bytes::from_static(b"data: [DONE]\n")), None);
        assert!(!gate.done());
        assert_eq!(gate.rest().unwrap(), "data: [DONE]\n");
        assert!(gate.done());
    }
}
