//! The files of one model: what they are, and when they changed.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use thiserror::Error;

use super::config;

/// The tokenizer itself.
pub(super) const TOKENIZER: &str = "tokenizer.json";
/// Special tokens and, mostly, the chat template.
pub(super) const CONFIG: &str = "tokenizer_config.json";
/// The chat template, where it is a file of its own (it wins, as in transformers).
pub(super) const TEMPLATE: &str = "chat_template.jinja";
/// The model's own configuration: vocabulary size, model type.
pub(super) const MODEL: &str = "config.json";
/// Further named templates, one file each.
pub(super) const TEMPLATES: &str = "additional_chat_templates";

/// Most files of further templates.
const MAX_TEMPLATES: usize = 64;

/// Largest file that is read.
const MAX_FILE: u64 = 512 << 20;

/// Why a model cannot be used.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A file is missing or cannot be read.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says, or what is wrong with it.
        reason: String,
    },
    /// The tokenizer library refuses the file.
    #[error("{TOKENIZER}: {0}")]
    Tokenizer(String),
}

/// What tells two versions of a model's files apart: modification time, size and inode of each.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Identity(Vec<Option<(i64, i64, u64, u64)>>);

/// The folder without symbolic links.
pub(super) fn real(folder: &Path) -> Result<PathBuf, LoadError> {
    fs::canonicalize(folder).map_err(|e| LoadError::File { path: folder.to_owned(), reason: e.to_string() })
}

/// The identity of what lies in `folder` now.
pub(super) fn identity(folder: &Path) -> Identity {
    let stat =
        |path: PathBuf| fs::metadata(path).ok().map(|m| (m.mtime(), m.mtime_nsec(), m.size(), m.ino()));
    let mut paths: Vec<PathBuf> =
        [TOKENIZER, CONFIG, TEMPLATE, MODEL].iter().map(|name| folder.join(name)).collect();
    let further = fs::read_dir(folder.join(TEMPLATES)).into_iter().flatten().flatten().take(MAX_TEMPLATES);
    let mut further: Vec<_> = further.map(|entry| entry.path()).collect();
    further.sort();
    paths.extend(further);
    Identity(paths.into_iter().map(stat).collect())
}

/// A file of the model, if it is there. Symbolic links may not lead out of the store.
pub(super) fn read(folder: &Path, name: &str) -> Result<Option<String>, LoadError> {
    let path = folder.join(name);
    let fail = |reason: String| LoadError::File { path: path.clone(), reason };
    let real = match fs::canonicalize(&path) {
        Ok(real) => real,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(fail(e.to_string())),
    };
    let store = folder.parent().unwrap_or(folder);
    if !real.starts_with(store) {
        return Err(fail("leads out of the store".into()));
    }
    let size = fs::metadata(&real).map_err(|e| fail(e.to_string()))?.len();
    if size > MAX_FILE {
        return Err(fail(format!("{size} bytes, more than {MAX_FILE}")));
    }
    fs::read_to_string(&real).map(Some).map_err(|e| fail(e.to_string()))
}

/// The model's templates by name. Files of their own win over the configuration, as in transformers.
pub(super) fn templates(folder: &Path, settings: &Json) -> Result<Vec<(String, String)>, LoadError> {
    let mut templates = config::templates(settings);
    let mut put = |name: String, source: String| {
        templates.retain(|(n, _)| *n != name);
        templates.push((name, source));
    };
    if let Some(source) = read(folder, TEMPLATE)? {
        put("default".into(), source);
    }
    let Ok(entries) = fs::read_dir(folder.join(TEMPLATES)) else { return Ok(templates) };
    for entry in entries.flatten().take(MAX_TEMPLATES) {
        let name = entry.file_name();
        let Some(stem) = name.to_str().and_then(|n| n.strip_suffix(".jinja")) else { continue };
        if let Some(source) = read(folder, &format!("{TEMPLATES}/{stem}.jinja"))? {
            put(stem.to_owned(), source);
        }
    }
    Ok(templates)
}
