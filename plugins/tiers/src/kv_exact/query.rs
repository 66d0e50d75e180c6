//! The chains of hashes a prompt is looked up by.

use std::fmt;
use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use kvgate_core::law::Prompt;
use kvgate_core::{EngineId, Tokens};
use kvgate_kv::hash::{Digest, Hasher, Namespace, Scratch};
use kvgate_kv::own::OwnHasher;
use kvgate_kv::speculative::Credit;
use tracing::Level;

/// The target of the log lines about single blocks: switched on by name, at the level `trace`. They hold what prompts
/// are made of.
pub const BLOCK_HASHES: &str = "kvgate::block_hashes";

/// Blocks hashed between two looks at other tasks: about 250 microseconds of SHA-256.
const SLICE: usize = 2048;

/// What is looked up for a request, and what came of it.
#[derive(Debug, Default)]
pub struct Query {
    /// One chain for each sequence of the request, by block size, ascending.
    pub chains: Vec<(u32, Vec<Vec<u64>>)>,
    /// As of the last choice.
    progress: Mutex<Progress>,
}

/// What is remembered of a request between its choice and its end.
#[derive(Debug, Default)]
pub struct Progress {
    /// What the engines that were chosen held when they were.
    picks: Vec<(EngineId, Basis)>,
    /// Whether it is the one in so many that goes to a cold endpoint.
    pub seeds: Option<bool>,
    /// What the engines that are being asked are taken to hold for it.
    credits: Vec<(EngineId, Vec<Credit>)>,
}

/// Tokens of the prompt, in whole blocks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Basis {
    /// Held, as the engine's events tell.
    pub held: u64,
    /// About to be held.
    pub expected: u64,
}

impl Progress {
    /// An engine was chosen.
    pub fn picked(&mut self, engine: EngineId, basis: Basis) {
        self.picks.retain(|(e, _)| *e != engine);
        self.picks.push((engine, basis));
    }

    /// What it held when it was chosen last; nothing if it was never chosen for what it holds.
    pub fn basis(&self, engine: EngineId) -> Basis {
        self.picks.iter().find(|(e, _)| *e == engine).map(|(_, basis)| *basis).unwrap_or_default()
    }

    /// An engine is being asked.
    pub fn dispatched(&mut self, engine: EngineId, credits: Vec<Credit>) {
        self.completed(engine);
        self.credits.push((engine, credits));
    }

    /// It has answered, or not: what it holds from now on its events say.
    pub fn completed(&mut self, engine: EngineId) {
        self.credits.retain(|(e, _)| *e != engine);
    }
}

impl Query {
    /// By our own hashes, for each block size that an engine uses.
    pub fn own(hasher: &OwnHasher, tokens: &Tokens, namespace: &Namespace, sizes: &[u32]) -> Self {
        let chain = |size: u32| {
            let of = |sequence: &std::sync::Arc<[u32]>| {
                let chain = hasher.chain(sequence, size as usize, namespace);
                if logs_blocks() {
                    for (block, own) in chain.iter().enumerate() {
                        tracing::trace!(target: BLOCK_HASHES, block, size, own, "block hash");
                    }
                }
                chain
            };
            (size, tokens.sequences.iter().map(of).collect())
        };
        Self { chains: sizes.iter().copied().map(chain).collect(), ..Self::default() }
    }

    /// By the engine's hashes. Lets other tasks run in between: SHA-256 of a long prompt takes milliseconds.
    pub async fn published(hasher: &Hasher, tokens: &Tokens, namespace: &Namespace) -> Self {
        let size = hasher.block_size();
        let mut chains = Vec::with_capacity(tokens.sequences.len());
        for sequence in &tokens.sequences {
            chains.push(published(hasher, sequence, namespace, size).await);
        }
        Self { chains: vec![(u32::try_from(size).unwrap_or(u32::MAX), chains)], ..Self::default() }
    }

    /// The prompt as laws see it: in the smallest blocks that an engine uses.
    pub fn prompt(&self) -> Prompt {
        let Some((size, chains)) = self.chains.first() else { return Prompt { tokens: 0, block: 1 } };
        let blocks: usize = chains.iter().map(Vec::len).sum();
        let block = u64::from(*size);
        Prompt { tokens: (blocks as u64).saturating_mul(block), block }
    }

    /// See [`Progress`].
    pub fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn published(hasher: &Hasher, tokens: &[u32], namespace: &Namespace, size: usize) -> Vec<u64> {
    let (first, rest) = (namespace.extra_keys(0), namespace.extra_keys(1));
    let (mut scratch, log) = (Scratch::default(), logs_blocks());
    let mut parent: Digest = hasher.none_hash();
    let mut chain = Vec::with_capacity(tokens.len() / size.max(1));
    for (index, block) in tokens.chunks_exact(size.max(1)).enumerate() {
        let keys = if index == 0 { &first } else { &rest };
        parent = hasher.block(&parent, block, keys, &mut scratch);
        if log {
            log_block(hasher, index, &parent, &scratch);
        }
        // the published view holds 0 as 1
        chain.push(parent.u64().max(1));
        if index % SLICE == SLICE - 1 {
            breathe().await;
        }
    }
    chain
}

/// Whether blocks are logged: asked once a prompt, so that it costs nothing while they are not.
fn logs_blocks() -> bool {
    tracing::enabled!(target: BLOCK_HASHES, Level::TRACE)
}

/// A line about a block: its name in events, its digest, and the bytes that were hashed.
fn log_block(hasher: &Hasher, block: usize, digest: &Digest, scratch: &Scratch) {
    let (size, hash, bytes) = (hasher.block_size(), digest.u64(), Hex(scratch.bytes()));
    if hasher.is_cbor() {
        tracing::trace!(target: BLOCK_HASHES, block, size, hash, %digest, cbor = %bytes, "block hash");
    } else {
        tracing::trace!(target: BLOCK_HASHES, block, size, hash, %digest, pickle = %bytes, "block hash");
    }
}

/// Bytes, to be written as hex digits if they are written at all.
struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
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
