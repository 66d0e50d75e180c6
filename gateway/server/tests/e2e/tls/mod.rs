//! TLS, HTTP/2 and proxies in front: where clients connect, and to engines.

mod authority;
mod engines;
mod frames;
mod http2;
mod injections;
mod listener;
mod proxies;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use pingora_core::tls::{ClientTlsStream, TlsConnector};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::PATIENCE;
use authority::{Authority, Pem};

/// A client's end of a TLS connection.
type Client = ClientTlsStream<TcpStream>;

/// How a client speaks TLS.
#[derive(Default)]
struct Terms<'a> {
    /// The protocols it offers.
    offers: &'a [&'a str],
    /// What it shows.
    shows: Option<&'a Pem>,
    /// TLS 1.2 and no newer.
    old: bool,
}

/// A client that trusts this authority.
fn client(trusts: &Authority, terms: &Terms<'_>) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(trusts.der()).unwrap();
    let versions: &[_] = if terms.old { &[&rustls::version::TLS12] } else { rustls::ALL_VERSIONS };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions).unwrap();
    let builder = builder.with_root_certificates(roots);
    let mut config = match terms.shows {
        Some(pem) => builder.with_client_auth_cert(pem.chain(), pem.key()).unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = terms.offers.iter().map(|name| name.as_bytes().to_vec()).collect();
    TlsConnector::from(Arc::new(config))
}

/// Connects, asks for this name, and waits for the handshake's end.
async fn connect(to: SocketAddr, name: &str, client: &TlsConnector) -> std::io::Result<Client> {
    let stream = TcpStream::connect(to).await?;
    let name = ServerName::try_from(name.to_owned()).unwrap();
    timeout(PATIENCE, client.connect(name, stream)).await.expect("a handshake in time")
}

/// Sends a request and reads until the server ends the connection, or what follows the head is as long as it says.
async fn ask(
    stream: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin),
    request: &str,
) -> std::io::Result<String> {
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
            if length.is_some_and(|length: usize| body.len() >= length) {
                return Ok(text);
            }
        }
        if timeout(PATIENCE, stream.read_buf(&mut bytes)).await.expect("an answer in time")? == 0 {
            return Ok(text);
        }
    }
}

/// A request that an engine of ours answers with 200.
const MODELS: &str = "GET /v1/models HTTP/1.1\r\nhost: a.test\r\n\r\n";

/// The lines of a listener with these certificates, which are written into `folder`.
fn certificates(folder: &Path, pems: &[&Pem]) -> String {
    let names: Vec<_> = (0..pems.len()).map(|at| format!("cert{at}.pem")).collect();
    pems.iter().zip(&names).for_each(|(pem, name)| pem.write(&folder.join(name)));
    format!("[listener.tls]\ncertificates = {names:?}\n")
}
