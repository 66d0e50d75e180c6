//! Certificates and keys, and what goes with them.

use std::os::unix::fs::PermissionsExt;

use rcgen::{CertificateParams, KeyPair, date_time_ymd};

use crate::folder::{Folder, RULE};

/// A certificate that ends with this year's beginning, and its key.
fn issue(year: i32) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["a.test".to_owned()]).unwrap();
    params.not_before = date_time_ymd(2000, 1, 1);
    params.not_after = date_time_ymd(year, 1, 1);
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

/// A folder with certificates in every state.
fn folder() -> Folder {
    let ((good, key), (old, old_key), (other, _)) = (issue(2099), issue(2020), issue(2099));
    let files = [
        ("good.pem", &good),
        ("good.key", &key),
        ("both.pem", &format!("{good}{key}")),
        ("old.pem", &format!("{old}{old_key}")),
        ("other.pem", &other),
        ("open.key", &key),
        ("empty.pem", &String::new()),
        ("broken.pem", &"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_owned()),
    ];
    let folder = files.iter().fold(Folder::with(RULE), |folder, (name, text)| folder.write(name, text));
    for (name, _) in files {
        let mode = if name == "open.key" { 0o644 } else { 0o600 };
        std::fs::set_permissions(folder.path(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    folder
}

#[test]
fn certificates_of_a_listener() {
    let of = |lines: &str| folder().write("gateway.toml", format!("[[listener]]\n{lines}")).problems();
    let tls = |lines: &str| of(&format!("[listener.tls]\n{lines}"));
    for good in [
        "certificates = [\"both.pem\"]",
        "certificates = [\"good.pem\"]\nkeys = [\"good.key\"]\nmin_version = \"1.3\"\nhttp2 = false",
        "certificates = [\"good.pem\", \"both.pem\"]\nkeys = [\"good.key\", \"good.key\"]",
        "certificates = [\"good.pem\", \"both.pem\"]\nkeys = [\"good.key\", \"both.pem\"]\nclient_ca = \"other.pem\"",
    ] {
        assert_eq!(tls(good), "taken\n", "{good}");
    }
    for (lines, at, why) in [
        ("certificates = [\"good.pem\"]", "tls.certificates[0]", "holds no private key"),
        ("certificates = [\"both.pem\", \"none.pem\"]", "tls.certificates[1]", "cannot be read"),
        ("certificates = [\"empty.pem\"]", "tls.certificates[0]", "holds no certificate"),
        ("certificates = [\"broken.pem\"]", "tls.certificates[0]", "holds a broken certificate"),
        ("certificates = [\"good.key\"]", "tls.certificates[0]", "holds no certificate"),
        (
            "certificates = [\"other.pem\"]\nkeys = [\"good.key\"]",
            "tls.keys[0]",
            "the key of another certificate",
        ),
        (
            "certificates = [\"good.pem\"]\nkeys = [\"good.pem\"]",
            "tls.certificates[0]",
            "holds no private key",
        ),
        (
            "certificates = [\"both.pem\"]\nkeys = [\"good.key\", \"both.pem\"]",
            "tls.keys",
            "one key for each",
        ),
        ("client_ca = \"other.pem\"", "tls.client_ca", "of no use"),
        ("certificates = [\"both.pem\"]\nclient_ca = \"empty.pem\"", "tls.client_ca", "holds no certificate"),
        ("min_version = \"1.1\"", "tls.min_version", "not one of the words"),
    ] {
        let problems = tls(lines);
        assert!(
            problems.starts_with("refused\n") && problems.contains(at) && problems.contains(why),
            "{problems}"
        );
    }
    for (lines, why) in [
        ("certificates = [\"old.pem\"]", "warning: listener[0].tls.certificates[0]: expired "),
        (
            "certificates = [\"good.pem\"]\nkeys = [\"open.key\"]",
            "warning: listener[0].tls.keys[0]: can be read by everybody",
        ),
    ] {
        let problems = tls(lines);
        assert!(problems.starts_with("taken\n") && problems.contains(why), "{problems}");
    }
    for (lines, why) in [
        ("proxy_protocol = true", "is spoken by nobody"),
        ("trusted_proxies = [\"10.0.0.0/33\"]", "trusted_proxies[0]: does not have the right form"),
        (
            "redirect_https = 443\n[listener.tls]\ncertificates = [\"both.pem\"]",
            "is for listeners without TLS",
        ),
        ("hsts = \"forever\"", "is no Strict-Transport-Security"),
    ] {
        let problems = of(lines);
        assert!(problems.starts_with("refused\n") && problems.contains(why), "{problems}");
    }
    assert!(of("hsts = \"max-age=1\"").contains("is never sent"));
    assert_eq!(
        of("proxy_protocol = true\ntrusted_proxies = [\"10.0.0.0/8\", \"::1\"]\nredirect_https = 443"),
        "taken\n"
    );
}

#[test]
fn certificates_for_engines() {
    let rule = |tls: &str, endpoint: &str| {
        let text = format!("{RULE}{endpoint}\n[tls]\n{tls}\n");
        folder().write("rules/one.toml", text).problems()
    };
    let named = "tls = \"engine.test\"";
    for good in [
        "http2 = true",
        "ca = \"../other.pem\"",
        "ca = \"../other.pem\"\nclient_certificate = \"../both.pem\"",
        "client_certificate = \"../good.pem\"\nclient_key = \"../good.key\"",
    ] {
        assert_eq!(rule(good, named), "taken\n", "{good}");
    }
    for (lines, at, why) in [
        ("ca = \"../none.pem\"", "tls.ca", "cannot be read"),
        ("ca = \"../broken.pem\"", "tls.ca", "cannot be an authority"),
        ("client_certificate = \"../good.pem\"", "tls.client_certificate", "holds no private key"),
        (
            "client_certificate = \"../other.pem\"\nclient_key = \"../good.key\"",
            "tls.client_key",
            "of another",
        ),
        ("client_key = \"../good.key\"", "tls.client_key", "is the key of no certificate"),
    ] {
        let problems = rule(lines, named);
        assert!(
            problems.starts_with("refused\n") && problems.contains(at) && problems.contains(why),
            "{problems}"
        );
    }
    assert!(rule("http2 = true", "").contains("is not used: no endpoint has a `tls` name"));
    assert!(rule("client_certificate = \"../old.pem\"", named).contains("expired "));
}
