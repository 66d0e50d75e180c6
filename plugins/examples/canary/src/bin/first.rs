//! A gateway with one more tier.

use std::process::ExitCode;
use std::sync::Arc;

use kvgate_core::{Choice, Miss, MissKind, Routing, Tier, TierKind, Verdict};

const NOT_ASKED: Miss = Miss("not_asked");

const KIND: TierKind = TierKind {
    name: "canary",
    doc: "Picks the last endpoint for requests that ask for it.",
    misses: &[MissKind { reason: NOT_ASKED.0, doc: "The request has no header `x-canary`." }],
    schema: &[],
    build: |_, _| Ok(Arc::new(Canary)),
};

struct Canary;

impl Tier for Canary {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let asked = routing.request().header("x-canary").is_some();
        match routing.eligible.iter().last().filter(|_| asked) {
            Some(last) => Verdict::Pick(Choice::of(last)),
            None => Verdict::Pass(NOT_ASKED),
        }
    }
}

fn main() -> ExitCode {
    kvgate::Gateway::new().tier(&KIND).main()
}
