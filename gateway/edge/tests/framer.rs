//! The framer by itself: what it finds, and that it finds it however the bytes are cut.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
mod cases;

use cases::{Case, all, splits};
use http::uri::PathAndQuery;
use kvgate_edge::h1::{Framer, Limits};
use proptest::prelude::*;

/// The requests that passed, byte for byte, and the status that the rest was refused with.
type Verdict = (Vec<Vec<u8>>, Option<u16>);

/// Shows the bytes to a framer, cut at these places.
fn verdict(bytes: &[u8], cuts: &[usize], limits: Limits) -> Verdict {
    let mut framer = Framer::new(limits);
    let (mut passed, mut request, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    let mut in_body = false;
    let ends = cuts.iter().copied().chain([bytes.len()]);
    let starts = [0].into_iter().chain(cuts.iter().copied());
    for piece in starts.zip(ends).map(|(start, end)| &bytes[start..end]) {
        waiting.extend_from_slice(piece);
        loop {
            if !in_body {
                match framer.head(&waiting) {
                    Ok(Some(end)) => request = waiting.drain(..end).collect(),
                    Ok(None) => break,
                    Err(refusal) => return (passed, Some(refusal.code.status)),
                }
                in_body = true;
            }
            match framer.body(&waiting) {
                Ok(own) => request.extend(waiting.drain(..own)),
                Err(refusal) => return (passed, Some(refusal.code.status)),
            }
            if !framer.is_done() {
                assert!(waiting.is_empty(), "bytes that belong to nobody");
                break;
            }
            passed.push(std::mem::take(&mut request));
            in_body = false;
            assert!(framer.next_request());
        }
    }
    (passed, None)
}

/// Whether the case goes on after a request that ends its connection, which is not the framer's business.
fn goes_on(case: &Case) -> bool {
    case.then.is_none() && case.name.contains(" after ")
}

#[test]
fn every_case_is_found_however_it_is_cut() {
    let cases = all();
    assert!(cases.len() >= 150, "{}", cases.len());
    for case in &cases {
        let whole = verdict(&case.bytes, &[], Limits::default());
        if !goes_on(case) {
            assert_eq!((whole.0.len(), whole.1), (case.passes.len(), case.then), "{}", case.name);
            let passed: usize = whole.0.iter().map(Vec::len).sum();
            assert!(case.then.is_some() || passed == case.bytes.len(), "{}", case.name);
        }
        for cuts in splits(&case.bytes) {
            assert!(verdict(&case.bytes, &cuts, Limits::default()) == whole, "{} cut at {cuts:?}", case.name);
        }
    }
}

/// No byte passes in a path or a query that the reader behind has no place for.
#[test]
fn what_passes_is_a_path_and_query() {
    let mut passed = 0;
    for before in ["/a", "/a?b", "/a?", "/"] {
        for byte in 0..=u8::MAX {
            let target = [before.as_bytes(), &[byte], b"41"].concat();
            let head = [b"GET ", &target[..], b" HTTP/1.1\r\nHost: a\r\n\r\n"].concat();
            if Framer::new(Limits::default()).head(&head).is_ok() {
                assert!(PathAndQuery::try_from(&target[..]).is_ok(), "{}", target.escape_ascii());
                passed += 1;
            }
        }
    }
    assert!(passed > 4 * 80, "{passed}");
}

#[test]
fn names_of_cases_are_distinct() {
    let mut names: Vec<_> = all().into_iter().map(|case| case.name).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
}

/// After an upgrade, and only then, everything passes.
#[test]
fn another_protocol_passes_once_it_was_agreed_on() {
    let head = "GET /ws HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: WebSocket\r\n\r\n";
    let mut framer = Framer::new(Limits::default());
    assert_eq!(framer.head(head.as_bytes()).unwrap(), Some(head.len()));
    assert!(framer.is_upgrade() && framer.is_done() && !framer.is_raw());
    assert_eq!(framer.body(b"\x81\x05hello").unwrap(), 0);
    framer.upgraded();
    assert!(framer.is_raw() && !framer.next_request());
    assert_eq!(framer.body(b"\x81\x05hello").unwrap(), 7);
    for other in [
        "GET /ws HTTP/1.1\r\nHost: a\r\n\r\n",
        "POST /ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n\r\n",
        "GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nContent-Length: 1\r\n\r\n",
        "GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\n\r\n",
        "GET /ws HTTP/1.0\r\nHost: a\r\nUpgrade: websocket\r\n\r\n",
    ] {
        let mut framer = Framer::new(Limits::default());
        framer.head(other.as_bytes()).unwrap().unwrap();
        framer.upgraded();
        assert!(!framer.is_raw(), "{other:?}");
    }
}

/// Pieces of requests, good and bad, that random ones are made of.
const PIECES: &[&str] = &[
    "GET / HTTP/1.1\r\n",
    "POST /a?b HTTP/1.1\r\n",
    "GET / HTTP/1.0\r\n",
    "GET http://a/ HTTP/1.1\r\n",
    "Host: a\r\n",
    "Host: b\r\n",
    "Content-Length: 3\r\n",
    "Content-Length: 0\r\n",
    "Content-Length: 10\r\n",
    "Transfer-Encoding: chunked\r\n",
    "X: y\r\n",
    "X_Y: z\r\n",
    " folded\r\n",
    "\r\n",
    "\n",
    "\r",
    "abc",
    "3\r\nabc\r\n",
    "0\r\n\r\n",
    "0\r\nT: u\r\n\r\n",
    "1;e=\"q\"\r\nz\r\n",
    "5\r\nabc\r\n",
    "GET",
    " ",
    ":",
    "\0",
    "%41",
    "\t",
    "_",
    "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
    "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn cuts_change_nothing(
        pieces in proptest::collection::vec(proptest::sample::select(PIECES), 1..12),
        cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..8),
        (head, fields, uri) in (20_usize..200, 1_usize..6, 1_usize..20),
    ) {
        let bytes = pieces.concat().into_bytes();
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
        cuts.sort_unstable();
        let limits = Limits { head, fields, uri };
        let whole = verdict(&bytes, &[], limits);
        prop_assert_eq!(&verdict(&bytes, &cuts, limits), &whole);
        let each: Vec<_> = (1..bytes.len()).collect();
        prop_assert_eq!(&verdict(&bytes, &each, limits), &whole);
    }

    /// What passes, passes again by itself: nothing that was decided hangs on what stood around it.
    #[test]
    fn what_passed_stands_by_itself(pieces in proptest::collection::vec(proptest::sample::select(PIECES), 1..12)) {
        let (passed, _) = verdict(pieces.concat().as_bytes(), &[], Limits::default());
        for request in passed {
            prop_assert_eq!(verdict(&request, &[], Limits::default()), (vec![request], None));
        }
    }
}
