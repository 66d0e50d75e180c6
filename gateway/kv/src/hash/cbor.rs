//! Canonical CBOR (RFC 8949, as `cbor2.dumps(.., canonical=True)` writes it) of the shapes vLLM hashes.

use super::buffer::Buffer;
use super::{ExtraKey, ExtraKeys};

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
pub(super) fn block(out: &mut Buffer, parent: &[u8], tokens: &[u32], keys: &[ExtraKey<'_>], form: ExtraKeys) {
    out.clear();
    out.put(&[ARRAY | 3]);
    bytes(out, parent);
    head(out, ARRAY, tokens.len() as u64);
    out.put_words(tokens.iter().map(|&t| token(t)));
    if keys.is_empty() {
        return out.put(&[NULL]);
    }
    head(out, ARRAY, keys.len() as u64);
    keys.iter().for_each(|k| key(out, k, form));
}

/// An unsigned integer in its shortest form, padded to a word, and its length.
#[inline]
fn token(t: u32) -> ([u8; 8], usize) {
    const HEADS: [u64; 4] = [0, 0x18, 0x19, 0x1a];
    const SHIFTS: [u32; 4] = [56, 48, 40, 24];
    const LENS: [usize; 4] = [1, 2, 3, 5];
    let class = usize::from(t >= 24) + usize::from(t >= 1 << 8) + usize::from(t >= 1 << 16);
    let word = HEADS[class] << 56 | u64::from(t) << SHIFTS[class];
    (word.to_be_bytes(), LENS[class])
}

fn head(out: &mut Buffer, major: u8, n: u64) {
    let be = n.to_be_bytes();
    match n {
        0..24 => out.put(&[major | n as u8]),
        24..0x100 => out.put(&[major | 24, n as u8]),
        0x100..0x1_0000 => out.put(&[major | 25, be[6], be[7]]),
        0x1_0000..0x1_0000_0000 => out.put(&[major | 26, be[4], be[5], be[6], be[7]]),
        _ => {
            out.put(&[major | 27]);
            out.put(&be);
        }
    }
}

fn text(out: &mut Buffer, s: &str) {
    head(out, TEXT, s.len() as u64);
    out.put(s.as_bytes());
}

fn bytes(out: &mut Buffer, b: &[u8]) {
    head(out, BYTES, b.len() as u64);
    out.put(b);
}

fn int(out: &mut Buffer, n: i64) {
    // CBOR writes -1 - n for a negative n, which is its complement
    let major = if n < 0 { NEGATIVE } else { UNSIGNED };
    head(out, major, (if n < 0 { !n } else { n }) as u64);
}

/// A tuple of the tag and `rest` values, or the start of one.
fn tag(out: &mut Buffer, name: &str, rest: u64) {
    head(out, ARRAY, rest + 1);
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
                head(out, ARRAY, 2);
            }
            text(out, identifier);
            int(out, offset);
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
