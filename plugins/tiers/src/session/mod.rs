//! `session`: a conversation stays where it is.

mod table;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::HeaderName;
use kvgate_core::schema::{self, Field, Kind};
use kvgate_core::{
    BuildContext, BuildError, Choice, Completion, Counter, Dispatch, Gauge, HeaderMap, Miss, MissKind,
    Request, Routing, Tier, TierConfig, TierKind, Verdict,
};
use serde::Deserialize;

use table::{Id, Sessions};

const NO_KEY: Miss = Miss("no_key");
const UNKNOWN: Miss = Miss("unknown");
const PIN_LOST: Miss = Miss("pin_lost");
const PIN_BUSY: Miss = Miss("pin_busy");

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "session",
    doc: "Keeps a conversation on the endpoints that answered it last, one of each role, even while they are drained. A \
          conversation is known by its header, else by the body's `user_id`, else by its `user`; ids that begin with \
          `auto-` are made by gateways and name none. It is pinned by whoever answers, whichever tier chose it, and let \
          go when that endpoint breaks off, stalls or answers with a 5xx, is down or disabled.",
    misses: &[
        MissKind { reason: NO_KEY.0, doc: "The request names no conversation." },
        MissKind {
            reason: UNKNOWN.0,
            doc: "The conversation is new, has run out, or has no endpoint of this role yet.",
        },
        MissKind {
            reason: PIN_LOST.0,
            doc: "Its endpoint is down, disabled or no longer in the rule: the conversation is let go.",
        },
        MissKind {
            reason: PIN_BUSY.0,
            doc: "Its endpoint was tried in vain for this request, or another tier leaves it out: it is full, say.",
        },
    ],
    schema: &[
        Field {
            key: "header",
            kind: Kind::Text,
            default: "\"X-Conversation-Id\"",
            doc: "The header that names the conversation. One that is new with every request, `X-Request-Id` say, is \
                  refused.",
        },
        Field {
            key: "ttl",
            kind: Kind::Duration { min: Duration::from_secs(1), max: Duration::from_secs(30 * 86_400) },
            default: "\"5m\"",
            doc: "A conversation that rested for so long is new again: how long engines keep what they do not use.",
        },
        Field {
            key: "max_sessions",
            kind: Kind::Int { min: 1, max: 10_000_000 },
            default: "65536",
            doc: "Conversations that are kept, about 130 bytes each. The least recently used give way, which \
                  `kvgate_session_evictions_total` counts.",
        },
    ],
    build,
};

/// Headers whose values are new with every request.
const OF_A_REQUEST: [&str; 5] =
    ["x-request-id", "x-correlation-id", "x-trace-id", "traceparent", "x-amzn-trace-id"];

#[derive(Debug, Clone, Deserialize)]
struct Config {
    header: String,
    #[serde(deserialize_with = "schema::duration")]
    ttl: Duration,
    max_sessions: usize,
}

struct SessionTier {
    header: HeaderName,
    ttl: Duration,
    most: usize,
    /// One for all ladders of the rule.
    sessions: Arc<Mutex<Sessions>>,
    active: Arc<Gauge>,
    evictions: Arc<Counter>,
}

fn build(config: &TierConfig, context: &mut BuildContext<'_>) -> Result<Arc<dyn Tier>, BuildError> {
    let config: Config = config.parse()?;
    let wrong = |message: &str| BuildError { key: "header".into(), message: message.into() };
    let header = HeaderName::try_from(&config.header).map_err(|_| wrong("is not the name of a header"))?;
    if OF_A_REQUEST.contains(&header.as_str()) {
        return Err(wrong(
            "names a request, not a conversation: every request would be a session of its own",
        ));
    }
    let labels = [("service", context.rule)];
    Ok(Arc::new(SessionTier {
        sessions: context.state("session", header.as_str(), Mutex::default),
        active: context.gauge("loxilb_pd_sessions_active", "Conversations that session keeps.", &labels),
        evictions: context.counter(
            "kvgate_session_evictions_total",
            "Conversations that gave way to others before they had run out.",
            &labels,
        ),
        header,
        ttl: config.ttl,
        most: config.max_sessions,
    }))
}

/// Where a conversation's id stands, and the id. In two places one id is two conversations.
fn key<'a>(header: &HeaderName, request: &'a Request) -> Option<(&'static str, &'a [u8])> {
    let named = |id: &&[u8]| !id.is_empty() && !id.starts_with(b"auto-");
    let header = request.headers.get(header).map(http::HeaderValue::as_bytes).filter(named);
    let user = || request.user.as_deref().map(str::as_bytes).filter(named);
    header.map(|id| ("header", id)).or_else(|| user().map(|id| ("user", id)))
}

impl SessionTier {
    fn lock(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something about the session of a request, if it has one.
    fn about<T>(
        &self,
        request: &Request,
        now: Instant,
        act: impl FnOnce(&mut Sessions, Id) -> T,
    ) -> Option<T> {
        let key = key(&self.header, request)?;
        let mut sessions = self.lock();
        let id = sessions.id(key);
        let done = act(&mut sessions, id);
        self.evictions.add(sessions.trim(self.most, now, self.ttl));
        self.active.set(sessions.len() as u64);
        Some(done)
    }
}

impl Tier for SessionTier {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let verdict = self.about(routing.request(), routing.now, |sessions, id| {
            let Some(engine) = sessions.pinned(id, routing.role, routing.now, self.ttl) else {
                return Verdict::Pass(UNKNOWN);
            };
            let mut fitting = routing.endpoints.iter().enumerate().filter(|(_, e)| e.role == routing.role);
            match fitting.find(|(_, e)| e.engine.id() == engine) {
                Some((at, _)) if routing.pinnable.contains(at) => {
                    Verdict::Pick(Choice { why: Some("pinned"), ..Choice::of(at) })
                }
                Some((_, endpoint)) if endpoint.engine.keeps_pins(routing.now) => Verdict::Pass(PIN_BUSY),
                _ => {
                    sessions.unpin(id, routing.role, engine);
                    Verdict::Pass(PIN_LOST)
                }
            }
        });
        verdict.unwrap_or(Verdict::Pass(NO_KEY))
    }

    fn on_answer(&self, dispatch: &Dispatch<'_>, _: &HeaderMap) {
        let (role, engine) = (dispatch.role, dispatch.endpoint.engine.id());
        self.about(&dispatch.facts.request, dispatch.now, |sessions, id| {
            sessions.pin(id, role, engine, dispatch.now, self.ttl);
        });
    }

    /// An answer may have taken longer than a session lives.
    fn on_complete(&self, completion: &Completion<'_>) {
        let Completion { dispatch, outcome } = completion;
        let (role, engine) = (dispatch.role, dispatch.endpoint.engine.id());
        let failed = outcome.engine_failed();
        let answered = outcome.status.is_some() && !failed;
        if !answered && !failed {
            return;
        }
        self.about(&dispatch.facts.request, dispatch.now, |sessions, id| match failed {
            true => sessions.unpin(id, role, engine),
            false => sessions.keep(id, role, engine, dispatch.now, self.ttl),
        });
    }
}
