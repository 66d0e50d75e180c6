//! The gateway under test: a process of its own with a folder of its own.

use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::time::sleep;

use crate::board::Board;
use crate::client::{Answer, get, once};
use crate::metrics::Metrics;
use crate::{Error, Result};

/// How long a gateway may take to start, stop and come to rest.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a gateway is started with.
pub struct Setup {
    folder: TempDir,
    /// Lines of `gateway.toml` beside what every gateway here has.
    pub process: String,
    /// Before the command, such as `ulimit -n 256;`.
    pub before: String,
    /// What runs the command, such as `strace`.
    pub under: String,
    /// Where its log goes; its own file without.
    pub log: Option<PathBuf>,
    /// How long requests under way may take at the end.
    pub grace: &'static str,
    /// How long requests are taken after SIGTERM.
    pub drain: &'static str,
    /// Whether it can be replaced by another process.
    pub upgrade: bool,
    /// Where models are staged.
    pub tokenizers: PathBuf,
    address: SocketAddr,
    admin: SocketAddr,
    kvgate: PathBuf,
}

impl Setup {
    /// Without rules yet.
    ///
    /// # Errors
    /// No folder, or no free port.
    pub fn new(kvgate: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        std::fs::create_dir(folder.path().join("rules"))?;
        Ok(Self {
            folder,
            process: String::new(),
            before: String::new(),
            under: String::new(),
            log: None,
            grace: "30s",
            drain: "0ms",
            upgrade: false,
            tokenizers: kvgate_tests::tokenizers(),
            address: free()?,
            admin: free()?,
            kvgate: kvgate.to_owned(),
        })
    }

    /// Puts a rule in place, whole.
    ///
    /// # Errors
    /// The folder is not writable.
    pub fn rule(&self, name: &str, text: &str) -> Result {
        let aside = self.folder.path().join("aside");
        std::fs::write(&aside, text)?;
        Ok(std::fs::rename(aside, self.folder.path().join(format!("rules/{name}.toml")))?)
    }

    /// Whether one of its rules lets requests wait: those of pairs do.
    fn queues(&self) -> bool {
        let rules = std::fs::read_dir(self.folder.path().join("rules")).into_iter().flatten().flatten();
        rules
            .filter_map(|rule| std::fs::read_to_string(rule.path()).ok())
            .any(|text| text.contains("\"admission\"") || text.contains("\"prefill-decode\""))
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts it, and waits until it is ready.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start(self) -> Result<Gateway> {
        let Self { address, admin, process, tokenizers, grace, drain, .. } = &self;
        let upgrade = if self.upgrade { "upgrade_socket = \"upgrade.sock\"\n" } else { "" };
        let file = self.folder.path().join("gateway.toml");
        let text = format!(
            "[server]\ntokenizers = {tokenizers:?}\nthreads = 2\nreload_debounce = \"20ms\"\n\
             grace_period = \"{grace}\"\ndrain_delay = \"{drain}\"\n{upgrade}\
             [[listener]]\nname = \"edge\"\naddress = \"{address}\"\nexpose_routing = true\n\
             [admin]\naddress = \"{admin}\"\n{process}"
        );
        std::fs::write(&file, text)?;
        let log = self.log.clone().unwrap_or_else(|| self.folder.path().join("log"));
        let script = format!("{} exec {} \"$0\" run --config \"$1\"", self.before, self.under);
        let child = Command::new("bash")
            .args(["-c", &script])
            .arg(&self.kvgate)
            .arg(&file)
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::options().append(true).create(true).open(&log)?)
            .spawn()?;
        let mut gateway = Gateway { address: self.address, admin: self.admin, setup: self, child, log };
        gateway.until_ready().await?;
        Ok(gateway)
    }
}

/// A port that is free now.
///
/// # Errors
/// There is none.
pub fn free() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// A gateway that serves, until it is dropped.
pub struct Gateway {
    /// Where clients connect.
    pub address: SocketAddr,
    /// Its admin surface.
    pub admin: SocketAddr,
    /// Its files.
    pub setup: Setup,
    child: Child,
    log: PathBuf,
}

impl Gateway {
    async fn until_ready(&mut self) -> Result {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Err(format!("the gateway ended, {status}:\n{}", self.log()).into());
            }
            let up = TcpListener::bind(self.address).is_err() && self.page("/readyz").await.status == 200;
            if up {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                return Err(format!("the gateway is not ready:\n{}", self.log()).into());
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// A page of its admin surface.
    pub async fn page(&self, path: &str) -> Answer {
        once(self.admin, &get(path)).await
    }

    /// Its metrics now; empty when it does not answer.
    pub async fn metrics(&self) -> Metrics {
        Metrics::new(String::from_utf8_lossy(&self.page("/metrics").await.body).into_owned())
    }

    /// Waits until these metrics are so.
    ///
    /// # Errors
    /// They never are.
    pub async fn until(&self, what: &str, limit: Duration, mut so: impl FnMut(&Metrics) -> bool) -> Result {
        let start = Instant::now();
        loop {
            if so(&self.metrics().await) {
                return Ok(());
            }
            if start.elapsed() > limit {
                return Err(format!("{what}: not so after {limit:?}").into());
            }
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it logged; nothing where its log goes elsewhere: who reads `/dev/full` never comes to an end.
    pub fn log(&self) -> String {
        if self.setup.log.is_some() {
            return String::new();
        }
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Sends it a signal, by name.
    ///
    /// # Errors
    /// It is gone.
    pub fn signal(&self, name: &str, times: usize) -> Result {
        let script = format!("for _ in $(seq {times}); do kill -{name} {}; done", self.id());
        let done = Command::new("bash").args(["-c", &script]).status()?;
        if done.success() { Ok(()) } else { Err("the gateway is gone".into()) }
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Memory that it has in use, in bytes: of one field of its status, `VmRSS` or `VmHWM`. No number when it is gone.
    pub fn memory(&self, field: &str) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        let kilobytes: f64 =
            line.and_then(|l| l.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(f64::NAN);
        kilobytes * 1024.0
    }

    /// Descriptors that it has open; no number when it is gone.
    pub fn descriptors(&self) -> f64 {
        let open = std::fs::read_dir(format!("/proc/{}/fd", self.id()));
        open.map_or(f64::NAN, |open| open.count() as f64)
    }

    /// Time it has computed, in seconds; no number when it is gone.
    pub fn computed(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id())).unwrap_or_default();
        let fields: Vec<_> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let ticks = |at: usize| fields.get(at).and_then(|f| f.parse::<f64>().ok()).unwrap_or(f64::NAN);
        (ticks(11) + ticks(12)) / 100.0
    }

    /// What holds after every row: nothing panicked, nothing is held, and every request that was accepted ended with
    /// one outcome; `accepted` is how many, where that is known.
    pub async fn settle(&self, board: &mut Board, accepted: Option<u64>) {
        let queues = self.setup.queues();
        let rest = self.until("at rest", PATIENCE, |metrics| metrics.held(queues) == 0.0).await;
        let metrics = self.metrics().await;
        board.exactly("invariant: panics in the log", self.log().matches("panicked at").count() as f64, 0.0);
        board.exactly("invariant: leases, requests and waits left", held(rest, metrics.held(queues)), 0.0);
        if let Some(accepted) = accepted {
            board.exactly(
                "invariant: outcomes less requests accepted",
                metrics.outcomes() - accepted as f64,
                0.0,
            );
        }
    }
}

fn held(rest: std::result::Result<(), Error>, held: f64) -> f64 {
    match rest {
        Ok(()) => 0.0,
        // a gateway that does not answer holds everything
        Err(_) => held.max(1.0),
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
