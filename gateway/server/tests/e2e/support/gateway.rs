//! A gateway with its configuration in files: in this process, or as the built command.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use kvgate::run::{self, Running};
use kvgate::{Gateway as Kinds, config};
use serde_json::Value;
use tempfile::TempDir;

use super::{Answer, MODEL, Metrics, PATIENCE, Request, Rule, completion, fetch, free_port, until};

/// The files of a gateway and where it listens.
pub struct Setup {
    folder: TempDir,
    address: SocketAddr,
    admin: SocketAddr,
    listener: String,
    process: String,
    grace: &'static str,
    server: String,
    shell: String,
    mute: bool,
    unread: bool,
    backoff: &'static str,
    health: &'static str,
    tokenizers: PathBuf,
    environment: Vec<(&'static str, String)>,
}

impl Setup {
    /// With these rules.
    pub fn new(rules: &[Rule]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("rules")).unwrap();
        let (address, admin) = (free_port(), free_port());
        let setup = Self {
            folder,
            address,
            admin,
            listener: String::new(),
            process: String::new(),
            grace: "30s",
            server: String::new(),
            shell: String::new(),
            mute: false,
            unread: false,
            backoff: "20ms",
            // what fails stays in the choice, but where that is the matter
            health: "[breaker]\nfailures = 0\n[probe]\nmode = \"off\"\n",
            tokenizers: kvgate_tests::tokenizers(),
            environment: Vec::new(),
        };
        rules.iter().for_each(|rule| setup.write(rule));
        setup
    }

    /// With these lines in `gateway.toml`, which may begin with keys of `[admin]`.
    pub fn process(mut self, lines: &str) -> Self {
        self.process.push_str(lines);
        self
    }

    /// With these keys of `[[listener]]`, and with what may follow it.
    pub fn listener(mut self, lines: &str) -> Self {
        self.listener.push_str(lines);
        self
    }

    /// With so much time for requests under way at the end.
    pub fn grace(mut self, time: &'static str) -> Self {
        self.grace = time;
        self
    }

    /// With these lines in `[server]`.
    pub fn server(mut self, lines: &str) -> Self {
        self.server.push_str(lines);
        self
    }

    /// In a process of its own that a shell has prepared so.
    pub fn shell(mut self, script: &str) -> Self {
        self.shell = script.into();
        self
    }

    /// In a process of its own whose output is a full disk.
    pub fn mute(mut self) -> Self {
        self.mute = true;
        self
    }

    /// In a process of its own whose output nobody reads.
    pub fn unread(mut self) -> Self {
        self.unread = true;
        self
    }

    /// With this variable in the environment of a process of its own.
    pub fn environment(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    /// With this wait before a feed connects again.
    pub fn backoff(mut self, time: &'static str) -> Self {
        self.backoff = time;
        self
    }

    /// With these tables in place of those that leave no engine alone.
    pub fn health(mut self, tables: &'static str) -> Self {
        self.health = tables;
        self
    }

    /// With tokenizers of its own, of which there are none yet.
    pub fn tokenizers(mut self) -> Self {
        self.tokenizers = self.folder.path().join("tokenizers");
        std::fs::create_dir(&self.tokenizers).unwrap();
        self
    }

    /// The folder of `gateway.toml`.
    pub fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }

    /// Takes a rule's file away.
    pub fn remove(&self, name: &str) {
        std::fs::remove_file(self.folder.path().join(format!("rules/{name}.toml"))).unwrap();
    }

    /// Puts a rule's file in its place, whole.
    pub fn write(&self, rule: &Rule) {
        self.write_text(&rule.name, &rule.toml());
    }

    /// Puts a file in the place of a rule's, whole.
    pub fn write_text(&self, name: &str, text: &str) {
        let aside = self.folder.path().join("aside");
        std::fs::write(&aside, text).unwrap();
        std::fs::rename(aside, self.folder.path().join(format!("rules/{name}.toml"))).unwrap();
    }

    fn write_process(&self) -> PathBuf {
        let Self { address, admin, listener, process, grace, server, backoff, health, tokenizers, .. } = self;
        let text = format!(
            "[server]\ntokenizers = {tokenizers:?}\nthreads = 2\nreload_debounce = \"20ms\"\n\
             grace_period = \"{grace}\"\n{server}\
             [[listener]]\nname = \"edge\"\naddress = \"{address}\"\nexpose_routing = true\n{listener}\n\
             [timeouts]\nprepare = \"10s\"\n\
             [feed]\nbackoff_min = \"{backoff}\"\nbackoff_max = \"30s\"\n\
             {health}[admin]\naddress = \"{admin}\"\n{process}"
        );
        let file = self.folder.path().join("gateway.toml");
        std::fs::write(&file, text).unwrap();
        file
    }

    /// Starts it in this process and waits until it follows its engines.
    pub async fn start(self) -> Gateway {
        let gateway = self.start_unready().await;
        gateway.following().await;
        gateway
    }

    /// Starts it in this process.
    pub async fn start_unready(self) -> Gateway {
        let file = self.write_process();
        let start = move || {
            let kinds = Kinds::new().kinds().to_vec();
            let config = config::load(&file, &kinds).map_err(|e| e.to_string())?;
            run::start(&file, config, &kinds, None)
        };
        let running = tokio::task::spawn_blocking(start).await.unwrap().unwrap_or_else(|e| panic!("{e}"));
        Gateway {
            address: self.address,
            admin: self.admin,
            setup: self,
            process: Process::Ours(Some(running)),
        }
    }

    /// Starts `kvgate run` and waits until it follows its engines.
    pub async fn spawn(self) -> Gateway {
        let gateway = self.spawn_unready().await;
        gateway.following().await;
        gateway
    }

    /// Starts `kvgate run` and waits until it listens.
    pub async fn spawn_unready(self) -> Gateway {
        self.write_process();
        let process = self.run(&[]);
        let mut gateway = Gateway { address: self.address, admin: self.admin, setup: self, process };
        let end = tokio::time::Instant::now() + PATIENCE;
        let refused = async |address| tokio::net::TcpStream::connect(address).await.is_err();
        while refused(gateway.address).await || refused(gateway.admin).await {
            assert_eq!(gateway.ended(), None, "{}", gateway.log());
            assert!(tokio::time::Instant::now() < end, "{}", gateway.log());
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        gateway
    }

    fn run(&self, more: &[&str]) -> Process {
        let program = env!("CARGO_BIN_EXE_kvgate");
        let mut command = if self.shell.is_empty() {
            Command::new(program)
        } else {
            let mut shell = Command::new("bash");
            shell.args(["-c", &format!("{} && exec \"$0\" \"$@\"", self.shell), program]);
            shell
        };
        let full = || Stdio::from(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
        let mut child = command
            .args(["run", "--config"])
            .arg(self.folder.path().join("gateway.toml"))
            .args(more)
            .env_remove("RUST_LOG")
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(if self.mute { full() } else { Stdio::inherit() })
            .stderr(if self.mute { full() } else { Stdio::piped() })
            .spawn()
            .unwrap();
        let log: Arc<Mutex<String>> = Arc::default();
        if !self.unread
            && let Some(stderr) = child.stderr.take()
        {
            let (lines, kept) = (BufReader::new(stderr).lines(), log.clone());
            std::thread::spawn(move || {
                for line in lines.map_while(Result::ok) {
                    kept.lock().unwrap().push_str(&format!("{line}\n"));
                }
            });
        }
        Process::Child { child, log }
    }
}

/// Where a gateway runs, until it is dropped.
pub enum Process {
    /// A part of this one.
    Ours(Option<Running>),
    Child {
        child: Child,
        log: Arc<Mutex<String>>,
    },
}

/// A gateway that serves, until it is dropped.
pub struct Gateway {
    pub address: SocketAddr,
    pub admin: SocketAddr,
    pub setup: Setup,
    pub process: Process,
}

impl Gateway {
    /// Waits until every feed of its rules stands and every tokenizer they name is loaded.
    pub async fn following(&self) {
        until("the gateway follows its engines", async || {
            let ready = self.ready().await;
            let all =
                |list: &str, holds: fn(&Value) -> bool| ready[list].as_array().unwrap().iter().all(holds);
            all("feeds", |feed| feed["connected"] == true) && all("tokenizers", |t| t["state"] == "ready")
        })
        .await;
    }

    /// What `/readyz` says.
    pub async fn ready(&self) -> Value {
        self.ask("/readyz").await.json()
    }

    /// A page of the admin surface.
    pub async fn ask(&self, path: &str) -> Answer {
        fetch(self.admin, &Request::get(path)).await
    }

    /// All metrics now.
    pub async fn metrics(&self) -> Metrics {
        let answer = self.ask("/metrics").await;
        assert_eq!(answer.status, 200, "{answer:?}");
        Metrics::new(String::from_utf8(answer.body.to_vec()).unwrap())
    }

    /// One metric now.
    pub async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        self.metrics().await.get(name, labels)
    }

    /// Waits until there is one series of this name with these labels, and it has this value.
    pub async fn until_metric(&self, name: &str, labels: &[&str], value: f64) {
        let all = async || self.metrics().await.all(name, labels);
        until(&format!("{name}{labels:?} = {value}"), async || all().await == [value]).await;
    }

    /// What the inventory API says of an endpoint.
    pub async fn inventory(&self, rule: &str, endpoint: usize) -> Value {
        let path = format!("/netlox/v1/config/ai/kv/inventory?service_id={rule}&ep_idx={endpoint}");
        let answer = self.ask(&path).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    /// The engine's hashes of the blocks an endpoint holds, ascending.
    pub async fn held(&self, rule: &str, endpoint: usize) -> Vec<u64> {
        let inventory = self.inventory(rule, endpoint).await;
        let blocks = inventory["blocks"].as_array().unwrap();
        assert_eq!(inventory["total"], blocks.len());
        let mut held: Vec<_> = blocks.iter().map(|block| block["hash_uint64"].as_u64().unwrap()).collect();
        held.sort_unstable();
        held
    }

    /// Waits until an endpoint holds so many blocks.
    pub async fn until_blocks(&self, rule: &str, endpoint: usize, blocks: usize) {
        let what = format!("endpoint {endpoint} of {rule} holds {blocks} blocks");
        until(&what, async || self.held(rule, endpoint).await.len() == blocks).await;
    }

    /// Waits until an endpoint holds exactly these blocks, in ascending order.
    pub async fn until_held(&self, rule: &str, endpoint: usize, blocks: &[u64]) {
        let what = format!("endpoint {endpoint} of {rule} holds {blocks:?}");
        until(&what, async || self.held(rule, endpoint).await == blocks).await;
    }

    /// Puts a rule in place and waits until it is in force. What is counted of reloads does not tell: one may be under way
    /// that has read the rule before. A reload that knows a rule written after it does.
    pub async fn change(&self, rule: &Rule) {
        static MARKS: AtomicUsize = AtomicUsize::new(0);
        self.setup.write(rule);
        let name = format!("mark-{}", MARKS.fetch_add(1, Ordering::Relaxed));
        let mark = Rule::new(&name, &["round-robin"]).matching(&format!("hosts = [{name:?}]"));
        self.setup.write(&mark.endpoint("127.0.0.1:1", ""));
        let label = format!("service={name:?}");
        let known = async || self.metrics().await.all("loxilb_pd_ep_info", &[&label]).len();
        until("the change is in force", async || known().await == 1).await;
        self.setup.remove(&name);
        until("nothing is left of the mark", async || known().await == 0).await;
    }

    /// A request of a client.
    pub async fn send(&self, request: &Request) -> Answer {
        fetch(self.address, request).await
    }

    /// A completion of a prompt of ids, which succeeds.
    pub async fn complete(&self, prompt: &[u32]) -> Answer {
        let answer = self.send(&Request::json("/v1/completions", &completion(MODEL, prompt))).await;
        assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
        answer
    }

    /// Waits until no request is in flight, as its own gauges tell.
    pub async fn until_idle(&self) {
        until("nothing is in flight", async || {
            let metrics = self.metrics().await;
            let gauges = metrics.all("kvgate_endpoint_in_flight", &[]);
            metrics.get("kvgate_leases_open", &[]) == 0.0 && gauges.iter().all(|n| *n == 0.0)
        })
        .await;
    }

    /// The number of its own process.
    pub fn process(&self) -> u32 {
        match &self.process {
            Process::Child { child, .. } => child.id(),
            Process::Ours(_) => panic!("it is this process"),
        }
    }

    /// What a gateway of its own process has logged.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Sends its process a signal, by name, some times.
    pub fn signal(&self, name: &str, times: usize) {
        self.process.signal(name, times);
    }

    /// How its process ended, if it did.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.ended()
    }

    /// Starts a process with these arguments that is to take over; returns that before, which still runs.
    pub fn succeeded_by(&mut self, more: &[&str]) -> Process {
        let next = self.setup.run(more);
        std::mem::replace(&mut self.process, next)
    }
}

impl Process {
    /// What it has logged.
    pub fn log(&self) -> String {
        match self {
            Process::Child { log, .. } => log.lock().unwrap().clone(),
            Process::Ours(_) => panic!("it logs with this process"),
        }
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        match self {
            Process::Child { child, .. } => child.id(),
            Process::Ours(_) => panic!("it is this process"),
        }
    }

    /// Sends it a signal, by name, some times.
    pub fn signal(&self, name: &str, times: usize) {
        let script = format!("for _ in $(seq {times}); do kill -{name} {}; done", self.id());
        assert!(Command::new("bash").args(["-c", &script]).status().unwrap().success());
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        let Process::Child { child, .. } = self else { panic!("it is this process") };
        child.try_wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        match self {
            Process::Child { child, log } => {
                let _ = child.kill();
                let _ = child.wait();
                if std::thread::panicking() {
                    let log = log.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    eprintln!("process {} said:\n{log}", child.id());
                }
            }
            // it has a runtime, which must not be dropped on ours
            Process::Ours(running) => {
                let running = running.take();
                let _ = std::thread::spawn(move || drop(running)).join();
            }
        }
    }
}
