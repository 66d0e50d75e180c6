//! TLS where clients connect.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::authority::Authority;
use super::{Client, MODELS, Terms, ask, certificates, client, connect};
use crate::support::{Rule, Setup, silent_engine, until};

/// The certificate that the server showed.
fn shown(stream: &Client) -> Vec<u8> {
    stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_name_gets_its_certificate() {
    let (engine, ours) = (silent_engine().await, Authority::new("ours"));
    // all are for one more name, under which a client that was given the first one anyway can tell
    let pems = [
        ours.issue(&["first.test", "x.y.b.test", "b.test"]),
        ours.issue(&["a.test", "A2.test"]),
        ours.issue(&["*.b.test", "a.test"]),
        ours.issue(&["x.b.test"]),
    ];
    let setup = Setup::new(&[Rule::new("all", &["round-robin"]).endpoint(engine.address(), "")]);
    let lines = certificates(setup.folder(), &pems.each_ref());
    let gateway = setup.listener(&lines).start().await;
    let tls = client(&ours, &Terms::default());
    for (name, at) in [
        ("first.test", 0),
        ("a.test", 1),
        ("A.TEST", 1),
        ("a2.test", 1),
        ("x.b.test", 3),
        ("z.b.test", 2),
        ("x.y.b.test", 0),
        ("b.test", 0),
    ] {
        let mut stream = connect(gateway.address, name, &tls).await.unwrap();
        assert_eq!(shown(&stream), pems[at].chain()[0].to_vec(), "{name}");
        let answer = ask(&mut stream, MODELS).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    // one that nobody has: the first, which the client does not take
    let error = connect(gateway.address, "other.test", &tls).await.unwrap_err();
    assert!(
        error.to_string().contains("NotValidForName") || error.to_string().contains("not valid for name"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_read_again_while_a_connection_stays_open() {
    let (engine, ours) = (silent_engine().await, Authority::new("ours"));
    let [one, two, three] = [(); 3].map(|()| ours.issue(&["a.test"]));
    let setup = Setup::new(&[Rule::new("all", &["round-robin"]).endpoint(engine.address(), "")]);
    let lines = certificates(setup.folder(), &[&one]);
    let gateway = setup.listener(&lines).spawn().await;
    let file = gateway.setup.folder().join("cert0.pem");
    let tls = client(&ours, &Terms::default());
    let fresh = async || shown(&connect(gateway.address, "a.test", &tls).await.unwrap());
    let mut kept = connect(gateway.address, "a.test", &tls).await.unwrap();
    assert_eq!(shown(&kept), one.chain()[0].to_vec());
    two.write(&file);
    until("the new certificate is shown", async || fresh().await == two.chain()[0].to_vec()).await;
    let answer = ask(&mut kept, MODELS).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");

    // a broken file: what was in force stays, and it is said
    std::fs::write(&file, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
    gateway.until_metric("kvgate_config_last_reload_successful", &[], 0.0).await;
    assert_eq!(fresh().await, two.chain()[0].to_vec());
    assert!(gateway.log().contains("cert0.pem"), "{}", gateway.log());
    three.write(&file);
    gateway.until_metric("kvgate_config_last_reload_successful", &[], 1.0).await;
    until("the third is shown", async || fresh().await == three.chain()[0].to_vec()).await;
    let answer = ask(&mut kept, MODELS).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let expires =
        gateway.metric("kvgate_certificate_expires_timestamp_seconds", &["listener=\"edge\""]).await;
    // 2099-01-01
    assert_eq!(expires, 4_070_908_800.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_show_a_certificate_where_that_is_asked() {
    let (engine, ours, others) = (silent_engine().await, Authority::new("ours"), Authority::new("others"));
    let setup = Setup::new(&[Rule::new("all", &["round-robin"]).endpoint(engine.address(), "")]);
    ours.write(&setup.folder().join("clients.pem"));
    let lines = certificates(setup.folder(), &[&ours.issue(&["a.test"])]);
    let gateway = setup.listener(&format!("{lines}client_ca = \"clients.pem\"\n")).start().await;
    let (good, foreign) = (ours.issue(&["client"]), others.issue(&["client"]));
    for old in [false, true] {
        for (shows, taken) in [(None, false), (Some(&foreign), false), (Some(&good), true)] {
            let tls = client(&ours, &Terms { shows, old, ..Terms::default() });
            // with TLS 1.3 a client learns of its refusal after its own part of the handshake
            let answered = match connect(gateway.address, "a.test", &tls).await {
                Ok(mut stream) => {
                    ask(&mut stream, MODELS).await.is_ok_and(|text| text.starts_with("HTTP/1.1 200 "))
                }
                Err(_) => false,
            };
            assert_eq!(answered, taken, "{} old {old}", shows.is_some());
        }
    }
    let refused = ["listener=\"edge\"", "reason=\"handshake\""];
    gateway.until_metric("kvgate_connections_refused_total", &refused, 4.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_old_or_no_tls_is_refused() {
    let (engine, ours) = (silent_engine().await, Authority::new("ours"));
    let setup = Setup::new(&[Rule::new("all", &["round-robin"]).endpoint(engine.address(), "")]);
    let lines = certificates(setup.folder(), &[&ours.issue(&["a.test"])]);
    let gateway = setup.listener(&format!("{lines}min_version = \"1.3\"\nhttp2 = false\n")).start().await;
    let old = client(&ours, &Terms { old: true, ..Terms::default() });
    connect(gateway.address, "a.test", &old).await.unwrap_err();
    // HTTP/2 alone is not spoken here, and a client that can do both gets the other
    connect(gateway.address, "a.test", &client(&ours, &Terms { offers: &["h2"], ..Terms::default() }))
        .await
        .unwrap_err();
    let both = client(&ours, &Terms { offers: &["h2", "http/1.1"], ..Terms::default() });
    let mut stream = connect(gateway.address, "a.test", &both).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    assert!(ask(&mut stream, MODELS).await.unwrap().starts_with("HTTP/1.1 200 "));
    let mut plain = TcpStream::connect(gateway.address).await.unwrap();
    plain.write_all(MODELS.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
    gateway
        .until_metric("kvgate_connections_refused_total", &["listener=\"edge\"", "reason=\"handshake\""], 3.0)
        .await;
}

/// Who does not finish its handshake keeps nobody else waiting.
#[tokio::test(flavor = "multi_thread")]
async fn silent_clients_hold_up_nobody() {
    let (engine, ours) = (silent_engine().await, Authority::new("ours"));
    let setup = Setup::new(&[Rule::new("all", &["round-robin"]).endpoint(engine.address(), "")]);
    let lines = certificates(setup.folder(), &[&ours.issue(&["a.test"])]);
    let gateway = Arc::new(setup.listener(&lines).start().await);
    let mut silent = Vec::new();
    for n in 0..50 {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        stream.write_all(&[0x16, 3, 1, 2, 0, 1][..n % 7]).await.unwrap();
        silent.push(stream);
    }
    let tls = client(&ours, &Terms::default());
    let mut stream = connect(gateway.address, "a.test", &tls).await.unwrap();
    assert!(ask(&mut stream, MODELS).await.unwrap().starts_with("HTTP/1.1 200 "));
}
