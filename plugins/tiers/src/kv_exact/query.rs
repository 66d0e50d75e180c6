//! The chains of hashes a prompt is looked up by.

use std::future::poll_fn;
use std::task::Poll;

use kvgate_core::Tokens;
use kvgate_kv::hash::{Digest, Hasher, Namespace, Scratch};
use kvgate_kv::own::OwnHasher;

/// Blocks hashed between two looks at other tasks: about 250 microseconds of SHA-256.
const SLICE: usize = 2048;

/// One chain for each sequence of the request, by block size.
#[derive(Debug, Default)]
pub struct Query {
    pub chains: Vec<(u32, Vec<Vec<u64>>)>,
}

impl Query {
    /// By our own hashes, for each block size that an engine uses.
    pub fn own(hasher: &OwnHasher, tokens: &Tokens, namespace: &Namespace, sizes: &[u32]) -> Self {
        let chain = |size: u32| {
            let of = |sequence: &std::sync::Arc<[u32]>| hasher.chain(sequence, size as usize, namespace);
            (size, tokens.sequences.iter().map(of).collect())
        };
        Self { chains: sizes.iter().copied().map(chain).collect() }
    }

    /// By the engine's hashes. Lets other tasks run in between: SHA-256 of a long prompt takes milliseconds.
    pub async fn published(hasher: &Hasher, tokens: &Tokens, namespace: &Namespace) -> Self {
        let size = hasher.block_size();
        let mut chains = Vec::with_capacity(tokens.sequences.len());
        for sequence in &tokens.sequences {
            chains.push(published(hasher, sequence, namespace, size).await);
        }
        Self { chains: vec![(u32::try_from(size).unwrap_or(u32::MAX), chains)] }
    }
}

async fn published(hasher: &Hasher, tokens: &[u32], namespace: &Namespace, size: usize) -> Vec<u64> {
    let (first, rest) = (namespace.extra_keys(0), namespace.extra_keys(1));
    let mut scratch = Scratch::default();
    let mut parent: Digest = hasher.none_hash();
    let mut chain = Vec::with_capacity(tokens.len() / size.max(1));
    for (index, block) in tokens.chunks_exact(size.max(1)).enumerate() {
        let keys = if index == 0 { &first } else { &rest };
        parent = hasher.block(&parent, block, keys, &mut scratch);
        // the published view holds 0 as 1
        chain.push(parent.u64().max(1));
        if index % SLICE == SLICE - 1 {
            breathe().await;
        }
    }
    chain
}

/// Goes to the end of the queue of tasks once.
async fn breathe() {
    let mut waited = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut waited, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
