//! An example of a tier of your own: a request header names the endpoint.
//!
//! ```toml
//! tiers = ["header-pin", "min-load"]
//!
//! [tier.header-pin]
//! header = "x-pin"          # the request header that holds an endpoint's address
//! ```

use std::sync::Arc;

use kvgate_core::schema::{Field, Kind};
use kvgate_core::{Choice, Counter, Dispatch, HeaderMap, Miss, MissKind, Routing, Tier, TierKind, Verdict};
use serde::Deserialize;

const ABSENT: Miss = Miss("absent");
const NOT_HERE: Miss = Miss("not_here");

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "header-pin",
    doc: "Picks the endpoint whose address a request header holds.",
    misses: &[
        MissKind { reason: ABSENT.0, doc: "The request does not carry the header." },
        MissKind { reason: NOT_HERE.0, doc: "No eligible endpoint has this address." },
    ],
    schema: &[Field {
        key: "header",
        kind: Kind::Text,
        default: "\"x-pin\"",
        doc: "The request header that holds an endpoint's address.",
    }],
    build: |config, context| {
        let config: Config = config.parse()?;
        let help = "Requests that got the endpoint they asked for.";
        let pinned = context.counter("header_pin_pinned_total", help, &[("service", context.rule)]);
        Ok(Arc::new(HeaderPin { header: config.header, pinned }))
    },
};

#[derive(Deserialize)]
struct Config {
    header: String,
}

struct HeaderPin {
    header: String,
    pinned: Arc<Counter>,
}

impl Tier for HeaderPin {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let Some(address) = routing.request().header(&self.header) else { return Verdict::Pass(ABSENT) };
        let found = routing.eligible_endpoints().find(|(_, endpoint)| endpoint.engine.address() == address);
        match found {
            Some((position, _)) => Verdict::Pick(Choice::of(position)),
            None => Verdict::Pass(NOT_HERE),
        }
    }

    fn on_answer(&self, dispatch: &Dispatch<'_>, _: &HeaderMap) {
        if dispatch.tier == KIND.name {
            self.pinned.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvgate_core::conformance::{check, keys};

    #[test]
    fn conforms() {
        check(&KIND, &keys(&KIND, &Default::default()), &Default::default());
    }
}
