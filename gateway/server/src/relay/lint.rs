//! Requests that two readers may take for different ones.
//!
//! HTTP/1 has been looked at, byte for byte, before pingora saw it (`kvgate_edge::h1`). What is left is HTTP/2, where
//! pingora is strict but for names and authorities.

use http::{Method, header};
use pingora_core::protocols::http::ServerSession;
use pingora_http::RequestHeader;

use super::{Code, codes};
use crate::config::ConnectionsConfig;

/// Why the request must be refused with 400; `None` if it is clear.
pub fn lint(client: &ServerSession) -> Option<&'static str> {
    client.is_http2().then(|| lint_h2(client.req_header())).flatten()
}

/// Which limit the head of an HTTP/2 request is beyond; those of HTTP/1 have been held to it before.
pub fn too_large(client: &ServerSession, limits: &ConnectionsConfig) -> Option<Code> {
    let head = client.req_header();
    if !client.is_http2() {
        None
    } else if head.raw_path().len() as u64 > limits.uri {
        Some(codes::URI_TOO_LONG)
    } else {
        (head.headers.len() > limits.fields).then_some(codes::HEAD_TOO_LARGE)
    }
}

fn lint_h2(head: &RequestHeader) -> Option<&'static str> {
    // as in HTTP/1: readers differ on whether `get` is GET
    if !head.method.as_str().bytes().all(|b| b.is_ascii_uppercase() || matches!(b, b'-' | b'_')) {
        return Some("a method that is not upper case");
    }
    let target = head.raw_path();
    if !(target.starts_with(b"/") || head.method == Method::OPTIONS && target == b"*") {
        return Some("a request target of no form");
    }
    if head.headers.keys().any(|name| name.as_str().contains('_')) {
        // gateways that turn names into variables take `Content_Length` for Content-Length
        return Some("underscore in a field name");
    }
    if head.raw_path().windows(3).any(|w| w == b"%00") {
        return Some("NUL in the request target");
    }
    // several hosts, and a host other than the authority, are refused by pingora
    let named = head.uri.authority().is_some() || head.headers.contains_key(header::HOST);
    (!named).then_some("neither :authority nor Host")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(target: &str, fields: &[(&'static str, &str)]) -> Option<&'static str> {
        let mut head = RequestHeader::build("GET", b"/", None).unwrap();
        head.set_uri(target.parse().unwrap());
        for (name, value) in fields {
            head.append_header(*name, *value).unwrap();
        }
        lint_h2(&head)
    }

    #[test]
    fn clear_heads_pass() {
        assert_eq!(head("http://a/", &[]), None);
        assert_eq!(head("http://a/b?c", &[("host", "a"), ("x-a", "b")]), None);
        assert_eq!(head("/b", &[("host", "a")]), None);
    }

    #[test]
    fn ambiguous_heads_do_not() {
        assert!(head("/", &[]).is_some());
        assert!(head("http://a/", &[("x_a", "1")]).is_some());
        assert!(head("http://a/b%00c", &[]).is_some());
        assert!(head("*", &[("host", "a")]).is_some());
        let lower = RequestHeader::build("get", b"/", None).unwrap();
        assert!(lint_h2(&lower).is_some_and(|why| why.contains("upper case")));
    }
}
