//! Whoever does what a hint says has a file that is taken.

use crate::folder::{Folder, RULE};

const ENDPOINT: &str = "[[endpoint]]\naddress = \"127.0.0.1:8001\"\n";

/// What a hint proposes to write.
fn proposed(problems: &str) -> Option<&str> {
    let (_, hint) = problems.lines().nth(1)?.rsplit_once("; ")?;
    [
        "write ",
        "for every address write ",
        "give it a unit: ",
        "did you mean ",
        "write the name in the engine's certificate, as ",
    ]
    .into_iter()
    .filter_map(|start| hint.strip_prefix(start))
    .next_back()
    .map(|text| text.trim_end_matches(" without quotes").trim_end_matches('?'))
}

/// A mistake in a table of `gateway.toml`, or of a rule, is told, and the hint followed to the letter.
fn follow(folder: impl Fn(&str) -> Folder, key: &str, value: &str) {
    let problems = folder(value).problems();
    assert!(problems.starts_with("refused"), "{key} = {value}: {problems}");
    let proposed = proposed(&problems).unwrap_or_else(|| panic!("{key} = {value}: {problems}"));
    let after = folder(proposed).problems();
    assert!(after.starts_with("taken"), "{key} = {value} became {proposed}: {after}");
}

#[test]
fn hints_of_the_process_lead_to_files_that_are_taken() {
    for (table, key, value) in [
        ("server", "threads", "\"4\""),
        ("server", "grace_period", "30"),
        ("server", "reload_debounce", "200"),
        ("server", "warm_up", "\"10\""),
        ("[listener]", "name", "5"),
        ("[listener]", "address", "8080"),
        ("[listener]", "address", "\":8080\""),
        ("[listener]", "address", "\"localhost:8080\""),
        ("[listener]", "address", "\"8080\""),
        ("[listener]", "expose_routing", "\"yes\""),
        ("[listener]", "proxy_protocol", "0"),
        ("[listener]", "trusted_proxies", "\"10.0.0.0/8, 127.0.0.1\""),
        ("[listener]", "redirect_https", "\"443\""),
        ("listener.tls", "http2", "\"off\""),
        ("listener.tls", "min_version", "1.3"),
        ("listener.tls", "min_version", "\"1.1\""),
        ("connections", "max", "\"1000\""),
        ("retry", "attempts", "\"2\""),
        ("retry", "busy", "\"false\""),
        ("retry", "resend", "1"),
        ("retry", "statuses", "500"),
        ("retry", "statuses", "\"500, 503\""),
        ("breaker", "open_for", "30"),
        ("breaker", "open_for", "\"5000\""),
        ("breaker", "half_open", "\"2\""),
        ("probe", "mode", "\"HTTP\""),
        ("probe", "mode", "false"),
        ("probe", "mode", "\"https\""),
        ("probe", "path", "\"health\""),
        ("probe", "path", "\"http://engine:8000/health?x=1\""),
        ("probe", "codes", "200"),
        ("probe", "codes", "\"200\""),
        ("probe", "timeout", "500"),
        ("timeouts", "connect", "500"),
        ("timeouts", "connect", "\"500\""),
    ] {
        let folder = |value: &str| {
            let header =
                if table == "listener.tls" { "[[listener]]\n[listener.tls]" } else { &format!("[{table}]") };
            Folder::with(RULE).write("gateway.toml", format!("{header}\n{key} = {value}\n"))
        };
        follow(folder, key, value);
    }
}

#[test]
fn hints_of_rules_lead_to_files_that_are_taken() {
    for (key, value) in [
        ("tls", "true"),
        ("tls", "{ ca = \"ca.pem\" }"),
        ("tls", "\"engine:8000\""),
        ("tls", "\"https://engine:8000/v1\""),
        ("role", "\"Any\""),
        ("weight", "\"3\""),
        ("kv_events", "\"127.0.0.1:5557\""),
    ] {
        let rule = |value: &str| {
            format!("tiers = [\"kv-exact\"]\n[match]\nmodels = [\"m\"]\n{ENDPOINT}{key} = {value}\n")
        };
        follow(|value| Folder::with(&rule(value)), key, value);
    }
    for address in [
        "8001",
        "\"8001\"",
        "\"http://engine:8000/v1\"",
        "\"http://engine\"",
        "\"https://engine/v1\"",
        "\"engine\"",
    ] {
        let rule = |address: &str| format!("tiers = [\"round-robin\"]\n[[endpoint]]\naddress = {address}\n");
        let bare = |problems: &str| proposed(problems).map(|text| text.split(',').next().unwrap().to_owned());
        let problems = Folder::with(&rule(address)).problems();
        let proposed = bare(&problems.replace("add a port: ", "write ")).expect(&problems);
        assert_eq!(Folder::with(&rule(&proposed)).problems(), "taken\n", "{address}: {problems}");
    }
    for (key, value) in
        [("tiers", "\"session, round-robin\""), ("explain", "\"on\""), ("name", "7"), ("id", "\"7\"")]
    {
        let tiers = if key == "tiers" { "" } else { "tiers = [\"round-robin\"]\n" };
        follow(|value| Folder::with(&format!("{tiers}{key} = {value}\n{ENDPOINT}")), key, value);
    }
}

#[test]
fn nothing_is_proposed_that_would_not_be_taken() {
    for (table, key, value) in [
        ("server", "threads", "\"many\""),
        ("server", "threads", "\"9999\""),
        ("retry", "attempts", "true"),
        ("retry", "statuses", "\"5xx\""),
        ("retry", "statuses", "200"),
        ("probe", "path", "\"a b\""),
        ("[listener]", "address", "\"edge:http\""),
        ("[listener]", "address", "99999"),
        ("[listener]", "trusted_proxies", "\"10.0.0.0/33\""),
        ("log", "format", "false"),
        ("timeouts", "connect", "99999999999999999999"),
    ] {
        let folder = Folder::with(RULE).write("gateway.toml", format!("[{table}]\n{key} = {value}\n"));
        let problems = folder.problems();
        let line = problems.lines().nth(1).unwrap_or_default();
        assert!(line.contains(key) && proposed(&problems).is_none(), "{key} = {value}: {problems}");
    }
}

#[test]
fn a_table_that_is_none_has_its_header_named() {
    let folder = |file: &str| Folder::with(RULE).write("gateway.toml", file);
    let problems = folder("[[listener]]\ntls = true\n").problems();
    assert!(problems.contains("remove it, and write the header [listener.tls] above"), "{problems}");
    assert_eq!(folder("[[listener]]\n[listener.tls]\n").problems(), "taken\n");
}
