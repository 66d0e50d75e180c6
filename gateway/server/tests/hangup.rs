//! SIGHUP, alone in its process: the signal is of the whole process.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::process::Command;
use std::time::Duration;

use kvgate::watch::{ReloadRequest, Watch};

#[tokio::test]
async fn two_hundred_signals_are_few_requests_and_end_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gateway.toml");
    fs::write(&file, "").unwrap();
    let mut watch = Watch::new(&file).unwrap();
    let storm = "for i in $(seq 200); do kill -HUP $0; done";
    let mut sender = Command::new("sh").args(["-c", storm, &std::process::id().to_string()]).spawn().unwrap();
    let first = tokio::time::timeout(Duration::from_secs(20), watch.next()).await;
    assert_eq!(first, Ok(ReloadRequest::Signal));
    assert!(sender.wait().unwrap().success());
    let mut more = 0;
    while tokio::time::timeout(Duration::from_secs(1), watch.next()).await.is_ok() {
        more += 1;
    }
    assert!(more < 20, "{more} more requests");
}
