//! TLS where clients connect: which certificate a client gets, what it must show itself, and which protocols it is
//! offered. All of it is read from files and swapped whole: connections that stand keep what they began with.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::ring::default_provider;
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{ServerConfig, SupportedProtocolVersion, version};

use crate::pem::{Certificate, PemError, authorities, roots};

/// The oldest TLS that is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MinVersion {
    /// TLS 1.2, and 1.3.
    Tls12,
    /// TLS 1.3 only.
    Tls13,
}

/// The files of a listener, and what it offers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TlsFiles {
    /// Chains and their keys. A client gets the first whose name it asks for, or else the first.
    pub certificates: Vec<(PathBuf, PathBuf)>,
    /// The authorities, one of which must vouch for the client's certificate; `None` asks for none.
    pub client_ca: Option<PathBuf>,
    /// The oldest TLS.
    pub min_version: MinVersion,
    /// Whether HTTP/2 is offered beside HTTP/1.1.
    pub http2: bool,
}

/// TLS as the files say.
pub struct Tls {
    config: Arc<ServerConfig>,
    certificates: Vec<Certificate>,
    /// Of all that it was made of.
    fingerprint: u64,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("certificates", &self.certificates).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// Every file that cannot be used.
    pub fn load(files: &TlsFiles) -> Result<Self, Vec<PemError>> {
        let (mut certificates, mut problems) = (Vec::new(), Vec::new());
        for (chain, key) in &files.certificates {
            match Certificate::load(chain, key) {
                Ok(certificate) => certificates.push(certificate),
                Err(problem) => problems.push(problem),
            }
        }
        let mut hasher = DefaultHasher::new();
        files.hash(&mut hasher);
        for certificate in &certificates {
            (&certificate.chain, certificate.key.secret_der()).hash(&mut hasher);
        }
        let verifier = files.client_ca.as_ref().map(|file| {
            let found = authorities(file)?;
            found.hash(&mut hasher);
            let store = roots(file, &found)?;
            let provider = Arc::new(default_provider());
            WebPkiClientVerifier::builder_with_provider(Arc::new(store), provider).build().map_err(|e| {
                PemError { file: file.clone(), problem: format!("cannot vouch for clients: {e}") }
            })
        });
        let verifier = verifier.transpose().unwrap_or_else(|problem| {
            problems.push(problem);
            None
        });
        if !problems.is_empty() {
            return Err(problems);
        }
        let versions: &[&'static SupportedProtocolVersion] = match files.min_version {
            MinVersion::Tls12 => &[&version::TLS12, &version::TLS13],
            MinVersion::Tls13 => &[&version::TLS13],
        };
        let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_protocol_versions(versions).map_err(|e| {
            vec![PemError { file: PathBuf::new(), problem: format!("TLS cannot be spoken: {e}") }]
        })?;
        let builder = match verifier {
            Some(verifier) => builder.with_client_cert_verifier(verifier),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::new(Names::of(&certificates)));
        let protocols: &[&[u8]] = if files.http2 { &[b"h2", b"http/1.1"] } else { &[b"http/1.1"] };
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        Ok(Self { config: Arc::new(config), certificates, fingerprint: hasher.finish() })
    }

    /// Whether both were made of the same: then the one in force may stay, and its clients' sessions with it.
    pub fn is_same(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
    }

    /// As the TLS library has it.
    pub(crate) fn config(&self) -> &Arc<ServerConfig> {
        &self.config
    }

    /// The certificates, in the order of the configuration.
    pub fn certificates(&self) -> &[Certificate] {
        &self.certificates
    }
}

/// Certificates by name.
#[derive(Debug)]
struct Names {
    exact: HashMap<String, Arc<CertifiedKey>>,
    /// By what follows `*.`: one label stands for the star (RFC 9525 section 6.3).
    wildcard: HashMap<String, Arc<CertifiedKey>>,
    first: Option<Arc<CertifiedKey>>,
}

impl Names {
    fn of(certificates: &[Certificate]) -> Self {
        let (mut exact, mut wildcard) = (HashMap::new(), HashMap::new());
        for certificate in certificates {
            for name in &certificate.names {
                let (map, name) = match name.strip_prefix("*.") {
                    Some(rest) => (&mut wildcard, rest),
                    None => (&mut exact, name.as_str()),
                };
                map.entry(name.to_owned()).or_insert_with(|| certificate.certified.clone());
            }
        }
        Self { exact, wildcard, first: certificates.first().map(|first| first.certified.clone()) }
    }

    fn find(&self, name: &str) -> Option<&Arc<CertifiedKey>> {
        let name = name.to_ascii_lowercase();
        let wild = || self.wildcard.get(name.split_once('.')?.1);
        self.exact.get(&name).or_else(wild)
    }
}

impl ResolvesServerCert for Names {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        hello.server_name().and_then(|name| self.find(name)).or(self.first.as_ref()).cloned()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn pem(names: &[&str]) -> String {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let made = rcgen::generate_simple_self_signed(names).unwrap();
        format!("{}{}", made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn the_same_files_are_the_same() {
        let file = std::env::temp_dir().join(format!("kvgate-tls-{}.pem", std::process::id()));
        let files = TlsFiles {
            certificates: vec![(file.clone(), file.clone())],
            client_ca: None,
            min_version: MinVersion::Tls12,
            http2: true,
        };
        let (one, two) = (pem(&["a.test"]), pem(&["a.test"]));
        let load = |text: &str, files: &TlsFiles| {
            std::fs::write(&file, text).unwrap();
            Tls::load(files).unwrap()
        };
        let first = load(&one, &files);
        assert!(first.is_same(&load(&one, &files)));
        assert!(!first.is_same(&load(&two, &files)));
        assert!(!first.is_same(&load(&one, &TlsFiles { min_version: MinVersion::Tls13, ..files.clone() })));
        let _ = std::fs::remove_file(&file);
    }

    #[test]
    fn names_are_found_whatever_their_case() {
        let folder = std::env::temp_dir();
        let file = folder.join(format!("kvgate-names-{}.pem", std::process::id()));
        std::fs::write(&file, pem(&["A.test", "*.b.test"])).unwrap();
        let certificate = Certificate::load(&file, &file).unwrap();
        let _ = std::fs::remove_file(&file);
        let names = Names::of(&[certificate]);
        for (name, found) in [
            ("a.test", true),
            ("A.TEST", true),
            ("x.b.test", true),
            ("X.B.test", true),
            ("b.test", false),
            ("x.y.b.test", false),
            ("test", false),
            ("", false),
        ] {
            assert_eq!(names.find(name).is_some(), found, "{name}");
        }
    }
}
