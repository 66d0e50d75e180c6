//! Certificates made for a test.

use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Who vouches for certificates.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in one text.
#[derive(Clone)]
pub struct Pem(pub String);

impl Authority {
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn der(&self) -> CertificateDer<'static> {
        self.0.der().clone()
    }

    pub fn write(&self, file: &Path) {
        std::fs::write(file, self.0.pem()).unwrap();
    }

    /// A certificate for these names.
    pub fn issue(&self, names: &[&str]) -> Pem {
        self.issue_until(names, 2099)
    }

    /// A certificate for these names that ends with this year's beginning.
    pub fn issue_until(&self, names: &[&str], year: i32) -> Pem {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.not_after = date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Pem(format!("{}{}", certificate.pem(), key.serialize_pem()))
    }
}

impl Pem {
    pub fn chain(&self) -> Vec<CertificateDer<'static>> {
        CertificateDer::pem_slice_iter(self.0.as_bytes()).map(Result::unwrap).collect()
    }

    pub fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::from_pem_slice(self.0.as_bytes()).unwrap()
    }

    /// Puts it in a file, whole.
    pub fn write(&self, file: &Path) {
        use std::os::unix::fs::PermissionsExt;
        let aside = file.with_extension("aside");
        std::fs::write(&aside, &self.0).unwrap();
        std::fs::set_permissions(&aside, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::rename(aside, file).unwrap();
    }
}
