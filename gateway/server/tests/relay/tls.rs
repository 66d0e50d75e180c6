//! Engines by TLS: what the peer's options say is what happens.

use std::net::SocketAddr;
use std::sync::Arc;

use pingora_core::protocols::ALPN;
use pingora_core::tls::{
    ServerConfig, TlsAcceptor, install_default_crypto_provider, load_certs_and_key_files,
};
use pingora_core::upstreams::peer::HttpPeer;
use pingora_core::utils::tls::{WrappedX509, parse_x509};
use tokio::net::{TcpListener, TcpStream};

use crate::support::client::H1;
use crate::support::{Ask, Engine, digest, gateway, noise};

const CERT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/relay/tls/cert.pem");
const KEY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/relay/tls/key.pem");

/// Speaks TLS in front of an engine, and offers these protocols.
async fn front(engine: SocketAddr, offers: &[&str]) -> SocketAddr {
    install_default_crypto_provider();
    let (certs, key) = load_certs_and_key_files(CERT, KEY).unwrap().unwrap();
    let mut config = ServerConfig::builder().with_no_client_auth().with_single_cert(certs, key).unwrap();
    config.alpn_protocols = offers.iter().map(|p| p.as_bytes().to_vec()).collect();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut tls) = acceptor.accept(stream).await else { return };
                let mut plain = TcpStream::connect(engine).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut tls, &mut plain).await;
            });
        }
    });
    address
}

fn peer(address: SocketAddr, alpn: ALPN, trusted: bool) -> HttpPeer {
    let mut peer = HttpPeer::new(address, true, "engine.test".into());
    peer.options.alpn = alpn;
    if trusted {
        let (certs, _) = load_certs_and_key_files(CERT, KEY).unwrap().unwrap();
        let cas: Vec<_> = certs.iter().map(|c| WrappedX509::new(c.to_vec(), parse_x509)).collect();
        peer.options.ca = Some(cas.into());
    }
    peer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_protocol_is_negotiated() {
    let engine = Engine::start().await;
    for (offers, alpn, h2) in [
        (&["h2", "http/1.1"][..], ALPN::H2H1, true),
        (&["http/1.1"], ALPN::H2H1, false),
        (&["h2", "http/1.1"], ALPN::H1, false),
        (&["h2"], ALPN::H2, true),
        (&[], ALPN::H1, false),
    ] {
        let front = front(engine.address, offers).await;
        let (address, ..) = gateway::start(vec![peer(front, alpn.clone(), true)], 64 << 20).await;
        let mut client = H1::open(address).await;
        let connections = engine.connections();
        for n in [0, 1000, 300_000] {
            let answer = client.call(&Ask::post("/echo", noise(n))).await;
            assert_eq!((answer.status, answer.text()), (200, digest(&noise(n))), "{offers:?} {alpn:?}");
            assert_eq!(engine.last().h2, h2);
        }
        assert_eq!(engine.connections(), connections + 1, "TLS connections are reused");
    }
}

#[tokio::test]
async fn an_engine_nobody_vouches_for_is_unreachable() {
    let engine = Engine::start().await;
    let front = front(engine.address, &["http/1.1"]).await;
    let mut renamed = peer(front, ALPN::H1, true);
    renamed.sni = "other.test".into();
    for peer in [peer(front, ALPN::H1, false), renamed] {
        let (address, ..) = gateway::start(vec![peer], 64 << 20).await;
        let answer = H1::open(address).await.call(&Ask::post("/echo", "q")).await;
        assert_eq!((answer.status, answer.code().as_str()), (503, "engine_unreachable"));
    }
    assert!(engine.seen().is_empty());
}
