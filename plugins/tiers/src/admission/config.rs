//! The keys of `[tier.admission]`.

use std::time::Duration;

use http::HeaderName;
use kvgate_core::schema::{self, Field, Kind};
use kvgate_core::{BuildError, Depth, Role};
use serde::Deserialize;

const PLACES: Kind = Kind::Int { min: 1, max: 100_000 };

pub const SCHEMA: &[Field] = &[
    Field {
        key: "mode",
        kind: Kind::Choice(&["enforce", "observe"]),
        default: "\"enforce\"",
        doc: "`observe`: nothing is held back; what would have been is counted in `kvgate_admission_observed_total`.",
    },
    Field {
        key: "max_in_flight",
        kind: PLACES,
        default: "",
        doc: "Requests that an endpoint may have in flight, of all rules on its engine, until their answers end. Absent: \
              no cap.",
    },
    Field {
        key: "prefill_max_in_flight",
        kind: PLACES,
        default: "",
        doc: "The same for prefill endpoints. Absent: `max_in_flight`.",
    },
    Field {
        key: "decode_max_in_flight",
        kind: PLACES,
        default: "",
        doc: "The same for decode endpoints. Absent: `max_in_flight`.",
    },
    Field {
        key: "max_total",
        kind: Kind::Int { min: 1, max: 10_000_000 },
        default: "",
        doc: "Requests of the rule that may be under way, those that wait among them: new ones beyond that are refused. \
              Absent: no bound.",
    },
    Field {
        key: "queue_depth",
        kind: Kind::Int { min: 0, max: 65_536 },
        default: "0",
        doc: "Requests that may wait for a place while every endpoint that could be chosen is full, in each queue: one \
              for every role. 0: they are refused at once.",
    },
    Field {
        key: "queue_wait",
        kind: Kind::Duration { min: Duration::from_millis(10), max: Duration::from_secs(3600) },
        default: "\"5s\"",
        doc: "How long a request may wait, in each queue.",
    },
    Field {
        key: "tenant_header",
        kind: Kind::Text,
        default: "",
        doc: "The header that names who a request is for, set by what authenticates clients in front of the gateway: \
              nobody then takes more of a queue than `tenant_share_pct`. Requests without it are one tenant. Absent: \
              places are not shared out.",
    },
    Field {
        key: "tenant_share_pct",
        kind: Kind::Int { min: 1, max: 100 },
        default: "25",
        doc: "The most of a queue's places that a tenant may take, in percent, rounded up.",
    },
];

#[derive(Debug, Clone, Deserialize)]
struct Keys {
    mode: Mode,
    max_in_flight: Option<u64>,
    prefill_max_in_flight: Option<u64>,
    decode_max_in_flight: Option<u64>,
    max_total: Option<u64>,
    queue_depth: usize,
    #[serde(deserialize_with = "schema::duration")]
    queue_wait: Duration,
    tenant_header: Option<String>,
    tenant_share_pct: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    Enforce,
    Observe,
}

/// What the keys say.
#[derive(Debug, Clone)]
pub struct Config {
    pub mode: Mode,
    pub max_total: Option<u64>,
    pub depth: Depth,
    pub wait: Duration,
    pub tenant: Option<HeaderName>,
    caps: [Option<u64>; 3],
}

impl Config {
    pub fn new(keys: &kvgate_core::TierConfig) -> Result<Self, BuildError> {
        let keys: Keys = keys.parse()?;
        let tenant = keys.tenant_header.map(HeaderName::try_from).transpose().map_err(|_| BuildError {
            key: "tenant_header".into(),
            message: "is not the name of a header".into(),
        })?;
        let share = (keys.queue_depth * keys.tenant_share_pct).div_ceil(100).max(1);
        let all = keys.max_in_flight;
        Ok(Self {
            mode: keys.mode,
            max_total: keys.max_total,
            depth: Depth {
                total: keys.queue_depth,
                tenant: if tenant.is_some() { share } else { usize::MAX },
            },
            wait: keys.queue_wait,
            tenant,
            caps: [all, keys.prefill_max_in_flight.or(all), keys.decode_max_in_flight.or(all)],
        })
    }

    /// How many an endpoint of this role may have in flight.
    pub fn cap(&self, role: Role) -> Option<u64> {
        let [any, prefill, decode] = self.caps;
        match role {
            Role::Any => any,
            Role::Prefill => prefill,
            Role::Decode => decode,
        }
    }
}
