//! Files that are wrong in every way, and reloads without end, while requests flow.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvgate_sim::Sim;

use super::{short, stream};
use crate::support::{Connection, Gateway, MODEL, Rule, Setup, engine_with, engines, prompt, until};

const RELOADS: &str = "kvgate_config_reloads_total";

/// Asks until it is told to stop; every answer must be whole.
async fn asks(address: std::net::SocketAddr, seed: u32, stop: Arc<AtomicBool>, done: Arc<AtomicU64>) {
    let mut connection = Connection::open(address).await;
    while !stop.load(Ordering::Relaxed) {
        connection.send(&short(seed)).await;
        let answer = connection.answer().await;
        assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Clients that ask all the time.
struct Clients {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Clients {
    fn start(gateway: &Gateway, count: u32) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let tasks =
            (0..count).map(|n| tokio::spawn(asks(gateway.address, n, stop.clone(), done.clone()))).collect();
        Self { stop, done, tasks }
    }

    /// Waits until each has been answered again, more or less.
    async fn go_on(&self) {
        let before = self.done.load(Ordering::Relaxed);
        until("requests flow", async || {
            self.done.load(Ordering::Relaxed) >= before + self.tasks.len() as u64
        })
        .await;
    }

    async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
    }
}

/// What is written in the place of which rule, what the error names: the key, or the line.
fn broken_rules(engine: &Sim) -> Vec<(String, String)> {
    let good = Rule::kv("words").engine(engine).toml();
    let address = engine.address().to_string();
    let keys = [
        ("nane = 1", "nane"),
        ("engine = \"vlm\"", "engine"),
        ("engine = 3", "engine"),
        ("shape = \"pol\"", "shape"),
        ("shape = \"prefill-decode\"", "words.toml"),
        ("id = 0", "id"),
        ("id = \"one\"", "id"),
        ("explain = \"yes\"", "explain"),
        ("decode_tiers = 3", "decode_tiers"),
        ("limits = 3", "limits"),
    ];
    let tables = [
        ("[limits]\nbody = \"16 MB\"", "limits.body"),
        ("[limits]\nbody = \"900GiB\"", "limits.body"),
        ("[limits]\nattempts = 0", "limits.attempts"),
        ("[limits]\nattemps = 1", "limits.attemps"),
        ("[timeouts]\nidle = \"2min\"", "timeouts.idle"),
        ("[timeouts]\nidle = 2", "timeouts.idle"),
        ("[timeouts]\nconnect = \"0ms\"", "timeouts.connect"),
        ("[timeouts]\ntotal = \"\"", "timeouts.total"),
        ("[timeout]\ntotal = \"1h\"", "timeout"),
        ("[telemetry]\ninterval = \"-1s\"", "telemetry.interval"),
        ("[events]\nport = 70000", "events.port"),
        ("[events]\nport = -1", "events.port"),
        ("[event]\nport = 1", "event"),
        ("[tier.kv-exact.law]\nmode = \"firm\"", "tier.kv-exact.law.mode"),
        ("[tier.kv-exact.contract]\nmode = \"strict\"", "tier.kv-exact.contract"),
        ("[tier.kv-exact.contract]\nmode = \"lax\"", "tier.kv-exact.contract.mode"),
        ("[tier.kv-exact]\nmin_match_tokens = -1", "tier.kv-exact.min_match_tokens"),
        ("[tier.kv-exact]\nmin_match = 1", "tier.kv-exact.min_match"),
        ("[tier.session]\nttl = \"1\"", "tier.session"),
        ("[[endpoint]]\naddress = \"localhost\"", "endpoint[1].address"),
        ("[[endpoint]]\naddress = 1", "endpoint[1].address"),
        ("[[endpoint]]\nadress = \"127.0.0.1:1\"", "endpoint[1]"),
        ("[[endpoint]]\naddress = \"127.0.0.1:1\"\nrole = \"both\"", "endpoint[1].role"),
        ("[[endpoint]]\naddress = \"127.0.0.1:1\"\nweight = 0", "endpoint[1].weight"),
        ("[[endpoint]]\naddress = \"127.0.0.1:1\"\nkv_events = \"udp://a:1\"", "endpoint[1].kv_events"),
        ("[[endpoint]]\nweight = 1", "endpoint[1]"),
    ];
    let mut broken: Vec<_> = keys.iter().map(|(key, named)| (format!("{key}\n{good}"), *named)).collect();
    broken.extend(tables.iter().map(|(table, named)| (format!("{good}\n{table}\n"), *named)));
    broken.extend([
        (good.replace("tiers =", "tiers"), "words.toml"),
        (good.replace("tiers = [", "tiers = "), "words.toml"),
        (good.replace("[match]", "[match"), "words.toml"),
        (good.replace("[[endpoint]]", "[[endpoint]"), "words.toml"),
        (good.replace("kv-exact", "kv-exakt"), "tiers"),
        (good.replace("\"round-robin\"", "\"kv-exact\""), "tiers"),
        (good.replace(&address, "nowhere"), "endpoint[0].address"),
        (good.replace("name = \"words\"", "name = \"\""), "name"),
        (good.replace(MODEL, "\\u0000\\q"), "words.toml"),
        (good[..good.len() / 2].to_owned(), "words.toml"),
        (good.clone() + "\u{feff}=", "words.toml"),
        ("\0\0\0\0".to_owned(), "words.toml"),
        (String::new(), "words.toml"),
        ("[[[".to_owned(), "words.toml"),
    ]);
    broken.into_iter().map(|(text, named)| (text, named.to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_broken_files_change_nothing_and_are_named() {
    let engine = &engines(1).await[0];
    let rule = Rule::kv("words").engine(engine);
    let gateway = Setup::new(std::slice::from_ref(&rule)).spawn().await;
    gateway.complete(&prompt(1, 64)).await;
    gateway.until_blocks("words", 0, 4).await;
    let (clients, held) = (Clients::start(&gateway, 2), gateway.held("words", 0).await);
    let broken = broken_rules(engine);
    assert!(broken.len() >= 50, "{}", broken.len());
    let reads = async || gateway.metrics().await.sum(RELOADS, &[]);
    let mut problems = Vec::new();
    for (text, named) in &broken {
        let before = reads().await;
        gateway.setup.write_text("words", text);
        let problem =
            async || gateway.ready().await["config_problem"].as_str().unwrap_or_default().to_owned();
        // soon after the start the good files may be read once more
        until(text, async || reads().await > before && !problem().await.is_empty()).await;
        let problem = problem().await;
        let line = problem
            .split_once("words.toml:")
            .is_some_and(|(_, at)| at.starts_with(|c: char| c.is_ascii_digit()));
        if !line || !problem.contains(named.as_str()) {
            problems.push(format!("{named} not named, or no line:\n{text}\n{problem}"));
        }
        clients.go_on().await;
    }
    assert!(problems.is_empty(), "{}", problems.join("\n\n"));
    gateway.change(&rule).await;
    clients.stop().await;
    assert_eq!(gateway.metric("kvgate_config_last_reload_successful", &[]).await, 1.0);
    assert!(gateway.held("words", 0).await.iter().filter(|hash| held.contains(hash)).count() == held.len());
}

/// What is wrong with `gateway.toml`, and what no file says: a folder that is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_broken_process_file_or_a_missing_folder_changes_nothing() {
    let engine = &engines(1).await[0];
    let rule = Rule::kv("words").engine(engine);
    let gateway = Setup::new(std::slice::from_ref(&rule)).spawn().await;
    let file = gateway.setup.folder().join("gateway.toml");
    let good = fs::read_to_string(&file).unwrap();
    let clients = Clients::start(&gateway, 2);
    let twice = format!("{good}[[listener]]\nname = \"edge\"\naddress = \"127.0.0.1:1\"\n");
    let same = format!("{good}[[listener]]\nname = \"other\"\naddress = \"{}\"\n", gateway.address);
    let broken = [
        (twice, "listener[1].name"),
        (same, "listener[1].address"),
        (good.replace("grace_period = \"30s\"", "grace_period = \"30\""), "server.grace_period"),
        (good.replace("tokenizers = \"", "tokenizers = \"/nowhere"), "server.tokenizers"),
        (good.replace(&gateway.admin.to_string(), "0.0.0.0:11111"), "admin.address"),
        (good.replace("[server]", "[sever]"), "sever"),
        (good.replace("[server]", "[server"), "gateway.toml:1"),
    ];
    let refused = async || gateway.metric(RELOADS, &["result=\"refused\""]).await;
    for (text, named) in &broken {
        assert_ne!(text, &good);
        let before = refused().await;
        fs::write(&file, text).unwrap();
        until(named, async || refused().await > before).await;
        let problem = gateway.ready().await["config_problem"].as_str().unwrap_or_default().to_owned();
        assert!(problem.contains("gateway.toml:") && problem.contains(named), "{named}: {problem}");
        clients.go_on().await;
    }
    fs::write(&file, &good).unwrap();
    gateway.until_metric("kvgate_config_last_reload_successful", &[], 1.0).await;
    let rules = gateway.setup.folder().join("rules");
    fs::rename(&rules, gateway.setup.folder().join("away")).unwrap();
    gateway.until_metric("kvgate_config_last_reload_successful", &[], 0.0).await;
    clients.go_on().await;
    fs::rename(gateway.setup.folder().join("away"), &rules).unwrap();
    gateway.until_metric("kvgate_config_last_reload_successful", &[], 1.0).await;
    clients.stop().await;
}

/// Endpoints that stay keep everything: what they hold, who is pinned to them, what they are at.
#[tokio::test(flavor = "multi_thread")]
async fn fifty_reloads_leave_what_stays_as_it_was() {
    let stays = engine_with(|c| c.decode_us = 50_000.0).await;
    let address = stays.address().to_string();
    let others = engines(2).await;
    let rule = |other: &Sim| {
        let rule = Rule::new("words", &["session", "kv-exact", "round-robin"]);
        rule.matching(&format!("models = [{MODEL:?}]")).engine(&stays).engine(other)
    };
    let alone = Rule::new("alone", &["round-robin"]).matching("hosts = [\"alone\"]").engine(&stays);
    let gateway = Setup::new(&[alone, rule(&others[0])]).spawn().await;
    // a stream under way, conversations, and blocks that are held
    let mut client = Connection::open(gateway.address).await;
    client.send(&stream(50, 100_000).host("alone")).await;
    assert_eq!(client.head().await.unwrap().status, 200);
    let mut pinned = Vec::new();
    for seed in 0..8 {
        let talk = short(seed).field("x-conversation-id", &format!("talk-{seed}"));
        if gateway.send(&talk).await.endpoint() == address {
            pinned.push(talk);
        }
    }
    assert!(pinned.len() > 1, "some are there");
    gateway.until_metric("kvgate_leases_open", &[], 1.0).await;
    let held = gateway.held("words", 0).await;
    assert!(!held.is_empty());
    let ep = format!("ep=\"{address}\"");
    let counts = async || {
        let metrics = gateway.metrics().await;
        ["kvgate_feed_replays_total", "loxilb_kv_subscriber_reconnect_total"]
            .map(|name| metrics.all(name, &[&ep, "service=\"words\""]))
    };
    let (before, clients) = (counts().await, Clients::start(&gateway, 2));
    for round in 0..50 {
        gateway.change(&rule(&others[(round + 1) % 2])).await;
        let at_it = gateway.metric("kvgate_endpoint_in_flight", &["service=\"alone\""]).await;
        assert!(at_it >= 1.0, "round {round}: the stream is counted");
        let now = gateway.held("words", 0).await;
        assert!(
            held.iter().all(|hash| now.binary_search(hash).is_ok()),
            "round {round}: what was held is held"
        );
        clients.go_on().await;
    }
    clients.stop().await;
    assert_eq!(counts().await, before, "it was followed all the time");
    for talk in &pinned {
        let answer = gateway.send(talk).await;
        assert_eq!((answer.endpoint(), answer.tier()), (address.as_str(), "session"));
    }
    assert_eq!(gateway.metric(RELOADS, &["result=\"refused\""]).await, 0.0);
    // the stream was never cut
    assert!(client.piece().await.is_ok_and(|piece| piece.is_some()));
    drop(client);
    gateway.until_idle().await;
}
