//! A listener with TLS, and clients that trust it.

use std::net::SocketAddr;
use std::sync::Arc;

use pingora_core::tls::TlsConnector;
use rcgen::CertifiedKey;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::Result;
use crate::gateway::{Setup, free};

/// The name in its certificate.
const NAME: &str = "a.test";

/// A listener of a gateway, and how to speak to it.
pub struct Secure {
    /// Where it listens.
    pub address: SocketAddr,
    connector: TlsConnector,
}

impl Secure {
    /// Adds it to a gateway that is to be started; clients speak `protocol`, `h2` say.
    ///
    /// # Errors
    /// No port, or no certificate.
    pub fn listener(setup: &mut Setup, protocol: &str) -> Result<Self> {
        let CertifiedKey { cert, signing_key } = rcgen::generate_simple_self_signed(vec![NAME.to_owned()])?;
        let address = free()?;
        std::fs::write(setup.folder().join("tls.pem"), cert.pem() + &signing_key.serialize_pem())?;
        let lines = format!(
            "[[listener]]\nname = \"tls\"\naddress = \"{address}\"\ntls.certificates = [\"tls.pem\"]\n"
        );
        setup.process.push_str(&lines);
        let mut roots = RootCertStore::empty();
        roots.add(cert.der().clone())?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let mut config = builder.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        Ok(Self { address, connector: TlsConnector::from(Arc::new(config)) })
    }

    /// A connection, shaken hands over.
    ///
    /// # Errors
    /// It is not let in.
    pub async fn connect(&self) -> Result<impl AsyncRead + AsyncWrite + Unpin + Send + 'static + use<>> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        Ok(self.connector.connect(ServerName::try_from(NAME)?, stream).await?)
    }
}
