//! Captured streams of live engines, replayed batch by batch.
#![allow(clippy::unwrap_used)]

mod common;

use common::ask;
use common::mirror::{NaiveMirror, assert_counted, check};
use kvgate_kv::event::{Event, decode};
use kvgate_kv::hash::{Algorithm, Contract, ExtraKeys, Hasher, Lora, Namespace};
use kvgate_kv::inventory::{Config, Ingest, Inventory};
use kvgate_kv::mirror::{Mirror, MirrorConfig, Reason, Report, View};
use kvgate_kv::own::OwnHasher;
use kvgate_tests::{capture, fixture_json, golden};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};

const BLOCK: usize = 16;
const MAX_ORPHANS: usize = 100;

const CONFIG: MirrorConfig =
    MirrorConfig { own: true, published: true, engine_blocks: None, max_blocks: 100_000, max_ranks: 4 };

/// One engine's inventory, and the model of it.
struct Rig {
    ingest: Ingest,
    inventory: Inventory,
    hasher: OwnHasher,
    engine: [(NaiveMirror, Mirror); 1],
}

impl Rig {
    fn new(config: MirrorConfig) -> Self {
        let hasher = OwnHasher::new();
        let (ingest, inventory) = Ingest::new(Config { max_caches: 20, max_orphans: MAX_ORPHANS });
        let model = NaiveMirror::new(config.clone(), hasher.clone(), MAX_ORPHANS);
        let engine = [(model, Mirror::new(config, hasher.clone()))];
        Rig { ingest, inventory, hasher, engine }
    }

    fn apply(&mut self, payload: &[u8]) -> Report {
        let batch = decode(payload).unwrap();
        let [(model, mirror)] = &mut self.engine;
        let report = mirror.apply(&mut self.ingest, &batch);
        assert_counted(&report, &model.apply(&batch));
        report
    }

    fn check(&self) {
        check(&self.engine, &self.ingest, &self.inventory);
        assert_eq!(self.ingest.verify(), Ok(()));
    }

    fn mirror(&self) -> &Mirror {
        &self.engine[0].1
    }

    fn blocks(&self, view: View, chain: &[u64]) -> usize {
        let id = self.mirror().caches().iter().find(|c| c.view == view).map(|c| c.id);
        let found = ask(&self.inventory, chain, false);
        id.and_then(|id| found.get(&id)).map_or(0, |n| *n as usize)
    }

    /// Blocks of a prompt that the engine holds by its events; both views must agree.
    fn overlap(&self, prompt: &[u32], namespace: &Namespace, engine: &Hasher) -> usize {
        let own = self.blocks(View::Own, &self.hasher.chain(prompt, BLOCK, namespace));
        let published = engine.blocks(prompt, namespace).iter().map(|d| d.u64().max(1)).collect::<Vec<_>>();
        assert_eq!(own, self.blocks(View::Published, &published));
        own
    }
}

fn engine_hasher(algorithm: Algorithm, extra_keys: ExtraKeys) -> Hasher {
    Contract { algorithm, block_size: BLOCK as u32, seed: Some("0".into()), extra_keys }.hasher().unwrap()
}

/// What an engine finds of its own: a hit leaves at least one token to compute.
fn cached_tokens(prompt: &[u32], held: usize) -> usize {
    BLOCK * held.min((prompt.len() - 1) / BLOCK)
}

fn salted(salt: Option<&str>) -> Namespace {
    Namespace { lora: None, cache_salt: salt.map(str::to_owned) }
}

/// The sequence number and payload of a message, published or replayed; none of a replay's end.
fn message(frames: &[Vec<u8>]) -> Option<(u64, &[u8])> {
    let [.., sequence, payload] = frames else { panic!("{} frames", frames.len()) };
    let sequence = u64::from_be_bytes(sequence[..].try_into().unwrap());
    (sequence != u64::MAX).then_some((sequence, payload))
}

#[test]
fn every_stream_leaves_what_a_naive_model_has() {
    let streams = [
        ("bs16_sha256cbor_seed0_int", 165),
        ("evict_24blocks_topic", 16),
        ("real_v0.28.0_bs16_sha256cbor_seed0", 8),
        ("v_sha256pickle_s0", 7),
        ("v_shacbor_s0_bytes", 7),
        ("replay_from_0", 81),
        ("replay_from_70", 11),
        ("replay_from_100000", 0),
        ("replay_v0.28.0", 8),
    ];
    for (name, batches) in streams {
        let mut rig = Rig::new(CONFIG);
        let (mut ran, mut next, mut total) = (0, None, BTreeMap::new());
        for record in capture(&format!("vllm/streams/{name}.bin")) {
            let Some((sequence, payload)) = message(&record.frames) else { continue };
            if next.is_some_and(|next| sequence < next) {
                // the engine was restarted, and did not say so
                let [(model, mirror)] = &mut rig.engine;
                mirror.clear(&mut rig.ingest);
                model.clear();
                rig.check();
            }
            next = Some(sequence + 1);
            for (reason, n) in rig.apply(payload).iter() {
                *total.entry(reason.name()).or_insert(0) += n;
            }
            rig.check();
            ran += 1;
        }
        assert_eq!(ran, batches, "{name}");
        assert!(batches == 0 || total[Reason::Stored.name()] > 0, "{name}: {total:?}");
        // a real engine is understood whole
        let plain = [Reason::Stored, Reason::Removed, Reason::Cleared].map(Reason::name);
        assert!(total.iter().all(|(reason, n)| *n == 0 || plain.contains(reason)), "{name}: {total:?}");
        assert!(rig.mirror().caches().iter().all(|c| !c.gaps && c.orphans == 0), "{name}");
    }
}

/// The names that the log gives to blocks, such as `A#3`, and their hashes.
fn name_blocks(names: &mut HashMap<String, u64>, logged: &[String], payload: &[u8]) {
    for (log, event) in logged.iter().zip(decode(payload).unwrap().events) {
        let hashes = match &event {
            Event::Stored(stored) => &stored.hashes,
            Event::Removed(removed) => &removed.hashes,
            Event::Cleared => panic!("{log}"),
        };
        let labels = log[2..].trim_end_matches(']').split(',');
        for (label, hash) in labels.zip(hashes) {
            assert_eq!(names.entry(label.to_owned()).or_insert(*hash), hash, "{label}");
        }
    }
}

#[test]
fn evictions_leave_the_copies_the_engine_has() {
    let log = fixture_json("vllm/evict_log.json");
    let mut stream = capture("vllm/streams/evict_24blocks_topic.bin").into_iter();
    let engine = engine_hasher(Algorithm::Sha256Cbor, ExtraKeys::Tagged);
    let mut rig = Rig::new(MirrorConfig { engine_blocks: Some(24), ..CONFIG });
    let (mut names, mut steps, mut batches) = (HashMap::new(), 0, 0);
    for step in log.as_array().unwrap() {
        let [first, len] = [&step["ids"][0], &step["ids"][1]].map(|n| n.as_u64().unwrap() as u32);
        let mut prompt: Vec<u32> = (first..first + len).collect();
        if step["tag"] == "A2" {
            // it begins like A and goes on with tokens of its own
            prompt.splice(32.., 7000..7000 + len - 32);
        }
        let held = rig.overlap(&prompt, &Namespace::default(), &engine);
        assert_eq!(cached_tokens(&prompt, held) as u64, step["cached_tokens"], "{step}");

        let mut logged: Vec<String> = serde_json::from_value(step["events"].clone()).unwrap();
        while !logged.is_empty() {
            let record = stream.next().unwrap();
            let payload = record.frames.last().unwrap();
            name_blocks(&mut names, &logged, payload);
            let count = decode(payload).unwrap().events.len();
            let report = rig.apply(payload);
            assert_eq!(report.get(Reason::AbsentRemoval), 0);
            rig.check();
            logged.drain(..count);
            batches += 1;
        }
        let rows = rig.mirror().dump(&rig.ingest, 0);
        let copies: HashMap<u64, u32> = rows.iter().map(|r| (r.engine_hash, r.copies)).collect();
        let several = names.iter().filter_map(|(name, hash)| {
            let copies = copies.get(hash).filter(|n| **n > 1)?;
            Some((name.clone(), json!(copies)))
        });
        assert_eq!(Value::Object(several.collect()), step["neg_or_dup"], "{step}");
        assert!(copies.values().sum::<u32>() <= 24);
        assert!(rig.overlap(&prompt, &Namespace::default(), &engine) >= (len as usize - 1) / BLOCK);
        steps += 1;
    }
    assert_eq!((steps, batches, stream.count()), (11, 16, 0));
}

/// The prompts of a request, as the engine says it read them; none where it does not say.
fn prompts(record: &Value) -> Vec<Vec<u32>> {
    let answer: Value = serde_json::from_str(record["response"].as_str().unwrap()).unwrap_or_default();
    let choices = answer["choices"].as_array().into_iter().flatten().map(|c| &c["prompt_token_ids"]);
    let said = [&record["prompt_token_ids"], &answer["prompt_token_ids"]];
    let said = said.into_iter().chain(choices).find_map(|ids| Some((ids.as_array()?, ids.clone())));
    match said {
        None => Vec::new(),
        Some((many, ids)) if many[0].is_array() => serde_json::from_value(ids).unwrap(),
        Some((_, ids)) => vec![serde_json::from_value(ids).unwrap()],
    }
}

/// What ran of a file of requests.
#[derive(Debug, Default, PartialEq)]
struct Ran {
    requests: usize,
    /// Of these, those that the cache was not reset for, and that tell what they found.
    warm: usize,
    prompts: usize,
}

/// Requests one after the other, each with what the engine published meanwhile and how many tokens it found
/// cached.
fn end_to_end(records: &Value) -> Ran {
    let engine = engine_hasher(Algorithm::Sha256Cbor, ExtraKeys::Tagged);
    let mut rig = Rig::new(CONFIG);
    let mut ran = Ran::default();
    for record in records.as_array().unwrap().iter().filter(|r| r["status"] == 200) {
        let name = &record["name"];
        let prompts = prompts(record);
        let body = record.get("body").unwrap_or(&record["request"]["body"]);
        let namespace = salted(body["cache_salt"].as_str());
        if record["mode"].as_str().is_some_and(|mode| mode != "isolated") {
            let held = rig.overlap(&prompts[0], &namespace, &engine);
            let cached = &record["usage"]["prompt_tokens_details"]["cached_tokens"];
            assert_eq!(cached_tokens(&prompts[0], held) as u64, *cached, "{name}");
            ran.warm += 1;
        }
        for event in record["events"].as_array().unwrap() {
            rig.apply(&rmp_serde::to_vec(&event["payload"]).unwrap());
        }
        rig.check();
        // what was computed is held now, and would be found
        for prompt in &prompts {
            assert_eq!(rig.overlap(prompt, &namespace, &engine), prompt.len() / BLOCK, "{name}");
        }
        ran.requests += 1;
        ran.prompts += prompts.len();
    }
    ran
}

#[test]
fn a_warm_request_finds_what_the_events_say() {
    let ran = end_to_end(&fixture_json("vllm/e2e_bs16_sha256cbor_seed0.json"));
    assert_eq!(ran, Ran { requests: 55, warm: 6, prompts: 56 });
    let ran = end_to_end(&fixture_json("vllm/e2e_extra_bs16.json"));
    assert_eq!(ran, Ran { requests: 10, warm: 0, prompts: 3 });
    let ran = end_to_end(&fixture_json("vllm/e2e_extra2_bs16.json"));
    assert_eq!(ran, Ran { requests: 9, warm: 0, prompts: 9 });
    if let Some(llama) = golden("vllm/e2e_llama3_bs16_sha256cbor_seed0.json") {
        let ran = end_to_end(&serde_json::from_slice(&llama).unwrap());
        assert_eq!(ran, Ran { requests: 22, warm: 3, prompts: 23 });
    }
}

#[test]
fn adapters_and_salts_keep_apart() {
    let engine = engine_hasher(Algorithm::Sha256Cbor, ExtraKeys::Tagged);
    let mut rig = Rig::new(CONFIG);
    let mut asked = Vec::new();
    for record in fixture_json("vllm/e2e_lora_bs16.json").as_array().unwrap() {
        let text = |key: &str| record[key].as_str().map(str::to_owned);
        let path = text("lora_path").unwrap_or_default();
        let lora = text("lora_name").map(|name| Lora { name, path });
        let namespace = Namespace { lora, cache_salt: text("cache_salt") };
        let published: Vec<String> = serde_json::from_value(record["published"].clone()).unwrap();
        let prompt: Vec<u32> = serde_json::from_value(record["token_ids"].clone()).unwrap();
        assert_eq!(rig.overlap(&prompt, &namespace, &engine), 0);
        let event = json!({"type": "BlockStored", "parent_block_hash": null, "token_ids": prompt, "block_size": BLOCK,
            "block_hashes": published.iter().map(|h| h.parse().unwrap()).collect::<Vec<u64>>(),
            "lora_name": record["lora_name"], "extra_keys": record["events_extra_keys"]});
        rig.apply(&rmp_serde::to_vec(&json!([1.0, [event], 0])).unwrap());
        rig.check();
        asked.push((prompt, namespace));
        for (prompt, namespace) in &asked {
            assert_eq!(rig.overlap(prompt, namespace, &engine), 3);
        }
    }
    assert_eq!(asked.len(), 3);
}

#[test]
fn engine_variants_hold_their_prompts() {
    let variants = [
        ("v_sha256pickle_s0", "v_sha256pickle_s0", Algorithm::Sha256, ExtraKeys::Tagged),
        ("v_shacbor_s0_bytes", "v_shacbor_s0_bytes", Algorithm::Sha256Cbor, ExtraKeys::Tagged),
        ("real_v0.28.0_s0", "real_v0.28.0_bs16_sha256cbor_seed0", Algorithm::Sha256Cbor, ExtraKeys::Bare),
    ];
    for (variant, stream, algorithm, extra_keys) in variants {
        let engine = engine_hasher(algorithm, extra_keys);
        let mut rig = Rig::new(CONFIG);
        // the first seven batches are those of the five requests
        for record in capture(&format!("vllm/streams/{stream}.bin")).iter().take(7) {
            rig.apply(record.frames.last().unwrap());
        }
        let mut ran = 0;
        for request in fixture_json(&format!("vllm/variant_{variant}.json"))["requests"].as_array().unwrap() {
            let ids = ["prompt_token_ids", "output_token_ids"].map(|k| request[k].clone());
            let [prompt, output]: [Vec<u32>; 2] = ids.map(|ids| serde_json::from_value(ids).unwrap());
            let salt = salted(request["request"]["cache_salt"].as_str());
            // the last sampled token was never computed
            let whole = [&prompt[..], &output[..output.len() - 1]].concat();
            assert_eq!(rig.overlap(&whole, &salt, &engine), whole.len() / BLOCK, "{}", request["name"]);
            assert_eq!(rig.overlap(&whole, &salted(Some("another")), &engine), 0);
            ran += 1;
        }
        assert_eq!(ran, 5);
    }
}
