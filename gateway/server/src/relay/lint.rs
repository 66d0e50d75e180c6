//! Requests that two parsers may read differently.
//!
//! Pingora's parser forgives what a reader behind us may take for something else, and mends some of it before
//! it shows the head: so HTTP/1 heads are looked at as they came. What the parser itself refuses, and what can
//! be seen in the body's framing only, is not repeated here.

use http::Version;
use pingora_core::protocols::http::ServerSession;
use pingora_http::RequestHeader;

/// Why the request must be refused with 400 and its connection closed; `None` if it is clear.
pub fn lint(client: &ServerSession) -> Option<&'static str> {
    let head = client.req_header();
    let raw = client.as_http1().map(|h1| h1.get_headers_raw_bytes());
    raw.and_then(|raw| lint_raw(&raw, head.version)).or_else(|| lint_parsed(head))
}

/// What holds for every version.
fn lint_parsed(head: &RequestHeader) -> Option<&'static str> {
    if head.headers.keys().any(|name| name.as_str().contains('_')) {
        // gateways that turn names into variables take `Content_Length` for Content-Length
        return Some("underscore in a field name");
    }
    // the parser has escaped a NUL by now
    head.raw_path().windows(3).any(|w| w == b"%00").then_some("NUL in the request target")
}

fn lint_raw(raw: &[u8], version: Version) -> Option<&'static str> {
    let head = raw.strip_suffix(b"\r\n\r\n").unwrap_or(raw);
    let (mut hosts, mut lengths, mut codings) = (0u32, 0u32, 0u32);
    let mut lines = head.split(|b| *b == b'\n').peekable();
    let mut first = true;
    while let Some(line) = lines.next() {
        let line = match line.strip_suffix(b"\r") {
            Some(line) => line,
            None if lines.peek().is_none() => line,
            None => return Some("line ends without CR"),
        };
        if line.contains(&b'\r') {
            return Some("CR inside a line");
        }
        if std::mem::take(&mut first) {
            continue;
        }
        let Some(colon) = line.iter().position(|b| *b == b':') else {
            return Some("line without a field name");
        };
        let (name, value) = line.split_at(colon);
        let value = value.strip_prefix(b":").unwrap_or_default().trim_ascii();
        if name.eq_ignore_ascii_case(b"host") {
            hosts += 1;
        } else if name.eq_ignore_ascii_case(b"content-length") {
            lengths += 1;
            if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
                return Some("Content-Length is not a number");
            }
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            codings += 1;
            if !value.eq_ignore_ascii_case(b"chunked") {
                return Some("Transfer-Encoding other than chunked");
            }
        }
    }
    match (hosts, lengths, codings) {
        (2.., _, _) => Some("several Host fields"),
        (0, _, _) if version == Version::HTTP_11 => Some("no Host field"),
        (_, 2.., _) => Some("several Content-Length fields"),
        (_, _, 2..) => Some("several Transfer-Encoding fields"),
        (_, 1, 1) => Some("both Content-Length and Transfer-Encoding"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(fields: &str) -> Option<&'static str> {
        lint_raw(format!("POST / HTTP/1.1\r\n{fields}\r\n").as_bytes(), Version::HTTP_11)
    }

    #[test]
    fn clear_heads_pass() {
        for fields in [
            "Host: a\r\n",
            "Host: a\r\nContent-Length: 5\r\n",
            "Host: a\r\nTransfer-Encoding: Chunked\r\n",
            "hOST:a\r\nX: \r\nY:b:c\r\n",
        ] {
            assert_eq!(raw(fields), None, "{fields}");
        }
        assert_eq!(lint_raw(b"GET / HTTP/1.0\r\n\r\n", Version::HTTP_10), None);
    }

    #[test]
    fn ambiguous_heads_do_not() {
        for fields in [
            "",
            "Host: a\r\nHost: a\r\n",
            "Host: a\r\nContent-Length: 5\r\nContent-Length: 5\r\n",
            "Host: a\r\nContent-Length: 5, 5\r\n",
            "Host: a\r\nContent-Length: +5\r\n",
            "Host: a\r\nContent-Length:\r\n",
            "Host: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            "Host: a\r\nTransfer-Encoding: gzip, chunked\r\n",
            "Host: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "Host: a\r\nTransfer-Encoding: identity\r\n",
            "Host: a\nX: b\r\n",
            "Host: a\r\nX: b\rY: c\r\n",
            "Host: a\r\nX\r\n",
        ] {
            assert!(raw(fields).is_some(), "{fields:?}");
        }
    }

    #[test]
    fn names_and_targets() {
        let mut head = RequestHeader::build("GET", b"/a", None).unwrap();
        assert_eq!(lint_parsed(&head), None);
        head.insert_header("x_a", "1").unwrap();
        assert!(lint_parsed(&head).is_some());
        assert!(lint_parsed(&RequestHeader::build("GET", b"/a%00b", None).unwrap()).is_some());
    }
}
