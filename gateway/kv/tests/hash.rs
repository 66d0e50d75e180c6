//! Block hashes against vLLM's own, and the serialised blocks against other writers.
#![allow(clippy::unwrap_used)]

use kvgate_kv::hash::{
    Algorithm, Caveat, Contract, ContractError, Digest, ExtraKey, ExtraKeys, Hasher, Lora, MAX_BLOCK_SIZE,
    Namespace, Scratch,
};
use kvgate_tests::{fixture_json, golden};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;

fn hex(s: &str) -> Vec<u8> {
    (0..s.len() / 2).map(|i| u8::from_str_radix(&s[2 * i..2 * i + 2], 16).unwrap()).collect()
}

fn hashes(decimal: &[String]) -> Vec<u64> {
    decimal.iter().map(|d| d.parse().unwrap()).collect()
}

fn contract(algorithm: Algorithm, block_size: u32, seed: Option<&str>, extra_keys: ExtraKeys) -> Contract {
    Contract { algorithm, block_size, seed: seed.map(str::to_owned), extra_keys }
}

#[derive(Deserialize)]
struct Vectors {
    cases: Vec<Case>,
}

/// A case of vLLM's own hasher.
#[derive(Deserialize)]
struct Case {
    name: String,
    algo: Algorithm,
    pythonhashseed: Option<String>,
    block_size: u32,
    token_ids: Vec<u64>,
    cache_salt: Option<String>,
    lora: Option<CaseLora>,
    mm: Option<Value>,
    prompt_embeds: Option<Value>,
    none_hash_hex: String,
    extra_keys_hashed: Vec<Value>,
    digests_hex: Vec<String>,
    u64: Vec<String>,
    block_cbor_hex: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct CaseLora {
    name: String,
    path: String,
}

/// The keys of a block as the vectors hold them: the hashed form of their generation, with embeddings aside.
fn keys<'a>(case: &'a Case, index: usize, embeds: &'a mut [u8; 32]) -> Vec<ExtraKey<'a>> {
    let mut keys = Vec::new();
    for key in case.extra_keys_hashed[index].as_array().into_iter().flatten() {
        let parts: Vec<&Value> = match key {
            Value::Array(parts) => parts.iter().collect(),
            bare => vec![bare],
        };
        let parts = match parts[0].as_str() {
            Some("lora" | "mm" | "cache_salt" | "prompt_embeds") => &parts[1..],
            _ => &parts[..],
        };
        match (parts, &case.lora) {
            ([id, offset], _) if offset.is_i64() => {
                keys.push(ExtraKey::Mm {
                    identifier: id.as_str().unwrap(),
                    offset: offset.as_i64().unwrap(),
                });
            }
            ([name, ..], Some(lora)) if name.as_str() == Some(&lora.name) => {
                keys.push(ExtraKey::Lora { name: &lora.name, path: &lora.path });
            }
            ([salt], _) if salt.is_string() => keys.push(ExtraKey::Salt(salt.as_str().unwrap())),
            ([digest], _) => embeds.copy_from_slice(&hex(digest["__bytes__"].as_str().unwrap())),
            other => panic!("{}: {other:?}", case.name),
        }
    }
    if *embeds != [0; 32] {
        keys.push(ExtraKey::Embeds(embeds));
    }
    keys
}

#[derive(Debug, Default, PartialEq)]
struct Ran {
    cases: usize,
    /// Those that [`Hasher::blocks`] can express.
    by_namespace: usize,
    /// Blocks whose CBOR is known.
    serialized: usize,
}

fn run(case: &Case, extra_keys: ExtraKeys, ran: &mut Ran) {
    ran.cases += 1;
    let contract = contract(case.algo, case.block_size, case.pythonhashseed.as_deref(), extra_keys);
    let hasher = contract.hasher().unwrap();
    assert_eq!(hasher.none_hash().to_string(), case.none_hash_hex, "{}", case.name);
    let mut scratch = Scratch::default();
    let mut parent = hasher.none_hash();
    let mut chain = Vec::new();
    for (index, tokens) in case.token_ids.chunks_exact(case.block_size as usize).enumerate() {
        let mut embeds = [0; 32];
        let keys = keys(case, index, &mut embeds);
        parent = hasher.block(&parent, tokens, &keys, &mut scratch);
        if let Some(bytes) = case.block_cbor_hex.as_ref().and_then(|blocks| blocks.get(index)) {
            assert_eq!(scratch.bytes(), hex(bytes), "{} block {index}", case.name);
            ran.serialized += 1;
        }
        chain.push(parent);
    }
    let digests: Vec<_> = chain.iter().map(Digest::to_string).collect();
    assert_eq!(digests, case.digests_hex, "{}", case.name);
    assert_eq!(chain.iter().map(Digest::u64).collect::<Vec<_>>(), hashes(&case.u64), "{}", case.name);
    // ids beyond u32 are in no vocabulary, so that prompts never hold them
    let token_ids: Result<Vec<u32>, _> = case.token_ids.iter().map(|&t| t.try_into()).collect();
    if let (None, None, Ok(token_ids)) = (&case.mm, &case.prompt_embeds, token_ids) {
        let lora = case.lora.as_ref().map(|l| Lora { name: l.name.clone(), path: l.path.clone() });
        let namespace = Namespace { lora, cache_salt: case.cache_salt.clone() };
        assert_eq!(hasher.blocks(&token_ids, &namespace), chain, "{}", case.name);
        ran.by_namespace += 1;
    }
}

fn vectors(name: &str, extra_keys: ExtraKeys) -> Ran {
    let vectors: Vectors = serde_json::from_value(fixture_json(name)).unwrap();
    let mut ran = Ran::default();
    vectors.cases.iter().for_each(|case| run(case, extra_keys, &mut ran));
    ran
}

#[test]
fn vectors_of_0_32() {
    let ran = vectors("vllm/hash_vectors_v0.32.0.json", ExtraKeys::Tagged);
    assert_eq!(ran, Ran { cases: 113, by_namespace: 101, serialized: 136 });
}

#[test]
fn vectors_of_0_28() {
    let ran = vectors("vllm/hash_vectors_v0.28.0.json", ExtraKeys::Bare);
    assert_eq!(ran, Ran { cases: 111, by_namespace: 99, serialized: 134 });
}

#[test]
fn a_chain_made_with_python() {
    let golden = fixture_json("vllm/chain_cbor2_64blocks.json");
    let tokens: Vec<u32> = serde_json::from_value(golden["tokens"].clone()).unwrap();
    for (name, algorithm) in [("sha256", Algorithm::Sha256Cbor), ("xxh3", Algorithm::XxhashCbor)] {
        let hasher = contract(algorithm, 16, Some("0"), ExtraKeys::Tagged).hasher().unwrap();
        assert_eq!(hasher.none_hash().to_string(), golden[name]["none"]);
        let chain: Vec<_> =
            hasher.blocks(&tokens, &Namespace::default()).iter().map(Digest::to_string).collect();
        assert_eq!(chain.len(), 64);
        assert_eq!(Value::from(chain), golden[name]["digests"]);
    }
}

/// A record of a live engine: what it was sent, and what it published.
#[derive(Deserialize)]
struct Record {
    name: String,
    request: Option<Value>,
    body: Option<Value>,
    usage: Option<Value>,
    prompt_token_ids: Option<Prompts>,
    output_token_ids: Option<Prompts>,
    stored_block_hashes: Option<Vec<String>>,
    #[serde(default)]
    events: Vec<Value>,
}

#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum Prompts {
    One(Vec<u32>),
    Many(Vec<Vec<u32>>),
}

impl Prompts {
    fn list(&self) -> Vec<Vec<u32>> {
        match self {
            Prompts::One(p) => vec![p.clone()],
            Prompts::Many(p) => p.clone(),
        }
    }
}

impl Record {
    fn body(&self) -> &Value {
        let request = self.request.as_ref().or(self.body.as_ref()).unwrap();
        request.get("body").unwrap_or(request)
    }

    /// The hashes of the stored events, in order; whole digests by their last eight bytes.
    fn published(&self) -> Vec<u64> {
        let batches = self.events.iter().flat_map(|e| e["payload"][1].as_array().unwrap());
        let stored = batches.filter(|e| e["type"] == "BlockStored");
        stored
            .flat_map(|e| e["block_hashes"].as_array().unwrap())
            .map(|hash| {
                hash.as_u64().unwrap_or_else(|| {
                    let digest = hex(hash["__bytes__"].as_str().unwrap());
                    u64::from_be_bytes(*digest.last_chunk().unwrap())
                })
            })
            .collect()
    }

    /// What a cache that held `cached_tokens` of the prompt has to publish: the full blocks of the prompt and of what
    /// was generated, without the last token, whose keys and values were never computed.
    fn expected(&self, hasher: &Hasher) -> Vec<u64> {
        let cache_salt = self.body()["cache_salt"].as_str().map(str::to_owned);
        let namespace = Namespace { lora: None, cache_salt };
        let prompts = self.prompt_token_ids.as_ref().unwrap().list();
        let outputs = self.output_token_ids.as_ref().map(Prompts::list).unwrap_or_default();
        let cached = match &self.usage {
            _ if self.body()["vllm_xargs"]["kv_cache_report_mode"] == "full" => 0,
            Some(usage) => usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
            None => 0,
        };
        let mut expected = Vec::new();
        for (index, mut tokens) in prompts.into_iter().enumerate() {
            if let Some((_, generated)) = outputs.get(index).and_then(|o| o.split_last()) {
                tokens.extend(generated);
            }
            let chain = hasher.blocks(&tokens, &namespace);
            expected.extend(chain.iter().skip(cached as usize / hasher.block_size()).map(Digest::u64));
        }
        expected
    }
}

/// Checks all answered records; returns them and their blocks by count.
fn end_to_end(records: Value) -> (usize, usize) {
    let hasher = contract(Algorithm::Sha256Cbor, 16, Some("0"), ExtraKeys::Tagged).hasher().unwrap();
    let records: Vec<Record> = serde_json::from_value(records).unwrap();
    let answered: Vec<_> = records.iter().filter(|r| r.prompt_token_ids.is_some()).collect();
    let mut blocks = 0;
    for record in &answered {
        let stored = hashes(record.stored_block_hashes.as_ref().unwrap());
        assert_eq!(record.expected(&hasher), stored, "{}", record.name);
        blocks += stored.len();
    }
    (answered.len(), blocks)
}

#[test]
fn requests_to_a_live_engine() {
    assert_eq!(end_to_end(fixture_json("vllm/e2e_bs16_sha256cbor_seed0.json")), (55, 694));
    assert_eq!(end_to_end(fixture_json("vllm/e2e_extra2_bs16.json")), (9, 23));
    if let Some(bytes) = golden("vllm/e2e_llama3_bs16_sha256cbor_seed0.json") {
        assert_eq!(end_to_end(serde_json::from_slice(&bytes).unwrap()), (22, 88));
    }
}

#[test]
fn variants_of_a_live_engine() {
    #[derive(Deserialize)]
    struct Variant {
        pythonhashseed: Option<String>,
        algo: Algorithm,
        block_size: u32,
        requests: Vec<Record>,
    }
    let mut blocks = 0;
    for (name, extra_keys) in [
        ("real_v0.28.0_s0", ExtraKeys::Bare),
        ("v_sha256pickle_s0", ExtraKeys::Tagged),
        ("v_shacbor_s0_bytes", ExtraKeys::Tagged),
        ("v_shacbor_unset", ExtraKeys::Tagged),
        ("v_xxhcbor_s0", ExtraKeys::Tagged),
    ] {
        let variant: Variant =
            serde_json::from_value(fixture_json(&format!("vllm/variant_{name}.json"))).unwrap();
        let seed = variant.pythonhashseed.as_deref();
        let hasher = contract(variant.algo, variant.block_size, seed, extra_keys).hasher().unwrap();
        assert_eq!(variant.requests.len(), 5, "{name}");
        for record in &variant.requests {
            let published = record.published();
            assert_eq!(record.expected(&hasher), published, "{name} {}", record.name);
            blocks += published.len();
        }
    }
    assert_eq!(blocks, 95);
}

#[test]
fn adapters_of_a_live_engine() {
    #[derive(Deserialize)]
    struct Adapted {
        name: String,
        lora_name: Option<String>,
        lora_path: Option<String>,
        cache_salt: Option<String>,
        token_ids: Vec<u32>,
        published: Vec<String>,
    }
    let hasher = contract(Algorithm::Sha256Cbor, 16, Some("0"), ExtraKeys::Tagged).hasher().unwrap();
    let records: Vec<Adapted> = serde_json::from_value(fixture_json("vllm/e2e_lora_bs16.json")).unwrap();
    assert_eq!(records.len(), 3);
    for record in records {
        let lora = record.lora_name.zip(record.lora_path).map(|(name, path)| Lora { name, path });
        let namespace = Namespace { lora, cache_salt: record.cache_salt };
        let chain: Vec<_> = hasher.blocks(&record.token_ids, &namespace).iter().map(Digest::u64).collect();
        assert_eq!(chain, hashes(&record.published), "{}", record.name);
    }
}

#[test]
fn unusable_contracts_say_why() {
    for algorithm in [Algorithm::Xxhash, Algorithm::XxhashCbor] {
        for extra_keys in [ExtraKeys::Tagged, ExtraKeys::Bare] {
            let error = contract(algorithm, 16, None, extra_keys).hasher().unwrap_err();
            assert_eq!(error, ContractError::RandomSeed(algorithm));
        }
    }
    for size in [0, MAX_BLOCK_SIZE + 1] {
        let error = contract(Algorithm::Sha256, size, None, ExtraKeys::Tagged).hasher().unwrap_err();
        assert_eq!(error, ContractError::BlockSize(size));
    }
    assert_eq!(
        "md5".parse::<Algorithm>().unwrap_err().to_string(),
        "unknown hash algorithm \"md5\": sha256_cbor, xxhash_cbor, sha256 or xxhash"
    );
}

#[test]
fn an_absent_seed_is_a_caveat() {
    let caveat = |seed, extra_keys| contract(Algorithm::Sha256, 16, seed, extra_keys).caveat();
    assert_eq!(caveat(Some(""), ExtraKeys::Bare), None);
    assert_eq!(caveat(None, ExtraKeys::Tagged), Some(Caveat::SeedUnset));
    assert_eq!(caveat(None, ExtraKeys::Bare), Some(Caveat::SeedMayBeRandom));
}

#[test]
fn names_are_those_of_the_configuration() {
    for algorithm in Algorithm::ALL {
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        assert_eq!(serde_json::to_value(algorithm).unwrap(), algorithm.name());
    }
    let read: Contract = serde_json::from_value(serde_json::json!({
        "algorithm": "xxhash_cbor", "block_size": 32, "none_hash_seed": "0", "extra_keys": "bare",
    }))
    .unwrap();
    assert_eq!(read, contract(Algorithm::XxhashCbor, 32, Some("0"), ExtraKeys::Bare));
    let read: Contract =
        serde_json::from_value(serde_json::json!({"algorithm": "sha256", "block_size": 16})).unwrap();
    assert_eq!(read, contract(Algorithm::Sha256, 16, None, ExtraKeys::Tagged));
}

#[derive(Clone, Debug)]
enum Key {
    Lora(String, String),
    Mm(String, i64),
    Salt(String),
    Embeds([u8; 32]),
}

impl Key {
    fn borrow(&self) -> ExtraKey<'_> {
        match self {
            Key::Lora(name, path) => ExtraKey::Lora { name, path },
            Key::Mm(identifier, offset) => ExtraKey::Mm { identifier, offset: *offset },
            Key::Salt(salt) => ExtraKey::Salt(salt),
            Key::Embeds(digest) => ExtraKey::Embeds(digest),
        }
    }

    /// As `ciborium` takes it.
    fn value(&self, form: ExtraKeys) -> ciborium::Value {
        use ciborium::Value as V;
        let (tag, values) = match self.clone() {
            Key::Lora(name, _) if form == ExtraKeys::Bare => return V::Text(name),
            Key::Lora(name, path) => ("lora", vec![V::Text(name), V::Text(path)]),
            Key::Mm(id, offset) if form == ExtraKeys::Bare => {
                return V::Array(vec![V::Text(id), V::Integer(offset.into())]);
            }
            Key::Mm(id, offset) => ("mm", vec![V::Text(id), V::Integer(offset.into())]),
            Key::Salt(salt) => ("cache_salt", vec![V::Text(salt)]),
            Key::Embeds(digest) => ("prompt_embeds", vec![V::Bytes(digest.to_vec())]),
        };
        match form {
            ExtraKeys::Tagged => V::Array(std::iter::once(V::Text(tag.into())).chain(values).collect()),
            ExtraKeys::Bare => values.into_iter().next().unwrap(),
        }
    }
}

fn key() -> impl Strategy<Value = Key> {
    prop_oneof![
        (".{0,40}", ".{0,300}").prop_map(|(name, path)| Key::Lora(name, path)),
        (".{0,40}", any::<i64>()).prop_map(|(id, offset)| Key::Mm(id, offset)),
        (".{0,40}", -300_i64..300).prop_map(|(id, offset)| Key::Mm(id, offset)),
        ".{0,300}".prop_map(Key::Salt),
        any::<[u8; 32]>().prop_map(Key::Embeds),
    ]
}

fn token() -> impl Strategy<Value = u32> {
    prop_oneof![0_u32..300, 65_000_u32..66_000, any::<u32>()]
}

proptest! {
    #[test]
    fn cbor_is_what_ciborium_writes(
        tokens in prop::collection::vec(token(), 0..300),
        keys in prop::collection::vec(key(), 0..30),
        bare: bool,
        short: bool,
    ) {
        let algorithm = if short { Algorithm::XxhashCbor } else { Algorithm::Sha256Cbor };
        let form = if bare { ExtraKeys::Bare } else { ExtraKeys::Tagged };
        let hasher = contract(algorithm, 16, Some("0"), form).hasher().unwrap();
        let parent = hasher.none_hash();
        let mut scratch = Scratch::default();
        let borrowed: Vec<_> = keys.iter().map(Key::borrow).collect();
        hasher.block(&parent, &tokens, &borrowed, &mut scratch);

        use ciborium::Value as V;
        let extra = match &keys[..] {
            [] => V::Null,
            keys => V::Array(keys.iter().map(|k| k.value(form)).collect()),
        };
        let tokens = tokens.iter().map(|&t| V::Integer(t.into())).collect();
        let block = V::Array(vec![V::Bytes(parent.as_bytes().to_vec()), V::Array(tokens), extra]);
        let mut expected = Vec::new();
        ciborium::into_writer(&block, &mut expected).unwrap();
        prop_assert_eq!(scratch.bytes(), expected);
    }

    #[test]
    fn a_longer_prompt_keeps_its_first_hashes(tokens in prop::collection::vec(token(), 0..100), more in token()) {
        let hasher = contract(Algorithm::Sha256, 4, None, ExtraKeys::Tagged).hasher().unwrap();
        let chain = hasher.blocks(&tokens, &Namespace::default());
        prop_assert_eq!(chain.len(), tokens.len() / 4);
        let longer: Vec<_> = tokens.iter().copied().chain([more; 4]).collect();
        let longer = hasher.blocks(&longer, &Namespace::default());
        prop_assert_eq!(&longer[..chain.len()], &chain[..]);
    }
}
