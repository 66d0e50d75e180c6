//! Server-sent events: forward only whole events, and know whether the stream said that it was over.
//!
//! Lines end with LF, CR LF or CR; a blank line ends an event
//! (<https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation>).

use bytes::{Bytes, BytesMut};
use kvgate_engines::stream::{Dialect, Mark};
use memchr::memchr2;

/// An unfinished event longer than this is let go: it is no event stream we understand.
const HOLD: usize = 64 * 1024;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Splits an event stream at event boundaries.
pub(super) struct EventGate {
    dialect: Dialect,
    tail: BytesMut,
    /// The forwarded bytes end inside an event.
    open: bool,
    /// And inside a line of it.
    amid_line: bool,
    /// Nothing was forwarded yet.
    fresh: bool,
    told: Told,
}

/// What the events that were forwarded say.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Told {
    /// The answer is complete.
    pub ended: bool,
    /// Some choice of it is.
    pub finished: bool,
    /// The engine itself told of an error.
    pub error: bool,
}

impl EventGate {
    pub(super) fn new(dialect: Dialect) -> Self {
        Self {
            dialect,
            tail: BytesMut::new(),
            open: false,
            amid_line: false,
            fresh: true,
            told: Told::default(),
        }
    }

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
        self.note(&ready);
        self.open = false;
        Some(ready)
    }

    /// What was held back, for a stream that ended in order.
    pub(super) fn rest(&mut self) -> Option<Bytes> {
        let rest = self.tail.split().freeze();
        self.note(&rest);
        (!rest.is_empty()).then_some(rest)
    }

    /// What was said so far.
    pub(super) fn told(&self) -> Told {
        self.told
    }

    /// The event that tells the client why its stream ends. Where half an event had to be let go, a blank line
    /// ends that first.
    pub(super) fn farewell(&self, status: u16, kind: &str, code: &str, message: &str) -> Bytes {
        let open = if self.open { "\n\n" } else { "" };
        (open.to_owned() + &self.dialect.farewell(status, kind, code, message)).into()
    }

    fn overflow(&mut self) -> Option<Bytes> {
        (self.tail.len() > HOLD).then(|| {
            (self.open, self.fresh) = (true, false);
            self.amid_line = !self.tail.ends_with(b"\n") && !self.tail.ends_with(b"\r");
            self.tail.split().freeze()
        })
    }

    /// Reads whole events. What follows the one that ends the stream says nothing any more.
    fn note(&mut self, ready: &[u8]) {
        if self.dialect == Dialect::Other || self.told.ended {
            return;
        }
        let mark = std::mem::take(&mut self.fresh) && ready.starts_with(BYTE_ORDER_MARK);
        let text = if mark { ready.get(BYTE_ORDER_MARK.len()..).unwrap_or_default() } else { ready };
        // an event whose beginning was let go is not looked at
        let mut torn = self.open;
        let begun = usize::from(torn && self.amid_line);
        let (mut name, mut data, mut lines): (&[u8], &[u8], u32) = (b"", b"", 0);
        // a last event may lack its blank line
        for line in Lines(text).skip(begun).chain([&b""[..]]) {
            if line.is_empty() {
                if !torn && (lines == 1 || !name.is_empty()) {
                    self.mark(name, data);
                }
                (name, data, lines, torn) = (b"", b"", 0, false);
            } else if let Some(value) = field(line, b"event") {
                name = value;
            } else if let Some(value) = field(line, b"data") {
                (data, lines) = (value, lines + 1);
            }
        }
    }

    fn mark(&mut self, name: &[u8], data: &[u8]) {
        match self.dialect.mark(name, data) {
            _ if self.told.ended => {}
            Mark::None => {}
            Mark::Finish => self.told.finished = true,
            Mark::End => self.told.ended = true,
            Mark::Error => self.told.error = true,
        }
    }
}

/// The value of a line's field of this name.
fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let value = line.strip_prefix(name)?.strip_prefix(b":")?;
    Some(value.strip_prefix(b" ").unwrap_or(value))
}

/// Lines without their ends.
struct Lines<'a>(&'a [u8]);

impl<'a> Iterator for Lines<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if self.0.is_empty() {
            return None;
        }
        let (line, rest) = match memchr2(b'\n', b'\r', self.0) {
            Some(at) => {
                let (line, rest) = self.0.split_at(at);
                (line, rest.strip_prefix(b"\r\n").or_else(|| rest.get(1..)).unwrap_or_default())
            }
            None => (self.0, &b""[..]),
        };
        self.0 = rest;
        Some(line)
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
    use proptest::prelude::*;

    fn gate() -> EventGate {
        EventGate::new(Dialect::Completions)
    }

    fn farewell(gate: &EventGate) -> String {
        String::from_utf8(gate.farewell(502, "server_error", "c", "m").to_vec()).unwrap()
    }

    /// What comes out, and what was said, of a stream that comes in these pieces and ends in order.
    fn through(dialect: Dialect, pieces: &[&[u8]]) -> (Vec<u8>, Told) {
        let (mut gate, mut out) = (EventGate::new(dialect), Vec::new());
        for piece in pieces {
            if let Some(ready) = gate.push(Bytes::copy_from_slice(piece)) {
                assert!([&b"\n\n"[..], b"\n\r\n", b"\r\r"].iter().any(|end| ready.ends_with(end)));
                out.extend_from_slice(&ready);
            }
        }
        out.extend_from_slice(&gate.rest().unwrap_or_default());
        (out, gate.told())
    }

    /// Whatever the cuts, the gate forwards the same bytes and only whole events.
    #[test]
    fn every_cut() {
        let text = b"data: a\n\nid: 1\r\ndata: b\r\n\r\ndata: c\n\r\ndata: d\r\rdata: [DONE]\n\n";
        for i in 0..text.len() {
            for j in i..text.len() {
                let (out, told) = through(Dialect::Completions, &[&text[..i], &text[i..j], &text[j..]]);
                assert!(told.ended, "cut at {i} and {j}");
                assert_eq!(out, text);
            }
        }
    }

    #[test]
    fn holds_the_tail_and_lets_go_of_the_endless() {
        let mut gate = gate();
        assert_eq!(gate.push(Bytes::from_static(b"data: a\n\ndata: b")).unwrap(), "data: a\n\n");
        assert!(farewell(&gate).starts_with("event: error\ndata: {"));
        assert_eq!(gate.push(vec![b'x'; HOLD - 7].into()), None);
        assert_eq!(gate.push(Bytes::from_static(b"y")).unwrap().len(), HOLD + 1);
        assert!(farewell(&gate).starts_with("\n\nevent: error\n"), "half an event is out");
        // a line that looks like an end, of the event whose beginning is out
        assert!(gate.push(Bytes::from_static(b"\ndata: [DONE]\n\n")).is_some());
        assert!(!gate.told().ended);
        assert!(farewell(&gate).starts_with("event: error\n"));
        assert!(gate.push(Bytes::from_static(b"data: [DONE]\n\n")).is_some());
        assert!(gate.told().ended);
    }

    #[test]
    fn an_orderly_end_gives_up_the_tail() {
        let mut gate = gate();
        assert_eq!(gate.push(Bytes::from_static(b"data: [DONE]\n")), None);
        assert!(!gate.told().ended);
        assert_eq!(gate.rest().unwrap(), "data: [DONE]\n");
        assert!(gate.told().ended);
    }

    #[test]
    fn only_an_event_of_its_own_is_the_end() {
        for (text, ended) in [
            (&b"data: [DONE]\n\n"[..], true),
            (b"data:[DONE]\r\n\r\n", true),
            (b": kept alive\n\ndata: [DONE]\n\n: bye\n\n", true),
            (b"\xef\xbb\xbfdata: [DONE]\n\n", true),
            (b"id: 7\ndata: [DONE]\n\n", true),
            (b"data: {\"content\":\"[DONE]\"}\n\n", false),
            (b"data: {\"content\":\"data: [DONE]\"}\n\n", false),
            (b"data: see data: [DONE]\n\n", false),
            (b"data: a\ndata: [DONE]\n\n", false),
            (b"data:  [DONE]\n\n", false),
            (b": data: [DONE]\n\n", false),
            (b"data: [DONE] \n\n", false),
            (b"data: a\n\n\xef\xbb\xbfdata: [DONE]\n\n", false),
        ] {
            let (out, told) = through(Dialect::Completions, &[text]);
            assert_eq!((out.as_slice(), told.ended), (text, ended), "{}", String::from_utf8_lossy(text));
        }
        let stop = b"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
        assert!(through(Dialect::Messages, &[stop]).1.ended);
        assert!(!through(Dialect::Completions, &[stop]).1.ended);
        assert_eq!(through(Dialect::Other, &[b"data: [DONE]\n\n"]).1, Told::default());
    }

    #[test]
    fn what_follows_the_end_says_nothing() {
        let (_, told) = through(Dialect::Completions, &[b"data: [DONE]\n\n", b"event: error\ndata: {}\n\n"]);
        assert_eq!(told, Told { ended: true, ..Told::default() });
    }

    /// What a stream says, read whole and line by line as the specification has it.
    fn naive(text: &str) -> Told {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text).replace("\r\n", "\n").replace('\r', "\n");
        let mut told = Told::default();
        for event in text.split("\n\n") {
            let values = |name: &str| -> Vec<String> {
                let of = |line: &str| {
                    let value = line.strip_prefix(name)?.strip_prefix(':')?;
                    Some(value.strip_prefix(' ').unwrap_or(value).to_owned())
                };
                event.lines().filter_map(of).collect()
            };
            let name = values("event").last().cloned().unwrap_or_default();
            let data = values("data");
            if told.ended || (data.len() != 1 && name.is_empty()) {
                continue;
            }
            match Dialect::Completions.mark(name.as_bytes(), data.last().map_or(b"", |d| d.as_bytes())) {
                Mark::None => {}
                Mark::Finish => told.finished = true,
                Mark::End => told.ended = true,
                Mark::Error => told.error = true,
            }
        }
        told
    }

    fn line() -> impl Strategy<Value = &'static str> {
        prop::sample::select(vec![
            "data: [DONE]",
            "data:[DONE]",
            "data: {\"choices\":[{\"delta\":{\"content\":\"é 漢字 🦀 [DONE]\"},\"finish_reason\":null}]}",
            "data: {\"choices\":[{\"finish_reason\":\"stop\"}],\"usage\":{\"total_tokens\":3}}",
            "data: {\"error\":{\"message\":\"no\"}}",
            "event: error",
            "id: 1",
            ": comment",
            "",
            "",
            "",
        ])
    }

    proptest! {
        /// Any lines, line ends and cuts: the same bytes, whole events only, and what they say.
        #[test]
        fn any_stream_in_any_pieces(
            lines in prop::collection::vec(line(), 0..24),
            ends in prop::sample::select(vec!["\n", "\r\n", "\r"]),
            mark in any::<bool>(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        ) {
            let mut text = if mark { "\u{feff}".to_owned() } else { String::new() };
            lines.iter().for_each(|line| text += &format!("{line}{ends}"));
            let bytes = text.as_bytes();
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<_> = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]).filter(|p| !p.is_empty()).collect();
            let (out, told) = through(Dialect::Completions, &pieces);
            prop_assert_eq!(out.as_slice(), bytes);
            prop_assert_eq!(told, naive(&text));
        }
    }
}
