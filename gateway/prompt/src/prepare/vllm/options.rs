//! The plain fields of a request, and the requests that vLLM refuses for them.

use crate::json::Json;
use crate::{Fields, TokenizeError};

/// A member that is there and not `null`.
pub(super) fn given(fields: &Fields<'_>, name: &str) -> bool {
    fields.raw(name).is_some_and(|raw| raw != "null")
}

/// A member's value; `null` is absent.
pub(super) fn value<'a>(fields: &Fields<'a>, name: &str) -> Result<Option<Json<'a>>, TokenizeError> {
    match fields.raw(name) {
        None | Some("null") => Ok(None),
        Some(raw) => Json::parse(raw).map(Some).map_err(|e| format!("{name}: {e}").into()),
    }
}

/// A boolean with a default; the engine also takes 0 and 1.
pub(super) fn flag(fields: &Fields<'_>, name: &str, default: bool) -> Result<bool, TokenizeError> {
    match fields.raw(name) {
        None => Ok(default),
        Some("true" | "1") => Ok(true),
        Some("false" | "0") => Ok(false),
        Some(_) => Err(refused(&format!("{name} is not a boolean"))),
    }
}

/// A number; `null` is absent.
fn number(fields: &Fields<'_>, name: &str) -> Option<f64> {
    fields.raw(name)?.parse().ok()
}

pub(super) fn refused(why: &str) -> TokenizeError {
    TokenizeError::from(format!("refused by the engine: {why}"))
}

/// Refuses what vLLM answers with 400 whatever the prompt is. Not complete: a request that slips through is refused by
/// the engine itself.
pub(super) fn check(fields: &Fields<'_>) -> Result<(), TokenizeError> {
    if given(fields, "cache_salt") && fields.cache_salt.as_deref().is_none_or(str::is_empty) {
        return Err(refused("cache_salt must be a non-empty string"));
    }
    let n = number(fields, "n").unwrap_or(1.0);
    let greedy = number(fields, "temperature").is_some_and(|t| t < 1e-5);
    if n < 1.0 || (n > 1.0 && greedy && fields.raw("use_beam_search") != Some("true")) {
        return Err(refused("n must be 1 when sampling greedily"));
    }
    let empty = |raw: &str| matches!(Json::parse(raw), Ok(json) if !json.is_truthy());
    if fields.raw("stream_options").is_some_and(|raw| !empty(raw)) && !fields.stream {
        return Err(refused("stream_options without stream"));
    }
    Ok(())
}

/// `truncate_prompt_tokens` and `truncation_side`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Truncation {
    /// Most tokens to keep; `None`: all (also for -1, the engine's own limit, which only cuts what is over-long).
    pub keep: Option<usize>,
    /// Did the request name the side?
    pub explicit_side: bool,
    right: bool,
}

impl Truncation {
    pub fn read(fields: &Fields<'_>) -> Result<Self, TokenizeError> {
        let keep = match fields.raw("truncate_prompt_tokens") {
            None | Some("null" | "-1") => None,
            Some(raw) => Some(raw.parse().map_err(|_| refused("truncate_prompt_tokens is not a count"))?),
        };
        let right = match fields.raw("truncation_side") {
            None | Some("null" | "\"left\"") => false,
            Some("\"right\"") => true,
            Some(_) => return Err(refused("truncation_side is neither left nor right")),
        };
        Ok(Self { keep, explicit_side: given(fields, "truncation_side"), right })
    }

    /// The tokens that stay: the last ones, unless the request asks for the first.
    pub fn cut<'t>(&self, tokens: &'t [u32]) -> &'t [u32] {
        let keep = self.keep.unwrap_or(tokens.len()).min(tokens.len());
        if self.right { tokens.get(..keep) } else { tokens.get(tokens.len() - keep..) }.unwrap_or_default()
    }
}
