//! Text to ids, piece by piece.
//!
//! A chat is a chain of turns, and all but the last were there a moment ago. So the text is cut after the special
//! tokens that end a turn and every piece is looked up by content. Cutting changes nothing where the cut token is found
//! in the text whatever surrounds it and the model starts afresh after it; [`Cuts::find`] takes only tokens for which
//! both hold.

use std::borrow::Borrow;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::pipeline::{EncodeOptions, Override, PipelineToken, PipelineTokenizer};
use tokenizers::vocab::bucket_added_vocabulary::AddedToken;

use super::cache::{Cache, CacheStats, Ids};
use crate::TokenizeError;

/// Shorter texts are tokenised whole: cutting costs more than it saves.
const SHORT: usize = 256;

/// Most tokens to cut after.
const MAX_CUTS: usize = 16;

/// The tokens that are found in a text before anything else.
pub(super) fn added_tokens(tokenizer: &PipelineTokenizer) -> Vec<AddedToken> {
    let mut added: Vec<_> = tokenizer.get_added_vocabulary().get_added_tokens_decoder().into_iter().collect();
    added.sort_by_key(|(id, _)| *id);
    added.into_iter().map(|(_, token)| token).collect()
}

pub(super) struct Encoder {
    tokenizer: PipelineTokenizer,
    /// Special tokens that the tokenizer sets before and after every text.
    before: Vec<u32>,
    after: Vec<u32>,
    cuts: Option<Cuts>,
}

impl Encoder {
    /// Wraps a tokenizer. `ends` are texts that may end a turn; `bytes` bounds the cache. The cache stays off where
    /// `ends` holds no token that is safe to cut after, where `positional` says that the start of a text is treated
    /// differently, or where a probe shows a difference.
    pub fn new(
        tokenizer: PipelineTokenizer,
        added: &[AddedToken],
        ends: &[String],
        positional: bool,
        bytes: usize,
    ) -> Self {
        let mut encoder = Self { tokenizer, before: Vec::new(), after: Vec::new(), cuts: None };
        if let Ok((before, after)) = encoder.find_frame() {
            (encoder.before, encoder.after) = (before, after);
        }
        if bytes > 0 && !positional {
            encoder.cuts = Cuts::find(added, ends, bytes);
            if !encoder.agrees_with_itself(ends) {
                encoder.cuts = None;
            }
        }
        encoder
    }

    /// As [`encode`](Self::encode), but pieces that another task tokenises by this are waited for.
    pub async fn encode_shared(&self, text: &str, special: bool) -> Ids {
        let Some(cuts) = self.cuts.as_ref().filter(|_| text.len() >= SHORT) else {
            return self.encode_whole(text, special);
        };
        let mut pieces = Vec::new();
        for piece in cuts.pieces(text) {
            pieces.push(cuts.cache.get_or_wait(piece, || self.encode_whole(piece, false)).await?);
        }
        Ok(self.join(&pieces, special))
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str, special: bool) -> Ids {
        match &self.cuts {
            Some(cuts) if text.len() >= SHORT => self.encode_cut(cuts, text, special),
            _ => self.encode_whole(text, special),
        }
    }

    fn encode_whole(&self, text: &str, special: bool) -> Ids {
        let options = EncodeOptions {
            add_special_tokens: false,
            encode_special_tokens: false,
            padding: Override::Off,
            truncation: Override::Off,
        };
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        if special {
            ids.extend(self.before.iter().map(|id| PipelineToken::from(*id)));
        }
        self.tokenizer
            .encode_into(text, &options, &mut ids)
            .map_err(|e| TokenizeError::from(e.to_string()))?;
        if special {
            ids.extend(self.after.iter().map(|id| PipelineToken::from(*id)));
        }
        Ok(PipelineToken::cast_slice(&ids).into())
    }

    fn encode_cut(&self, cuts: &Cuts, text: &str, special: bool) -> Ids {
        let piece = |piece| cuts.cache.get_or(piece, || self.encode_whole(piece, false));
        let pieces = cuts.pieces(text).map(piece).collect::<Result<Vec<_>, _>>()?;
        Ok(self.join(&pieces, special))
    }

    fn join(&self, pieces: &[Arc<[u32]>], special: bool) -> Arc<[u32]> {
        let (before, after): (&[u32], &[u32]) =
            if special { (&self.before, &self.after) } else { (&[], &[]) };
        let parts = [before].into_iter().chain(pieces.iter().map(Borrow::borrow)).chain([after]);
        let parts: Vec<&[u32]> = parts.collect();
        parts.concat().into()
    }

    /// The ids that `add_special_tokens` sets around a text.
    fn find_frame(&self) -> Result<(Vec<u32>, Vec<u32>), TokenizeError> {
        let options =
            EncodeOptions { padding: Override::Off, truncation: Override::Off, ..EncodeOptions::default() };
        let mut framed = Vec::new();
        self.tokenizer
            .encode_into("a", &options, &mut framed)
            .map_err(|e| TokenizeError::from(e.to_string()))?;
        let framed = PipelineToken::cast_slice(&framed);
        let plain = self.encode_whole("a", false)?;
        let at = framed.windows(plain.len().max(1)).position(|w| *w == *plain);
        let at = at.ok_or("special tokens that do not surround the text")?;
        let after = framed.get(at + plain.len()..).unwrap_or_default();
        Ok((framed.get(..at).unwrap_or_default().to_vec(), after.to_vec()))
    }

    /// What `add_special_tokens` sets before and after a text.
    pub fn frame(&self) -> (&[u32], &[u32]) {
        (&self.before, &self.after)
    }

    pub fn stats(&self) -> CacheStats {
        self.cuts.as_ref().map(|cuts| cuts.cache.stats()).unwrap_or_default()
    }

    /// Do cut and whole texts give the same ids, over texts that surround a cut in every way?
    fn agrees_with_itself(&self, ends: &[String]) -> bool {
        let Some(cuts) = &self.cuts else { return true };
        let around = ["", " ", "\n", "a", " a", "\n\n", "é", "你好", "1", "'s", "<|", "\t x", "▁", "  ", "."];
        let mut text = String::new();
        for end in ends {
            for (i, before) in around.iter().enumerate() {
                for after in around.iter().cycle().skip(i).take(5) {
                    text.extend([before, end.as_str(), after]);
                }
            }
        }
        match (self.encode_whole(&text, false), self.encode_cut(cuts, &text, false)) {
            (Ok(whole), Ok(cut)) => *whole == *cut,
            _ => false,
        }
    }

    /// The token of an id.
    pub fn token(&self, id: u32) -> bool {
        !self.tokenizer.decode_tokens(&[id], false).is_empty()
    }
}

/// Where a text may be cut, and what is known of the pieces.
struct Cuts {
    finder: AhoCorasick,
    cache: Cache,
}

impl Cuts {
    /// Takes from `ends` the tokens that are safe to cut after.
    fn find(added: &[AddedToken], ends: &[String], bytes: usize) -> Option<Self> {
        let safe = ends.iter().filter(|end| is_safe(end, added)).take(MAX_CUTS);
        let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(safe).ok()?;
        if finder.patterns_len() == 0 {
            return None;
        }
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), bytes);
        Some(Self { finder, cache: Cache::new(bytes, seed) })
    }

    fn pieces<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> {
        let mut start = 0;
        let ends = self.finder.find_iter(text).map(|found| found.end()).chain([text.len()]);
        ends.filter_map(move |end| {
            let piece = text.get(start..end).filter(|piece| !piece.is_empty());
            start = end;
            piece
        })
    }
}

/// May a text be cut after every occurrence of `end`?
///
/// It may if `end` is an added token that is matched in the text as it is given (not normalised), takes no neighbouring
/// space along and asks nothing of its neighbours; if no other token can be matched over it, which takes one that holds
/// it, or that ends with what it begins with (nor may it overlap itself); and if what follows cannot tell it from the
/// start of a text: tokens that take the space before them, or want no letter before them, stop at punctuation.
fn is_safe(end: &str, added: &[AddedToken]) -> bool {
    let Some(token) = added.iter().find(|t| t.content == end) else { return false };
    if token.normalized || token.lstrip || token.rstrip || token.single_word {
        return false;
    }
    if !end.chars().next_back().is_some_and(|c| c.is_ascii_punctuation() && c != '_') {
        return false;
    }
    let overlaps = |other: &str| {
        let starts = end.char_indices().map(|(at, _)| at).skip(1);
        starts.filter_map(|at| end.get(..at)).any(|head| other.len() > head.len() && other.ends_with(head))
    };
    !overlaps(end)
        && added.iter().all(|t| t.content == end || !(t.content.contains(end) || overlaps(&t.content)))
}
