//! What holds for every file of the repository.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

/// Lines of code a file may have.
const LONGEST: usize = 600;

/// Flat tables, which may be longer.
const TABLES: &[&str] = &["gateway/server/src/config/gateway_fields.rs"];

/// What no file may say: marks of unfinished work, paths of a build machine. Split, so that this file passes too.
const FORBIDDEN: &[[&str; 2]] = &[
    ["TO", "DO"],
    ["FIX", "ME"],
    ["XX", "X:"],
    ["todo", "!("],
    ["/wo", "rk/"],
    ["/ro", "ot/"],
    ["<<<<", "<<<"],
];

fn texts() -> Vec<(String, String)> {
    let known = ["rs", "md", "toml", "yml", "sh", "py", "json", "txt"];
    let ours = |f: &Path| {
        let kind = f.extension().and_then(|e| e.to_str());
        !f.starts_with("tests/fixtures")
            && !f.starts_with("fuzz/corpus")
            && kind.is_none_or(|k| known.contains(&k))
    };
    let files = kvgate_tests::files().into_iter().filter(|f| ours(f));
    let read = |f: &Path| String::from_utf8(std::fs::read(kvgate_tests::root().join(f)).unwrap());
    files
        .map(|f| (f.display().to_string(), read(&f).unwrap_or_else(|e| panic!("{}: {e}", f.display()))))
        .collect()
}

#[test]
fn no_file_is_too_long() {
    let code: Vec<_> = texts().into_iter().filter(|(name, _)| name.ends_with(".rs")).collect();
    assert!(code.len() > 30, "{} source files", code.len());
    let long =
        code.iter().filter(|(name, text)| text.lines().count() > LONGEST && !TABLES.contains(&name.as_str()));
    let long: Vec<_> = long.map(|(name, text)| format!("{name}: {} lines", text.lines().count())).collect();
    assert!(long.is_empty(), "longer than {LONGEST} lines: {long:#?}");
}

#[test]
fn no_file_says_what_none_may() {
    let mut said = Vec::new();
    for (name, text) in texts() {
        for (number, line) in text.lines().enumerate() {
            let words = FORBIDDEN.iter().map(|parts| parts.concat());
            said.extend(words.filter(|w| line.contains(w)).map(|w| format!("{name}:{}: {w}", number + 1)));
        }
    }
    assert!(said.is_empty(), "{said:#?}");
}

#[test]
fn links_of_pages_lead_somewhere() {
    let (mut followed, mut broken) = (0, Vec::new());
    for (name, text) in texts().into_iter().filter(|(name, _)| name.ends_with(".md")) {
        let folder = kvgate_tests::root().join(&name).parent().unwrap().to_path_buf();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split_once(')')) {
            let to = link.0.split('#').next().unwrap();
            if to.is_empty() || to.contains("://") {
                continue;
            }
            followed += 1;
            if !folder.join(to).exists() {
                broken.push(format!("{name}: {to}"));
            }
        }
    }
    assert!(followed > 5, "{followed} links");
    assert!(broken.is_empty(), "{broken:#?}");
}

/// The last column of the table of attacks.
#[test]
fn what_holds_the_line_is_a_test() {
    let texts = texts();
    let page = &texts.iter().find(|(name, _)| name == "docs/security.md").unwrap().1;
    let table = page.split("| attack | defence | held by |").nth(1).unwrap();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let columns = rows.map(|row| row.trim_end_matches('|').rsplit_once('|').unwrap().1);
    let (mut named, mut missing) = (0, Vec::new());
    for column in columns {
        // what is fuzzed is named by its target
        let tests = column.split("; fuzzed").next().unwrap().split('`').skip(1).step_by(2);
        let before = named;
        for test in tests {
            named += 1;
            let own = format!("fn {test}(");
            if !texts.iter().any(|(name, text)| name.ends_with(".rs") && text.contains(&own)) {
                missing.push(test.to_owned());
            }
        }
        assert!(named > before, "held by nothing: {column}");
    }
    assert!(named > 30, "{named} tests");
    assert!(missing.is_empty(), "{missing:#?}");
}
