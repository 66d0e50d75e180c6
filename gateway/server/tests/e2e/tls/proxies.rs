//! Balancers and proxies in front: whose request it is, and where it should have gone.

use std::net::SocketAddr;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::{Authority, MODELS, Terms, ask, certificates, client, connect};
use crate::support::{Gateway, Request, Rule, Setup, host, silent_engine};

/// An engine that answers with the head it was sent.
async fn mirror() -> SocketAddr {
    use tokio::io::AsyncReadExt;
    let listener = tokio::net::TcpListener::bind((host(), 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut bytes = Vec::new();
                while stream.read_buf(&mut bytes).await.is_ok_and(|n| n > 0) {
                    if !bytes.ends_with(b"\r\n\r\n") {
                        continue;
                    }
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", bytes.len());
                    let _ = stream.write_all(&[head.as_bytes(), &bytes].concat()).await;
                    bytes.clear();
                }
            });
        }
    });
    address
}

/// A gateway before an engine that shows what it is sent.
async fn gateway(lines: &str) -> Gateway {
    let setup = Setup::new(&[Rule::new("all", &["round-robin"]).endpoint(mirror().await, "")]);
    setup.listener(lines).start().await
}

/// The values of a field as the engine saw them.
fn seen<'a>(answer: &'a str, name: &str) -> Vec<&'a str> {
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    let fields = body.lines().filter_map(|line| line.split_once(": "));
    fields.filter(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
}

const SPOOFED: &str = "GET / HTTP/1.1\r\nhost: a.test\r\nX-Forwarded-For: 6.6.6.6\r\nx-forwarded-proto: https\r\n\
                       forwarded: for=6.6.6.6\r\nx-real-ip: 6.6.6.6\r\nconnection: x-forwarded-for\r\n\r\n";

#[tokio::test(flavor = "multi_thread")]
async fn what_strangers_say_of_clients_does_not_reach_the_engine() {
    let gateway = gateway("").await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let own = stream.local_addr().unwrap().ip().to_string();
    let answer = ask(&mut stream, SPOOFED).await.unwrap();
    assert_eq!(seen(&answer, "x-forwarded-for"), [own.as_str()], "{answer}");
    assert_eq!(seen(&answer, "x-forwarded-proto"), ["http"]);
    assert!(!answer.contains("6.6.6.6"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn trusted_proxies_are_added_to_and_heads_may_pass_as_they_came() {
    let trusting = gateway("trusted_proxies = [\"127.0.0.0/8\"]").await;
    let mut stream = TcpStream::connect(trusting.address).await.unwrap();
    let own = stream.local_addr().unwrap().ip().to_string();
    let answer = ask(&mut stream, SPOOFED).await.unwrap();
    assert_eq!(seen(&answer, "x-forwarded-for"), [format!("6.6.6.6, {own}").as_str()], "{answer}");
    assert_eq!(
        (seen(&answer, "x-forwarded-proto"), seen(&answer, "x-real-ip")),
        (vec!["https"], vec!["6.6.6.6"])
    );

    let silent = gateway("forwarded = false").await;
    let mut stream = TcpStream::connect(silent.address).await.unwrap();
    let plain = SPOOFED.replace("connection: x-forwarded-for\r\n", "");
    let answer = ask(&mut stream, &plain).await.unwrap();
    assert_eq!(
        (seen(&answer, "x-forwarded-for"), seen(&answer, "forwarded")),
        (vec!["6.6.6.6"], vec!["for=6.6.6.6"])
    );
    let answer = ask(&mut stream, "GET / HTTP/1.1\r\nhost: a.test\r\n\r\n").await.unwrap();
    assert!(seen(&answer, "x-forwarded-for").is_empty() && seen(&answer, "x-forwarded-proto").is_empty());
}

/// The address that tiers go by: clients behind one proxy keep each its own endpoint, and one that only claims to be
/// another does not move.
#[tokio::test(flavor = "multi_thread")]
async fn tiers_go_by_the_client_and_not_by_the_proxy() {
    let rule = |engines: &[SocketAddr]| {
        engines.iter().fold(Rule::new("all", &["persist"]), |rule, engine| rule.endpoint(engine, ""))
    };
    let engines = [mirror().await, mirror().await, mirror().await, mirror().await];
    let ask_as = async |gateway: &Gateway, client: &str| {
        let request = Request::get("/").field("x-forwarded-for", client);
        gateway.send(&request).await.endpoint().to_owned()
    };
    let clients: Vec<_> = (1..30).map(|n| format!("203.0.113.{n}")).collect();
    let proxied = Setup::new(&[rule(&engines)]).listener("trusted_proxies = [\"127.0.0.0/8\"]").start().await;
    let mut used = std::collections::HashSet::new();
    for client in &clients {
        let first = ask_as(&proxied, client).await;
        assert_eq!(ask_as(&proxied, &format!("9.9.9.9, {client}")).await, first, "{client}");
        used.insert(first);
    }
    assert!(used.len() > 1, "{used:?}");
    let direct = Setup::new(&[rule(&engines)]).start().await;
    let mut used = std::collections::HashSet::new();
    for client in &clients {
        used.insert(ask_as(&direct, client).await);
    }
    assert_eq!(used.len(), 1, "{used:?}");
}

/// Version 2 for a client and a server of IPv4, with a TLV.
fn version2(client: [u8; 4], port: u16) -> Vec<u8> {
    let [high, low] = port.to_be_bytes();
    let head = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x10";
    [&head[..], &client, &[10, 0, 0, 1], &[high, low, 1, 0xbb], &[4, 0, 1, 0]].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_balancer_says_whose_connection_it_is() {
    let gateway = gateway("proxy_protocol = true\ntrusted_proxies = [\"127.0.0.0/8\"]").await;
    let v1 = b"PROXY TCP4 203.0.113.7 10.0.0.1 4711 443\r\n".to_vec();
    let v6 = b"PROXY TCP6 2001:db8::7 fd00::1 4711 443\r\n".to_vec();
    for (header, client) in
        [(v1, "203.0.113.7"), (v6, "2001:db8::7"), (version2([198, 51, 100, 9], 4711), "198.51.100.9")]
    {
        let request = [&header[..], SPOOFED.as_bytes()].concat();
        for at in [0, 1, 11, 12, header.len() / 2, header.len() - 1, header.len(), header.len() + 5] {
            let mut stream = TcpStream::connect(gateway.address).await.unwrap();
            stream.set_nodelay(true).unwrap();
            stream.write_all(&request[..at]).await.unwrap();
            tokio::task::yield_now().await;
            let rest = String::from_utf8(request[at..].to_vec());
            let answer = match rest {
                Ok(rest) => ask(&mut stream, &rest).await.unwrap(),
                Err(bytes) => {
                    stream.write_all(bytes.as_bytes()).await.unwrap();
                    ask(&mut stream, "").await.unwrap()
                }
            };
            // the client is a stranger, whatever the balancer is
            assert_eq!(seen(&answer, "x-forwarded-for"), [client], "{answer}");
        }
    }
    // the balancer's own connections are the balancer's
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let own = stream.local_addr().unwrap().ip().to_string();
    let answer = ask(&mut stream, "PROXY UNKNOWN\r\nGET / HTTP/1.1\r\nhost: a.test\r\n\r\n").await.unwrap();
    assert_eq!(seen(&answer, "x-forwarded-for"), [own.as_str()]);
    // no header, no service
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    assert_eq!(ask(&mut stream, "GET / HTTP/1.1\r\nhost: a.test\r\n\r\n").await.unwrap_or_default(), "");
    let refused = ["listener=\"edge\"", "reason=\"proxy_header\""];
    gateway.until_metric("kvgate_connections_refused_total", &refused, 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_trusted_balancers_may_speak_for_others() {
    let gateway = gateway("proxy_protocol = true\ntrusted_proxies = [\"10.0.0.0/8\"]").await;
    for header in ["PROXY TCP4 203.0.113.7 10.0.0.1 4711 443\r\n", ""] {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        let answer = ask(&mut stream, &format!("{header}GET / HTTP/1.1\r\nhost: a.test\r\n\r\n")).await;
        assert_eq!(answer.unwrap_or_default(), "");
    }
    let refused = ["listener=\"edge\"", "reason=\"proxy_header\""];
    gateway.until_metric("kvgate_connections_refused_total", &refused, 2.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_header_comes_before_tls() {
    let ours = Authority::new("ours");
    let setup = Setup::new(&[Rule::new("all", &["round-robin"]).endpoint(mirror().await, "")]);
    let lines = certificates(setup.folder(), &[&ours.issue(&["a.test"])]);
    let lines = format!("proxy_protocol = true\ntrusted_proxies = [\"127.0.0.1/8\"]\n{lines}");
    let gateway = setup.listener(&lines).start().await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(&version2([203, 0, 113, 7], 4711)).await.unwrap();
    let name = rustls::pki_types::ServerName::try_from("a.test").unwrap();
    let mut stream = client(&ours, &Terms::default()).connect(name, stream).await.unwrap();
    let answer = ask(&mut stream, SPOOFED).await.unwrap();
    assert_eq!(seen(&answer, "x-forwarded-for"), ["203.0.113.7"], "{answer}");
    assert_eq!(seen(&answer, "x-forwarded-proto"), ["https"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_requests_are_sent_to_tls() {
    let gateway = gateway("redirect_https = 8443\ntrusted_proxies = [\"127.0.0.0/8\"]").await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    let head = |line: &str, host: &str| format!("{line} HTTP/1.1\r\nhost: {host}\r\n\r\n");
    for (line, host, place) in [
        ("GET /a?b=%20", "a.test", "https://a.test:8443/a?b=%20"),
        ("GET /", "a.test:80", "https://a.test:8443/"),
        ("GET /", "[::1]:80", "https://[::1]:8443/"),
        ("DELETE //evil.test/x", "a.test", "https://a.test:8443//evil.test/x"),
    ] {
        let answer = ask(&mut stream, &head(line, host)).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 308 "), "{answer}");
        assert!(answer.to_lowercase().contains(&format!("location: {place}\r\n")), "{place}: {answer}");
        assert!(!answer.to_lowercase().contains("strict-transport-security"), "{answer}");
    }
    // with a body, which is not read into memory, and the connection is in order after it
    let answer =
        ask(&mut stream, "POST /v1 HTTP/1.1\r\nhost: a.test\r\ncontent-length: 3\r\n\r\nabc").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 308 "), "{answer}");
    // what the trusted proxy had by TLS is not sent round in circles
    let proxied = "GET / HTTP/1.1\r\nhost: a.test\r\nx-forwarded-proto: https\r\n\r\n";
    assert!(ask(&mut stream, proxied).await.unwrap().starts_with("HTTP/1.1 200 "));
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_by_tls_say_that_tls_is_to_stay() {
    let (engine, ours) = (silent_engine().await, Authority::new("ours"));
    let setup = Setup::new(&[Rule::new("all", &["round-robin"]).endpoint(engine.address(), "")]);
    let lines = certificates(setup.folder(), &[&ours.issue(&["a.test"])]);
    let gateway = setup.listener(&format!("hsts = \"max-age=31536000\"\n{lines}")).start().await;
    let mut stream = connect(gateway.address, "a.test", &client(&ours, &Terms::default())).await.unwrap();
    let answer = ask(&mut stream, MODELS).await.unwrap();
    assert!(
        answer.to_lowercase().contains("\r\nstrict-transport-security: max-age=31536000\r\n"),
        "{answer}"
    );
}
