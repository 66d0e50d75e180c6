//! TLS and HTTP/2 to engines.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use pingora_core::tls::TlsAcceptor;
use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use tokio::net::TcpListener;

use super::authority::{Authority, Pem};
use crate::support::{Request, Rule, Setup, host, until};

/// What an engine saw of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    http2: bool,
    /// What the gateway showed.
    certificate: Option<Vec<u8>>,
}

/// An engine behind TLS that answers everything with 200.
struct Engine {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Engine {
    /// With this certificate; clients must show one of `clients`, if that is given.
    async fn start(pem: &Pem, clients: Option<&Authority>, http2: bool) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder =
            ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
        let builder = match clients {
            Some(clients) => {
                let mut roots = rustls::RootCertStore::empty();
                roots.add(clients.der()).unwrap();
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                builder.unwrap().with_client_cert_verifier(verifier.build().unwrap())
            }
            None => builder.unwrap().with_no_client_auth(),
        };
        let mut config = builder.with_single_cert(pem.chain(), pem.key()).unwrap();
        let protocols: &[&[u8]] = if http2 { &[b"h2", b"http/1.1"] } else { &[b"http/1.1"] };
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind((host(), 0)).await.unwrap();
        let engine = Self { address: listener.local_addr().unwrap(), seen: Arc::default() };
        let seen = engine.seen.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Ok(tls) = acceptor.accept(stream).await else { continue };
                let state = tls.get_ref().1;
                let http2 = state.alpn_protocol() == Some(b"h2");
                let certificate = state.peer_certificates().map(|chain| chain[0].to_vec());
                let one = Seen { http2, certificate };
                let seen = seen.clone();
                tokio::spawn(async move {
                    if http2 { serve_h2(tls, one, seen).await } else { serve_h1(tls, one, seen).await }
                });
            }
        });
        engine
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

type Tls = pingora_core::tls::ServerTlsStream<tokio::net::TcpStream>;

async fn serve_h1(mut stream: Tls, one: Seen, seen: Arc<Mutex<Vec<Seen>>>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut bytes = Vec::new();
    while stream.read_buf(&mut bytes).await.is_ok_and(|n| n > 0) {
        if bytes.ends_with(b"\r\n\r\n") {
            bytes.clear();
            seen.lock().unwrap().push(one.clone());
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            let _ = stream.flush().await;
        }
    }
}

async fn serve_h2(stream: Tls, one: Seen, seen: Arc<Mutex<Vec<Seen>>>) {
    let mut connection = h2::server::handshake(stream).await.unwrap();
    while let Some(Ok((_, mut respond))) = connection.accept().await {
        seen.lock().unwrap().push(one.clone());
        let head = http::Response::builder().status(200).body(()).unwrap();
        respond.send_response(head, false).unwrap().send_data(Bytes::from_static(b"ok"), true).unwrap();
    }
}

fn rule(engines: &[(&Engine, &str)], tls: &str) -> Rule {
    let rule = Rule::new("all", &["round-robin"]).table("tls", tls);
    engines
        .iter()
        .fold(rule, |rule, (engine, name)| rule.endpoint(engine.address, &format!("tls = {name:?}")))
}

/// What shows our engines: who vouches for them and what we show them.
fn write(setup: &Setup, authority: &Authority, shows: &Pem) {
    authority.write(&setup.folder().join("ca.pem"));
    shows.write(&setup.folder().join("client.pem"));
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_are_verified_by_their_authority_and_shown_a_certificate() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let shows = ours.issue(&["gateway"]);
    for http2 in [false, true] {
        let engine = Engine::start(&theirs.issue(&["engine.test"]), Some(&ours), http2).await;
        let setup = Setup::new(&[]);
        write(&setup, &theirs, &shows);
        let tls = format!("ca = \"../ca.pem\"\nclient_certificate = \"../client.pem\"\nhttp2 = {http2}");
        setup.write(&rule(&[(&engine, "engine.test")], &tls));
        let gateway = setup.start().await;
        for _ in 0..5 {
            let answer = gateway.send(&Request::get("/v1/any")).await;
            assert_eq!((answer.status, &answer.body[..]), (200, &b"ok"[..]), "{answer:?}");
        }
        let one = Seen { http2, certificate: Some(shows.chain()[0].to_vec()) };
        assert_eq!(engine.seen(), vec![one; 5]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_share_a_connection_of_http_2() {
    let ours = Authority::new("ours");
    let engine = Engine::start(&ours.issue(&["engine.test"]), None, true).await;
    let setup = Setup::new(&[]);
    ours.write(&setup.folder().join("ca.pem"));
    setup.write(&rule(&[(&engine, "engine.test")], "ca = \"../ca.pem\"\nhttp2 = true"));
    let gateway = Arc::new(setup.start().await);
    assert_eq!(gateway.send(&Request::get("/first")).await.status, 200);
    let calls: Vec<_> = (0..20)
        .map(|_| {
            let gateway = gateway.clone();
            tokio::spawn(async move { gateway.send(&Request::get("/more")).await.status })
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap(), 200);
    }
    let seen = engine.seen();
    assert_eq!(seen.len(), 21);
    assert!(seen.iter().all(|one| one.http2));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_nobody_vouches_for_gets_nothing_and_another_serves() {
    let (ours, others) = (Authority::new("ours"), Authority::new("others"));
    let good = Engine::start(&ours.issue(&["engine.test"]), None, false).await;
    let foreign = Engine::start(&others.issue(&["engine.test"]), None, false).await;
    let renamed = Engine::start(&ours.issue(&["elsewhere.test"]), None, false).await;
    let expired = Engine::start(&ours.issue_until(&["engine.test"], 2020), None, false).await;
    let setup = Setup::new(&[]);
    ours.write(&setup.folder().join("ca.pem"));
    let all = [(&foreign, "engine.test"), (&renamed, "engine.test"), (&expired, "engine.test")];
    setup.write(&rule(&all, "ca = \"../ca.pem\""));
    let gateway = setup.spawn().await;
    let answer = gateway.send(&Request::get("/v1/any")).await;
    assert_eq!((answer.status, &*answer.code()), (503, "engine_unreachable"), "{answer:?}");
    let told = |log: &str| log.matches("TLS with the engine fails").count();
    until("the log has a line for each", async || told(&gateway.log()) == 3).await;
    let log = gateway.log();
    for (engine, why) in [(&foreign, "UnknownIssuer"), (&renamed, "NotValidForName"), (&expired, "Expired")] {
        let told = |line: &&str| line.contains(&engine.address.to_string()) && line.contains("TLS");
        let line = log.lines().find(told).unwrap_or_else(|| panic!("{}: {log}", engine.address));
        let lower = line.to_lowercase().replace(' ', "");
        let words = [why.to_lowercase(), "notvalidforname".into(), "expired".into()];
        assert!(words.iter().any(|why| lower.contains(why)), "{why}: {line}");
    }
    let with_good = [all[0], all[1], (&good, "engine.test")];
    gateway.change(&rule(&with_good, "ca = \"../ca.pem\"")).await;
    for _ in 0..6 {
        let answer = gateway.send(&Request::get("/v1/any")).await;
        assert_eq!((answer.status, answer.endpoint()), (200, &*good.address.to_string()), "{answer:?}");
    }
    assert!([foreign, renamed, expired].iter().all(|engine| engine.seen().is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_files_hold_for_new_connections() {
    let ours = Authority::new("ours");
    let engine = Engine::start(&ours.issue(&["engine.test"]), Some(&ours), false).await;
    let (one, two) = (ours.issue(&["gateway"]), ours.issue(&["gateway"]));
    let setup = Setup::new(&[]);
    write(&setup, &ours, &one);
    setup.write(&rule(
        &[(&engine, "engine.test")],
        "ca = \"../ca.pem\"\nclient_certificate = \"../client.pem\"",
    ));
    let gateway = setup.spawn().await;
    assert_eq!(gateway.send(&Request::get("/")).await.status, 200);
    two.write(&gateway.setup.folder().join("client.pem"));
    let der = two.chain()[0].to_vec();
    until("the new certificate is shown", async || {
        assert_eq!(gateway.send(&Request::get("/")).await.status, 200);
        engine.seen().last().unwrap().certificate.as_ref() == Some(&der)
    })
    .await;
    let seen = engine.seen();
    assert_eq!(seen[0].certificate, Some(one.chain()[0].to_vec()));
    // a broken one: what was in force stays
    std::fs::write(gateway.setup.folder().join("client.pem"), "nothing").unwrap();
    gateway.until_metric("kvgate_config_last_reload_successful", &[], 0.0).await;
    assert_eq!(gateway.send(&Request::get("/")).await.status, 200);
}
