//! The keys of `gateway.toml`. A flat table: add a key here and a member in [`super::types`].

use std::time::Duration;

use kvgate_core::schema::{Field, Kind};

use super::table::{Form, Table, Times};

/// The tables of `gateway.toml`.
pub const GATEWAY: &[Table] = &[
    SERVER,
    LISTENER,
    CONNECTIONS,
    HTTP2,
    ADMIN,
    LOG,
    LIMITS,
    TIMEOUTS,
    RETRY,
    RETRY_BUDGET,
    BREAKER,
    PROBE,
    TELEMETRY,
    TOKENIZER,
    INVENTORY,
    FEED,
    DECISIONS,
    ALARMS,
];

const fn int(min: i64, max: i64) -> Kind {
    Kind::Int { min, max }
}

const fn millis(min: u64, max: u64) -> Kind {
    Kind::Duration { min: Duration::from_millis(min), max: Duration::from_millis(max) }
}

const fn size(min: u64, max: u64) -> Kind {
    Kind::Size { min, max }
}

const SECOND: u64 = 1_000;
const HOUR: u64 = 3_600 * SECOND;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const fn once(name: &'static str, doc: &'static str, fields: &'static [Field]) -> Table {
    Table { name, times: Times::Once, doc, fields, required: &[], forms: &[] }
}

const SERVER: Table = once(
    "server",
    "The process: where its rules are, how it reloads and stops.",
    &[
        Field {
            key: "rules",
            kind: Kind::Text,
            default: "\"rules\"",
            doc: "The folder of rule files, relative to this file. Every `*.toml` in it is a rule, whose name does \
                  not begin with a dot. Read again when something in it changes.",
        },
        Field {
            key: "tokenizers",
            kind: Kind::Text,
            default: "\"tokenizers\"",
            doc: "The folder of tokenizers, relative to this file: `<slug>/tokenizer.json` and \
                  `<slug>/tokenizer_config.json`, where the slug is the model's name with `/` written as `__`.",
        },
        Field {
            key: "threads",
            kind: int(0, 1024),
            default: "0",
            doc: "Threads that serve requests; 0 is one per core.",
        },
        Field {
            key: "body_memory",
            kind: size(16 * MIB, 64 * GIB),
            default: "\"1GiB\"",
            doc: "The memory that the bodies of all requests in flight share. Never more than a quarter of what the \
                  process may have, by its control group, its own limits, or the machine.",
        },
        Field {
            key: "grace_period",
            kind: millis(0, 24 * HOUR),
            default: "\"30s\"",
            doc: "How long requests under way may take to finish when the process is told to stop. At its end event \
                  streams are ended with an error event, and requests without an answer are answered 503.",
        },
        Field {
            key: "drain_delay",
            kind: millis(0, HOUR),
            default: "\"0ms\"",
            doc: "How long the process goes on taking requests when it is told to stop, with `/readyz` at 503: as long as \
                  whoever sends clients here needs to see that. In Kubernetes 10s, and together with `grace_period` less \
                  than `terminationGracePeriodSeconds`.",
        },
        Field {
            key: "warm_up",
            kind: millis(0, HOUR),
            default: "\"10s\"",
            doc: "How long a new process may take to learn by replay what the engines hold, before it is ready all the \
                  same. It serves meanwhile, unless it takes over from another one (`kvgate run --upgrade`). Engines that \
                  cannot be reached hold nobody up.",
        },
        Field {
            key: "upgrade_socket",
            kind: Kind::Text,
            default: "",
            doc: "A socket, relative to this file, where the process hands its listeners over to a new one: after \
                  `SIGQUIT`, to `kvgate run --upgrade` of the same user. Absent: no upgrades.",
        },
        Field {
            key: "reload_debounce",
            kind: millis(10, 60 * SECOND),
            default: "\"200ms\"",
            doc: "How long the files must be left alone before a change is read, so that a change of several files \
                  is read once.",
        },
    ],
);

const LISTENER: Table = Table {
    name: "listener",
    times: Times::Many,
    doc: "An address where clients connect. Without any, there is one with the defaults.",
    fields: &[
        Field {
            key: "name",
            kind: Kind::Text,
            default: "\"edge\"",
            doc: "What rules call it in `match.listener`.",
        },
        Field { key: "address", kind: Kind::Text, default: "\"127.0.0.1:8080\"", doc: "Where it listens." },
        Field {
            key: "expose_routing",
            kind: Kind::Bool,
            default: "false",
            doc: "Whether answers carry `x-kvgate-endpoint` and `x-kvgate-tier`, and of the prefill leg \
                  `x-kvgate-prefill-endpoint` and `x-kvgate-prefill-tier`. They tell clients what stands \
                  behind the gateway: leave it off where strangers connect.",
        },
        Field {
            key: "trusted_proxies",
            kind: Kind::TextList,
            default: "[]",
            doc: "The networks of the proxies and balancers in front, as \"10.0.0.0/8\" or single addresses. Only they may \
                  speak the PROXY protocol, and only their `X-Forwarded-For` and `X-Forwarded-Proto` are believed: the \
                  client is the last address, from the right, that is none of them.",
        },
        Field {
            key: "proxy_protocol",
            kind: Kind::Bool,
            default: "false",
            doc: "Whether every connection begins with a PROXY header (version 1 or 2), as balancers send it that pass \
                  TCP on. It is read before TLS; connections without one, or from others than `trusted_proxies`, are \
                  closed. From then on the client it names is the peer.",
        },
        Field {
            key: "forwarded",
            kind: Kind::Bool,
            default: "true",
            doc: "Whether engines are told whose request it is: `X-Forwarded-For` and `X-Forwarded-Proto`. Those of \
                  `trusted_proxies` are added to; what others send in these fields, in `Forwarded`, `X-Real-IP` and \
                  `X-Forwarded-Host`, `-Port` and `-Server`, is dropped. `false`: such fields pass as they came.",
        },
        Field {
            key: "redirect_https",
            kind: int(1, 65_535),
            default: "",
            doc: "The port of TLS to which every request is sent, with status 308, and none is served. Not for a \
                  listener with TLS of its own. Absent: requests are served. Those that a trusted proxy says came by \
                  https are served in any case.",
        },
        Field {
            key: "hsts",
            kind: Kind::Text,
            default: "",
            doc: "The value of `Strict-Transport-Security` on engines' answers to clients that came by TLS, as \
                  \"max-age=31536000\". Absent: no such field.",
        },
        Field {
            key: "tls.certificates",
            kind: Kind::TextList,
            default: "[]",
            doc: "The certificates, each with its chain, in PEM files relative to this one. A client gets the first whose \
                  name it asks for, or else the first. Empty: no TLS. The files are read again when they change.",
        },
        Field {
            key: "tls.keys",
            kind: Kind::TextList,
            default: "[]",
            doc: "Their keys, in the same order; one may stand for several. Empty: each is in the file of its certificate.",
        },
        Field {
            key: "tls.client_ca",
            kind: Kind::Text,
            default: "",
            doc: "The authorities, one of which must vouch for the certificate that a client then has to show. Absent: \
                  clients show none.",
        },
        Field {
            key: "tls.min_version",
            kind: Kind::Choice(&["1.2", "1.3"]),
            default: "\"1.2\"",
            doc: "The oldest version of TLS that is spoken.",
        },
        Field {
            key: "tls.http2",
            kind: Kind::Bool,
            default: "true",
            doc: "Whether clients are offered HTTP/2 beside HTTP/1.1; more in `[http2]`.",
        },
    ],
    required: &[],
    forms: &[
        ("name", Form::Name),
        ("address", Form::Socket),
        ("trusted_proxies", Form::Network),
        ("tls.keys", Form::Key),
    ],
};

const CONNECTIONS: Table = once(
    "connections",
    "What the connections of clients may take up, on all listeners, and what a request may be before any rule looks at it.",
    &[
        Field {
            key: "max",
            kind: int(1, 1_000_000),
            default: "16_384",
            doc: "The most connections at once; more are answered 503 `overloaded`, or closed. Each takes a file \
                  descriptor, and one more for its engine: never more than half of those that the process may have.",
        },
        Field {
            key: "max_per_address",
            kind: int(0, 1_000_000),
            default: "4_096",
            doc: "The most of one client: an IPv4 address, or a network of IPv6 (/64). 0 is no limit but `max`: where all \
                  come through a proxy that does not say for whom.",
        },
        Field {
            key: "backlog",
            kind: int(1, 65_535),
            default: "1024",
            doc: "The most connections that wait to be accepted, on each listener; the system may allow fewer.",
        },
        Field {
            key: "head_timeout",
            kind: millis(100, HOUR),
            default: "\"10s\"",
            doc: "From the first byte of a request to the end of its head, for the first request of a connection from \
                  its acceptance on; later it is answered 408 `head_too_slow`.",
        },
        Field {
            key: "keep_alive",
            kind: millis(100, 24 * HOUR),
            default: "\"75s\"",
            doc: "How long a connection is kept between two requests.",
        },
        Field {
            key: "head",
            kind: size(KIB, 512 * KIB),
            default: "\"64KiB\"",
            doc: "The largest head of a request; a larger one is answered 431 `head_too_large`.",
        },
        Field {
            key: "fields",
            kind: int(1, 250),
            default: "128",
            doc: "The most fields of a head; more are answered 431 `head_too_large`.",
        },
        Field {
            key: "uri",
            kind: size(64, 32 * KIB),
            default: "\"8KiB\"",
            doc: "The longest request target; a longer one is answered 414 `uri_too_long`.",
        },
    ],
);

const HTTP2: Table = once(
    "http2",
    "What a client's HTTP/2 connection may take up. It is closed when it has had no request for as long as one of \
     HTTP/1.1 would be.",
    &[
        Field {
            key: "streams",
            kind: int(1, 10_000),
            default: "128",
            doc: "Requests at once on a connection.",
        },
        Field {
            key: "stream_window",
            kind: size(16 * KIB, 64 * MIB),
            default: "\"256KiB\"",
            doc: "What a client may send of one body before it is read.",
        },
        Field {
            key: "connection_window",
            kind: size(64 * KIB, 256 * MIB),
            default: "\"1MiB\"",
            doc: "What it may send of all bodies of a connection before they are read.",
        },
        Field {
            key: "control_frames",
            kind: int(1, 100_000),
            default: "100",
            doc: "Frames that carry no request (PING, SETTINGS, PRIORITY, CONTINUATION, unknown and empty DATA frames) a \
                  second, ten times as many at once; beyond that the connection is closed.",
        },
        Field {
            key: "resets",
            kind: int(1, 100_000),
            default: "20",
            doc: "Requests that a client takes back a second, ten times as many at once; beyond that the connection is \
                  closed.",
        },
    ],
);

const ADMIN: Table = Table {
    name: "admin",
    times: Times::Once,
    doc: "Metrics, health and inspection, on an address of their own.",
    fields: &[
        Field {
            key: "address",
            kind: Kind::Text,
            default: "\"127.0.0.1:11111\"",
            doc: "Where it listens. Elsewhere than on a loopback address it needs `token_file`.",
        },
        Field {
            key: "token_file",
            kind: Kind::Text,
            default: "",
            doc: "A file, relative to this one, that holds the token which callers must send as \
                  `Authorization: Bearer`. Absent: no token is asked for.",
        },
    ],
    required: &[],
    forms: &[("address", Form::Socket)],
};

const LOG: Table = once(
    "log",
    "The log, on standard error.",
    &[
        Field {
            key: "format",
            kind: Kind::Choice(&["text", "json"]),
            default: "\"text\"",
            doc: "Lines for people, or one JSON object a line.",
        },
        Field {
            key: "block_hashes",
            kind: Kind::Bool,
            default: "false",
            doc: "A line for each block of each prompt that `kv-exact` looks up: its hash and, under a strict contract, \
                  the bytes that were hashed, in hex. They hold the prompt's token ids: for a short search for why \
                  hashes differ, and for nothing else.",
        },
    ],
);

/// What a request may take up; a rule may say otherwise for its own.
pub(super) const LIMITS_FIELDS: &[Field] = &[
    Field {
        key: "body",
        kind: size(KIB, GIB),
        default: "\"16MiB\"",
        doc: "The largest request body that is taken; a larger one is answered 413.",
    },
    Field {
        key: "body_rate",
        kind: size(0, GIB),
        default: "\"1KiB\"",
        doc: "The least a client may send of a body per second, once `timeouts.body_grace` is over; a slower one is \
              answered 408 `body_too_slow`. 0 is no least rate.",
    },
];

const LIMITS: Table = once("limits", "What a request may take up.", LIMITS_FIELDS);

/// How long the steps of a request may take; a rule may say otherwise for its own.
pub(super) const TIMEOUTS_FIELDS: &[Field] = &[
    Field {
        key: "connect",
        kind: millis(10, 60 * SECOND),
        default: "\"500ms\"",
        doc: "To connect to an engine, TLS included.",
    },
    Field {
        key: "prepare",
        kind: millis(1, 10 * SECOND),
        default: "\"100ms\"",
        doc: "For a tier to get the facts it decides on; when it takes longer the next tier decides, for the reason \
              `deadline`.",
    },
    Field {
        key: "prefill",
        kind: millis(100, 24 * HOUR),
        default: "\"30s\"",
        doc: "`prefill-decode` rules only: from the end of a prefill's request to its answer.",
    },
    Field {
        key: "first_byte",
        kind: millis(100, 24 * HOUR),
        default: "\"5m\"",
        doc: "From the end of the request to the engine's first byte of an answer. An answer that is not streamed \
              begins when it is complete.",
    },
    Field {
        key: "idle",
        kind: millis(100, 24 * HOUR),
        default: "\"2m\"",
        doc: "Between two pieces of an answer, and how long an engine may take none of the request.",
    },
    Field {
        key: "client_idle",
        kind: millis(100, 24 * HOUR),
        default: "\"5m\"",
        doc: "For the client to take a piece of its answer, of 64 KiB at most. Until it does, no more is read from the \
              engine; then it counts as gone.",
    },
    Field {
        key: "total",
        kind: millis(100, 7 * 24 * HOUR),
        default: "\"1h\"",
        doc: "For the whole request, all attempts and legs included.",
    },
    Field {
        key: "body",
        kind: millis(100, HOUR),
        default: "\"30s\"",
        doc: "For the client to send the whole of its request body.",
    },
    Field {
        key: "body_grace",
        kind: millis(0, HOUR),
        default: "\"10s\"",
        doc: "How long a body may come slower than `limits.body_rate`.",
    },
];

const TIMEOUTS: Table = once("timeouts", "How long the steps of a request may take.", TIMEOUTS_FIELDS);

/// What is asked of another endpoint; a rule may say otherwise for its own.
pub(super) const RETRY_FIELDS: &[Field] = &[
    Field {
        key: "attempts",
        kind: int(1, 16),
        default: "3",
        doc: "How many endpoints are asked at most until one answers, each once; those that cannot be connected to do \
              not count.",
    },
    Field {
        key: "resend",
        kind: Kind::Bool,
        default: "true",
        doc: "Whether a request that only computes (completions, chat, embeddings, scores) is asked of another \
              endpoint when an engine that may have read some of it breaks off before the client has a byte of its \
              answer, or does not take all of it; it may then run twice. (A short answer reaches the client whole or not \
              at all.) `false` answers 502 `engine_error`. Requests that change nothing (GET) are always asked again, \
              others with an effect (files, stored responses) never. A kept connection that breaks at once counts as \
              one that the engine had given up: the same endpoint is then asked once more on a fresh one, and that is no \
              failure of its.",
    },
    Field {
        key: "busy",
        kind: Kind::Bool,
        default: "true",
        doc: "Whether a request is asked of another endpoint when an engine answers it with 429 or 503 and \
              `Retry-After`. When all of them do, the client gets the last one's answer and the shortest of their times.",
    },
    Field {
        key: "statuses",
        kind: Kind::IntList { min: 400, max: 599 },
        default: "[]",
        doc: "Other statuses of an engine's answer upon which another endpoint is asked, `[500, 503]` say; the last \
              answer reaches the client when nobody does better. The request may run twice.",
    },
];

const RETRY: Table = once(
    "retry",
    "When a request is asked of another endpoint. An endpoint that takes no connection is always passed over; one that \
     takes too long to answer never.",
    RETRY_FIELDS,
);

const RETRY_BUDGET: Table = once(
    "retry_budget",
    "How much all requests together may be asked again, so that a fleet in trouble is not asked for more than its \
     share. Endpoints that take no connection cost it nothing. Once it is used up, the client gets the failure.",
    &[
        Field {
            key: "percent",
            kind: int(0, 1000),
            default: "20",
            doc: "Retries to a hundred requests, over the last ten seconds.",
        },
        Field {
            key: "floor",
            kind: int(0, 100_000),
            default: "10",
            doc: "Retries per second that are allowed beside, over the same time.",
        },
    ],
);

/// When an endpoint is left alone; a rule may say otherwise for its own.
pub(super) const BREAKER_FIELDS: &[Field] = &[
    Field {
        key: "failures",
        kind: int(0, 1_000),
        default: "",
        doc: "Failures in a row after which an engine is left alone: connections not taken, answers broken off, deadlines \
              of `timeouts` but `total`. A success starts the count anew; a 4xx and a client that leaves change nothing. 0: \
              never. Absent: 3 in `prefill-decode` rules, 5 in pools.",
    },
    Field {
        key: "origin_errors",
        kind: int(0, 1_000),
        default: "",
        doc: "Answers with a 5xx in a row that do the same; where both come, each uses up its share. 0: never, and any \
              answer then closes a half-open breaker: that the engine is reached is all that counts. Absent: as `failures`.",
    },
    Field {
        key: "open_for",
        kind: millis(10, HOUR),
        default: "\"30s\"",
        doc: "How long it is left alone. After that the breaker is half open.",
    },
    Field {
        key: "half_open",
        kind: int(1, 1_000),
        default: "1",
        doc: "Requests at once that a half-open breaker lets through, to see: one that is answered with success (2xx, 3xx) \
              closes it, one that fails opens it again, a 4xx does neither and makes room for the next. One that takes longer than `open_for`, and than \
              10 seconds, no longer counts among them: a long answer does not keep its engine out of service.",
    },
    Field {
        key: "slow_start",
        kind: millis(0, HOUR),
        default: "\"0s\"",
        doc: "How long an engine that is back takes to have its whole share again, where a tier goes by weights or capacity; \
              `\"0s\"`: at once.",
    },
    Field {
        key: "cooling",
        kind: millis(0, HOUR),
        default: "\"60s\"",
        doc: "The longest that an engine which answers 429 or 503 with `Retry-After` is left alone for that; no failure is \
              counted. `\"0s\"`: not at all, and a 503 counts as any 5xx. A change holds from the next such answer on.",
    },
];

const BREAKER: Table = once(
    "breaker",
    "When an engine is left alone: after failures in a row, and while it asks for it. What is counted is the engine's, of all \
     rules that name it.",
    BREAKER_FIELDS,
);

/// How engines are asked whether they are well; a rule may say otherwise for its own.
pub(super) const PROBE_FIELDS: &[Field] = &[
    Field {
        key: "mode",
        kind: Kind::Choice(&["http", "tcp", "off"]),
        default: "\"http\"",
        doc: "`http`: a `GET` that is answered. `tcp`: a connection that is taken, TLS not included. `off`: nothing, and every \
              engine counts as well.",
    },
    Field {
        key: "path",
        kind: Kind::Text,
        default: "",
        doc: "What is asked for. Absent: the engine's own, `/health` for all of them.",
    },
    Field {
        key: "codes",
        kind: Kind::IntList { min: 200, max: 599 },
        default: "",
        doc: "The statuses of an engine that is well. Absent: all but a 5xx, so that a server which has no such page is taken \
              to be well.",
    },
    Field {
        key: "interval",
        kind: millis(100, HOUR),
        default: "\"5s\"",
        doc: "Between two questions to an engine, give or take a tenth, whatever other engines do; one that takes longer \
              to answer is asked again at once. Each is asked one at a time, over one connection.",
    },
    Field {
        key: "timeout",
        kind: millis(10, 60 * SECOND),
        default: "\"3s\"",
        doc: "For the whole of an answer, connecting included. An engine that takes longer and has meanwhile answered a \
              request with success is not taken to be down.",
    },
    Field {
        key: "unhealthy_after",
        kind: int(1, 100),
        default: "3",
        doc: "Failures in a row after which an engine is down: it gets no requests, and loses its sessions.",
    },
    Field {
        key: "healthy_after",
        kind: int(1, 100),
        default: "1",
        doc: "Successes in a row after which it is back.",
    },
];

/// What its texts look like.
pub(super) const PROBE_FORMS: &[(&str, Form)] = &[("path", Form::Path)];

const PROBE: Table = Table {
    name: "probe",
    times: Times::Once,
    doc: "Asking the engines whether they are well. One that was never asked counts as well; what its circuit breaker thinks of \
          it is another matter, which requests decide.",
    fields: PROBE_FIELDS,
    required: &[],
    forms: PROBE_FORMS,
};

/// How engines are asked; a rule may say otherwise for its own.
pub(super) const TELEMETRY_FIELDS: &[Field] = &[
    Field {
        key: "interval",
        kind: millis(0, HOUR),
        default: "\"10s\"",
        doc: "Between two questions to an engine, give or take a tenth; `\"0s\"` asks never, and endpoints are then \
              compared by their weights and without what waits in them, but for engines that another rule asks.",
    },
    Field {
        key: "timeout",
        kind: millis(10, 60 * SECOND),
        default: "\"5s\"",
        doc: "For the whole of an answer, connecting included.",
    },
    Field {
        key: "max_size",
        kind: size(KIB, 64 * MIB),
        default: "\"4MiB\"",
        doc: "The largest page that is taken; a larger one counts as none.",
    },
    Field {
        key: "max_age",
        kind: millis(10, 24 * HOUR),
        default: "\"30s\"",
        doc: "How long an answer is believed; longer than `interval`. After that the endpoints of the rule are \
              compared by their weights, until the engine answers again.",
    },
];

const TELEMETRY: Table = once(
    "telemetry",
    "Asking the engines, on their metrics pages, how many KV blocks they have, how full their caches are, how many \
     requests run and wait, and what they have counted: for rules with a tier that weighs load by capacity (`kv-exact`, \
     `gpu-aware`) and for those of the shape `prefill-decode`.",
    TELEMETRY_FIELDS,
);

const TOKENIZER: Table = once(
    "tokenizer",
    "Turning prompts into tokens, as the engines do.",
    &[
        Field {
            key: "max_models",
            kind: int(1, 4096),
            default: "32",
            doc: "The most models held at once; one takes about ten times its `tokenizer.json` of memory.",
        },
        Field {
            key: "cache",
            kind: size(0, 16 * GIB),
            default: "\"64MiB\"",
            doc: "The most memory per model for pieces of text already tokenised; 0 turns that off.",
        },
        Field {
            key: "max_text",
            kind: size(KIB, GIB),
            default: "\"16MiB\"",
            doc: "The longest prompt that is tokenised; with a longer one the tiers that need tokens pass.",
        },
        Field {
            key: "inline_text",
            kind: size(0, GIB),
            default: "\"16KiB\"",
            doc: "Prompts up to this length are tokenised where the request is served, longer ones on threads of \
                  their own.",
        },
        Field {
            key: "retry",
            kind: millis(SECOND, HOUR),
            default: "\"30s\"",
            doc: "How long a tokenizer that could not be loaded is left alone.",
        },
    ],
);

const INVENTORY: Table = once(
    "inventory",
    "The mirror of the blocks that the engines hold.",
    &[
        Field {
            key: "max_caches",
            kind: int(1, 1022),
            default: "575",
            doc: "The most caches (engines times their ranks) mirrored at once. Up to 63 take least memory; then it \
                  grows in steps at 319, 575 and 1022.",
        },
        Field {
            key: "max_blocks",
            kind: int(1_000, 100_000_000),
            default: "1_000_000",
            doc: "The most blocks per cache where the engine does not say how many it has. A cache that goes beyond \
                  has lost removals: it is cleared and filled again.",
        },
        Field {
            key: "max_orphans",
            kind: int(0, 10_000_000),
            default: "65_536",
            doc: "The most blocks per cache remembered while their parent is unknown.",
        },
    ],
);

const FEED: Table = once(
    "feed",
    "The connections on which engines publish their blocks.",
    &[
        Field {
            key: "queue",
            kind: size(MIB, GIB),
            default: "\"64MiB\"",
            doc: "The most bytes of events per engine waiting to be read into the inventory. Beyond it they are \
                  dropped, and the cache is cleared and filled again.",
        },
        Field {
            key: "backoff_min",
            kind: millis(10, 60 * SECOND),
            default: "\"200ms\"",
            doc: "The wait before connecting again after the first failure; it doubles with each.",
        },
        Field {
            key: "backoff_max",
            kind: millis(100, HOUR),
            default: "\"5s\"",
            doc: "The longest wait before connecting again.",
        },
    ],
);

const DECISIONS: Table = once(
    "decisions",
    "The record of what was decided and why.",
    &[
        Field {
            key: "keep",
            kind: int(0, 1_000_000),
            default: "1024",
            doc: "How many of the latest decisions are kept in memory for inspection.",
        },
        Field {
            key: "prompt_hashes",
            kind: int(0, 4096),
            default: "0",
            doc: "How many hashes of a prompt its decision record holds at most, one for each 512 tokens, so that \
                  `kvgate replay` can tell what another rule would have made of the same requests. They are keyed at \
                  random when the gateway starts, and say nothing of the text. Prompts that no tier asks the tokens of \
                  are tokenised for it, before they are sent on. 0 turns it off.",
        },
    ],
);

const ALARMS: Table = once(
    "alarms",
    "When to say that engines do not do what a rule needs of them. A tier's own alarms are keys of the tier.",
    &[
        Field {
            key: "events_missing_requests",
            kind: int(0, 1_000_000),
            default: "20",
            doc: "After a rule with `kv-exact` has had this many requests while none of its engines published an event \
                  or is known to hold a block, or one of its engines has computed this many prompts of which it held \
                  nothing, and published as little; 0 turns it off.",
        },
        Field {
            key: "events_missing_after",
            kind: millis(SECOND, 24 * HOUR),
            default: "\"30s\"",
            doc: "And when this long has gone by since the first of them.",
        },
    ],
);
