//! A byte buffer that never shrinks and takes small integers as one eight-byte store.

/// Reused from block to block: after the first block nothing is allocated.
#[derive(Default)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    len: usize,
}

impl Buffer {
    pub(super) fn clear(&mut self) {
        self.len = 0;
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Room for `more` bytes and a whole word after them.
    fn reserve(&mut self, more: usize) {
        let need = self.len + more + 8;
        if self.bytes.len() < need {
            self.bytes.resize(need.next_power_of_two(), 0);
        }
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.reserve(bytes.len());
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    /// Overwrites earlier bytes.
    pub(super) fn patch(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// For each item, stores the word whole and keeps its first bytes: no branch on their number (at most 8).
    #[inline]
    pub(super) fn put_words(&mut self, words: impl ExactSizeIterator<Item = ([u8; 8], usize)>) {
        self.reserve(words.len() * 8);
        let mut at = self.len;
        for (word, len) in words {
            self.bytes[at..at + 8].copy_from_slice(&word);
            at += len;
        }
        self.len = at;
    }
}
