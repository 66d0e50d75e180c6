//! All that differs by engine, one module each.
//!
//! What an engine's block hashes are made of is its contract; what its events look like, `kvgate-kv` reads for all
//! of them; how its chat requests become a prompt, `kvgate-prompt` knows. How two engines share a request is told in [`pd`].

mod llamacpp;
pub mod metrics;
pub mod pd;
mod sglang;
pub mod stream;
mod trtllm;
mod vllm;

use metrics::Metrics;
use pd::Connector;

/// A kind of engine: the row it is known by in `engine = "…"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineKind {
    /// Its name in rules.
    pub name: &'static str,
    /// What is worth knowing of it, in a sentence.
    pub doc: &'static str,
    /// Whether it announces the blocks it holds; if not, KV-exact routing cannot work with it.
    pub announces_blocks: bool,
    /// Whether we can compute its own block hashes, which `contract.mode = "strict"` compares.
    pub hashes: bool,
    /// Where it says that it is well, with a 2xx, without computing anything.
    pub health: &'static str,
    /// Its metrics page.
    pub metrics: Metrics,
    /// The ways in which its prefill and decode engines hand over KV cache, the usual one first; none where requests
    /// cannot be split over two of them.
    pub connectors: &'static [Connector],
}

/// Every kind, in the order they are documented.
pub const ENGINES: &[EngineKind] = &[vllm::KIND, sglang::KIND, trtllm::KIND, llamacpp::KIND];

impl EngineKind {
    /// The kind of this name.
    pub fn by_name(name: &str) -> Option<&'static EngineKind> {
        ENGINES.iter().find(|kind| kind.name == name)
    }

    /// The connector of this name.
    pub fn connector(&self, name: &str) -> Option<&'static Connector> {
        self.connectors.iter().find(|connector| connector.name == name)
    }
}

/// Whether a request to this path has no effect but its answer: it may run twice. `/v1/responses` may store, files
/// and batches do.
pub fn only_computes(path: &str) -> bool {
    let path = path.strip_prefix("/v1").unwrap_or(path);
    const COMPUTE: [&str; 10] = [
        "/chat/completions",
        "/completions",
        "/embeddings",
        "/messages",
        "/tokenize",
        "/detokenize",
        "/rerank",
        "/score",
        "/classify",
        "/pooling",
    ];
    COMPUTE.contains(&path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stores_is_told_from_what_computes() {
        assert!(only_computes("/v1/chat/completions") && only_computes("/tokenize"));
        assert!(!only_computes("/v1/responses") && !only_computes("/v1/files") && !only_computes("/v1"));
    }

    #[test]
    fn kinds_are_found_by_name() {
        for kind in ENGINES {
            assert_eq!(EngineKind::by_name(kind.name), Some(kind));
        }
        assert_eq!(EngineKind::by_name("VLLM"), None);
        assert!(EngineKind::by_name("llamacpp").is_some_and(|kind| !kind.announces_blocks));
        assert!(ENGINES.iter().all(|kind| kind.announces_blocks || !kind.hashes));
    }
}
