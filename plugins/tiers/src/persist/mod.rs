//! `persist`: whoever comes again goes where it was before.

mod bindings;
mod key;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvgate_core::schema::{self, Field, Kind};
use kvgate_core::{
    BuildContext, BuildError, Choice, Dispatch, Gauge, HeaderMap, Miss, MissKind, Routing, Tier, TierConfig,
    TierKind, Verdict,
};
use serde::Deserialize;

use crate::choose::rendezvous;
use bindings::Bindings;
use key::Source;

const NO_KEY: Miss = Miss("no_key");

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "persist",
    doc: "Keeps requests with one key on one endpoint: the client's address, a header, a cookie or a parameter of the \
          query. A key goes to the endpoint that answered it last, even while that is drained; a new one to the \
          endpoint it hashes to by name and weight, so that when an endpoint leaves only its own keys move. A header \
          or cookie that an answer sets is learned: it belongs to the endpoint that set it (`mcp-session-id`, say).",
    misses: &[MissKind { reason: NO_KEY.0, doc: "The request carries no key." }, MissKind::NO_ENDPOINT],
    schema: &[
        Field {
            key: "by",
            kind: Kind::Choice(&["client-ip", "header", "cookie", "query"]),
            default: "\"client-ip\"",
            doc: "What the key is. `client-ip` is the address that the connection comes from.",
        },
        Field {
            key: "name",
            kind: Kind::Text,
            default: "",
            doc: "The header's, cookie's or parameter's name; needed by all but `client-ip`.",
        },
        Field {
            key: "ttl",
            kind: Kind::Duration { min: Duration::from_secs(1), max: Duration::from_secs(30 * 86_400) },
            default: "\"1h\"",
            doc: "A key that was not answered for so long is new again.",
        },
        Field {
            key: "max_bindings",
            kind: Kind::Int { min: 1, max: 10_000_000 },
            default: "65536",
            doc: "Keys that are kept, about 100 bytes each. The least recently answered give way.",
        },
    ],
    build,
};

#[derive(Debug, Clone, Deserialize)]
struct Config {
    by: String,
    name: Option<String>,
    #[serde(deserialize_with = "schema::duration")]
    ttl: Duration,
    max_bindings: usize,
}

struct Persist {
    source: Source,
    config: Config,
    bindings: Arc<Mutex<Bindings>>,
    kept: Arc<Gauge>,
}

fn build(config: &TierConfig, context: &mut BuildContext<'_>) -> Result<Arc<dyn Tier>, BuildError> {
    let config: Config = config.parse()?;
    let source = Source::new(&config.by, config.name.as_deref())
        .map_err(|message| BuildError { key: "name".into(), message })?;
    let labels = [("service", context.rule)];
    Ok(Arc::new(Persist {
        bindings: context.state("persist", &source.to_string(), Mutex::default),
        kept: context.gauge("kvgate_persist_bindings", "Keys that persist keeps.", &labels),
        source,
        config,
    }))
}

impl Tier for Persist {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let Some(key) = self.source.of(routing.request()) else { return Verdict::Pass(NO_KEY) };
        let engine = {
            let bindings = self.bindings.lock().unwrap_or_else(PoisonError::into_inner);
            bindings.get(routing.role, &key, routing.now)
        };
        let at = engine.and_then(|id| routing.endpoints.iter().position(|e| e.engine.id() == id));
        if let Some(endpoint) = at.filter(|at| routing.pinnable.contains(*at)) {
            return Verdict::Pick(Choice { why: Some("bound"), ..Choice::of(endpoint) });
        }
        match rendezvous(routing, routing.eligible.iter(), &key) {
            Some(endpoint) => Verdict::Pick(Choice { why: Some("hashed"), ..Choice::of(endpoint) }),
            None => Verdict::Pass(Miss::NO_ENDPOINT),
        }
    }

    fn on_answer(&self, dispatch: &Dispatch<'_>, headers: &HeaderMap) {
        let asked = self.source.of(&dispatch.facts.request);
        let learned = self.source.learned(headers).filter(|learned| asked.as_ref() != Some(learned));
        if asked.is_none() && learned.is_none() {
            return;
        }
        let until = dispatch.now + self.config.ttl;
        let mut bindings = self.bindings.lock().unwrap_or_else(PoisonError::into_inner);
        for key in [asked, learned].into_iter().flatten() {
            bindings.bind(dispatch.role, &key, dispatch.endpoint.engine.id(), until);
        }
        bindings.trim(self.config.max_bindings, dispatch.now);
        self.kept.set(bindings.len() as u64);
    }
}
