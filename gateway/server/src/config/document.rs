//! One file, walked along the tables it is declared with.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvgate_core::TierKind;
use kvgate_core::schema::Field;
use serde_json::{Map, Value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::diagnostic::Diagnostic;
use super::source::{Origin, Source};
use super::table::{Form, Table, Times, nearest};
use super::value::{convert, kind_of};

/// The most problems reported of one file.
const MAX_PROBLEMS: usize = 100;
/// The most elements of a list of tables.
const MAX_ELEMENTS: usize = 4096;

/// What a file says: its valid values, nested as in the file, without defaults; and all that is wrong with it.
///
/// Values from elsewhere that yield to the file's own and override defaults belong between this and
/// [`with_defaults`].
#[derive(Debug)]
pub(super) struct Document {
    pub origin: Origin,
    pub given: Map<String, Value>,
    pub problems: Vec<Diagnostic>,
    /// Keys whose value was refused, and tables with a key that nobody knows: checks that would lean on them
    /// are left out, so that one mistake gives one error.
    broken: BTreeSet<String>,
}

type Entry<'a, 'i> = (&'a Spanned<std::borrow::Cow<'i, str>>, &'a Spanned<DeValue<'i>>);

impl Document {
    /// Walks a file along `tables` and, under `[tier.<name>]`, along the schemas of `kinds`.
    pub fn walk(source: Arc<Source>, tables: &[Table], kinds: Option<&[TierKind]>) -> Self {
        let mut document = Self {
            origin: Origin::new(source.clone()),
            given: Map::new(),
            problems: Vec::new(),
            broken: BTreeSet::new(),
        };
        let (root, errors) = DeTable::parse_recoverable(&source.text);
        if errors.is_empty() {
            document.root(root.get_ref(), tables, kinds);
        }
        for error in errors {
            let span = error.span().unwrap_or_default();
            document.broken.insert(String::new());
            document.report(Diagnostic::new(&source, span, "", format!("TOML: {}", error.message())));
        }
        document
    }

    /// Whether the file is TOML; if not, all its problems are known.
    pub fn is_toml(&self) -> bool {
        !self.broken.contains("")
    }

    /// Whether the value at this key, or anything in the table of this name, was refused.
    pub fn is_broken(&self, key: &str) -> bool {
        let inside = |b: &String| {
            b.is_empty()
                || b.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        self.broken.iter().any(inside)
    }

    /// Reports a problem; of a file with very many only the first.
    pub fn report(&mut self, diagnostic: Diagnostic) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(diagnostic);
        } else if self.problems.len() == MAX_PROBLEMS {
            let more = self.origin.error("", format!("has more than {MAX_PROBLEMS} problems"));
            self.problems.push(more.hint("solve these first"));
        }
    }

    /// An error at a key, to be completed and reported.
    pub fn error(&self, key: &str, message: impl Into<String>) -> Diagnostic {
        self.origin.error(key, message)
    }

    fn root(&mut self, root: &DeTable<'_>, tables: &[Table], kinds: Option<&[TierKind]>) {
        let top = tables.iter().find(|t| t.name.is_empty());
        for (key, value) in root.iter() {
            let name = key.get_ref().as_ref();
            if name == "tier" && kinds.is_some() {
                self.tiers(value, kinds.unwrap_or_default());
            } else if let Some(table) = tables.iter().find(|t| t.name == name) {
                self.section(table, value);
            } else if let Some((top, field)) =
                top.and_then(|t| t.fields.iter().find(|f| f.key == name).map(|f| (t, f)))
            {
                if let Some(value) = self.field(name, top, field, value) {
                    self.given.insert(name.to_owned(), value);
                }
            } else {
                let tier = kinds.map(|_| "tier");
                let names = tables.iter().map(|t| t.name).filter(|n| !n.is_empty());
                let keys = top.into_iter().flat_map(|t| t.fields.iter().map(|f| f.key));
                self.unknown("", (key, value), &keys.chain(names).chain(tier).collect::<Vec<_>>());
            }
        }
    }

    fn section(&mut self, table: &Table, value: &Spanned<DeValue<'_>>) {
        let name = table.name;
        self.place(name, value);
        match (table.times, value.get_ref()) {
            (Times::Many, DeValue::Array(list)) => {
                let mut elements = Vec::new();
                if list.len() > MAX_ELEMENTS {
                    let error =
                        self.error(name, "stands in the file too often").found(list.len().to_string());
                    self.report(error.allowed(format!("{MAX_ELEMENTS} times at most")));
                    self.broken.insert(name.to_owned());
                }
                for (index, element) in list.iter().take(MAX_ELEMENTS).enumerate() {
                    let path = format!("{name}[{index}]");
                    self.place(&path, element);
                    match element.get_ref() {
                        DeValue::Table(keys) => {
                            let keys = self.table(&path, "", keys, table);
                            self.require(&path, &keys, table);
                            elements.push(Value::Object(keys));
                        }
                        other => self.not_a_table(&path, table, other),
                    }
                }
                self.given.insert(name.to_owned(), Value::Array(elements));
            }
            (Times::Once | Times::Over, DeValue::Table(keys)) => {
                let keys = self.table(name, "", keys, table);
                self.given.insert(name.to_owned(), Value::Object(keys));
            }
            (_, other) => self.not_a_table(name, table, other),
        }
    }

    fn not_a_table(&mut self, path: &str, table: &Table, found: &DeValue<'_>) {
        let header = table.header();
        let error = self.error(path, format!("is {}, not {header}", kind_of(found)));
        let error = error.found(self.origin.text(path)).allowed(header.clone());
        self.report(error.hint(format!("write the header {header} above its keys")));
        self.broken.insert(path.to_owned());
    }

    fn tiers(&mut self, value: &Spanned<DeValue<'_>>, kinds: &[TierKind]) {
        let mut tiers = Map::new();
        self.place("tier", value);
        let DeValue::Table(named) = value.get_ref() else {
            let error = self.error("tier", format!("is {}, not a table", kind_of(value.get_ref())));
            let error = error.found(self.origin.text("tier")).allowed("tables [tier.<name>]");
            return self.report(error);
        };
        for (key, value) in named.iter() {
            let name = key.get_ref().as_ref();
            let path = format!("tier.{name}");
            let Some(kind) = kinds.iter().find(|k| k.name == name) else {
                self.unknown("tier", (key, value), &kinds.iter().map(|k| k.name).collect::<Vec<_>>());
                continue;
            };
            self.place(&path, value);
            let table = tier_table(kind);
            match value.get_ref() {
                DeValue::Table(keys) => {
                    let keys = self.table(&path, "", keys, &table);
                    tiers.insert(name.to_owned(), Value::Object(keys));
                }
                other => self.not_a_table(&path, &table, other),
            }
        }
        self.given.insert("tier".to_owned(), Value::Object(tiers));
    }

    /// The keys of a table, or of a table in it: `prefix` is `contract.` within `[tier.kv-exact.contract]`.
    fn table(&mut self, path: &str, prefix: &str, keys: &DeTable<'_>, table: &Table) -> Map<String, Value> {
        let mut values = Map::new();
        for (key, value) in keys.iter() {
            let name = key.get_ref().as_ref();
            let full = format!("{prefix}{name}");
            let at = format!("{path}.{name}");
            let below = format!("{full}.");
            if let Some(field) = table.fields.iter().find(|f| f.key == full) {
                if let Some(value) = self.field(&at, table, field, value) {
                    values.insert(name.to_owned(), value);
                }
            } else if table.fields.iter().any(|f| f.key.starts_with(&below)) {
                self.place(&at, value);
                match value.get_ref() {
                    DeValue::Table(inner) => {
                        let inner = self.table(&at, &below, inner, table);
                        values.insert(name.to_owned(), Value::Object(inner));
                    }
                    other => {
                        // as a header is written: without the number of the [[table]] it is in
                        let without =
                            |part: &str| part.split_once(']').map_or(part, |(_, rest)| rest).to_owned();
                        let header = format!("[{}]", at.split('[').map(without).collect::<String>());
                        let error = self.error(&at, format!("is {}, not a table", kind_of(other)));
                        let error = error.found(self.origin.text(&at)).allowed(header.clone());
                        self.report(error.hint(format!(
                            "remove it, and write the header {header} above the table's keys"
                        )));
                        self.broken.insert(at);
                    }
                }
            } else {
                let known = table.fields.iter().filter_map(|f| f.key.strip_prefix(prefix));
                let mut known: Vec<_> = known.map(|k| k.split('.').next().unwrap_or(k)).collect();
                known.dedup();
                self.unknown(path, (key, value), &known);
            }
        }
        values
    }

    fn field(
        &mut self,
        at: &str,
        table: &Table,
        field: &Field,
        value: &Spanned<DeValue<'_>>,
    ) -> Option<Value> {
        self.place(at, value);
        match value.get_ref() {
            DeValue::Array(list) => {
                for (index, element) in list.iter().enumerate() {
                    self.place(&format!("{at}[{index}]"), element);
                }
            }
            DeValue::Table(map) => {
                for (key, element) in map.iter() {
                    self.place(&format!("{at}.{}", key.get_ref()), element);
                }
            }
            _ => {}
        }
        match convert(value.get_ref(), &field.kind, table.form(field.key)) {
            Ok(value) => Some(value),
            Err(refused) => {
                for refused in refused {
                    let place = format!("{at}{}", refused.part);
                    let error = self.error(&place, refused.message).allowed(refused.allowed);
                    let mut error = error.found(self.origin.text(&place));
                    error.hint = refused.hint;
                    self.report(error);
                }
                self.broken.insert(at.to_owned());
                None
            }
        }
    }

    fn unknown(&mut self, path: &str, (key, value): Entry<'_, '_>, known: &[&str]) {
        let name = key.get_ref().as_ref();
        let at = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        let what = match value.get_ref() {
            DeValue::Table(_) => "unknown table",
            _ => "unknown key",
        };
        let mut error = Diagnostic::new(&self.origin.source, key.span(), at.clone(), what)
            .found(name)
            .allowed(if known.is_empty() { "no keys".to_owned() } else { known.join(", ") });
        error.hint = nearest(name, known.iter().copied()).map(|w| format!("did you mean `{w}`?"));
        self.report(error);
        self.broken.insert(at);
    }

    fn require(&mut self, path: &str, keys: &Map<String, Value>, table: &Table) {
        for key in table.required {
            // A key unknown or refused in this very table is likely the one that is sought.
            if !keys.contains_key(*key) && !self.is_broken(path) {
                let form = table.form(key).map_or("a text", Form::allowed);
                let error = self.error(&format!("{path}.{key}"), "is missing").allowed(form);
                self.report(error.hint(format!("add `{key}` to this {}", table.header())));
                self.broken.insert(format!("{path}.{key}"));
            }
        }
    }

    fn place(&mut self, key: &str, value: &Spanned<DeValue<'_>>) {
        self.origin.spans.insert(key.to_owned(), value.span());
    }
}

/// A tier's table, as declared by its kind.
pub(super) fn tier_table(kind: &TierKind) -> Table {
    Table {
        name: kind.name,
        times: Times::Once,
        doc: kind.doc,
        fields: kind.schema,
        required: &[],
        forms: &[],
    }
}

/// The keys of a table with the defaults of those that are absent.
pub(super) fn with_defaults(mut keys: Map<String, Value>, fields: &[Field]) -> Map<String, Value> {
    for field in fields {
        let Some(default) = default_of(field) else { continue };
        let mut segments: Vec<_> = field.key.split('.').collect();
        let Some(last) = segments.pop() else { continue };
        let table = segments.into_iter().try_fold(&mut keys, |table, name| {
            table.entry(name).or_insert_with(|| Value::Object(Map::new())).as_object_mut()
        });
        if let Some(table) = table {
            table.entry(last).or_insert(default);
        }
    }
    keys
}

/// A field's default as a value; `None` when its absence has its own meaning.
pub(super) fn default_of(field: &Field) -> Option<Value> {
    if field.default.is_empty() {
        return None;
    }
    let text = format!("x = {}", field.default);
    let table = DeTable::parse(&text).ok()?;
    let (_, value) = table.get_ref().iter().next()?;
    convert(value.get_ref(), &field.kind, None).ok()
}

/// All tables of a file, complete: what it gives, then `base` (for the tables that stand over it), then defaults.
pub(super) fn complete(
    mut given: Map<String, Value>,
    tables: &[Table],
    base: &Map<String, Value>,
) -> Map<String, Value> {
    for table in tables {
        if table.name.is_empty() {
            given = with_defaults(given, table.fields);
            continue;
        }
        let value = given.remove(table.name);
        let filled = match (table.times, value) {
            (Times::Many, Some(Value::Array(list))) => list
                .into_iter()
                .map(|element| Value::Object(with_defaults(object(Some(element)), table.fields)))
                .collect(),
            (Times::Many, _) => Value::Array(Vec::new()),
            (Times::Once, value) => Value::Object(with_defaults(object(value), table.fields)),
            (Times::Over, value) => {
                let mut keys = object(base.get(table.name).cloned());
                // what gateway.toml alone may say there
                keys.retain(|key, _| table.fields.iter().any(|field| field.key == key));
                keys.extend(object(value));
                Value::Object(with_defaults(keys, table.fields))
            }
        };
        given.insert(table.name.to_owned(), filled);
    }
    given
}

fn object(value: Option<Value>) -> Map<String, Value> {
    match value {
        Some(Value::Object(keys)) => keys,
        _ => Map::new(),
    }
}
