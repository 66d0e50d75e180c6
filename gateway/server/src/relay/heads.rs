//! Message heads on their way through: hop-by-hop fields, Host, request target and framing. Everything else
//! passes as it came, in its order and spelling.

use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, Method, StatusCode, Uri, Version, header};
use pingora_core::protocols::http::ServerSession;
use pingora_core::{Error, ErrorType, Result};
use pingora_http::authority::{RawTargetAuthority, raw_target_authority};
use pingora_http::{RequestHeader, ResponseHeader};

/// What the engine sees as Host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HostPolicy {
    /// What the client named.
    #[default]
    Preserve,
    /// This.
    Rewrite(String),
}

/// Fields that belong to one connection (RFC 9110 section 7.6.1, with those that predate it).
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("keep-alive"),
];
/// What tells an engine whose request it is: not for clients to take away.
const FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// Fields the peer named in `Connection`, but for those the message cannot do without.
fn nominated(headers: &HeaderMap) -> Vec<HeaderName> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(|v| v.as_bytes().split(|b| *b == b','))
        .filter_map(|token| HeaderName::from_bytes(token.trim_ascii()).ok())
        .filter(|name| {
            ![header::HOST, header::CONTENT_LENGTH, header::CONTENT_TYPE, header::AUTHORIZATION, FOR, PROTO]
                .contains(name)
        })
        .collect()
}

/// The request as the engine gets it. `body` is its whole length: it always travels with Content-Length.
///
/// # Errors
/// A Host that is no header value.
pub fn to_engine(from: &RequestHeader, body: usize, host: &HostPolicy) -> Result<RequestHeader> {
    let mut head = from.clone();
    head.set_version(Version::HTTP_11);
    for name in nominated(&from.headers) {
        head.remove_header(&name);
    }
    for name in HOP_BY_HOP.iter().chain([&HTTP2_SETTINGS, &header::EXPECT]) {
        head.remove_header(name);
    }
    // HTTP/2 clients name the host in :authority only, HTTP/1.0 ones perhaps in the target only
    let named = to_origin_form(&mut head, from)?;
    match (host, named) {
        (HostPolicy::Rewrite(host), _) => head.insert_header(header::HOST, host)?,
        (HostPolicy::Preserve, Some(named)) if !from.headers.contains_key(header::HOST) => {
            head.insert_header(header::HOST, named)?;
        }
        // an HTTP/1.0 client need not say; an HTTP/1.1 request must (RFC 9112 section 3.2)
        (HostPolicy::Preserve, None) if !from.headers.contains_key(header::HOST) => {
            head.insert_header(header::HOST, "")?;
        }
        (HostPolicy::Preserve, _) => {}
    }
    let bodyless = body == 0
        && matches!(
            from.method,
            Method::GET | Method::HEAD | Method::DELETE | Method::OPTIONS | Method::TRACE
        );
    if bodyless {
        head.remove_header(&header::CONTENT_LENGTH);
    } else {
        head.insert_header(header::CONTENT_LENGTH, body)?;
    }
    Ok(head)
}

/// Takes the authority out of the target, where it would overrule Host; returns it.
fn to_origin_form(head: &mut RequestHeader, from: &RequestHeader) -> Result<Option<Vec<u8>>> {
    if let Some(authority) = from.uri.authority() {
        let path = from.uri.path_and_query().cloned();
        head.set_uri(path.map_or_else(|| Uri::from_static("/"), |path: PathAndQuery| path.into()));
        return Ok(Some(authority.as_str().as_bytes().to_vec()));
    }
    let RawTargetAuthority::Absolute { authority, path_and_query, .. } =
        raw_target_authority(from.raw_path())
    else {
        return Ok(None);
    };
    let slash: &[u8] = if path_and_query.starts_with(b"/") { b"" } else { b"/" };
    head.set_raw_path(&[slash, path_and_query].concat())?;
    Ok(Some(authority.to_vec()))
}

/// How the answer's end is told to the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Framing {
    /// No body, whatever the head says.
    None,
    Length,
    Chunked,
    /// HTTP/1.0 without a length.
    Close,
    /// END_STREAM.
    H2,
}

/// The answer as the client gets it.
pub(super) fn to_client(
    mut head: ResponseHeader,
    request: &RequestHeader,
) -> Result<(ResponseHeader, Framing)> {
    let mut codings = head.headers.get_all(header::TRANSFER_ENCODING).iter();
    if codings.any(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"chunked")) {
        return Err(Error::explain(ErrorType::InvalidHTTPHeader, "a transfer coding other than chunked"));
    }
    if head.headers.contains_key(header::TRANSFER_ENCODING) {
        // the length is then none (RFC 9112 section 6.3)
        head.remove_header(&header::CONTENT_LENGTH);
    }
    head.set_version(Version::HTTP_11);
    for name in nominated(&head.headers) {
        head.remove_header(&name);
    }
    for name in &HOP_BY_HOP {
        head.remove_header(name);
    }
    if head.status == StatusCode::NO_CONTENT {
        head.remove_header(&header::CONTENT_LENGTH);
    }
    let framing = match request.version {
        _ if request.method == Method::HEAD
            || matches!(head.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) =>
        {
            Framing::None
        }
        _ if head.headers.contains_key(header::CONTENT_LENGTH) => Framing::Length,
        Version::HTTP_2 => Framing::H2,
        Version::HTTP_11 => Framing::Chunked,
        _ => Framing::Close,
    };
    if framing == Framing::Chunked {
        head.insert_header(header::TRANSFER_ENCODING, "chunked")?;
    }
    Ok((head, framing))
}

/// Sends the head. One without a body ends the answer where the protocol can say so: HTTP/2 clients hold its
/// Content-Length against a separate, empty end.
pub(super) async fn write(client: &mut ServerSession, head: ResponseHeader, framing: Framing) -> Result<()> {
    match client {
        ServerSession::H2(h2) => h2.write_response_header(Box::new(head), framing == Framing::None),
        _ => client.write_response_header(Box::new(head)).await,
    }
}

/// The length that a head tells.
pub(super) fn length(head: &ResponseHeader) -> Option<usize> {
    head.headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Whether the answer is an event stream we can read and append to.
pub(super) fn is_event_stream(head: &ResponseHeader, framing: Framing) -> bool {
    matches!(framing, Framing::Chunked | Framing::H2 | Framing::Close)
        && !head.headers.contains_key(header::CONTENT_ENCODING)
        && head
            .headers
            .get(header::CONTENT_TYPE)
            .and_then(|v| v.as_bytes().get(..17))
            .is_some_and(|t| t.eq_ignore_ascii_case(b"text/event-stream"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, target: &str, fields: &[(&'static str, &str)]) -> RequestHeader {
        let mut head = RequestHeader::build(method, target.as_bytes(), None).unwrap();
        head.set_version(Version::HTTP_11);
        for (name, value) in fields {
            head.append_header(*name, *value).unwrap();
        }
        head
    }

    #[test]
    fn connection_fields_stay_behind_and_all_else_passes() {
        let from = request(
            "POST",
            "/v1/chat/completions?a=%20b",
            &[
                ("Host", "front"),
                ("Connection", "X-Mine, keep-alive, Authorization"),
                ("X-Mine", "1"),
                ("Keep-Alive", "timeout=5"),
                ("Proxy-Connection", "x"),
                ("TE", "trailers"),
                ("Transfer-Encoding", "chunked"),
                ("Expect", "100-continue"),
                ("Authorization", "Bearer k"),
                ("x-TWO", "1"),
                ("x-TWO", "2"),
            ],
        );
        let head = to_engine(&from, 12, &HostPolicy::Preserve).unwrap();
        let mut wire = Vec::new();
        head.header_to_h1_wire(&mut wire);
        assert_eq!(
            String::from_utf8(wire).unwrap(),
            "Host: front\r\nAuthorization: Bearer k\r\nx-TWO: 1\r\nx-TWO: 2\r\nContent-Length: 12\r\n"
        );
        assert_eq!(head.raw_path(), b"/v1/chat/completions?a=%20b");
    }

    #[test]
    fn host_and_target() {
        for (target, host, path, seen) in [
            ("/a", Some("front"), "/a", "front"),
            ("http://front/a?b", Some("front"), "/a?b", "front"),
            ("http://front", Some("front"), "/", "front"),
            ("http://front?x", None, "/?x", "front"),
            ("*", Some("front"), "*", "front"),
            ("/a", None, "/a", ""),
        ] {
            let fields: Vec<_> = host.map(|h| ("Host", h)).into_iter().collect();
            let from = request("OPTIONS", target, &fields);
            let head = to_engine(&from, 0, &HostPolicy::Preserve).unwrap();
            assert_eq!(head.raw_path(), path.as_bytes(), "{target}");
            assert_eq!(head.headers.get("host").unwrap(), seen, "{target}");
            let head = to_engine(&from, 0, &HostPolicy::Rewrite("inner:8000".into())).unwrap();
            assert_eq!(head.headers.get_all("host").iter().collect::<Vec<_>>(), ["inner:8000"]);
        }
        let h2 = http::Request::builder().uri("http://front/a?b").version(Version::HTTP_2).body(()).unwrap();
        let head = to_engine(&h2.into_parts().0.into(), 0, &HostPolicy::Preserve).unwrap();
        assert_eq!(
            (head.raw_path(), head.headers.get("host").unwrap().as_bytes()),
            (&b"/a?b"[..], &b"front"[..])
        );
        assert_eq!(head.uri.authority(), None);
    }

    #[test]
    fn framing_follows_the_client_and_the_status() {
        let answer = |status: u16, fields: &[(&'static str, &str)]| {
            let mut head = ResponseHeader::build(status, None).unwrap();
            for (name, value) in fields {
                head.append_header(*name, *value).unwrap();
            }
            head
        };
        let get = |version| {
            let mut head = request("GET", "/", &[]);
            head.set_version(version);
            head
        };
        let length = [("Content-Length", "5")];
        for (status, fields, version, framing) in [
            (200, &[][..], Version::HTTP_11, Framing::Chunked),
            (200, &[], Version::HTTP_10, Framing::Close),
            (200, &[], Version::HTTP_2, Framing::H2),
            (200, &length, Version::HTTP_10, Framing::Length),
            (204, &length, Version::HTTP_11, Framing::None),
            (304, &length, Version::HTTP_11, Framing::None),
        ] {
            let (head, found) = to_client(answer(status, fields), &get(version)).unwrap();
            assert_eq!(found, framing, "{status} {version:?}");
            assert_eq!(head.headers.contains_key("transfer-encoding"), framing == Framing::Chunked);
            assert_eq!(head.headers.contains_key("content-length"), !fields.is_empty() && status != 204);
        }
        let chunked = [("Content-Length", "5"), ("Transfer-Encoding", "Chunked")];
        let (head, framing) = to_client(answer(200, &chunked), &get(Version::HTTP_11)).unwrap();
        assert_eq!((framing, head.headers.get("content-length")), (Framing::Chunked, None));
        for coding in ["gzip", "gzip, chunked", "identity", ""] {
            assert!(
                to_client(answer(200, &[("Transfer-Encoding", coding)]), &get(Version::HTTP_11)).is_err(),
                "{coding}"
            );
        }
        let (head, framing) = to_client(answer(200, &length), &request("HEAD", "/", &[])).unwrap();
        assert_eq!(
            (framing, head.headers.get("content-length").unwrap().as_bytes()),
            (Framing::None, &b"5"[..])
        );
    }
}
