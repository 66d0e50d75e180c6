//! Keys that are allowed where they stand, and do nothing there.

use kvgate::config::{self, Diagnostics};

use crate::folder::{Folder, RULE};

/// What is said of a folder that is taken, without where.
fn warnings(folder: &Folder) -> String {
    let config = config::load(&folder.path("gateway.toml"), kvgate_tiers::TIERS).unwrap();
    folder.plain(Diagnostics(config.warnings))
}

#[test]
fn keys_of_the_process() {
    for (gateway, told) in [
        ("[probe]\nmode = \"tcp\"\npath = \"/ready\"\n", Some("probe.path: is not used")),
        ("[probe]\nmode = \"tcp\"\ncodes = [200]\n", Some("probe.codes: is not used")),
        ("[probe]\npath = \"/ready\"\ncodes = [200]\n", None),
        ("[probe]\nmode = \"off\"\ninterval = \"1s\"\n", None),
        ("[probe]\ninterval = \"1s\"\n", Some("probe.interval: makes `timeout` longer than `interval`")),
        ("[probe]\ninterval = \"1s\"\ntimeout = \"1001ms\"\n", Some("found 1001ms and 1s")),
        ("[probe]\ninterval = \"1s\"\ntimeout = \"1s\"\n", None),
        (
            "[connections]\nmax = 100\nmax_per_address = 101\n",
            Some("connections.max_per_address: bounds nobody"),
        ),
        ("[connections]\nmax = 100\nmax_per_address = 100\n", None),
        ("[connections]\nmax = 100\n", None),
        ("[retry]\nattempts = 1\nstatuses = [503]\nbusy = true\n", None),
        (
            "[[listener]]\nredirect_https = 443\n",
            Some("listener[0].redirect_https: leads to a port where no listener"),
        ),
        ("[[listener]]\nredirect_https = 443\ntrusted_proxies = [\"10.0.0.0/8\"]\n", None),
    ] {
        let told_now = warnings(&Folder::with(RULE).write("gateway.toml", gateway));
        match told {
            Some(told) => {
                assert!(told_now.contains(told) && told_now.lines().count() == 1, "{gateway}: {told_now}")
            }
            None => assert_eq!(told_now, "", "{gateway}"),
        }
    }
}

#[test]
fn keys_of_rules_over_those_of_the_process() {
    for (gateway, rule, told) in [
        (
            "[probe]\nmode = \"tcp\"\n",
            "[probe]\npath = \"/\"\n",
            Some("rules/one.toml:2:8: probe.path: is not used"),
        ),
        ("", "[probe]\nmode = \"tcp\"\ncodes = [200]\n", Some("probe.codes: is not used")),
        ("[retry]\nattempts = 1\n", "[retry]\nstatuses = [503]\n", Some("retry.statuses: is not used")),
        ("[retry]\nstatuses = [503]\n", "[retry]\nattempts = 1\n", None),
        (
            "",
            "[retry]\nattempts = 1\nstatuses = [503]\n",
            Some("retry.statuses: is not used: `attempts` is 1"),
        ),
        ("", "[retry]\nattempts = 1\nbusy = true\n", Some("retry.busy: is not used")),
        ("", "[retry]\nattempts = 1\nresend = true\nstatuses = []\nbusy = false\n", None),
        ("", "[retry]\nattempts = 2\nstatuses = [503]\n", None),
    ] {
        let rule = format!("{rule}{}", "[[endpoint]]\naddress = \"127.0.0.1:8001\"\n");
        let folder =
            Folder::with(&format!("tiers = [\"round-robin\"]\n{rule}")).write("gateway.toml", gateway);
        let told_now = warnings(&folder);
        match told {
            Some(told) => assert!(told_now.contains(told.rsplit(": ").nth(1).unwrap()), "{rule}: {told_now}"),
            None => assert_eq!(told_now, "", "{rule}"),
        }
    }
}

#[test]
fn caps_that_hold_for_nobody() {
    let pool = |lines: &str| {
        let rule = format!(
            "tiers = [\"admission\", \"round-robin\"]\n[tier.admission]\n{lines}[[endpoint]]\naddress = \"127.0.0.1:8001\"\n"
        );
        warnings(&Folder::with(&rule))
    };
    assert!(pool("queue_depth = 10\n").contains("tier.admission.queue_depth: is not used: without a cap"));
    assert_eq!(pool("queue_depth = 10\nmax_in_flight = 2\n"), "");
    assert_eq!(pool("queue_depth = 0\nmax_total = 2\n"), "");
    let pair = |ladders: &str, caps: &str| {
        let rule = format!(
            "shape = \"prefill-decode\"\n{ladders}[tier.admission]\n{caps}[[endpoint]]\naddress = \"127.0.0.1:8001\"\nrole = \
             \"prefill\"\n[[endpoint]]\naddress = \"127.0.0.1:8002\"\nrole = \"decode\"\n"
        );
        warnings(&Folder::with(&rule))
    };
    let without = "tiers = [\"admission\", \"session\"]\ndecode_tiers = [\"session\"]\n";
    let turned = "tiers = [\"session\"]\ndecode_tiers = [\"admission\", \"session\"]\n";
    let told = "lacks \"admission\": the caps of [tier.admission] do not hold for ";
    for caps in ["max_in_flight = 4\n", "decode_max_in_flight = 4\n"] {
        assert!(pair(without, caps).contains(&format!("decode_tiers: {told}decode")), "{caps}");
        assert_eq!(
            pair("tiers = [\"admission\", \"session\"]\n", caps),
            "",
            "the usual ladder for decode has it"
        );
    }
    assert!(pair(turned, "max_in_flight = 4\n").contains(&format!("tiers: {told}prefill")));
    assert_eq!(pair(without, "prefill_max_in_flight = 4\n"), "", "that is all that was asked for");
}
