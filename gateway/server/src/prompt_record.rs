//! The prompt in the decision record: what `kvgate replay` needs of it.

use std::time::Duration;

use kvgate_core::{Facts, RecordedPrompt, Request, Tokens};
use kvgate_kv::hash::{Lora, Namespace};
use kvgate_kv::holdings::Holdings;
use kvgate_kv::own::OwnHasher;

use crate::world::World;

/// Tokens per block, as most engines are run.
const BLOCK: usize = 16;
/// Blocks that a hash adds to the one before.
const BLOCKS: usize = 32;

/// The prompt of a request, tokenised within `wait`; `None` if it has none, or none that can be tokenised in time.
pub async fn of(facts: &Facts, world: &World, wait: Duration) -> Option<RecordedPrompt> {
    let holdings = world.services.get::<Holdings>()?;
    let tokens = tokio::time::timeout(wait, facts.tokens()).await.ok()?.ok()?;
    recorded(holdings.hasher(), &tokens, &namespace(&facts.request), world.decisions.prompt_hashes)
}

/// What one model or adapter has cached serves no other, and likewise with salts.
fn namespace(request: &Request) -> Namespace {
    let [model, adapter] = [&request.model, &request.adapter].map(|n| n.as_deref().unwrap_or_default());
    // no two pairs of names give one: where the first ends is told
    let name = format!("{} {model}{adapter}", model.len());
    let lora = Some(Lora { name, path: String::new() });
    Namespace { lora, cache_salt: request.cache_salt.as_deref().map(str::to_owned) }
}

/// Of several prompts the longest.
fn recorded(
    hasher: &OwnHasher,
    tokens: &Tokens,
    namespace: &Namespace,
    most: usize,
) -> Option<RecordedPrompt> {
    let longest = tokens.sequences.iter().max_by_key(|sequence| sequence.len())?;
    let known = longest.get(..most.saturating_mul(BLOCKS * BLOCK)).unwrap_or(longest);
    let chain = hasher.chain(known, BLOCK, namespace);
    let hashes = chain.chunks(BLOCKS).filter_map(|blocks| blocks.last());
    let hashes = hashes.map(|hash| format!("{hash:016x}")).collect();
    Some(RecordedPrompt { tokens: longest.len(), span: BLOCKS * BLOCK, hashes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(tokens: std::ops::Range<u32>, most: usize) -> (usize, Vec<String>) {
        let tokens = Tokens { sequences: vec![[1, 2].into(), tokens.collect::<Vec<_>>().into()] };
        let recorded = recorded(&OwnHasher::with_key(1), &tokens, &Namespace::default(), most);
        recorded.map(|r| (r.tokens, r.hashes)).unwrap_or_default()
    }

    #[test]
    fn one_hash_for_each_span_and_one_for_what_is_left_in_full_blocks() {
        let (tokens, whole) = hashes(0..1100, 9);
        assert_eq!((tokens, whole.len()), (1100, 3));
        let (_, shorter) = hashes(0..1024, 9);
        assert_eq!(whole[..2], shorter);
        assert_eq!(hashes(0..1024 + 15, 9).1, shorter.clone(), "no full block more");
        assert_eq!(hashes(0..1100, 2), (1100, shorter), "cut off");
        assert_ne!(hashes(1..1101, 9).1[0], whole[0]);
        assert_eq!(hashes(0..15, 9), (15, vec![]));
        assert!(whole.iter().all(|hash| hash.len() == 16));
    }

    #[test]
    fn models_adapters_and_salts_are_told_apart() {
        let of = |model: &str, adapter: Option<&str>, salt: Option<&str>| {
            namespace(&Request {
                model: Some(model.into()),
                adapter: adapter.map(Into::into),
                cache_salt: salt.map(Into::into),
                ..Request::default()
            })
        };
        let all = [
            of("base", None, None),
            of("basesql", None, None),
            of("base", Some("sql"), None),
            of("base", Some("law"), None),
            of("base", None, Some("sql")),
        ];
        let tokens: Vec<u32> = (0..16).collect();
        let hashes = all.iter().map(|namespace| OwnHasher::with_key(1).chain(&tokens, BLOCK, namespace));
        assert_eq!(hashes.collect::<std::collections::BTreeSet<_>>().len(), all.len());
    }
}
