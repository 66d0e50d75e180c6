//! A rule of one tier, asked as the gateway asks it.

use std::time::Instant;

use futures::FutureExt;
use http::HeaderMap;
use serde_json::Value;

use super::{Ground, dispatch, keys, ladder, selection};
use crate::decision::Attempt;
use crate::facts::Facts;
use crate::ladder::{Chosen, Ladder, Selection};
use crate::lease::Outcome;
use crate::mask::Mask;
use crate::tier::{BuildError, Completion, Endpoint, Miss, Role, TierKind};

/// A ladder of one tier and `min-load`, and what outlives its plan.
pub struct Bench {
    /// The rule's endpoints.
    pub endpoints: Vec<Endpoint>,
    /// What the tier is built on: its metrics, say.
    pub ground: Ground,
    /// The time at which it is asked.
    pub now: Instant,
    kind: TierKind,
    ladder: Ladder,
}

/// A request that was chosen for, and is in flight.
#[derive(Debug)]
pub struct Asked {
    /// The position of the endpoint chosen.
    pub endpoint: usize,
    /// The record of the choice.
    pub record: Attempt,
    chosen: Chosen,
    facts: Facts,
}

impl Asked {
    /// Why the tier passed; `None` if it decided.
    pub fn miss(&self) -> Option<Miss> {
        self.record.steps.first().and_then(|step| step.miss)
    }
}

impl Bench {
    /// The tier with these keys in place of its defaults, a table or null, over these endpoints.
    ///
    /// # Errors
    /// The tier's own.
    pub fn new(kind: &TierKind, over: &Value, endpoints: Vec<Endpoint>) -> Result<Self, BuildError> {
        let ground = Ground::default();
        let ladder = ladder(vec![ground.rung(kind, &keys(kind, over), &endpoints)?]);
        Ok(Self { endpoints, ground, now: Instant::now(), kind: *kind, ladder })
    }

    /// Takes other keys in place of the defaults, as a reload of the rule does.
    ///
    /// # Errors
    /// The tier's own; the keys of before stay in force then.
    pub fn reload(&mut self, over: &Value) -> Result<(), BuildError> {
        self.ladder = ladder(vec![self.ground.rung(&self.kind, &keys(&self.kind, over), &self.endpoints)?]);
        Ok(())
    }

    /// Chooses for this part of a request, knowing where its prefill runs, and has the endpoint asked.
    ///
    /// # Panics
    /// When nobody is chosen at once: this is for tests.
    #[allow(clippy::panic)]
    pub fn ask(&self, facts: Facts, role: Role, prefill: Option<usize>) -> Asked {
        let (tried, mut record) = (Mask::none(), Attempt::default());
        let all = selection(&self.endpoints, &tried, &facts);
        let selection = Selection { role, prefill, now: self.now, ..all };
        let chosen = match self.ladder.choose(&selection, &mut record).now_or_never() {
            Some(Ok(chosen)) => chosen,
            other => panic!("{}: no choice but {other:?}", self.kind.name),
        };
        if let Some(endpoint) = self.endpoints.get(chosen.endpoint) {
            self.ladder.on_dispatch(&dispatch(endpoint, &chosen, &facts, self.now));
        }
        Asked { endpoint: chosen.endpoint, record, chosen, facts }
    }

    /// The request ends like this.
    pub fn end(&self, asked: Asked, outcome: Outcome) {
        let Asked { chosen, facts, .. } = asked;
        if let Some(endpoint) = self.endpoints.get(chosen.endpoint) {
            let dispatch = dispatch(endpoint, &chosen, &facts, self.now);
            if outcome.status.is_some() {
                self.ladder.on_answer(&dispatch, &HeaderMap::new());
            }
            self.ladder.on_complete(&Completion { dispatch, outcome });
        }
        chosen.lease.end(outcome);
    }
}
