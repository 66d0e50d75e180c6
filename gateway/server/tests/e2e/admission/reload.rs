//! Caps that change while requests wait.

use super::{SHED, asks, capped, ids, is_served, is_shed, of, open, takes_a_place, waiting};
use crate::pairs::{Pair, with_parts};
use crate::support::until;

fn keys(cap: usize, depth: usize) -> String {
    format!("decode_max_in_flight = {cap}\nqueue_depth = {depth}\nqueue_wait = \"60s\"")
}

#[tokio::test(flavor = "multi_thread")]
async fn more_places_are_taken_by_those_who_wait() {
    let pair = Pair::run(1, 1, capped(&keys(1, 8))).await;
    let rule = |cap, depth| with_parts(capped(&keys(cap, depth)), &pair.prefill, &pair.decode);
    let first = takes_a_place(&pair.gateway, &pair.decode[0], "first").await;
    let mut waits = Vec::new();
    for n in 0..3 {
        waits.push(asks(&pair.gateway, &format!("{n}")).await);
        waiting(&pair.gateway, "decode", n + 1).await;
    }
    pair.gateway.change(&rule(2, 8)).await;
    // a newcomer stands behind them, and the first does not end
    waits.push(asks(&pair.gateway, "3").await);
    for client in waits {
        is_served(client).await;
    }
    assert_eq!(ids(&pair.decode[0]), ["first", "0", "1", "2", "3"]);
    let most = pair.decode[0].log().iter().map(|served| served.concurrent).max();
    assert_eq!(most, Some(2));
    drop(first);
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fewer_places_are_left_as_answers_end() {
    let pair = Pair::run(1, 1, capped(&keys(3, 8))).await;
    let rule = |cap, depth| with_parts(capped(&keys(cap, depth)), &pair.prefill, &pair.decode);
    let mut held = Vec::new();
    for n in 0..3 {
        held.push(takes_a_place(&pair.gateway, &pair.decode[0], &format!("held {n}")).await);
    }
    let mut waits = vec![asks(&pair.gateway, "0").await];
    waiting(&pair.gateway, "decode", 1).await;
    pair.gateway.change(&rule(1, 2)).await;
    waits.push(asks(&pair.gateway, "1").await);
    waiting(&pair.gateway, "decode", 2).await;
    is_shed(asks(&pair.gateway, "too many").await, "pd_overloaded").await;
    assert_eq!(of(&pair.gateway, SHED, "decode").await, 1.0);
    // two end, and one is still too many
    held.truncate(1);
    let label = format!("ep=\"{}\"", pair.decode[0].address());
    pair.gateway.until_metric("kvgate_endpoint_in_flight", &[&label], 1.0).await;
    waiting(&pair.gateway, "decode", 2).await;
    until("the engine is rid of them", async || open(&pair.decode[0]) == 1).await;
    drop(held);
    for client in waits {
        is_served(client).await;
    }
    assert_eq!(ids(&pair.decode[0])[3..], ["0", "1"]);
    let concurrent: Vec<_> = pair.decode[0].log().iter().map(|served| served.concurrent).collect();
    assert_eq!(concurrent[..3], [1, 2, 3]);
    assert_eq!(concurrent[4], 1);
    pair.is_idle().await;
}
