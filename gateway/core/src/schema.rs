//! What keys a tier takes: one table drives validation, documentation and `kvgate schema`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, de::Error as _};

/// One key of a configuration table.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// The key; `contract.mode` is the key `mode` of the table `contract`.
    pub key: &'static str,
    /// What values it takes.
    pub kind: Kind,
    /// The value when the key is absent, written as TOML; empty when absence has its own meaning, which the
    /// documentation then gives.
    pub default: &'static str,
    /// What it means, in a sentence or two.
    pub doc: &'static str,
}

/// What values a key takes.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// A whole number in a range, both ends included.
    Int {
        /// The least.
        min: i64,
        /// The most.
        max: i64,
    },
    /// A duration such as `"300ms"`, `"30s"`, `"5m"`, `"1h"`, in a range, both ends included.
    Duration {
        /// The least.
        min: Duration,
        /// The most.
        max: Duration,
    },
    /// A size such as `"64KiB"`, `"16MiB"`, `"1GiB"` or a plain number of bytes, in a range of bytes.
    Size {
        /// The least.
        min: u64,
        /// The most.
        max: u64,
    },
    /// Any text that is not empty.
    Text,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A list of texts.
    TextList,
    /// A list of whole numbers, each in a range, both ends included.
    IntList {
        /// The least.
        min: i64,
        /// The most.
        max: i64,
    },
    /// A table of the user's own keys, each with a text.
    TextMap,
}

impl Kind {
    /// The allowed values, in words, for messages and documentation.
    pub fn allowed(&self) -> String {
        match self {
            Self::Bool => "true or false".into(),
            Self::Int { min, max } => format!("a whole number, {min} to {max}"),
            Self::Duration { min, max } => {
                format!("a duration, \"{}\" to \"{}\"", show_duration(*min), show_duration(*max))
            }
            Self::Size { min, max } => format!("a size, \"{}\" to \"{}\"", show_size(*min), show_size(*max)),
            Self::Text => "a text".into(),
            Self::Choice(words) => words.iter().map(|w| format!("\"{w}\"")).collect::<Vec<_>>().join(", "),
            Self::TextList => "a list of texts".into(),
            Self::IntList { min, max } => format!("a list of whole numbers, each {min} to {max}"),
            Self::TextMap => "a table of texts".into(),
        }
    }
}

const UNITS: [(&str, u64); 4] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)];
const SIZES: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Reads a duration: a whole number and one of `ms`, `s`, `m`, `h`. `None` for anything else.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let (_, ms) = UNITS.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*ms).map(Duration::from_millis)
}

/// Writes a duration as [`parse_duration`] reads it, in the largest unit that is exact.
pub fn show_duration(duration: Duration) -> String {
    let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let unit = UNITS.iter().rev().find(|(_, size)| ms >= *size && ms.is_multiple_of(*size));
    unit.map_or_else(|| format!("{ms}ms"), |(name, size)| format!("{}{name}", ms / size))
}

/// Reads a size: a whole number and one of `B`, `KiB`, `MiB`, `GiB`. `None` for anything else.
pub fn parse_size(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let (_, bytes) = SIZES.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*bytes)
}

/// Writes a size as [`parse_size`] reads it, in the largest unit that is exact.
pub fn show_size(bytes: u64) -> String {
    let unit = SIZES.iter().find(|(_, size)| bytes >= *size && bytes.is_multiple_of(*size));
    unit.map_or_else(|| format!("{bytes}B"), |(name, size)| format!("{}{name}", bytes / size))
}

/// For `#[serde(deserialize_with = …)]`: a duration as [`parse_duration`] reads it.
///
/// # Errors
/// When the value is not such a text.
pub fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    parse_duration(&text)
        .ok_or_else(|| D::Error::custom(format!("{text:?} is not a duration such as \"30s\"")))
}

/// For `#[serde(deserialize_with = …)]`: a size in bytes as [`parse_size`] reads it.
///
/// # Errors
/// When the value is not such a text.
pub fn size<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let text = String::deserialize(from)?;
    parse_size(&text).ok_or_else(|| D::Error::custom(format!("{text:?} is not a size such as \"16MiB\"")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_sizes_read_back_as_written() {
        for text in ["0ms", "1500ms", "30s", "5m", "36h"] {
            assert_eq!(show_duration(parse_duration(text).unwrap()), text);
        }
        assert_eq!(show_duration(Duration::from_secs(300)), "5m");
        for text in ["", "5", "s", "-1s", "1.5s", "1 s", "99999999999999999999s", "18446744073709551615h"] {
            assert_eq!(parse_duration(text), None, "{text}");
        }
        for text in ["0B", "100B", "64KiB", "16MiB", "1GiB"] {
            assert_eq!(show_size(parse_size(text).unwrap()), text);
        }
        for text in ["", "5", "KiB", "1kb", "99999999999999GiB"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
