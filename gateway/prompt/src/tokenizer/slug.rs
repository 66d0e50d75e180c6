use std::fmt;

use thiserror::Error;

/// Longest model name, in bytes.
const MAX_MODEL: usize = 256;

/// The folder of a model in the store: its name with `/` written as `__`.
///
/// Two models never share a slug, and no slug leads out of the store: names that could are refused.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slug(String);

/// Why a model name has no slug.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SlugError {
    /// The empty name.
    #[error("the model name is empty")]
    Empty,
    /// Longer than 256 bytes.
    #[error("the model name is longer than {MAX_MODEL} bytes")]
    TooLong,
    /// Outside `A-Z a-z 0-9 . _ - /`.
    #[error("the model name holds {0:?}; allowed are A-Z a-z 0-9 . _ - and / between parts")]
    Character(char),
    /// A part between slashes is empty, `.` or `..`.
    #[error("a part of the model name is empty, \".\" or \"..\"")]
    Part,
    /// `__`, or a `_` beside a `/`: another model would have the same folder.
    #[error(
        "the model name holds \"__\" or a \"_\" beside a \"/\", so that two models would share one folder"
    )]
    Ambiguous,
}

impl Slug {
    /// The slug of a model name as clients send it.
    pub fn new(model: &str) -> Result<Self, SlugError> {
        if model.is_empty() {
            return Err(SlugError::Empty);
        }
        if model.len() > MAX_MODEL {
            return Err(SlugError::TooLong);
        }
        let allowed = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/');
        if let Some(c) = model.chars().find(|c| !allowed(c)) {
            return Err(SlugError::Character(c));
        }
        if model.split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(SlugError::Part);
        }
        if model.contains("__") || model.contains("_/") || model.contains("/_") {
            return Err(SlugError::Ambiguous);
        }
        Ok(Self(model.replace('/', "__")))
    }

    /// The folder's name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Slug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names() {
        assert_eq!(Slug::new("Qwen/Qwen3-0.6B").unwrap().as_str(), "Qwen__Qwen3-0.6B");
        assert_eq!(Slug::new("tiny-qwen3").unwrap().as_str(), "tiny-qwen3");
        assert_eq!(Slug::new("a_b/c_d").unwrap().as_str(), "a_b__c_d");
        for (model, why) in [
            ("", SlugError::Empty),
            ("..", SlugError::Part),
            (".", SlugError::Part),
            ("../../etc/passwd", SlugError::Part),
            ("/etc", SlugError::Part),
            ("a//b", SlugError::Part),
            ("a/", SlugError::Part),
            ("a__b", SlugError::Ambiguous),
            ("a_/b", SlugError::Ambiguous),
            ("a/_b", SlugError::Ambiguous),
            ("%2e%2e", SlugError::Character('%')),
            ("a\0", SlugError::Character('\0')),
            ("a\\b", SlugError::Character('\\')),
            ("modèle", SlugError::Character('è')),
            ("a b", SlugError::Character(' ')),
        ] {
            assert_eq!(Slug::new(model), Err(why), "{model:?}");
        }
        assert_eq!(Slug::new(&"a".repeat(1 << 20)), Err(SlugError::TooLong));
        assert!(Slug::new(&"a".repeat(256)).is_ok());
    }

    proptest! {
        #[test]
        fn no_two_models_share_a_slug(a in "[ab_/.-]{1,8}", b in "[ab_/.-]{1,8}") {
            if let (Ok(x), Ok(y)) = (Slug::new(&a), Slug::new(&b)) {
                prop_assert_eq!(x == y, a == b);
                prop_assert!(!x.as_str().contains('/') && x.as_str() != "." && x.as_str() != "..");
            }
        }
    }
}
