//! Load at a rate that does not wait for answers, and what became of it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvgate_rig::hist::Hist;
use tokio::task::JoinSet;
use tokio::time::sleep_until;

use crate::board::Board;
use crate::client::{Answer, Client};

/// What became of requests.
#[derive(Clone, Default)]
pub struct Outcome {
    /// Of answers with success, in nanoseconds: from when they were to be sent, by [`Load::run`].
    pub times: Hist,
    /// All that were sent.
    pub sent: u64,
    /// Answers with success.
    pub good: u64,
    /// Neither a whole answer nor a proper error.
    pub lost: u64,
    /// Answers with these statuses or worse.
    pub busy: u64,
    /// 5xx.
    pub failed: u64,
    /// 429 without a `Retry-After`, or not in JSON.
    pub rude: u64,
    /// From the start to the last sending.
    pub span: Duration,
    /// The first that was lost, in words.
    pub why: String,
}

impl Outcome {
    /// One more.
    pub fn add(&mut self, answer: &Answer) {
        self.sent += 1;
        if !answer.kept() {
            self.lost += 1;
            if self.why.is_empty() {
                let body = String::from_utf8_lossy(&answer.body).chars().take(200).collect::<String>();
                self.why = format!("status {} whole {} {body}", answer.status, answer.whole);
            }
        }
        match answer.status {
            200..=299 if answer.kept() => {
                self.good += 1;
                self.times.add(u64::try_from(answer.total.as_nanos()).unwrap_or(u64::MAX));
            }
            429 => {
                self.busy += 1;
                let kind = answer.header("content-type").unwrap_or_default();
                let proper = answer.header("retry-after").is_some() && kind.starts_with("application/json");
                self.rude += u64::from(!proper || answer.error().is_none());
            }
            500..=599 => self.failed += 1,
            _ => {}
        }
    }

    /// These too.
    pub fn merge(&mut self, other: &Self) {
        self.times.merge(&other.times);
        self.sent += other.sent;
        self.good += other.good;
        self.lost += other.lost;
        self.busy += other.busy;
        self.failed += other.failed;
        self.rude += other.rude;
        self.span = self.span.max(other.span);
        if self.why.is_empty() {
            self.why.clone_from(&other.why);
        }
    }

    /// The time that this share of the good answers took at most, in milliseconds.
    pub fn ms(&self, share: f64) -> f64 {
        self.times.quantile(share) as f64 / 1e6
    }
}

/// Requests at a rate.
pub struct Load {
    /// To whom.
    pub address: SocketAddr,
    /// Per second.
    pub rate: f64,
    /// For how long.
    pub time: Duration,
    /// Over so many connections; one that still waits for an answer sends late.
    pub connections: usize,
}

impl Load {
    /// Sends what `wire` makes for each number, and hands each answer to `each`. An answer's whole time counts from when
    /// its request was to be sent: one that is sent late, for want of a connection, has waited too.
    pub async fn run<W, E>(&self, wire: W, each: E) -> Outcome
    where
        W: Fn(u64) -> Vec<u8> + Send + Sync + 'static,
        E: Fn(u64, &Answer) + Send + Sync + 'static,
    {
        let (wire, each, counter) = (Arc::new(wire), Arc::new(each), Arc::new(AtomicU64::new(0)));
        let start = Instant::now() + Duration::from_millis(20);
        let total = (self.rate * self.time.as_secs_f64()) as u64;
        let mut workers = JoinSet::new();
        for _ in 0..self.connections {
            let (wire, each, counter) = (wire.clone(), each.clone(), counter.clone());
            let (address, rate) = (self.address, self.rate);
            workers.spawn(async move {
                let (mut outcome, mut open) = (Outcome::default(), None::<Client>);
                loop {
                    let number = counter.fetch_add(1, Relaxed);
                    if number >= total {
                        return outcome;
                    }
                    let due = start + Duration::from_secs_f64(number as f64 / rate);
                    sleep_until(due.into()).await;
                    outcome.span = start.elapsed();
                    let mut answer = send(&mut open, address, &wire(number)).await;
                    answer.total = due.elapsed();
                    each(number, &answer);
                    outcome.add(&answer);
                }
            });
        }
        let mut outcome = Outcome::default();
        for part in workers.join_all().await {
            outcome.merge(&part);
        }
        outcome
    }

    /// Looks at whether it was offered at its rate: figures of another load say nothing.
    pub fn offered(&self, board: &mut Board, name: &str, outcome: &Outcome) {
        let rate = outcome.sent.saturating_sub(1) as f64 / outcome.span.as_secs_f64();
        board.least(&format!("{name}: rate, of the one asked for"), rate / self.rate * 100.0, "%", 95.0);
    }
}

/// On the connection that is open, or a new one.
pub async fn send(open: &mut Option<Client>, address: SocketAddr, wire: &[u8]) -> Answer {
    let mut client = match open.take() {
        Some(client) => client,
        None => match Client::connect(address).await {
            Ok(client) => client,
            Err(_) => return Answer::default(),
        },
    };
    let answer = client.ask(wire).await;
    if client.open {
        *open = Some(client);
    }
    answer
}
