//! `kvgate check`: whether a configuration would be taken.

use std::path::{Path, PathBuf};

use kvgate_core::TierKind;
use serde::Serialize;

use super::diagnostic::{Diagnostic, Diagnostics};
use super::{Config, load};

/// What a check found.
#[derive(Debug, Clone, Serialize)]
pub struct CheckReport {
    /// The file that was checked.
    pub file: PathBuf,
    /// Whether the configuration would be taken; with `strict`, whether it is without warnings too.
    pub ok: bool,
    /// How many problems refuse it.
    pub errors: usize,
    /// How many do not.
    pub warnings: usize,
    /// Rules of a configuration that is taken.
    pub rules: usize,
    /// Endpoints of all its rules.
    pub endpoints: usize,
    /// The problems, in the order of files and lines.
    pub problems: Diagnostics,
}

/// Reads and checks a configuration; nothing is bound, connected or started.
pub fn check(path: &Path, kinds: &[TierKind], strict: bool) -> CheckReport {
    CheckReport::new(path, load(path, kinds), strict)
}

impl CheckReport {
    /// The report on what [`load`] said of a file.
    pub fn new(path: &Path, loaded: Result<Config, Diagnostics>, strict: bool) -> Self {
        let (rules, endpoints, problems) = match loaded {
            Ok(config) => {
                let endpoints = config.rules.iter().map(|rule| rule.endpoints.len()).sum();
                (config.rules.len(), endpoints, Diagnostics(config.warnings))
            }
            Err(problems) => (0, 0, problems),
        };
        let mut report = Self {
            file: path.to_owned(),
            ok: true,
            errors: 0,
            warnings: 0,
            rules,
            endpoints,
            problems: Diagnostics::default(),
        };
        report.add(problems.0, strict);
        report
    }

    /// Adds problems found later, by building what is configured.
    pub fn add(&mut self, problems: Vec<Diagnostic>, strict: bool) {
        self.problems.0.extend(problems);
        self.errors = self.problems.errors();
        self.warnings = self.problems.0.len() - self.errors;
        self.ok = self.errors == 0 && !(strict && self.warnings > 0);
    }

    /// For people: the problems and a last line that sums up.
    pub fn render(&self, color: bool) -> String {
        let plural = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
        let sum = match self.errors {
            0 => format!(
                "{}: {} with {}, {}",
                if self.ok { "valid" } else { "refused for its warnings" },
                plural(self.rules, "rule"),
                plural(self.endpoints, "endpoint"),
                plural(self.warnings, "warning"),
            ),
            n => format!("invalid: {}, {}", plural(n, "error"), plural(self.warnings, "warning")),
        };
        format!("{}{}: {sum}\n", self.problems.render(color), self.file.display())
    }
}
