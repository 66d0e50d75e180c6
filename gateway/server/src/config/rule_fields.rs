//! The keys of a rule file, except those of its tiers, which the tiers declare themselves.

use kvgate_core::schema::{Field, Kind};

use super::gateway_fields::{
    BREAKER_FIELDS, LIMITS_FIELDS, PROBE_FIELDS, PROBE_FORMS, RETRY_FIELDS, TELEMETRY_FIELDS, TIMEOUTS_FIELDS,
};
use super::table::{Form, Table, Times};

/// The tables of a rule file, except `[tier.<name>]`.
pub const RULE: &[Table] =
    &[TOP, MATCH, EVENTS, ENDPOINT, TLS, LEGS, LIMITS, TIMEOUTS, RETRY, BREAKER, PROBE, TELEMETRY];

/// The words of `engine`: the names of [`kvgate_engines::ENGINES`].
const ENGINES: &[&str] = &["vllm", "sglang", "trtllm", "llamacpp"];

const TOP: Table = Table {
    name: "",
    times: Times::Once,
    doc: "The service: one file is one rule.",
    fields: &[
        Field {
            key: "name",
            kind: Kind::Text,
            default: "",
            doc: "Its name in metrics, logs and the admin surface. Absent: the file's name without `.toml`.",
        },
        Field {
            key: "id",
            kind: Kind::Int { min: 1, max: u32::MAX as i64 },
            default: "",
            doc: "Its number for the netlox API. Absent: it has none.",
        },
        Field {
            key: "engine",
            kind: Kind::Choice(ENGINES),
            default: "\"vllm\"",
            doc: "What its endpoints run.",
        },
        Field {
            key: "shape",
            kind: Kind::Choice(&["pool", "prefill-decode"]),
            default: "\"pool\"",
            doc: "`pool`: an endpoint serves a request whole. `prefill-decode`: one endpoint computes the prompt, and \
                  another, which fetches its blocks from there, the answer.",
        },
        Field {
            key: "tiers",
            kind: Kind::TextList,
            default: "",
            doc: "The ladder: who chooses an endpoint, in this order; the first that does not pass decides. \
                  `min-load` ends every ladder. Absent: `kv-exact`, where the engine \
                  announces its blocks; before it `admission`, `session` and `radix-trie` where the rule is \
                  `prefill-decode`. There it chooses among the endpoints for prefill.",
        },
        Field {
            key: "decode_tiers",
            kind: Kind::TextList,
            default: "",
            doc: "`prefill-decode` only: the ladder that chooses among the endpoints for decode. Absent: those of \
                  `admission` and `session` that are in `tiers`.",
        },
        Field {
            key: "explain",
            kind: Kind::Bool,
            default: "false",
            doc: "Whether a request with `x-kvgate-explain: 1` is answered with `x-kvgate-decision`, which names \
                  endpoints and loads.",
        },
    ],
    required: &[],
    forms: &[("name", Form::Name)],
};

const MATCH: Table = Table {
    name: "match",
    times: Times::Once,
    doc: "Which requests it serves; all of it is optional. Of several rules that match, the more specific serves: \
          first the one that names the listener, then the one that names the host, then the one with the longer \
          path, then the one that names the model.",
    fields: &[
        Field {
            key: "listener",
            kind: Kind::Text,
            default: "",
            doc: "The name of the listener. Absent: any.",
        },
        Field {
            key: "hosts",
            kind: Kind::TextList,
            default: "[]",
            doc: "The hosts that clients name, without port, in any case of letters. Empty: any.",
        },
        Field {
            key: "path_prefix",
            kind: Kind::Text,
            default: "\"/\"",
            doc: "The start of the path, in whole segments: `/v1` is the start of `/v1/models` but not of `/v1beta`.",
        },
        Field {
            key: "models",
            kind: Kind::TextList,
            default: "[]",
            doc: "The models, exactly as clients name them in `X-Model` or else in the body. Empty: any. A \
                  request that names none is served by a rule for any, or else by the most specific that matches.",
        },
    ],
    required: &[],
    forms: &[("listener", Form::Name), ("hosts", Form::Host), ("path_prefix", Form::Path)],
};

const EVENTS: Table = Table {
    name: "events",
    times: Times::Once,
    doc: "Where the engines publish the blocks they hold (vLLM and SGLang: `--kv-events-config`). Read for the tier \
          `kv-exact`, or when this table or an endpoint's `kv_events` is given.",
    fields: &[
        Field {
            key: "port",
            kind: Kind::Int { min: 0, max: 65_535 },
            default: "5557",
            doc: "The port of the events on each endpoint's host, but for those of the role `decode`; 0 means that \
                  only endpoints with `kv_events` publish.",
        },
        Field {
            key: "replay_port_offset",
            kind: Kind::Int { min: 0, max: 65_535 },
            default: "1000",
            doc: "What to add to the port of the events for that of the replay, from which missed events are \
                  fetched; 0 means that there is no replay.",
        },
    ],
    required: &[],
    forms: &[],
};

const ENDPOINT: Table = Table {
    name: "endpoint",
    times: Times::Many,
    doc: "An engine that serves the rule. Its position in the file is its number outside (`ep_idx`), which it \
          keeps over reloads; those that come later are numbered on.",
    fields: &[
        Field {
            key: "address",
            kind: Kind::Text,
            default: "",
            doc: "Where the engine serves its API. Needed.",
        },
        Field {
            key: "role",
            kind: Kind::Choice(&["any", "prefill", "decode"]),
            default: "\"any\"",
            doc: "`any`: it serves requests whole, as all do in a pool. In a `prefill-decode` rule `prefill` and \
                  `decode` each do their part, and `any` serves what finds no endpoint for one of them.",
        },
        Field {
            key: "weight",
            kind: Kind::Int { min: 1, max: 1_000 },
            default: "1",
            doc: "Its share of the load beside the others'.",
        },
        Field {
            key: "tls",
            kind: Kind::Text,
            default: "",
            doc: "The name in its certificate, which is verified; more in `[tls]`. Absent: plain HTTP.",
        },
        Field {
            key: "kv_events",
            kind: Kind::Text,
            default: "",
            doc: "Where it publishes its blocks. Absent: the address's host, port `events.port`.",
        },
        Field {
            key: "kv_replay",
            kind: Kind::Text,
            default: "",
            doc: "Where missed events are fetched. Absent: as `kv_events`, its port plus \
                  `events.replay_port_offset`.",
        },
        Field {
            key: "nixl_port",
            kind: Kind::Int { min: 1, max: 65_535 },
            default: "",
            doc: "The port by which `legs.connector = \"p2p-nccl\"` names it. Absent: the address's.",
        },
    ],
    required: &["address"],
    forms: &[
        ("address", Form::Peer),
        ("tls", Form::Certified),
        ("kv_events", Form::Zmq),
        ("kv_replay", Form::Zmq),
    ],
};

const TLS: Table = Table {
    name: "tls",
    times: Times::Once,
    doc: "How endpoints with a `tls` name are spoken to: requests, probes and questions alike. Files are relative to this \
          one; they are read anew at every reload, and new connections then go by them. Engines are always verified.",
    fields: &[
        Field {
            key: "ca",
            kind: Kind::Text,
            default: "",
            doc: "The authorities, in PEM, one of which must vouch for an engine. Absent: those of the system \
                  (`SSL_CERT_FILE`).",
        },
        Field {
            key: "client_certificate",
            kind: Kind::Text,
            default: "",
            doc: "The certificate that the gateway shows engines which ask for one, and its chain, in PEM. Absent: none.",
        },
        Field {
            key: "client_key",
            kind: Kind::Text,
            default: "",
            doc: "Its key, in PEM. Absent: it is in the file of `client_certificate`.",
        },
        Field {
            key: "http2",
            kind: Kind::Bool,
            default: "false",
            doc: "Whether engines are offered HTTP/2; those that do not take it are spoken to in HTTP/1.1. Up to 64 \
                  requests share a connection.",
        },
    ],
    required: &[],
    forms: &[],
};

const LEGS: Table = Table {
    name: "legs",
    times: Times::Once,
    doc: "How a request of a `prefill-decode` rule is split into its two legs.",
    fields: &[
        Field {
            key: "connector",
            kind: Kind::Choice(&["nixl", "p2p-nccl"]),
            default: "\"nixl\"",
            doc: "How the engines move blocks (vLLM: `kv_connector` of `--kv-transfer-config`). `p2p-nccl` needs the \
                  addresses of both legs in `x-request-id`, which then is not the client's.",
        },
        Field {
            key: "without_prefill",
            kind: Kind::Choice(&["recompute", "refuse"]),
            default: "\"recompute\"",
            doc: "When two endpoints failed at the prompt, or none can be asked, and none of the role `any` serves the \
                  request either: `recompute` lets the endpoint for decode compute it, `refuse` answers with the \
                  failure, and has an answer of a prefill's or a deadline of its stand.",
        },
        Field {
            key: "prefill_answer",
            kind: Kind::Size { min: 4 << 10, max: 64 << 20 },
            default: "\"1MiB\"",
            doc: "The largest answer to a prefill that is read; with a larger one the \
                  prompt counts as not computed, and nobody is blamed: what the client asks for makes it so.",
        },
    ],
    required: &[],
    forms: &[],
};

const LIMITS: Table = Table {
    name: "limits",
    times: Times::Over,
    doc: "What a request of this rule may take up, where it differs from gateway.toml.",
    fields: LIMITS_FIELDS,
    required: &[],
    forms: &[],
};

const TIMEOUTS: Table = Table {
    name: "timeouts",
    times: Times::Over,
    doc: "How long the steps of a request of this rule may take, where it differs from gateway.toml.",
    fields: TIMEOUTS_FIELDS,
    required: &[],
    forms: &[],
};

const RETRY: Table = Table {
    name: "retry",
    times: Times::Over,
    doc: "When a request of this rule is asked of another endpoint, where it differs from gateway.toml.",
    fields: RETRY_FIELDS,
    required: &[],
    forms: &[],
};

const BREAKER: Table = Table {
    name: "breaker",
    times: Times::Over,
    doc: "When an engine of this rule is left alone, where it differs from gateway.toml. For an engine of several rules the \
          strictest of each key holds, but `cooling` is that of the rule that was answered.",
    fields: BREAKER_FIELDS,
    required: &[],
    forms: &[],
};

const PROBE: Table = Table {
    name: "probe",
    times: Times::Over,
    doc: "How the engines of this rule are asked whether they are well, where it differs from gateway.toml. An engine of several \
          rules is asked as the one has it that asks most often, of equals the first by its name: `kvgate check` warns \
          where the others would ask for something else.",
    fields: PROBE_FIELDS,
    required: &[],
    forms: PROBE_FORMS,
};

const TELEMETRY: Table = Table {
    name: "telemetry",
    times: Times::Over,
    doc: "How the engines of this rule are asked how they are, where it differs from gateway.toml. An engine of \
          several rules is asked as the one has it that asks most often.",
    fields: TELEMETRY_FIELDS,
    required: &[],
    forms: &[],
};
