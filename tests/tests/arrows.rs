//! The dependency arrows between the crates, as docs/architecture.md draws them: they only point down.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::process::Command;

use serde_json::Value;

/// Each crate and the workspace crates it may depend on; `kvgate-tests` is open to every crate's tests.
const ARROWS: &[(&str, &[&str])] = &[
    (
        "kvgate",
        &[
            "kvgate-core",
            "kvgate-edge",
            "kvgate-engines",
            "kvgate-feed",
            "kvgate-kv",
            "kvgate-prompt",
            "kvgate-sim",
            "kvgate-tiers",
        ],
    ),
    ("kvgate-edge", &[]),
    ("kvgate-sim", &["kvgate-engines", "kvgate-kv", "kvgate-prompt"]),
    ("kvgate-tiers", &["kvgate-core", "kvgate-engines", "kvgate-kv"]),
    ("kvgate-engines", &["kvgate-core", "kvgate-feed", "kvgate-kv", "kvgate-prompt"]),
    ("kvgate-feed", &["kvgate-core", "kvgate-kv"]),
    ("kvgate-kv", &[]),
    ("kvgate-prompt", &[]),
    ("kvgate-core", &[]),
    ("kvgate-tests", &[]),
    ("kvgate-rig", &[]),
    ("kvgate-scoreboard", &["kvgate-rig", "kvgate-tests"]),
    ("kvgate-bench", &["kvgate-core", "kvgate-kv", "kvgate-prompt", "kvgate-tiers"]),
    // an example of a tier of one's own, and of a gateway that has it
    ("kvgate-canary", &["kvgate-core", "kvgate"]),
];

/// Pure crates: no runtime, no sockets, no proxy, at any depth.
const PURE: &[&str] = &["kvgate-core", "kvgate-kv", "kvgate-prompt"];
const IMPURE: &[&str] = &["tokio", "mio", "async-std", "smol", "hyper", "socket2", "pingora"];

fn cargo(args: &[&str]) -> String {
    let run = Command::new(env!("CARGO")).args(args).current_dir(kvgate_tests::root()).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).unwrap()
}

#[test]
fn arrows_point_down() {
    let metadata: Value =
        serde_json::from_str(&cargo(&["metadata", "--no-deps", "--format-version=1"])).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() >= 10, "{} packages", packages.len());
    let mut wrong = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| *known == name) else {
            wrong.push(format!("{name} is not in the table"));
            continue;
        };
        for dependency in package["dependencies"].as_array().unwrap() {
            let to = dependency["name"].as_str().unwrap();
            let ours = packages.iter().any(|p| p["name"] == to);
            let test = dependency["kind"] == "dev" && to == "kvgate-tests";
            if ours && !test && !allowed.contains(&to) {
                wrong.push(format!("{name} -> {to} ({})", dependency["kind"]));
            }
        }
    }
    assert!(wrong.is_empty(), "arrows that docs/architecture.md does not have: {wrong:#?}");
}

#[test]
fn pure_crates_reach_no_runtime_and_no_proxy() {
    for name in PURE {
        let tree =
            cargo(&["tree", "--locked", "-p", name, "-e", "normal", "--prefix=none", "--format={lib}"]);
        let reached: Vec<&str> = tree.lines().filter(|l| !l.is_empty()).collect();
        assert!(reached.len() > 3, "{name}: {tree}");
        let impure: Vec<_> =
            reached.iter().filter(|c| IMPURE.iter().any(|i| *c == i || c.starts_with("pingora"))).collect();
        assert!(impure.is_empty(), "{name} reaches {impure:?}");
    }
}
