//! Ids against another tokenizer library, and the cache of encoded turns against no cache.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use kvgate_prompt::{Model, TokenizersConfig};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use tokenizers_oracle::Tokenizer;

struct Pair {
    cached: Model,
    plain: Model,
    oracle: Tokenizer,
}

impl Pair {
    fn load(folder: &Path) -> Self {
        let load = |cache_bytes| {
            Model::load(folder, &TokenizersConfig { cache_bytes, ..TokenizersConfig::default() })
        };
        let mut oracle = Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
        oracle.with_truncation(None).unwrap();
        Self { cached: load(1 << 20).unwrap(), plain: load(0).unwrap(), oracle }
    }

    /// The ids of a text, which all three agree on.
    fn check(&self, text: &str, special: bool) {
        let want = self.oracle.encode(text, special).unwrap();
        assert_eq!(*self.plain.encode(text, special).unwrap(), *want.get_ids(), "{text:?}");
        for _ in 0..2 {
            assert_eq!(*self.cached.encode(text, special).unwrap(), *want.get_ids(), "{text:?}");
        }
    }
}

fn qwen() -> PathBuf {
    kvgate_tests::tokenizers().join("tiny-qwen3")
}

static QWEN: LazyLock<Pair> = LazyLock::new(|| Pair::load(&qwen()));

/// Letters and marks of many scripts, as old as the Unicode tables of both libraries.
const OLD_LETTERS: &str = "[À-ɏ\u{300}-\u{36f}Ͱ-ԯ\u{591}-\u{6ff}\u{901}-\u{963}ᄀ-ᇿḀ-ỹἀ-ῼ\u{2000}-\u{206f}ぁ-ヿ一-俿가-귿😀-🙏]{1,12}";

/// Text as it may surround a cut: whole and broken special tokens, spaces, letters of many scripts.
fn text(specials: &'static [&'static str]) -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => prop::sample::select(specials).prop_map(str::to_owned),
        2 => (prop::sample::select(specials), 0..20_usize, 0..20_usize).prop_map(|(s, a, b)| {
            let chars: Vec<char> = s.chars().collect();
            chars.into_iter().skip(a).take(b).collect()
        }),
        3 => prop::sample::select(&[" ", "\n", "\n\n", "\t", "  ", "\r\n", "'s", "1234", "user\n", "é", "e\u{301}", "日本語", "😀", ".", "<", "|>"][..])
            .prop_map(str::to_owned),
        4 => "[a-zA-Z ]{1,40}",
        2 => OLD_LETTERS,
    ];
    // long enough for the text to be cut
    prop::collection::vec(piece, 1..80).prop_map(|pieces| pieces.concat())
}

const QWEN_SPECIALS: &[&str] = &[
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "<|im_end|>\n<|im_start|>user\n",
];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]
    #[test]
    fn qwen3_ids(text in text(QWEN_SPECIALS), special in any::<bool>()) {
        QWEN.check(&text, special);
    }
}

#[test]
fn the_cache_is_used_for_chats() {
    assert_eq!(QWEN.cached.notes(), [""; 0]);
    let before = QWEN.cached.cache_stats();
    assert!(before.capacity > 0);
    assert_eq!(QWEN.plain.cache_stats().capacity, 0);
    let turn = |n: usize| format!("<|im_start|>user\nquestion {n} {}<|im_end|>\n", "word ".repeat(50));
    let chat: String = (0..10).map(turn).collect();
    QWEN.cached.encode(&chat, false).unwrap();
    let cold = QWEN.cached.cache_stats();
    QWEN.cached.encode(&(chat + &turn(10)), false).unwrap();
    let warm = QWEN.cached.cache_stats();
    assert_eq!(cold.misses - before.misses, 11);
    assert_eq!((warm.hits - cold.hits, warm.misses - cold.misses), (11, 1));
}

/// A small tokenizer with other added tokens, normalizer and pre-tokenizer; its text ends with `<e>`.
fn crafted(added: &[(&str, &str)], normalizer: serde_json::Value, pre_tokenizer: serde_json::Value) -> Pair {
    use serde_json::{Value, json};
    let words = kvgate_tests::tokenizers().join("tiny-words");
    let mut tokenizer: Value =
        serde_json::from_slice(&std::fs::read(words.join("tokenizer.json")).unwrap()).unwrap();
    let first = tokenizer["model"]["vocab"].as_object().unwrap().len();
    let added = added.iter().enumerate().map(|(i, (content, flags))| {
        let flag = |name| flags.split(' ').any(|f| f == name);
        json!({"id": first + i, "content": content, "special": !flag("plain"), "normalized": flag("normalized"),
            "lstrip": flag("lstrip"), "rstrip": flag("rstrip"), "single_word": flag("single_word")})
    });
    tokenizer["added_tokens"] = added.collect();
    tokenizer["normalizer"] = normalizer;
    if !pre_tokenizer.is_null() {
        tokenizer["pre_tokenizer"] = pre_tokenizer;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), r#"{"eos_token": "<e>"}"#).unwrap();
    Pair::load(folder.path())
}

const CRAFTED_SPECIALS: &[&str] = &[
    "<e>", "<e>x", "x<e>", "a<", "<e", "e>", "<s>", "word", "<e> <s>", "<e>word", " word ", "<E>", "<e><e>",
];

/// Added tokens, whether cutting after `<e>` is safe with them, and why not.
const SETS: [(&[(&str, &str)], bool); 12] = [
    (&[("<e>", ""), ("<s>", "")], true),
    (&[("<e>", "plain"), ("<s>", "plain")], true),
    (&[("<e>", ""), ("<s>", "lstrip rstrip"), ("word", "single_word plain")], true),
    (&[("<e>", ""), ("word", "normalized plain lstrip"), ("<s>", "normalized")], true),
    (&[("<e>", ""), ("e>", ""), ("<e", "")], true), // parts of it: it is longer, and begins no later
    (&[("<e>", ""), ("e>", ""), ("e>x", "")], true), // found only where "<e>" was not
    (&[("<e>", ""), ("<e>x", "")], false),          // longer
    (&[("<e>", ""), ("x<e>", "")], false),          // longer, and earlier
    (&[("<e>", ""), ("a<", "")], false),            // earlier
    (&[("<e>", "normalized")], false),
    (&[("<e>", "lstrip")], false),
    (&[("<e>", "single_word")], false),
];

#[test]
fn cutting_is_safe_or_off() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let texts = text(CRAFTED_SPECIALS);
    for (added, safe) in SETS {
        for normalizer in [
            serde_json::Value::Null,
            serde_json::json!({"type": "NFC"}),
            serde_json::json!({"type": "Lowercase"}),
        ] {
            let pair = crafted(added, normalizer, serde_json::Value::Null);
            assert_eq!(pair.cached.cache_stats().capacity > 0, safe, "{added:?}");
            assert_eq!(pair.cached.notes().iter().any(|note| note.contains("cut after")), !safe, "{added:?}");
            for _ in 0..40 {
                pair.check(&texts.new_tree(&mut runner).unwrap().current(), false);
            }
        }
    }
}

#[test]
fn tokenizers_that_know_the_start_of_a_text_are_not_cut() {
    use serde_json::json;
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for (scheme, safe) in [("first", false), ("always", true), ("never", true)] {
        let pair = crafted(&[("<e>", ""), ("<s>", "")], serde_json::Value::Null, metaspace(scheme));
        assert_eq!(pair.cached.cache_stats().capacity > 0, safe, "{scheme}");
        for _ in 0..40 {
            let text = text(CRAFTED_SPECIALS).new_tree(&mut runner).unwrap().current();
            assert_eq!(
                pair.cached.encode(&text, false),
                pair.plain.encode(&text, false),
                "{scheme} {text:?}"
            );
        }
    }
}

#[test]
fn llama3_ids() {
    let Some(folder) = kvgate_tests::golden_model("tiny-llama3") else { return };
    let specials =
        &["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eom_id|>"];
    let pair = Pair::load(&folder);
    assert!(pair.cached.cache_stats().capacity > 0);
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for i in 0..200 {
        pair.check(&text(specials).new_tree(&mut runner).unwrap().current(), i % 2 == 0);
    }
}
