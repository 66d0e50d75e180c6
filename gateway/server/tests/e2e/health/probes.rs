use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{asked, request, send, shown};
use crate::support::{Connection, Gateway, Request, Rule, Setup, engine, engines, free_port, host, until};

const HEALTHY: &str = "kvgate_endpoint_healthy";
const PROBES: &str = "kvgate_probes_total";
const OFTEN: &str = "[probe]\ninterval = \"100ms\"\nunhealthy_after = 2\n[breaker]\nfailures = 0\n";
/// A status that is never sent: nothing is.
const SILENT: u16 = 0;

/// A server that answers questions about its health as it is told, and everything else with success.
struct Moody {
    address: SocketAddr,
    status: Arc<AtomicU16>,
    /// Questions about its health.
    probed: Arc<AtomicUsize>,
    /// Everything else.
    served: Arc<AtomicUsize>,
}

impl Moody {
    async fn start(status: u16) -> Self {
        let listener = TcpListener::bind((host(), 0)).await.unwrap();
        let moody = Self {
            address: listener.local_addr().unwrap(),
            status: Arc::new(status.into()),
            probed: Arc::default(),
            served: Arc::default(),
        };
        let (status, probed, served) = (moody.status.clone(), moody.probed.clone(), moody.served.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, status.clone(), probed.clone(), served.clone()));
            }
        });
        moody
    }

    fn is(&self, status: u16) {
        self.status.store(status, Ordering::Relaxed);
    }

    fn probed(&self) -> usize {
        self.probed.load(Ordering::Relaxed)
    }

    fn served(&self) -> usize {
        self.served.load(Ordering::Relaxed)
    }
}

async fn answer(
    mut stream: TcpStream,
    status: Arc<AtomicU16>,
    probed: Arc<AtomicUsize>,
    served: Arc<AtomicUsize>,
) {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if !stream.read_buf(&mut head).await.is_ok_and(|n| n > 0) {
            return;
        }
    }
    let asks = head.starts_with(b"GET /health ");
    let status = if asks { status.load(Ordering::Relaxed) } else { 200 };
    (if asks { probed } else { served }).fetch_add(1, Ordering::Relaxed);
    if status == SILENT {
        let _ = stream.read_buf(&mut head).await;
        return;
    }
    let text = format!("HTTP/1.1 {status} x\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}");
    let _ = stream.write_all(text.as_bytes()).await;
}

async fn healthy(gateway: &Gateway, endpoint: usize, healthy: f64) {
    gateway.until_metric(HEALTHY, &[&format!("ep_idx=\"{endpoint}\"")], healthy).await;
}

/// The rest of scoreboard row 10: no request has to find out, either way.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_not_well_gets_nothing_until_it_is() {
    let (moody, engine) = (Moody::start(503).await, engine().await);
    let rule = Rule::new("words", &["round-robin"]).endpoint(moody.address, "").engine(&engine);
    let gateway = Setup::new(&[rule]).health(OFTEN).start().await;
    healthy(&gateway, 0, 0.0).await;
    let engines = gateway.ask("/engines").await.json();
    let shown = &engines.as_array().unwrap()[0];
    assert_eq!((&shown["available"], &shown["healthy"]), (&"down".into(), &false.into()));
    assert_eq!(shown["problem"], "answers with status 503");
    assert!(gateway.metric("kvgate_probe_failures_total", &["ep_idx=\"0\""]).await >= 2.0);
    for _ in 0..10 {
        assert_eq!(send(&gateway).await.status, 200);
    }
    assert_eq!((moody.served(), engine.log().len()), (0, 10));
    moody.is(200);
    healthy(&gateway, 0, 1.0).await;
    for _ in 0..10 {
        assert_eq!(send(&gateway).await.status, 200);
    }
    assert_eq!((moody.served(), engine.log().len()), (5, 15));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_such_a_page_is_well_unless_codes_say_otherwise() {
    let (lax, strict) = (Moody::start(404).await, Moody::start(404).await);
    let rules = [
        Rule::new("lax", &["round-robin"]).matching("hosts = [\"lax\"]").endpoint(lax.address, ""),
        Rule::new("strict", &["round-robin"])
            .table("probe", "codes = [200, 204]")
            .endpoint(strict.address, ""),
    ];
    let gateway = Setup::new(&rules).health(OFTEN).start().await;
    gateway.until_metric(HEALTHY, &["service=\"strict\""], 0.0).await;
    until("it was asked often enough", async || lax.probed() > 4).await;
    assert_eq!(gateway.metric(HEALTHY, &["service=\"lax\""]).await, 1.0);
    strict.is(204);
    gateway.until_metric(HEALTHY, &["service=\"strict\""], 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_taken_is_enough_where_that_is_asked() {
    let mut engines = engines(2).await;
    let rule = Rule::new("words", &["round-robin"]).engines(&engines).table("probe", "mode = \"tcp\"");
    let gateway = Setup::new(&[rule]).health(OFTEN).start().await;
    engines[0].refuse(true).await.unwrap();
    healthy(&gateway, 0, 0.0).await;
    assert!(shown(&gateway, &engines[0]).await["problem"].as_str().unwrap().contains("takes no connection"));
    for _ in 0..4 {
        assert_eq!(send(&gateway).await.status, 200);
    }
    assert_eq!(asked(&engines), [0, 4]);
    engines[0].refuse(false).await.unwrap();
    healthy(&gateway, 0, 1.0).await;
}

/// An engine that computes has other things to do than to say that it is well.
#[tokio::test(flavor = "multi_thread")]
async fn who_answers_requests_is_not_down_for_being_slow_to_say_so() {
    let moody = Moody::start(SILENT).await;
    let rule = Rule::new("words", &["round-robin"]).endpoint(moody.address, "");
    let probe = "[probe]\ninterval = \"200ms\"\ntimeout = \"200ms\"\nunhealthy_after = 4\n";
    let gateway = Setup::new(&[rule]).health(probe).start().await;
    until("it was asked often enough", async || {
        assert_eq!(send(&gateway).await.status, 200);
        gateway.metric(PROBES, &[]).await >= 8.0
    })
    .await;
    assert_eq!(gateway.metric(HEALTHY, &[]).await, 1.0);
    healthy(&gateway, 0, 0.0).await;
    let answer = send(&gateway).await;
    assert_eq!((answer.status, &*answer.code()), (503, "no_healthy_backend"));
}

/// However many hang, the others are asked as often as is said.
#[tokio::test(flavor = "multi_thread")]
async fn engines_that_hang_keep_no_other_from_being_asked() {
    let well = Moody::start(200).await;
    let mut hung = Vec::new();
    for _ in 0..80 {
        hung.push(Moody::start(SILENT).await);
    }
    let rack = Rule::new("rack", &["round-robin"]).matching("hosts = [\"rack\"]");
    let rack = rack.table("probe", "timeout = \"1m\"");
    let rack = hung.iter().fold(rack, |rule, moody| rule.endpoint(moody.address, ""));
    let rule = Rule::new("words", &["round-robin"]).endpoint(well.address, "");
    let gateway = Setup::new(&[rack, rule]).health(OFTEN).start().await;
    until("all that hang are asked", async || hung.iter().all(|moody| moody.probed() == 1)).await;
    let before = well.probed();
    until("the other is asked on", async || well.probed() > before + 5).await;
    well.is(503);
    gateway.until_metric(HEALTHY, &["service=\"words\""], 0.0).await;
    assert!(hung.iter().all(|moody| moody.probed() == 1), "one at a time");
}

/// F35: what a reload takes away is not asked any more, has no series, and one engine of two rules is asked by one.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_asked_who_is_gone_and_nobody_twice() {
    let (stays, goes) = (Moody::start(200).await, Moody::start(200).await);
    let both = Rule::new("words", &["round-robin"]).endpoint(stays.address, "").endpoint(goes.address, "");
    let other =
        Rule::new("other", &["round-robin"]).matching("hosts = [\"other\"]").endpoint(stays.address, "");
    let gateway = Setup::new(&[both, other]).health(OFTEN).spawn().await;
    let labels = [format!("ep=\"{}\"", stays.address), format!("ep=\"{}\"", goes.address)];
    let [stay, go] = labels.each_ref().map(String::as_str);
    assert_eq!(gateway.metrics().await.all(HEALTHY, &[stay]), [1.0, 1.0], "there from the start");
    until("both are asked", async || stays.probed() > 2 && goes.probed() > 2).await;
    let page = gateway.metrics().await;
    let counts = page.all(PROBES, &[stay]);
    assert_eq!(counts[0], counts[1], "one task");
    assert!(counts[0] <= stays.probed() as f64, "{counts:?}");
    gateway.change(&Rule::new("words", &["round-robin"]).endpoint(stays.address, "")).await;
    assert_eq!(gateway.metrics().await.all(HEALTHY, &[go]), Vec::<f64>::new());
    let (before, asked) = (stays.probed(), goes.probed());
    until("the other was asked on", async || stays.probed() > before + 5).await;
    assert_eq!(goes.probed(), asked);
}

/// As the check says: of two that ask as often the first by its name, however specific it is.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_rules_the_one_that_is_said_to_asks() {
    let moody = Moody::start(200).await;
    let rule = |name: &str, path: &str| {
        let rule = Rule::new(name, &["round-robin"]).matching(&format!("path_prefix = \"/{name}\""));
        rule.table("probe", &format!("path = {path:?}")).endpoint(moody.address, "")
    };
    let rules = [rule("v1", "/health"), rule("w-is-more-specific", "/other")];
    let gateway = Setup::new(&rules).health(OFTEN).start().await;
    until("it is asked", async || moody.probed() > 2).await;
    assert_eq!((moody.served(), gateway.metrics().await.all(HEALTHY, &[])), (0, vec![1.0, 1.0]));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_asked_no_more_counts_as_well() {
    let moody = Moody::start(503).await;
    let rule = |mode: &str| {
        let rule = Rule::new("words", &["round-robin"]).endpoint(moody.address, "");
        rule.table("probe", &format!("mode = {mode:?}"))
    };
    let gateway = Setup::new(&[rule("http")]).health(OFTEN).spawn().await;
    healthy(&gateway, 0, 0.0).await;
    gateway.change(&rule("off")).await;
    assert_eq!(gateway.metric(HEALTHY, &[]).await, 1.0);
    assert_eq!(gateway.metrics().await.all(PROBES, &[]), Vec::<f64>::new());
    assert_eq!(send(&gateway).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_an_engine_that_goes_down_is_told() {
    let moody = Moody::start(200).await;
    let rule = Rule::new("words", &["admission", "round-robin"])
        .table("tier.admission", "max_in_flight = 1\nqueue_depth = 4\nqueue_wait = \"10m\"")
        .endpoint(moody.address, "");
    let gateway = Setup::new(&[rule]).health(OFTEN).start().await;
    // one is served and never done, the other waits
    let mut first = Connection::open(gateway.address).await;
    moody.is(SILENT);
    first.send(&Request::get("/health")).await;
    gateway.until_metric("kvgate_endpoint_in_flight", &[], 1.0).await;
    let mut second = Connection::open(gateway.address).await;
    second.send(&request()).await;
    let answer = second.answer().await;
    assert_eq!((answer.status, &*answer.code()), (503, "no_healthy_backend"), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_endpoint_has_its_series_and_its_line_in_the_log() {
    let moody = Moody::start(200).await;
    let rule = Rule::new("words", &["round-robin"]).endpoint(free_port(), "").endpoint(moody.address, "");
    let gateway = Setup::new(&[rule]).health(OFTEN).spawn().await;
    for name in [HEALTHY, PROBES, "kvgate_endpoint_breaker", "kvgate_endpoint_cooling_seconds"] {
        assert_eq!(gateway.metrics().await.all(name, &["service=\"words\""]).len(), 2, "{name}");
    }
    moody.is(500);
    healthy(&gateway, 1, 0.0).await;
    moody.is(200);
    healthy(&gateway, 1, 1.0).await;
    let cause = "cause=\"takes no connection: connection refused\"";
    until("the other is told with its cause alone", async || gateway.log().contains(cause)).await;
    let log = gateway.log();
    for what in ["engine down: ", "engine up: "] {
        let address = moody.address.to_string();
        let mut lines = log.lines().filter(|line| line.contains(what) && line.contains(&address));
        let line = lines.next().unwrap_or_else(|| panic!("{what}: {log}"));
        assert!(lines.next().is_none(), "{log}");
        assert!(line.contains("WARN") && line.contains("words") && line.contains("ep_idx=1"), "{line}");
    }
}
