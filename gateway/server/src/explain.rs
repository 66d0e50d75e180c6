//! What the gateway would make of a request, with nothing running.

use std::collections::BTreeMap;
use std::io::BufRead;

use kvgate_kv::hash::{Contract, Lora, Namespace};
use kvgate_kv::mirror::View;
use kvgate_prompt::{Fields, Prompt, Sequence, Tokenizers, TokenizersConfig};
use kvgate_tiers::kv_exact;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::config::{Config, RuleConfig};
use crate::facts::{Prompts, RulePrompts};

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
    /// More about the miss, or what the hashes depend on.
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

/// Why kv-exact would pass: the miss, and more about it.
type Pass = (&'static str, String);

/// Explains requests to one rule.
pub struct Explainer<'a> {
    rule: &'a RuleConfig,
    prompts: RulePrompts,
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
            (None, []) => return Err("there are no rules".into()),
            (None, _) => return Err(format!("--rule is needed; there are: {}", names())),
            (Some(name), rules) => rules
                .iter()
                .find(|r| r.name == name)
                .ok_or_else(|| format!("no rule {name:?}; there are: {}", names()))?,
        };
        let prompts = Prompts::new(tokenizers(config), usize::MAX, 1);
        Ok(Self { rule, prompts: RulePrompts::new(prompts, rule, rule.tier.get(kv_exact::KIND.name)) })
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
        if let Err((miss, detail)) = self.fill(&mut explained, asked) {
            (explained.miss, explained.detail) = (Some(miss), Some(detail));
        }
        explained
    }

    /// Does what kv-exact does, in its order.
    fn fill(&self, explained: &mut Explained, asked: &Asked<'_>) -> Result<(), Pass> {
        let tier = self.rule.tier.get(kv_exact::KIND.name);
        let tier = tier.ok_or_else(|| ("mode_off", "kv-exact is no tier of the rule".to_owned()))?;
        let (contract, lora) = kv_exact::explained(tier).map_err(|e| ("hashes", e.to_string()))?;
        let strict = kv_exact::follows(tier) == View::Published;
        let mode = if strict { "strict" } else { "auto" };
        explained.contract = Some(ContractShown { mode, contract: contract.clone() });
        let model = explained.model.as_deref();
        let model = model.ok_or_else(|| ("model_empty", "the request names no model".to_owned()))?;
        let prompt = self.prompts.prompt(model, asked.path, asked.body);
        let prompt = prompt.map_err(|none| (none.miss.0, none.why.to_string()))?;
        explained.prompt = Each::of(prompt.sequences.iter().map(|s| s.text.clone()).collect());
        explained.token_ids = Each::of(prompt.sequences.iter().map(|s| s.tokens.to_vec()).collect());
        let named = Fields::read(asked.body).and_then(|fields| fields.adapter);
        let lora = kv_exact::adapter(&lora, model, named.as_deref());
        let hashed = hashes(&contract, &prompt, lora);
        if let Ok(hashes) = &hashed {
            explained.block_hashes.clone_from(hashes);
        }
        // under auto nothing is compared by these
        explained.detail = match &hashed {
            Ok(_) => contract.caveat().filter(|_| strict).map(|caveat| caveat.to_string()),
            Err(why) => Some(why.clone()),
        };
        let longest = prompt.sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
        let least = kv_exact::min_match_tokens(tier);
        if longest < least {
            return Err(("shallow", format!("{longest} tokens, and min_match_tokens is {least}")));
        }
        match hashed {
            Err(why) if strict => Err(("hashes", why)),
            _ => Ok(()),
        }
    }

    /// Explains JSON lines `{path, headers?, body}`, where a body is the JSON itself or a string that holds it raw:
    /// one answer a line, in order; blank lines have none. What cannot be read is answered as a body that cannot be
    /// read, and told: with the line's place, `file:line`.
    ///
    /// # Errors
    /// The file cannot be read on.
    pub fn batch<'s>(
        &'s self,
        file: &'s str,
        lines: impl BufRead + 's,
    ) -> impl Iterator<Item = std::io::Result<(Explained, Option<String>)>> + 's {
        let blank = |line: &std::io::Result<Vec<u8>>| line.as_ref().is_ok_and(|l| l.trim_ascii().is_empty());
        let numbered = (1..).zip(lines.split(b'\n')).filter(move |(_, line)| !blank(line));
        numbered.map(move |(number, line)| {
            let line = line?;
            Ok(match serde_json::from_slice(&line) {
                Ok(asked) => (self.line(&asked), None),
                Err(e) => {
                    let place = format!("{file}:{number}: {e}");
                    let explained = self.explain(&Asked { path: "", model: None, body: b"" });
                    (Explained { detail: Some(place.clone()), ..explained }, Some(place))
                }
            })
        })
    }

    fn line(&self, asked: &Line<'_>) -> Explained {
        // a string is the raw body; anything else is the body as it stands in the line
        let raw = serde_json::from_str::<String>(asked.body.get());
        let body = raw.as_deref().unwrap_or(asked.body.get());
        let mut headers = asked.headers.iter().flatten();
        let model = headers.find(|(name, _)| name.eq_ignore_ascii_case("x-model")).map(|(_, v)| v.as_str());
        let path = asked.path.split('?').next().unwrap_or_default();
        self.explain(&Asked { path, model, body: body.as_bytes() })
    }
}

#[derive(Deserialize)]
struct Line<'a> {
    path: String,
    #[serde(default)]
    headers: Option<BTreeMap<String, String>>,
    #[serde(borrow)]
    body: &'a RawValue,
}

/// The hashes of all full blocks, in decimal, or why there are none.
fn hashes(contract: &Contract, prompt: &Prompt, lora: Option<Lora>) -> Result<Vec<String>, String> {
    let hasher = contract.hasher().map_err(|e| e.to_string())?;
    let namespace = Namespace { lora, cache_salt: prompt.cache_salt.clone() };
    let of = |s: &Sequence| hasher.blocks(&s.tokens, &namespace);
    Ok(prompt.sequences.iter().flat_map(of).map(|digest| digest.u64().to_string()).collect())
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
