//! Engines by TLS, for both parts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvgate_sim::Role;
use pingora_core::tls::{
    ServerConfig, TlsAcceptor, install_default_crypto_provider, load_certs_and_key_files,
};
use tokio::net::{TcpListener, TcpStream};

use super::{body, parts, request, rule, sent, stream};
use crate::support::{Setup, host};

const CERT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/relay/tls/cert.pem");
const KEY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/relay/tls/key.pem");

/// Speaks TLS in front of an engine, and counts who came by it.
async fn front(engine: SocketAddr) -> (SocketAddr, Arc<AtomicUsize>) {
    install_default_crypto_provider();
    let (certs, key) = load_certs_and_key_files(CERT, KEY).unwrap().unwrap();
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(certs, key).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind((host(), 0)).await.unwrap();
    let (address, came) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counts = came.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, counts) = (acceptor.clone(), counts.clone());
            tokio::spawn(async move {
                let Ok(mut tls) = acceptor.accept(stream).await else { return };
                counts.fetch_add(1, Ordering::Relaxed);
                let mut plain = TcpStream::connect(engine).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut tls, &mut plain).await;
            });
        }
    });
    (address, came)
}

#[tokio::test(flavor = "multi_thread")]
async fn both_parts_are_spoken_to_by_tls() {
    let (prefill, decode) = (parts(Role::Prefill, 1).await, parts(Role::Decode, 1).await);
    let (to_prefill, prefills) = front(prefill[0].address()).await;
    let (to_decode, decodes) = front(decode[0].address()).await;
    let pair = |name: &str| {
        let part = |role: &str| format!("role = {role:?}\ntls = {name:?}");
        rule(&["round-robin"]).endpoint(to_prefill, &part("prefill")).endpoint(to_decode, &part("decode"))
    };
    let trusting = |rule| Setup::new(&[rule]).environment("SSL_CERT_FILE", CERT);
    let gateway = trusting(pair("engine.test")).spawn().await;
    for body in [stream(1), body(2)] {
        let answer = gateway.send(&request(&body)).await;
        assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
        assert_eq!(answer.endpoint(), to_decode.to_string());
    }
    let (first, second) = (prefill[0].log(), decode[0].log());
    assert_eq!((first.len(), second.len()), (2, 2));
    assert!(second.iter().all(|served| served.received_tokens == 63 && sent(served).contains("remote_host")));
    let came = || [&prefills, &decodes].map(|came| came.load(Ordering::Relaxed));
    gateway.until_idle().await;
    let before = came();
    assert!(before.iter().all(|connections| (1..=2).contains(connections)), "{before:?}");
    drop(gateway);

    // nobody vouches for an engine of another name: nothing is sent to it
    let gateway = trusting(pair("other.test")).spawn().await;
    let answer = gateway.send(&request(&body(1))).await;
    assert_eq!((answer.status, &*answer.code()), (503, "pd_pool_unavailable"), "{answer:?}");
    gateway.until_idle().await;
    assert_eq!((prefill[0].log().len(), decode[0].log().len(), came()), (2, 2, before));
}
