//! What is wrong with a configuration, where, and what would be right.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use miette::{GraphicalReportHandler, GraphicalTheme, LabeledSpan, NamedSource};
use serde::Serialize;

use super::source::Source;

/// The longest line of a file that is shown with a problem, in bytes.
const MAX_LINE: usize = 400;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The configuration is refused.
    Error,
    /// It is taken, but will not do what was probably meant.
    Warning,
}

/// One problem of one file.
#[derive(Debug, Clone, Serialize)]
pub struct Diagnostic {
    /// Whether it refuses the configuration.
    pub severity: Severity,
    /// The file, as it was named to the gateway.
    pub file: PathBuf,
    /// The line, from 1.
    pub line: usize,
    /// The column in characters, from 1.
    pub column: usize,
    /// The key path, `endpoint[0].address` say; empty when the whole file is meant.
    pub key: String,
    /// What is wrong.
    pub message: String,
    /// What stands there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    /// What may stand there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed: Option<String>,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    #[serde(skip)]
    source: Arc<Source>,
    #[serde(skip)]
    span: Range<usize>,
}

impl Diagnostic {
    pub(super) fn new(
        source: &Arc<Source>,
        span: Range<usize>,
        key: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        let (line, column) = source.position(span.start);
        Self {
            severity: Severity::Error,
            file: source.path.clone(),
            line,
            column,
            key: key.into(),
            message: message.into(),
            found: None,
            allowed: None,
            hint: None,
            source: source.clone(),
            span,
        }
    }

    /// The same as a warning.
    pub fn warning(mut self) -> Self {
        self.severity = Severity::Warning;
        self
    }

    /// The same with what stands there.
    pub fn found(mut self, found: impl Into<String>) -> Self {
        self.found = Some(found.into());
        self
    }

    /// The same with what may stand there.
    pub fn allowed(mut self, allowed: impl Into<String>) -> Self {
        self.allowed = Some(allowed.into());
        self
    }

    /// The same with what to do.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Whether it refuses the configuration.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }

    /// Whether its lines are fit for a screen.
    fn can_be_shown(&self) -> bool {
        let mut lines = self.source.text.lines().skip(self.line.saturating_sub(2)).take(3).peekable();
        lines.peek().is_some() && lines.all(|line| line.len() <= MAX_LINE)
    }

    /// Where it stands in its file, for sorting.
    pub(super) fn order(&self) -> (&PathBuf, usize) {
        (&self.file, self.span.start)
    }
}

/// One line: `file:line:column: [warning: ]key: message; found …; allowed: …; hint`.
impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: ", self.file.display(), self.line, self.column)?;
        if !self.is_error() {
            f.write_str("warning: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)?;
        if let Some(found) = &self.found {
            write!(f, "; found {found}")?;
        }
        if let Some(allowed) = &self.allowed {
            write!(f, "; allowed: {allowed}")?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "; {hint}")?;
        }
        Ok(())
    }
}

/// A diagnostic in the words and the shape of miette.
#[derive(Debug)]
struct Report<'a> {
    diagnostic: &'a Diagnostic,
    title: String,
    source: NamedSource<String>,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.title)
    }
}

impl std::error::Error for Report<'_> {}

impl miette::Diagnostic for Report<'_> {
    fn severity(&self) -> Option<miette::Severity> {
        Some(match self.diagnostic.severity {
            Severity::Error => miette::Severity::Error,
            Severity::Warning => miette::Severity::Warning,
        })
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        let allowed = self.diagnostic.allowed.as_ref().map(|a| format!("allowed: {a}"));
        let lines: Vec<_> = allowed.into_iter().chain(self.diagnostic.hint.clone()).collect();
        (!lines.is_empty()).then(|| Box::new(lines.join("\n")) as Box<dyn fmt::Display>)
    }

    fn source_code(&self) -> Option<&dyn miette::SourceCode> {
        self.diagnostic.can_be_shown().then_some(&self.source)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        if !self.diagnostic.can_be_shown() {
            return None;
        }
        let label = self.diagnostic.found.as_ref().map(|_| "found".to_owned());
        let span = &self.diagnostic.span;
        Some(Box::new(std::iter::once(LabeledSpan::new(label, span.start, span.len()))))
    }
}

/// All problems of a configuration, in the order of files and lines.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(transparent)]
pub struct Diagnostics(pub Vec<Diagnostic>);

impl Diagnostics {
    /// How many refuse the configuration.
    pub fn errors(&self) -> usize {
        self.0.iter().filter(|d| d.is_error()).count()
    }

    /// For people: each with the lines it stands in. `color` is for a terminal.
    pub fn render(&self, color: bool) -> String {
        let theme = if color { GraphicalTheme::unicode() } else { GraphicalTheme::unicode_nocolor() };
        let handler = GraphicalReportHandler::new_themed(theme).with_wrap_lines(false).without_cause_chain();
        let mut text = String::new();
        for diagnostic in &self.0 {
            let file = diagnostic.file.display().to_string();
            let place = match diagnostic.key.as_str() {
                "" => format!("{file}:{}", diagnostic.line),
                key => format!("{file}:{}: {key}", diagnostic.line),
            };
            let report = Report {
                diagnostic,
                title: format!("{place}: {}", diagnostic.message),
                source: NamedSource::new(file, diagnostic.source.text.clone()),
            };
            if handler.render_report(&mut text, &report).is_err() {
                text.push_str(&format!("{diagnostic}\n"));
            }
        }
        text
    }

    pub(super) fn sort(&mut self) {
        self.0.sort_by(|a, b| a.order().cmp(&b.order()));
    }
}

/// One line each.
impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for Diagnostics {}
