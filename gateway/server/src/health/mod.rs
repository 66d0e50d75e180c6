//! How engines are: what requests find out, and what is asked of them beside.

mod probes;

use std::time::{Duration, Instant};

use kvgate_core::{Availability, Change, Engine, Lease, Outcome, Role, Sign};
use pingora_http::ResponseHeader;

use crate::plan::Rule;
use crate::relay;

pub use probes::{ProbeStatus, Probers};

/// An engine began to answer: one that asks to be left alone is, for `most` at the longest.
pub fn answered(lease: &mut Lease, head: &ResponseHeader, most: Duration) {
    // one that asks for no time does not ask to be left alone
    let wait = relay::busy(head).map(|wait| wait.min(most)).filter(|wait| !wait.is_zero());
    if let Some(wait) = wait {
        lease.cool(Instant::now() + wait, head.status.as_u16());
    }
}

/// That a rule has nobody to choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Absence {
    /// Seconds until a request may be served again, as far as that is known: in a pair when either all the parts it needs
    /// have somebody, or there is somebody who does it alone.
    pub retry_after: Option<u32>,
    /// All that is missing is up, and answered 429.
    pub busy: bool,
}

/// That nobody takes a part of requests.
#[derive(Debug, Clone, Copy, Default)]
struct Lack {
    /// Until the first may be asked again.
    soonest: Option<Duration>,
    busy: bool,
}

impl Lack {
    /// Of these engines.
    fn of<'e>(engines: impl Iterator<Item = &'e Engine>, now: Instant) -> Self {
        let mut lack = Self::default();
        for engine in engines {
            let stands = engine.availability(now);
            match stands {
                Availability::Open | Availability::Cooling => {
                    // half open, and those that were let through are not back yet
                    let wait =
                        engine.returns(now).map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
                    lack.soonest = Some(lack.soonest.map_or(wait, |known| known.min(wait)));
                    lack.busy |= stands == Availability::Cooling
                        && engine.cooling(now).is_some_and(|(_, status)| status == 429);
                }
                // one that takes requests was tried in vain
                Availability::Disabled | Availability::Down | Availability::Draining | Availability::Free => {
                }
            }
        }
        lack
    }

    fn and(self, other: Self) -> Self {
        let soonest = self.soonest.zip(other.soonest).map(|(one, other)| one.max(other));
        Self { soonest, busy: self.busy && other.busy }
    }

    fn or(self, other: Self) -> Self {
        let soonest = self.soonest.into_iter().chain(other.soonest).min();
        Self { soonest, busy: self.busy || other.busy }
    }
}

impl Absence {
    /// How it is now.
    pub fn of(rule: &Rule, now: Instant) -> Self {
        let of = |role| rule.endpoints.iter().filter(move |e| e.role == role).map(|e| &*e.engine);
        let mut lack = Lack::of(of(Role::Any), now);
        if let Some(pair) = &rule.config.pair {
            // decode computes prompts itself, where it may
            let parts: &[_] = if pair.recomputes { &[Role::Decode] } else { &[Role::Prefill, Role::Decode] };
            let missing = parts.iter().copied().filter(|role| !of(*role).any(|engine| engine.takes_new(now)));
            let in_parts = missing.map(|role| Lack::of(of(role), now)).reduce(Lack::and);
            lack = lack.or(in_parts.unwrap_or_default());
        }
        let Lack { soonest, busy } = lack;
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
    // what it was that counted
    let failed = match status.filter(|_| outcome.sign() == Sign::OriginError) {
        Some(status) => format!("status {status}"),
        None => format!("{cause} at {phase}"),
    };
    match change {
        Change::Failing => {
            tracing::warn!(service, ep_idx, engine, %cause, %phase, status, "a request failed on the engine: {failed}");
        }
        Change::Opened | Change::Reopened => {
            let open_for = endpoint.engine.breaker_policy().open_for;
            let why = match change {
                Change::Reopened => "breaker open again: the engine still fails, now by".to_owned(),
                _ => format!(
                    "breaker open: {} failures in a row, the last by",
                    endpoint.engine.failures_in_a_row()
                ),
            };
            tracing::warn!(service, ep_idx, engine, %cause, %phase, status, ?open_for, "{why} {failed}");
        }
        Change::Closed => {
            tracing::warn!(service, ep_idx, engine, status, "breaker closed: the engine answers again");
        }
    }
}
