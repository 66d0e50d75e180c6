//! Chats that look like those a gateway sees: prose, code and JSON, from a seeded generator. No two seeds give one
//! text, so that no cache of a tokenizer has seen it.

use kvgate_core::Random;
use serde_json::{Value, json};

/// Common English, most frequent first; what is drawn falls off as word frequencies do.
const WORDS: &str = "the of and to in is that for it as with on be by this are from or an at which not have was \
    we can will has its all if when one their other use there each more about how many then them these so some \
    would make like into time look two write see number way could people than first water been call who now find \
    long down day did get come made may part over new sound take only little work know place year live back give \
    most very after thing our just name good sentence man think say great where help through much before line right \
    too mean old any same tell boy follow came want show also around form three small set put end does another well \
    large must big even such because turn here why ask went men read need land different home us move try kind hand \
    picture again change off play spell air away animal house point page letter mother answer found study still \
    learn should america world request model engine cache block token latency server memory prefix queue worker";

/// Parts of names and of rare words.
const SYLLABLES: &str = "ka lo mer tis ven dor ash pri qua rel sto ume vi xen yor zel bra cti fen gho";

/// A conversation: role and text, the system's message first, the user's last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chat(pub Vec<(&'static str, String)>);

impl Chat {
    /// A chat of about `bytes` bytes in `messages` messages of like size.
    pub fn new(seed: u64, bytes: usize, messages: usize) -> Self {
        let mut writer = Writer { random: Random::new(seed), text: String::new() };
        let each = bytes / messages.max(1);
        let roles = (0..messages).map(|at| match at {
            0 => "system",
            n if n % 2 == 1 => "user",
            _ => "assistant",
        });
        Self(roles.map(|role| (role, writer.message(each))).collect())
    }

    /// The request for a chat completion with the first `messages` messages.
    pub fn body(&self, messages: usize) -> Vec<u8> {
        let kept = self.0.iter().take(messages);
        let kept: Vec<Value> = kept.map(|(role, text)| json!({"role": role, "content": text})).collect();
        json!({"model": "tiny-qwen3", "messages": kept, "stream": true, "temperature": 0.7, "max_tokens": 512})
            .to_string()
            .into_bytes()
    }
}

struct Writer {
    random: Random,
    text: String,
}

impl Writer {
    fn below(&mut self, bound: usize) -> usize {
        self.random.below(bound)
    }

    fn message(&mut self, bytes: usize) -> String {
        self.text = String::with_capacity(bytes + 256);
        while self.text.len() < bytes {
            match self.below(10) {
                0..=5 => self.paragraph(),
                6..=8 => self.code(),
                _ => self.json(),
            }
        }
        std::mem::take(&mut self.text)
    }

    /// A word: common ones often, rare ones and numbers sometimes.
    fn word(&mut self) -> String {
        match self.below(24) {
            0 => self.rare(),
            1 => self.below(100_000).to_string(),
            _ => {
                let common: Vec<&str> = WORDS.split_whitespace().collect();
                let rank = self.below(common.len()) * self.below(common.len()) / common.len();
                common.get(rank).copied().unwrap_or("the").to_owned()
            }
        }
    }

    fn rare(&mut self) -> String {
        let syllables: Vec<&str> = SYLLABLES.split_whitespace().collect();
        let count = 2 + self.below(3);
        (0..count).map(|_| syllables.get(self.below(syllables.len())).copied().unwrap_or("ka")).collect()
    }

    fn sentence(&mut self) -> String {
        let count = 5 + self.below(16);
        let words: Vec<String> = (0..count).map(|_| self.word()).collect();
        let mut sentence = words.join(" ");
        if let Some(first) = sentence.get_mut(..1) {
            first.make_ascii_uppercase();
        }
        let end = ["?", ", however.", ": so be it."].get(self.below(8)).copied().unwrap_or(".");
        sentence + end
    }

    fn paragraph(&mut self) {
        let count = 2 + self.below(5);
        let sentences: Vec<String> = (0..count).map(|_| self.sentence()).collect();
        self.text += &sentences.join(" ");
        self.text += "\n\n";
    }

    fn code(&mut self) {
        let (name, field, call) = (self.rare(), self.word(), self.rare());
        let (limit, step) = (self.below(5000), self.below(64));
        let comment = self.sentence();
        self.text += &format!(
            "```python\ndef {name}_{field}(self, items, limit={limit}):\n    # {comment}\n    for i, item in \
             enumerate(items[:limit]):\n        if item.{field} % {step} == 0 and not self.{call}(item):\n            \
             raise ValueError(f\"{name}: {{item!r}} at {{i}}\")\n    return [x.{call} for x in items]\n```\n\n",
        );
    }

    fn json(&mut self) {
        let mut row = || {
            let (id, score) = (self.random.next_u64() >> 40, self.below(10_000) as f64 / 100.0);
            json!({"id": id, "name": self.rare(), "score": score, "tags": [self.word(), self.word()]})
        };
        let rows = Value::Array(vec![row(), row(), row()]);
        self.text += &format!("{rows:#}\n\n");
    }
}
