//! `admission`: no more requests than engines are meant to have.

mod config;
mod gate;
mod valve;

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use kvgate_core::{
    BuildContext, BuildError, Full, Hold, Miss, MissKind, Refusal, Role, Routing, Tier, TierConfig, TierKind,
    Verdict, WaitEnd, schema,
};

use config::{Config, Mode};
use gate::Gate;
use valve::Valve;

const OFF: Miss = Miss("off");
const ROOM: Miss = Miss("room");
const NARROWED: Miss = Miss("narrowed");
const GRANTED: Miss = Miss("granted");
const OBSERVED: Miss = Miss("observed");

const OVERLOADED: &str = "pd_overloaded";
const TENANT_SHARE: &str = "admission_tenant_share";
const LATE: &str = "pd_admission_park_timeout";

/// The codes that it refuses requests with.
pub const REFUSALS: [&str; 3] = [OVERLOADED, TENANT_SHARE, LATE];

/// The row in the table of tiers.
pub const KIND: TierKind = TierKind {
    name: "admission",
    doc: "Keeps endpoints within their caps, whichever tier chooses: full ones are left out. When all are full, requests \
          wait in the order of their arrival, or are refused with 429 and a `Retry-After` measured by recent waits. \
          A place is taken until the answer ends; who leaves gives it up at once. It belongs in front of the other tiers, \
          of prefill and of decode, and decides nothing until a cap is set.",
    misses: &[
        MissKind { reason: OFF.0, doc: "No cap is set for endpoints of this role." },
        MissKind { reason: ROOM.0, doc: "Every endpoint that may be chosen has room." },
        MissKind {
            reason: NARROWED.0,
            doc: "Some endpoints are full: the next tiers choose among the others.",
        },
        MissKind { reason: GRANTED.0, doc: "The request waited and was handed a place: it goes there." },
        MissKind { reason: OBSERVED.0, doc: "It would have been held back, were `mode` not `observe`." },
        MissKind::NO_ENDPOINT,
    ],
    schema: config::SCHEMA,
    build,
};

struct Admission {
    config: Config,
    valve: Valve,
    /// One for every role that there are endpoints of.
    gates: Vec<Arc<Gate>>,
}

fn build(config: &TierConfig, context: &mut BuildContext<'_>) -> Result<Arc<dyn Tier>, BuildError> {
    let config = Config::new(config)?;
    let gate = |role| Gate::new(role, &config, context).map(Arc::new);
    let gates: Vec<_> = [Role::Any, Role::Prefill, Role::Decode].into_iter().filter_map(gate).collect();
    for gate in &gates {
        let gate = gate.clone();
        context.spawn("caps", async move { gate.comes_into_force() }.boxed());
    }
    Ok(Arc::new(Admission { valve: Valve::new(config.max_total, context), gates, config }))
}

impl Tier for Admission {
    fn decide(&self, routing: &mut Routing<'_>) -> Verdict {
        let Some(gate) = self.gate(routing.role) else { return Verdict::Pass(Miss::NO_ENDPOINT) };
        gate.comes_into_force();
        let observes = self.config.mode == Mode::Observe;
        let passes = self.valve.passes(routing.facts, observes);
        match gate.cap() {
            _ if observes => self.observe(gate, routing, passes),
            _ if !passes => {
                gate.sheds(overloaded("too many requests are under way".into(), gate.retry_after()))
            }
            Some(cap) => self.enforce(gate, cap, routing),
            None => Verdict::Pass(OFF),
        }
    }

    fn on_waited(&self, role: Role, waited: Duration, end: WaitEnd) {
        if let Some(gate) = self.gate(role) {
            gate.waited(waited, end);
        }
    }
}

impl Admission {
    fn gate(&self, role: Role) -> Option<&Gate> {
        self.gates.iter().map(Arc::as_ref).find(|gate| gate.role == role)
    }

    fn enforce(&self, gate: &Gate, cap: u64, routing: &mut Routing<'_>) -> Verdict {
        routing.cap = Some(cap);
        if let Some(at) = routing.granted.filter(|at| routing.eligible.contains(*at)) {
            routing.pinnable = [at].into_iter().collect();
            return Verdict::Narrow(routing.pinnable.clone(), GRANTED);
        }
        let open = gate.open(&routing.eligible);
        let full = routing.eligible.count() - open.count();
        let draining = routing.pinnable.iter().filter(|at| !routing.eligible.contains(*at)).collect();
        routing.pinnable = gate.with_room(&draining);
        open.iter().for_each(|at| routing.pinnable.insert(at));
        match full {
            0 if open.is_empty() => Verdict::Pass(Miss::NO_ENDPOINT),
            0 => Verdict::Pass(ROOM),
            _ if open.is_empty() => self.hold(gate, routing),
            _ => Verdict::Narrow(open, NARROWED),
        }
    }

    fn hold(&self, gate: &Gate, routing: &Routing<'_>) -> Verdict {
        let full = overloaded(
            format!("all {}endpoints at in-flight capacity", adjective(gate.role)),
            gate.retry_after(),
        );
        if gate.role == Role::Prefill && gate.tried(routing) {
            // A prompt that failed once does not wait for another try: decode computes it.
            return Verdict::Reject(full);
        }
        let tenant = gate.tenant(&self.config, routing);
        match gate.queue().enter(gate.acceptable(routing), tenant, self.config.depth) {
            Ok(ticket) => {
                gate.counts.queued.inc();
                Verdict::Hold(Hold { ticket, wait: self.config.wait, late: self.late(gate.role) })
            }
            Err(Full::Queue) => gate.sheds(full),
            Err(Full::Tenant) => gate.sheds(Refusal {
                code: TENANT_SHARE,
                detail: "your share of the queue is taken".into(),
                ..full
            }),
        }
    }

    fn observe(&self, gate: &Gate, routing: &Routing<'_>, passes: bool) -> Verdict {
        let any = !routing.eligible.is_empty();
        match gate.with_room(&routing.eligible).is_empty() && any {
            false if passes => return Verdict::Pass(if any { ROOM } else { Miss::NO_ENDPOINT }),
            true if passes && self.config.depth.total > 0 => gate.counts.would_queue.inc(),
            _ => gate.counts.would_shed.inc(),
        }
        Verdict::Pass(OBSERVED)
    }

    fn late(&self, role: Role) -> Refusal {
        let wait = schema::show_duration(self.config.wait);
        Refusal {
            status: 504,
            code: LATE,
            detail: format!("no {}endpoint had room within {wait}", adjective(role)),
            retry_after: None,
        }
    }
}

fn overloaded(detail: String, retry_after: u32) -> Refusal {
    Refusal { status: 429, code: OVERLOADED, detail, retry_after: Some(retry_after) }
}

fn adjective(role: Role) -> &'static str {
    match role {
        Role::Any => "",
        Role::Prefill => "prefill ",
        Role::Decode => "decode ",
    }
}
