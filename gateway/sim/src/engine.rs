//! The engine at work: one task that runs the scheduler's steps in time and publishes what they did to the cache.

use crate::config::SimConfig;
use crate::metrics::Stats;
use crate::pace::Pace;
use crate::publisher::Publisher;
use crate::scheduler::{Limits, Request, Sampled, Scheduler, Step};
use kvgate_kv::hash::Hasher;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

/// Commands that may wait for the engine's task.
const COMMANDS: usize = 1024;
/// How much lateness of the clock is made up for: about what a timer rounds up by.
const MAX_LAG: Duration = Duration::from_millis(5);

/// A request and where its tokens go. The request ends when the receiver is dropped.
pub(crate) struct Job {
    pub request: Request,
    /// Chooses its tokens.
    pub seed: u64,
    /// Which of its sender's requests it is; goes with every token.
    pub choice: usize,
    /// Must have room for all of its tokens.
    pub tokens: Tokens,
}

/// Where tokens go.
pub(crate) type Tokens = mpsc::Sender<(usize, Sampled)>;

enum Command {
    Submit(Job),
    ResetPrefixCache(oneshot::Sender<bool>),
    CutEvents(oneshot::Sender<()>),
    Restart(oneshot::Sender<()>),
}

/// The engine's task as others see it. The task ends with the last handle.
#[derive(Clone)]
pub(crate) struct Handle {
    commands: mpsc::Sender<Command>,
    stats: Arc<Mutex<Stats>>,
    pace: Pace,
}

impl Handle {
    /// Queues a request; `false` when the engine is gone.
    pub async fn submit(&self, job: Job) -> bool {
        self.commands.send(Command::Submit(job)).await.is_ok()
    }

    /// Every step takes so many times as long from now on.
    pub fn slow(&self, factor: f64) {
        self.pace.set(factor);
    }

    /// Forgets all cached content; `false` while requests run.
    pub async fn reset_prefix_cache(&self) -> bool {
        self.ask(Command::ResetPrefixCache).await.unwrap_or(false)
    }

    /// Drops the event connections.
    pub async fn cut_events(&self) {
        self.ask(Command::CutEvents).await;
    }

    /// As a new process: nothing cached, no requests, event sequence back to 0.
    pub async fn restart(&self) {
        self.ask(Command::Restart).await;
    }

    /// What the engine counted.
    pub fn stats(&self) -> Stats {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        self.commands.send(command(answer)).await.ok()?;
        answered.await.ok()
    }
}

/// What the task knows of a request.
struct Open {
    seed: u64,
    choice: usize,
    arrived: Instant,
    tokens: Tokens,
}

/// The engine's task.
pub(crate) struct Engine {
    config: Arc<SimConfig>,
    hasher: Hasher,
    vocabulary: Arc<[u32]>,
    scheduler: Scheduler,
    publisher: Option<Publisher>,
    open: HashMap<u64, Open>,
    next_id: u64,
    commands: mpsc::Receiver<Command>,
    stats: Arc<Mutex<Stats>>,
    pace: Pace,
}

impl Engine {
    /// An idle engine that generates the tokens of `vocabulary`; [`Engine::run`] is its life.
    pub fn new(
        config: Arc<SimConfig>,
        hasher: Hasher,
        vocabulary: Arc<[u32]>,
        publisher: Option<Publisher>,
    ) -> (Self, Handle) {
        let (sender, commands) = mpsc::channel(COMMANDS);
        let stats = Arc::new(Mutex::new(Stats::default()));
        let pace = Pace::default();
        pace.set(config.slow);
        let engine = Self {
            pace: pace.clone(),
            scheduler: Scheduler::new(hasher.clone(), limits(&config)),
            config,
            hasher,
            vocabulary,
            publisher,
            open: HashMap::new(),
            next_id: 0,
            commands,
            stats: stats.clone(),
        };
        (engine, Handle { commands: sender, stats, pace })
    }

    /// Runs steps until every handle is gone.
    pub async fn run(mut self) {
        let mut clock = Instant::now();
        loop {
            self.drop_abandoned();
            let step = self.scheduler.schedule();
            self.note(step.as_ref());
            let Some(step) = step else {
                let Some(command) = self.commands.recv().await else { return };
                let _ = self.obey(command).await;
                clock = Instant::now();
                continue;
            };
            // a step starts when the one before ended: a wake-up that was a little late is made up for
            let now = Instant::now();
            clock = if clock + MAX_LAG < now { now } else { clock }
                + self.pace.times(self.config.step_time(step.prefill_tokens, step.decodes));
            match self.pass_time(clock).await {
                Wait::Over => self.finish(&step).await,
                Wait::Restarted => {}
                Wait::Gone => return,
            }
        }
    }

    /// Serves commands until the step's time is over.
    async fn pass_time(&mut self, end: Instant) -> Wait {
        loop {
            tokio::select! {
                biased;
                command = self.commands.recv() => {
                    let Some(command) = command else { return Wait::Gone };
                    if self.obey(command).await.is_break() {
                        return Wait::Restarted;
                    }
                    self.note(None);
                }
                () = sleep_until(end), if end > Instant::now() => return Wait::Over,
                () = tokio::task::yield_now(), if end <= Instant::now() => return Wait::Over,
            }
        }
    }

    /// Carries a command out; breaks when the step under way is void.
    async fn obey(&mut self, command: Command) -> ControlFlow<()> {
        match command {
            Command::Submit(job) => self.submit(job),
            Command::ResetPrefixCache(answer) => {
                let _ = answer.send(self.scheduler.reset_prefix_cache());
            }
            Command::CutEvents(answer) => {
                if let Some(publisher) = &mut self.publisher {
                    log(publisher.cut().await);
                }
                let _ = answer.send(());
            }
            Command::Restart(answer) => {
                self.scheduler = Scheduler::new(self.hasher.clone(), limits(&self.config));
                self.open.clear();
                if let Some(publisher) = &mut self.publisher {
                    log(publisher.restart().await);
                }
                *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = Stats::default();
                let _ = answer.send(());
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }

    fn submit(&mut self, job: Job) {
        let id = self.next_id;
        self.next_id += 1;
        let Job { request, seed, choice, tokens } = job;
        self.open.insert(id, Open { seed, choice, arrived: Instant::now(), tokens });
        self.scheduler.submit(id, request);
    }

    /// Ends the requests whose receiver is gone.
    fn drop_abandoned(&mut self) {
        let before = self.open.len();
        self.open.retain(|_, open| !open.tokens.is_closed());
        let aborted = before - self.open.len();
        if aborted > 0 {
            let open = &self.open;
            self.scheduler.cancel(|id| !open.contains_key(&id));
            self.stats.lock().unwrap_or_else(PoisonError::into_inner).aborted += aborted as u64;
        }
    }

    /// Publishes what the step did, then hands its tokens out.
    async fn finish(&mut self, step: &Step) {
        let events = self.scheduler.take_events();
        if let Some(publisher) = &mut self.publisher {
            publisher.publish(&events).await;
        }
        let (open, vocabulary) = (&self.open, &self.vocabulary);
        let sampled = self.scheduler.complete(step, |id, position| {
            let seed = open.get(&id).map_or(0, |open| open.seed);
            pick(vocabulary, seed, position)
        });
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        for (id, token) in sampled {
            let Some(open) = self.open.get(&id) else { continue };
            stats.generated_tokens += 1;
            if token.position == 0 {
                stats.first_token(open.arrived.elapsed());
            }
            // has room; a receiver that is gone is noticed before the next step
            let _ = open.tokens.try_send((open.choice, token));
            if token.last {
                stats.finished += 1;
                self.open.remove(&id);
            }
        }
    }

    fn note(&self, step: Option<&Step>) {
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        stats.running = self.scheduler.running();
        stats.waiting = self.scheduler.waiting();
        stats.cache_usage = self.scheduler.cache_usage();
        if let Some(step) = step {
            stats.prompt_tokens += step.queried.0 as u64;
            stats.cached_tokens += step.queried.1 as u64;
            stats.preempted += step.preempted as u64;
        }
    }
}

enum Wait {
    Over,
    Restarted,
    Gone,
}

fn limits(config: &SimConfig) -> Limits {
    Limits {
        cache_blocks: config.cache_blocks,
        max_concurrency: config.max_concurrency,
        max_step_tokens: config.max_step_tokens,
    }
}

fn log(outcome: zeromq::ZmqResult<()>) {
    if let Err(error) = outcome {
        tracing::error!(%error, "the event sockets could not be opened again");
    }
}

/// The token at `position`: SplitMix64 over the seed.
fn pick(vocabulary: &[u32], seed: u64, position: usize) -> u32 {
    let mut z = seed.wrapping_add((position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let index = (z ^ (z >> 31)) % vocabulary.len().max(1) as u64;
    vocabulary.get(index as usize).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine without sockets, on a paused clock.
    fn start(config: SimConfig) -> Handle {
        let hasher = config.contract().hasher().unwrap();
        let (engine, handle) = Engine::new(Arc::new(config), hasher, (500..700).collect(), None);
        tokio::spawn(engine.run());
        handle
    }

    async fn submit(
        handle: &Handle,
        tokens: Vec<u32>,
        max_tokens: usize,
    ) -> mpsc::Receiver<(usize, Sampled)> {
        let (sender, receiver) = mpsc::channel(max_tokens);
        let request = Request { tokens, max_tokens, ..Request::default() };
        assert!(handle.submit(Job { request, seed: 7, choice: 0, tokens: sender }).await);
        receiver
    }

    async fn all(mut tokens: mpsc::Receiver<(usize, Sampled)>) -> Vec<Sampled> {
        let mut sampled = Vec::new();
        while let Some((_, token)) = tokens.recv().await {
            sampled.push(token);
        }
        sampled
    }

    #[tokio::test(start_paused = true)]
    async fn prefill_takes_the_time_of_the_tokens_that_are_not_cached() {
        let handle = start(SimConfig { prefill_us: 1000.0, decode_us: 2000.0, ..SimConfig::default() });
        let start = Instant::now();
        let first = all(submit(&handle, (0..4096).collect(), 3).await).await;
        assert_eq!(start.elapsed().as_millis(), 4096 + 2 * 2, "two chunks of 2048, then two more tokens");
        assert_eq!(first.iter().map(|token| token.cached_tokens).collect::<Vec<_>>(), [0, 0, 0]);
        assert_eq!(first.iter().map(|token| token.last).collect::<Vec<_>>(), [false, false, true]);

        let start = Instant::now();
        let second = all(submit(&handle, (0..4112).collect(), 1).await).await;
        assert_eq!(start.elapsed().as_millis(), 16);
        assert_eq!((second[0].cached_tokens, second[0].position), (4096, 0));
        let stats = handle.stats();
        assert_eq!((stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens), (8208, 4096, 4));
        assert_eq!((stats.finished, stats.aborted, stats.running, stats.waiting), (2, 0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn requests_beyond_the_concurrency_wait_in_order_and_the_gauges_say_so() {
        let handle = start(SimConfig { max_concurrency: 1, decode_us: 1e6, ..SimConfig::default() });
        let first = submit(&handle, vec![1; 40], 100).await;
        let second = submit(&handle, vec![2; 40], 1).await;
        let third = submit(&handle, vec![3; 40], 1).await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let stats = handle.stats();
        assert_eq!((stats.running, stats.waiting), (1, 2));
        assert!(stats.cache_usage > 0.0);
        drop(first);
        let order = [tokio::spawn(all(third)), tokio::spawn(all(second))];
        for done in order {
            assert_eq!(done.await.unwrap().len(), 1);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        let stats = handle.stats();
        assert_eq!((stats.running, stats.waiting, stats.finished, stats.aborted), (0, 0, 2, 1));
        assert_eq!(stats.cache_usage, 0.0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_restart_loses_requests_and_cache() {
        let handle = start(SimConfig { decode_us: 1e6, ..SimConfig::default() });
        all(submit(&handle, vec![1; 64], 1).await).await;
        let lost = submit(&handle, vec![2; 64], 100).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        handle.restart().await;
        assert!(all(lost).await.len() < 100);
        assert_eq!(handle.stats(), Stats::default());
        assert_eq!(all(submit(&handle, vec![1; 64], 1).await).await[0].cached_tokens, 0);
    }

    #[test]
    fn the_seed_chooses_the_tokens() {
        let vocabulary: Vec<u32> = (0..300).collect();
        let text = |seed| (0..50).map(|position| pick(&vocabulary, seed, position)).collect::<Vec<_>>();
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
        assert_eq!(pick(&[], 1, 1), 0);
    }
}
