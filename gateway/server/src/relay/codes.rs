//! The errors that we answer with, by name.

use kvgate_core::{Cause, Phase, Role};
use kvgate_edge::Code;

use super::leg::{Fault, LegError};

/// Broken HTTP.
pub const BAD_REQUEST: Code = Code::BAD_REQUEST;
/// CONNECT.
pub const METHOD_NOT_ALLOWED: Code = Code::METHOD_NOT_ALLOWED;
/// The head took too long.
pub const HEAD_TOO_SLOW: Code = Code::HEAD_TOO_SLOW;
/// The request target is too long.
pub const URI_TOO_LONG: Code = Code::URI_TOO_LONG;
/// The head is too large.
pub const HEAD_TOO_LARGE: Code = Code::HEAD_TOO_LARGE;
/// The body took too long.
pub const BODY_TOO_SLOW: Code = Code {
    name: "body_too_slow",
    status: 408,
    doc: "The request body came slower than the least rate, or not within its deadline.",
};
/// The body is too long.
pub const BODY_TOO_LARGE: Code = Code {
    name: "body_too_large",
    status: 413,
    doc: "The request body is longer than the limit, by its Content-Length or by what arrived.",
};
/// Nobody serves this.
pub const NO_ROUTE: Code =
    Code { name: "no_route", status: 503, doc: "No rule matches the listener, host and path." };
/// Nobody serves this model.
pub const MODEL_UNAVAILABLE: Code = Code {
    name: "model_unavailable",
    status: 503,
    doc: "Rules match the listener, host and path, but none of them the model.",
};
/// Nobody is well.
pub const NO_HEALTHY_BACKEND: Code = Code {
    name: "no_healthy_backend",
    status: 503,
    doc: "A rule matches, but none of its engines is up and in service.",
};
/// Everybody is busy, and said so.
pub const ENGINES_BUSY: Code = Code {
    name: "engines_busy",
    status: 429,
    doc: "None of a rule's engines takes requests, and one that is up answered 429 with `Retry-After`: it is left alone \
          until then.",
};
/// The gateway was told to stop.
pub const GATEWAY_DRAINING: Code = Code {
    name: "gateway_draining",
    status: 503,
    doc: "The gateway is stopping and takes no new requests: connect again.",
};
/// Too many bodies or connections at once.
pub const OVERLOADED: Code = Code::OVERLOADED;
/// No engine takes a connection.
pub const ENGINE_UNREACHABLE: Code =
    Code { name: "engine_unreachable", status: 503, doc: "None of the engines tried took the connection." };
/// The engine broke.
pub const ENGINE_ERROR: Code =
    Code { name: "engine_error", status: 502, doc: "The engine broke off, or garbled its answer." };
/// The engine took too long.
pub const ENGINE_TIMEOUT: Code =
    Code { name: "engine_timeout", status: 504, doc: "A deadline of the request ran out." };

/// The body is in no form that its members could be seen in.
pub const UNREADABLE_BODY: Code = Code {
    name: "unreadable_body",
    status: 400,
    doc: "A generation for a `prefill-decode` rule is not JSON in UTF-8: what it says of other engines' blocks cannot \
          be taken out.",
};
/// A pair has nobody for a part.
pub const PD_POOL_UNAVAILABLE: Code = Code {
    name: "pd_pool_unavailable",
    status: 503,
    doc: "A `prefill-decode` rule found no engine for prefill, for decode, or took none of their connections.",
};
/// The prompt took too long.
pub const PD_PREFILL_TIMEOUT: Code = Code {
    name: "pd_prefill_timeout",
    status: 504,
    doc: "The engine for prefill took longer than `timeouts.prefill`, and decode does not compute the prompt.",
};
/// The prompt's engine broke.
pub const PD_PREFILL_FAILED: Code = Code {
    name: "pd_prefill_failed",
    status: 502,
    doc: "The engine for prefill broke off, and decode does not compute the prompt.",
};
/// The answer's engine did not begin.
pub const PD_DECODE_TIMEOUT: Code = Code {
    name: "pd_decode_timeout",
    status: 504,
    doc: "The engine for decode took longer than `timeouts.first_byte` to begin.",
};
/// The answer's engine fell silent.
pub const PD_DECODE_STREAM_TIMEOUT: Code = Code {
    name: "pd_decode_stream_timeout",
    status: 502,
    doc: "The engine for decode fell silent for `timeouts.idle` amid its answer.",
};
/// The answer's engine broke.
pub const PD_DECODE_BACKEND_DIED: Code = Code {
    name: "pd_decode_backend_died",
    status: 502,
    doc: "The engine for decode closed, reset or garbled its answer.",
};

/// All of them, by status.
pub const ALL: [Code; 23] = [
    BAD_REQUEST,
    UNREADABLE_BODY,
    METHOD_NOT_ALLOWED,
    HEAD_TOO_SLOW,
    BODY_TOO_SLOW,
    BODY_TOO_LARGE,
    URI_TOO_LONG,
    ENGINES_BUSY,
    HEAD_TOO_LARGE,
    ENGINE_ERROR,
    ENGINE_UNREACHABLE,
    NO_ROUTE,
    MODEL_UNAVAILABLE,
    NO_HEALTHY_BACKEND,
    OVERLOADED,
    GATEWAY_DRAINING,
    ENGINE_TIMEOUT,
    PD_PREFILL_FAILED,
    PD_DECODE_STREAM_TIMEOUT,
    PD_DECODE_BACKEND_DIED,
    PD_POOL_UNAVAILABLE,
    PD_PREFILL_TIMEOUT,
    PD_DECODE_TIMEOUT,
];

/// Those of requests that no rule has taken.
pub const BEFORE: [Code; 9] = [
    BAD_REQUEST,
    METHOD_NOT_ALLOWED,
    HEAD_TOO_SLOW,
    BODY_TOO_SLOW,
    BODY_TOO_LARGE,
    URI_TOO_LONG,
    HEAD_TOO_LARGE,
    NO_ROUTE,
    MODEL_UNAVAILABLE,
];

/// The code of an engine's failure at this part of a request.
pub fn of(error: &LegError, role: Role) -> Code {
    // what it may have read some of is another matter: it may have acted on it
    let unreached = error.phase == Phase::Connect || error.phase == Phase::Upload && error.unprocessed;
    match (role, error.fault) {
        (_, Fault::Ending) => GATEWAY_DRAINING,
        (_, Fault::Total) => ENGINE_TIMEOUT,
        (_, Fault::Status(429)) if error.busy.is_some() => ENGINES_BUSY,
        _ if error.outcome().cause == Cause::Exhausted => OVERLOADED,
        (Role::Any, Fault::Broken | Fault::Deadline) if unreached => ENGINE_UNREACHABLE,
        (Role::Any, Fault::Deadline) => ENGINE_TIMEOUT,
        (Role::Any, _) => ENGINE_ERROR,
        (_, Fault::Broken | Fault::Deadline) if unreached => PD_POOL_UNAVAILABLE,
        (Role::Prefill, Fault::Deadline) => PD_PREFILL_TIMEOUT,
        (Role::Prefill, _) => PD_PREFILL_FAILED,
        (Role::Decode, Fault::Deadline) if error.phase == Phase::Answer => PD_DECODE_STREAM_TIMEOUT,
        (Role::Decode, Fault::Deadline) => PD_DECODE_TIMEOUT,
        (Role::Decode, _) => PD_DECODE_BACKEND_DIED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct() {
        let names: std::collections::HashSet<_> = ALL.iter().map(|c| c.name).collect();
        assert_eq!(names.len(), ALL.len());
    }

    #[test]
    fn operators_are_told_of_all_of_them() {
        let manual = include_str!("../../../../docs/operations.md");
        let rows: Vec<_> =
            manual.lines().filter(|line| line.starts_with("| `") && line.matches('|').count() == 5).collect();
        for code in ALL {
            let named = rows.iter().any(|row| row.contains(&format!("`{}`", code.name)));
            assert!(named, "{} is not in the table of docs/operations.md", code.name);
        }
    }
}
