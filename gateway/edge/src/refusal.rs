//! Why a connection's bytes are no request, and what its client reads then.

use std::fmt;

use serde_json::json;

/// An error the gateway answers with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    /// The stable name: `error.code` of the answer.
    pub name: &'static str,
    /// The HTTP status.
    pub status: u16,
    /// When it is given.
    pub doc: &'static str,
}

impl Code {
    /// Broken HTTP.
    pub const BAD_REQUEST: Code = Code {
        name: "bad_request",
        status: 400,
        doc: "The request is not valid HTTP, or two parsers could read it differently. The connection is closed.",
    };
    /// A tunnel.
    pub const METHOD_NOT_ALLOWED: Code =
        Code { name: "method_not_allowed", status: 405, doc: "CONNECT: the gateway opens no tunnels." };
    /// The head took too long.
    pub const HEAD_TOO_SLOW: Code = Code {
        name: "head_too_slow",
        status: 408,
        doc: "The request's head did not come within `connections.head_timeout`.",
    };
    /// The target is too long.
    pub const URI_TOO_LONG: Code = Code {
        name: "uri_too_long",
        status: 414,
        doc: "The request's target is longer than `connections.uri`.",
    };
    /// The head is too large.
    pub const HEAD_TOO_LARGE: Code = Code {
        name: "head_too_large",
        status: 431,
        doc: "The request's head is longer than `connections.head`, or has more fields than `connections.fields`.",
    };
    /// Too much at once.
    pub const OVERLOADED: Code = Code {
        name: "overloaded",
        status: 503,
        doc: "The gateway has no memory left for request bodies, no descriptor to connect to an engine with, or too many \
              connections. Try again later.",
    };
}

/// Why bytes are no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is answered.
    pub code: Code,
    /// What is wrong, for a human: never anything the client sent.
    pub why: &'static str,
}

impl Refusal {
    pub(crate) const fn bad(why: &'static str) -> Self {
        Self { code: Code::BAD_REQUEST, why }
    }

    pub(crate) const fn of(code: Code) -> Self {
        Self { code, why: code.doc }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.why)
    }
}

impl std::error::Error for Refusal {}

/// An error as OpenAI writes one (<https://platform.openai.com/docs/guides/error-codes/api-errors>): one line.
pub fn error_json(status: u16, code: &str, message: &str) -> String {
    json!({"error": {"message": message, "type": error_type(status), "param": null, "code": code}})
        .to_string()
}

/// The type of OpenAI's errors with this status.
pub fn error_type(status: u16) -> &'static str {
    match status {
        429 => "rate_limit_error",
        400..=499 => "invalid_request_error",
        _ => "server_error",
    }
}

/// The whole answer to what is no request, after which the connection ends.
pub(crate) fn answer(refusal: Refusal, request_id: &str) -> String {
    let Code { name, status, .. } = refusal.code;
    let reason = match status {
        400 => "Bad Request",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        414 => "URI Too Long",
        431 => "Request Header Fields Too Large",
        _ => "Service Unavailable",
    };
    let body = error_json(status, name, refusal.why);
    format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         x-request-id: {request_id}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn errors_are_json_whatever_they_say() {
        let text = error_json(503, "no_route", "a \"b\"\n\u{7}");
        assert!(!text.contains('\n'), "an event is one line");
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            value,
            json!({"error": {"message": "a \"b\"\n\u{7}", "type": "server_error", "param": null, "code": "no_route"}})
        );
        assert!(error_json(413, "", "").contains("\"invalid_request_error\""));
        assert!(error_json(429, "", "").contains("\"rate_limit_error\""));
    }

    #[test]
    fn answers_are_framed() {
        let text = answer(Refusal::bad("why \"not\""), "id-1");
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 400 Bad Request\r\n"));
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())));
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(body).unwrap()["error"]["message"],
            "why \"not\""
        );
    }
}
