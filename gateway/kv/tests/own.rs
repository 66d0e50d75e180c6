//! Own hashes: a prompt and the events about it must agree, and nothing else may look like it.
#![allow(clippy::unwrap_used)]

use kvgate_kv::event::{Event, Stored, decode};
use kvgate_kv::hash::{Lora, Namespace};
use kvgate_kv::own::{OwnHasher, ROOT, extras_of_event, extras_of_query, mix};
use kvgate_tests::{capture, fixture_json};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::HashMap;

fn namespace(lora: Option<&str>, salt: Option<&str>) -> Namespace {
    // the path is the engine's affair: no event holds it
    let lora = lora.map(|name| Lora { name: name.into(), path: "/somewhere".into() });
    Namespace { lora, cache_salt: salt.map(str::to_owned) }
}

/// What `use_it` makes of the only event of a payload that holds `event`.
fn with_event<T>(event: &Value, use_it: impl FnOnce(&Stored<'_>) -> T) -> T {
    let payload = rmp_serde::to_vec(&json!([1.0, [event], 0])).unwrap();
    let batch = decode(&payload).unwrap();
    match &batch.events[..] {
        [Event::Stored(stored)] => use_it(stored),
        other => panic!("{other:?}"),
    }
}

/// An event of blocks of four tokens, with more fields.
fn event(tokens: &[u32], parent: Option<u64>, fields: Value) -> Value {
    let hashes: Vec<usize> = (0..tokens.len() / 4).collect();
    let mut event = json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": tokens, "block_size": 4});
    event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    event
}

fn fold(token_hashes: Vec<u64>) -> Vec<u64> {
    let mut own = ROOT;
    token_hashes
        .into_iter()
        .map(|t| {
            own = mix(own, t);
            own
        })
        .collect()
}

fn extras(event: &Value, index: usize) -> Vec<u8> {
    with_event(event, |stored| {
        let keys = stored.extra_keys.and_then(|keys| keys.iter().nth(index));
        let mut out = Vec::new();
        extras_of_event(stored, index, keys, &mut out);
        out
    })
}

fn query(namespace: &Namespace, index: usize) -> Vec<u8> {
    let mut out = Vec::new();
    extras_of_query(namespace, index, &mut out);
    out
}

/// Follows the events of live engines and looks every block up as the prompt that led to it.
#[test]
fn events_of_live_engines_agree_with_their_prompts() {
    let hasher = OwnHasher::new();
    let mut blocks = HashMap::new();
    for stream in [
        "bs16_sha256cbor_seed0_int",
        "evict_24blocks_topic",
        "real_v0.28.0_bs16_sha256cbor_seed0",
        "v_sha256pickle_s0",
        "v_shacbor_s0_bytes",
    ] {
        // engine hash -> own hash, all tokens so far, namespace
        let mut held: HashMap<u64, (u64, Vec<u32>, Namespace)> = HashMap::new();
        for record in capture(&format!("vllm/streams/{stream}.bin")) {
            let payload = record.frames.last().unwrap();
            for event in decode(payload).unwrap().events {
                let Event::Stored(stored) = event else { continue };
                let token_hashes = hasher.of_event(&stored).unwrap();
                assert_eq!(token_hashes.len(), stored.hashes.len());
                let (mut own, mut prompt, namespace) = match stored.parent {
                    Some(parent) => held[&parent].clone(),
                    None => {
                        let keys = stored.extra_keys.unwrap().iter().next().unwrap();
                        let mut keys: Vec<String> =
                            rmp_serde::from_slice::<Option<_>>(keys).unwrap().unwrap_or_default();
                        let salt = if keys.len() > usize::from(stored.lora_name.is_some()) {
                            keys.pop()
                        } else {
                            None
                        };
                        (ROOT, Vec::new(), self::namespace(stored.lora_name, salt.as_deref()))
                    }
                };
                let tokens = stored.tokens.unwrap();
                for ((block, t), hash) in tokens.chunks(16).zip(token_hashes).zip(&stored.hashes) {
                    own = mix(own, t);
                    prompt.extend(block);
                    let chain = hasher.chain(&prompt, 16, &namespace);
                    assert_eq!(chain.last(), Some(&own), "{stream}");
                    let kind = (namespace.lora.is_some(), namespace.cache_salt.is_some());
                    *blocks.entry(kind).or_insert(0) += 1;
                    held.insert(*hash, (own, prompt.clone(), namespace.clone()));
                }
            }
        }
        // what the engine tells apart, we tell apart
        let mut owns: Vec<_> = held.values().map(|(own, ..)| own).collect();
        owns.sort();
        owns.dedup();
        assert_eq!(owns.len(), held.len());
    }
    let expected = [((false, false), 1060), ((false, true), 36), ((true, false), 3), ((true, true), 3)];
    assert_eq!(blocks, HashMap::from(expected));
}

#[test]
fn adapters_and_salts_of_live_records() {
    let hasher = OwnHasher::with_key(7);
    let records = fixture_json("vllm/e2e_lora_bs16.json");
    let records = records.as_array().unwrap();
    assert_eq!(records.len(), 3);
    let mut first = Vec::new();
    for record in records {
        let namespace = namespace(record["lora_name"].as_str(), record["cache_salt"].as_str());
        let tokens: Vec<u32> = serde_json::from_value(record["token_ids"].clone()).unwrap();
        let hashes: Vec<u64> = record["published"]
            .as_array()
            .unwrap()
            .iter()
            .map(|h| h.as_str().unwrap().parse().unwrap())
            .collect();
        let event = json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": null,
            "token_ids": tokens, "block_size": 16, "lora_name": record["lora_name"],
            "extra_keys": record["events_extra_keys"]});
        let chain = hasher.chain(&tokens, 16, &namespace);
        assert_eq!(with_event(&event, |stored| fold(hasher.of_event(stored).unwrap())), chain);
        first.push(chain[0]);
    }
    assert!(first[0] != first[1] && first[1] != first[2] && first[0] != first[2]);
}

#[test]
fn every_way_to_say_adapter_and_salt() {
    let tokens: Vec<u32> = (0..12).collect();
    let hasher = OwnHasher::with_key(1);
    for (fields, lora, salt) in [
        (json!({}), None, None),
        (json!({"extra_keys": [null, [], null]}), None, None),
        (json!({"extra_keys": [["s"], null, null]}), None, Some("s")),
        (json!({"cache_salt": "s"}), None, Some("s")),
        (json!({"cache_salt": ""}), None, None),
        (json!({"cache_salt": "s", "extra_keys": [["s"], null, null]}), None, Some("s")),
        (json!({"lora_name": "l", "lora_id": 1}), Some("l"), None),
        (json!({"lora_name": "l", "cache_salt": "s"}), Some("l"), Some("s")),
        (json!({"lora_name": "l", "extra_keys": [["l"], ["l"], ["l"]]}), Some("l"), None),
        (
            json!({"lora_name": "l", "lora_id": 1, "extra_keys": [["l", "s"], ["l"], ["l"]]}),
            Some("l"),
            Some("s"),
        ),
        // the salt happens to be the adapter's name
        (json!({"lora_name": "l", "extra_keys": [["l", "l"], ["l"], ["l"]]}), Some("l"), Some("l")),
    ] {
        let event = event(&tokens, None, fields);
        let owns = with_event(&event, |stored| fold(hasher.of_event(stored).unwrap()));
        assert_eq!(owns, hasher.chain(&tokens, 4, &namespace(lora, salt)), "{event}");
    }
    // an event that continues a prompt: the salt was the first block's
    let plain = hasher.token_hash(&[1, 2, 3, 4], &[]);
    let later = event(&[1, 2, 3, 4], Some(5), json!({"cache_salt": "s"}));
    assert_eq!(with_event(&later, |stored| hasher.of_event(stored)), Some(vec![plain]));
}

#[test]
fn what_no_prompt_can_ask_for_is_foreign() {
    let foreign = |parent: Option<u64>, index: usize, fields: Value| {
        let bytes = extras(&event(&[0; 8], parent, fields), index);
        // a prompt's extras are empty or start with another tag
        assert_eq!(bytes[0], 3);
        bytes
    };
    let mut all = vec![
        foreign(None, 0, json!({"extra_keys": [[["img", 3]], null]})),
        foreign(None, 0, json!({"extra_keys": [[["img", 4]], null]})),
        foreign(None, 1, json!({"extra_keys": [null, [["img", -13]]]})),
        foreign(None, 0, json!({"extra_keys": [[["img", 3], "salt"], null]})),
        foreign(None, 0, json!({"lora_name": "l", "extra_keys": [["l", ["img", 0], "s"], null]})),
        foreign(None, 0, json!({"extra_keys": [["img", "salt"], null]})),
        foreign(None, 0, json!({"extra_keys": [[7], null]})),
        foreign(None, 0, json!({"extra_keys": [["a", "b", "c"], null]})),
        foreign(None, 0, json!({"extra_keys": [[null], null]})),
        // a string past the first block
        foreign(None, 1, json!({"extra_keys": [null, ["s"]]})),
        foreign(Some(9), 0, json!({"extra_keys": [["t"], null]})),
        foreign(None, 1, json!({"lora_name": "l", "extra_keys": [["l"], ["l", "s"]]})),
        // an adapter by number alone, or under two names
        foreign(None, 0, json!({"lora_id": 1})),
        foreign(None, 0, json!({"lora_id": 2})),
        foreign(None, 0, json!({"lora_id": 1, "extra_keys": [["s"], null]})),
        foreign(None, 0, json!({"lora_name": "l", "extra_keys": [["m"], null]})),
        foreign(None, 0, json!({"lora_name": "l", "extra_keys": [["m", "l"], null]})),
        // two salts
        foreign(None, 0, json!({"cache_salt": "a", "extra_keys": [["b"], null]})),
    ];
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count);
    // embeddings: a digest, which JSON cannot hold
    let head = b"\x92\x00\x91\x99\xabBlockStored";
    let fields = [0x91, 1, 0xc0, 0x91, 2, 1, 0xc0, 0xc0, 0xc0, 0x91, 0x91, 0xc4, 2, 8, 8];
    let payload = [&head[..], &fields].concat();
    let batch = decode(&payload).unwrap();
    let Event::Stored(stored) = &batch.events[0] else { panic!("{batch:?}") };
    let mut out = Vec::new();
    extras_of_event(stored, 0, stored.extra_keys.unwrap().iter().next(), &mut out);
    assert_eq!(out[0], 3);
}

#[test]
fn events_without_usable_tokens_have_no_hashes() {
    let hasher = OwnHasher::with_key(1);
    let none =
        |event: Value| with_event(&event, |stored| assert_eq!(hasher.of_event(stored), None, "{event}"));
    let mut short = event(&[1; 8], None, json!({}));
    short["token_ids"] = json!(vec![1; 7]);
    none(short);
    none(event(&[1; 8], None, json!({"block_size": 0})));
    none(event(&[1; 8], None, json!({"block_size": u32::MAX})));
    none(event(&[1; 8], None, json!({"token_ids": [[1, 2], [2, 3]]})));
    let empty = with_event(&event(&[], None, json!({})), |stored| hasher.of_event(stored));
    assert_eq!(empty, Some(Vec::new()));
}

#[test]
fn the_key_matters_and_is_kept() {
    let hash = |hasher: &OwnHasher| hasher.token_hash(&[1, 2, 3], b"x");
    assert_eq!(hash(&OwnHasher::with_key(1)), hash(&OwnHasher::with_key(1)));
    assert_ne!(hash(&OwnHasher::with_key(1)), hash(&OwnHasher::with_key(2)));
    let random = OwnHasher::new();
    assert_eq!(hash(&random), hash(&random.clone()));
    assert_ne!(hash(&random), hash(&OwnHasher::new()));
    assert_eq!(format!("{random:?}"), "OwnHasher { .. }");
    assert!(random.chain(&[1, 2], 0, &Namespace::default()).is_empty());
}

#[test]
fn mix_is_never_zero() {
    assert_eq!(mix(5, 5), 1);
    assert_ne!(mix(5, 6), mix(6, 6));
}

proptest! {
    #[test]
    fn a_chain_is_the_fold_of_its_blocks(
        tokens in prop::collection::vec(any::<u32>(), 0..300),
        block_size in 1_usize..80,
        lora in proptest::option::of(".{0,9}"),
        salt in proptest::option::of(".{0,9}"),
    ) {
        let hasher = OwnHasher::with_key(3);
        let namespace = namespace(lora.as_deref(), salt.as_deref());
        let blocks = tokens.chunks_exact(block_size).enumerate();
        let naive = blocks.map(|(i, block)| hasher.token_hash(block, &query(&namespace, i))).collect();
        prop_assert_eq!(hasher.chain(&tokens, block_size, &namespace), fold(naive));
    }

    /// Namespaces that differ have different extras, and so do tokens and extras that read the same in a row.
    #[test]
    fn namespaces_are_told_apart(
        a in proptest::option::of("[ab]{0,3}"), b in proptest::option::of("[ab]{0,3}"),
        c in proptest::option::of("[ab]{0,3}"), d in proptest::option::of("[ab]{0,3}"),
        tokens in prop::collection::vec(0_u32..3, 0..20),
    ) {
        // an empty salt is none
        let normal = |s: &Option<String>| s.clone().filter(|s| !s.is_empty());
        let one = query(&namespace(a.as_deref(), b.as_deref()), 0);
        let two = query(&namespace(c.as_deref(), d.as_deref()), 0);
        prop_assert_eq!(one == two, a == c && normal(&b) == normal(&d));
        let hasher = OwnHasher::with_key(3);
        prop_assert_eq!(hasher.token_hash(&tokens, &one) == hasher.token_hash(&tokens, &two), one == two);
        let mut longer = tokens.clone();
        longer.extend(one.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())));
        prop_assert_eq!(
            hasher.token_hash(&longer, &[]) == hasher.token_hash(&tokens, &one),
            one.is_empty()
        );
    }

    /// Whatever strings an event's keys hold: they are foreign, or those of exactly one prompt.
    #[test]
    fn strings_mean_one_prompt_or_none(
        name in proptest::option::of("[ab]{1,2}"),
        keys in prop::collection::vec("[ab]{1,2}", 0..4),
        first: bool,
    ) {
        let event = event(&[0; 4], (!first).then_some(1), json!({"lora_name": name, "extra_keys": [keys]}));
        let found = extras(&event, 0);
        let index = usize::from(!first);
        let salts = if first { vec![None, keys.first(), keys.get(1)] } else { vec![None] };
        let prompts: Vec<_> = salts
            .into_iter()
            .map(|salt| query(&namespace(name.as_deref(), salt.map(String::as_str)), index))
            .collect();
        prop_assert!(found.first() == Some(&3) || prompts.contains(&found));
        // with the adapter's name in its place, or without an adapter, one more string is the salt
        let rest = match (&name, &keys[..]) {
            (Some(n), [k, rest @ ..]) if n == k => rest,
            (None, rest) => rest,
            (Some(_), rest) => { prop_assert!(rest.is_empty() || found[0] == 3); return Ok(()) }
        };
        if let ([salt], true) = (rest, first) {
            prop_assert_eq!(found, query(&namespace(name.as_deref(), Some(salt)), 0));
        }
    }
}
