//! What engines tell of themselves, what comes of it, and what if they do not.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvgate_sim::Sim;
use pingora_core::tls::{
    ServerConfig, TlsAcceptor, install_default_crypto_provider, load_certs_and_key_files,
};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{
    Connection, Gateway, MODEL, Publisher, Request, Rule, Setup, completion, engine_with, host, prompt,
    stored, until,
};

const BLOCKS: &str = "kvgate_engine_kv_blocks";
const FAMILY: &str = "kvgate_telemetry_family";
const FRESH: &str = "kvgate_telemetry_fresh";
const ERRORS: &str = "kvgate_telemetry_errors_total";
const ALARM: &str = "alarm=\"capacity_unknown\"";

/// Asks often.
const OFTEN: &str = "interval = \"50ms\"\nmax_age = \"1m\"";
/// Asks often, waits for little, and takes little.
const STRICT: &str = "interval = \"50ms\"\ntimeout = \"1s\"\nmax_size = \"64KiB\"\nmax_age = \"4s\"";

fn ep(address: impl std::fmt::Display) -> String {
    format!("ep=\"{address}\"")
}

async fn engine_of(blocks: usize) -> Sim {
    engine_with(|c| (c.cache_blocks, c.decode_us) = (blocks, 20_000.0)).await
}

/// Capacity and load as engines tell them, by endpoint, as long as there is one.
#[tokio::test(flavor = "multi_thread")]
async fn capacity_and_load_are_the_engines_own() {
    let (a, b) = (engine_of(3000).await, engine_of(9000).await);
    let rule =
        |engines: &[&Sim]| Rule::kv("words").table("telemetry", OFTEN).engines(engines.iter().copied());
    let plain = |name: &str| Rule::new(name, &["round-robin"]).matching("hosts = [\"plain\"]").engine(&a);
    let gateway = Setup::new(&[rule(&[&a, &b]), plain("plain")]).spawn().await;
    gateway.until_metric(BLOCKS, &[&ep(a.address())], 3000.0).await;
    gateway.until_metric(BLOCKS, &[&ep(b.address())], 9000.0).await;
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.all(FRESH, &[]), [1.0, 1.0], "nobody asks for the rule that does not go by it");
    assert!(metrics.all("kvgate_telemetry_age_seconds", &[]).iter().all(|age| *age < 60.0));
    let errors = metrics.all(ERRORS, &[]);
    assert_eq!((errors.len(), errors.iter().sum::<f64>()), (2 * 6, 0.0), "every series from the start");
    let mut body = completion(MODEL, &prompt(1, 40));
    (body["stream"], body["max_tokens"]) = (true.into(), 2000.into());
    let mut client = Connection::open(gateway.address).await;
    client.send(&Request::json("/v1/completions", &body)).await;
    let head = client.head().await.unwrap();
    let running = ["kvgate_engine_running", "kvgate_engine_waiting"];
    gateway.until_metric(running[0], &[&ep(head.endpoint())], 1.0).await;
    assert_eq!(gateway.metric(running[1], &[&ep(head.endpoint())]).await, 0.0);
    let used = gateway.metric("kvgate_engine_kv_cache_usage_ratio", &[&ep(head.endpoint())]).await;
    assert!(used > 0.0 && used < 0.1, "{used}");
    drop(client);
    gateway.until_metric(running[0], &[&ep(head.endpoint())], 0.0).await;
    gateway.until_metric("kvgate_engine_kv_cache_usage_ratio", &[&ep(head.endpoint())], 0.0).await;
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.get("kvgate_engine_prompt_tokens_total", &[&ep(head.endpoint())]), 40.0);
    assert!(metrics.get("kvgate_engine_generation_tokens_total", &[&ep(head.endpoint())]) >= 1.0);
    assert_eq!(metrics.get("kvgate_engine_ttft_seconds_count", &[&ep(head.endpoint())]), 1.0);
    assert_eq!(metrics.get("kvgate_engine_ttft_seconds_bucket", &[&ep(head.endpoint()), "le=\"+Inf\""]), 1.0);
    assert_eq!(metrics.sum("kvgate_engine_ttft_seconds_count", &[]), 1.0);
    assert_eq!(metrics.all(FAMILY, &["state=\"known\""]), [1.0; 2 * 7]);
    assert_eq!(metrics.all(FAMILY, &[]).len(), 2 * 7);
    let told = &gateway.ready().await["telemetry"];
    assert_eq!((&told[1]["blocks"], &told[1]["problem"]), (&Value::from(9000), &Value::Null), "{told}");
    gateway.setup.write(&rule(&[&b]));
    until("a is gone", async || gateway.metrics().await.all(BLOCKS, &[]) == [9000.0]).await;
    for series in [FRESH, FAMILY, ERRORS, running[0], "kvgate_telemetry_age_seconds"] {
        assert!(gateway.metrics().await.all(series, &[&ep(a.address())]).is_empty(), "{series}");
    }
    gateway.setup.write(&Rule::kv("words").table("telemetry", "interval = \"0s\"").engines([&b]));
    until("nobody is asked", async || gateway.metrics().await.all(FRESH, &[]).is_empty()).await;
    assert_eq!(gateway.complete(&prompt(1, 40)).await.status, 200);
}

/// Of two engines that hold a prompt, one has nine times the room of the other: it carries nine times the load as long as
/// that is known, and half of it while it is not.
#[tokio::test(flavor = "multi_thread")]
async fn who_can_hold_more_carries_more() {
    let mut engines = Vec::new();
    for blocks in [1000, 9000] {
        let silent = engine_with(|c| (c.cache_blocks, c.decode_us, c.events) = (blocks, 20_000.0, false));
        engines.push((silent.await, Publisher::bind().await));
    }
    for (interval, most) in [("50ms", 5), ("0s", 10)] {
        let rule = Rule::kv("words")
            .table("tier.kv-exact.law", "mode = \"hard\"")
            .table("telemetry", &format!("interval = {interval:?}\nmax_age = \"1m\""));
        let rule = engines.iter().fold(rule, |rule, (engine, p)| rule.followed(engine, &p.endpoint()));
        let gateway = Setup::new(&[rule]).start().await;
        for (at, (_, publisher)) in engines.iter_mut().enumerate() {
            publisher.subscribed().await;
            publisher.publish(0, &[stored(&[1, 2], None, &prompt(1, 32))]).await;
            gateway.until_held("words", at, &[1, 2]).await;
        }
        if interval != "0s" {
            until("both tell", async || gateway.metrics().await.all(FRESH, &[]) == [1.0, 1.0]).await;
        }
        let mut body = completion(MODEL, &prompt(1, 40));
        (body["stream"], body["max_tokens"]) = (true.into(), 2000.into());
        let mut clients = Vec::new();
        for _ in 0..20 {
            let mut client = Connection::open(gateway.address).await;
            client.send(&Request::json("/v1/completions", &body)).await;
            assert_eq!(client.head().await.unwrap().tier(), "kv-exact");
            clients.push(client);
        }
        let load = gateway.metrics().await.all("kvgate_endpoint_in_flight", &[]);
        assert_eq!(load.iter().sum::<f64>(), 20.0);
        assert!(load[0] <= f64::from(most) && (most < 10 || load[0] == 10.0), "{load:?}");
        drop(clients);
        gateway.until_idle().await;
    }
}

/// A page of an engine of so many blocks.
fn page(blocks: usize) -> String {
    let page = format!(
        "vllm:num_requests_running{{engine=\"0\"}} 0.0\nvllm:num_requests_waiting{{engine=\"0\"}} 7.0\n\
         vllm:cache_config_info{{engine=\"0\",num_gpu_blocks=\"{blocks}\"}} 1.0\n"
    );
    ok(&page)
}

fn ok(page: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{page}", page.len())
}

/// An engine of which only the metrics page is real. Every generation is `{}`.
struct Pages {
    address: SocketAddr,
    /// What it answers; nothing, ever, while this is empty.
    answer: Arc<Mutex<Vec<u8>>>,
    asked: Arc<AtomicUsize>,
}

impl Pages {
    async fn start(answer: String) -> Self {
        let listener = TcpListener::bind((host(), 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let pages = Self { address, answer: Arc::default(), asked: Arc::default() };
        pages.answer(answer);
        let (answer, asked) = (pages.answer.clone(), pages.asked.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                asked.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(serve(stream, answer.lock().unwrap().clone()));
            }
        });
        pages
    }

    fn answer(&self, answer: impl Into<Vec<u8>>) {
        *self.answer.lock().unwrap() = answer.into();
    }
}

async fn serve(mut stream: TcpStream, answer: Vec<u8>) {
    let mut head = Vec::new();
    let whole =
        |head: &[u8]| head.ends_with(if head.starts_with(b"POST ") { &b"}"[..] } else { b"\r\n\r\n" });
    while !whole(&head) {
        if stream.read_buf(&mut head).await.unwrap_or(0) == 0 {
            return;
        }
    }
    if head.starts_with(b"POST ") {
        let _ = stream.write_all(ok("{}").as_bytes()).await;
        return;
    }
    assert!(head.starts_with(b"GET /metrics HTTP/1.1\r\n"), "{}", String::from_utf8_lossy(&head));
    let _ = stream.write_all(&answer).await;
    if answer.is_empty() {
        tokio::time::sleep(Duration::from_secs(600)).await;
    }
}

async fn errors(gateway: &Gateway, reason: &str) -> f64 {
    gateway.metric(ERRORS, &[&format!("reason={reason:?}")]).await
}

/// Lines of the log of this level about the alarm.
fn lines(gateway: &Gateway, level: &str) -> usize {
    gateway.log().lines().filter(|line| line.contains(level) && line.contains("capacity_unknown")).count()
}

/// Whatever its page does, an engine is asked again, in bounded time and memory; one warning until it tells again.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_does_not_tell_is_warned_of_once() {
    let (pages, mut publisher) = (Pages::start(page(5000)).await, Publisher::bind().await);
    let keys = format!("kv_events = {:?}", publisher.endpoint());
    let rule = Rule::kv("words")
        .table("events", "replay_port_offset = 0")
        .table("telemetry", STRICT)
        .endpoint(pages.address, &keys);
    let gateway = Setup::new(&[rule]).spawn().await;
    publisher.subscribed().await;
    let raised = async || gateway.metric("kvgate_alarm", &[ALARM]).await == 1.0;
    gateway.until_metric(BLOCKS, &[], 5000.0).await;
    assert_eq!((gateway.metric("kvgate_engine_waiting", &[]).await, raised().await), (7.0, false));
    let endless =
        format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n40000\r\n{}", "x".repeat(1 << 18));
    for (answer, reason) in [
        (String::new(), "timeout"),
        (endless, "size"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello".into(), "garbage"),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 31\r\n\r\nvllm:num_requests_running{a=\"\n\n\n".into(),
            "garbage",
        ),
        ("HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n".into(), "status"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf".into(), "broken"),
    ] {
        let before = errors(&gateway, reason).await;
        pages.answer(answer);
        until(reason, async || errors(&gateway, reason).await >= before + 2.0).await;
    }
    until("the alarm says so", async || {
        let alarms = gateway.ready().await["alarms"].clone();
        let detail = alarms[0]["detail"].as_str().unwrap_or_default();
        detail.contains(&format!("{} breaks off", pages.address))
    })
    .await;
    let metrics = gateway.metrics().await;
    assert_eq!((metrics.get(FRESH, &[]), metrics.all(BLOCKS, &[])), (0.0, vec![]));
    let told = gateway.ready().await["telemetry"].clone();
    assert!(told[0]["problem"].as_str().is_some_and(|p| p.contains("breaks off")), "{told}");
    assert_eq!((lines(&gateway, "WARN"), lines(&gateway, "INFO")), (1, 0), "{}", gateway.log());
    pages.answer(page(6000));
    gateway.until_metric(BLOCKS, &[], 6000.0).await;
    until("the alarm is off, and that is said", async || {
        !raised().await && (lines(&gateway, "WARN"), lines(&gateway, "INFO")) == (1, 1)
    })
    .await;
    // a page that does not say how many blocks there are is known to be one at once
    pages.answer("HTTP/1.1 200 OK\r\ncontent-length: 28\r\n\r\nvllm:num_requests_running 3\n");
    until("the alarm is on again", raised).await;
    let metrics = gateway.metrics().await;
    assert_eq!((metrics.get(FRESH, &[]), metrics.all(BLOCKS, &[])), (1.0, vec![]));
}

/// A rule of one engine of which only the page is real.
async fn told_by(pages: &Pages) -> Gateway {
    let rule = Rule::new("words", &["gpu-aware"])
        .table("telemetry", "interval = \"50ms\"\nmax_age = \"1m\"")
        .endpoint(pages.address, "");
    Setup::new(&[rule]).spawn().await
}

/// Waits until this is how it stands with a family.
async fn until_family(gateway: &Gateway, family: &str, state: &str) {
    until(&format!("{family} is {state}"), async || {
        let all = gateway.metrics().await;
        let states = all.all(FAMILY, &[&format!("family={family:?}")]);
        states.len() == 1
            && all.all(FAMILY, &[&format!("family={family:?}"), &format!("state={state:?}")]) == [1.0]
    })
    .await;
}

/// A family that a page lacks is cold before the engine's first request, missed after it, and cold again when a new
/// engine has taken its place; what is not told has no series. A fixture's pages, and parts of them.
#[tokio::test(flavor = "multi_thread")]
async fn families_are_cold_before_the_first_request_and_missed_after_it() {
    let fixture =
        |name: &str| String::from_utf8(kvgate_tests::fixture(&format!("vllm/http/{name}.txt"))).unwrap();
    let without = |page: &str, families: &[&str]| -> String {
        let lacks = |line: &&str| !families.iter().any(|family| line.starts_with(&format!("vllm:{family}")));
        page.lines().filter(lacks).map(|line| format!("{line}\n")).collect()
    };
    let (cold, warm) = (fixture("metrics_vllm_cold"), fixture("metrics_vllm"));
    let lazy = [
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds",
        "cache_config_info",
    ];
    let pages = Pages::start(ok(&without(&cold, &lazy))).await;
    let gateway = told_by(&pages).await;
    let said = |level: &str| {
        let log = gateway.log();
        log.lines().filter(|line| line.contains(level) && line.contains("metrics page")).count()
    };
    let told = async || gateway.ready().await["telemetry"][0].clone();
    let late = ["kv_blocks", "prompt_tokens", "generation_tokens", "ttft"];
    for family in late {
        until_family(&gateway, family, "cold").await;
    }
    until_family(&gateway, "kv_cache_usage", "known").await;
    assert_eq!(told().await["cold"], serde_json::json!(late));
    let again = async |what: &str| {
        let asked = pages.asked.load(Ordering::Relaxed);
        until(what, async || pages.asked.load(Ordering::Relaxed) > asked + 3).await;
    };
    again("it is still cold").await;
    let metrics = gateway.metrics().await;
    assert_eq!((metrics.get("kvgate_alarm", &[ALARM]), said("WARN")), (0.0, 0), "{}", gateway.log());
    for series in ["kvgate_engine_prompt_tokens_total", "kvgate_engine_ttft_seconds_count", BLOCKS] {
        assert_eq!(metrics.all(series, &[]), Vec::<f64>::new(), "{series}");
    }
    for turn in 1..=2 {
        pages.answer(ok(&without(&warm, &["time_to_first_token_seconds", "cache_config_info"])));
        until_family(&gateway, "ttft", "missing").await;
        until_family(&gateway, "kv_blocks", "missing").await;
        gateway.until_metric("kvgate_alarm", &[ALARM], 1.0).await;
        assert_eq!(told().await["missing"], serde_json::json!(["kv_blocks", "ttft"]));
        let metrics = gateway.metrics().await;
        assert_eq!(metrics.get("kvgate_engine_prompt_tokens_total", &[]), 13_262.0);
        assert_eq!(metrics.all("kvgate_engine_ttft_seconds_count", &[]), Vec::<f64>::new());
        again("it is still missing").await;
        assert_eq!((said("WARN"), said("INFO")), (2 * turn, 2 * (turn - 1)), "{}", gateway.log());
        pages.answer(ok(&warm));
        until_family(&gateway, "ttft", "known").await;
        gateway.until_metric(BLOCKS, &[], 262_144.0).await;
        gateway.until_metric("kvgate_alarm", &[ALARM], 0.0).await;
        again("it is still known").await;
        assert_eq!(said("INFO"), 2 * turn, "{}", gateway.log());
    }
    let metrics = gateway.metrics().await;
    assert_eq!(metrics.get("kvgate_engine_ttft_seconds_bucket", &["le=\"0.02\""]), 37.0);
    assert_eq!(metrics.get("kvgate_engine_ttft_seconds_count", &[]), 70.0);
    assert!(gateway.log().contains("vllm:time_to_first_token_seconds"), "{}", gateway.log());
    pages.answer(ok(&without(&cold, &lazy)));
    until_family(&gateway, "ttft", "cold").await;
    again("it is still cold").await;
    assert_eq!((told().await["missing"].clone(), said("WARN")), (serde_json::json!([]), 4));
}

/// An engine whose page shows no work at all has had a request nevertheless if it answered one of ours.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_engine_answers_makes_it_warm() {
    let pages = Pages::start(ok("vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")).await;
    let gateway = told_by(&pages).await;
    until_family(&gateway, "ttft", "cold").await;
    assert_eq!(gateway.complete(&prompt(1, 4)).await.status, 200);
    until_family(&gateway, "ttft", "missing").await;
    until_family(&gateway, "running", "known").await;
}

/// A cache that outgrows twice what its engine has has lost removals.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_engine_has_bounds_what_is_mirrored_of_it() {
    let (pages, mut publisher) = (Pages::start(page(2)).await, Publisher::bind().await);
    let keys = format!("kv_events = {:?}", publisher.endpoint());
    let rule = |often: &str| {
        Rule::kv("words")
            .table("events", "replay_port_offset = 0")
            .table("telemetry", often)
            .endpoint(pages.address, &keys)
    };
    // a second rule on the engine: it is asked once for both
    let second = rule("interval = \"1h\"\nmax_age = \"2h\"").toml().replace("\"words\"", "\"second\"");
    let setup = Setup::new(&[rule("interval = \"1h\"\nmax_age = \"2h\"")]);
    setup.write_text("second", &second.replace("[match]\n", "[match]\nhosts = [\"second\"]\n"));
    let gateway = setup.start().await;
    publisher.subscribed().await;
    let evictions = async || gateway.metric("loxilb_kv_inv_cap_evictions_total", &[]).await;
    until("both know it", async || gateway.metrics().await.all(BLOCKS, &[]) == [2.0, 2.0]).await;
    assert_eq!(pages.asked.load(Ordering::Relaxed), 1);
    publisher.publish(0, &[stored(&[1, 2, 3, 4], None, &prompt(1, 64))]).await;
    gateway.until_held("words", 0, &[1, 2, 3, 4]).await;
    assert_eq!(evictions().await, 0.0);
    publisher.publish(1, &[stored(&[5], Some(4), &prompt(2, 16))]).await;
    until("the cache is cleared", async || evictions().await == 1.0).await;
}

/// Engines behind TLS are asked by TLS.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_behind_tls_tells_too() {
    const CERT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/relay/tls/cert.pem");
    const KEY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/relay/tls/key.pem");
    let engine = engine_of(700).await;
    install_default_crypto_provider();
    let (certs, key) = load_certs_and_key_files(CERT, KEY).unwrap().unwrap();
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(certs, key).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let (front, behind) = (listener.local_addr().unwrap(), engine.address());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut tls) = acceptor.accept(stream).await else { return };
                let mut plain = TcpStream::connect(behind).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut tls, &mut plain).await;
            });
        }
    });
    let events = format!("kv_events = {:?}\n", engine.events_endpoint().unwrap());
    let rule = |name: &str, tls: &str, keys: &str| {
        Rule::new(name, &["kv-exact"])
            .matching(&format!("hosts = [{name:?}]"))
            .table("telemetry", OFTEN)
            .table("events", "port = 0\nreplay_port_offset = 0")
            .endpoint(front, &format!("tls = {tls:?}\n{keys}"))
    };
    let rules = [rule("good", "engine.test", &events), rule("other", "other.test", &events)];
    let setup = Setup::new(&rules).environment("SSL_CERT_FILE", CERT);
    let gateway = setup.spawn().await;
    gateway.until_metric(BLOCKS, &["service=\"good\""], 700.0).await;
    until("the other name is refused", async || {
        gateway.metric(ERRORS, &["service=\"other\"", "reason=\"connect\""]).await >= 1.0
    })
    .await;
    assert!(gateway.metrics().await.all(BLOCKS, &["service=\"other\""]).is_empty());
}

/// What hashes are made of is logged when that is asked for, and never else.
#[tokio::test(flavor = "multi_thread")]
async fn block_hashes_are_logged_on_request_only() {
    let engine = engine_with(|c| c.none_hash_seed = Some("17".into())).await;
    let contract = "mode = \"strict\"\nalgorithm = \"sha256_cbor\"\nblock_size = 16";
    let rules = [
        Rule::kv("strict").table("tier.kv-exact.contract", contract).engine(&engine),
        Rule::new("auto", &["kv-exact"]).matching("hosts = [\"auto\"]").engine(&engine),
    ];
    let ask = Request::json("/v1/completions", &completion(MODEL, &prompt(1, 40)));
    for debug in ["1", "0"] {
        let setup = Setup::new(&rules).environment("LLB_KV_HASH_DEBUG", debug);
        let gateway = setup.environment("LLB_KV_NONE_HASH_SEED", "17").spawn().await;
        gateway.send(&ask).await;
        gateway.until_blocks("strict", 0, 2).await;
        assert_eq!(gateway.send(&ask).await.tier(), "kv-exact", "the seed is the environment's");
        assert_eq!(gateway.send(&ask.clone().host("auto")).await.tier(), "kv-exact");
        // the log is written behind the answers, in their order
        let last = || gateway.log().lines().filter(|line| line.contains(" own=")).count();
        until("all is logged", async || debug == "0" || last() == 2).await;
        let log = gateway.log();
        let logged: Vec<_> = log.lines().filter(|line| line.contains("block hash")).collect();
        if debug == "0" {
            assert_eq!(logged, Vec::<&str>::new());
            continue;
        }
        let strict: Vec<_> = logged.iter().filter(|line| line.contains(" cbor=")).collect();
        assert_eq!(strict.len(), 2 * 2, "two blocks, twice: {log}");
        for hash in gateway.held("strict", 0).await {
            let lines = strict.iter().filter(|line| line.contains(&format!(" hash={hash} ")));
            assert_eq!(lines.count(), 2, "{hash} in {log}");
        }
        // an array of three: the parent's 32 bytes, 16 ids, no extra keys
        assert!(strict.iter().all(|line| line.contains(" cbor=835820") && line.ends_with("f6")), "{log}");
        assert_eq!(logged.iter().filter(|line| line.contains(" own=")).count(), 2, "{log}");
    }
}
