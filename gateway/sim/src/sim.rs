//! A simulated engine.

use crate::api::{self, ApiState};
use crate::config::SimConfig;
use crate::engine::Engine;
use crate::fault::Fault;
use crate::log::Served;
use crate::metrics::Stats;
use crate::publisher::Publisher;
use crate::server::Server;
use crate::words::Words;
use kvgate_kv::hash::ContractError;
use kvgate_prompt::{Model, State, Tokenizers, TokenizersConfig};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::task::JoinSet;

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// The hashes that are configured do not exist.
    #[error(transparent)]
    Contract(#[from] ContractError),
    /// No tokenizer for the model.
    #[error("no tokenizer for {model}: {reason}")]
    Tokenizer {
        /// The model.
        model: String,
        /// What is missing or wrong.
        reason: String,
    },
    /// The tokenizer's vocabulary has too few words to generate text with.
    #[error("the tokenizer of {0} knows too few words")]
    Vocabulary(String),
    /// A cache that holds no prompt.
    #[error("a cache of {0} blocks has no room for a prompt")]
    Cache(usize),
    /// An address that cannot be had.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why not.
        error: io::Error,
    },
    /// The event sockets cannot be opened.
    #[error("cannot publish events: {0}")]
    Events(#[from] zeromq::ZmqError),
}

/// A running engine. Everything it holds, its ports included, is gone after [`Sim::stop`]; dropping it ends it soon.
pub struct Sim {
    state: Arc<ApiState>,
    server: Server,
    engine: JoinSet<()>,
}

impl Sim {
    /// Loads the model's tokenizer and starts an engine on the current tokio runtime.
    ///
    /// # Errors
    /// See [`SimError`].
    pub async fn start(config: SimConfig) -> Result<Self, SimError> {
        let model = load(&config).await?;
        Self::with_model(config, model).await
    }

    /// As [`Sim::start`], with a tokenizer that is loaded already: engines of one model can share it.
    ///
    /// # Errors
    /// See [`SimError`].
    pub async fn with_model(config: SimConfig, model: Arc<Model>) -> Result<Self, SimError> {
        let hasher = config.contract().hasher()?;
        if config.context() < 2 {
            return Err(SimError::Cache(config.cache_blocks));
        }
        let words = Words::new(&model).ok_or_else(|| SimError::Vocabulary(tokenizer_name(&config)))?;
        let config = Arc::new(config);
        let mut sockets = None;
        let mut publisher = None;
        if config.events {
            let bound = Publisher::bind(&config, config.address.ip()).await?;
            let addresses = bound.events_address().and_then(|events| Ok((events, bound.replay_address()?)));
            sockets = Some(addresses.map_err(zeromq::ZmqError::from)?);
            publisher = Some(bound);
        }
        let (engine, handle) = Engine::new(config.clone(), hasher, words.ids(), publisher);
        let state = Arc::new(ApiState::new(config.clone(), model, words, handle, sockets));
        let listen = |error| SimError::Listen { address: config.address, error };
        let server = Server::start(config.address, api::router(state.clone())).await.map_err(listen)?;
        if let Some(fault) = config.fault {
            state.faults.push(fault, usize::MAX);
        }
        state.address.get_or_init(|| server.address());
        let mut tasks = JoinSet::new();
        tasks.spawn(engine.run());
        Ok(Self { state, server, engine: tasks })
    }

    /// Where the HTTP API listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Where events are published, `tcp://host:port`; none where they are off.
    pub fn events_endpoint(&self) -> Option<String> {
        self.state.sockets.map(|(events, _)| format!("tcp://{events}"))
    }

    /// Where batches are replayed, `tcp://host:port`; none where events are off.
    pub fn replay_endpoint(&self) -> Option<String> {
        self.state.sockets.map(|(_, replay)| format!("tcp://{replay}"))
    }

    /// The configuration it runs with.
    pub fn config(&self) -> &SimConfig {
        &self.state.config
    }

    /// The completions and chat requests it got, oldest first; the last 10,000. Survives restarts. `GET /sim/log`
    /// says the same.
    pub fn log(&self) -> Vec<Served> {
        self.state.log.entries()
    }

    /// What it counted since its start: the numbers of its metrics page.
    pub fn stats(&self) -> Stats {
        self.state.engine.stats()
    }

    /// The next `times` completions or chat requests go wrong in this way, after those asked for earlier; as
    /// `POST /sim/faults` with `{"fault": {..}, "times": 1}` does.
    pub fn fault(&self, fault: Fault, times: usize) {
        self.state.faults.push(fault, times);
    }

    /// Nothing goes wrong any more; as `DELETE /sim/faults` does.
    pub fn clear_faults(&self) {
        self.state.faults.clear();
    }

    /// Every step takes so many times as long as configured from now on; as `POST /sim/slow` with `{"factor": 20}` does.
    /// What is no number above 0 is 1.
    pub fn slow(&self, factor: f64) {
        self.state.engine.slow(factor);
    }

    /// `true` closes the HTTP listener: connections are refused, idle ones closed, those with an answer under way end
    /// with it. `false` listens again on the same address. Events go on either way.
    ///
    /// # Errors
    /// The address is taken by another process.
    pub async fn refuse(&mut self, refuse: bool) -> io::Result<()> {
        if refuse {
            self.server.close().await;
            return Ok(());
        }
        self.server.open().await
    }

    /// As if the process were started again: connections broken, requests lost, nothing cached, event sequence back to
    /// 0, all on the same ports; nothing is published at the start. Goes on refusing if it did.
    ///
    /// # Errors
    /// The address is taken by another process.
    pub async fn restart(&mut self) -> io::Result<()> {
        let open = self.server.is_open();
        self.server.kill().await;
        self.state.engine.restart().await;
        self.state.transfers.restart();
        if open { self.server.open().await } else { Ok(()) }
    }

    /// Breaks the connections of event and replay clients. Sequence and cache go on; the ports stay open.
    pub async fn cut_events(&self) {
        self.state.engine.cut_events().await;
    }

    /// Forgets all cached content; the event comes with the next step. `false` while requests run.
    pub async fn reset_prefix_cache(&self) -> bool {
        self.state.engine.reset_prefix_cache().await
    }

    /// Ends the engine at once, broken connections and all; its ports are free afterwards.
    pub async fn stop(mut self) {
        self.server.kill().await;
        self.engine.shutdown().await;
    }
}

fn tokenizer_name(config: &SimConfig) -> String {
    config.tokenizer.clone().or_else(|| config.models.first().cloned()).unwrap_or_default()
}

/// The tokenizer that `config` names. Takes about a second, on a thread of its own.
///
/// # Errors
/// [`SimError::Tokenizer`].
pub async fn load(config: &SimConfig) -> Result<Arc<Model>, SimError> {
    let model = tokenizer_name(config);
    let store = Tokenizers::new(&config.tokenizers, TokenizersConfig::default());
    let name = model.clone();
    let state = tokio::task::spawn_blocking(move || store.load(&name)).await;
    let reason = match state {
        Ok(State::Ready(model)) => return Ok(model),
        Ok(State::Missing(reason) | State::Failed(reason)) => reason.to_string(),
        Ok(State::Loading) => "still loading".into(),
        Err(error) => error.to_string(),
    };
    Err(SimError::Tokenizer { model, reason })
}
