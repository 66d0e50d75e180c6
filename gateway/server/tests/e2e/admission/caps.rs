//! Caps hold exactly, by the engines' own count, and until the answer ends.

use kvgate_sim::{Fault, Role, Sim};

use super::{QUEUED, SHED, asks, capped, is_served, is_shed, of, open, takes_a_place, waiting};
use crate::pairs::{Pair, request, stream, with_parts};
use crate::support::{Connection, Rule, Setup, engine_with, fetch};

/// The most requests that an engine had at a time.
fn most(engine: &Sim) -> usize {
    engine.log().iter().map(|served| served.concurrent).max().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_fills_every_place_and_not_one_more() {
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        prefill.push(engine_with(|c| (c.role, c.prefill_us) = (Role::Prefill, 100.0)).await);
        decode.push(engine_with(|c| (c.role, c.decode_us) = (Role::Decode, 500.0)).await);
    }
    let keys = "prefill_max_in_flight = 2\ndecode_max_in_flight = 3\nqueue_depth = 100\nqueue_wait = \"60s\"";
    let rule = with_parts(capped(keys), &prefill, &decode);
    let gateway = Setup::new(&[rule]).start().await;
    let pair = Pair { prefill, decode, positions: vec![0, 1], gateway };
    let clients: Vec<_> = (0..80)
        .map(|seed| {
            let address = pair.gateway.address;
            tokio::spawn(async move { fetch(address, &request(&stream(seed))).await })
        })
        .collect();
    for client in clients {
        let answer = client.await.unwrap();
        assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    }
    pair.is_idle().await;
    for (engines, cap, role) in [(&pair.prefill, 2, "prefill"), (&pair.decode, 3, "decode")] {
        let mosts: Vec<_> = engines.iter().map(most).collect();
        assert_eq!(mosts, [cap, cap], "{role}");
        assert_eq!(engines.iter().map(|engine| engine.log().len()).sum::<usize>(), 80, "{role}");
        assert_eq!(of(&pair.gateway, SHED, role).await, 0.0);
    }
    let queued = of(&pair.gateway, QUEUED, "prefill").await + of(&pair.gateway, QUEUED, "decode").await;
    assert!(queued > 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_is_taken_until_the_stream_ends() {
    let pair = Pair::new(1, 1, capped("max_in_flight = 1")).await;
    let mut streams = takes_a_place(&pair.gateway, &pair.decode[0], "streams").await;
    assert_eq!(streams.head().await.unwrap().status, 200);
    assert!(streams.piece().await.unwrap().is_some());
    // its prefill is over, and its decode is not
    let prefill = format!("ep=\"{}\"", pair.prefill[0].address());
    pair.gateway.until_metric("kvgate_endpoint_in_flight", &[&prefill], 0.0).await;
    let told = is_shed(asks(&pair.gateway, "second").await, "pd_overloaded").await;
    assert_eq!(told, "all decode endpoints at in-flight capacity");
    assert_eq!(pair.prefill[0].log().len(), 1, "no prompt is computed for nobody");
    assert_eq!(
        (of(&pair.gateway, SHED, "decode").await, of(&pair.gateway, SHED, "prefill").await),
        (1.0, 0.0)
    );
    pair.gateway.until_metric("kvgate_requests_total", &["outcome=\"refused\""], 1.0).await;
    drop(streams);
    pair.is_idle().await;
    is_served(asks(&pair.gateway, "third").await).await;
    let prefills = takes_a_place(&pair.gateway, &pair.prefill[0], "prefills").await;
    let told = is_shed(asks(&pair.gateway, "fifth").await, "pd_overloaded").await;
    assert_eq!(told, "all prefill endpoints at in-flight capacity");
    assert_eq!(
        (of(&pair.gateway, SHED, "decode").await, of(&pair.gateway, SHED, "prefill").await),
        (1.0, 1.0)
    );
    drop(prefills);
    pair.is_idle().await;
}

/// Slow streams, a cap and a bounded queue, in a pool.
#[tokio::test(flavor = "multi_thread")]
async fn two_run_three_wait_and_the_others_come_again() {
    let engine = engine_with(|_| {}).await;
    let keys = "max_in_flight = 2\nqueue_depth = 3\nqueue_wait = \"60s\"";
    let rule = Rule::new("pool", &["admission"]).table("tier.admission", keys).engine(&engine);
    let gateway = Setup::new(&[rule]).start().await;
    engine.fault(Fault { stall_after: Some(1), ..Fault::default() }, 2);
    let (tell, mut answers) = tokio::sync::mpsc::unbounded_channel();
    for seed in 0..12 {
        let (address, tell) = (gateway.address, tell.clone());
        tokio::spawn(async move {
            let mut client = Connection::open(address).await;
            client.send(&request(&stream(seed))).await;
            let head = client.head().await.unwrap();
            tell.send((client, head)).unwrap();
        });
    }
    let (mut streams, mut shed) = (Vec::new(), 0);
    for _ in 0..9 {
        let (mut client, head) = answers.recv().await.unwrap();
        if head.status == 200 {
            streams.push(client);
            continue;
        }
        let answer = client.rest(head).await;
        assert_eq!((answer.status, &*answer.code()), (429, "pd_overloaded"));
        assert!(answer.field("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
        shed += 1;
    }
    assert_eq!((streams.len(), shed), (2, 7));
    waiting(&gateway, "any", 3).await;
    assert_eq!((open(&engine), gateway.metric("kvgate_leases_open", &[]).await), (2, 2.0));
    assert_eq!(gateway.metric(SHED, &[]).await, 7.0);
    // both leave: who waits takes their places
    drop(streams);
    for _ in 0..3 {
        let (mut client, head) = answers.recv().await.unwrap();
        let answer = client.rest(head).await;
        assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    }
    gateway.until_idle().await;
    assert_eq!(engine.log().len(), 5);
    is_served(asks(&gateway, "late").await).await;
}
