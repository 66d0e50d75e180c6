//! Pickle protocol 5, byte for byte as CPython's C pickler writes the shapes vLLM hashes (`pickletools` names
//! the opcodes). One frame: right below 64 KiB, where the pickler would start another.

use super::buffer::{Buffer, Writer};
use super::{Digest, ExtraKey, ExtraKeys, TokenId};

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
pub(super) fn block<T: TokenId>(
    out: &mut Buffer,
    parent: &Digest,
    tokens: &[T],
    keys: &[ExtraKey<'_>],
    form: ExtraKeys,
) {
    let mut pickler = Pickler::start(out);
    pickler.out.write(64 + tokens.len() * T::WIDEST, |w| {
        w.all([SHORT_BINBYTES, parent.len]);
        w.part(parent.bytes, parent.len.into());
        w.all([MEMOIZE]);
        w.part([MARK], usize::from(tokens.len() > 3));
        tokens.iter().for_each(|&t| t.pickle(w));
    });
    pickler.memo += 1;
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

/// A non-negative int of 32 bits in its shortest form.
#[inline]
pub(super) fn unsigned(w: &mut Writer<'_>, t: u32) {
    // BININT is signed, so the top half of u32 needs LONG1 with five bytes, the last one zero
    const HEADS: [u64; 4] = [BININT1 as u64, BININT2 as u64, BININT as u64, (LONG1 as u64) | 5 << 8];
    const SHIFTS: [u32; 4] = [8, 8, 8, 16];
    const LENS: [usize; 4] = [2, 3, 5, 7];
    let class = usize::from(t >= 1 << 8) + usize::from(t >= 1 << 16) + usize::from(t >= 1 << 31);
    let word = HEADS[class] | u64::from(t) << SHIFTS[class];
    w.part(word.to_le_bytes(), LENS[class]);
}

/// A non-negative int that 32 bits do not hold: its bytes and room for a sign.
pub(super) fn unsigned_long(w: &mut Writer<'_>, t: u64) {
    let len = 9 - t.leading_zeros() / 8;
    w.all([LONG1, len as u8]);
    w.part(u128::from(t).to_le_bytes(), len as usize);
}

struct Pickler<'a> {
    out: &'a mut Buffer,
    /// Objects memoised so far.
    memo: u8,
    /// The memo number of the tag "mm": the one object that can occur twice.
    mm: Option<u8>,
}

impl<'a> Pickler<'a> {
    #[inline]
    fn start(out: &'a mut Buffer) -> Self {
        out.clear();
        out.write(BODY, |w| {
            w.all(PROTO_5);
            w.all([FRAME]);
            w.all([0; 8]);
        });
        Pickler { out, memo: 0, mm: None }
    }

    fn finish(self) {
        self.out.put(&[STOP]);
        let body = (self.out.len() - BODY) as u64;
        self.out.patch(BODY - 8, body.to_le_bytes());
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
    #[inline]
    fn close(&mut self, n: usize) {
        let (end, len) = match n {
            0 => ([EMPTY_TUPLE, MEMOIZE], 1),
            1..=3 => ([TUPLE1 + (n - 1) as u8, MEMOIZE], 2),
            _ => ([TUPLE, MEMOIZE], 2),
        };
        self.out.write(2, |w| w.part(end, len));
        self.memo = self.memo.saturating_add(len as u8 - 1);
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
            return self.out.write(8, |w| unsigned(w, t));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with what CPython 3.11 wrote: `pickle.dumps(value, protocol=5)`.
    fn check(tokens: &[u32], keys: &[ExtraKey<'_>], form: ExtraKeys, expected: &str) {
        let parent = Digest { bytes: std::array::from_fn(|i| i as u8), len: 32 };
        let mut out = Buffer::default();
        block(&mut out, &parent, tokens, keys, form);
        let written: String = out.bytes().iter().map(|b| format!("{b:02x}")).collect();
        let expected = expected.replace(char::is_whitespace, "").replace("SALT", &"73".repeat(300));
        assert_eq!(written, expected.replace("PARENT", &parent.to_string()));
    }

    const TOKENS: [u32; 8] = [0, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, u32::MAX];

    #[test]
    fn tuples_of_each_size() {
        let salt = [ExtraKey::Salt("x")];
        check(
            &[1, 2, 3],
            &[],
            ExtraKeys::Tagged,
            "8005952f000000000000004320PARENT944b014b024b0387944e87942e",
        );
        check(
            &[7],
            &salt,
            ExtraKeys::Tagged,
            "8005953f000000000000004320PARENT944b0785948c0a63616368655f73616c74948c0178948694859487942e",
        );
    }

    #[test]
    fn every_tagged_key() {
        let embeds: [u8; 32] = std::array::from_fn(|i| 100 + i as u8);
        let salt = "s".repeat(300);
        let mut keys = vec![ExtraKey::Lora { name: "sql", path: "/a/sql" }];
        let offsets = [2, -8, 300, 70_000, -70_000, 1 << 31, -(1 << 31) - 1, i64::MAX, -(1 << 31)];
        let names = ["A", "B", "C", "D", "E", "F", "G", "H", "I"];
        let media = names.iter().zip(offsets).map(|(identifier, offset)| ExtraKey::Mm { identifier, offset });
        keys.extend(media);
        keys.extend([ExtraKey::Salt(&salt), ExtraKey::Embeds(&embeds)]);
        check(
            &TOKENS,
            &keys,
            ExtraKeys::Tagged,
            "80059558020000000000004320PARENT94284b004bff4d00014dffff4a000001004affffff7f8a0500000080008a05ffffff\
         ff007494288c046c6f7261948c0373716c948c062f612f73716c9487948c026d6d948c0141944b02879468068c0142944af8\
         ffffff879468068c0143944d2c01879468068c0144944a70110100879468068c0145944a90eefeff879468068c0146948a05\
         0000008000879468068c0147948a05ffffff7fff879468068c0148948a08ffffffffffffff7f879468068c0149944a000000\
         8087948c0a63616368655f73616c7494582c010000SALT9486948c0d70726f6d70745f656d62656473944320646566676869\
         6a6b6c6d6e6f707172737475767778797a7b7c7d7e7f80818283948694749487942e",
        );
    }

    #[test]
    fn every_bare_key() {
        let embeds: [u8; 32] = std::array::from_fn(|i| 100 + i as u8);
        let keys = [
            ExtraKey::Lora { name: "sql", path: "/a/sql" },
            ExtraKey::Mm { identifier: "A", offset: -8 },
            ExtraKey::Salt("t"),
            ExtraKey::Embeds(&embeds),
        ];
        check(
            &TOKENS,
            &keys,
            ExtraKeys::Bare,
            "80059586000000000000004320PARENT94284b004bff4d00014dffff4a000001004affffff7f8a0500000080008a05ffffff\
         ff007494288c0373716c948c0141944af8ffffff86948c01749443206465666768696a6b6c6d6e6f70717273747576777879\
         7a7b7c7d7e7f8081828394749487942e",
        );
    }
}
