//! No more requests than engines are meant to have, and in their order.

mod caps;
mod failing;
mod queue;
mod reload;
mod valve;

use kvgate_sim::{Ended, Fault, Role, Sim};

use crate::pairs::{request, rule, stream};
use crate::support::{Connection, Gateway, Request, Rule, until};

const LENGTH: &str = "kvgate_admission_queue_length";
const SHED: &str = "loxilb_pd_admission_shed_total";
const QUEUED: &str = "loxilb_pd_admission_queued_total";
const WAITS: &str = "kvgate_admission_waits_total";

/// A pair whose ladders begin with admission.
fn capped(keys: &str) -> Rule {
    let rule = rule(&["admission"]).top("decode_tiers = [\"admission\"]");
    rule.table("tier.admission", keys)
}

/// A metric of a role, if not the only one.
async fn of(gateway: &Gateway, name: &str, role: &str) -> f64 {
    gateway.metric(name, &[&format!("role={role:?}")]).await
}

/// So many wait for an endpoint of this role.
async fn waiting(gateway: &Gateway, role: &str, requests: usize) {
    let label = format!("role={role:?}");
    gateway.until_metric(LENGTH, &[&label], requests as f64).await;
}

/// Requests that an engine has not ended.
fn open(engine: &Sim) -> usize {
    engine.log().iter().filter(|served| served.ended == Ended::Open).count()
}

/// The ids of what an engine served, in the order of their coming.
fn ids(engine: &Sim) -> Vec<String> {
    engine.log().into_iter().map(|served| served.request_id.unwrap_or_default()).collect()
}

/// A client that has asked and reads nothing.
async fn asks(gateway: &Gateway, id: &str) -> Connection {
    let mut client = Connection::open(gateway.address).await;
    client.send(&named(id)).await;
    client
}

fn named(id: &str) -> Request {
    request(&stream(1)).field("x-request-id", id)
}

/// A client whose request takes a place at this engine, and keeps it until the client leaves: a prefill that does not
/// end, or a stream that goes on.
async fn takes_a_place(gateway: &Gateway, engine: &Sim, id: &str) -> Connection {
    let fault = match engine.config().role {
        Role::Prefill => Fault { delay_ms: 600_000, ..Fault::default() },
        _ => Fault { stall_after: Some(1), ..Fault::default() },
    };
    engine.fault(fault, 1);
    let before = open(engine);
    let client = asks(gateway, id).await;
    until("it is at the engine", async || open(engine) == before + 1).await;
    client
}

/// The answer to a request that was let through.
async fn is_served(mut client: Connection) {
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    assert!(String::from_utf8_lossy(&answer.body).ends_with("data: [DONE]\n\n"), "{answer:?}");
}

/// The answer to one that was not: come again later. Returns what it says.
async fn is_shed(mut client: Connection, code: &str) -> String {
    let answer = client.answer().await;
    assert_eq!((answer.status, &*answer.code()), (429, code), "{answer:?}");
    let seconds: u32 = answer.field("retry-after").unwrap().parse().unwrap();
    assert!((1..=30).contains(&seconds), "{answer:?}");
    answer.json()["error"]["message"].as_str().unwrap().to_owned()
}
