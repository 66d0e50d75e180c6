//! A feed's task: decodes what comes, keeps the sequence window, runs its replay, fills the lane.

use super::lane::{Board, Job, Lane};
use super::status::Bad;
use super::{PlaneConfig, Source};
use crate::zmtp::{
    Endpoint, Error, Event, Message, Options, Replay, Reply, Subscription, SubscriptionOptions,
};
use bytes::Bytes;
use kvgate_kv::event;
use kvgate_kv::window::{Action, Config, Input, MAX_SEQ, Payload, Window};
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use xxhash_rust::xxh3::xxh3_64;

/// How far past its deadline the window is left alone while there is something to read, which may be what it waits
/// for.
const GRACE: Duration = Duration::from_millis(100);

/// A batch that decodes.
#[derive(Debug)]
struct Sound(Bytes);

impl Payload for Sound {
    fn fingerprint(&self) -> u64 {
        xxh3_64(&self.0)
    }

    fn size(&self) -> usize {
        self.0.len()
    }
}

/// A replay, from the moment it is asked for.
enum Running {
    Opening(Pin<Box<dyn Future<Output = Result<Replay, Error>> + Send>>),
    Open(Box<Replay>),
}

impl Running {
    fn ask(to: &Endpoint, from: u64, options: &Options) -> Running {
        let (to, options) = (to.clone(), options.clone());
        Running::Opening(Box::pin(async move { Replay::request(&to, from, &options).await }))
    }

    /// The next answer; `None` at the end. Cancel-safe.
    async fn next(&mut self) -> Result<Option<Reply>, Error> {
        loop {
            match self {
                Running::Opening(opening) => {
                    let replay = opening.await?;
                    *self = Running::Open(Box::new(replay));
                }
                Running::Open(replay) => return replay.next().await,
            }
        }
    }
}

/// The next answer of the replay that runs, if one does.
async fn answer(running: &mut Option<Running>) -> Result<Option<Reply>, Error> {
    match running {
        Some(running) => running.next().await,
        None => pending().await,
    }
}

enum Next {
    Event(Option<Event>),
    Answer(Result<Option<Reply>, Error>),
    Distrust,
}

/// Whatever comes first. Cancel-safe.
async fn next(queue: &mut mpsc::Receiver<Event>, replay: &mut Option<Running>, lane: &Lane) -> Next {
    tokio::select! {
        event = queue.recv() => Next::Event(event),
        answer = answer(replay) => Next::Answer(answer),
        () = lane.distrust.notified() => Next::Distrust,
    }
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => pending().await,
    }
}

pub(super) struct Feed {
    lane: Arc<Lane>,
    board: Arc<Board>,
    source: Source,
    connection: Options,
    subscription: SubscriptionOptions,
    queue: usize,
    distrust_pause: Duration,
    distrusted: Option<Instant>,
    window: Window<Sound>,
    replay: Option<Running>,
    actions: Vec<Action<Sound>>,
    connected: bool,
    /// Spent waiting for the ingest thread: the window's clock stands still meanwhile, since a replay is not slow
    /// because we are.
    waited: Duration,
    /// When a cleared inventory was told last.
    told: Option<Instant>,
}

/// Cleared inventories are told at most so often for each engine; all of them are counted.
const TELL_EVERY: Duration = Duration::from_secs(1);

impl Feed {
    pub(super) fn new(
        lane: Arc<Lane>,
        board: Arc<Board>,
        source: Source,
        window: Config,
        config: &PlaneConfig,
    ) -> Self {
        lane.status.replays.set(source.replay.is_some());
        Feed {
            lane,
            board,
            connection: config.connection.clone(),
            subscription: SubscriptionOptions {
                connection: config.connection.clone(),
                prefix: source.topic.clone(),
                backoff: config.backoff,
                queued_bytes: config.queue_bytes,
            },
            source,
            queue: config.queue_messages.max(2),
            distrust_pause: config.distrust_pause,
            distrusted: None,
            window: Window::new(window),
            replay: None,
            actions: Vec::new(),
            connected: false,
            waited: Duration::ZERO,
            told: None,
        }
    }

    /// Runs until the lane is closed.
    pub(super) async fn run(mut self) {
        let (events, mut queue) = mpsc::channel(self.queue);
        let _subscription =
            Subscription::spawn(self.source.events.clone(), self.subscription.clone(), events);
        loop {
            let deadline = self.window.deadline().map(|at| at + self.waited);
            let overdue = deadline.is_some_and(|at| Instant::now() > at + GRACE);
            let input = tokio::select! {
                biased;
                () = std::future::ready(()), if overdue => Some(Input::Tick),
                event = next(&mut queue, &mut self.replay, &self.lane) => match event {
                    Next::Event(Some(event)) => self.on_event(event),
                    Next::Event(None) => return,
                    Next::Answer(answer) => self.on_answer(answer),
                    Next::Distrust => self.on_distrust(),
                },
                () = at(deadline) => Some(Input::Tick),
            };
            self.lane.status.queued.set(queue.len() as u64);
            if let Some(input) = input {
                let now = Instant::now();
                self.window.handle(now.checked_sub(self.waited).unwrap_or(now), input, &mut self.actions);
                let (status, settled) = (&self.lane.status, self.window.settled());
                status.set_window(&self.window);
                let replaying = self.window.replaying();
                if replaying {
                    status.replaying.set(true);
                }
                if !settled {
                    status.settled.set(false);
                    self.lane.settle(false);
                }
                if self.act(settled).await.is_none() {
                    return;
                }
                self.lane.status.settled.set(settled);
                // after the batches that it brought
                self.lane.status.replaying.set(replaying);
                if self.lane.settle(settled) {
                    self.board.schedule(&self.lane);
                }
            }
        }
    }

    fn on_event(&mut self, event: Event) -> Option<Input<Sound>> {
        let status = &self.lane.status;
        match event {
            Event::Connected { .. } => {
                status.connects_total.add(1);
                status.connected.set(true);
                self.connected = true;
                tracing::info!(engine = self.source.name, endpoint = %self.source.events, "following KV events");
                Some(Input::Connected)
            }
            Event::Disconnected { reason, was_connected, .. } => {
                status.connected.set(false);
                if was_connected {
                    status.connection_lost(&reason);
                    tracing::warn!(engine = self.source.name, endpoint = %self.source.events, %reason, "KV events lost");
                } else {
                    status.connect_failed(&reason);
                    tracing::debug!(engine = self.source.name, endpoint = %self.source.events, %reason, "no KV events");
                }
                std::mem::take(&mut self.connected).then_some(Input::Disconnected)
            }
            Event::Overflow { dropped } => Some(Input::Overflow { dropped }),
            Event::Message(message) => {
                status.received();
                match sound(&message) {
                    Ok((seq, payload, flaw)) => {
                        flaw.into_iter().for_each(|bad| status.undecodable(bad));
                        Some(Input::Live { seq, payload })
                    }
                    Err(bad) => {
                        status.undecodable(bad);
                        None
                    }
                }
            }
        }
    }

    fn on_answer(&mut self, answer: Result<Option<Reply>, Error>) -> Option<Input<Sound>> {
        match answer {
            // a batch that cannot be read leaves its number to the hole
            Ok(Some(Reply { seq, payload })) => {
                event::decode(&payload).is_ok().then(|| Input::Replayed { seq, payload: Sound(payload) })
            }
            Ok(None) => {
                self.replay = None;
                Some(Input::ReplayEnd)
            }
            Err(reason) => {
                self.replay = None;
                self.lane.status.replay_failed(&reason);
                tracing::debug!(engine = self.source.name, %reason, "no replay of KV events");
                Some(Input::ReplayFailed)
            }
        }
    }

    fn on_distrust(&mut self) -> Option<Input<Sound>> {
        let now = Instant::now();
        if self.distrusted.is_some_and(|before| now < before + self.distrust_pause) {
            return None;
        }
        self.distrusted = Some(now);
        Some(Input::Distrust)
    }

    /// Does as the window says; `None` when the lane is closed. Where what is held is the engine's, that is said
    /// before the first batch that comes after the last clear: what shows is credited.
    async fn act(&mut self, settled: bool) -> Option<()> {
        let mut clears = self.actions.iter().filter(|action| matches!(action, Action::Clear(_))).count();
        for action in self.actions.drain(..) {
            if settled && clears == 0 {
                self.lane.settle(true);
            }
            match action {
                Action::Clear(cause) => {
                    if self.told.is_none_or(|at| at.elapsed() >= TELL_EVERY) {
                        self.told = Some(Instant::now());
                        tracing::info!(
                            engine = self.source.name,
                            cause = cause.name(),
                            "KV inventory cleared"
                        );
                    }
                    self.lane.push(Job::Clear);
                    self.board.schedule_first(&self.lane);
                    clears -= 1;
                }
                Action::Apply(Sound(bytes)) => {
                    let since = Instant::now();
                    let room = self.lane.room(&bytes).await?;
                    self.waited += since.elapsed();
                    self.lane.push(Job::Apply(bytes, room));
                    self.board.schedule(&self.lane);
                }
                Action::AskReplay { from } => {
                    let to = self.source.replay.as_ref();
                    self.replay = to.map(|to| Running::ask(to, from, &self.connection));
                }
                Action::StopReplay => self.replay = None,
            }
        }
        Some(())
    }
}

/// A message's number and batch, and what is wrong with some event of it; or why it is of no use.
fn sound(message: &Message) -> Result<(u64, Sound, Option<Bad>), Bad> {
    let [.., seq, payload] = message.parts.as_slice() else { return Err(Bad::Frames) };
    let seq = <[u8; 8]>::try_from(&seq[..]).map_err(|_| Bad::Sequence)?;
    let seq = Some(u64::from_be_bytes(seq)).filter(|seq| *seq <= MAX_SEQ).ok_or(Bad::Sequence)?;
    let batch = event::decode(payload).map_err(Bad::Payload)?;
    let flaw = batch.bad_events.first().copied().map(Bad::Payload);
    Ok((seq, Sound(payload.clone()), flaw))
}
