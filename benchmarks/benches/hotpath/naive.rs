//! The pipeline that first comes to mind, of good libraries used plainly: a JSON tree, the released tokenizer, a
//! CBOR library, a hash set per endpoint walked block by block. What kvgate is measured against.

use std::collections::HashSet;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Value, context};
use sha2::{Digest, Sha256};
use tokenizers_0_23::Tokenizer;

/// One model and the blocks that each endpoint holds.
pub struct Naive {
    tokenizer: Tokenizer,
    templates: Environment<'static>,
    root: Vec<u8>,
    pub held: Vec<HashSet<u64>>,
}

impl Naive {
    /// Loads a staged model; `seed` is the engines' `PYTHONHASHSEED`.
    pub fn load(folder: &Path, seed: &str, endpoints: usize) -> Self {
        let config = std::fs::read(folder.join("tokenizer_config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        let mut templates = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap();
        templates.set_syntax(syntax);
        templates.set_auto_escape_callback(|_| AutoEscape::None);
        templates.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        templates.add_template_owned("chat", config["chat_template"].as_str().unwrap().to_owned()).unwrap();
        let mut root = Vec::new();
        ciborium::into_writer(seed, &mut root).unwrap();
        Self {
            tokenizer: Tokenizer::from_file(folder.join("tokenizer.json")).unwrap(),
            templates,
            root: Sha256::digest(&root).to_vec(),
            held: vec![HashSet::new(); endpoints],
        }
    }

    pub fn parse(&self, body: &[u8]) -> serde_json::Value {
        serde_json::from_slice(body).unwrap()
    }

    pub fn render(&self, body: &serde_json::Value) -> String {
        let text = |of: &serde_json::Value| Value::from(of.as_str().unwrap());
        let message = |m: &serde_json::Value| {
            Value::from_pairs([("role", text(&m["role"])), ("content", text(&m["content"]))])
        };
        let messages: Value = body["messages"].as_array().unwrap().iter().map(message).collect();
        let template = self.templates.get_template("chat").unwrap();
        template.render(context! { messages, add_generation_prompt => true }).unwrap()
    }

    pub fn encode(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text, false).unwrap().get_ids().to_vec()
    }

    /// Block hashes as vLLM's `sha256_cbor` gives them.
    pub fn hashes(&self, tokens: &[u32], block_size: usize) -> Vec<u64> {
        let mut parent = self.root.clone();
        let blocks = tokens.chunks_exact(block_size).map(|block| {
            let mut bytes = Vec::new();
            ciborium::into_writer(&(serde_bytes::Bytes::new(&parent), block, None::<u8>), &mut bytes)
                .unwrap();
            parent = Sha256::digest(&bytes).to_vec();
            u64::from_be_bytes(*parent.last_chunk().unwrap())
        });
        blocks.collect()
    }

    /// The endpoint that holds the longest prefix, and how many blocks.
    pub fn lookup(&self, hashes: &[u64]) -> Option<(usize, usize)> {
        let overlaps = self.held.iter().map(|held| hashes.iter().take_while(|h| held.contains(h)).count());
        overlaps.enumerate().max_by_key(|(at, blocks)| (*blocks, std::cmp::Reverse(*at)))
    }

    /// The whole decision.
    pub fn decide(&self, body: &[u8], block_size: usize) -> Option<(usize, usize)> {
        let text = self.render(&self.parse(body));
        self.lookup(&self.hashes(&self.encode(&text), block_size))
    }
}
