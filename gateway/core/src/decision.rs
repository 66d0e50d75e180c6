//! The record of one decision: what was tried, why it passed, who won, how it ended.

use serde::Serialize;

use crate::engine::Availability;
use crate::lease::{Cause, Outcome};
use crate::tier::{Candidate, Miss, Role};

/// One tier's part in an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// The tier.
    pub tier: &'static str,
    /// Why it passed; absent if it decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub miss: Option<Miss>,
}

/// Who was chosen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Winner {
    /// `ep_idx`.
    pub endpoint: usize,
    /// The engine's address.
    pub address: String,
    /// The tier that chose it.
    pub tier: &'static str,
    /// Why, where the tier has several ways to choose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<&'static str>,
}

/// How many endpoints of the role sought were left out before any tier, by the first reason that holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Tried in vain for this request.
    #[serde(skip_serializing_if = "is_zero")]
    pub tried: u32,
    /// Taken out by hand.
    #[serde(skip_serializing_if = "is_zero")]
    pub disabled: u32,
    /// Found down by probes.
    #[serde(skip_serializing_if = "is_zero")]
    pub down: u32,
    /// Their breaker is open.
    #[serde(skip_serializing_if = "is_zero")]
    pub open: u32,
    /// They asked to be left alone.
    #[serde(skip_serializing_if = "is_zero")]
    pub cooling: u32,
    /// Kept for the sessions they have.
    #[serde(skip_serializing_if = "is_zero")]
    pub draining: u32,
}

impl LeftOut {
    /// One more, if it is one.
    pub(crate) fn count(&mut self, availability: Availability) {
        let counter = match availability {
            Availability::Disabled => &mut self.disabled,
            Availability::Down => &mut self.down,
            Availability::Open => &mut self.open,
            Availability::Cooling => &mut self.cooling,
            Availability::Draining => &mut self.draining,
            Availability::Free => return,
        };
        *counter += 1;
    }
}

/// One descent of the ladder and what came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Attempt {
    /// The role sought.
    pub role: Role,
    /// Endpoints that no tier could choose.
    #[serde(skip_serializing_if = "is_zero")]
    pub left_out: LeftOut,
    /// The tiers asked, in order.
    pub steps: Vec<Step>,
    /// What the deciding tier scored: the first of them, with `ep_idx` as endpoint.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub candidates: Vec<Candidate>,
    /// Choices lost to a concurrent request, after each of which the ladder ran again.
    #[serde(skip_serializing_if = "is_zero")]
    pub raced: u32,
    /// Time spent waiting for a place, microseconds.
    #[serde(skip_serializing_if = "is_zero")]
    pub waited_us: u64,
    /// Who was chosen; absent if nobody was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub winner: Option<Winner>,
    /// How the attempt ended; absent while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// It counts as a failure of the engine.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
    /// From the endpoint being asked to the head of its answer, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_byte_us: Option<u64>,
    /// From the endpoint being asked to the end of the attempt, microseconds.
    #[serde(skip_serializing_if = "is_zero")]
    pub total_us: u64,
}

/// A prompt as the record may hold it: enough to replay its routing, nothing to read it by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RecordedPrompt {
    /// Its tokens.
    pub tokens: usize,
    /// Tokens that each hash adds to the one before.
    pub span: usize,
    /// Hashes of its beginnings, in hexadecimal: equal ones mean an equal prompt up to there, within one run of the
    /// gateway. The last may add less than a span; where they are cut off, the rest is not known.
    pub hashes: Vec<String>,
}

/// The whole record of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// `x-request-id`.
    pub request: String,
    /// The rule's name.
    pub rule: String,
    /// The path.
    pub path: String,
    /// The model asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// When the request arrived, milliseconds since 1970.
    pub at_ms: u64,
    /// The prompt, where that is to be recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<RecordedPrompt>,
    /// The attempts, in order.
    pub attempts: Vec<Attempt>,
    /// Whether decode was told where to fetch the prompt's blocks; absent where no prefill went before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer: Option<bool>,
    /// How the request ended, if it came as far as an endpoint being sought for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
    /// The status the client was sent; 0 if none, or not yet.
    #[serde(skip_serializing_if = "is_zero")]
    pub status: u16,
    /// The error code, where the answer is ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'static str>,
    /// Whether its engine ended an event stream without saying that the answer is complete.
    #[serde(skip_serializing_if = "is_zero")]
    pub unfinished: bool,
    /// Whether another endpoint was not asked because the retry budget was used up.
    #[serde(skip_serializing_if = "is_zero")]
    pub over_budget: bool,
    /// From the request being whole to the first choice, microseconds.
    pub decided_us: u64,
    /// From arrival to the first byte of the answer, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_byte_us: Option<u64>,
    /// From arrival to the end, microseconds; 0 before that.
    #[serde(skip_serializing_if = "is_zero")]
    pub total_us: u64,
}

impl Attempt {
    /// Who was asked: chosen, and not left unused.
    pub fn asked(&self) -> Option<&Winner> {
        let unused = self.outcome.is_some_and(|outcome| outcome.cause == Cause::Unused);
        self.winner.as_ref().filter(|_| !unused)
    }
}

impl Decision {
    /// The last who was asked.
    pub fn winner(&self) -> Option<&Winner> {
        self.attempts.iter().rev().find_map(Attempt::asked)
    }

    /// Who answered this part of the request to the end.
    pub fn served(&self, role: Role) -> Option<&Winner> {
        let complete = |a: &&Attempt| a.role == role && a.outcome.is_some_and(|o| o.cause == Cause::Complete);
        self.attempts.iter().rev().find(complete)?.winner.as_ref()
    }

    /// The last who was asked for this part of the request.
    pub fn winner_for(&self, role: Role) -> Option<&Winner> {
        self.attempts.iter().rev().filter(|a| a.role == role).find_map(Attempt::asked)
    }
}

fn is_zero<N: Default + PartialEq>(n: &N) -> bool {
    *n == N::default()
}
