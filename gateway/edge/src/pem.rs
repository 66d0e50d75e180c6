//! Certificates and keys from PEM files, checked before anything is built of them.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The most that a file of certificates or keys may hold, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Why a file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PemError {
    /// Which.
    pub file: PathBuf,
    /// Why, in words that follow its name.
    pub problem: String,
}

impl PemError {
    fn new(file: &Path, problem: impl Into<String>) -> Self {
        Self { file: file.to_owned(), problem: problem.into() }
    }
}

impl fmt::Display for PemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.file.display(), self.problem)
    }
}

impl std::error::Error for PemError {}

/// A certificate with its chain and its key, which fit each other.
#[derive(Clone)]
pub struct Certificate {
    /// Where it was read from.
    pub file: PathBuf,
    /// The certificate, then those that vouch for it.
    pub chain: Vec<CertificateDer<'static>>,
    /// The key, in DER.
    pub key: Arc<PrivateKeyDer<'static>>,
    /// Chain and key as the TLS library has them.
    pub certified: Arc<CertifiedKey>,
    /// The DNS names and addresses that it is for, in lower case.
    pub names: Vec<String>,
    /// Until when it is valid, in seconds since 1970: the earliest end of its chain.
    pub expires: i64,
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // the key stays out of logs
        f.debug_struct("Certificate")
            .field("file", &self.file)
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Certificate {
    /// Reads a chain, leaf first, and its key; both may be in one file.
    ///
    /// # Errors
    /// The file at fault: unreadable, larger than 1 MiB, without certificate or key, with a broken one, or with a key
    /// of another certificate.
    pub fn load(chain: &Path, key: &Path) -> Result<Self, PemError> {
        let file = chain;
        let chain = certificates(file)?;
        let mut expires = i64::MAX;
        for der in &chain {
            let (_, parsed) = X509Certificate::from_der(der)
                .map_err(|e| PemError::new(file, format!("holds a broken certificate: {e}")))?;
            expires = expires.min(parsed.validity.not_after.timestamp());
        }
        let leaf = chain.first().map(|der| names(der)).unwrap_or_default();
        let text = read(key)?;
        let der = PrivateKeyDer::from_pem_slice(&text).map_err(|_| {
            PemError::new(key, "holds no private key in PEM (an encrypted one cannot be used)")
        })?;
        let certified = CertifiedKey::from_der(chain.clone(), der.clone_key(), &default_provider());
        let certified = certified.map_err(|e| match e {
            rustls::Error::InconsistentKeys(_) => {
                PemError::new(key, format!("holds the key of another certificate than {}", file.display()))
            }
            e => PemError::new(key, format!("holds a key that cannot be used: {e}")),
        })?;
        Ok(Self {
            file: file.to_owned(),
            chain,
            key: Arc::new(der),
            certified: Arc::new(certified),
            names: leaf,
            expires,
        })
    }
}

/// The authorities in a file, one at least.
///
/// # Errors
/// The file: unreadable, larger than 1 MiB, without a certificate, or with one that cannot be an authority.
pub fn authorities(file: &Path) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let found = certificates(file)?;
    roots(file, &found).map(|_| found)
}

/// As [`authorities`], as the TLS library has them.
pub(crate) fn roots(file: &Path, authorities: &[CertificateDer<'static>]) -> Result<RootCertStore, PemError> {
    let mut store = RootCertStore::empty();
    for der in authorities {
        let broken =
            |e: String| PemError::new(file, format!("holds a certificate that cannot be an authority: {e}"));
        X509Certificate::from_der(der).map_err(|e| broken(e.to_string()))?;
        store.add(der.clone()).map_err(|e| broken(e.to_string()))?;
    }
    Ok(store)
}

/// Whether everybody on the machine may read the file.
pub fn is_public(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|meta| meta.permissions().mode() & 0o004 != 0)
}

fn read(file: &Path) -> Result<Vec<u8>, PemError> {
    let mut bytes = Vec::new();
    let open = File::open(file).and_then(|open| open.take(MAX_FILE + 1).read_to_end(&mut bytes));
    open.map_err(|e| PemError::new(file, format!("cannot be read: {e}")))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(PemError::new(file, "is larger than 1 MiB"));
    }
    Ok(bytes)
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let text = read(file)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|e| PemError::new(file, format!("is not PEM: {e}")))?;
    if found.is_empty() {
        return Err(PemError::new(file, "holds no certificate in PEM"));
    }
    Ok(found)
}

/// What a certificate is for; its common name only where it has no alternative names.
fn names(der: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, parsed)) = X509Certificate::from_der(der) else { return Vec::new() };
    let alternatives = parsed.subject_alternative_name().ok().flatten();
    let alternatives =
        alternatives.map(|extension| extension.value.general_names.clone()).unwrap_or_default();
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some(name.to_ascii_lowercase()),
        GeneralName::IPAddress([a, b, c, d]) => Some(std::net::Ipv4Addr::new(*a, *b, *c, *d).to_string()),
        GeneralName::IPAddress(bytes) => {
            <[u8; 16]>::try_from(*bytes).ok().map(|bytes| std::net::Ipv6Addr::from(bytes).to_string())
        }
        _ => None,
    };
    let found: Vec<_> = alternatives.iter().filter_map(name).collect();
    if !found.is_empty() {
        return found;
    }
    let common = parsed.subject().iter_common_name().filter_map(|cn| cn.as_str().ok());
    common.map(str::to_ascii_lowercase).collect()
}
