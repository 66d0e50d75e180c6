//! What an operator is told of.

use serde_json::Value;

use crate::support::{
    Gateway, Publisher, Rule, Setup, cleared, engine, prompt, silent_engine, stored, until,
};

const ALARM: &str = "kvgate_alarm";

async fn raised(gateway: &Gateway, alarm: &str) -> bool {
    gateway.metric(ALARM, &["service=\"words\"", &format!("alarm={alarm:?}")]).await == 1.0
}

/// The detail of the one alarm that is on.
async fn detail(gateway: &Gateway, alarm: &str) -> String {
    let alarms = gateway.ready().await["alarms"].clone();
    let [only] = &alarms.as_array().unwrap()[..] else { panic!("{alarms}") };
    assert_eq!((&only["service"], &only["alarm"]), (&Value::from("words"), &Value::from(alarm)));
    only["detail"].as_str().unwrap().to_owned()
}

/// Lines of warnings that name the alarm.
fn warnings(gateway: &Gateway, alarm: &str) -> usize {
    gateway.log().lines().filter(|line| line.contains("WARN") && line.contains(alarm)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_without_events_raise_an_alarm() {
    let (engine, mut publisher) = (silent_engine().await, Publisher::bind().await);
    let rule = Rule::kv("words").followed(&engine, &publisher.endpoint());
    let setup =
        Setup::new(&[rule]).process("[alarms]\nevents_missing_requests = 4\nevents_missing_after = \"1s\"\n");
    let gateway = setup.spawn().await;
    publisher.subscribed().await;
    assert!(!raised(&gateway, "kv_no_events").await, "the series exists");
    until("the alarm is on", async || {
        gateway.complete(&prompt(1, 40)).await;
        raised(&gateway, "kv_no_events").await
    })
    .await;
    let said = detail(&gateway, "kv_no_events").await;
    assert!(said.contains("enable_kv_cache_events"), "what to do about it: {said}");
    for _ in 0..5 {
        gateway.complete(&prompt(1, 40)).await;
    }
    assert_eq!(warnings(&gateway, "kv_no_events"), 1, "{}", gateway.log());
    publisher.publish(0, &[stored(&[1], None, &prompt(1, 16))]).await;
    until("the alarm is off", async || !raised(&gateway, "kv_no_events").await).await;
    assert!(gateway.ready().await["alarms"].as_array().unwrap().is_empty());
    // what has been heard once may fall silent again
    publisher.publish(1, &[cleared()]).await;
    until("the alarm is on again", async || {
        gateway.complete(&prompt(1, 40)).await;
        raised(&gateway, "kv_no_events").await
    })
    .await;
}

/// One of two engines publishes nothing: what the other says does not hide it.
#[tokio::test(flavor = "multi_thread")]
async fn one_silent_engine_among_others_raises_an_alarm() {
    let (good, silent, mut publisher) = (engine().await, silent_engine().await, Publisher::bind().await);
    let rule = Rule::kv("words")
        .table("tier.kv-exact", "zero_hit_requests = 0")
        .engine(&good)
        .followed(&silent, &publisher.endpoint());
    let gateway = Setup::new(&[rule])
        .process("[alarms]\nevents_missing_requests = 3\nevents_missing_after = \"1s\"\n")
        .start()
        .await;
    publisher.subscribed().await;
    let mut seed = 0;
    until("the alarm is on", async || {
        seed = (seed + 1) % 1000;
        gateway.complete(&prompt(seed, 40)).await;
        raised(&gateway, "kv_no_events").await
    })
    .await;
    let said = detail(&gateway, "kv_no_events").await;
    let named = |engine: &kvgate_sim::Sim| said.contains(&engine.address().to_string());
    assert!(named(&silent) && !named(&good), "{said}");
    publisher.publish(0, &[stored(&[1], None, &prompt(1100, 16))]).await;
    until("the alarm is off", async || !raised(&gateway, "kv_no_events").await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_cannot_be_followed_raise_an_alarm() {
    let engine = silent_engine().await;
    let events = format!("tcp://{}", crate::support::free_port());
    let gateway = Setup::new(&[Rule::kv("words").followed(&engine, &events)])
        .process("[alarms]\nevents_missing_requests = 4\nevents_missing_after = \"1s\"\n")
        .start_unready()
        .await;
    until("the alarm is on", async || {
        gateway.complete(&prompt(1, 40)).await;
        raised(&gateway, "kv_no_events").await
    })
    .await;
    let said = detail(&gateway, "kv_no_events").await;
    assert!(said.contains("[events].port"), "what to do about it: {said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inventory_that_nothing_ever_matches_raises_an_alarm() {
    let (engine, mut publisher) = (silent_engine().await, Publisher::bind().await);
    let rule = Rule::kv("words")
        .table("tier.kv-exact", "zero_hit_requests = 5")
        .followed(&engine, &publisher.endpoint());
    let gateway = Setup::new(&[rule]).spawn().await;
    publisher.subscribed().await;
    const WATCHDOG: &str = "loxilb_pd_kv_zero_hit_watchdog_total";
    let watchdog = async || gateway.metric(WATCHDOG, &["service_id=\"words\""]).await;
    for seed in 0..8 {
        gateway.complete(&prompt(seed, 40)).await;
    }
    assert_eq!(
        (raised(&gateway, "kv_zero_hits").await, watchdog().await),
        (false, 0.0),
        "nothing is held yet"
    );
    publisher.publish(0, &[stored(&[1], None, &prompt(500, 16))]).await;
    gateway.until_held("words", 0, &[1]).await;
    for seed in 0..7 {
        assert_eq!(raised(&gateway, "kv_zero_hits").await, seed >= 5, "after {seed}");
        gateway.complete(&prompt(seed, 40)).await;
    }
    assert_eq!(watchdog().await, 3.0, "from the fifth on");
    let said = detail(&gateway, "kv_zero_hits").await;
    assert!(said.contains("tokenizer"), "what to do about it: {said}");
    assert_eq!(warnings(&gateway, "kv_zero_hits"), 1, "{}", gateway.log());
    assert_eq!(gateway.complete(&prompt(500, 40)).await.tier(), "kv-exact");
    assert!(!raised(&gateway, "kv_zero_hits").await);
    assert_eq!(watchdog().await, 3.0);
    drop(engine);
}

/// A fleet that works raises nothing, whatever the thresholds.
#[tokio::test(flavor = "multi_thread")]
async fn a_warm_fleet_is_quiet() {
    let engine = engine().await;
    let rule = Rule::kv("words").table("tier.kv-exact", "zero_hit_requests = 2").engine(&engine);
    let gateway = Setup::new(&[rule])
        .process("[alarms]\nevents_missing_requests = 1\nevents_missing_after = \"1s\"\n")
        .start()
        .await;
    gateway.complete(&prompt(1, 48)).await;
    gateway.until_blocks("words", 0, 3).await;
    let end = tokio::time::Instant::now() + std::time::Duration::from_millis(2500);
    while tokio::time::Instant::now() < end {
        // all of it is held: the engine has nothing to announce
        assert_eq!(gateway.complete(&prompt(1, 48)).await.tier(), "kv-exact");
    }
    assert_eq!(gateway.metrics().await.sum(ALARM, &[]), 0.0);
}
