//! The nouns of routing: facts, tiers, the ladder, leases, the decision record.
//!
//! A custom tier depends on this crate alone. It implements [`Tier`], says in a [`TierKind`] what it is called,
//! which keys it takes and which misses it may give, and is handed to the gateway; everything else
//! (configuration, documentation, metrics, the conformance suite) follows from that.
//!
//! Nothing here knows of sockets, of a runtime or of the proxy library: time, randomness and the
//! expensive facts about a request are passed in.

mod alarm;
mod breaker;
pub mod conformance;
mod decision;
mod engine;
mod facts;
mod ladder;
pub mod law;
mod lease;
mod mask;
mod metrics;
mod min_load;
mod queue;
mod random;
pub mod schema;
mod state;
mod tier;

pub use alarm::{Alarm, Alarms};
pub use breaker::{BreakerPolicy, BreakerState, Change, Sign};
pub use decision::{Attempt, Decision, LeftOut, RecordedPrompt, Step, Winner};
pub use engine::{Admin, Availability, Engine, EngineId, Engines, Identity, Telemetry};
pub use facts::{FactSource, Facts, Opening, Request, Tokens};
pub use http::HeaderMap;
pub use ladder::{Chosen, Ladder, Refused, Rung, Selection, Timer};
pub use lease::{Cause, Lease, Outcome, Phase};
pub use mask::Mask;
pub use metrics::{Counter, Family, Gauge, MetricKind, Registry, Sample};
pub use min_load::MinLoad;
pub use queue::{Depth, Full, Grant, Queue, Seat, Ticket};
pub use random::Random;
pub use state::{Services, StateStore};
pub use tier::{
    Build, BuildContext, BuildError, Candidate, Choice, Completion, Dispatch, Endpoint, Hold, Miss, MissKind,
    Refusal, Role, Routing, Tier, TierConfig, TierKind, Verdict, WaitEnd,
};

/// A future without a name, as the async methods of the traits here return it.
pub type BoxFuture<'a, T> = futures::future::BoxFuture<'a, T>;
