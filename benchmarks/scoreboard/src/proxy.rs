//! A TCP proxy that breaks what passes: late, slow, in small pieces, damaged, stalled, ended or reset.
//!
//! Stands between the gateway and an engine. What a connection suffers is told by a [`Plan`]: for each connection in
//! turn, or drawn by a seed, so that a run can be repeated.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::Result;

/// What a connection suffers, from so many bytes of the answers on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// Bytes from the engine that pass unharmed.
    pub after: usize,
    /// Then this.
    pub harm: Harm,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Harm {
    /// Nothing.
    #[default]
    None,
    /// Every piece comes late by so much.
    Delay(Duration),
    /// The connection is ended.
    Cut,
    /// The connection is reset.
    Reset,
    /// Nothing more passes, until the gateway leaves.
    Stall,
    /// Every byte is sent by itself.
    Split,
    /// One bit in so many bytes is turned.
    Corrupt(usize),
    /// So many bytes pass in a second.
    Slow(usize),
    /// The connection is reset as soon as it is there.
    Refuse,
}

/// What which connection suffers.
#[derive(Clone, Debug)]
pub enum Plan {
    /// In turn, over and over; none: nothing.
    Script(Vec<Fault>),
    /// This share of connections, in percent, one of all harms but damage, which no client can tell from an answer.
    Random {
        /// Same seed, same faults.
        seed: u64,
        /// 0 to 100.
        percent: u64,
    },
}

impl Plan {
    /// What the connection of this number suffers.
    fn fault(&self, number: usize) -> Fault {
        match self {
            Self::Script(faults) if faults.is_empty() => Fault::default(),
            Self::Script(faults) => faults.get(number % faults.len()).copied().unwrap_or_default(),
            Self::Random { seed, percent } => {
                let mut draw = mixed(seed.wrapping_add(number as u64));
                let mut below = |bound: u64| {
                    draw = mixed(draw);
                    draw % bound
                };
                if below(100) >= *percent {
                    return Fault::default();
                }
                let after = usize::try_from(below(2000)).unwrap_or(0);
                let harm = match below(7) {
                    0 => Harm::Delay(Duration::from_millis(1 + below(50))),
                    1 => Harm::Cut,
                    2 => Harm::Reset,
                    3 => Harm::Stall,
                    4 => Harm::Split,
                    5 => Harm::Slow(2000),
                    _ => Harm::Refuse,
                };
                Fault { after, harm }
            }
        }
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014).
pub fn mixed(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

struct Shared {
    to: SocketAddr,
    plan: Mutex<Plan>,
    number: AtomicUsize,
    harmed: AtomicUsize,
}

/// A proxy, until it is dropped.
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    _serving: JoinSet<()>,
}

impl Proxy {
    /// One at this address (port 0: any), to that one.
    ///
    /// # Errors
    /// The address is taken.
    pub async fn start(at: SocketAddr, to: SocketAddr, plan: Plan) -> Result<Self> {
        let listener = TcpListener::bind(at).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            to,
            plan: Mutex::new(plan),
            number: AtomicUsize::new(0),
            harmed: AtomicUsize::new(0),
        });
        let (mut serving, state) = (JoinSet::new(), shared.clone());
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let number = state.number.fetch_add(1, Relaxed);
                let fault = state.plan.lock().unwrap_or_else(PoisonError::into_inner).fault(number);
                if fault.harm != Harm::None {
                    state.harmed.fetch_add(1, Relaxed);
                }
                let to = state.to;
                connections.spawn(async move {
                    let _ = pass(stream, to, fault).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Self { address, shared, _serving: serving })
    }

    /// Connections from now on suffer this.
    pub fn plan(&self, plan: Plan) {
        *self.shared.plan.lock().unwrap_or_else(PoisonError::into_inner) = plan;
    }

    /// Connections that suffered something.
    pub fn harmed(&self) -> usize {
        self.shared.harmed.load(Relaxed)
    }
}

async fn pass(mut client: TcpStream, to: SocketAddr, fault: Fault) -> std::io::Result<()> {
    if fault.harm == Harm::Refuse {
        return reset(&client);
    }
    let mut engine = TcpStream::connect(to).await?;
    client.set_nodelay(true)?;
    engine.set_nodelay(true)?;
    let (mut from_client, to_client) = client.split();
    let (from_engine, mut to_engine) = engine.split();
    let ended = tokio::select! {
        ended = answers(from_engine, to_client, fault) => ended,
        gone = tokio::io::copy(&mut from_client, &mut to_engine) => gone.map(|_| End::Orderly),
    };
    match ended? {
        End::Orderly => Ok(()),
        End::Reset => reset(&client),
    }
}

fn reset(stream: &TcpStream) -> std::io::Result<()> {
    SockRef::from(stream).set_linger(Some(Duration::ZERO))
}

/// How the connection to the gateway is closed.
enum End {
    Orderly,
    Reset,
}

/// Passes what the engine sends, and does the harm.
async fn answers(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, fault: Fault) -> std::io::Result<End> {
    let (mut piece, mut passed) = (vec![0; 16 << 10], 0);
    loop {
        let read = from.read(&mut piece).await?;
        let bytes = piece.get_mut(..read).unwrap_or_default();
        if bytes.is_empty() {
            return Ok(End::Orderly);
        }
        let (whole, rest) = bytes.split_at_mut(fault.after.saturating_sub(passed).min(read));
        to.write_all(whole).await?;
        passed += read;
        match fault.harm {
            _ if rest.is_empty() => {}
            Harm::None => to.write_all(rest).await?,
            Harm::Cut => return Ok(End::Orderly),
            Harm::Reset | Harm::Refuse => return Ok(End::Reset),
            Harm::Stall => return std::future::pending().await,
            Harm::Delay(time) => {
                sleep(time).await;
                to.write_all(rest).await?;
            }
            Harm::Split => {
                for byte in rest.chunks(1) {
                    to.write_all(byte).await?;
                    tokio::task::yield_now().await;
                }
            }
            Harm::Corrupt(every) => {
                rest.iter_mut().step_by(every.max(1)).for_each(|byte| *byte ^= 1);
                to.write_all(rest).await?;
            }
            Harm::Slow(rate) => {
                for part in rest.chunks((rate / 50).max(1)) {
                    to.write_all(part).await?;
                    sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{completion, once};
    use crate::engine::{Engine, Script, numbers};

    #[tokio::test]
    async fn each_harm_is_done() {
        let engine = Engine::start("a", Script::default()).await.unwrap();
        let at = SocketAddr::from(([127, 0, 0, 1], 0));
        let proxy = Proxy::start(at, engine.address, Plan::Script(Vec::new())).await.unwrap();
        let wire = completion("m", "p", true, 20);
        let whole = once(engine.address, &wire).await.body;
        let mut harmed = 0;
        for (harm, unharmed) in [
            (Harm::None, true),
            (Harm::Delay(Duration::from_millis(1)), true),
            (Harm::Split, true),
            (Harm::Slow(100_000), true),
            (Harm::Cut, false),
            (Harm::Reset, false),
            (Harm::Refuse, false),
            (Harm::Corrupt(97), false),
        ] {
            proxy.plan(Plan::Script(vec![Fault { after: 300, harm }]));
            let answer = once(proxy.address, &wire).await;
            assert_eq!(answer.whole && answer.body == whole, unharmed, "{harm:?}: {answer:?}");
            harmed += usize::from(harm != Harm::None);
            assert_eq!(proxy.harmed(), harmed);
        }
        proxy.plan(Plan::Script(vec![Fault { after: 400, harm: Harm::Stall }]));
        let read = tokio::time::timeout(Duration::from_millis(300), once(proxy.address, &wire)).await;
        assert!(read.is_err(), "it stalls");
        assert!(!numbers(&whole).is_empty());
    }

    #[test]
    fn a_seed_tells_the_faults() {
        let draw = |seed| {
            let plan = Plan::Random { seed, percent: 50 };
            (0..200).map(|number| plan.fault(number)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        let harmed = draw(1).iter().filter(|f| f.harm != Harm::None).count();
        assert!((60..140).contains(&harmed), "{harmed}");
    }
}
