//! Files that change while requests flow: with `kvgate run`, as an operator has it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvgate_sim::Sim;

use crate::support::{
    Connection, Gateway, MODEL, Request, Rule, Setup, completion, engine, engines, prompt, until,
};

const HITS: &str = "loxilb_pd_kv_tier15_hits_total";
const CONNECTED: &str = "loxilb_kv_subscriber_connected";
const RELOADS: &str = "kvgate_config_reloads_total";
const SUCCESSFUL: &str = "kvgate_config_last_reload_successful";

fn ep(engine: &Sim) -> String {
    format!("ep=\"{}\"", engine.address())
}

async fn good(gateway: &Gateway) -> f64 {
    gateway.metric(RELOADS, &["result=\"good\""]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_come_and_go_and_the_others_do_not_notice() {
    let engines = engines(3).await;
    let [a, b, c] = &engines[..] else { unreachable!() };
    let gateway = Setup::new(&[Rule::kv("words").engines([a, b])]).spawn().await;
    for seed in 0..2 {
        gateway.complete(&prompt(seed, 64)).await;
    }
    for (n, engine) in [a, b].into_iter().enumerate() {
        gateway.until_blocks("words", n, 4).await;
        let warm = gateway.complete(&prompt(n as u32, 70)).await;
        assert_eq!((warm.tier(), warm.endpoint()), ("kv-exact", &*engine.address().to_string()));
    }
    until("all is counted", async || gateway.metrics().await.sum("kvgate_requests_total", &[]) == 4.0).await;
    let before = gateway.metrics().await;
    gateway.change(&Rule::kv("words").engines([c, b])).await;
    gateway.until_metric(CONNECTED, &[&ep(c)], 1.0).await;
    let after = gateway.metrics().await;
    // b stays what it was, number, counts, connection and blocks
    for (name, labels) in [
        (HITS, vec!["ep_idx=\"1\""]),
        ("loxilb_pd_kv_blocks", vec!["ep_idx=\"1\""]),
        ("kvgate_endpoint_attempts_total", vec!["ep_idx=\"1\""]),
        ("loxilb_kv_subscriber_reconnect_total", vec![&ep(b)]),
        ("kvgate_feed_batches_total", vec![&ep(b)]),
        ("kvgate_feed_replays_total", vec![&ep(b)]),
        ("kvgate_feed_replayed_total", vec![&ep(b)]),
        ("kvgate_feed_last_event_timestamp_ms", vec![&ep(b)]),
    ] {
        assert_eq!(after.get(name, &labels), before.get(name, &labels), "{name}");
    }
    // nothing is left of a, whose number is not used again
    assert!(after.all(CONNECTED, &[&ep(a)]).is_empty());
    let info = |n: usize| after.all("loxilb_pd_ep_info", &[&format!("ep_idx=\"{n}\"")]).len();
    assert_eq!((info(0), info(1), info(2)), (0, 1, 1));
    for series in [HITS, "loxilb_pd_kv_blocks", "kvgate_endpoint_in_flight", "kvgate_endpoint_attempts_total"]
    {
        until(series, async || gateway.metrics().await.all(series, &["ep_idx=\"0\""]).is_empty()).await;
    }
    let warm = gateway.complete(&prompt(1, 70)).await;
    assert_eq!((warm.tier(), warm.endpoint()), ("kv-exact", &*b.address().to_string()));
    assert_eq!(gateway.metric(HITS, &["ep_idx=\"1\""]).await, 2.0);
    assert_eq!(gateway.complete(&prompt(0, 70)).await.tier(), "round-robin", "a is gone, and its blocks");
    // a again: followed anew, and what it holds is learnt from its replay
    gateway.change(&Rule::kv("words").engines([a, b, c])).await;
    let number = |metrics: &crate::support::Metrics| {
        (0..9).find(|n| !metrics.all("loxilb_pd_ep_info", &[&ep(a), &format!("ep_idx=\"{n}\"")]).is_empty())
    };
    let number = number(&gateway.metrics().await).unwrap();
    assert_eq!(number, 3, "numbers are not used again");
    gateway.until_blocks("words", number, 4).await;
    until("a is credited again", async || {
        let warm = gateway.complete(&prompt(0, 70)).await;
        warm.tier() == "kv-exact"
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_come_and_go() {
    let engines = engines(2).await;
    let gateway = Setup::new(&[Rule::kv("words").engine(&engines[0])]).spawn().await;
    let other = Rule::new("other", &["kv-exact"]).matching("models = [\"other\"]").engine(&engines[1]);
    let ask = Request::json("/v1/completions", &completion("other", &prompt(1, 20)));
    assert_eq!(gateway.send(&ask).await.code(), "model_unavailable");
    gateway.change(&other).await;
    until("it is served", async || gateway.send(&ask).await.status == 404).await;
    gateway.until_metric(CONNECTED, &["service=\"other\""], 1.0).await;
    gateway.setup.remove("other");
    until("it is served no more", async || gateway.send(&ask).await.status == 503).await;
    until("nothing of it is left", async || {
        let page = gateway.ask("/metrics").await;
        !String::from_utf8(page.body.to_vec()).unwrap().contains("service=\"other\"")
    })
    .await;
    // without any rule it goes on, and says what it cannot do
    gateway.setup.remove("words");
    until("nobody is served", async || gateway.send(&ask).await.status == 503).await;
    gateway.setup.write(&Rule::kv("words").engine(&engines[0]));
    until("back again", async || gateway.send(&Request::get("/v1/models")).await.status == 200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_file_changes_nothing_and_is_told() {
    let engine = engine().await;
    let rule = Rule::kv("words").engine(&engine);
    let gateway = Setup::new(std::slice::from_ref(&rule)).spawn().await;
    gateway.complete(&prompt(1, 64)).await;
    gateway.until_blocks("words", 0, 4).await;
    for (at, (broken, said)) in [
        ("name = \"words\"\ntiers = [\"kv-exakt\"]\n[[endpoint]]\naddress = \"127.0.0.1:1\"\n", "kv-exakt"),
        ("name = \"words\"\n[[endpoint]\n", "words.toml"),
        ("", "endpoint"),
    ]
    .into_iter()
    .enumerate()
    {
        gateway.setup.write_text("words", broken);
        gateway.until_metric(RELOADS, &["result=\"refused\""], at as f64 + 1.0).await;
        assert_eq!(gateway.metric(SUCCESSFUL, &[]).await, 0.0);
        let ready = gateway.ready().await;
        let problem = ready["config_problem"].as_str().unwrap();
        assert!(problem.contains(said) && problem.contains("words.toml"), "{problem}");
        assert_eq!(gateway.complete(&prompt(1, 70)).await.tier(), "kv-exact");
    }
    gateway.change(&rule).await;
    assert_eq!(gateway.metric(SUCCESSFUL, &[]).await, 1.0);
    assert!(gateway.ready().await["config_problem"].is_null());
    assert_eq!(gateway.complete(&prompt(1, 70)).await.tier(), "kv-exact");
}

/// Asks again and again, on one connection after the other, until it is told to stop.
async fn client(address: std::net::SocketAddr, seed: u32, stop: Arc<AtomicBool>, done: Arc<AtomicU64>) {
    while !stop.load(Ordering::Relaxed) {
        let mut connection = Connection::open(address).await;
        for at in 0..10 {
            let body = completion(MODEL, &prompt(seed, 40 + at));
            connection.send(&Request::json("/v1/completions", &body)).await;
            let answer = connection.answer().await;
            assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_reloads_under_load_lose_nothing() {
    let engines = engines(3).await;
    let [a, b, c] = &engines[..] else { unreachable!() };
    let gateway = Setup::new(&[Rule::kv("words").engines([a, b])]).spawn().await;
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let client = |seed| tokio::spawn(client(gateway.address, seed, stop.clone(), done.clone()));
    let clients: Vec<_> = (0..3).map(client).collect();
    for round in 0..50 {
        let answered = done.load(Ordering::Relaxed);
        let rule = if round % 2 == 0 {
            Rule::kv("words").engines([b, c])
        } else {
            Rule::kv("words").engines([a, b])
        };
        gateway.change(&rule).await;
        until("requests flow", async || done.load(Ordering::Relaxed) > answered).await;
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.get(RELOADS, &["result=\"refused\""]), 0.0);
    assert_eq!(metrics.all(CONNECTED, &[]).len(), 2);
    gateway.until_idle().await;
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_signals_is_weathered_and_the_last_word_counts() {
    let engines = engines(2).await;
    let mut gateway = Setup::new(&[Rule::kv("words").engine(&engines[0])]).spawn().await;
    for round in 0..4 {
        gateway.setup.write(&Rule::kv("words").engine(&engines[round % 2]));
        gateway.signal("HUP", 50);
    }
    until("the last configuration is in force", async || {
        gateway.complete(&prompt(1, 20)).await.endpoint() == engines[1].address().to_string()
    })
    .await;
    assert_eq!(gateway.ended(), None);
    let reloads = good(&gateway).await;
    assert!(reloads < 100.0, "{reloads} reloads of 200 signals");
    // a signal is heard without any change, too
    gateway.signal("HUP", 1);
    until("one more", async || good(&gateway).await > reloads).await;
    assert_eq!(gateway.metric(SUCCESSFUL, &[]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_under_way_outlives_its_endpoint_s_removal() {
    let engines = engines(2).await;
    let gateway = Setup::new(&[Rule::kv("words").engine(&engines[0])]).spawn().await;
    let mut client = Connection::open(gateway.address).await;
    let body = completion(MODEL, &prompt(1, 40));
    let slow = Request::json("/v1/completions", &body).field("x-sim-fault", "{\"delay_ms\": 1500}");
    client.send(&slow).await;
    until("the engine has it", async || engines[0].log().len() == 1).await;
    assert_eq!(gateway.metric("kvgate_leases_open", &[]).await, 1.0);
    gateway.change(&Rule::kv("words").engine(&engines[1])).await;
    assert_eq!(gateway.metric("kvgate_leases_open", &[]).await, 1.0);
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.endpoint()), (200, &*engines[0].address().to_string()));
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_names_what_changed() {
    let engine = engine().await;
    let rule = |name: &str| {
        Rule::new(name, &["round-robin"]).matching(&format!("hosts = [{name:?}]")).engine(&engine)
    };
    let gateway = Setup::new(&[rule("kept"), rule("mended"), rule("gone")]).spawn().await;
    let file = gateway.setup.folder().join("gateway.toml");
    let process = std::fs::read_to_string(&file).unwrap();
    let says = async |part: &str| {
        let said = || {
            let log = gateway.log();
            log.lines().any(|line| line.contains("the configuration is in force") && line.contains(part))
        };
        until(part, async || said()).await;
    };
    says("added=\"gone, kept, mended\"").await;
    gateway.setup.remove("gone");
    says("removed=\"gone\"").await;
    gateway.setup.write(&rule("new"));
    says("kept=2 added=\"new\" removed=\"\" changed=\"\" tables=\"\" listeners=\"\"").await;
    gateway.setup.write(&rule("mended").table("retry", "attempts = 1"));
    says("kept=3 added=\"\" removed=\"\" changed=\"mended\"").await;
    let changed = process.replace("prepare = \"10s\"", "prepare = \"9s\"");
    std::fs::write(&file, changed.replace("expose_routing = true", "expose_routing = false")).unwrap();
    // a listener that is bound stays as it is until the next start
    says("changed=\"\" tables=\"timeouts\" listeners=\"\"").await;
}
