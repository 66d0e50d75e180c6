//! The built command, and folders to run it in.
#![allow(dead_code, clippy::unwrap_used)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// How long a command may take that should take a few seconds.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The command, to be run in a folder.
pub fn kvgate(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvgate"));
    command.args(args).current_dir(folder).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// What came of a command.
pub struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
    }
}

pub fn run(folder: &Path, args: &[&str]) -> Done {
    kvgate(folder, args).output().unwrap().into()
}

/// With something on its standard input.
pub fn run_with(folder: &Path, args: &[&str], input: &[u8]) -> Done {
    let mut command = kvgate(folder, args);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    child.wait_with_output().unwrap().into()
}

/// A command under way, which no test leaves running.
pub struct Spawned(pub Child);

impl Drop for Spawned {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for something that comes soon; that it does not fails the test.
pub fn wait_until(mut there: impl FnMut() -> bool) {
    let started = Instant::now();
    while !there() {
        assert!(started.elapsed() < LIMIT, "not after {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits for the end of a command.
pub fn wait(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_until(|| {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

/// Sends a signal: `INT`, `TERM`.
pub fn signal(child: &Child, name: &str) {
    let command = format!("kill -{name} {}", child.id());
    assert!(Command::new("bash").args(["-c", &command]).status().unwrap().success());
}

/// A configuration: an empty gateway.toml, and one rule `one` of one endpoint.
pub struct Folder(tempfile::TempDir);

impl Folder {
    /// `rule` comes before the endpoint.
    pub fn new(tokenizers: &Path, rule: &str) -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        folder.write("gateway.toml", &format!("[server]\ntokenizers = {tokenizers:?}\n"));
        folder.write("rules/one.toml", &format!("{rule}\n[[endpoint]]\naddress = \"127.0.0.1:8001\"\n"));
        folder
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        path
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Runs a command on this configuration.
    pub fn run(&self, command: &str, args: &[&str]) -> Done {
        let all: Vec<_> = [command, "--config", "gateway.toml"].iter().chain(args).copied().collect();
        run(self.path(), &all)
    }
}
