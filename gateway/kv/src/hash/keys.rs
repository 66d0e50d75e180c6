//! What distinguishes blocks of equal tokens.

/// A LoRA adapter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lora {
    /// As requests name it.
    pub name: String,
    /// As the engine was told to load it; part of the hash from vLLM 0.31 on, never of events.
    pub path: String,
}

/// What keeps the blocks of one prompt apart from those of equal tokens in another. The default is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// The adapter, in the hash of every block.
    pub lora: Option<Lora>,
    /// The request's `cache_salt`, in the hash of the first block; an empty one counts as none, as in the engines.
    pub cache_salt: Option<String>,
}

impl Namespace {
    /// The salt that applies to block `index`.
    pub(crate) fn salt(&self, index: usize) -> Option<&str> {
        self.cache_salt.as_deref().filter(|salt| index == 0 && !salt.is_empty())
    }

    /// The extra keys of block `index` of a prompt without media, in the engine's order.
    pub fn extra_keys(&self, index: usize) -> Vec<ExtraKey<'_>> {
        let lora = self.lora.as_ref().map(|l| ExtraKey::Lora { name: &l.name, path: &l.path });
        lora.into_iter().chain(self.salt(index).map(ExtraKey::Salt)).collect()
    }
}

/// One extra key of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtraKey<'a> {
    /// The adapter; `path` is left out of bare keys.
    Lora {
        /// As requests name it.
        name: &'a str,
        /// As the engine was told to load it.
        path: &'a str,
    },
    /// An image, a sound or a video that touches the block.
    Mm {
        /// The engine's identifier of the item.
        identifier: &'a str,
        /// Where the item starts, relative to the block: negative when it started in an earlier one.
        offset: i64,
    },
    /// The request's `cache_salt`.
    Salt(&'a str),
    /// SHA-256 of the block's prompt embeddings.
    Embeds(&'a [u8; 32]),
}
