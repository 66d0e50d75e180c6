//! Who waits: in order, for so long, and no longer than the client does.

use std::time::Instant;

use kvgate_sim::{Fault, Sim};

use super::{
    LENGTH, QUEUED, SHED, WAITS, asks, capped, ids, is_served, is_shed, named, of, open, takes_a_place,
    waiting,
};
use crate::pairs::Pair;
use crate::support::{Connection, served, until};

#[tokio::test(flavor = "multi_thread")]
async fn first_come_first_served_and_nobody_barges_in() {
    for role in ["prefill", "decode"] {
        let keys = format!("{role}_max_in_flight = 1\nqueue_depth = 16\nqueue_wait = \"60s\"");
        let pair = Pair::new(1, 1, capped(&keys)).await;
        let engine = if role == "prefill" { &pair.prefill[0] } else { &pair.decode[0] };
        let first = takes_a_place(&pair.gateway, engine, "first").await;
        let mut clients = Vec::new();
        for n in 0..6 {
            clients.push(asks(&pair.gateway, &format!("{n}")).await);
            waiting(&pair.gateway, role, n + 1).await;
        }
        // one leaves from the midst
        drop(clients.remove(2));
        waiting(&pair.gateway, role, 5).await;
        // the place comes free, and others come at that moment
        drop(first);
        for n in 6..12 {
            clients.push(asks(&pair.gateway, &format!("{n}")).await);
        }
        for client in clients {
            is_served(client).await;
        }
        let served = ids(engine);
        assert_eq!(served[..6], ["first", "0", "1", "3", "4", "5"], "{role}: {served:?}");
        assert_eq!(served.len(), 12, "{role}: {served:?}");
        pair.is_idle().await;
        let label = [format!("role={role:?}"), "end=\"granted\"".into()];
        let granted = pair.gateway.metric(WAITS, &label.each_ref().map(String::as_str)).await;
        assert_eq!(of(&pair.gateway, QUEUED, role).await, granted + 1.0, "{role}: but for who left");
        assert!(granted >= 5.0);
        assert_eq!(of(&pair.gateway, SHED, role).await, 0.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_makes_room_at_once() {
    for role in ["prefill", "decode"] {
        let keys = format!("{role}_max_in_flight = 1\nqueue_depth = 1\nqueue_wait = \"60s\"");
        let pair = Pair::new(1, 1, capped(&keys)).await;
        let engine = if role == "prefill" { &pair.prefill[0] } else { &pair.decode[0] };
        let first = takes_a_place(&pair.gateway, engine, "first").await;
        let waits = asks(&pair.gateway, "waits").await;
        waiting(&pair.gateway, role, 1).await;
        is_shed(asks(&pair.gateway, "too many").await, "pd_overloaded").await;
        drop(waits);
        waiting(&pair.gateway, role, 0).await;
        let next = asks(&pair.gateway, "next").await;
        waiting(&pair.gateway, role, 1).await;
        drop(first);
        is_served(next).await;
        assert_eq!(ids(engine), ["first", "next"]);
        pair.is_idle().await;
        assert_eq!(of(&pair.gateway, SHED, role).await, 1.0);
        pair.gateway.until_metric("kvgate_requests_total", &["outcome=\"client_gone\""], 2.0).await;
    }
}

/// How fast a client's place is given up: told, not asserted, but for what would be plainly wrong.
#[tokio::test(flavor = "multi_thread")]
async fn places_of_clients_that_leave_are_free_in_no_time() {
    for role in ["prefill", "decode"] {
        let keys = format!("{role}_max_in_flight = 1\nqueue_depth = 1\nqueue_wait = \"60s\"");
        let pair = Pair::new(1, 1, capped(&keys)).await;
        let engine = if role == "prefill" { &pair.prefill[0] } else { &pair.decode[0] };
        let first = takes_a_place(&pair.gateway, engine, "first").await;
        let mut took = Vec::new();
        for _ in 0..40 {
            let waits = asks(&pair.gateway, "waits").await;
            waiting(&pair.gateway, role, 1).await;
            let left = Instant::now();
            drop(waits);
            while of(&pair.gateway, LENGTH, role).await > 0.0 {
                assert!(left.elapsed().as_secs() < 1, "{role}");
            }
            took.push(left.elapsed());
        }
        took.sort_unstable();
        println!("a place in the queue for {role} is free after {:?}, at most {:?}", took[20], took[39]);
        drop(first);
        pair.is_idle().await;
        assert_eq!(ids(engine), ["first"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_waited_for_too_long_is_told() {
    for role in ["prefill", "decode"] {
        let keys = format!("{role}_max_in_flight = 1\nqueue_depth = 4\nqueue_wait = \"50ms\"");
        let pair = Pair::new(1, 1, capped(&keys)).await;
        let engine = if role == "prefill" { &pair.prefill[0] } else { &pair.decode[0] };
        let first = takes_a_place(&pair.gateway, engine, "first").await;
        for _ in 0..2 {
            let mut late = asks(&pair.gateway, "late").await;
            let answer = late.answer().await;
            assert_eq!((answer.status, &*answer.code()), (504, "pd_admission_park_timeout"), "{answer:?}");
        }
        let label = format!("role={role:?}");
        assert_eq!(pair.gateway.metric(WAITS, &["end=\"late\"", &label]).await, 2.0);
        assert_eq!(of(&pair.gateway, LENGTH, role).await, 0.0);
        assert_eq!(ids(engine), ["first"]);
        drop(first);
        pair.is_idle().await;
        is_served(asks(&pair.gateway, "next").await).await;
        pair.is_idle().await;
    }
}

/// One had a place for decode and seeks another prefill, one has that prefill's place and waits for decode: neither waits
/// for the other.
#[tokio::test(flavor = "multi_thread")]
async fn two_that_hold_what_the_other_wants_get_on() {
    let keys = "max_in_flight = 1\nqueue_depth = 4\nqueue_wait = \"60s\"";
    let mut pair = Pair::new(2, 1, capped(keys)).await;
    let stalled = Fault { delay_ms: 600_000, ..Fault::default() };
    pair.prefill.iter().for_each(|engine| engine.fault(stalled, 1));
    let one = asks(&pair.gateway, "one").await;
    until("it is at a prefill", async || pair.prefill.iter().any(|engine| open(engine) == 1)).await;
    let at = usize::from(open(&pair.prefill[0]) == 0);
    let two = asks(&pair.gateway, "two").await;
    waiting(&pair.gateway, "decode", 1).await;
    pair.prefill.iter().for_each(Sim::clear_faults);
    pair.prefill[at].restart().await.unwrap();
    is_served(one).await;
    is_served(two).await;
    pair.is_idle().await;
    for (id, received) in [("one", false), ("two", true)] {
        let served = served(&pair.decode[0], id).unwrap();
        assert_eq!(served.received_tokens > 0, received, "the first was computed at decode: {served:?}");
    }
    assert_eq!(pair.decode[0].log().iter().map(|served| served.concurrent).max(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_takes_no_more_than_its_share_of_the_queue() {
    let keys = "decode_max_in_flight = 1\nqueue_depth = 4\nqueue_wait = \"60s\"\ntenant_header = \"x-tenant\"\n\
                tenant_share_pct = 50";
    let pair = Pair::new(1, 1, capped(keys)).await;
    let first = takes_a_place(&pair.gateway, &pair.decode[0], "first").await;
    let mut waits = Vec::new();
    let ask = async |tenant: Option<&str>, id: &str| {
        let mut client = Connection::open(pair.gateway.address).await;
        let request = named(id);
        client.send(&tenant.map_or(request.clone(), |tenant| request.field("x-tenant", tenant))).await;
        client
    };
    for n in 1..=2 {
        waits.push(ask(Some("a"), &format!("a{n}")).await);
        waiting(&pair.gateway, "decode", n).await;
    }
    is_shed(ask(Some("a"), "a3").await, "admission_tenant_share").await;
    // another one, and whoever says nothing, have theirs
    waits.push(ask(Some("b"), "b1").await);
    waiting(&pair.gateway, "decode", 3).await;
    waits.push(ask(None, "c1").await);
    waiting(&pair.gateway, "decode", 4).await;
    is_shed(ask(Some("d"), "d1").await, "pd_overloaded").await;
    drop(first);
    for client in waits {
        is_served(client).await;
    }
    assert_eq!(ids(&pair.decode[0]), ["first", "a1", "a2", "b1", "c1"]);
    pair.is_idle().await;
    assert_eq!(of(&pair.gateway, SHED, "decode").await, 2.0);
}
