//! A byte buffer that never shrinks, and a writer that stores whole words and keeps a part of them.

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

    /// Makes room for `more` bytes and a word after them.
    #[inline]
    fn reserve(&mut self, more: usize) {
        let need = self.len + more + 8;
        if self.bytes.len() < need {
            self.bytes.resize(need.next_power_of_two(), 0);
        }
    }

    /// Lets `write` write at most `most` bytes with as few checks as possible.
    #[inline]
    pub(super) fn write(&mut self, most: usize, write: impl FnOnce(&mut Writer<'_>)) {
        self.reserve(most);
        let mut writer = Writer { bytes: &mut self.bytes, at: self.len };
        write(&mut writer);
        self.len = writer.at;
    }

    #[inline]
    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.reserve(bytes.len());
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    /// Overwrites earlier bytes.
    #[inline]
    pub(super) fn patch<const N: usize>(&mut self, at: usize, bytes: [u8; N]) {
        if let Some(room) = self.bytes.get_mut(at..).and_then(|b| b.first_chunk_mut()) {
            *room = bytes;
        }
    }
}

/// Writes into room that is there.
pub struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    /// The first `len` bytes; the others may be written too, and are then overwritten.
    #[inline]
    pub(super) fn part<const N: usize>(&mut self, bytes: [u8; N], len: usize) {
        let room = self.bytes.get_mut(self.at..).and_then(|b| b.first_chunk_mut());
        debug_assert!(room.is_some(), "more written than announced");
        if let Some(room) = room {
            *room = bytes;
            self.at += len;
        }
    }

    #[inline]
    pub(super) fn all<const N: usize>(&mut self, bytes: [u8; N]) {
        self.part(bytes, N);
    }
}
