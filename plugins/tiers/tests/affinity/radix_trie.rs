use kvgate_core::*;
use serde_json::json;

use crate::support::{Answered, Fleet};

const TRIE: &str = "radix-trie";

/// A text of so many bytes that no other seed's starts like.
fn text(seed: u8, bytes: usize) -> String {
    char::from(b'a' + seed).to_string().repeat(bytes)
}

/// Asks and answers.
fn say(fleet: &Fleet, ladder: &Ladder, prompt: &str) -> Answered {
    fleet.answer(ladder, Request::default(), Some(prompt), &HeaderMap::new())
}

fn turns(fleet: &Fleet) -> Ladder {
    fleet.ladder(&[(TRIE, json!({})), ("round-robin", json!({}))])
}

#[test]
fn conversations_stay_where_they_were_whoever_chose_first() {
    let fleet = Fleet::new(&[1; 4]);
    let ladder = turns(&fleet);
    let mut conversations: Vec<String> = (0..8).map(|seed| text(seed, 200)).collect();
    for (at, conversation) in conversations.iter().enumerate() {
        let first = say(&fleet, &ladder, conversation);
        assert_eq!((first.endpoint, first.tier), (at % 4, "round-robin"));
        assert_eq!(first.miss(TRIE), "unseen");
    }
    for turn in 0..3 {
        for (at, conversation) in conversations.iter_mut().enumerate() {
            let known = conversation.len() as u64;
            conversation.push_str(&text(10 + turn, 300));
            let next = say(&fleet, &ladder, conversation);
            assert_eq!((next.endpoint, next.tier), (at % 4, TRIE));
            assert_eq!(next.record.candidates[0].overlap, known, "the whole turn before");
        }
    }
    assert!(fleet.endpoints.iter().all(|e| e.engine.in_flight() == 0));
}

/// A prompt that another tier chose for before this one was even asked is remembered, too.
#[test]
fn every_final_choice_counts_and_no_other() {
    let fleet = Fleet::new(&[1; 4]);
    let pinned = fleet.ladder(&[("persist", json!({"by": "header", "name": "x-key"})), (TRIE, json!({}))]);
    let mut request = Request::default();
    request.headers.insert("x-key", "7".parse().unwrap());
    let prompt = text(0, 100);
    let first = fleet.answer(&pinned, request.clone(), Some(&prompt), &HeaderMap::new());
    assert_eq!(first.tier, "persist");
    let next = say(&fleet, &pinned, &prompt);
    assert_eq!((next.tier, next.endpoint), (TRIE, first.endpoint));
    // chosen, but never answered
    let unanswered = text(1, 100);
    drop(fleet.choose(&pinned, request, Some(&unanswered), Role::Any));
    assert_eq!(say(&fleet, &pinned, &unanswered).miss(TRIE), "unseen");
}

#[test]
fn a_part_of_an_edge_counts_and_too_small_a_share_does_not() {
    let fleet = Fleet::new(&[1; 3]);
    let ladder = turns(&fleet);
    let prompt = text(0, 1000);
    assert_eq!(say(&fleet, &ladder, &prompt).endpoint, 0);
    let parting = |known: usize, new: usize| prompt[..known].to_owned() + &text(1, new);
    let shallow = fleet.choose(&ladder, Request::default(), Some(&parting(199, 801)), Role::Any);
    assert_eq!((shallow.miss(TRIE), shallow.tier), ("shallow", "round-robin"));
    for (known, new) in [(200, 800), (1, 4), (1000, 4000), (1000, 0)] {
        let found = fleet.choose(&ladder, Request::default(), Some(&parting(known, new)), Role::Any);
        assert_eq!((found.tier, found.endpoint), (TRIE, 0), "{known} of {}", known + new);
        assert_eq!(found.record.candidates[0].overlap, known as u64);
    }
    let strict = fleet.ladder(&[(TRIE, json!({"threshold_pct": 100}))]);
    let found = fleet.choose(&strict, Request::default(), Some(&parting(1000, 1)), Role::Any);
    assert_eq!(found.miss(TRIE), "shallow");
}

#[test]
fn a_fleet_out_of_balance_is_left_to_the_next_tier() {
    let fleet = Fleet::new(&[1; 3]);
    let ladder = fleet.ladder(&[(TRIE, json!({}))]);
    let prompt = text(0, 1000);
    let held: Vec<_> = (0..4).map(|_| say(&fleet, &ladder, &prompt)).collect();
    assert!(held[1..].iter().all(|next| (next.tier, next.endpoint) == (TRIE, held[0].endpoint)));
    // 4 on one and 0 on the others: 3 is the most
    let spilled = say(&fleet, &ladder, &prompt);
    assert_eq!((spilled.miss(TRIE), spilled.tier), ("imbalance", "min-load"));
    assert_ne!(spilled.endpoint, held[0].endpoint);
    // only those that may be chosen are compared
    let idle = fleet.endpoints.iter().filter(|e| e.engine.in_flight() == 0);
    idle.for_each(|e| e.engine.set_healthy(false));
    let after = say(&fleet, &ladder, &prompt);
    assert_eq!(
        (after.tier, after.endpoint),
        (TRIE, spilled.endpoint),
        "the less loaded of the two that saw it"
    );
    fleet.endpoints.iter().for_each(|e| e.engine.set_healthy(true));
    let patient = fleet.ladder(&[(TRIE, json!({"imbalance": 4}))]);
    assert_eq!(say(&fleet, &patient, &prompt).tier, TRIE);
    let strict = fleet.ladder(&[(TRIE, json!({"imbalance": 0}))]);
    assert_eq!(say(&fleet, &strict, &prompt).miss(TRIE), "imbalance");
    drop((held, spilled, after));
    assert_eq!(say(&fleet, &strict, &prompt).tier, TRIE);
}

#[test]
fn an_excluded_holder_falls_back_to_the_next_deepest() {
    let fleet = Fleet::new(&[1; 3]);
    let ladder = turns(&fleet);
    let (whole, half) = (text(0, 1000), text(0, 500));
    assert_eq!(say(&fleet, &ladder, &half).endpoint, 0);
    // the longer prompt is seen by the second endpoint alone
    fleet.endpoints[0].engine.set_admin(Admin::Draining);
    assert_eq!(say(&fleet, &ladder, &whole).endpoint, 1);
    fleet.endpoints[0].engine.set_admin(Admin::Active);
    let ask = || fleet.choose(&ladder, Request::default(), Some(&whole), Role::Any);
    assert_eq!((ask().endpoint, ask().record.candidates[0].overlap), (1, 1000));
    fleet.endpoints[1].engine.set_healthy(false);
    assert_eq!((ask().endpoint, ask().tier, ask().record.candidates[0].overlap), (0, TRIE, 500));
    fleet.endpoints[0].engine.set_admin(Admin::Draining);
    assert_eq!((ask().endpoint, ask().miss(TRIE)), (2, "excluded"));
}

/// Several that saw the same: one prompt keeps to one of them, many prompts use all.
#[test]
fn equals_share_prompts_and_the_less_loaded_wins() {
    let fleet = Fleet::new(&[1; 4]);
    let ladder = turns(&fleet);
    let start = text(0, 400);
    for endpoint in 0..4 {
        let others = |e: &&Endpoint| e.index != endpoint;
        fleet.endpoints.iter().filter(others).for_each(|e| e.engine.set_healthy(false));
        assert_eq!(say(&fleet, &ladder, &start).endpoint, endpoint);
        fleet.endpoints.iter().for_each(|e| e.engine.set_healthy(true));
    }
    let ask = |end: u32| {
        let prompt = format!("{start}{end}");
        fleet.choose(&ladder, Request::default(), Some(&prompt), Role::Any)
    };
    let mut count = [0; 4];
    for end in 0..400 {
        let chosen = ask(end);
        assert_eq!((chosen.tier, chosen.record.candidates.len()), (TRIE, 4));
        let first = chosen.endpoint;
        drop(chosen);
        assert_eq!(ask(end).endpoint, first);
        count[first] += 1;
    }
    assert!(count.iter().all(|n| (50..150).contains(n)), "{count:?}");
    let busy = ask(7);
    assert_ne!(ask(7).endpoint, busy.endpoint);
}

#[test]
fn models_adapters_and_salts_are_apart() {
    let fleet = Fleet::new(&[1; 2]);
    let ladder = fleet.ladder(&[(TRIE, json!({}))]);
    let prompt = text(0, 100);
    let of = |(model, adapter, salt): (&str, Option<&str>, Option<&str>)| Request {
        model: Some(model.into()),
        adapter: adapter.map(Into::into),
        cache_salt: salt.map(Into::into),
        ..Request::default()
    };
    let worlds = [
        ("base", None, None),
        ("sql", None, None),
        ("base", Some("sql"), None),
        ("base", Some("law"), None),
        ("base", None, Some("pepper")),
        ("base", Some("pepper"), Some("sql")),
        ("base", None, Some("")),
    ];
    for world in worlds {
        let first = fleet.answer(&ladder, of(world), Some(&prompt), &HeaderMap::new());
        assert_eq!(first.miss(TRIE), "unseen", "{world:?}");
    }
    for world in worlds {
        assert_eq!(fleet.choose(&ladder, of(world), Some(&prompt), Role::Any).tier, TRIE);
    }
}

#[test]
fn prefill_counts_and_decode_does_not() {
    let mut fleet = Fleet::new(&[]);
    fleet.endpoints =
        (0..4).map(|at| fleet.endpoint(at, if at < 2 { Role::Prefill } else { Role::Decode }, 1)).collect();
    let ladder = turns(&fleet);
    let prompt = text(0, 100);
    let ask = |role| fleet.ask(&ladder, Request::default(), Some(&prompt), role, Some(&HeaderMap::new()));
    assert_eq!((ask(Role::Decode).miss(TRIE), ask(Role::Decode).endpoint), ("decode", 3));
    assert_eq!(ask(Role::Prefill).miss(TRIE), "unseen", "what decodes it does not count");
    assert_eq!((ask(Role::Prefill).tier, ask(Role::Prefill).endpoint), (TRIE, 0));
    let none = fleet.choose(&ladder, Request::default(), None, Role::Prefill);
    assert_eq!(none.miss(TRIE), "text_empty");
}

/// A reload keeps what is known, by engine; an engine that is gone takes what it saw along, and room comes back.
#[test]
fn reloads_keep_what_stays_and_only_that() {
    let mut fleet = Fleet::new(&[1; 3]);
    let ladder = turns(&fleet);
    for seed in 0..6 {
        assert_eq!(say(&fleet, &ladder, &text(seed, 10_000)).endpoint, usize::from(seed % 3));
    }
    let (nodes, bytes) = (fleet.metric("loxilb_pd_trie_nodes"), fleet.metric("kvgate_radix_trie_bytes"));
    assert_eq!(nodes, 7, "a top, and one for each prompt");
    assert!((60_000..70_000).contains(&bytes), "{bytes}");
    fleet.endpoints.remove(0);
    let reloaded = turns(&fleet);
    drop(ladder);
    for seed in [1, 2, 4, 5] {
        let next = say(&fleet, &reloaded, &text(seed, 10_000));
        assert_eq!((next.tier, next.endpoint), (TRIE, usize::from(seed % 3)));
    }
    assert_eq!(fleet.metric("loxilb_pd_trie_nodes"), 5);
    assert!(fleet.metric("kvgate_radix_trie_bytes") < bytes - 20_000);
    for seed in [0, 3] {
        assert_eq!(say(&fleet, &reloaded, &text(seed, 10_000)).miss(TRIE), "unseen");
    }
    // less room: the oldest give way at once
    let small = fleet.ladder(&[(TRIE, json!({"max_nodes": 64, "max_bytes": "4MiB"}))]);
    for seed in 0..200u32 {
        let prompt = format!("{seed}-{}", text(7, 100_000));
        say(&fleet, &small, &prompt);
        assert!(fleet.metric("loxilb_pd_trie_nodes") <= 64);
        assert!(fleet.metric("kvgate_radix_trie_bytes") <= 4 << 20);
        assert_eq!(say(&fleet, &small, &prompt).tier, TRIE);
    }
    assert!(fleet.metric("kvgate_radix_trie_evicted_nodes_total") > 150);
    assert_eq!(say(&fleet, &small, &text(1, 10_000)).miss(TRIE), "unseen");
}
