//! What publishers may do, in and out of order.

use serde_json::{Value, json};

use crate::support::{
    BLOCK, Gateway, Publisher, Replay, Request, Rule, Setup, batch, cleared, engine, free_port, host, prompt,
    removed, silent_engine, stored, until,
};

const HITS: &str = "loxilb_pd_kv_tier15_hits_total";
const CONNECTED: &str = "loxilb_kv_subscriber_connected";
const CLEARS: &str = "kvgate_feed_clears_total";
const BAD: &str = "kvgate_feed_bad_messages_total";

/// The first block of the prompt of this seed, named by it too.
fn block(seed: u32) -> Value {
    stored(&[seed.into()], None, &prompt(seed, BLOCK))
}

/// A gateway before one engine that is followed at a publisher of ours, without a replay.
async fn followed() -> (Gateway, Publisher, kvgate_sim::Sim) {
    let (engine, mut publisher) = (silent_engine().await, Publisher::bind().await);
    let rule = Rule::kv("words").followed(&engine, &publisher.endpoint());
    let gateway = Setup::new(&[rule]).start().await;
    publisher.subscribed().await;
    (gateway, publisher, engine)
}

/// Whether the prompt of this seed is routed by what its endpoint holds.
async fn hit(gateway: &Gateway, seed: u32) -> bool {
    let before = gateway.metric(HITS, &[]).await;
    let answer = gateway.complete(&prompt(seed, 40)).await;
    let counted = gateway.metric(HITS, &[]).await - before;
    assert_eq!(counted, if answer.tier() == "kv-exact" { 1.0 } else { 0.0 });
    answer.tier() == "kv-exact"
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jump_of_64_keeps_and_one_of_65_clears() {
    let (gateway, mut publisher, _engine) = followed().await;
    publisher.publish(1000, &[block(1)]).await;
    gateway.until_held("words", 0, &[1]).await;
    publisher.publish(1064, &[block(2)]).await;
    gateway.until_held("words", 0, &[1, 2]).await;
    assert!(hit(&gateway, 1).await && hit(&gateway, 2).await);
    publisher.publish(1129, &[block(3)]).await;
    gateway.until_held("words", 0, &[3]).await;
    assert!(!hit(&gateway, 1).await && !hit(&gateway, 2).await && hit(&gateway, 3).await);
    assert_eq!(gateway.metric(CLEARS, &["reason=\"gap\""]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_number_again_is_ignored_and_a_smaller_one_is_a_restart() {
    let (gateway, mut publisher, _engine) = followed().await;
    publisher.publish(5, &[block(1)]).await;
    publisher.publish(5, &[block(2)]).await;
    publisher.publish(5, &[cleared()]).await;
    publisher.publish(6, &[block(3)]).await;
    gateway.until_held("words", 0, &[1, 3]).await;
    publisher.publish(4, &[block(4)]).await;
    gateway.until_held("words", 0, &[4]).await;
    assert!(!hit(&gateway, 1).await && hit(&gateway, 4).await);
    assert_eq!(gateway.metric(CLEARS, &["reason=\"restart\""]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hole_is_filled_from_the_replay() {
    let (engine, mut publisher, replay) =
        (silent_engine().await, Publisher::bind().await, Replay::bind().await);
    let keys = format!("kv_events = {:?}\nkv_replay = {:?}", publisher.endpoint(), replay.endpoint());
    let rule = Rule::kv("words").endpoint(engine.address(), &keys);
    let gateway = Setup::new(&[rule]).start().await;
    publisher.subscribed().await;
    // it starts late: what came before it is asked for
    (1..=7).for_each(|n| replay.remember(n, &[block(n as u32)]));
    publisher.publish(7, &[block(7)]).await;
    gateway.until_held("words", 0, &[1, 2, 3, 4, 5, 6, 7]).await;
    // 8 and 9 get lost, and one of them removes what was there
    replay.remember(8, &[block(8)]);
    replay.remember(9, &[removed(&[7]), block(9)]);
    replay.remember(10, &[block(10)]);
    publisher.publish(10, &[block(10)]).await;
    gateway.until_held("words", 0, &[1, 2, 3, 4, 5, 6, 8, 9, 10]).await;
    assert!(hit(&gateway, 8).await && !hit(&gateway, 7).await);
    assert_eq!(gateway.metrics().await.sum(CLEARS, &[]), 0.0);
    assert_eq!(gateway.metrics().await.sum("kvgate_feed_lost_total", &[]), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_replay_a_hole_is_counted_and_the_rest_kept() {
    let (gateway, mut publisher, _engine) = followed().await;
    for seq in [1, 2, 5] {
        publisher.publish(seq, &[block(seq as u32)]).await;
    }
    gateway.until_held("words", 0, &[1, 2, 5]).await;
    gateway.until_metric("kvgate_feed_gaps_total", &[], 1.0).await;
    gateway.until_metric("kvgate_feed_lost_total", &["reason=\"hole\""], 2.0).await;
    assert_eq!(gateway.metrics().await.sum("kvgate_feed_ignored_total", &[]), 0.0);
    assert!(hit(&gateway, 1).await && hit(&gateway, 5).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_starts_again_at_0_holds_nothing() {
    let (gateway, mut publisher, _engine) = followed().await;
    publisher.publish(0, &[block(1)]).await;
    publisher.publish(1, &[block(2)]).await;
    gateway.until_held("words", 0, &[1, 2]).await;
    publisher.restart().await;
    publisher.subscribed().await;
    publisher.publish(0, &[block(3)]).await;
    gateway.until_held("words", 0, &[3]).await;
    assert!(!hit(&gateway, 1).await && !hit(&gateway, 2).await && hit(&gateway, 3).await);
    // over a connection that merely broke numbers go on
    publisher.restart().await;
    publisher.subscribed().await;
    publisher.publish(1, &[block(4)]).await;
    gateway.until_held("words", 0, &[3, 4]).await;
    assert!(hit(&gateway, 3).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn removals_and_clears_take_effect() {
    let (gateway, mut publisher, _engine) = followed().await;
    publisher.publish(0, &[block(1), block(2), block(3)]).await;
    gateway.until_held("words", 0, &[1, 2, 3]).await;
    publisher.publish(1, &[removed(&[4711, 2])]).await;
    gateway.until_held("words", 0, &[1, 3]).await;
    assert!(!hit(&gateway, 2).await && hit(&gateway, 1).await);
    assert_eq!(gateway.metric("kvgate_feed_blocks_total", &["reason=\"absent_removal\""]).await, 1.0);
    publisher.publish(2, &[cleared()]).await;
    gateway.until_held("words", 0, &[]).await;
    assert!(!hit(&gateway, 1).await);
    publisher.publish(3, &[cleared(), block(1)]).await;
    gateway.until_held("words", 0, &[1]).await;
    assert!(hit(&gateway, 1).await);
    // two copies: the first removal leaves one
    publisher.publish(4, &[block(1), removed(&[1])]).await;
    publisher.publish(5, &[block(5)]).await;
    gateway.until_held("words", 0, &[1, 5]).await;
    publisher.publish(6, &[removed(&[1])]).await;
    gateway.until_held("words", 0, &[5]).await;
}

/// What engines of all generations send, and some that there are none of yet.
#[tokio::test(flavor = "multi_thread")]
async fn every_form_of_an_event_is_understood() {
    let (gateway, mut publisher, _engine) = followed().await;
    let ids = |seed: u32, n| prompt(seed, n);
    let forms = [
        (
            "32 tokens a block",
            32,
            u64::MAX,
            json!({
                "type": "BlockStored", "block_hashes": [u64::MAX], "parent_block_hash": null, "token_ids": ids(1, 32),
                "block_size": 32, "lora_id": null,
            }),
        ),
        (
            "8 tokens a block",
            8,
            77,
            json!({
                "type": "BlockStored", "block_hashes": [77], "parent_block_hash": null, "token_ids": ids(2, 8),
                "block_size": 8, "lora_id": null,
            }),
        ),
        ("an array", 16, 5_u64.wrapping_neg(), json!(["BlockStored", [-5], null, ids(3, 16), 16, null])),
        (
            "a long array",
            16,
            300,
            json!(["BlockStored", [300], null, ids(4, 16), 16, null, "GPU", null, [null], 0]),
        ),
        (
            "fields of the future",
            16,
            70_000,
            json!({
                "type": "BlockStored", "block_hashes": [70000], "parent_block_hash": null, "token_ids": ids(5, 16),
                "block_size": 16, "lora_id": null, "medium": "GPU", "moon": {"phase": [1, 2, {"x": null}]},
            }),
        ),
        (
            "another order of fields",
            16,
            1,
            json!({
                "block_size": 16, "token_ids": ids(6, 16), "block_hashes": [1], "type": "BlockStored",
                "parent_block_hash": null,
            }),
        ),
    ];
    for (at, (form, size, hash, event)) in forms.into_iter().enumerate() {
        publisher.publish(at as u64, &[json!({"type": "BlockDreamt", "of": 1}), cleared(), event]).await;
        gateway.until_held("words", 0, &[hash]).await;
        gateway.until_metric("kvgate_feed_block_size_tokens", &[], f64::from(size)).await;
        assert!(hit(&gateway, at as u32 + 1).await, "{form}");
    }
    // whole digests for names, of which the last eight bytes count
    let mut named = rmp_serde::to_vec(&json!(["BlockStored"])).unwrap();
    named[0] = 0x95;
    named.extend([0x91, 0xc4, 32]);
    named.extend([9; 24]);
    named.extend(0x0102_0304_0506_0708_u64.to_be_bytes());
    named.extend([0xc0]);
    named.extend(rmp_serde::to_vec(&ids(7, 16)).unwrap());
    named.push(16);
    let mut payload = vec![0x93, 0xca, 0, 0, 0, 0, 0x92];
    payload.extend(rmp_serde::to_vec(&json!(["AllBlocksCleared"])).unwrap());
    payload.extend(named);
    payload.push(0);
    publisher.send(vec![b"kv@topic".to_vec(), 6_u64.to_be_bytes().to_vec(), payload]).await;
    gateway.until_held("words", 0, &[0x0102_0304_0506_0708]).await;
    assert!(hit(&gateway, 7).await);
    assert_eq!(gateway.metrics().await.sum(BAD, &[]), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_is_counted_by_reason_and_changes_nothing() {
    let (gateway, mut publisher, _engine) = followed().await;
    publisher.publish(0, &[block(1)]).await;
    gateway.until_held("words", 0, &[1]).await;
    let seq = 1_u64.to_be_bytes().to_vec();
    let good = batch(&[block(2)]);
    let with = |payload: Vec<u8>| vec![vec![], seq.clone(), payload];
    let value = |value: Value| rmp_serde::to_vec(&value).unwrap();
    let deep = [vec![0x93, 0x01, 0x91], vec![0x91; 10_000], vec![0xc0, 0x00]].concat();
    let garbage = [
        ("frames", vec![b"alone".to_vec()]),
        ("sequence", vec![vec![], b"123".to_vec(), good.clone()]),
        ("sequence", vec![vec![], u64::MAX.to_be_bytes().to_vec(), good.clone()]),
        ("truncated", with(good[..good.len() - 4].to_vec())),
        ("truncated", with(vec![])),
        ("truncated", with(vec![0x93, 0x01, 0xdd, 0x40, 0, 0, 0])),
        ("trailing", with([good.clone(), vec![0xc0]].concat())),
        ("batch", with(value(json!({"not": "a batch"})))),
        ("event", with(value(json!([1.0, [7], 0])))),
        ("event", with(deep)),
        ("missing", with(value(json!([1.0, [{"type": "BlockStored", "block_hashes": [1]}], 0])))),
        ("field", with(value(json!([1.0, [{"type": "BlockRemoved", "block_hashes": "all"}], 0])))),
    ];
    for (reason, frames) in garbage {
        let label = format!("reason={reason:?}");
        let before = gateway.metric(BAD, &[&label]).await;
        let all = gateway.metrics().await.sum(BAD, &[]);
        publisher.send(frames.clone()).await;
        until(&format!("{reason} is counted: {frames:?}"), async || {
            gateway.metrics().await.sum(BAD, &[]) == all + 1.0
        })
        .await;
        assert_eq!(gateway.metric(BAD, &[&label]).await, before + 1.0, "{reason}: {frames:?}");
    }
    publisher.publish(2, &[block(3)]).await;
    gateway.until_held("words", 0, &[1, 3]).await;
    assert!(hit(&gateway, 1).await);
    assert_eq!(
        gateway.metric("loxilb_kv_subscriber_reconnect_total", &[]).await,
        0.0,
        "all on one connection"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn publishers_that_never_answer_cost_nothing_but_their_credit() {
    let (good, mute, web, gone) =
        (engine().await, silent_engine().await, silent_engine().await, silent_engine().await);
    // the kernel takes the connection, and nobody ever says a word
    let silence = std::net::TcpListener::bind((host(), 0)).unwrap();
    let silent = format!("tcp://{}", silence.local_addr().unwrap());
    let not_zmtp = format!("tcp://{}", web.address());
    let nobody = format!("tcp://{}", free_port());
    let rule = Rule::kv("words")
        .table("events", "replay_port_offset = 0")
        .engine(&good)
        .followed(&mute, &silent)
        .followed(&web, &not_zmtp)
        .followed(&gone, &nobody);
    let gateway = Setup::new(&[rule]).start_unready().await;
    let label = |address: std::net::SocketAddr| format!("ep=\"{address}\"");
    gateway.until_metric(CONNECTED, &[&label(good.address())], 1.0).await;
    until("the tokenizer is loaded", async || gateway.ready().await["tokenizers"][0]["state"] == "ready")
        .await;
    // in turn: all four serve, and only one is credited
    for seed in 1..=4 {
        gateway.complete(&prompt(seed, 40)).await;
    }
    until("the good one is followed", async || !gateway.held("words", 0).await.is_empty()).await;
    let warm = gateway.complete(&prompt(1, 60)).await;
    assert_eq!((warm.tier(), warm.endpoint()), ("kv-exact", &*good.address().to_string()));
    for (engine, kind) in [(&mute, "handshake_timeout"), (&web, "not_zmtp"), (&gone, "connect")] {
        let labels = [label(engine.address()), format!("reason={kind:?}")];
        let labels: Vec<_> = labels.iter().map(String::as_str).collect();
        until(&format!("{kind} is counted"), async || {
            gateway.metric("kvgate_feed_connect_errors_total", &labels).await >= 1.0
        })
        .await;
        assert_eq!(gateway.metric(CONNECTED, &[&label(engine.address())]).await, 0.0);
    }
    assert_eq!(gateway.send(&Request::get("/v1/models")).await.status, 200);
}
