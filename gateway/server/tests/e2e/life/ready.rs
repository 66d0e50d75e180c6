//! When the process says that it may be sent traffic.

use super::{Manager, endless_replay, is_ready, readiness, short};
use crate::support::{
    Gateway, MODEL, Request, Rule, Setup, completion, engine, engine_with, fetch, prompt, silent_engine,
    until,
};

#[tokio::test(flavor = "multi_thread")]
async fn it_is_ready_when_it_knows_what_engines_hold() {
    let mut engines = Vec::new();
    for seed in 0..3 {
        let engine = engine().await;
        for more in 0..10 {
            let ask = Request::json("/v1/completions", &completion(MODEL, &prompt(seed + 10 * more, 160)));
            assert_eq!(fetch(engine.address(), &ask).await.status, 200);
        }
        engines.push(engine);
    }
    for _ in 0..3 {
        let setup = Setup::new(&[Rule::kv("words").engines(&engines)]);
        let gateway = setup.server("warm_up = \"10m\"\n").spawn_unready().await;
        is_ready(&gateway).await;
        // not a moment later
        for endpoint in 0..3 {
            assert_eq!(gateway.held("words", endpoint).await.len(), 100);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_does_not_come_holds_it_for_so_long_and_no_longer() {
    let engine = engine().await;
    let (rule, _replay) = endless_replay(&engine).await;
    let setup = Setup::new(std::slice::from_ref(&rule)).server("warm_up = \"10m\"\n");
    let gateway = setup.spawn_unready().await;
    let (status, detail) = readiness(&gateway).await;
    assert_eq!((status, &detail["stage"]), (503, &"warming".into()), "{detail}");
    let told = |detail: &serde_json::Value| detail["warming"][0]["ep"] == engine.address().to_string();
    assert!(told(&detail), "{detail}");
    until("it says why", async || readiness(&gateway).await.1["warming"][0]["state"] == "replaying").await;
    // it lives, and serves
    assert_eq!(gateway.ask("/livez").await.status, 200);
    assert_eq!(gateway.send(&short(1)).await.status, 200);
    assert_eq!(readiness(&gateway).await.0, 503);
    let gateway = Setup::new(&[rule]).server("warm_up = \"1s\"\n").spawn_unready().await;
    is_ready(&gateway).await;
    assert!(gateway.log().contains("without knowing"), "{}", gateway.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_cannot_be_reached_hold_nobody_up() {
    let (engine, nobody) = (silent_engine().await, crate::support::free_port());
    let keys = format!("kv_events = \"tcp://{nobody}\"\nkv_replay = \"tcp://{nobody}\"");
    let rule = Rule::kv("words").endpoint(engine.address(), &keys);
    let gateway = Setup::new(&[rule]).server("warm_up = \"1h\"\n").spawn_unready().await;
    is_ready(&gateway).await;
    assert_eq!(readiness(&gateway).await.1["feeds"][0]["connected"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_manager_hears_of_every_step() {
    let manager = Manager::new();
    let engine = engine_with(|c| c.decode_us = 50_000.0).await;
    let (rule, replay) = endless_replay(&engine).await;
    let setup = Setup::new(std::slice::from_ref(&rule)).server("warm_up = \"10m\"\n");
    let setup = manager.over(setup).environment("WATCHDOG_USEC", "1000000");
    let mut gateway: Gateway = setup.spawn_unready().await;
    // it lives from the first, and a reload before it is ready does not make it so
    assert_eq!(manager.next().await, "WATCHDOG=1");
    gateway.change(&rule.clone().top("explain = true")).await;
    assert_eq!(manager.next().await, "WATCHDOG=1");
    drop(replay);
    assert_eq!(manager.hears().await, "READY=1");
    is_ready(&gateway).await;
    gateway.signal("HUP", 1);
    let told = manager.hears().await;
    assert!(told.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{told}");
    assert_eq!(manager.hears().await, "READY=1\nSTATUS=");
    gateway.setup.write_text("words", "nonsense");
    assert!(manager.hears().await.starts_with("RELOADING=1"));
    assert!(manager.hears().await.contains("refused"));
    gateway.signal("TERM", 1);
    assert_eq!(manager.hears().await, "STOPPING=1");
    until("it ends", async || gateway.ended().is_some()).await;
}
