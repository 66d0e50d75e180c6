//! The lines of a page.

use std::borrow::Cow;

/// A number of things. Not a number and below zero is nothing that can be counted.
pub(super) fn whole(value: f64) -> Option<u64> {
    // above, an f64 holds no whole numbers any more
    (0.0..=9_007_199_254_740_992.0).contains(&value).then_some(value as u64)
}

/// The name of the series that a line tells of; of a comment, `#`.
pub(super) fn name(line: &str) -> &str {
    line.split(['{', ' ', '\t']).next().unwrap_or_default()
}

/// A line of a page.
pub(super) struct Sample<'a> {
    labels: Vec<(&'a str, Cow<'a, str>)>,
    pub value: f64,
}

impl<'a> Sample<'a> {
    /// `name{label="text",…} value [timestamp]`; the line begins with the name.
    pub fn read(line: &'a str, name: &str) -> Option<Self> {
        let mut rest = line.strip_prefix(name)?;
        let mut labels = Vec::new();
        if let Some(inside) = rest.strip_prefix('{') {
            rest = inside;
            loop {
                rest = rest.trim_start_matches([',', ' ', '\t']);
                if let Some(after) = rest.strip_prefix('}') {
                    rest = after;
                    break;
                }
                let (label, text) = rest.split_once("=\"")?;
                let (text, after) = quoted(text)?;
                labels.push((label.trim(), text));
                rest = after;
            }
        }
        let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
        Some(Self { labels, value })
    }

    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| *label == name).map(|(_, text)| &**text)
    }
}

/// The text up to the closing quote, and what follows that.
fn quoted(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let mut read = String::new();
    let mut rest = text;
    loop {
        let (plain, from) = rest.split_at(rest.find(['"', '\\'])?);
        if let Some(after) = from.strip_prefix('"') {
            let whole = if read.is_empty() { Cow::Borrowed(plain) } else { Cow::Owned(read + plain) };
            return Some((whole, after));
        }
        read.push_str(plain);
        let mut escaped = from.strip_prefix('\\')?.chars();
        read.push(match escaped.next()? {
            'n' => '\n',
            other => other,
        });
        rest = escaped.as_str();
    }
}
