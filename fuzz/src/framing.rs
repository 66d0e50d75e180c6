//! What strangers send first.

use crate::h1::{Framer, Limits};

/// Bytes of an HTTP/1.1 connection: the same requests pass however they are cut, and another parser sees the same in them.
///
/// The first byte is the size of the pieces.
pub fn h1(data: &[u8]) {
    let Some((size, bytes)) = data.split_first() else { return };
    let limits = Limits { head: 4096, fields: 16, uri: 256 };
    let whole = pass(bytes, usize::MAX, limits);
    assert_eq!(whole, pass(bytes, usize::from(*size).max(1), limits));
    for request in &whole.0 {
        agree(request);
    }
}

/// The requests that passed, and whether the rest was refused with which status.
fn pass(bytes: &[u8], size: usize, limits: Limits) -> (Vec<Vec<u8>>, Option<u16>) {
    let (mut framer, mut passed, mut waiting) = (Framer::new(limits), Vec::new(), Vec::new());
    let (mut request, mut amid) = (Vec::new(), false);
    for piece in bytes.chunks(size) {
        waiting.extend_from_slice(piece);
        loop {
            if !amid {
                match framer.head(&waiting) {
                    Ok(Some(end)) => request = waiting.drain(..end).collect(),
                    Ok(None) => break,
                    Err(refusal) => return (passed, Some(refusal.code.status)),
                }
                amid = true;
            }
            match framer.body(&waiting) {
                Ok(own) => request.extend(waiting.drain(..own)),
                Err(refusal) => return (passed, Some(refusal.code.status)),
            }
            if !framer.is_done() {
                break;
            }
            passed.push(std::mem::take(&mut request));
            amid = false;
            assert!(framer.next_request());
        }
    }
    (passed, None)
}

/// Another parser takes the head, finds at most one length, and the same end.
fn agree(request: &[u8]) {
    let mut slots = [httparse::EMPTY_HEADER; 32];
    let mut parsed = httparse::Request::new(&mut slots);
    let Ok(httparse::Status::Complete(head)) = parsed.parse(request) else {
        panic!("no request: {}", request.escape_ascii());
    };
    let named = |name: &str| {
        parsed
            .headers
            .iter()
            .filter(|h| h.name.eq_ignore_ascii_case(name))
            .map(|h| h.value)
            .collect::<Vec<_>>()
    };
    let (lengths, codings) = (named("content-length"), named("transfer-encoding"));
    assert!(lengths.is_empty() || codings.is_empty(), "both a length and a coding");
    assert!(codings.iter().all(|coding| coding.eq_ignore_ascii_case(b"chunked")) && codings.len() <= 1);
    assert!(parsed.headers.iter().all(|h| !h.name.contains('_')), "an underscore");
    assert!(named("host").len() <= 1 && (parsed.version == Some(0) || named("host").len() == 1));
    if codings.is_empty() {
        let length: usize =
            lengths.first().map_or(Ok(0), |l| String::from_utf8_lossy(l).parse()).expect("a length");
        assert_eq!(head + length, request.len());
    } else {
        assert!(request.ends_with(b"\r\n\r\n"));
    }
}
