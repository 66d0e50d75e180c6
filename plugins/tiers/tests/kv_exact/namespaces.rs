//! LoRA adapters and salts: what is held for one serves no other, and neither does what is expected.

use kvgate_core::*;
use kvgate_kv::hash::{Lora, Namespace};
use kvgate_kv::mirror::View;
use serde_json::{Value, json};

use crate::support::*;

const MODES: [(&str, View); 2] = [("auto", View::Own), ("strict", View::Published)];

fn config(mode: &str) -> Value {
    json!({
        "lora": {"sql": "/a/sql", "law": "/a/law"}, "contract": contract_keys(mode), "law": {"mode": "off"},
        "seeding": {"every": 0},
    })
}

/// Base model, two adapters, two salts, an adapter with a salt, and one that is named beside the model.
fn worlds() -> [(Request, Namespace); 7] {
    let both = Namespace { cache_salt: Some("t1".into()), ..lora("sql") };
    let unlisted = Lora { name: "poems".into(), path: String::new() };
    let beside = Request { adapter: Some("poems".into()), ..of("tiny", None) };
    [
        (beside, Namespace { lora: Some(unlisted), cache_salt: None }),
        (of("tiny", None), Namespace::default()),
        (of("sql", None), lora("sql")),
        (of("law", None), lora("law")),
        (of("tiny", Some("t1")), salt("t1")),
        (of("tiny", Some("t2")), salt("t2")),
        (of("sql", Some("t1")), both),
    ]
}

#[test]
fn what_is_held_for_one_serves_no_other() {
    for (mode, view) in MODES {
        for (holder, (_, namespace)) in worlds().iter().enumerate() {
            let mut fleet = Fleet::new(1);
            fleet.holds(0, view, 16, &tokens(64), namespace);
            let ladder = fleet.ladder(config(mode));
            for (asker, (request, _)) in worlds().into_iter().enumerate() {
                let flight = fleet.send(&ladder, request, &tokens(64));
                let expected = if asker == holder { Ok((0, None)) } else { Err("no_worker") };
                assert_eq!(flight.outcome(), expected, "{mode}: {asker} asks for what {holder} holds");
                flight.end(&ladder, Outcome::complete(200));
            }
        }
    }
}

#[test]
fn what_is_expected_for_one_serves_no_other() {
    for (mode, view) in MODES {
        let mut fleet = Fleet::new(1);
        fleet.follows_all(view);
        let ladder = fleet.ladder(config(mode));
        for (sender, (request, _)) in worlds().into_iter().enumerate() {
            let first = fleet.send(&ladder, request, &tokens(64));
            assert_eq!(first.outcome(), Err("no_worker"));
            for (asker, (request, _)) in worlds().into_iter().enumerate() {
                let flight = fleet.send(&ladder, request, &tokens(64));
                let expected = if asker == sender { Ok((0, Some("speculative"))) } else { Err("no_worker") };
                assert_eq!(flight.outcome(), expected, "{mode}: {asker} asks for what {sender} sent");
                flight.end(&ladder, Outcome::complete(200));
            }
            first.end(&ladder, Outcome::complete(200));
        }
    }
}

/// An adapter is the same one whether it is asked for as the model or beside it.
#[test]
fn a_listed_adapter_is_known_by_either_name() {
    for (mode, view) in MODES {
        let mut fleet = Fleet::new(1);
        fleet.holds(0, view, 16, &tokens(64), &lora("sql"));
        let ladder = fleet.ladder(config(mode));
        for (model, adapter, found) in [
            ("tiny", Some("sql"), true),
            ("sql", Some("law"), true),
            ("tiny", Some("law"), false),
            ("tiny", Some(""), false),
        ] {
            let request = Request { adapter: adapter.map(Into::into), ..of(model, None) };
            let flight = fleet.send(&ladder, request, &tokens(64));
            assert_eq!(flight.outcome().is_ok(), found, "{mode}: {model} {adapter:?}");
            flight.end(&ladder, Outcome::complete(200));
        }
    }
}
