//! A request every millisecond on a connection and a thread of its own: what others feel.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use kvgate_rig::hist::Hist;
use tokio::time::MissedTickBehavior;

use crate::Result;
use crate::client::{Client, get};

/// Pings until it is asked for what it measured.
pub struct Pinger {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(Hist, u64)>,
}

impl Pinger {
    /// Sends `GET /probe` from now on.
    pub fn start(address: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let mut found = (Hist::default(), 0);
            if let Ok(runtime) = runtime {
                runtime.block_on(ping(address, &told, &mut found));
            }
            found
        });
        Self { stop, thread }
    }

    /// The times of its answers, and how many requests it sent.
    ///
    /// # Errors
    /// It broke.
    pub fn stop(self) -> Result<(Hist, u64)> {
        self.stop.store(true, Relaxed);
        self.thread.join().map_err(|_| "the pinger panicked".into())
    }
}

async fn ping(address: SocketAddr, told: &AtomicBool, (times, sent): &mut (Hist, u64)) {
    let wire = get("/probe");
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !told.load(Relaxed) {
        let Ok(mut client) = Client::connect(address).await else { return };
        while client.open && !told.load(Relaxed) {
            ticks.tick().await;
            let answer = client.ask(&wire).await;
            *sent += 1;
            if answer.whole {
                times.add(u64::try_from(answer.total.as_nanos()).unwrap_or(u64::MAX));
            }
        }
    }
}
