//! The simulated engine, given the token ids that real engines got, publishes what they published, byte for byte.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use kvgate_kv::hash::{Algorithm, Contract, ExtraKeys, Lora, Namespace};
use kvgate_sim::event::{Event, Wire};
use kvgate_sim::scheduler::{Limits, Request, Scheduler};
use kvgate_sim::{EventEncoding, HashForm};
use kvgate_tests::{fixture, fixture_json};
use serde_json::Value;
use std::collections::HashMap;

/// A request of a capture and what the model answered.
#[derive(Default)]
struct Job {
    prompts: Vec<Vec<u32>>,
    outputs: Vec<Vec<u32>>,
    namespace: Namespace,
    session: Option<String>,
}

struct Engine(Scheduler);

impl Engine {
    fn new(algorithm: &str, seed: Option<&str>, extra_keys: ExtraKeys, cache_blocks: usize) -> Self {
        let contract = Contract {
            algorithm: algorithm.parse::<Algorithm>().unwrap(),
            block_size: 16,
            seed: seed.map(str::to_owned),
            extra_keys,
        };
        let limits = Limits { cache_blocks, max_concurrency: 64, max_step_tokens: 2048 };
        Self(Scheduler::new(contract.hasher().unwrap(), limits))
    }

    /// Runs a request to its end; returns the batches and the cached tokens of its prompts.
    fn run(&mut self, job: &Job) -> (Vec<Vec<Event>>, usize) {
        for (id, tokens) in job.prompts.iter().enumerate() {
            let request = Request {
                tokens: tokens.clone(),
                max_tokens: job.outputs.get(id).map_or(1, Vec::len),
                namespace: job.namespace.clone(),
                session: job.session.clone(),
                lora_id: job.namespace.lora.as_ref().map(|_| 1),
                received: false,
            };
            self.0.submit(id as u64, request);
        }
        let (mut batches, mut cached) = (Vec::new(), 0);
        while let Some(step) = self.0.schedule() {
            batches.extend(Some(self.0.take_events()).filter(|events| !events.is_empty()));
            let output =
                |id: u64, position| job.outputs.get(id as usize).map_or(0, |o: &Vec<u32>| o[position]);
            let sampled = self.0.complete(&step, output);
            cached += sampled
                .iter()
                .filter(|(_, token)| token.last)
                .map(|(_, token)| token.cached_tokens)
                .sum::<usize>();
        }
        (batches, cached)
    }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The payloads of a PUB capture, in order.
fn payloads(name: &str) -> Vec<Vec<u8>> {
    let bytes = fixture(name);
    let mut rest = bytes.strip_prefix(b"KVCAP1\n").expect("a capture");
    let mut take = |count: usize| {
        let (head, tail) = rest.split_at_checked(count)?;
        rest = tail;
        Some(head)
    };
    let mut payloads = Vec::new();
    while take(8).is_some() {
        let mut number = || take(4).map(|b| u32::from_be_bytes(b.try_into().unwrap()) as usize).unwrap();
        let count = number();
        let frames: Vec<Vec<u8>> = (0..count)
            .map(|_| {
                let length = take(4).map(|b| u32::from_be_bytes(b.try_into().unwrap()) as usize).unwrap();
                take(length).unwrap().to_vec()
            })
            .collect();
        payloads.push(frames[2].clone());
    }
    payloads
}

/// Our events with a captured payload's timestamp.
fn encode_like(payload: &[u8], events: &[Event], hashes: HashForm) -> Vec<u8> {
    let timestamp = f64::from_be_bytes(payload[2..10].try_into().unwrap());
    Wire { encoding: EventEncoding::Map, hashes }.encode(timestamp, events).unwrap()
}

#[test]
fn end_to_end_records() {
    let records = fixture_json("vllm/e2e_bs16_sha256cbor_seed0.json");
    let payloads = payloads("vllm/streams/bs16_sha256cbor_seed0_int.bin");
    let mut engine = Engine::new("sha256_cbor", Some("0"), ExtraKeys::Tagged, 2000);
    let (mut served, mut batches_seen, mut next) = (0, 0, 0);
    for record in records.as_array().unwrap() {
        let name = record["name"].as_str().unwrap();
        if record["mode"] == "isolated" {
            assert!(engine.0.reset_prefix_cache());
        }
        if record["status"] != 200 {
            continue;
        }
        let prompt = &record["prompt_token_ids"];
        let prompts = if prompt[0].is_array() {
            prompt.as_array().unwrap().iter().map(ids).collect()
        } else {
            vec![ids(prompt)]
        };
        let job = Job {
            prompts,
            // streamed answers were recorded without ids; all asked for one token
            outputs: record["output_token_ids"].as_array().into_iter().flatten().map(ids).collect(),
            namespace: Namespace {
                lora: None,
                cache_salt: record["request"]["body"]["cache_salt"].as_str().map(str::to_owned),
            },
            session: record["request"]["body"]["session_id"].as_str().map(str::to_owned),
        };
        let (mut batches, cached) = engine.run(&job);
        served += 1;
        let details = &record["usage"]["prompt_tokens_details"];
        assert!(details.is_null() || details["cached_tokens"] == cached, "{name}: {cached} cached");
        if record["request"]["body"]["vllm_xargs"]["kv_cache_report_mode"] == "full" {
            continue; // publishes what is held already; not simulated
        }
        let expected = record["events"].as_array().unwrap();
        assert_eq!(batches.len(), expected.len(), "{name}");
        if record["events"][0]["seq"].as_u64().is_some_and(|first| first > next) {
            // requests that are not in the records came between, each with a reset: so many clears are not known
            let clears = expected[0]["payload"][1].as_array().unwrap().iter();
            let clears = clears.filter(|event| event["type"] == "AllBlocksCleared").count();
            batches[0].retain(|event| *event != Event::Cleared);
            batches[0].splice(0..0, vec![Event::Cleared; clears]);
        }
        for (events, expected) in batches.iter().zip(expected) {
            let seq = expected["seq"].as_u64().unwrap();
            next = seq + 1;
            let payload = &payloads[seq as usize];
            let ours = encode_like(payload, events, HashForm::Int);
            assert_eq!(payload, &ours, "{name}");
            batches_seen += 1;
        }
    }
    assert_eq!((served, batches_seen), (55, 63));
}

#[test]
fn variants() {
    let cases = [
        ("variant_v_shacbor_s0_bytes", Some("v_shacbor_s0_bytes"), ExtraKeys::Tagged, HashForm::Bytes),
        ("variant_v_sha256pickle_s0", Some("v_sha256pickle_s0"), ExtraKeys::Tagged, HashForm::Int),
        ("variant_v_xxhcbor_s0", None, ExtraKeys::Tagged, HashForm::Int),
        ("variant_v_shacbor_unset", None, ExtraKeys::Tagged, HashForm::Int),
        (
            "variant_real_v0.28.0_s0",
            Some("real_v0.28.0_bs16_sha256cbor_seed0"),
            ExtraKeys::Bare,
            HashForm::Int,
        ),
    ];
    let (mut requests, mut exact) = (0, 0);
    for (name, stream, extra_keys, hashes) in cases {
        let variant = fixture_json(&format!("vllm/{name}.json"));
        let payloads = stream.map(|stream| payloads(&format!("vllm/streams/{stream}.bin")));
        let seed = variant["pythonhashseed"].as_str();
        let mut engine = Engine::new(variant["algo"].as_str().unwrap(), seed, extra_keys, 2000);
        for record in variant["requests"].as_array().unwrap() {
            let salt = record["request"]["cache_salt"].as_str().map(str::to_owned);
            let job = Job {
                prompts: vec![ids(&record["prompt_token_ids"])],
                outputs: vec![ids(&record["output_token_ids"])],
                namespace: Namespace { lora: None, cache_salt: salt },
                session: None,
            };
            let (batches, _) = engine.run(&job);
            let expected = record["events"].as_array().unwrap();
            assert_eq!(batches.len(), expected.len(), "{name} {}", record["name"]);
            for (events, expected) in batches.iter().zip(expected) {
                if let Some(payloads) = &payloads {
                    let payload = &payloads[expected["seq"].as_u64().unwrap() as usize];
                    assert_eq!(payload, &encode_like(payload, events, hashes), "{name} {}", record["name"]);
                    exact += 1;
                } else {
                    let encoded = encode_like(&[0; 10], events, hashes);
                    let decoded: Value = rmp_serde::from_slice(&encoded).unwrap();
                    assert_eq!(decoded[1], expected["payload"][1], "{name} {}", record["name"]);
                }
            }
            requests += 1;
        }
    }
    assert_eq!((requests, exact), (25, 21));
}

#[test]
fn a_cache_of_24_blocks_evicts_as_the_engine_did() {
    let log = fixture_json("vllm/evict_log.json");
    let payloads = payloads("vllm/streams/evict_24blocks_topic.bin");
    let decoded: Vec<Value> =
        payloads.iter().map(|payload| rmp_serde::from_slice(payload).unwrap()).collect();
    // what the model generated for the only request with an answer of several blocks, and one prompt that shares a start
    let decode: Vec<u32> =
        [10, 12].iter().flat_map(|batch| ids(&decoded[*batch][1][0]["token_ids"])).collect();
    let tail = ids(&decoded[15][1][7]["token_ids"]);
    let mut engine = Engine::new("sha256_cbor", Some("0"), ExtraKeys::Tagged, 24);
    let mut batches = Vec::new();
    let mut labels: HashMap<String, String> = HashMap::new();
    let mut steps = 0;
    for (index, step) in log.as_array().unwrap().iter().enumerate() {
        let (start, count) =
            (step["ids"][0].as_u64().unwrap() as u32, step["ids"][1].as_u64().unwrap() as u32);
        let mut prompt: Vec<u32> = (start..start + count).collect();
        let mut output = vec![0];
        if index == 8 {
            output = [decode.clone(), vec![0; 8]].concat();
        }
        if index == 10 {
            prompt = [(1000..1032).collect(), tail.clone(), vec![0; 4]].concat();
        }
        let job = Job { prompts: vec![prompt], outputs: vec![output], ..Job::default() };
        let (new, cached) = engine.run(&job);
        assert_eq!(step["cached_tokens"], cached, "step {index}");
        assert_eq!(described(&new, &step["events"], &mut labels), texts(&step["events"]), "step {index}");
        batches.extend(new);
        steps += 1;
    }
    assert_eq!((steps, batches.len()), (11, payloads.len()));
    for (index, (events, payload)) in batches.iter().zip(&payloads).enumerate() {
        assert_eq!(payload, &encode_like(payload, events, HashForm::Int), "batch {index}");
    }
}

fn texts(events: &Value) -> Vec<String> {
    events.as_array().unwrap().iter().map(|event| event.as_str().unwrap().to_owned()).collect()
}

/// Events as the log writes them; the labels of new blocks are learnt from the log itself.
fn described(batches: &[Vec<Event>], log: &Value, labels: &mut HashMap<String, String>) -> Vec<String> {
    let stores = texts(log).into_iter().filter(|event| event.starts_with('S'));
    let mut names =
        stores.flat_map(|event| event[2..event.len() - 1].split(',').map(str::to_owned).collect::<Vec<_>>());
    let label = |labels: &HashMap<String, String>, hash: String| labels.get(&hash).cloned().unwrap_or(hash);
    let mut lines = Vec::new();
    for event in batches.iter().flatten() {
        lines.push(match event {
            Event::Stored(stored) => {
                let blocks: Vec<String> = stored
                    .hashes
                    .iter()
                    .map(|hash| {
                        let name = names.next().unwrap_or_default();
                        labels.entry(hash.to_string()).or_insert(name).clone()
                    })
                    .collect();
                format!("S[{}]", blocks.join(","))
            }
            Event::Removed(hash) => format!("R[{}]", label(labels, hash.to_string())),
            Event::Cleared => "C".into(),
        });
    }
    lines
}

#[test]
fn adapters() {
    let mut records = 0;
    for record in fixture_json("vllm/e2e_lora_bs16.json").as_array().unwrap() {
        let text = |key: &str| record[key].as_str().map(str::to_owned);
        let lora = text("lora_name").zip(text("lora_path")).map(|(name, path)| Lora { name, path });
        let job = Job {
            prompts: vec![ids(&record["token_ids"])],
            namespace: Namespace { lora, cache_salt: text("cache_salt") },
            ..Job::default()
        };
        let (batches, _) = Engine::new("sha256_cbor", Some("0"), ExtraKeys::Tagged, 2000).run(&job);
        let [Event::Stored(stored)] = batches[0].as_slice() else { panic!("{batches:?}") };
        let published: Vec<String> = stored.hashes.iter().map(|hash| hash.u64().to_string()).collect();
        assert_eq!(record["published"], serde_json::json!(published));
        assert_eq!(record["events_extra_keys"], serde_json::json!(stored.extra_keys));
        assert_eq!(stored.lora.as_ref().map(|(_, name)| name.clone()), text("lora_name"));
        records += 1;
    }
    assert_eq!(records, 3);
}

/// Two choices of one prompt share its blocks and add siblings; so do equal prompts of one request.
#[test]
fn choices_of_one_prompt() {
    let (mut records, mut batches_seen) = (0, 0);
    for record in fixture_json("vllm/e2e_extra_bs16.json").as_array().unwrap() {
        let name = record["name"].as_str().unwrap();
        if !["n2_sampled", "batch_mixed_same_prompt_twice"].contains(&name) {
            continue;
        }
        let response: Value = serde_json::from_str(record["response"].as_str().unwrap()).unwrap();
        let choices = response["choices"].as_array().unwrap();
        let stored = &record["events"][0]["payload"][1].as_array().unwrap().last().unwrap()["token_ids"];
        let prompt = |choice: &Value| match &choice["prompt_token_ids"] {
            // recorded without ids: the blocks that were stored, and some tail
            Value::Null => [ids(stored), vec![0]].concat(),
            tokens => ids(tokens),
        };
        let job = Job {
            prompts: choices
                .iter()
                .map(|choice| prompt(if name == "n2_sampled" { &choices[0] } else { choice }))
                .collect(),
            outputs: choices
                .iter()
                .map(|choice| &choice["token_ids"])
                .filter(|o| o.is_array())
                .map(ids)
                .collect(),
            ..Job::default()
        };
        let (batches, _) = Engine::new("sha256_cbor", Some("0"), ExtraKeys::Tagged, 2000).run(&job);
        let expected = record["events"].as_array().unwrap();
        assert_eq!(batches.len(), expected.len(), "{name}");
        for (events, expected) in batches.iter().zip(expected) {
            let ours: Value = rmp_serde::from_slice(&encode_like(&[0; 10], events, HashForm::Int)).unwrap();
            let mut theirs = expected["payload"][1].as_array().unwrap().clone();
            theirs.retain(|event| event["type"] != "AllBlocksCleared");
            for event in &mut theirs {
                // a note of whoever recorded it
                event.as_object_mut().unwrap().remove("decoded_text");
            }
            assert_eq!(ours[1], Value::Array(theirs), "{name}");
            batches_seen += 1;
        }
        records += 1;
    }
    assert_eq!((records, batches_seen), (2, 4));
}

/// The engines' own encoders, fed with other hashes: all else must agree, names, order and types.
#[test]
fn both_encodings_have_the_engines_fields() {
    let versions = fixture_json("vllm/wire_frames_by_version.json");
    let mut seen = 0;
    for record in versions.as_array().unwrap() {
        let encoding = match record["vllm"].as_str().unwrap() {
            "0.22.1" | "0.23.0" => EventEncoding::Array,
            "0.24.0" | "0.28.0" | "0.32.0" => EventEncoding::Map,
            _ => continue,
        };
        if record["hash_type"] != "int" {
            continue;
        }
        let bytes: Vec<u8> = (0..record["payload_hex"].as_str().unwrap().len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&record["payload_hex"].as_str().unwrap()[at..at + 2], 16).unwrap())
            .collect();
        let mut engine = Engine::new("sha256_cbor", None, ExtraKeys::Tagged, 3);
        let salted = Namespace { lora: None, cache_salt: Some("tenant-a".into()) };
        let job = |start: u32, count: u32, namespace: Namespace| Job {
            prompts: vec![(start..start + count).collect()],
            namespace,
            ..Job::default()
        };
        let (mut batches, _) = engine.run(&job(250, 32, salted));
        let mut events = batches.remove(0);
        let (mut batches, _) = engine.run(&job(7, 1, Namespace::default()));
        events.extend(batches.remove(0));
        assert!(engine.0.reset_prefix_cache());
        events.extend(engine.0.take_events());
        let ours = Wire { encoding, hashes: HashForm::Int }.encode(1795986728.5, &events).unwrap();
        assert_eq!(unhashed(&ours), unhashed(&bytes), "{}", record["vllm"]);
        seen += 1;
    }
    assert_eq!(seen, 5);
}

fn unhashed(payload: &[u8]) -> String {
    let mut value: Value = rmp_serde::from_slice(payload).unwrap();
    for event in value[1].as_array_mut().unwrap() {
        let hashes = if event.is_object() { event.get_mut("block_hashes") } else { event.get_mut(1) };
        for hash in hashes.and_then(Value::as_array_mut).into_iter().flatten() {
            *hash = Value::Null;
        }
    }
    value.to_string()
}
