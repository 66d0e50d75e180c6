//! How engines are: what requests find out, and what is asked of them beside.

mod probes;

use std::time::{Duration, Instant};

use kvgate_core::{Availability, Change, Lease, Outcome};
use pingora_http::ResponseHeader;

use crate::plan::Rule;
use crate::relay;

pub use probes::{ProbeStatus, Probers};

/// An engine began to answer: one that asks to be left alone is, for `most` at the longest.
pub fn answered(lease: &mut Lease, head: &ResponseHeader, most: Duration) {
    if let Some(wait) = relay::busy(head).filter(|_| !most.is_zero()) {
        lease.cool(Instant::now() + wait.min(most), head.status.as_u16());
    }
}

/// That a rule has nobody to choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Absence {
    /// Seconds until the first of its engines may be asked again, as far as that is known.
    pub retry_after: Option<u32>,
    /// One of them is up, and answered 429.
    pub busy: bool,
}

impl Absence {
    /// How it is now.
    pub fn of(rule: &Rule, now: Instant) -> Self {
        let (mut soonest, mut busy) = (None::<Duration>, false);
        for engine in rule.endpoints.iter().map(|endpoint| &endpoint.engine) {
            match engine.availability(now) {
                Availability::Open | Availability::Cooling => {
                    // half open, and those that were let through are not back yet
                    let wait =
                        engine.returns(now).map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
                    soonest = Some(soonest.map_or(wait, |known| known.min(wait)));
                    busy |= engine.cooling(now).is_some_and(|(_, status)| status == 429);
                }
                _ => {}
            }
        }
        // whole seconds, and not a moment too early
        let seconds =
            |wait: Duration| u32::try_from(wait.as_millis().div_ceil(1000)).unwrap_or(u32::MAX).max(1);
        Self { retry_after: soonest.map(seconds), busy }
    }
}

/// The end of a request changed what is thought of an engine.
pub fn changed(rule: &Rule, position: usize, change: Change, outcome: Outcome) {
    let Some(endpoint) = rule.endpoints.get(position) else { return };
    let (service, ep_idx, engine) = (&rule.config.name, endpoint.index, endpoint.engine.address());
    let Outcome { phase, status, cause } = outcome;
    match change {
        Change::Failing => {
            tracing::warn!(service, ep_idx, engine, ?cause, ?phase, status, "a request failed on the engine");
        }
        Change::Opened => {
            let open_for = endpoint.engine.breaker_policy().open_for;
            tracing::warn!(
                service,
                ep_idx,
                engine,
                ?cause,
                ?phase,
                status,
                ?open_for,
                "breaker open: too many failures in a row"
            );
        }
        Change::Reopened => {
            tracing::warn!(
                service,
                ep_idx,
                engine,
                ?cause,
                ?phase,
                status,
                "breaker open again: the engine still fails"
            );
        }
        Change::Closed => {
            tracing::warn!(service, ep_idx, engine, status, "breaker closed: the engine answers again");
        }
    }
}
