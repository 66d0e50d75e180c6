//! A new process takes over: nobody who connects is refused, and nobody who is served is cut.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Manager, endless_replay, is_ready, is_whole, short, streams};
use crate::support::{
    Connection, Gateway, Process, Request, Rule, Setup, engine_with, engines, fetch, free_port, until,
};

const SOCKET: &str = "upgrade_socket = \"upgrade.sock\"\n";

/// Waits until a process has said this.
async fn says(process: &Process, words: &str) {
    until(words, async || process.log().contains(words)).await;
}

/// Waits for the end of a process that was succeeded.
async fn retires(mut old: Process) {
    until("the old process ends", async || old.ended().is_some()).await;
    assert_eq!(old.ended().unwrap().code(), Some(0), "{}", old.log());
    assert!(!old.log().contains("panicked"), "{}", old.log());
}

/// Asks again and again until it is told to stop: each time on a new connection, or on one until it is told that an
/// answer was the last. Every request must be answered whole.
async fn client(
    address: std::net::SocketAddr,
    keeps: bool,
    seed: u32,
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
) {
    let mut kept: Option<Connection> = None;
    while !stop.load(Ordering::Relaxed) {
        let mut connection = match kept.take() {
            Some(connection) => connection,
            None => Connection::open(address).await,
        };
        connection.send(&short(seed)).await;
        let answer = connection.answer().await;
        assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
        done.fetch_add(1, Ordering::Relaxed);
        kept = (keeps && answer.field("connection") != Some("close")).then_some(connection);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_refused_and_nobody_is_cut() {
    let engines = [engine_with(|c| c.decode_us = 20_000.0).await, engine_with(|_| {}).await];
    let setup = Setup::new(&[Rule::kv("words").engines(&engines)]);
    let mut gateway = setup.server(SOCKET).spawn().await;
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let client = |n| tokio::spawn(client(gateway.address, n % 2 == 0, n, stop.clone(), done.clone()));
    let clients: Vec<_> = (0..4).map(client).collect();
    for round in 0..2 {
        let mut streaming = Vec::new();
        for seed in 0..4 {
            streaming.push(streams(&gateway, 10 + seed, 400).await);
        }
        // whichever comes first
        let old = if round == 0 {
            let old = gateway.succeeded_by(&["--upgrade"]);
            old.signal("QUIT", 1);
            old
        } else {
            gateway.signal("QUIT", 1);
            says(&gateway.process, "listeners are offered").await;
            gateway.succeeded_by(&["--upgrade"])
        };
        says(&old, "another process has taken over").await;
        // it knew from the first what engines hold
        let blocks = async |n| gateway.held("words", n).await.len();
        assert!(blocks(0).await + blocks(1).await > 0, "{}", gateway.log());
        let answered = done.load(Ordering::Relaxed);
        for (mut client, head) in streaming {
            is_whole(&client.rest(head).await, 400);
        }
        retires(old).await;
        until("requests flow", async || done.load(Ordering::Relaxed) > answered + 20).await;
        assert_eq!(gateway.ended(), None);
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    assert!(!gateway.setup.folder().join("upgrade.sock").exists());
    gateway.signal("TERM", 1);
    until("it ends", async || gateway.ended().is_some()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_process_that_dies_leaves_the_old_one_serving() {
    let engines = engines(1).await;
    let (slow, replay) = endless_replay(&engines[0]).await;
    let setup = Setup::new(&[Rule::kv("words").engine(&engines[0])]).server(SOCKET);
    let mut gateway: Gateway = setup.server("warm_up = \"10m\"\n").spawn().await;
    is_ready(&gateway).await;
    // a new process would be long in warming up
    gateway.change(&slow).await;
    let old = gateway.succeeded_by(&["--upgrade"]);
    old.signal("QUIT", 1);
    says(&old, "the new process has the listeners").await;
    // it is still learning, and killed
    let dead = std::mem::replace(&mut gateway.process, old);
    dead.signal("KILL", 1);
    says(&gateway.process, "this process serves on").await;
    assert_eq!(gateway.send(&short(1)).await.status, 200);
    assert_eq!(gateway.ready().await["stage"], "serving");
    // and the next attempt succeeds
    drop(replay);
    let old = gateway.succeeded_by(&["--upgrade"]);
    old.signal("QUIT", 1);
    says(&old, "another process has taken over").await;
    assert_eq!(gateway.send(&short(2)).await.status, 200);
    retires(old).await;
    assert_eq!(gateway.ready().await["stage"], "serving");
}

#[tokio::test(flavor = "multi_thread")]
async fn listeners_that_changed_come_and_go() {
    let engines = engines(1).await;
    let (goes, comes) = (free_port(), free_port());
    let listener = |name: &str, address| format!("[[listener]]\nname = {name:?}\naddress = \"{address}\"\n");
    let setup = Setup::new(&[Rule::kv("words").engines(&engines)]).server(SOCKET);
    let manager = Manager::new();
    // the process that the service manager has started and watches is another one
    let setup = manager.over(setup).environment("WATCHDOG_USEC", "10000000").environment("WATCHDOG_PID", "1");
    let mut gateway = setup.process(&listener("goes", goes)).spawn().await;
    assert_eq!(manager.hears().await, "READY=1");
    assert_eq!(fetch(goes, &short(1)).await.status, 200);
    let file = gateway.setup.folder().join("gateway.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let changed = text.replace(&listener("goes", goes), &listener("comes", comes));
    assert_ne!(text, changed);
    std::fs::write(&file, changed).unwrap();
    let old = gateway.succeeded_by(&["--upgrade"]);
    old.signal("QUIT", 1);
    says(&old, "another process has taken over").await;
    // a service manager goes on with the new one
    let main = format!("MAINPID={}", gateway.process.id());
    // the changed file was read by the old one, too
    while manager.hears().await != main {}
    assert_eq!(manager.hears().await, "READY=1");
    // perhaps after a reload that the changed file asked for
    while manager.next().await != "WATCHDOG=1" {}
    for address in [gateway.address, comes] {
        assert_eq!(fetch(address, &short(2)).await.status, 200);
    }
    until("nobody is left there", async || tokio::net::TcpStream::connect(goes).await.is_err()).await;
    retires(old).await;
}

/// Whatever happens to the configuration while the new process waits is known to it, and SIGHUP does it no harm.
#[tokio::test(flavor = "multi_thread")]
async fn what_changes_while_it_waits_is_not_lost() {
    let engines = engines(1).await;
    let setup = Setup::new(&[Rule::kv("words").engine(&engines[0])]).server(SOCKET);
    let mut gateway = setup.spawn().await;
    let old = gateway.succeeded_by(&["--upgrade"]);
    says(&gateway.process, "listeners are awaited").await;
    gateway
        .setup
        .write(&Rule::new("late", &["round-robin"]).matching("hosts = [\"late\"]").engine(&engines[0]));
    let (file, comes) = (gateway.setup.folder().join("gateway.toml"), free_port());
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("{text}\n[[listener]]\nname = \"comes\"\naddress = \"{comes}\"\n"))
        .unwrap();
    gateway.signal("QUIT", 1);
    old.signal("QUIT", 1);
    gateway.signal("HUP", 200);
    says(&old, "another process has taken over").await;
    let late = async || gateway.metrics().await.all("loxilb_pd_ep_info", &["service=\"late\""]).len();
    until("the new process knows the rule", async || late().await == 1).await;
    assert_eq!(fetch(comes, &short(1)).await.status, 200);
    retires(old).await;
}

/// Whoever stops the old process as well, as a service manager does, cuts nobody.
#[tokio::test(flavor = "multi_thread")]
async fn one_that_was_succeeded_and_is_told_to_stop_serves_on() {
    let engine = engine_with(|c| c.decode_us = 5_000.0).await;
    let setup = Setup::new(&[Rule::kv("words").engine(&engine)]).server(SOCKET).grace("10m");
    let mut gateway = setup.spawn().await;
    let (mut client, head) = streams(&gateway, 1, 400).await;
    let old = gateway.succeeded_by(&["--upgrade"]);
    old.signal("QUIT", 1);
    says(&old, "another process has taken over").await;
    old.signal("TERM", 1);
    says(&old, "it is leaving already").await;
    let answer = client.rest(head).await;
    is_whole(&answer, 400);
    // it was not told that this was the last
    client.send(&short(2)).await;
    let last = client.answer().await;
    assert_eq!((last.status, last.field("connection")), (200, Some("close")));
    retires(old).await;
}

/// A connection of an operator's, or of a probe's, does not stay with a process that says it is leaving.
#[tokio::test(flavor = "multi_thread")]
async fn the_admin_surface_moves_along() {
    let engine = engine_with(|c| c.decode_us = 50_000.0).await;
    let setup = Setup::new(&[Rule::kv("words").engine(&engine)]).server(SOCKET).grace("10m");
    let mut gateway = setup.spawn().await;
    is_ready(&gateway).await;
    // the old process has somebody to serve until the end of the test
    let (_client, _head) = streams(&gateway, 1, 100_000).await;
    let mut probe = Connection::open(gateway.admin).await;
    probe.send(&Request::get("/readyz")).await;
    assert_eq!(probe.answer().await.status, 200);
    let mut old = gateway.succeeded_by(&["--upgrade"]);
    old.signal("QUIT", 1);
    assert!(probe.head().await.is_none(), "it is closed");
    assert_eq!(old.ended(), None);
    is_ready(&gateway).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_place_to_meet_it_serves_on() {
    let engines = engines(1).await;
    let mut gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).spawn().await;
    gateway.signal("QUIT", 1);
    says(&gateway.process, "server.upgrade_socket").await;
    assert_eq!(gateway.send(&short(1)).await.status, 200);
    // a second process that does not ask for the listeners is told how
    let old = gateway.succeeded_by(&[]);
    until("it gives up", async || gateway.ended().is_some()).await;
    let log = gateway.log();
    assert_eq!(gateway.ended().unwrap().code(), Some(1), "{log}");
    for words in ["gateway.toml:", "listener[0].address", "--upgrade", &gateway.address.to_string()] {
        assert!(log.contains(words), "{words}: {log}");
    }
    drop(old);
}
