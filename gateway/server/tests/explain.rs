//! `kvgate explain` says of the requests of live vLLM engines what these engines did with them.
#![allow(clippy::unwrap_used, clippy::panic)]

mod command;

use std::collections::BTreeSet;
use std::path::Path;

use command::Folder;
use kvgate_kv::hash::{Contract, Digest, Lora, Namespace};
use kvgate_tests::{fixture_json, golden, golden_model, tokenizers};
use serde::Deserialize;
use serde_json::{Value, json};

/// The keys of an answer, in order.
const KEYS: [&str; 8] =
    ["rule", "model", "prompt", "token_ids", "contract", "block_hashes", "miss", "detail"];

/// An answer, with one sequence or several as several.
#[derive(Debug)]
struct Explained {
    prompts: Vec<Option<String>>,
    token_ids: Vec<Vec<u32>>,
    contract: Contract,
    block_hashes: Vec<u64>,
    miss: Option<String>,
}

impl Explained {
    fn read(line: &str) -> Self {
        let value: Value = serde_json::from_str(line).unwrap();
        assert!(value.as_object().unwrap().keys().eq(KEYS), "{line}");
        Self {
            prompts: match &value["prompt"] {
                Value::Array(all) => all.iter().map(|p| p.as_str().map(str::to_owned)).collect(),
                one => vec![one.as_str().map(str::to_owned)],
            },
            token_ids: ids(&value["token_ids"]),
            contract: Contract::deserialize(&value["contract"]).unwrap(),
            block_hashes: numbers(&value["block_hashes"]),
            miss: value["miss"].as_str().map(str::to_owned),
        }
    }
}

/// The ids of one sequence or several, as several.
fn ids(ids: &Value) -> Vec<Vec<u32>> {
    match ids {
        Value::Array(all) if all.first().is_some_and(Value::is_array) => {
            all.iter().map(|one| Vec::deserialize(one).unwrap()).collect()
        }
        Value::Null => Vec::new(),
        one => vec![Vec::deserialize(one).unwrap()],
    }
}

/// Hashes, in whichever form they are recorded.
fn numbers(hashes: &Value) -> Vec<u64> {
    let number = |hash: &Value| match hash {
        Value::String(decimal) => decimal.parse().unwrap(),
        Value::Object(bytes) => {
            let hex = bytes["__bytes__"].as_str().unwrap();
            u64::from_str_radix(&hex[hex.len() - 16..], 16).unwrap()
        }
        number => number.as_u64().unwrap(),
    };
    hashes.as_array().unwrap().iter().map(number).collect()
}

/// The hashes of all blocks that the engine announced as stored, in order.
fn published(record: &Value) -> Vec<u64> {
    if !record["stored_block_hashes"].is_null() {
        return numbers(&record["stored_block_hashes"]);
    }
    let batches = record["events"].as_array().unwrap().iter();
    let events = batches.flat_map(|batch| batch["payload"][1].as_array().unwrap());
    events.filter(|e| e["type"] == "BlockStored").flat_map(|e| numbers(&e["block_hashes"])).collect()
}

/// The prompt's ids as the engine had them, wherever the record has them.
fn prompt_ids(record: &Value) -> Vec<Vec<u32>> {
    let answer = record["response"].as_str().unwrap_or_default();
    let answer: Value = serde_json::from_str(answer).unwrap_or_default();
    let places =
        [&record["prompt_token_ids"], &answer["prompt_token_ids"], &answer["choices"][0]["prompt_token_ids"]];
    places.into_iter().find(|ids| ids.is_array()).map(ids).unwrap_or_default()
}

fn contract(algorithm: &str, seed: Option<&str>, extra_keys: &str) -> String {
    let seed = seed.map(|seed| format!("none_hash_seed = {seed:?}\n")).unwrap_or_default();
    format!(
        "tiers = [\"kv-exact\"]\n[tier.kv-exact.contract]\nmode = \"strict\"\nalgorithm = \"{algorithm}\"\n\
         block_size = 16\nextra_keys = \"{extra_keys}\"\n{seed}"
    )
}

/// The requests of records and what `kvgate explain` says of them, by a rule with these tables.
fn explain(tokenizers: &Path, rule: &str, records: &[Value]) -> Vec<Explained> {
    let folder = Folder::new(tokenizers, rule);
    let lines: String = records
        .iter()
        .map(|record| {
            let request = if record["request"]["path"].is_string() { &record["request"] } else { record };
            let mut line = json!({"path": request["path"], "body": request["body"]});
            if request["headers"].is_object() {
                line["headers"] = request["headers"].clone();
            }
            format!("{line}\n")
        })
        .collect();
    folder.write("batch.jsonl", &lines);
    let done = folder.run("explain", &["--batch", "batch.jsonl", "--json"]);
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    let explained: Vec<_> = done.out.lines().map(Explained::read).collect();
    assert_eq!(explained.len(), records.len());
    explained
}

/// How many records were compared, and how.
#[derive(Debug, Default, PartialEq, Eq)]
struct Compared {
    /// The engine refused them.
    refused: usize,
    /// Of paths whose prompts are not understood.
    other_paths: usize,
    /// Ids are the engine's.
    ids: usize,
    /// Texts are what the engine's ids decode to.
    texts: usize,
    /// Hashes are those that the engine announced.
    hashes: usize,
}

fn compare(record: &Value, explained: &Explained, compared: &mut Compared) {
    let name = &record["name"];
    let request = if record["request"]["path"].is_string() { &record["request"] } else { record };
    let miss = explained.miss.as_deref();
    if record["status"].as_u64().is_some_and(|status| status == 400) {
        assert!(matches!(miss, Some("tokenize" | "text_empty")), "{name}: {miss:?}");
        assert!(explained.token_ids.is_empty() && explained.block_hashes.is_empty(), "{name}");
        compared.refused += 1;
        return;
    }
    if request["path"] == "/v1/responses" || request["path"] == "/v1/messages" {
        assert_eq!(miss, Some("text_empty"), "{name}");
        compared.other_paths += 1;
        return;
    }
    let engine = prompt_ids(record);
    if !engine.is_empty() {
        assert_eq!(explained.token_ids, engine, "{name}");
        compared.ids += 1;
    }
    let longest = explained.token_ids.iter().map(Vec::len).max().unwrap();
    assert_eq!(miss, (longest < 16).then_some("shallow"), "{name}");
    compared.texts += texts(name, &request["body"], &record["decoded_prompt"], explained);
    recomputed(name, &request["body"], explained);
    announced(record, explained);
    compared.hashes += 1;
}

/// Prompts that are text are what the engine's ids decode to; how many records were compared.
fn texts(name: &Value, body: &Value, decoded: &Value, explained: &Explained) -> usize {
    let decoded: Vec<&str> = match decoded {
        Value::String(one) => vec![one],
        Value::Array(all) => all.iter().map(|one| one.as_str().unwrap()).collect(),
        _ => return 0,
    };
    // decoding gives back the normal form of the text, and the special token before it
    let normal = |text: &str| {
        let text = text.trim_start_matches("<|begin_of_text|>");
        let composed =
            [("e\u{301}", "é"), ("A\u{30a}", "Å"), ("\u{212b}", "Å"), ("\u{1112}\u{1161}\u{11ab}", "한")];
        composed.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
    };
    assert_eq!(explained.prompts.len(), decoded.len(), "{name}");
    let mut compared = 0;
    for (prompt, decoded) in explained.prompts.iter().zip(decoded) {
        let Some(prompt) = prompt else {
            assert!(body["prompt"][0].is_number(), "{name}: only token ids have no text");
            continue;
        };
        let (prompt, decoded) = (normal(prompt), normal(decoded));
        match body["truncate_prompt_tokens"] {
            Value::Null => assert_eq!(prompt, decoded, "{name}"),
            _ => assert!(prompt.ends_with(&decoded), "{name}: {prompt} {decoded}"),
        }
        compared = 1;
    }
    compared
}

/// The hashes are those of the ids and the contract that stand beside them.
fn recomputed(name: &Value, body: &Value, explained: &Explained) {
    let hasher = explained.contract.hasher().unwrap();
    let lora = (body["model"] == "sql-lora")
        .then(|| Lora { name: "sql-lora".into(), path: "/adapters/sql-lora".into() });
    let namespace = Namespace { lora, cache_salt: body["cache_salt"].as_str().map(str::to_owned) };
    let blocks = explained.token_ids.iter().flat_map(|tokens| hasher.blocks(tokens, &namespace));
    assert_eq!(explained.block_hashes, blocks.map(|d: Digest| d.u64()).collect::<Vec<_>>(), "{name}");
}

/// The hashes are those that the engine announced: all of them when it had cached nothing, else the last ones.
fn announced(record: &Value, explained: &Explained) {
    let name = &record["name"];
    let mut announced = published(record);
    // the prompt's blocks come first, then those of what was generated
    announced.truncate(announced.len() - generated_blocks(record, explained, announced.len()));
    if record["mode"].as_str().is_some_and(|mode| mode != "isolated") {
        assert!(explained.block_hashes.ends_with(&announced), "{name}");
        return;
    }
    // equal prompts of one request are announced once or several times, as the engine finds it
    let distinct = |hashes: &[u64]| {
        let mut seen = BTreeSet::new();
        hashes.iter().copied().filter(|hash| seen.insert(*hash)).collect::<Vec<_>>()
    };
    assert_eq!(distinct(&announced), distinct(&explained.block_hashes), "{name}");
}

/// How many of the announced blocks are of generated tokens.
fn generated_blocks(record: &Value, explained: &Explained, announced: usize) -> usize {
    let outputs = ids(&record["output_token_ids"]);
    if outputs.is_empty() && record["body"]["n"].is_number() {
        return announced - explained.block_hashes.len();
    }
    let full = |tokens: usize| tokens / 16;
    let blocks = explained.token_ids.iter().zip(&outputs).map(|(prompt, output)| {
        // the last token's keys and values are never computed
        full(prompt.len() + output.len().saturating_sub(1)) - full(prompt.len())
    });
    let blocks: usize = blocks.sum();
    assert!(blocks == 0 || explained.token_ids.len() == 1, "{}: these come last", record["name"]);
    blocks
}

fn compare_all(tokenizers: &Path, rule: &str, records: &Value) -> Compared {
    let records = records.as_array().unwrap();
    let mut compared = Compared::default();
    for (record, explained) in records.iter().zip(explain(tokenizers, rule, records)) {
        compare(record, &explained, &mut compared);
    }
    compared
}

#[test]
fn requests_to_a_live_engine() {
    let run = |file: &str| {
        let records = fixture_json(&format!("vllm/{file}.json"));
        compare_all(&tokenizers(), &contract("sha256_cbor", Some("0"), "tagged"), &records)
    };
    let main = run("e2e_bs16_sha256cbor_seed0");
    assert_eq!(main, Compared { refused: 2, other_paths: 0, ids: 55, texts: 42, hashes: 55 });
    let extra = run("e2e_extra_bs16");
    assert_eq!(extra, Compared { refused: 3, other_paths: 2, ids: 3, texts: 0, hashes: 8 });
    let more = run("e2e_extra2_bs16");
    assert_eq!(more, Compared { refused: 1, other_paths: 0, ids: 9, texts: 9, hashes: 9 });
}

#[test]
fn requests_to_a_live_engine_with_another_tokenizer() {
    let file = "vllm/e2e_llama3_bs16_sha256cbor_seed0.json";
    let (Some(model), Some(records)) = (golden_model("tiny-llama3"), golden(file)) else { return };
    let records: Value = serde_json::from_slice(&records).unwrap();
    let rule = contract("sha256_cbor", Some("0"), "tagged");
    let compared = compare_all(model.parent().unwrap(), &rule, &records);
    assert_eq!(compared, Compared { refused: 0, other_paths: 0, ids: 22, texts: 18, hashes: 22 });
}

#[test]
fn variants_of_a_live_engine() {
    for (name, extra_keys) in [
        ("real_v0.28.0_s0", "bare"),
        ("v_sha256pickle_s0", "tagged"),
        ("v_shacbor_s0_bytes", "tagged"),
        ("v_shacbor_unset", "tagged"),
        ("v_xxhcbor_s0", "tagged"),
    ] {
        let mut variant = fixture_json(&format!("vllm/variant_{name}.json"));
        for record in variant["requests"].as_array_mut().unwrap() {
            let mut body = record["request"].take();
            body["model"] = "tiny-qwen3".into();
            record["request"] = json!({"path": "/v1/completions", "body": body});
        }
        let (algorithm, seed) = (variant["algo"].as_str().unwrap(), variant["pythonhashseed"].as_str());
        let rule = contract(algorithm, seed, extra_keys);
        let compared = compare_all(&tokenizers(), &rule, &variant["requests"]);
        assert_eq!(compared, Compared { ids: 5, hashes: 5, ..Compared::default() }, "{name}");
    }
}

#[test]
fn adapters_of_a_live_engine() {
    let mut records = fixture_json("vllm/e2e_lora_bs16.json");
    for record in records.as_array_mut().unwrap() {
        let model = record["lora_name"].as_str().unwrap_or("tiny-qwen3");
        let mut body = json!({"model": model, "prompt": record["token_ids"]});
        if record["cache_salt"].is_string() {
            body["cache_salt"] = record["cache_salt"].clone();
        }
        record["request"] = json!({"path": "/v1/completions", "body": body});
        record["prompt_token_ids"] = record["token_ids"].take();
        record["stored_block_hashes"] = record["published"].take();
    }
    let lora = "[tier.kv-exact.lora]\nsql-lora = \"/adapters/sql-lora\"\n";
    // the adapter has no tokenizer of its own: it uses that of the rule's one model that is no adapter
    for models in [r#"["tiny-qwen3"]"#, r#"["sql-lora", "tiny-qwen3"]"#] {
        let rule = contract("sha256_cbor", Some("0"), "tagged");
        let rule = format!("{rule}{lora}[match]\nmodels = {models}\n");
        let compared = compare_all(&tokenizers(), &rule, &records);
        assert_eq!(compared, Compared { ids: 3, hashes: 3, ..Compared::default() }, "{models}");
    }
}
