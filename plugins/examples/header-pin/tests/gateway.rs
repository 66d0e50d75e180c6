//! The gateway that has the tier, as a user runs it.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvgate-header-pin"));
    command.args(args).current_dir(folder).stdin(Stdio::null());
    command
}

fn run(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command(folder, args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// A configuration whose rule has the tier, with these keys in its table.
fn folder(keys: &str, engines: &[SocketAddr], process: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let endpoint = |engine: &SocketAddr| format!("[[endpoint]]\naddress = \"{engine}\"\n");
    let endpoints: String = engines.iter().map(endpoint).collect();
    let rule = format!("tiers = [\"header-pin\"]\n[tier.header-pin]\n{keys}\n{endpoints}");
    std::fs::create_dir(folder.path().join("rules")).unwrap();
    std::fs::write(folder.path().join("gateway.toml"), process).unwrap();
    std::fs::write(folder.path().join("rules/one.toml"), rule).unwrap();
    folder
}

/// An engine that answers every request with its own address.
fn engine() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let mut length = 0;
            for line in stream.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty()) {
                if let Some(number) = line.to_lowercase().strip_prefix("content-length:") {
                    length = number.trim().parse().unwrap();
                }
            }
            let _ = stream.read_exact(&mut vec![0; length]);
            let body = address.to_string();
            let head =
                format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
            let _ = stream.get_mut().write_all((head + &body).as_bytes());
        }
    });
    address
}

fn ask(gateway: SocketAddr, request: &str, headers: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(gateway).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let length = body.len();
    let head = format!(
        "{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n"
    );
    stream.write_all((head + body).as_bytes()).unwrap();
    std::io::read_to_string(stream).unwrap()
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn check_knows_the_tier_and_its_keys() {
    let engines = ["127.0.0.1:8001".parse().unwrap()];
    let check = |keys: &str| run(folder(keys, &engines, "").path(), &["check", "--config", "gateway.toml"]);
    for good in ["", "header = \"x-engine\""] {
        assert_eq!(check(good).0, 0, "{good}");
    }
    for (bad, said) in [
        ("headr = \"x-engine\"", "rules/one.toml:3: tier.header-pin.headr: unknown key"),
        ("header = 7", "rules/one.toml:3: tier.header-pin.header: is a whole number"),
    ] {
        let (code, out, err) = check(bad);
        assert_eq!((code, out.as_str()), (1, ""), "{bad}");
        assert!(err.contains(said), "{bad}: {err}");
    }
}

#[test]
fn tiers_lists_the_tier_beside_the_built_in_ones() {
    let (code, out, _) = run(Path::new("."), &["tiers", "--json"]);
    let tiers: Vec<Value> = serde_json::from_str(&out).unwrap();
    let of = |name: &str| tiers.iter().find(|tier| tier["name"] == name);
    let pin = of("header-pin").unwrap();
    assert_eq!((&pin["keys"][0]["key"], &pin["keys"][0]["default"]), (&"header".into(), &"x-pin".into()));
    let misses: Vec<_> = pin["misses"].as_array().unwrap().iter().map(|miss| &miss["reason"]).collect();
    assert_eq!(misses, ["absent", "not_here"]);
    assert!(code == 0 && of("kv-exact").is_some());
}

#[test]
fn requests_go_where_their_header_says() {
    let engines = [engine(), engine()];
    let free = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let [gateway, admin] = free.map(|listener| listener.local_addr().unwrap());
    let process = format!(
        "[[listener]]\naddress = \"{gateway}\"\nexpose_routing = true\n[admin]\naddress = \"{admin}\"\n"
    );
    let folder = folder("header = \"x-engine\"", &engines, &process);
    let mut run = command(folder.path(), &["run", "--config", "gateway.toml"]);
    let mut running = Running(run.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let started = Instant::now();
    while TcpStream::connect(gateway).is_err() {
        assert!(running.0.try_wait().unwrap().is_none(), "it has ended");
        assert!(started.elapsed() < Duration::from_secs(60), "it does not accept");
        std::thread::sleep(Duration::from_millis(10));
    }

    let chat = |headers: &str| ask(gateway, "POST /v1/chat/completions", headers, "{\"model\":\"m\"}");
    for engine in engines.iter().cycle().take(4) {
        let answer = chat(&format!("x-engine: {engine}\r\n"));
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with(&engine.to_string()), "{answer}");
        assert!(answer.contains("x-kvgate-tier: header-pin\r\n"), "{answer}");
    }
    for headers in ["", "x-engine: 127.0.0.1:1\r\n", "x-pin: 127.0.0.1:1\r\n"] {
        let answer = chat(headers);
        assert!(answer.starts_with("HTTP/1.1 200"), "{headers}: {answer}");
        assert!(answer.contains("x-kvgate-tier: min-load\r\n"), "{headers}: {answer}");
    }
    let metrics = ask(admin, "GET /metrics", "", "");
    for line in [
        "header_pin_pinned_total{service=\"one\"} 4",
        "kvgate_tier_misses_total{service=\"one\",tier=\"header-pin\",reason=\"absent\"} 2",
        "kvgate_tier_misses_total{service=\"one\",tier=\"header-pin\",reason=\"not_here\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}\n{metrics}");
    }

    let stop = format!("kill -TERM {}", running.0.id());
    assert!(Command::new("bash").args(["-c", &stop]).status().unwrap().success());
    assert_eq!(running.0.wait().unwrap().code(), Some(0));
}
