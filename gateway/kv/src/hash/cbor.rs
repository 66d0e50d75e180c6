//! Canonical CBOR (RFC 8949, as `cbor2.dumps(.., canonical=True)` writes it) of the shapes vLLM hashes.

use super::buffer::{Buffer, Writer};
use super::{Digest, ExtraKey, ExtraKeys, TokenId};

const UNSIGNED: u8 = 0 << 5;
const NEGATIVE: u8 = 1 << 5;
const BYTES: u8 = 2 << 5;
const TEXT: u8 = 3 << 5;
const ARRAY: u8 = 4 << 5;
const NULL: u8 = 0xf6;

/// The text string that the root is the hash of.
pub(super) fn seed(out: &mut Buffer, seed: &str) {
    out.clear();
    text(out, seed);
}

/// `[parent, [token, ...], null | [key, ...]]`.
pub(super) fn block<T: TokenId>(
    out: &mut Buffer,
    parent: &Digest,
    tokens: &[T],
    keys: &[ExtraKey<'_>],
    form: ExtraKeys,
) {
    out.clear();
    out.write(64 + tokens.len() * T::WIDEST, |w| {
        w.all([ARRAY | 3]);
        word(w, head(BYTES, parent.len.into()));
        w.part(parent.bytes, parent.len.into());
        word(w, head(ARRAY, tokens.len() as u32));
        tokens.iter().for_each(|&t| t.cbor(w));
        w.part([NULL], usize::from(keys.is_empty()));
    });
    if !keys.is_empty() {
        length(out, ARRAY, keys.len());
        keys.iter().for_each(|k| key(out, k, form));
    }
}

/// An unsigned integer of 32 bits.
#[inline]
pub(super) fn unsigned(w: &mut Writer<'_>, n: u32) {
    word(w, head(UNSIGNED, n));
}

/// An unsigned integer that 32 bits do not hold.
pub(super) fn unsigned_long(w: &mut Writer<'_>, n: u64) {
    long(w, UNSIGNED, n);
}

fn long(w: &mut Writer<'_>, major: u8, n: u64) {
    w.all([major | 27]);
    w.all(n.to_be_bytes());
}

#[inline]
fn word(w: &mut Writer<'_>, (bytes, len): ([u8; 8], usize)) {
    w.part(bytes, len);
}

/// The head of an item, or all of an unsigned integer, in its shortest form: a word to keep the first bytes of.
/// Without a branch on the number.
#[inline]
fn head(major: u8, n: u32) -> ([u8; 8], usize) {
    const HEADS: [u64; 4] = [0, 24 << 56, 25 << 56, 26 << 56];
    const SHIFTS: [u32; 4] = [56, 48, 40, 24];
    const LENS: [usize; 4] = [1, 2, 3, 5];
    let class = usize::from(n >= 24) + usize::from(n >= 1 << 8) + usize::from(n >= 1 << 16);
    let word = u64::from(major) << 56 | HEADS[class] | u64::from(n) << SHIFTS[class];
    (word.to_be_bytes(), LENS[class])
}

fn length(out: &mut Buffer, major: u8, n: usize) {
    int(out, major, n as u64);
}

fn int(out: &mut Buffer, major: u8, n: u64) {
    match u32::try_from(n) {
        Ok(n) => out.write(8, |w| word(w, head(major, n))),
        Err(_) => out.write(9, |w| long(w, major, n)),
    }
}

fn text(out: &mut Buffer, s: &str) {
    length(out, TEXT, s.len());
    out.put(s.as_bytes());
}

fn bytes(out: &mut Buffer, b: &[u8]) {
    length(out, BYTES, b.len());
    out.put(b);
}

fn offset(out: &mut Buffer, n: i64) {
    // CBOR writes -1 - n for a negative n, which is its complement
    match n {
        0.. => int(out, UNSIGNED, n as u64),
        _ => int(out, NEGATIVE, !n as u64),
    }
}

/// A tuple of the tag and `rest` values, or the start of one.
fn tag(out: &mut Buffer, name: &str, rest: usize) {
    length(out, ARRAY, rest + 1);
    text(out, name);
}

fn key(out: &mut Buffer, key: &ExtraKey<'_>, form: ExtraKeys) {
    let tagged = form == ExtraKeys::Tagged;
    match *key {
        ExtraKey::Lora { name, path } if tagged => {
            tag(out, "lora", 2);
            text(out, name);
            text(out, path);
        }
        ExtraKey::Lora { name, .. } => text(out, name),
        ExtraKey::Mm { identifier, offset } => {
            if tagged {
                tag(out, "mm", 2);
            } else {
                length(out, ARRAY, 2);
            }
            text(out, identifier);
            self::offset(out, offset);
        }
        ExtraKey::Salt(salt) => {
            if tagged {
                tag(out, "cache_salt", 1);
            }
            text(out, salt);
        }
        ExtraKey::Embeds(digest) => {
            if tagged {
                tag(out, "prompt_embeds", 1);
            }
            bytes(out, digest);
        }
    }
}
