//! All that differs by engine, one module each.
//!
//! What an engine's block hashes are made of is its contract; what its events look like, `kvgate-kv` reads for all
//! of them; how its chat requests become a prompt, `kvgate-prompt` knows.

mod llamacpp;
mod sglang;
mod trtllm;
mod vllm;

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
}

/// Every kind, in the order they are documented.
pub const ENGINES: &[EngineKind] = &[vllm::KIND, sglang::KIND, trtllm::KIND, llamacpp::KIND];

impl EngineKind {
    /// The kind of this name.
    pub fn by_name(name: &str) -> Option<&'static EngineKind> {
        ENGINES.iter().find(|kind| kind.name == name)
    }
}

/// The end marker of an OpenAI event stream on this path; other streams end as they like.
pub fn end_marker(path: &str) -> Option<&'static [u8]> {
    matches!(path, "/v1/chat/completions" | "/v1/completions").then_some(b"[DONE]")
}

#[cfg(test)]
mod tests {
    use super::*;

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
