//! What clients, logs and records are told, made fit for where it stands.

use std::hash::{BuildHasher, RandomState};

use http::HeaderValue;
use kvgate_core::Decision;

/// What clients commonly take as one header.
const MOST_EXPLAINED: usize = 6 * 1024;

/// A model's name or a path as messages and records show it: a client may send a megabyte.
pub fn shown(model: Option<&str>) -> &str {
    let model = model.unwrap_or_default();
    let end = model.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= 128).last();
    model.get(..end.unwrap_or(0)).unwrap_or_default()
}

/// A number like no other.
pub fn unique() -> u128 {
    let random = RandomState::new();
    (u128::from(random.hash_one(0)) << 64) | u128::from(random.hash_one(1))
}

/// A header value made of our own words.
pub fn value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// The decision so far, in ASCII, without its candidates if it would not fit a header, and without the prompt, which
/// is for the log.
pub fn explained(decision: &Decision) -> String {
    let mut record = Decision { prompt: None, ..decision.clone() };
    let mut text = ascii(&record);
    if text.len() > MOST_EXPLAINED {
        record.attempts.iter_mut().for_each(|attempt| attempt.candidates.clear());
        text = ascii(&record);
    }
    text
}

/// JSON with everything beyond ASCII escaped.
fn ascii(record: &Decision) -> String {
    let text = serde_json::to_string(record).unwrap_or_default();
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            ' '..='~' => escaped.push(c),
            other => {
                let mut units = [0; 2];
                escaped.extend(other.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
            }
        }
    }
    escaped
}
