use std::path::Path;
use std::sync::Arc;

use minijinja::value::Value;
use serde_json::Value as Json;

use super::cache::CacheStats;
use super::encoder::{self, Encoder};
use super::files::{self, Identity, LoadError};
use super::store::TokenizersConfig;
use super::{config, turns};
use crate::TokenizeError;
use crate::template::ChatTemplate;

/// A tokenizer with its chat templates.
pub struct Model {
    identity: Identity,
    encoder: Encoder,
    vocabulary: u32,
    max_text: usize,
    templates: Vec<(String, Result<ChatTemplate, String>)>,
    special: Vec<(String, Value)>,
    in_code: Option<String>,
    notes: Vec<String>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

impl Model {
    /// Reads a model's folder. Takes about a second for a vocabulary of 150,000.
    pub fn load(folder: &Path, config: &TokenizersConfig) -> Result<Self, LoadError> {
        let real = files::real(folder)?;
        let folder = real.as_path();
        let identity = files::identity(folder);
        let missing = || LoadError::File { path: folder.join(files::TOKENIZER), reason: "missing".into() };
        let text = files::read(folder, files::TOKENIZER)?.ok_or_else(missing)?;
        let canonical =
            tokenizers::canonicalize_str(&text).map_err(|e| LoadError::Tokenizer(e.to_string()))?;
        drop(text);
        let tokenizer = tokenizers::from_json(&canonical).map_err(|e| LoadError::Tokenizer(e.to_string()))?;
        let positional = config::is_positional(&canonical);
        drop(canonical);

        let settings = json(folder, files::CONFIG)?;
        let model = json(folder, files::MODEL)?;
        let special = config::special_tokens(&settings);
        let templates: Vec<(String, Result<ChatTemplate, String>)> = files::templates(folder, &settings)?
            .into_iter()
            .map(|(name, source)| {
                let compiled = ChatTemplate::compile(&source, config.template, config.clock);
                (name, compiled.map_err(|e| format!("the chat template does not compile: {e}")))
            })
            .collect();
        let added = encoder::added_tokens(&tokenizer);
        let names: Vec<String> = added.iter().map(|token| token.content.clone()).collect();
        let rendered = templates
            .iter()
            .filter_map(|(_, t)| t.as_ref().ok())
            .flat_map(|t| turns::ends(t, &special, &names));
        let mut ends: Vec<String> =
            rendered.chain(config::end_of_text(&settings).map(str::to_owned)).collect();
        ends.sort();
        ends.dedup();
        let encoder = Encoder::new(tokenizer, &added, &ends, positional, config.cache_bytes);
        let mut notes: Vec<String> =
            templates.iter().filter_map(|(_, t)| t.as_ref().err().cloned()).collect();
        notes.extend(config::rendered_in_code(&model));
        if templates.is_empty() {
            notes.push("no chat template: chats cannot be prepared".into());
        }
        for token in config::special_texts(&settings).filter(|token| !names.iter().any(|name| name == token))
        {
            notes.push(format!("{}: {token:?} is no added token of {}", files::CONFIG, files::TOKENIZER));
        }
        if config.cache_bytes > 0 && encoder.stats().capacity == 0 {
            notes
                .push("no token that ends a turn is safe to cut after: every turn is tokenised whole".into());
        }
        Ok(Self {
            identity,
            vocabulary: config::vocabulary(&model).unwrap_or(0).max(end_of_vocabulary(&encoder)),
            encoder,
            max_text: config.max_text,
            templates,
            special,
            in_code: config::rendered_in_code(&model),
            notes,
        })
    }

    /// The ids of a text. `add_special_tokens` as in transformers: also those the tokenizer sets around a text. Text
    /// that reads like a special token becomes one.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Arc<[u32]>, TokenizeError> {
        self.check(text)?;
        self.encoder.encode(text, add_special_tokens)
    }

    /// As [`encode`](Self::encode), but each turn is tokenised once for all who ask for it at a time: the others wait,
    /// and hold no thread meanwhile.
    pub async fn encode_shared(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Arc<[u32]>, TokenizeError> {
        self.check(text)?;
        self.encoder.encode_shared(text, add_special_tokens).await
    }

    fn check(&self, text: &str) -> Result<(), TokenizeError> {
        if text.len() > self.max_text {
            return Err(format!("{} bytes of text, more than {}", text.len(), self.max_text).into());
        }
        Ok(())
    }

    /// The template for a chat with or without tools; an error where chats cannot be prepared for this model.
    pub fn template(&self, tools: bool) -> Result<&ChatTemplate, TokenizeError> {
        if let Some(reason) = &self.in_code {
            return Err(reason.clone().into());
        }
        let named = |wanted: &str| self.templates.iter().find(|(name, _)| name == wanted);
        let chosen = tools.then(|| named("tool_use")).flatten().or_else(|| named("default"));
        match chosen {
            Some((_, Ok(template))) => Ok(template),
            Some((_, Err(reason))) => Err(reason.clone().into()),
            None => Err("the model has no default chat template".into()),
        }
    }

    /// What the cache of encoded pieces did since the model was loaded.
    pub fn cache_stats(&self) -> CacheStats {
        self.encoder.stats()
    }

    /// What an operator should know of these files: what will miss, or cost more than it need.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Ids are below this.
    pub fn vocabulary(&self) -> u32 {
        self.vocabulary
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The ids that `add_special_tokens` sets before and after a text.
    pub(crate) fn frame(&self) -> (&[u32], &[u32]) {
        self.encoder.frame()
    }

    /// The special tokens as template variables.
    pub(crate) fn special(&self) -> &[(String, Value)] {
        &self.special
    }
}

/// One more than the largest id of the tokenizer, whose ids are dense.
fn end_of_vocabulary(encoder: &Encoder) -> u32 {
    let (mut low, mut high) = (0_u32, 1_u32 << 24);
    while low < high {
        let middle = low + (high - low) / 2;
        if encoder.token(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

fn json(folder: &Path, name: &str) -> Result<Json, LoadError> {
    let Some(text) = files::read(folder, name)? else { return Ok(Json::Null) };
    serde_json::from_str(&text)
        .map_err(|e| LoadError::File { path: folder.join(name), reason: e.to_string() })
}
