//! docs/writing-a-tier.md as a reader follows it. Blocks marked with a file's name are that file, several in a row one
//! after the other; what they make must be this crate. Blocks marked `console` run, and print what they say: `…` is
//! anything. `cargo` builds nothing here: it finds what is built already.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);
/// Addresses of the page; others are used in their place.
const PORTS: [&str; 6] = ["8080", "11111", "8001", "8002", "8003", "8004"];

const CARGO: &str = r#"set +ex
cargo() {
    case $1 in
    new) mkdir -p "${*: -1}/src" ;;
    build)
        built=first
        if ! diff -q src/main.rs "$CRATE/src/bin/first.rs"; then
            built=kvgate-canary
            diff src/main.rs "$CRATE/src/main.rs" && diff src/canary.rs "$CRATE/src/canary.rs" || return 1
        fi > differs.log
        mkdir -p target/debug && ln -sf "$BUILT/$built" target/debug/kvgate-canary ;;
    test) diff src/tests.rs "$CRATE/src/tests.rs" ;; # this crate's own, which run beside this one
    esac
}
"#;

/// A command and what it prints.
struct Shown {
    command: String,
    output: Vec<String>,
}

enum Block {
    File(String, String),
    Commands(Vec<Shown>),
}

fn page() -> String {
    std::fs::read_to_string(kvgate_tests::root().join("docs/writing-a-tier.md")).unwrap()
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(mark) = line.strip_prefix("```") else { continue };
        let body: Vec<_> = lines.by_ref().take_while(|line| *line != "```").collect();
        match mark.split_once(' ') {
            Some((_, file)) => blocks.push(Block::File(file.to_owned(), body.join("\n") + "\n")),
            None if mark == "console" => blocks.push(Block::Commands(commands(&body))),
            None => panic!("a block marked {mark:?}"),
        }
    }
    blocks
}

fn commands(lines: &[&str]) -> Vec<Shown> {
    let mut all: Vec<Shown> = Vec::new();
    for line in lines {
        if let Some(command) = line.strip_prefix("$ ") {
            all.push(Shown { command: command.to_owned(), output: Vec::new() });
        } else {
            let last = all.last_mut().unwrap();
            match line.strip_prefix('>') {
                Some(more) => last.command.extend(["\n", more.trim_start_matches(' ')]),
                None => last.output.push((*line).to_owned()),
            }
        }
    }
    all
}

/// Whether a line is what the page says.
fn fits(line: &str, said: &str) -> bool {
    let Some((head, tail)) = said.split_once('…') else { return line == said };
    let Some(rest) = line.strip_prefix(head) else { return false };
    (0..=rest.len()).filter_map(|at| rest.get(at..)).any(|rest| fits(rest, tail))
}

/// Ports that nobody listens at, below those that systems hand out by themselves: the page stops and starts what listens
/// at them.
fn free() -> Vec<u32> {
    let first = 10_000 + std::process::id() % 3_000 * 6;
    let is_free = |port: &u32| TcpListener::bind(format!("127.0.0.1:{port}")).is_ok();
    (first..32_768).filter(is_free).take(PORTS.len()).collect()
}

#[test]
fn the_page_is_this_crate_and_its_commands_print_what_it_says() {
    let free = free();
    let mut page = page();
    for (at, port) in PORTS.iter().enumerate() {
        page = page.replace(port, &format!("<port {at}>"));
    }
    for (at, port) in free.iter().enumerate() {
        page = page.replace(&format!("<port {at}>"), &port.to_string());
    }

    let bin = Path::new(env!("CARGO_BIN_EXE_kvgate-canary")).parent().unwrap();
    let (built, tree) = (bin.display(), env!("CARGO_MANIFEST_DIR"));
    let mut script = format!("BUILT={built}; CRATE={tree}\n{CARGO}");
    let (mut shown, mut written) = (Vec::new(), Vec::new());
    for block in blocks(&page) {
        match block {
            Block::File(name, text) => {
                let (to, gap) = if written.contains(&name) { (">>", "\n") } else { (">", "") };
                script.push_str(&format!("cat {to} {name} <<'END OF FILE'\n{gap}{text}END OF FILE\n"));
                written.push(name);
            }
            Block::Commands(commands) => {
                written.clear();
                for command in commands {
                    let number = shown.len();
                    script.push_str(&format!("echo '@@'\n{}\necho \"@@ {number}: $?\"\n", command.command));
                    shown.push(command);
                }
            }
        }
    }
    assert!(shown.len() > 10, "{} commands", shown.len());

    let scratch = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(kvgate_tests::root(), scratch.path().join("kvgate")).unwrap();
    let log = kvgate_tests::shell(&script, bin, scratch.path(), LIMIT).unwrap_or_else(|why| panic!("{why}"));
    let mut lines = log.lines().skip_while(|line| *line != "@@");
    for (number, Shown { command, output }) in shown.iter().enumerate() {
        let end = format!("@@ {number}: ");
        let mut status = None;
        let printed: Vec<_> = lines
            .by_ref()
            .take_while(|l| {
                status = l.strip_prefix(&end).map(str::to_owned);
                status.is_none()
            })
            .collect();
        let told = || format!("$ {command}\n{}\n(status {status:?})\nall:\n{log}", printed.join("\n"));
        let wrong = output.iter().any(|line| line.contains("error"));
        assert_eq!(status.as_deref(), Some(if wrong { "1" } else { "0" }), "{}", told());
        let mut rest = printed.iter();
        for line in output.iter().filter(|line| *line != "…") {
            assert!(rest.any(|printed| fits(printed, line)), "not printed: {line}\n{}", told());
        }
    }
}

#[test]
fn the_manifest_of_the_page_is_enough() {
    let Some(Block::File(name, manifest)) =
        blocks(&page()).into_iter().find(|b| matches!(b, Block::File(..)))
    else {
        panic!("no file");
    };
    assert_eq!(name, "Cargo.toml");
    let ours = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")).unwrap();
    for dependency in ours.lines().filter_map(|line| line.strip_suffix(".workspace = true")) {
        let of_the_page =
            ["version", "edition", "rust-version", "license", "publish", "kvgate-tests", "tempfile"];
        assert!(
            of_the_page.contains(&dependency) || manifest.contains(&format!("\n{dependency} = ")),
            "{dependency}"
        );
    }

    let (root, scratch) = (kvgate_tests::root(), tempfile::tempdir().unwrap());
    std::os::unix::fs::symlink(&root, scratch.path().join("kvgate")).unwrap();
    let folder = scratch.path().join("kvgate-canary");
    std::fs::create_dir_all(folder.join("src")).unwrap();
    std::fs::write(folder.join("Cargo.toml"), manifest).unwrap();
    std::fs::write(folder.join("src/main.rs"), "").unwrap();
    std::fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
    let mut resolve = Command::new(env!("CARGO"));
    let run =
        resolve.args(["metadata", "--offline", "--format-version=1"]).current_dir(&folder).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn what_is_left_out_may_be_anything() {
    for (line, said, fit) in [
        ("abc", "abc", true),
        ("abcd", "abc", false),
        ("abcd", "abc…", true),
        ("x abc", "…abc", true),
        ("a b c", "a…c", true),
        ("a b d", "a…c", false),
        ("", "…", true),
    ] {
        assert_eq!(fits(line, said), fit, "{line:?} {said:?}");
    }
}
