//! Pickle protocol 5, byte for byte as CPython's C pickler writes the shapes vLLM hashes (`pickletools` names
//! the opcodes). One frame: right below 64 KiB, where the pickler would start another.

use super::buffer::Buffer;
use super::{ExtraKey, ExtraKeys};

const PROTO_5: [u8; 2] = [0x80, 5];
const FRAME: u8 = 0x95;
const STOP: u8 = b'.';
const MEMOIZE: u8 = 0x94;
const NONE: u8 = b'N';
const MARK: u8 = b'(';
const TUPLE: u8 = b't';
const EMPTY_TUPLE: u8 = b')';
const TUPLE1: u8 = 0x85;
const BINGET: u8 = b'h';
const BININT: u8 = b'J';
const BININT1: u8 = b'K';
const BININT2: u8 = b'M';
const LONG1: u8 = 0x8a;
const SHORT_BINBYTES: u8 = b'C';
const SHORT_BINUNICODE: u8 = 0x8c;
const BINUNICODE: u8 = b'X';

/// Where the frame's body starts: after the protocol and the frame's head.
const BODY: usize = 11;

/// The string that the root is the hash of.
pub(super) fn seed(out: &mut Buffer, seed: &str) {
    let mut pickler = Pickler::start(out);
    pickler.text(seed);
    pickler.finish();
}

/// `(parent, (token, ...), None | (key, ...))`.
pub(super) fn block(out: &mut Buffer, parent: &[u8], tokens: &[u32], keys: &[ExtraKey<'_>], form: ExtraKeys) {
    let mut pickler = Pickler::start(out);
    pickler.bytes(parent);
    pickler.open(tokens.len());
    pickler.out.put_words(tokens.iter().map(|&t| token(t)));
    pickler.close(tokens.len());
    if keys.is_empty() {
        pickler.out.put(&[NONE]);
    } else {
        pickler.open(keys.len());
        keys.iter().for_each(|k| pickler.key(k, form));
        pickler.close(keys.len());
    }
    pickler.close(3);
    pickler.finish();
}

/// A non-negative int in its shortest form, padded to a word, and its length.
#[inline]
fn token(t: u32) -> ([u8; 8], usize) {
    // BININT is signed, so the top half of u32 needs LONG1 with five bytes, the last one zero
    const HEADS: [u64; 4] = [BININT1 as u64, BININT2 as u64, BININT as u64, (LONG1 as u64) | 5 << 8];
    const SHIFTS: [u32; 4] = [8, 8, 8, 16];
    const LENS: [usize; 4] = [2, 3, 5, 7];
    let class = usize::from(t >= 1 << 8) + usize::from(t >= 1 << 16) + usize::from(t >= 1 << 31);
    let word = HEADS[class] | u64::from(t) << SHIFTS[class];
    (word.to_le_bytes(), LENS[class])
}

struct Pickler<'a> {
    out: &'a mut Buffer,
    /// Objects memoised so far.
    memo: u8,
    /// The memo number of the tag "mm": the one object that can occur twice.
    mm: Option<u8>,
}

impl<'a> Pickler<'a> {
    fn start(out: &'a mut Buffer) -> Self {
        out.clear();
        out.put(&PROTO_5);
        out.put(&[FRAME]);
        out.put(&[0; 8]);
        Pickler { out, memo: 0, mm: None }
    }

    fn finish(self) {
        self.out.put(&[STOP]);
        let body = (self.out.len() - BODY) as u64;
        self.out.patch(BODY - 8, &body.to_le_bytes());
    }

    fn memoize(&mut self) {
        self.out.put(&[MEMOIZE]);
        self.memo = self.memo.saturating_add(1);
    }

    /// Before the `n` items of a tuple.
    fn open(&mut self, n: usize) {
        if n > 3 {
            self.out.put(&[MARK]);
        }
    }

    /// After the `n` items of a tuple.
    fn close(&mut self, n: usize) {
        match n {
            0 => return self.out.put(&[EMPTY_TUPLE]),
            1..=3 => self.out.put(&[TUPLE1 + (n - 1) as u8]),
            _ => self.out.put(&[TUPLE]),
        }
        self.memoize();
    }

    fn text(&mut self, s: &str) {
        match u8::try_from(s.len()) {
            Ok(len) => self.out.put(&[SHORT_BINUNICODE, len]),
            Err(_) => {
                self.out.put(&[BINUNICODE]);
                self.out.put(&(s.len() as u32).to_le_bytes());
            }
        }
        self.out.put(s.as_bytes());
        self.memoize();
    }

    /// At most 255 bytes.
    fn bytes(&mut self, b: &[u8]) {
        self.out.put(&[SHORT_BINBYTES, b.len() as u8]);
        self.out.put(b);
        self.memoize();
    }

    fn int(&mut self, n: i64) {
        if let Ok(t) = u32::try_from(n) {
            return self.out.put_words([token(t)].into_iter());
        }
        if let Ok(n) = i32::try_from(n) {
            self.out.put(&[BININT]);
            return self.out.put(&n.to_le_bytes());
        }
        // the shortest two's complement
        let unused = (if n < 0 { n.leading_ones() } else { n.leading_zeros() } - 1) / 8;
        let len = 8 - unused as usize;
        self.out.put(&[LONG1, len as u8]);
        self.out.put(&n.to_le_bytes()[..len]);
    }

    fn mm_tag(&mut self) {
        match self.mm {
            Some(index) => self.out.put(&[BINGET, index]),
            None => {
                self.mm = Some(self.memo);
                self.text("mm");
            }
        }
    }

    fn key(&mut self, key: &ExtraKey<'_>, form: ExtraKeys) {
        let tagged = form == ExtraKeys::Tagged;
        match *key {
            ExtraKey::Lora { name, path } if tagged => {
                self.text("lora");
                self.text(name);
                self.text(path);
                self.close(3);
            }
            ExtraKey::Lora { name, .. } => self.text(name),
            ExtraKey::Mm { identifier, offset } => {
                if tagged {
                    self.mm_tag();
                }
                self.text(identifier);
                self.int(offset);
                self.close(if tagged { 3 } else { 2 });
            }
            ExtraKey::Salt(salt) if tagged => {
                self.text("cache_salt");
                self.text(salt);
                self.close(2);
            }
            ExtraKey::Salt(salt) => self.text(salt),
            ExtraKey::Embeds(digest) if tagged => {
                self.text("prompt_embeds");
                self.bytes(digest);
                self.close(2);
            }
            ExtraKey::Embeds(digest) => self.bytes(digest),
        }
    }
}
