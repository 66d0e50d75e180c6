//! Reading configuration files, bounded, and finding one's way in them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::diagnostic::Diagnostic;
use super::effective::Provenance;

/// The most a configuration file may hold.
pub const MAX_FILE: u64 = 1 << 20;

/// A file and its text.
#[derive(Debug, PartialEq, Eq)]
pub struct Source {
    /// The file, as it was named to the gateway.
    pub path: PathBuf,
    /// What it holds; empty when it could not be read.
    pub text: String,
}

impl Source {
    /// Line and column of a byte, both from 1; columns count characters.
    pub(super) fn position(&self, at: usize) -> (usize, usize) {
        let before = self.text.get(..at).unwrap_or(&self.text);
        let line = before.rsplit('\n').next().unwrap_or("");
        (before.matches('\n').count() + 1, line.chars().count() + 1)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// A diagnostic of the whole file: it is missing, a folder, unreadable, larger than [`MAX_FILE`], or not UTF-8.
    pub(crate) fn read(path: &Path) -> Result<Arc<Self>, Box<Diagnostic>> {
        let refuse = |message: String, hint: &str| {
            let source = Arc::new(Self { path: path.to_owned(), text: String::new() });
            Box::new(Diagnostic::new(&source, 0..0, "", message).hint(hint))
        };
        let meta = fs::metadata(path).map_err(|e| match e.kind() {
            ErrorKind::NotFound if fs::symlink_metadata(path).is_ok() => {
                let target = fs::read_link(path).map(|t| t.display().to_string()).unwrap_or_default();
                refuse(format!("is a symbolic link to {target}, which is missing"), "mend or remove the link")
            }
            ErrorKind::NotFound => refuse("is missing".into(), "name an existing file with --config"),
            _ => refuse(format!("cannot be read: {e}"), "check its permissions and those of its folder"),
        })?;
        if !meta.is_file() {
            let what = if meta.is_dir() { "is a folder, not a file" } else { "is not a regular file" };
            return Err(refuse(what.into(), "rename or remove it: names ending in .toml are for files"));
        }
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes))
            .map_err(|e| refuse(format!("cannot be read: {e}"), "check its permissions"))?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(refuse(
                "is larger than 1 MiB".into(),
                "split it: one rule per file, and no data in it",
            ));
        }
        String::from_utf8(bytes).map(|text| Arc::new(Self { path: path.to_owned(), text })).map_err(|e| {
            let at = e.utf8_error().valid_up_to();
            let byte = e.as_bytes().get(at).copied().unwrap_or_default();
            let text = String::from_utf8_lossy(e.as_bytes()).into_owned();
            let source = Arc::new(Self { path: path.to_owned(), text });
            let wrong = Diagnostic::new(&source, at..at, "", "is not UTF-8");
            Box::new(wrong.found(format!("byte 0x{byte:02x}")).hint("save it as UTF-8"))
        })
    }
}

/// Where the keys of a file stand: what later steps need to point at them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The file.
    pub source: Arc<Source>,
    pub(super) spans: BTreeMap<String, Range<usize>>,
    /// Keys that the file does not give and a variable of the environment does, with its name.
    pub(super) environment: BTreeMap<&'static str, &'static str>,
}

impl Origin {
    pub(super) fn new(source: Arc<Source>) -> Self {
        Self { source, spans: BTreeMap::new(), environment: BTreeMap::new() }
    }

    /// An error at a key; at the nearest table above it when the key is not in the file.
    pub fn error(&self, key: &str, message: impl Into<String>) -> Diagnostic {
        Diagnostic::new(&self.source, self.span(key), key, message)
    }

    /// Whether the key is in the file.
    pub fn has(&self, key: &str) -> bool {
        self.spans.contains_key(key)
    }

    /// Where the value of a key comes from; `None` if neither the file nor the environment gives it.
    pub fn provenance(&self, key: &str) -> Option<Provenance> {
        if let Some(span) = self.spans.get(key) {
            let (line, _) = self.source.position(span.start);
            return Some(Provenance::File { file: self.source.path.clone(), line });
        }
        self.environment.get(key).map(|variable| Provenance::Environment { variable })
    }

    fn span(&self, key: &str) -> Range<usize> {
        let mut key = key;
        loop {
            if let Some(span) = self.spans.get(key) {
                return span.clone();
            }
            match key.rfind(['.', '[']) {
                Some(at) => key = &key[..at],
                None => return 0..0,
            }
        }
    }

    /// What stands at a key, shortened.
    pub(super) fn text(&self, key: &str) -> String {
        self.excerpt(&self.span(key))
    }

    pub(super) fn excerpt(&self, span: &Range<usize>) -> String {
        let text = self.source.text.get(span.clone()).unwrap_or("");
        let line = text.lines().next().unwrap_or("");
        match line.char_indices().nth(60) {
            Some((at, _)) => format!("{}…", &line[..at]),
            None if line.len() < text.trim_end().len() => format!("{line}…"),
            None => line.to_owned(),
        }
    }
}
