//! The texts in a value, in one pass and without a tree.

use super::reader::Reader;
use super::{JsonError, MAX_DEPTH};

/// Why reading ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// There is no room for more.
    Full,
    /// The text is not JSON from there on, or nested too deep; what was read before is in.
    Broken,
}

impl From<JsonError> for Stop {
    fn from(_: JsonError) -> Self {
        Self::Broken
    }
}

/// A text that is filled up to a limit.
pub(crate) struct Sink<'o> {
    out: &'o mut String,
    limit: usize,
}

impl<'o> Sink<'o> {
    /// Adds to `out` until it has `limit` bytes.
    pub fn new(out: &'o mut String, limit: usize) -> Self {
        Self { out, limit }
    }

    /// Adds as much as there is room for; [`Stop::Full`] if that is not all.
    pub fn push(&mut self, text: &str) -> Result<(), Stop> {
        let room = self.limit.saturating_sub(self.out.len());
        if text.len() <= room {
            self.out.push_str(text);
            return Ok(());
        }
        self.out.push_str(text.get(..text.floor_char_boundary(room)).unwrap_or_default());
        Err(Stop::Full)
    }

    /// Adds what a JSON string says, with U+FFFD for half a surrogate pair. What lies beyond the limit is not looked
    /// at.
    pub fn string(&mut self, raw: &str) -> Result<(), Stop> {
        string(&mut Reader::new(raw), self)
    }

    /// Adds all strings in a value, each ended by a line feed, and all integers, each ended by a space, in order; but
    /// of an object the roles and types after the rest: what most messages have in common comes last, since prompts
    /// that differ should do so from the start.
    pub fn strings(&mut self, raw: &str) -> Result<(), Stop> {
        value(&mut Reader::new(raw), self, 0)
    }
}

fn value(reader: &mut Reader<'_>, out: &mut Sink<'_>, depth: usize) -> Result<(), Stop> {
    if depth > MAX_DEPTH {
        return Err(Stop::Broken);
    }
    match reader.peek() {
        Some(b'"') => {
            string(reader, out)?;
            out.push("\n")
        }
        Some(b'{') => object(reader, out, depth),
        Some(b'[') => array(reader, out, depth),
        _ => {
            let start = reader.at;
            reader.skip()?;
            if depth > 0 && reader.peek().is_none() {
                // the text is cut there, and perhaps in the middle of a number
                return Err(Stop::Broken);
            }
            let word = reader.text.get(start..reader.at).unwrap_or_default();
            let digits = word.strip_prefix('-').unwrap_or(word);
            if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
                return Ok(());
            }
            out.push(word)?;
            out.push(" ")
        }
    }
}

fn array(reader: &mut Reader<'_>, out: &mut Sink<'_>, depth: usize) -> Result<(), Stop> {
    reader.require(b'[')?;
    let mut first = true;
    while reader.more(std::mem::take(&mut first), b']')? {
        value(reader, out, depth + 1)?;
    }
    Ok(())
}

fn object(reader: &mut Reader<'_>, out: &mut Sink<'_>, depth: usize) -> Result<(), Stop> {
    reader.require(b'{')?;
    // where the role and the type begin
    let mut common = [None; 2];
    let mut first = true;
    while reader.more(std::mem::take(&mut first), b'}')? {
        let key = reader.key()?;
        let [role, kind] = &mut common;
        match key.as_deref() {
            Some("role") if reader.peek() == Some(b'"') => *role = Some(reader.at),
            Some("type") if reader.peek() == Some(b'"') => *kind = Some(reader.at),
            _ => {
                value(reader, out, depth + 1)?;
                continue;
            }
        }
        reader.skip()?;
    }
    let end = reader.at;
    for at in common.into_iter().flatten() {
        reader.at = at;
        string(reader, out)?;
        out.push("\n")?;
    }
    reader.at = end;
    Ok(())
}

fn string(reader: &mut Reader<'_>, out: &mut Sink<'_>) -> Result<(), Stop> {
    reader.require(b'"')?;
    loop {
        let (chunk, ended) = reader.chunk();
        out.push(chunk)?;
        match ended {
            Some(b'"') => return Ok(()),
            Some(_) => {
                let c = reader.escape()?.unwrap_or(char::REPLACEMENT_CHARACTER);
                out.push(c.encode_utf8(&mut [0; 4]))?;
            }
            None => return Err(Stop::Broken),
        }
    }
}
