//! Event decoding against captures of live engines, the encodings of 19 engine versions, and hostile bytes.
#![allow(clippy::unwrap_used)]

use kvgate_kv::event::{Batch, DecodeError, Event, REASONS, Removed, Stored, decode};
use kvgate_kv::hash::{Algorithm, Contract, Digest, ExtraKey, ExtraKeys, Scratch};
use kvgate_tests::{capture, fixture_json, golden};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::HashMap;

fn hex(s: &str) -> Vec<u8> {
    (0..s.len() / 2).map(|i| u8::from_str_radix(&s[2 * i..2 * i + 2], 16).unwrap()).collect()
}

fn stored<'a, 'b>(event: &'b Event<'a>) -> &'b Stored<'a> {
    match event {
        Event::Stored(stored) => stored,
        other => panic!("not stored: {other:?}"),
    }
}

fn text(v: Option<&str>) -> Value {
    v.map_or(Value::Null, Value::from)
}

/// A hash as the decoded captures write it, normalised as ours are.
fn hash(v: &Value) -> u64 {
    let digest = || u64::from_be_bytes(*hex(v["__bytes__"].as_str().unwrap()).last_chunk().unwrap());
    v.as_u64().or(v.as_i64().map(|n| n as u64)).unwrap_or_else(digest)
}

fn hashes(v: &Value) -> Vec<u64> {
    v.as_array().unwrap().iter().map(hash).collect()
}

/// Compares an event with the same event decoded by Python.
fn same(event: &Event<'_>, python: &Value) {
    let (kind, found) = match event {
        Event::Cleared => ("AllBlocksCleared", json!({})),
        Event::Removed(removed) => {
            assert_eq!(removed.hashes, hashes(&python["block_hashes"]));
            let Removed { medium, group_idx, locality, .. } = removed;
            let found = json!({"medium": text(*medium), "group_idx": group_idx, "locality": text(*locality)});
            ("BlockRemoved", found)
        }
        Event::Stored(stored) => {
            assert_eq!(stored.hashes, hashes(&python["block_hashes"]));
            assert_eq!(stored.parent, Some(&python["parent_block_hash"]).filter(|p| !p.is_null()).map(hash));
            let keys = stored.extra_keys.map(|keys| {
                keys.iter().map(|k| rmp_serde::from_slice::<Value>(k).unwrap()).collect::<Vec<_>>()
            });
            let found = json!({
                "token_ids": stored.tokens,
                "block_size": stored.block_size,
                "medium": text(stored.medium),
                "lora_name": text(stored.lora_name),
                "extra_keys": keys,
                "group_idx": stored.group_idx,
                "kv_cache_spec_kind": text(stored.kind),
                "kv_cache_spec_sliding_window": stored.sliding_window,
                "locality": text(stored.locality),
            });
            ("BlockStored", found)
        }
    };
    assert_eq!(python["type"], kind);
    for (name, value) in found.as_object().unwrap() {
        assert_eq!(value, python.get(name).unwrap_or(&Value::Null), "{name} of {python}");
    }
}

const STREAMS: [(&str, usize); 9] = [
    ("bs16_sha256cbor_seed0_int", 165),
    ("evict_24blocks_topic", 16),
    ("real_v0.28.0_bs16_sha256cbor_seed0", 8),
    ("replay_from_0", 82),
    ("replay_from_100000", 1),
    ("replay_from_70", 12),
    ("replay_v0.28.0", 9),
    ("v_sha256pickle_s0", 7),
    ("v_shacbor_s0_bytes", 7),
];

/// The payloads of a capture; a replay's end marker has none.
fn payloads(stream: &str) -> Vec<Vec<u8>> {
    let records = capture(&format!("vllm/streams/{stream}.bin"));
    records.into_iter().map(|mut r| r.frames.pop().unwrap()).filter(|p| !p.is_empty()).collect()
}

#[test]
fn captures_decode_as_python_decodes_them() {
    let (mut events, mut compared) = (0, 0);
    for (stream, count) in STREAMS {
        let records = capture(&format!("vllm/streams/{stream}.bin"));
        assert_eq!(records.len(), count, "{stream}");
        for payload in payloads(stream) {
            let batch = decode(&payload).unwrap();
            assert_eq!((batch.bad_events.len(), batch.unknown_events, batch.unknown_fields), (0, 0, 0));
            events += batch.events.len();
        }
        let Some(lines) = golden(&format!("vllm/streams/{stream}.jsonl")) else { continue };
        let lines = String::from_utf8(lines).unwrap();
        assert_eq!(lines.lines().count(), count, "{stream}");
        for (record, line) in records.iter().zip(lines.lines()) {
            let line: Value = serde_json::from_str(line).unwrap();
            let python = &line["payload"];
            let payload = record.frames.last().unwrap();
            if python.is_null() {
                assert_eq!(decode(payload), Err(DecodeError::Truncated));
                continue;
            }
            let batch = decode(payload).unwrap();
            // serde_json may be off by the last bit
            assert!((batch.timestamp - python[0].as_f64().unwrap()).abs() < 1e-6);
            assert_eq!(json!(batch.rank), python[2]);
            assert_eq!(batch.events.len(), python[1].as_array().unwrap().len());
            batch.events.iter().zip(python[1].as_array().unwrap()).for_each(|(e, p)| same(e, p));
            compared += batch.events.len();
        }
    }
    assert_eq!(events, 521);
    assert!(compared == 0 || compared == events);
}

/// Every published block hash follows from what the events say: parent, tokens and extra keys arrive intact.
/// Only adapters are left out, since events do not hold their paths.
#[test]
fn published_hashes_follow_from_the_events() {
    let (mut blocks, mut adapted) = (0, 0);
    for (stream, algorithm, extra_keys) in [
        ("bs16_sha256cbor_seed0_int", Algorithm::Sha256Cbor, ExtraKeys::Tagged),
        ("evict_24blocks_topic", Algorithm::Sha256Cbor, ExtraKeys::Tagged),
        ("real_v0.28.0_bs16_sha256cbor_seed0", Algorithm::Sha256Cbor, ExtraKeys::Bare),
        ("v_sha256pickle_s0", Algorithm::Sha256, ExtraKeys::Tagged),
        ("v_shacbor_s0_bytes", Algorithm::Sha256Cbor, ExtraKeys::Tagged),
    ] {
        let contract = Contract { algorithm, block_size: 16, seed: Some("0".into()), extra_keys };
        let hasher = contract.hasher().unwrap();
        let mut digests: HashMap<u64, Digest> = HashMap::new();
        let mut scratch = Scratch::default();
        for payload in payloads(stream) {
            for event in decode(&payload).unwrap().events {
                let Event::Stored(stored) = event else { continue };
                if stored.lora_name.is_some() {
                    adapted += stored.hashes.len();
                    continue;
                }
                let mut parent = stored.parent.map_or(hasher.none_hash(), |p| digests[&p]);
                let tokens = stored.tokens.unwrap();
                let keys = stored.extra_keys.unwrap();
                assert_eq!(tokens.len(), stored.hashes.len() * 16);
                for ((block, keys), hash) in tokens.chunks_exact(16).zip(keys.iter()).zip(stored.hashes) {
                    let salt: Option<Vec<String>> = rmp_serde::from_slice(keys).unwrap();
                    let keys: Vec<_> = salt.iter().flatten().map(|s| ExtraKey::Salt(s)).collect();
                    parent = hasher.block(&parent, block, &keys, &mut scratch);
                    assert_eq!(parent.u64(), hash, "{stream}");
                    digests.insert(hash, parent);
                    blocks += 1;
                }
            }
        }
    }
    assert_eq!((blocks, adapted), (1096, 6));
}

#[test]
fn all_engine_versions() {
    let records = fixture_json("vllm/wire_frames_by_version.json");
    let records = records.as_array().unwrap();
    assert_eq!(records.len(), 38);
    let mut minimal = 0;
    for record in records {
        let version: u32 = record["vllm"].as_str().unwrap().split('.').nth(1).unwrap().parse().unwrap();
        let (first, second, parent) = match record["hash_type"].as_str().unwrap() {
            "int" => (12043469867174188367, 5, 5),
            _ => (0x1819_1a1b_1c1d_1e1f, u64::MAX, u64::MAX),
        };
        let payload = hex(record["payload_hex"].as_str().unwrap());
        let batch = decode(&payload).unwrap();
        assert_eq!(batch.timestamp, 1795986728.5);
        assert_eq!(batch.rank, Some(0));
        assert_eq!((batch.bad_events.len(), batch.unknown_events, batch.unknown_fields), (0, 0, 0));
        let [event, Event::Removed(removed), Event::Cleared] = &batch.events[..] else { panic!("{batch:?}") };
        let stored = stored(event);
        assert_eq!(stored.hashes, [first, second]);
        assert_eq!((stored.parent, stored.block_size, stored.medium), (None, 16, Some("GPU")));
        assert_eq!(stored.tokens, Some((250..282).collect()));
        let keys = (version >= 17).then(|| vec![vec![0x91, 0xa8], vec![0xc0]]);
        let found = stored.extra_keys.map(|k| k.iter().map(|k| k[..k.len().min(2)].to_vec()).collect());
        assert_eq!(found, keys, "{version}");
        assert_eq!(stored.group_idx, (version >= 20).then_some(0));
        assert_eq!(stored.kind, (version >= 22).then_some("full_attention"));
        assert_eq!((&removed.hashes[..], removed.medium), (&[first][..], Some("GPU")));
        assert_eq!(removed.group_idx, (version >= 20).then_some(0));

        if let Some(payload) = record["payload_minimal_no_rank_hex"].as_str() {
            let payload = hex(payload);
            let batch = decode(&payload).unwrap();
            assert_eq!((batch.timestamp, batch.rank, batch.events.len()), (1.0, None, 1));
            let stored = self::stored(&batch.events[0]);
            assert_eq!((&stored.hashes[..], stored.parent), (&[first, second][..], Some(parent)));
            assert_eq!((stored.medium, stored.extra_keys, stored.group_idx), (None, None, None));
            minimal += 1;
        }
    }
    assert_eq!(minimal, 38);
}

#[test]
fn other_engines() {
    let Some(bytes) = golden("engines/golden_wire.json") else { return };
    let records: HashMap<String, Value> = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(records.len(), 11);
    let payloads: HashMap<&str, Vec<u8>> =
        records.iter().map(|(name, r)| (name.as_str(), hex(r["hex"].as_str().unwrap()))).collect();
    let batches: HashMap<&str, Batch<'_>> =
        payloads.iter().map(|(name, payload)| (*name, decode(payload).unwrap())).collect();
    assert!(batches.values().all(|b| b.bad_events.is_empty()));

    let negative = stored(&batches["sglang_stored_neg"].events[0]);
    assert_eq!(negative.hashes, [-2360060374177730597_i64 as u64, 7470307888890966271]);
    assert_eq!((negative.parent, negative.tokens.as_deref()), (None, Some(&[1, 2][..])));

    let pairs = stored(&batches["sglang_stored_salt_bigram"].events[0]);
    assert_eq!(
        (&pairs.hashes[..], pairs.parent, &pairs.tokens),
        (&[u64::MAX][..], Some(-2_i64 as u64), &None)
    );
    assert_eq!((pairs.cache_salt, pairs.lora_name, pairs.medium), (Some("t"), Some("n"), Some("CPU_PINNED")));
    assert_eq!(batches["sglang_stored_salt_bigram"].rank, Some(3));

    let appended = stored(&batches["sglang_legacy_metadata"].events[0]);
    assert_eq!((appended.cache_salt, appended.lora_name), (Some("tenant-a"), None));

    let signed = Removed { hashes: vec![-5_i64 as u64, 5], medium: Some("GPU"), ..Removed::default() };
    assert_eq!(batches["sglang_removed_cleared"].events, [Event::Removed(signed), Event::Cleared]);

    let unknown = &batches["unknown_event"];
    let removed = Removed { hashes: vec![9], ..Removed::default() };
    assert_eq!((unknown.unknown_events, &unknown.events[..]), (1, &[Event::Removed(removed)][..]));

    let long = &batches["legacy_array_long"];
    assert_eq!((long.rank, long.unknown_fields), (Some(4), 1));
    let event = stored(&long.events[0]);
    assert_eq!((event.lora_name, event.kind, event.group_idx), (Some("lora"), Some("full"), Some(0)));
    assert_eq!((event.hashes[0], event.sliding_window), (-7_i64 as u64, None));

    let int = stored(&batches["vllm_int_stored_parent"].events[0]);
    assert_eq!((int.lora_name, int.extra_keys.unwrap().iter().count()), (Some("ad"), 3));
    assert_eq!((int.lora_id, int.parent), (Some(&[3][..]), Some(12345678901234567890)));
    assert_eq!(batches["vllm_int_stored_parent"].unknown_fields, 0);
    assert_eq!(batches["vllm_removed_cleared_norank"].rank, None);
    let bytes = stored(&batches["vllm_bytes_stored"].events[0]);
    assert_eq!(bytes.hashes, [0xd7cc_e23c_7785_459a, 0x4b76_ea98_6457_d986]);
    let short = stored(&batches["legacy_array_int_short"].events[0]);
    assert_eq!((&short.hashes[..], short.parent, short.medium), (&[7, 8][..], Some(6), None));
    assert_eq!(stored(&batches["legacy_array_bytes"].events[0]).hashes, [0xd7cc_e23c_7785_459a]);
}

fn pack(value: &Value) -> Vec<u8> {
    rmp_serde::to_vec(value).unwrap()
}

/// The outcome of a batch with this event before one that is fine.
fn bad(event: Value) -> DecodeError {
    let payload = pack(&json!([1.0, [event, {"type": "AllBlocksCleared"}], 0]));
    let batch = decode(&payload).unwrap();
    assert_eq!(batch.events, [Event::Cleared]);
    assert_eq!(batch.bad_events.len(), 1);
    batch.bad_events[0]
}

#[test]
fn a_damaged_event_costs_itself_only() {
    let good = json!({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": [1, 2],
        "block_size": 2, "lora_id": null, "medium": "GPU", "lora_name": null});
    let with = |name: &str, value: Value| {
        let mut event = good.clone();
        event[name] = value;
        bad(event)
    };
    assert_eq!(with("block_hashes", json!([1.5])), DecodeError::Hash);
    assert_eq!(with("block_hashes", json!(["1"])), DecodeError::Hash);
    assert_eq!(with("block_hashes", json!([1, null])), DecodeError::Hash);
    assert_eq!(with("block_hashes", json!(7)), DecodeError::Field);
    assert_eq!(with("parent_block_hash", json!(0.5)), DecodeError::Hash);
    assert_eq!(with("block_size", json!(-1)), DecodeError::Field);
    assert_eq!(with("block_size", json!(1_u64 << 32)), DecodeError::Field);
    assert_eq!(with("block_size", json!(null)), DecodeError::Field);
    assert_eq!(with("lora_name", json!([])), DecodeError::Field);
    assert_eq!(with("extra_keys", json!("x")), DecodeError::Field);
    assert_eq!(bad(json!(["BlockStored", [1], null, [1]])), DecodeError::Missing);
    assert_eq!(bad(json!(["BlockRemoved"])), DecodeError::Missing);
    for name in ["block_hashes", "parent_block_hash", "block_size"] {
        let mut event = good.clone();
        event.as_object_mut().unwrap().remove(name);
        assert_eq!(bad(event), DecodeError::Missing);
    }
    for shapeless in
        [json!(null), json!([]), json!({}), json!([1]), json!({"type": 1}), json!("BlockRemoved")]
    {
        assert_eq!(bad(shapeless), DecodeError::Event);
    }
}

#[test]
fn what_is_no_batch() {
    let reason = |payload: &[u8]| decode(payload).unwrap_err().reason();
    assert_eq!(reason(&[]), "truncated");
    assert_eq!(reason(&pack(&json!({}))), "batch");
    assert_eq!(reason(&pack(&json!([1.0]))), "batch");
    assert_eq!(reason(&pack(&json!(["now", [], 0]))), "batch");
    assert_eq!(reason(&pack(&json!([1.0, {}, 0]))), "batch");
    assert_eq!(reason(&pack(&json!([1.0, [], "0"]))), "batch");
    assert_eq!(reason(&pack(&json!([1.0, [], -1]))), "batch");
    assert_eq!(reason(&[&pack(&json!([1.0, [], 0]))[..], &[0xc0]].concat()), "trailing");
    assert!(decode(&pack(&json!([1, [], null]))).is_ok());
}

#[test]
fn reasons_are_fixed() {
    let errors = [
        DecodeError::Truncated,
        DecodeError::Trailing,
        DecodeError::Batch,
        DecodeError::Event,
        DecodeError::Hash,
        DecodeError::Missing,
        DecodeError::Field,
    ];
    assert_eq!(errors.map(DecodeError::reason), REASONS);
}

#[test]
fn tokens_that_are_no_u32_are_not_known() {
    for tokens in [json!([[1, 2], [2, 3]]), json!(["a", "b"]), json!([-1]), json!([1_u64 << 32]), json!(null)]
    {
        let payload = pack(&json!([1.0, [["BlockStored", [1], null, tokens, 2, null, "GPU"]], 0]));
        let batch = decode(&payload).unwrap();
        assert_eq!((stored(&batch.events[0]).tokens.as_ref(), batch.bad_events.len()), (None, 0));
        assert_eq!(stored(&batch.events[0]).medium, Some("GPU"));
    }
}

#[test]
fn names_and_keys_of_any_kind_are_passed_over() {
    // a map with an integer, an array and a nil for keys, the type last
    let mut payload =
        vec![0x92, 0x00, 0x91, 0x85, 0x07, 0xc0, 0x92, 0x01, 0x02, 0x81, 0x01, 0x01, 0xc0, 0xc3];
    payload.extend(pack(&json!("block_hashes")));
    payload.extend(pack(&json!([9])));
    payload.extend(pack(&json!("type")));
    payload.extend(pack(&json!("BlockRemoved")));
    let batch = decode(&payload).unwrap();
    assert_eq!(batch.events, [Event::Removed(Removed { hashes: vec![9], ..Removed::default() })]);
    assert_eq!(batch.unknown_fields, 3);
}

/// An upper bound of what the batch holds in memory, in bytes.
fn weight(batch: &Batch<'_>) -> usize {
    let of = |event: &Event<'_>| match event {
        Event::Stored(s) => {
            size_of::<Stored<'_>>()
                + s.hashes.capacity() * 8
                + s.tokens.as_ref().map_or(0, |t| t.capacity() * 4)
        }
        Event::Removed(r) => r.hashes.capacity() * 8,
        Event::Cleared => 0,
    };
    batch.events.iter().map(of).sum::<usize>()
        + batch.events.capacity() * size_of::<Event<'_>>()
        + batch.bad_events.capacity() * size_of::<DecodeError>()
}

/// Decodes anything; never more than 40 bytes in memory for each of the payload.
fn survive(payload: &[u8]) -> bool {
    let decoded = decode(payload);
    if let Ok(batch) = &decoded {
        assert!(weight(batch) <= 40 * payload.len() + 4096, "{} for {}", weight(batch), payload.len());
        for event in &batch.events {
            if let Event::Stored(stored) = event {
                stored.extra_keys.iter().for_each(|keys| assert!(keys.iter().count() <= payload.len()));
            }
        }
    }
    decoded.is_ok()
}

#[test]
fn claims_of_a_gigabyte() {
    let start = [0x93, 0x01];
    for claim in [0xdd_u8, 0xdf, 0xc6, 0xdb, 0xc9] {
        let claim = [&[claim][..], &(1_u32 << 30).to_be_bytes(), &[0; 64]].concat();
        assert!(!survive(&claim));
        assert!(!survive(&[&start[..], &claim].concat()));
        assert!(!survive(&[&start[..], &[0x91], &claim].concat()));
        for at in 1..5 {
            let mut event = vec![0x96];
            event.extend(pack(&json!("BlockStored")));
            event.extend(&[&[0x91, 0x01][..], &[0xc0], &[0x91, 0x01], &[0x01]][..at - 1].concat());
            event.extend(&claim);
            assert!(!survive(&[&start[..], &[0x91], &event].concat()));
        }
    }
}

#[test]
fn nesting_of_any_depth() {
    for open in [&[0x91_u8][..], &[0x81, 0xa1, b'a'], &[0x81]] {
        for depth in [10_000, 100_000] {
            let deep = [open.repeat(depth), vec![0xc0; if open.len() == 1 { depth + 1 } else { 1 }]].concat();
            survive(&[&[0x93, 0x01, 0x91][..], &deep].concat());
            // as the value of a field we skip, and of tokens
            for field in ["x", "token_ids", "extra_keys", "lora_id"] {
                let event = [&[0x81][..], &pack(&json!(field)), &deep].concat();
                survive(&[&[0x93, 0x01, 0x91][..], &event, &[0x00]].concat());
            }
        }
    }
    // deep, and whole: one unknown event
    let mut payload = vec![0x92, 0x01, 0x91, 0x92, 0xa1, b'x'];
    payload.extend(vec![0x91; 1_000_000]);
    payload.push(0xc0);
    assert_eq!(decode(&payload).unwrap().unknown_events, 1);
}

struct Random(u64);

impl Random {
    /// SplitMix64, below `n`.
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ z >> 31) % n as u64) as usize
    }
}

#[test]
fn mutated_payloads() {
    let mut pool: Vec<Vec<u8>> = fixture_json("vllm/wire_frames_by_version.json")
        .as_array()
        .unwrap()
        .iter()
        .map(|r| hex(r["payload_hex"].as_str().unwrap()))
        .collect();
    for (stream, _) in STREAMS {
        pool.extend(payloads(stream).into_iter().filter(|p| p.len() < 500));
    }
    assert_eq!(pool.len(), 280);
    let mut random = Random(1);
    let (mut decoded, mut damaged) = (0, 0);
    for _ in 0..100_000 {
        let mut payload = pool[random.below(pool.len())].clone();
        for _ in 0..1 + random.below(4) {
            let at = random.below(payload.len());
            match random.below(6) {
                0 => payload[at] ^= 1 << random.below(8),
                1 => payload[at] = random.below(256) as u8,
                2 => payload.truncate(at.max(1)),
                3 => payload.insert(at, random.below(256) as u8),
                4 => drop(payload.splice(at.., pool[random.below(pool.len())].iter().copied().skip(at))),
                _ => {
                    let head = [0xdc, 0xdd, 0xde, 0xdf, 0xc4, 0xc6, 0xdb, 0xc9][random.below(8)];
                    drop(payload.splice(at..at, [head, 0xff, 0xff, 0xff, 0xff]));
                }
            }
        }
        if survive(&payload) { decoded += 1 } else { damaged += 1 }
    }
    assert!(decoded > 10_000 && damaged > 10_000, "{decoded} and {damaged}");
}

proptest! {
    #[test]
    fn any_bytes(payload in prop::collection::vec(any::<u8>(), 0..300)) {
        survive(&payload);
    }

    /// Both forms of an event mean the same.
    #[test]
    fn maps_and_arrays_agree(
        hashes in prop::collection::vec(prop_oneof![any::<u64>().prop_map(Value::from), any::<i64>().prop_map(Value::from)], 0..40),
        parent: Option<u64>,
        tokens in prop::collection::vec(any::<u32>(), 0..100),
        block_size: u32,
        lora in proptest::option::of(".{0,20}"),
        salt in proptest::option::of(".{0,20}"),
    ) {
        let keys = json!([[lora, salt, ["id", -3]], null, []]);
        let map = json!({"lora_name": lora, "block_hashes": hashes, "type": "BlockStored", "extra_keys": keys,
            "group_idx": 3, "token_ids": tokens, "block_size": block_size, "parent_block_hash": parent,
            "medium": "CPU", "new": {"a": [1]}});
        let array = json!(["BlockStored", hashes, parent, tokens, block_size, null, "CPU", lora, keys, 3]);
        let payload = pack(&json!([2.5, [map, array]]));
        let batch = decode(&payload).unwrap();
        prop_assert_eq!(&batch.events[0], &batch.events[1]);
        let event = stored(&batch.events[0]);
        let expected: Vec<u64> = hashes.iter().map(hash).collect();
        prop_assert_eq!(&event.hashes, &expected);
        prop_assert_eq!(event.parent, parent);
        prop_assert_eq!(event.tokens.as_ref(), Some(&tokens));
        prop_assert_eq!(event.lora_name, lora.as_deref());
        let found: Vec<Value> = event.extra_keys.unwrap().iter().map(|k| rmp_serde::from_slice(k).unwrap()).collect();
        prop_assert_eq!(Value::from(found), keys);
        prop_assert_eq!(batch.unknown_fields, 1);
    }
}
