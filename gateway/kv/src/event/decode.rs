//! From bytes to a [`Batch`].

use super::cursor::{Cursor, Head};
use super::{Batch, BlockKeys, DecodeError, Event, Removed, Stored};

type Result<T> = std::result::Result<T, DecodeError>;

/// Decodes the payload of one message.
///
/// A damaged event is dropped and counted in [`Batch::bad_events`]. Takes memory in proportion to the payload,
/// however much it claims to hold.
///
/// # Errors
/// The payload as a whole is not a batch.
pub fn decode(payload: &[u8]) -> Result<Batch<'_>> {
    let mut cursor = Cursor::new(payload);
    let Head::Array(fields @ 2..) = cursor.head()? else { return Err(DecodeError::Batch) };
    let timestamp = match cursor.head()? {
        Head::Float(t) => t,
        Head::Int(n, false) => n as f64,
        _ => return Err(DecodeError::Batch),
    };
    let mut batch = Batch { timestamp, ..Batch::default() };
    let Head::Array(events) = cursor.head()? else { return Err(DecodeError::Batch) };
    for _ in 0..events {
        let start = cursor;
        match event(&mut cursor, &mut batch.unknown_fields) {
            Ok(Some(event)) => batch.events.push(event),
            Ok(None) => batch.unknown_events += 1,
            Err(error) => {
                cursor = start;
                cursor.skip()?;
                batch.bad_events.push(error);
            }
        }
    }
    if fields > 2 {
        batch.rank = match cursor.head()? {
            Head::Nil => None,
            Head::Int(n, false) => Some(u32::try_from(n).map_err(|_| DecodeError::Batch)?),
            _ => return Err(DecodeError::Batch),
        };
    }
    for _ in 3..fields {
        cursor.skip()?;
    }
    if cursor.left() > 0 {
        return Err(DecodeError::Trailing);
    }
    Ok(batch)
}

/// One event; `None`: of an unknown type. On an error the cursor is anywhere.
fn event<'a>(cursor: &mut Cursor<'a>, unknown: &mut u32) -> Result<Option<Event<'a>>> {
    let start = *cursor;
    let (named, count) = match cursor.head()? {
        Head::Map(pairs) => (true, pairs),
        Head::Array(values @ 1..) => (false, values - 1),
        _ => return Err(DecodeError::Event),
    };
    let kind = if named { named_type(*cursor, count)? } else { type_text(cursor)? };
    let mut fields = |positions: &[&str], set: &mut Setter<'_, 'a>| match named {
        true => named_fields(cursor, count, unknown, set),
        false => ordered_fields(cursor, count, positions, unknown, set),
    };
    match kind {
        b"BlockStored" => {
            let mut partial = Partial::default();
            fields(&STORED, &mut |name, cursor| partial.set(name, cursor))?;
            Ok(Some(Event::Stored(Box::new(partial.finish()?))))
        }
        b"BlockRemoved" => {
            let (mut removed, mut found) = (Removed::default(), false);
            fields(&REMOVED, &mut |name, cursor| {
                found |= name == "block_hashes";
                set_removed(&mut removed, name, cursor)
            })?;
            if found { Ok(Some(Event::Removed(removed))) } else { Err(DecodeError::Missing) }
        }
        b"AllBlocksCleared" => {
            fields(&[], &mut |name, cursor| known_unused(name, cursor))?;
            Ok(Some(Event::Cleared))
        }
        _ => {
            *cursor = start;
            cursor.skip()?;
            Ok(None)
        }
    }
}

/// Takes the value of the named field from the cursor; false, and nothing taken, if it does not know the field.
type Setter<'s, 'a> = dyn FnMut(&str, &mut Cursor<'a>) -> Result<bool> + 's;

/// The positions of a `BlockStored` array after its type: vLLM up to 0.23. SGLang up to 0.5.19 has the first six,
/// and may append a map.
const STORED: [&str; 11] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];

/// The positions of a `BlockRemoved` array after its type.
const REMOVED: [&str; 3] = ["block_hashes", "medium", "group_idx"];

fn type_text<'a>(cursor: &mut Cursor<'a>) -> Result<&'a [u8]> {
    match cursor.head()? {
        Head::Text(t) => Ok(t),
        _ => Err(DecodeError::Event),
    }
}

/// A key of a map; one that is not a text has no name.
fn key<'a>(cursor: &mut Cursor<'a>) -> Result<&'a [u8]> {
    let mut ahead = *cursor;
    if let Head::Text(name) = ahead.head()? {
        *cursor = ahead;
        return Ok(name);
    }
    cursor.skip()?;
    Ok(b"")
}

/// The type of an event in map form: usually the first pair, but the order is nobody's promise.
fn named_type(mut cursor: Cursor<'_>, pairs: u32) -> Result<&[u8]> {
    for _ in 0..pairs {
        if key(&mut cursor)? == b"type" {
            return type_text(&mut cursor);
        }
        cursor.skip()?;
    }
    Err(DecodeError::Event)
}

fn named_fields<'a>(
    cursor: &mut Cursor<'a>,
    pairs: u32,
    unknown: &mut u32,
    set: &mut Setter<'_, 'a>,
) -> Result<()> {
    for _ in 0..pairs {
        let name = std::str::from_utf8(key(cursor)?).unwrap_or_default();
        if !set(name, cursor)? {
            cursor.skip()?;
            *unknown = unknown.saturating_add(1);
        }
    }
    Ok(())
}

fn ordered_fields<'a>(
    cursor: &mut Cursor<'a>,
    count: u32,
    positions: &[&str],
    unknown: &mut u32,
    set: &mut Setter<'_, 'a>,
) -> Result<()> {
    for index in 0..count as usize {
        let mut ahead = *cursor;
        if let Head::Map(pairs) = ahead.head()? {
            // SGLang appends the optional fields that are set
            *cursor = ahead;
            named_fields(cursor, pairs, unknown, set)?;
            continue;
        }
        let name = positions.get(index).copied().unwrap_or_default();
        if !set(name, cursor)? {
            cursor.skip()?;
            *unknown = unknown.saturating_add(1);
        }
    }
    Ok(())
}

/// Fields that we know and have no use for.
fn known_unused(name: &str, cursor: &mut Cursor<'_>) -> Result<bool> {
    let known = matches!(name, "type" | "ownership" | "session_id" | "lookahead_token_ids");
    if known {
        cursor.skip()?;
    }
    Ok(known)
}

/// A `BlockStored`, while its fields are being found.
#[derive(Default)]
struct Partial<'a> {
    stored: Stored<'a>,
    hashes: bool,
    parent: bool,
    block_size: bool,
}

impl<'a> Partial<'a> {
    fn set(&mut self, name: &str, cursor: &mut Cursor<'a>) -> Result<bool> {
        let stored = &mut self.stored;
        match name {
            "block_hashes" => {
                stored.hashes = hashes(cursor)?;
                self.hashes = true;
            }
            "parent_block_hash" => {
                stored.parent = parent(cursor)?;
                self.parent = true;
            }
            "token_ids" => stored.tokens = tokens(cursor)?,
            "block_size" => {
                stored.block_size = number(cursor)?.ok_or(DecodeError::Field)?;
                self.block_size = true;
            }
            "lora_id" => stored.lora_id = Some(cursor.skip()?).filter(|&encoded| encoded != NIL),
            "medium" => stored.medium = text(cursor)?,
            "lora_name" => stored.lora_name = text(cursor)?,
            "cache_salt" => stored.cache_salt = text(cursor)?,
            "extra_keys" => stored.extra_keys = block_keys(cursor)?,
            "group_idx" => stored.group_idx = number(cursor)?,
            "kv_cache_spec_kind" => stored.kind = text(cursor)?,
            "kv_cache_spec_sliding_window" => stored.sliding_window = number(cursor)?,
            "locality" => stored.locality = text(cursor)?,
            _ => return known_unused(name, cursor),
        }
        Ok(true)
    }

    fn finish(self) -> Result<Stored<'a>> {
        let complete = self.hashes && self.parent && self.block_size;
        if complete { Ok(self.stored) } else { Err(DecodeError::Missing) }
    }
}

fn set_removed<'a>(removed: &mut Removed<'a>, name: &str, cursor: &mut Cursor<'a>) -> Result<bool> {
    match name {
        "block_hashes" => removed.hashes = hashes(cursor)?,
        "medium" => removed.medium = text(cursor)?,
        "group_idx" => removed.group_idx = number(cursor)?,
        "locality" => removed.locality = text(cursor)?,
        _ => return known_unused(name, cursor),
    }
    Ok(true)
}

const NIL: &[u8] = &[0xc0];

fn hash(head: Head<'_>) -> Result<u64> {
    match head {
        Head::Int(n, _) => Ok(n),
        Head::Bytes(digest) => {
            digest.last_chunk().map(|last| u64::from_be_bytes(*last)).ok_or(DecodeError::Hash)
        }
        _ => Err(DecodeError::Hash),
    }
}

fn hashes(cursor: &mut Cursor<'_>) -> Result<Vec<u64>> {
    let Head::Array(count) = cursor.head()? else { return Err(DecodeError::Field) };
    let mut hashes = Vec::with_capacity(cursor.plausible(count));
    for _ in 0..count {
        hashes.push(hash(cursor.head()?)?);
    }
    Ok(hashes)
}

fn parent(cursor: &mut Cursor<'_>) -> Result<Option<u64>> {
    match cursor.head()? {
        Head::Nil => Ok(None),
        head => hash(head).map(Some),
    }
}

/// `None`: not an array of plain u32.
fn tokens(cursor: &mut Cursor<'_>) -> Result<Option<Vec<u32>>> {
    let start = *cursor;
    if let Head::Array(count) = cursor.head()? {
        let mut tokens = Vec::with_capacity(cursor.plausible(count));
        while tokens.len() < count as usize {
            let Some(token) = cursor.token()? else { break };
            tokens.push(token);
        }
        if tokens.len() == count as usize {
            return Ok(Some(tokens));
        }
    }
    *cursor = start;
    cursor.skip()?;
    Ok(None)
}

fn text<'a>(cursor: &mut Cursor<'a>) -> Result<Option<&'a str>> {
    match cursor.head()? {
        Head::Nil => Ok(None),
        Head::Text(t) => std::str::from_utf8(t).map(Some).map_err(|_| DecodeError::Field),
        _ => Err(DecodeError::Field),
    }
}

fn number(cursor: &mut Cursor<'_>) -> Result<Option<u32>> {
    match cursor.head()? {
        Head::Nil => Ok(None),
        Head::Int(n, false) => u32::try_from(n).map(Some).map_err(|_| DecodeError::Field),
        _ => Err(DecodeError::Field),
    }
}

fn block_keys<'a>(cursor: &mut Cursor<'a>) -> Result<Option<BlockKeys<'a>>> {
    let mut ahead = *cursor;
    match ahead.head()? {
        Head::Nil => {
            *cursor = ahead;
            Ok(None)
        }
        Head::Array(blocks) => {
            let whole = cursor.skip()?;
            let head = whole.len() + cursor.left() - ahead.left();
            Ok(Some(BlockKeys { blocks, encoded: whole.get(head..).unwrap_or_default() }))
        }
        _ => Err(DecodeError::Field),
    }
}
