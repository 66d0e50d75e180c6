//! The commands that README.md and docs/*.md tell a reader to type: every fenced block marked `sh` runs, those of
//! one page in order and in one shell, in a scratch copy of the repository where `kvgate` is on the path. Blocks
//! marked otherwise (`console`, `text`, `toml`) do not run here.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvgate_tests::shell;

/// How long the commands of one page may take.
const LIMIT: Duration = Duration::from_secs(180);

/// The blocks of a page that are marked `sh`, joined.
fn script(page: &str) -> String {
    let mut script = String::new();
    let mut inside = None;
    for line in page.lines() {
        match (inside, line.trim_start().strip_prefix("```")) {
            (None, Some(mark)) => inside = Some(mark == "sh"),
            (Some(_), Some(_)) => inside = None,
            (Some(true), None) => script.extend([line, "\n"]),
            _ => {}
        }
    }
    assert!(inside.is_none(), "a block without an end");
    script
}

#[test]
fn every_command_of_the_documentation_runs() {
    let files = kvgate_tests::files();
    let pages = files.iter().filter(|f| {
        f.extension().is_some_and(|e| e == "md") && (f.starts_with("docs") || f.as_os_str() == "README.md")
    });
    let scripts =
        pages.map(|page| (page, script(&std::fs::read_to_string(kvgate_tests::root().join(page)).unwrap())));
    let scripts: Vec<_> = scripts.filter(|(_, script)| !script.is_empty()).collect();
    assert!(!scripts.is_empty(), "no page has a command");
    let kvgate = kvgate_tests::kvgate();
    for (page, script) in scripts {
        let scratch = tempfile::tempdir().unwrap();
        for file in &files {
            let to = scratch.path().join(file);
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::copy(kvgate_tests::root().join(file), to).unwrap();
        }
        let script = format!("export KVGATE={}\n{script}", kvgate.display());
        shell(&script, kvgate.parent().unwrap(), scratch.path(), LIMIT)
            .unwrap_or_else(|why| panic!("{}: {why}", page.display()));
    }
}

#[test]
fn blocks_marked_sh_make_the_script() {
    let page = "a\n```sh\none\n```\n```console\n$ two\n```\n  ```sh\nthree\n  ```\n";
    assert_eq!(script(page), "one\nthree\n");
}

#[test]
fn a_failing_or_endless_command_is_told_and_leaves_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let try_it = |script, limit| shell(script, Path::new("/none"), scratch.path(), limit).unwrap_err();
    let told = try_it("true\nfalse\nsleep 60", LIMIT);
    assert!(told.contains("exit status: 1") && told.contains("+ false"), "{told}");
    let told = try_it("sleep 60 &\necho $!\nwait", Duration::from_millis(500));
    assert!(told.contains("not done"), "{told}");
    let child = told.lines().find(|l| l.parse::<u32>().is_ok()).unwrap();
    let lives = "kill -0 $0 && ! grep -q '^State:.Z' /proc/$0/status";
    let gone = || {
        let look = Command::new("bash").args(["-c", lives, child]).stderr(Stdio::null()).status();
        !look.unwrap().success()
    };
    let waited = Instant::now();
    while !gone() {
        assert!(waited.elapsed() < Duration::from_secs(10), "process {child} is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}
