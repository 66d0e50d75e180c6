//! The hand-over of a prompt's blocks, as vLLM's NixlConnector does it (read on 0.33): a prefill engine says in its
//! answer where the blocks are and keeps them for a while, the decode engine fetches them from there, once.
//!
//! The transfer itself is a request to the prefill engine's HTTP port, so engines need not share a process. Blocks that
//! wait are counted by no cache: the numbers given for them are the transfer's own.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use xxhash_rust::xxh3::xxh3_128;

/// Prompts kept for other engines; beyond them the oldest is given up.
const KEPT: usize = 10_000;

/// What a decode engine asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    pub engine_id: String,
    pub request_id: String,
    pub blocks: Vec<Vec<u64>>,
    /// What the blocks must hold: a real engine would go on with any, and talk nonsense.
    pub content: u64,
}

impl Claim {
    /// What `params` name, and where it is. `None` where one of the members that vLLM requires is missing: it then
    /// prefills by itself.
    pub fn read(params: &Map<String, Value>, content: u64) -> Option<(Self, (String, u16))> {
        let text = |name: &str| params.get(name).and_then(Value::as_str).map(str::to_owned);
        let port = params.get("remote_port").and_then(Value::as_u64).and_then(|port| port.try_into().ok())?;
        let blocks = serde_json::from_value(params.get("remote_block_ids")?.clone()).ok()?;
        let claim = Self {
            engine_id: text("remote_engine_id")?,
            request_id: text("remote_request_id")?,
            blocks,
            content,
        };
        Some((claim, (text("remote_host")?, port)))
    }
}

/// Blocks that wait for a decode engine.
struct Offer {
    request_id: String,
    blocks: Vec<u64>,
    content: u64,
    expires: Instant,
}

struct State {
    engine_id: String,
    restarts: u64,
    next_block: u64,
    offers: VecDeque<Offer>,
}

/// What an engine keeps for others.
pub(crate) struct Transfers(Mutex<State>);

impl Transfers {
    pub fn new() -> Self {
        let state = State { engine_id: engine_id(0), restarts: 0, next_block: 1, offers: VecDeque::new() };
        Self(Mutex::new(state))
    }

    /// As a new process: another engine, with nothing to give.
    pub fn restart(&self) {
        let mut state = self.lock();
        state.restarts += 1;
        state.engine_id = engine_id(state.restarts);
        state.offers.clear();
    }

    /// Keeps a prompt of `tokens` tokens for `lease`, and returns the `kv_transfer_params` that say so.
    pub fn offer(
        &self,
        request_id: &str,
        content: u64,
        tokens: usize,
        block_size: usize,
        lease: Duration,
        address: SocketAddr,
    ) -> Value {
        let mut state = self.lock();
        let now = Instant::now();
        state.offers.retain(|offer| offer.expires > now);
        if state.offers.len() >= KEPT {
            state.offers.pop_front();
        }
        let first = state.next_block;
        state.next_block += tokens.div_ceil(block_size.max(1)) as u64;
        let blocks: Vec<u64> = (first..state.next_block).collect();
        // ids of clients may repeat; the engine's own do not
        let request_id = format!("{request_id}-{first:08x}");
        let expiry = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + lease;
        let params = json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": [blocks],
            "remote_engine_id": state.engine_id,
            "remote_request_id": request_id,
            "remote_host": address.ip().to_string(),
            "remote_port": address.port(),
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": expiry.as_secs_f64(),
            "remote_registration_generation": 0,
            "transfer_mode": "pull",
        });
        state.offers.push_back(Offer { request_id, blocks, content, expires: now + lease });
        params
    }

    /// Gives blocks away.
    ///
    /// # Errors
    /// What is wrong with the claim.
    pub fn claim(&self, claim: &Claim) -> Result<(), &'static str> {
        let mut state = self.lock();
        if claim.engine_id != state.engine_id {
            return Err("another engine's blocks, or those of before a restart");
        }
        let position = state.offers.iter().position(|offer| offer.request_id == claim.request_id);
        let offer = position.and_then(|position| Some((position, state.offers.get(position)?)));
        let Some((position, offer)) = offer else {
            return Err("no such request, or its blocks are fetched already");
        };
        if offer.expires <= Instant::now() {
            return Err("the blocks are expired");
        }
        if claim.blocks != [offer.blocks.as_slice()] {
            return Err("not the blocks of this request");
        }
        if claim.content != offer.content {
            return Err("the blocks of another prompt");
        }
        state.offers.remove(position);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// In the form of a UUID, different for every engine and start.
fn engine_id(restarts: u64) -> String {
    static STARTED: AtomicU64 = AtomicU64::new(0);
    let started = STARTED.fetch_add(1, Ordering::Relaxed);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let unique = xxh3_128(format!("{now} {} {started} {restarts}", std::process::id()).as_bytes());
    let hex = format!("{unique:032x}");
    let part = |range| hex.get(range).unwrap_or_default();
    format!("{}-{}-{}-{}-{}", part(0..8), part(8..12), part(12..16), part(16..20), part(20..32))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTENT: u64 = 7;

    fn offered(transfers: &Transfers, request: &str, lease: Duration) -> Claim {
        let address = ([127, 0, 0, 1], 5600).into();
        let params = transfers.offer(request, CONTENT, 40, 16, lease, address);
        let (claim, at) = Claim::read(params.as_object().unwrap(), CONTENT).unwrap();
        assert_eq!(at, ("127.0.0.1".to_owned(), 5600));
        assert_eq!(claim.blocks[0].len(), 3);
        claim
    }

    #[test]
    fn blocks_are_given_once_to_who_names_them_all() {
        let transfers = Transfers::new();
        let lease = Duration::from_secs(30);
        let (first, second) = (offered(&transfers, "a", lease), offered(&transfers, "b", lease));
        assert_ne!(first.blocks, second.blocks);
        assert_eq!(transfers.claim(&first), Ok(()));
        assert!(transfers.claim(&first).is_err(), "twice");
        let right = offered(&transfers, "a", lease);
        for wrong in [
            Claim { blocks: vec![vec![1]], ..right.clone() },
            Claim { blocks: vec![], ..right.clone() },
            Claim { content: CONTENT + 1, ..right.clone() },
            Claim { request_id: "x".into(), ..right.clone() },
            Claim { engine_id: "x".into(), ..right.clone() },
            Claim { request_id: second.request_id.clone(), ..right.clone() },
        ] {
            assert!(transfers.claim(&wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(transfers.claim(&right), Ok(()), "wrong claims take nothing");
        assert!(transfers.claim(&offered(&transfers, "c", Duration::ZERO)).is_err(), "expired");
        let before = offered(&transfers, "d", lease);
        transfers.restart();
        assert!(transfers.claim(&before).is_err(), "restarted");
        assert_eq!(transfers.claim(&offered(&transfers, "d", lease)), Ok(()));
    }

    #[test]
    fn an_engine_that_is_told_too_little_fetches_nothing() {
        let transfers = Transfers::new();
        let params = transfers.offer("a", CONTENT, 16, 16, Duration::ZERO, ([127, 0, 0, 1], 1).into());
        for name in
            ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids"]
        {
            let mut less = params.as_object().unwrap().clone();
            less.remove(name);
            assert_eq!(Claim::read(&less, CONTENT), None, "{name}");
        }
    }
}
