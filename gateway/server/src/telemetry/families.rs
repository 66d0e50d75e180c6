//! Which families an engine's page holds, and which it ought to.

use kvgate_engines::metrics::{Family, Metrics, Reading};

/// How it stands with a family that such an engine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FamilyState {
    /// The page holds it.
    Known,
    /// It does not, and need not: many engines show a series from their first request on only.
    Cold,
    /// It does not although the engine has had requests.
    Missing,
}

impl FamilyState {
    /// The label `state` of `kvgate_telemetry_family`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Known => "known",
            Self::Cold => "cold",
            Self::Missing => "missing",
        }
    }
}

/// How it stands with each family; `warm` engines have had requests.
pub(super) fn states(metrics: &Metrics, reading: &Reading, warm: bool) -> Vec<(Family, FamilyState)> {
    let state = |family| match (reading.tells(family), warm) {
        (true, _) => FamilyState::Known,
        (false, false) => FamilyState::Cold,
        (false, true) => FamilyState::Missing,
    };
    metrics.families().map(|family| (family, state(family))).collect()
}

/// Whether the engine is known to have had requests since its start. A page that shows it may be older than the last
/// series of that first request, so a family is missed on the page after it, not on that one.
#[derive(Debug, Default)]
pub(super) struct Warmth {
    warm: bool,
}

impl Warmth {
    /// Whether it was warm before this page; from the next on it is as well if the page shows work or the gateway was
    /// `answered`. An engine that started anew is cold.
    pub fn before(&mut self, reading: &Reading, last: Option<&Reading>, answered: bool) -> bool {
        if last.is_some_and(|last| reading.restarted_since(last)) {
            self.warm = false;
        }
        let before = self.warm;
        self.warm |= answered || reading.shows_work();
        before
    }

    /// Nothing is known of it any more: it may be started anew.
    pub fn forget(&mut self) {
        self.warm = false;
    }
}

#[cfg(test)]
mod tests {
    use kvgate_engines::EngineKind;

    use super::*;

    #[test]
    fn what_is_absent_is_missed_from_the_second_page_with_work_on() {
        let told = |prompts: Option<u64>, running| Reading {
            prompt_tokens: prompts,
            running: Some(running),
            ..Reading::default()
        };
        let (cold, busy, idle) = (told(None, 0), told(Some(5), 1), told(Some(5), 0));
        let mut warmth = Warmth::default();
        assert!(!warmth.before(&cold, None, false));
        assert!(
            !warmth.before(&busy, Some(&cold), false),
            "its page may lack what comes with the first answer"
        );
        assert!(warmth.before(&idle, Some(&busy), false), "and it stays warm");
        assert!(!warmth.before(&told(Some(3), 0), Some(&idle), false), "a new one, that has worked");
        assert!(warmth.before(&idle, Some(&cold), false));
        assert!(!warmth.before(&told(None, 0), Some(&idle), false), "a new one, that has not");
        assert!(!warmth.before(&cold, Some(&cold), false));
        assert!(!warmth.before(&cold, Some(&cold), true), "its page shows nothing, but it answered");
        assert!(warmth.before(&cold, Some(&cold), false));
        warmth.forget();
        assert!(!warmth.before(&cold, Some(&cold), false));
    }

    #[test]
    fn only_families_that_the_engine_has_are_asked_of_it() {
        let reading = Reading { running: Some(0), ..Reading::default() };
        let of = |engine: &str, warm| states(&EngineKind::by_name(engine).unwrap().metrics, &reading, warm);
        let expected = |absent| {
            let rest = [Family::Waiting, Family::PromptTokens, Family::GenerationTokens];
            let mut states = vec![(Family::Running, FamilyState::Known)];
            states.extend(rest.map(|family| (family, absent)));
            states
        };
        assert_eq!(of("llamacpp", false), expected(FamilyState::Cold));
        assert_eq!(of("llamacpp", true), expected(FamilyState::Missing));
        assert_eq!(of("vllm", true).len(), Family::ALL.len());
    }
}
