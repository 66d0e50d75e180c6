//! What the gateway would make of a request, with nothing running.

use std::io::BufRead;
use std::path::Path;

use kvgate_kv::hash::{Contract, Lora, Namespace};
use kvgate_prompt::{Fields, Prompt, State, Tokenizers, TokenizersConfig};
use kvgate_tiers::kv_exact;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::config::{Config, RuleConfig};

/// A request to explain.
#[derive(Debug, Clone)]
pub struct Asked<'a> {
    /// The path, without query.
    pub path: &'a str,
    /// `X-Model`.
    pub model: Option<&'a str>,
    /// The body.
    pub body: &'a [u8],
}

/// One value, or several where a request holds several prompts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Each<T> {
    /// The one prompt's.
    One(T),
    /// Each prompt's, in order.
    Many(Vec<T>),
}

impl<T> Each<T> {
    fn of(mut values: Vec<T>) -> Option<Self> {
        if values.len() > 1 { Some(Self::Many(values)) } else { values.pop().map(Self::One) }
    }
}

/// The answer.
#[derive(Debug, Clone, Serialize)]
pub struct Explained {
    /// The rule.
    pub rule: String,
    /// The model asked for.
    pub model: Option<String>,
    /// The prompt's text as it is tokenised; null where the client sent token ids.
    pub prompt: Option<Each<Option<String>>>,
    /// The token ids, as the engine computes them.
    pub token_ids: Option<Each<Vec<u32>>>,
    /// What block hashes are computed with.
    pub contract: Option<ContractShown>,
    /// The engine's hashes of the prompt's full blocks, in decimal; of several prompts one after the other.
    pub block_hashes: Vec<String>,
    /// Why kv-exact would pass, as far as that can be told without an inventory.
    pub miss: Option<&'static str>,
    /// More about the miss.
    pub detail: Option<String>,
}

/// A contract with its mode.
#[derive(Debug, Clone, Serialize)]
pub struct ContractShown {
    /// `auto` or `strict`.
    pub mode: &'static str,
    /// Its parts.
    #[serde(flatten)]
    pub contract: Contract,
}

/// Explains requests to one rule.
pub struct Explainer<'a> {
    rule: &'a RuleConfig,
    tokenizers: Tokenizers,
}

impl<'a> Explainer<'a> {
    /// For the rule of this name, or the only one.
    ///
    /// # Errors
    /// There is no such rule, or several and none is named.
    pub fn new(config: &'a Config, rule: Option<&str>) -> Result<Self, String> {
        let names = || config.rules.iter().map(|r| r.name.as_str()).collect::<Vec<_>>().join(", ");
        let rule = match (rule, config.rules.as_slice()) {
            (None, [only]) => only,
            (None, _) => return Err(format!("--rule is needed; there are: {}", names())),
            (Some(name), rules) => rules
                .iter()
                .find(|r| r.name == name)
                .ok_or_else(|| format!("no rule {name:?}; there are: {}", names()))?,
        };
        Ok(Self { rule, tokenizers: tokenizers(config) })
    }

    /// Explains one request.
    pub fn explain(&self, asked: &Asked<'_>) -> Explained {
        let fields = Fields::read(asked.body);
        let named = asked.model.filter(|m| !m.is_empty());
        let model = named.or_else(|| fields.as_ref()?.model.as_deref().filter(|m| !m.is_empty()));
        let mut explained = Explained {
            rule: self.rule.name.clone(),
            model: model.map(str::to_owned),
            prompt: None,
            token_ids: None,
            contract: None,
            block_hashes: Vec::new(),
            miss: None,
            detail: None,
        };
        let Some(tier) = self.rule.tier.get(kv_exact::KIND.name) else {
            explained.miss = Some("mode_off");
            return explained;
        };
        let (contract, lora) = match kv_exact::explained(tier) {
            Ok(found) => found,
            Err(e) => return missed(explained, "hashes", e.to_string()),
        };
        let mode = match kv_exact::follows(tier) {
            kvgate_kv::mirror::View::Own => "auto",
            kvgate_kv::mirror::View::Published => "strict",
        };
        explained.contract = Some(ContractShown { mode, contract: contract.clone() });
        let Some(model) = model else {
            return missed(explained, "model_empty", "the request names no model".into());
        };
        let prompt = match self.prompt(model, asked.path, fields.as_ref(), lora.contains_key(model)) {
            Ok(prompt) => prompt,
            Err((miss, detail)) => return missed(explained, miss, detail),
        };
        let namespace = Namespace {
            lora: lora.get(model).map(|path| Lora { name: model.to_owned(), path: path.clone() }),
            cache_salt: prompt.cache_salt.clone(),
        };
        match contract.hasher() {
            Ok(hasher) => {
                let of = |s: &kvgate_prompt::Sequence| hasher.blocks(&s.tokens, &namespace);
                let digests = prompt.sequences.iter().flat_map(of);
                explained.block_hashes = digests.map(|d| d.u64().to_string()).collect();
            }
            // under auto nothing is compared by these
            Err(e) => {
                explained.detail = Some(e.to_string());
                explained.miss = (mode == "strict").then_some("hashes");
            }
        }
        let longest = prompt.sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
        if explained.miss.is_none() && longest < kv_exact::min_match_tokens(tier) {
            explained.miss = Some("shallow");
        }
        explained.prompt = Each::of(prompt.sequences.iter().map(|s| s.text.clone()).collect());
        explained.token_ids = Each::of(prompt.sequences.iter().map(|s| s.tokens.to_vec()).collect());
        explained
    }

    fn prompt(
        &self,
        model: &str,
        path: &str,
        fields: Option<&Fields<'_>>,
        adapter: bool,
    ) -> Result<Prompt, (&'static str, String)> {
        let fields = fields.ok_or(("text_empty", "the body is not a JSON object".to_owned()))?;
        let mut state = self.tokenizers.load(model);
        if let (State::Missing(_), true, Some(base)) = (&state, adapter, self.base()) {
            state = self.tokenizers.load(base);
        }
        let model = match state {
            State::Ready(model) => model,
            State::Loading => return Err(("tokenize", "the tokenizer is being loaded".into())),
            State::Missing(why) | State::Failed(why) => return Err(("tokenize", why.to_string())),
        };
        kvgate_prompt::prompt(&model, path, fields).map_err(|e| (e.miss(), e.to_string()))
    }

    /// The rule's only model, whose tokenizer its adapters share.
    fn base(&self) -> Option<&str> {
        match self.rule.matches.models.as_slice() {
            [only] => Some(only),
            _ => None,
        }
    }

    /// Explains a file of JSON lines `{path, headers?, body}`, where a body is the JSON itself or a string that
    /// holds it raw; calls `tell` with one answer a line, in order.
    ///
    /// # Errors
    /// The file cannot be read, or a line is no such object.
    pub fn batch(
        &self,
        file: &Path,
        mut tell: impl FnMut(&Explained) -> std::io::Result<()>,
    ) -> Result<(), String> {
        let open = std::fs::File::open(file).map_err(|e| format!("{}: {e}", file.display()))?;
        for (number, line) in std::io::BufReader::new(open).lines().enumerate() {
            let at = |e: &dyn std::fmt::Display| format!("{}:{}: {e}", file.display(), number + 1);
            let line = line.map_err(|e| at(&e))?;
            if line.trim().is_empty() {
                continue;
            }
            let asked: Line<'_> = serde_json::from_str(&line).map_err(|e| at(&e))?;
            // a string is the raw body; anything else is the body as it stands in the line
            let raw = serde_json::from_str::<String>(asked.body.get());
            let body = raw.as_deref().unwrap_or(asked.body.get());
            let header = |name: &str| {
                asked.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.as_str())
            };
            let path = asked.path.split('?').next().unwrap_or_default();
            let explained = self.explain(&Asked { path, model: header("x-model"), body: body.as_bytes() });
            tell(&explained).map_err(|e| e.to_string())?;
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Line<'a> {
    path: String,
    #[serde(default)]
    headers: std::collections::BTreeMap<String, String>,
    #[serde(borrow)]
    body: &'a RawValue,
}

fn missed(explained: Explained, miss: &'static str, detail: String) -> Explained {
    Explained { miss: Some(miss), detail: Some(detail), ..explained }
}

/// The store of tokenizers that a configuration names.
pub fn tokenizers(config: &Config) -> Tokenizers {
    let (server, limits) = (&config.gateway.server, &config.gateway.tokenizer);
    let bytes = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    Tokenizers::new(
        &server.tokenizers,
        TokenizersConfig {
            max_models: limits.max_models,
            cache_bytes: bytes(limits.cache),
            max_text: bytes(limits.max_text),
            retry: limits.retry,
            ..TokenizersConfig::default()
        },
    )
}
