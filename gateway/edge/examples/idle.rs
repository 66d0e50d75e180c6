//! What an idle connection takes of memory: `ulimit -n 16384; cargo run --release -p kvgate-edge --example idle`.
//!
//! Opens connections (2,000, or as many as the first argument says), asks one question on each, and prints by how much
//! the process has grown, per connection: before the question, and after its answer. The clients are bare sockets of
//! the same process, and take no memory but the kernel's.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::net::TcpStream;

use support::{config, start};

fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn ask(client: &mut TcpStream) {
    client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let mut answer = [0; 1024];
    let mut read = 0;
    while !answer[..read].ends_with(b"\r\n\r\nok") {
        read += client.read(&mut answer[read..]).unwrap();
    }
}

fn main() {
    let count: usize = std::env::args().nth(1).map_or(2000, |n| n.parse().unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let server = runtime.block_on(async { start(config()) });
    ask(&mut TcpStream::connect(server.address).unwrap());
    while server.edge.open() > 0 {
        std::thread::yield_now();
    }
    let before = resident();
    let mut clients: Vec<_> = (0..count).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    while server.edge.open() < count as u64 {
        std::thread::yield_now();
    }
    std::thread::sleep(std::time::Duration::from_millis(200));
    let opened = resident();
    clients.iter_mut().for_each(ask);
    std::thread::sleep(std::time::Duration::from_millis(200));
    let answered = resident();
    let each = |now: f64| (now - before) / count as f64;
    println!("idle_connection_fresh {:.2} KiB", each(opened));
    println!("idle_connection_after_request {:.2} KiB", each(answered));
}
