//! The families of a page by what they mean, whatever an engine calls them.

use super::{Blocks, Metrics, Reading};

/// Something that is looked for on a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// Requests that run.
    Running,
    /// Requests that wait.
    Waiting,
    /// The share of the KV cache in use.
    Usage,
    /// The number of KV blocks.
    Blocks,
    /// Tokens of prompts.
    PromptTokens,
    /// Generated tokens.
    GenerationTokens,
    /// How long first tokens took.
    Ttft,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Running,
        Self::Waiting,
        Self::Usage,
        Self::Blocks,
        Self::PromptTokens,
        Self::GenerationTokens,
        Self::Ttft,
    ];

    /// What it is called, whatever the engine.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Usage => "kv_cache_usage",
            Self::Blocks => "kv_blocks",
            Self::PromptTokens => "prompt_tokens",
            Self::GenerationTokens => "generation_tokens",
            Self::Ttft => "ttft",
        }
    }
}

impl Metrics {
    /// What a family is called on the page: its name, or the names it may have; empty of one that the engine lacks.
    pub fn names(&self, family: Family) -> Vec<String> {
        let blocks = |place: &Blocks| match place {
            Blocks::Gauge(gauge) => (*gauge).to_owned(),
            Blocks::Label(family, label) => format!("{family}{{{label}}}"),
            Blocks::Tokens(tokens, per_block) => format!("{tokens} / {per_block}"),
        };
        let one = |name: &str| if name.is_empty() { Vec::new() } else { vec![name.to_owned()] };
        match family {
            Family::Running => one(self.running),
            Family::Waiting => one(self.waiting),
            Family::Usage => self.usage.iter().map(|name| (*name).to_owned()).collect(),
            Family::Blocks => self.blocks.iter().map(blocks).collect(),
            Family::PromptTokens => one(self.prompt_tokens),
            Family::GenerationTokens => one(self.generation_tokens),
            Family::Ttft => one(self.ttft),
        }
    }

    /// Those that such an engine has.
    pub fn families(&self) -> impl Iterator<Item = Family> + '_ {
        Family::ALL.into_iter().filter(|family| !self.names(*family).is_empty())
    }
}

impl Reading {
    /// Whether the page said anything of a family.
    pub fn tells(&self, family: Family) -> bool {
        match family {
            Family::Running => self.running.is_some(),
            Family::Waiting => self.waiting.is_some(),
            Family::Usage => self.usage.is_some(),
            Family::Blocks => self.blocks.is_some(),
            Family::PromptTokens => self.prompt_tokens.is_some(),
            Family::GenerationTokens => self.generation_tokens.is_some(),
            Family::Ttft => self.ttft.is_some(),
        }
    }
}
