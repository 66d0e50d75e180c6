//! Fixtures: data captured from real engines, and the tokenizers it was captured with.
//!
//! Meant for tests only: whatever is wrong with a fixture is a panic.
#![allow(clippy::expect_used, clippy::panic)]

mod json;

pub use json::{DEPTH, JsonCase, KEYS, Kind, heavy_json_cases, json_cases};

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn gunzip(path: &Path) -> Vec<u8> {
    let file = std::fs::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).expect("a gzip file");
    bytes
}

/// A fixture's bytes; `name` is its path below `tests/fixtures`, without the `.gz`.
pub fn fixture(name: &str) -> Vec<u8> {
    let plain = fixtures().join(name);
    std::fs::read(&plain).unwrap_or_else(|_| gunzip(&fixtures().join(format!("{name}.gz"))))
}

/// A JSON fixture.
pub fn fixture_json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&fixture(name)).expect("a JSON fixture")
}

/// One message of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// When it was received: nanoseconds since 1970.
    pub received_ns: u64,
    /// A subscriber's `topic, sequence, payload`, or what a replay answered a dealer: `"", [topic,] sequence, payload`.
    pub frames: Vec<Vec<u8>>,
}

/// A capture of a live engine's event socket, such as `vllm/streams/evict_24blocks_topic.bin`.
///
/// The magic `KVCAP1\n`, then per record a u64 of the time, a u32 count of frames and each frame with its u32
/// length, all big-endian.
pub fn capture(name: &str) -> Vec<Record> {
    fn take<'a>(rest: &mut &'a [u8], n: usize) -> &'a [u8] {
        let (taken, after) = rest.split_at_checked(n).expect("a whole capture");
        *rest = after;
        taken
    }
    fn number(rest: &mut &[u8], width: usize) -> u64 {
        take(rest, width).iter().fold(0, |n, &b| n << 8 | u64::from(b))
    }
    let bytes = fixture(name);
    let mut rest = bytes.strip_prefix(b"KVCAP1\n").expect("a capture");
    let mut records = Vec::new();
    while !rest.is_empty() {
        let received_ns = number(&mut rest, 8);
        let frames = (0..number(&mut rest, 4)).map(|_| {
            let len = number(&mut rest, 4) as usize;
            take(&mut rest, len).to_vec()
        });
        records.push(Record { frames: frames.collect(), received_ns });
    }
    records
}

/// A file that may not be shipped, from the folder named by `KVGATE_GOLDEN`; `None`, said on stderr, without it.
pub fn golden(name: &str) -> Option<Vec<u8>> {
    let Some(folder) = std::env::var_os("KVGATE_GOLDEN") else {
        eprintln!("skipped: {name} needs KVGATE_GOLDEN");
        return None;
    };
    let path = Path::new(&folder).join(name);
    Some(std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
}

/// The staging folder of a model that may not be shipped: `models/<name>` in or beside `KVGATE_GOLDEN`.
pub fn golden_model(name: &str) -> Option<PathBuf> {
    let Some(folder) = std::env::var_os("KVGATE_GOLDEN").map(PathBuf::from) else {
        eprintln!("skipped: the model {name} needs KVGATE_GOLDEN");
        return None;
    };
    let places = [folder.join("models").join(name), folder.join("../models").join(name)];
    let found = places.iter().find(|p| p.join("tokenizer.json").exists());
    Some(found.unwrap_or_else(|| panic!("no model {name} in or beside {}", folder.display())).clone())
}

/// A folder of staged tokenizers, unpacked once for all tests: `tiny-qwen3`, as captured engines had it, and
/// `tiny-words`, of our own making, with few words: quick to load where any tokenizer will do.
pub fn tokenizers() -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/fixture-models");
    for name in ["tiny-qwen3", "tiny-words"] {
        unpack(&fixtures().join("models").join(name), &target.join(name));
    }
    target
}

fn unpack(packed: &Path, model: &Path) {
    for entry in std::fs::read_dir(packed).expect("a shipped model") {
        let packed = entry.expect("an entry").path();
        let to = model.join(packed.file_stem().expect("a name"));
        if to.exists() {
            continue;
        }
        std::fs::create_dir_all(model).expect("a folder in target");
        // several test processes may unpack at once: write aside, then rename
        let aside = to.with_extension(format!("{}.part", std::process::id()));
        std::fs::write(&aside, gunzip(&packed)).expect("room in target");
        std::fs::rename(&aside, &to).expect("a rename in one folder");
    }
}

/// The top folder of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the repository")
}

/// Every file of the repository that git knows or would add, relative to [`root`].
pub fn files() -> Vec<PathBuf> {
    let git = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git");
    assert!(git.status.success(), "{}", String::from_utf8_lossy(&git.stderr));
    let names = String::from_utf8(git.stdout).expect("names in UTF-8");
    let named = names.split_terminator('\0').map(PathBuf::from);
    named.filter(|f| root().join(f).is_file()).collect()
}

/// The `kvgate` command under test: named by `KVGATE`, as `make test` does, else the one built beside this test.
pub fn kvgate() -> PathBuf {
    if let Some(named) = std::env::var_os("KVGATE") {
        return named.into();
    }
    let test = std::env::current_exe().expect("a test's own path");
    let built = test.parent().and_then(Path::parent).expect("target/<profile>/deps").join("kvgate");
    assert!(built.exists(), "no {}: run `cargo build --workspace --bins --tests` first", built.display());
    built
}

/// Runs a script in bash, with the programs of `bin` before others, in a process group of which nothing is left. What it
/// wrote, commands included.
///
/// # Errors
/// How it failed, and what it wrote: with a status, or because it was not done after `limit`.
pub fn shell(script: &str, bin: &Path, folder: &Path, limit: Duration) -> Result<String, String> {
    let log = folder.join("commands.log");
    let out = std::fs::File::create(&log).expect("a writable folder");
    let others = std::env::var_os("PATH").expect("PATH");
    let path = std::env::join_paths([bin.to_path_buf()].into_iter().chain(std::env::split_paths(&others)));
    let mut shell = Command::new("bash")
        .args(["-euxo", "pipefail", "-c", script])
        .current_dir(folder)
        .env("PATH", path.expect("a path without a colon"))
        .stdin(Stdio::null())
        .stdout(out.try_clone().expect("another descriptor"))
        .stderr(out)
        .process_group(0)
        .spawn()
        .expect("bash");
    let start = Instant::now();
    let end = loop {
        match shell.try_wait().expect("a child") {
            Some(status) if status.success() => break Ok(()),
            Some(status) => break Err(status.to_string()),
            None if start.elapsed() > limit => break Err(format!("not done after {limit:?}")),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let group = format!("-{}", shell.id());
    let _ = Command::new("bash").args(["-c", "kill -KILL -- $0", &group]).stderr(Stdio::null()).status();
    let _ = shell.wait();
    let wrote = String::from_utf8_lossy(&std::fs::read(log).expect("the log")).into_owned();
    end.map_err(|why| format!("{why}\n{wrote}")).map(|()| wrote)
}

#[cfg(test)]
mod tests {
    #[test]
    fn fixtures_unpack() {
        assert!(super::fixture_json("vllm/e2e_bs16_sha256cbor_seed0.json").is_array());
        let stream = super::capture("vllm/streams/evict_24blocks_topic.bin");
        assert!(!stream.is_empty() && stream.iter().all(|r| r.frames.len() == 3));
        assert!(super::tokenizers().join("tiny-qwen3/tokenizer.json").exists());
        assert!(super::tokenizers().join("tiny-words/tokenizer.json").exists());
    }
}
