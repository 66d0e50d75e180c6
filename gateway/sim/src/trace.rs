//! Traces of requests: what was asked when, as hashes of prompt prefixes, never as text.
//!
//! Two forms are read, line by line:
//! - Mooncake's (FAST '25 release): `{"timestamp": ms, "input_length": tokens, "output_length": tokens,
//!   "hash_ids": […]}`, one id for each started 512 tokens; equal ids mean an equal prompt up to there.
//! - the gateway's decision records, as its log at level debug holds them (in either format, other lines beside them)
//!   or as `/decisions` lists them.

use std::collections::HashMap;
use std::io::BufRead;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvgate_kv::own::mix;
use serde::Deserialize;

/// Tokens per block.
pub const BLOCK: usize = 16;
/// Tokens per hash of Mooncake's traces.
const MOONCAKE_SPAN: usize = 512;
/// The longest prompt taken: more is no prompt, but a mistake.
const MAX_TOKENS: usize = 1 << 24;
/// The target under which the log holds decision records.
pub const TARGET: &str = "kvgate::decision";
/// The longest trace: more is a mistake of the clock or its unit.
const LONGEST: Duration = Duration::from_secs(31 * 24 * 3600);
/// Letters of the text of a token: about what tokens of natural language have.
const LETTERS: usize = 4;
/// What more than one in so many prompts of a trace begin with are the system's words, not a user's.
const COMMON: usize = 10;

/// A prompt, known by hashes of its prefixes: tokens and text are made up, equal where the hashes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    tokens: usize,
    span: usize,
    ids: Vec<u64>,
    /// How many of the ids are of the system's words.
    system: usize,
}

impl Prompt {
    /// Of `tokens` tokens, each id standing for `span` of them and all before; where ids are missing, the prompt goes
    /// on as no other does, by `own`.
    pub fn new(tokens: usize, span: usize, mut ids: Vec<u64>, own: u64) -> Self {
        let span = span.max(1);
        let needed = tokens.div_ceil(span);
        ids.truncate(needed);
        let missing = ids.len()..needed;
        ids.extend(missing.map(|at| mix(mix(own, UNIQUE), at as u64)));
        Self { tokens, span, ids, system: 0 }
    }

    /// Its length in tokens.
    pub fn len(&self) -> usize {
        self.tokens
    }

    /// Whether it has no token.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Its tokens.
    pub fn tokens(&self) -> Vec<u32> {
        let of = |id: &u64| {
            let id = *id;
            (0..self.span).map(move |at| token(value(id, at)))
        };
        self.ids.iter().flat_map(of).take(self.tokens).collect()
    }

    /// The tokens of a full block.
    pub fn block(&self, block: usize) -> [u32; BLOCK] {
        std::array::from_fn(|at| token(self.value(block * BLOCK + at)))
    }

    /// A name for each full block, which stands for it and all before it; never 0.
    pub fn chain(&self) -> Arc<[u64]> {
        let mut name = UNIQUE;
        let names = (0..self.tokens / BLOCK).map(|block| {
            name = mix(name, self.value(block * BLOCK));
            name
        });
        names.collect()
    }

    /// A text, four letters for each token.
    pub fn text(&self) -> String {
        self.text_of(0..self.tokens)
    }

    /// The texts of the system's words and of what comes after, each of so many letters at most. The system's words
    /// are what many prompts of a trace begin with.
    pub fn opening(&self, longest: usize) -> (String, String) {
        let system = (self.system * self.span).min(self.tokens);
        let of = |range: Range<usize>| {
            let end = range.end.min(range.start + longest / LETTERS);
            self.text_of(range.start..end)
        };
        (of(0..system), of(system..self.tokens))
    }

    fn text_of(&self, range: Range<usize>) -> String {
        let letters =
            |value: u64| (0..LETTERS).map(move |at| char::from(b'a' + (value >> (8 * at)) as u8 % 16));
        range.flat_map(|at| letters(self.value(at))).collect()
    }

    fn value(&self, at: usize) -> u64 {
        value(self.ids.get(at / self.span).copied().unwrap_or_default(), at % self.span)
    }
}

/// What stands at a place of the span that an id stands for.
fn value(id: u64, at: usize) -> u64 {
    mix(id.wrapping_mul(SPREAD), at as u64 | SALT)
}

/// A token of 17 bits, as vocabularies are.
fn token(value: u64) -> u32 {
    (value >> 47) as u32
}

const UNIQUE: u64 = 0x9E37_79B9_7F4A_7C15;
const SPREAD: u64 = 0xD134_2543_DE82_EF95;
const SALT: u64 = 0x5851_F42D_4C95_7F00 << 8;

/// How long an answer takes once it has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It has so many tokens.
    Tokens(u64),
    /// It took so long.
    Took(Duration),
}

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// When, from the first request on.
    pub at: Duration,
    /// For what.
    pub prompt: Arc<Prompt>,
    /// The answer.
    pub answer: Answer,
}

/// What a trace holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The requests in order of time.
    pub requests: Vec<Asked>,
    /// Decision records of requests whose prompt was not recorded.
    pub without_prompt: usize,
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A line cannot be read.
    #[error("{file}:{line}: {why}")]
    Line {
        /// The trace, as it was named.
        file: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// There is no request in it.
    #[error("{file}: holds no request to replay{0}", .hint)]
    Empty {
        /// The trace, as it was named.
        file: String,
        /// What to do.
        hint: &'static str,
    },
}

#[derive(Deserialize)]
struct Mooncake {
    timestamp: f64,
    input_length: usize,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// The part of a decision record that is replayed.
#[derive(Deserialize)]
struct Decision {
    at_ms: u64,
    prompt: Option<Recorded>,
    #[serde(default)]
    first_byte_us: Option<u64>,
    #[serde(default)]
    total_us: u64,
}

#[derive(Deserialize)]
struct Recorded {
    tokens: usize,
    span: usize,
    hashes: Vec<String>,
}

/// A line of a log of JSON objects.
#[derive(Deserialize)]
struct Logged {
    target: String,
    fields: Message,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    message: String,
}

impl Trace {
    /// Reads a trace; `file` is what errors call it.
    ///
    /// # Errors
    /// The first line that is neither a request nor another line of a log; a trace without requests.
    pub fn read(file: &str, lines: impl BufRead) -> Result<Self, TraceError> {
        let mut reader = Reader::default();
        for (number, line) in (1..).zip(lines.lines()) {
            let read = line.map_err(|e| e.to_string()).and_then(|line| reader.line(line.trim()));
            read.map_err(|why| TraceError::Line { file: file.to_owned(), line: number, why })?;
        }
        let Reader { mut found, without_prompt } = reader;
        if found.is_empty() {
            let hint = match without_prompt {
                0 => "",
                _ => ": its decision records hold no prompts, which `decisions.prompt_hashes` turns on",
            };
            return Err(TraceError::Empty { file: file.to_owned(), hint });
        }
        find_system(&mut found);
        found.sort_by_key(|asked| asked.at);
        let first = found.first().map(|asked| asked.at).unwrap_or_default();
        found.iter_mut().for_each(|asked| asked.at -= first);
        Ok(Self { requests: found, without_prompt })
    }
}

/// Says of each prompt which of its ids are common to many.
fn find_system(requests: &mut [Asked]) {
    for depth in 0.. {
        let mut counts = HashMap::new();
        let at_depth = |asked: &Asked| {
            let prompt = &asked.prompt;
            prompt.ids.get(depth).copied().filter(|_| prompt.system == depth)
        };
        requests.iter().filter_map(at_depth).for_each(|id| *counts.entry(id).or_insert(0) += 1);
        counts.retain(|_, count| *count * COMMON > requests.len());
        if counts.is_empty() {
            return;
        }
        for asked in requests.iter_mut() {
            if at_depth(asked).is_some_and(|id| counts.contains_key(&id)) {
                Arc::make_mut(&mut asked.prompt).system = depth + 1;
            }
        }
    }
}

#[derive(Default)]
struct Reader {
    found: Vec<Asked>,
    without_prompt: usize,
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<(), String> {
        let wrong = |e: serde_json::Error| e.to_string();
        match line.as_bytes().first() {
            None => Ok(()),
            Some(b'[') => {
                let all: Vec<Decision> = serde_json::from_str(line).map_err(wrong)?;
                all.into_iter().try_for_each(|decision| self.decision(decision))
            }
            Some(b'{') => {
                // within a string a quote is escaped: what is found is a key
                let has = |key: &str| line.contains(key);
                if has("\"target\"") && has("\"fields\"") {
                    let logged: Logged = serde_json::from_str(line).map_err(wrong)?;
                    if logged.target != TARGET {
                        return Ok(());
                    }
                    self.decision(serde_json::from_str(&logged.fields.message).map_err(wrong)?)
                } else if has("\"timestamp\"") || has("\"hash_ids\"") {
                    self.mooncake(serde_json::from_str(line).map_err(wrong)?)
                } else {
                    self.decision(serde_json::from_str(line).map_err(wrong)?)
                }
            }
            Some(_) => match line.split_once(&format!("{TARGET}: ")) {
                Some((_, record)) => self.decision(serde_json::from_str(record).map_err(wrong)?),
                None if is_logged(line) => Ok(()),
                None => Err("is neither a request of a trace nor a line of a log".into()),
            },
        }
    }

    fn mooncake(&mut self, asked: Mooncake) -> Result<(), String> {
        let at =
            Duration::try_from_secs_f64(asked.timestamp / 1000.0).map_err(|e| format!("timestamp: {e}"))?;
        if asked.hash_ids.len() != asked.input_length.div_ceil(MOONCAKE_SPAN) {
            let (ids, tokens) = (asked.hash_ids.len(), asked.input_length);
            return Err(format!(
                "hash_ids: {ids} of them for {tokens} tokens, and each stands for {MOONCAKE_SPAN}"
            ));
        }
        self.push(at, asked.input_length, MOONCAKE_SPAN, asked.hash_ids, Answer::Tokens(asked.output_length))
    }

    fn decision(&mut self, decision: Decision) -> Result<(), String> {
        let Some(prompt) = decision.prompt else {
            self.without_prompt += 1;
            return Ok(());
        };
        let hash = |text: &String| {
            u64::from_str_radix(text, 16).map_err(|e| format!("prompt.hashes: {text:?}: {e}"))
        };
        let ids = prompt.hashes.iter().map(hash).collect::<Result<_, _>>()?;
        if prompt.span == 0 {
            return Err("prompt.span: is 0".into());
        }
        let first = decision.first_byte_us.unwrap_or(decision.total_us);
        let took = Duration::from_micros(decision.total_us.saturating_sub(first));
        self.push(Duration::from_millis(decision.at_ms), prompt.tokens, prompt.span, ids, Answer::Took(took))
    }

    fn push(
        &mut self,
        at: Duration,
        tokens: usize,
        span: usize,
        ids: Vec<u64>,
        answer: Answer,
    ) -> Result<(), String> {
        if tokens == 0 || tokens > MAX_TOKENS {
            return Err(format!("a prompt of {tokens} tokens; from 1 to {MAX_TOKENS} are taken"));
        }
        let first = self.found.first().map_or(at, |first| first.at);
        if at.abs_diff(first) > LONGEST {
            return Err("is more than a month from the first request".into());
        }
        let prompt = Arc::new(Prompt::new(tokens, span, ids, self.found.len() as u64));
        self.found.push(Asked { at, prompt, answer });
        Ok(())
    }
}

/// Whether a line begins with a time, as those of a log for people do.
fn is_logged(line: &str) -> bool {
    let form = |(at, c): (usize, char)| match at {
        4 | 7 => c == '-',
        10 => c == 'T',
        _ => c.is_ascii_digit(),
    };
    line.chars().count() > 11 && line.chars().take(11).enumerate().all(form)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Trace, String> {
        Trace::read("t", text.as_bytes()).map_err(|e| e.to_string())
    }

    fn prompt(tokens: usize, ids: &[u64]) -> Prompt {
        Prompt::new(tokens, 512, ids.to_vec(), 7)
    }

    #[test]
    fn prompts_are_equal_as_far_as_their_hashes_are() {
        let (a, b) = (prompt(1030, &[0, 1, 2]), prompt(2000, &[0, 1, 3, 4]));
        assert_eq!(a.tokens().len(), 1030);
        assert_eq!(a.tokens()[..1024], b.tokens()[..1024]);
        assert_ne!(a.tokens()[1024..], b.tokens()[1024..1030]);
        assert_eq!((a.chain().len(), b.chain().len()), (64, 125));
        assert_eq!(a.chain()[..64], b.chain()[..64]);
        assert_eq!((a.text().len(), b.text().len()), (1030 * 4, 2000 * 4));
        assert_eq!(a.text()[..1024 * 4], b.text()[..1024 * 4]);
        assert_ne!(a.text()[1024 * 4..], b.text()[1024 * 4..1030 * 4]);
        assert_eq!(a.block(3)[..], a.tokens()[48..64]);
        let mut all: Vec<_> = b.chain().to_vec();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 125, "no name twice");
    }

    #[test]
    fn what_has_no_hash_is_like_nothing_else() {
        let cut = |own| Prompt::new(1500, 512, vec![9], own);
        assert_eq!(cut(1).chain()[..32], cut(2).chain()[..32]);
        assert_ne!(cut(1).chain()[32..], cut(2).chain()[32..]);
        assert_eq!(cut(1), cut(1));
    }

    #[test]
    fn what_many_prompts_begin_with_are_the_words_of_the_system() {
        let line = |ids: &[u64]| {
            let tokens = ids.len() * 512 - 12;
            format!(
                r#"{{"timestamp": 0, "input_length": {tokens}, "output_length": 1, "hash_ids": {ids:?}}}"#
            )
        };
        let mut lines: Vec<_> = (10..14).map(|own| line(&[0, 1, own])).collect();
        lines.extend((20..36).map(|own| line(&[0, own])));
        lines.push(line(&[7, 0]));
        let trace = read(&lines.join("\n")).unwrap();
        let system = |at: usize| trace.requests[at].prompt.system;
        assert_eq!((system(0), system(4), system(20)), (2, 1, 0), "4, 20 and 1 of 21");
        let prompt = &trace.requests[0].prompt;
        let whole = prompt.text();
        assert_eq!(prompt.opening(8000), (whole[..1024 * 4].to_owned(), whole[1024 * 4..].to_owned()));
        let (system, first) = prompt.opening(402);
        assert_eq!((&*system, &*first), (&whole[..400], &whole[4096..4496]));
    }

    #[test]
    fn mooncake_lines_are_read_and_ordered() {
        let text = concat!(
            "{\"timestamp\": 5000, \"input_length\": 513, \"output_length\": 7, \"hash_ids\": [0, 2]}\n\n",
            "{\"timestamp\": 2000, \"input_length\": 16, \"output_length\": 1, \"hash_ids\": [0]}\n",
        );
        let trace = read(text).unwrap();
        let seen: Vec<_> =
            trace.requests.iter().map(|r| (r.at.as_millis(), r.prompt.len(), r.answer)).collect();
        assert_eq!(seen, [(0, 16, Answer::Tokens(1)), (3000, 513, Answer::Tokens(7))]);
    }

    #[test]
    fn decision_records_are_read_from_every_place_they_stand_in() {
        let record = |at: u64| {
            format!(
                r#"{{"request":"r","at_ms":{at},"first_byte_us":1000,"total_us":4000,"prompt":{{"tokens":600,"span":512,"hashes":["00ff","0a"]}}}}"#
            )
        };
        let json = serde_json::json!({"timestamp": "x", "target": "kvgate::decision", "fields": {"message": record(3)}});
        let text = [
            "2025-07-01T10:00:00.1Z  INFO kvgate::run: listening".to_owned(),
            format!("2025-07-01T10:00:00.1Z DEBUG kvgate::decision: {}", record(1)),
            record(2),
            json.to_string(),
            serde_json::json!({"target": "kvgate::run", "fields": {"message": "listening"}}).to_string(),
            format!("[{}, {}]", record(4), record(5)),
            r#"{"at_ms": 6}"#.to_owned(),
        ];
        let trace = read(&text.join("\n")).unwrap();
        let times: Vec<_> = trace.requests.iter().map(|r| r.at.as_millis()).collect();
        assert_eq!((times, trace.without_prompt), (vec![0, 1, 2, 3, 4], 1));
        let first = &trace.requests[0];
        // all five are alike
        assert_eq!(*first.prompt, Prompt { system: 2, ..Prompt::new(600, 512, vec![255, 10], 0) });
        assert_eq!(first.answer, Answer::Took(Duration::from_millis(3)));
    }

    #[test]
    fn what_cannot_be_read_is_told_with_its_place() {
        let good = r#"{"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [0]}"#;
        for (bad, why) in [
            ("words", "t:2: is neither a request"),
            ("{\"timestamp\": 0, \"hash_ids\": [", "t:2: EOF"),
            (r#"{"input_length": 16, "hash_ids": [0]}"#, "t:2: missing field `timestamp`"),
            (
                r#"{"timestamp": -1, "input_length": 16, "output_length": 1, "hash_ids": [0]}"#,
                "t:2: timestamp",
            ),
            (
                r#"{"timestamp": 1, "input_length": 16, "output_length": 1, "hash_ids": [0, 1]}"#,
                "t:2: hash_ids: 2",
            ),
            (
                r#"{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}"#,
                "t:2: a prompt of 0",
            ),
            (
                r#"{"at_ms": 1, "prompt": {"tokens": 1, "span": 512, "hashes": ["xyz"]}}"#,
                "t:2: prompt.hashes: \"xyz\"",
            ),
            (r#"{"at_ms": 1, "prompt": {"tokens": 1, "span": 0, "hashes": []}}"#, "t:2: prompt.span"),
            ("{}", "t:2: missing field `at_ms`"),
        ] {
            let told = read(&format!("{good}\n{bad}\n")).unwrap_err();
            assert!(told.starts_with(why), "{bad}: {told}");
        }
        assert_eq!(read("").unwrap_err(), "t: holds no request to replay");
        assert!(read(r#"{"at_ms": 6}"#).unwrap_err().contains("decisions.prompt_hashes"));
    }
}
