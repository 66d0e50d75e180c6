//! An engine on a virtual clock: what it holds and when it answers, without sockets or waiting.
//!
//! The model: prompts are computed one at a time, in the order in which they came, in steps of some tokens at a fixed
//! rate; what of a prompt is cached when its turn comes is not computed, but for its last token. A block is held, and
//! announced, when the step that fills it is over. Answers are generated beside that at a pace of their own; the blocks
//! of prompt and answer are reserved from the turn to the end of the answer, and a prompt whose blocks are not to be had
//! waits, with all behind it. The cache is [`Cache`], with vLLM's order of eviction; the blocks of answers are not
//! reused. Preemption, and what answers and prompts cost each other, are not modelled.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::cache::{BlockId, Cache};
use crate::trace::BLOCK;

/// What an engine can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// Blocks of the cache, the engine's own one included.
    pub blocks: usize,
    /// Prompt tokens computed in a second.
    pub prefill_rate: f64,
    /// Prompt tokens computed in one step.
    pub step_tokens: usize,
}

impl Model {
    fn time(&self, tokens: usize) -> Duration {
        Duration::try_from_secs_f64(tokens as f64 / self.prefill_rate).unwrap_or(Duration::MAX)
    }

    /// Whether a request of so many tokens, prompt and answer, can ever be served.
    pub fn fits(&self, tokens: usize) -> bool {
        tokens.div_ceil(BLOCK) < self.blocks
    }
}

/// A request to an engine.
#[derive(Clone, Debug)]
pub struct Job {
    /// Its number: what happens to it is told by this.
    pub id: usize,
    /// A name for each full block of the prompt.
    pub chain: Arc<[u64]>,
    /// Tokens of the prompt, 1 or more.
    pub tokens: usize,
    /// Tokens of the answer.
    pub answer: usize,
    /// How long the answer takes once it has begun.
    pub generate: Duration,
}

/// What happened in an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happening {
    /// These blocks are not held any more, one entry for each copy.
    Removed(Vec<u64>),
    /// Blocks of a prompt are held now: from one position in its chain up to another.
    Stored(usize, std::ops::Range<usize>),
    /// An answer begins; of its prompt so many tokens were cached.
    Answers(usize, usize),
    /// An answer has ended.
    Ends(usize),
}

struct Prefill {
    job: Job,
    blocks: Vec<BlockId>,
    cached: usize,
    computed: usize,
    step: usize,
    stored: usize,
    until: Duration,
}

struct Waiting {
    job: Job,
    /// Tokens it will likely have to compute.
    expected: usize,
}

/// An engine on a virtual clock. Time is told by the caller, and never goes back.
pub struct Clocked {
    model: Model,
    cache: Cache<u64>,
    waiting: VecDeque<Waiting>,
    prefill: Option<Prefill>,
    /// Answers by their end.
    answering: BTreeMap<(Duration, usize), Vec<BlockId>>,
}

impl Clocked {
    /// An engine that holds nothing.
    pub fn new(model: Model) -> Self {
        Self {
            model,
            cache: Cache::new(model.blocks),
            waiting: VecDeque::new(),
            prefill: None,
            answering: BTreeMap::new(),
        }
    }

    /// Requests whose answer has not begun, and those whose has.
    pub fn depth(&self) -> (usize, usize) {
        (self.waiting.len() + usize::from(self.prefill.is_some()), self.answering.len())
    }

    /// When something happens in it by itself.
    pub fn next(&self) -> Option<Duration> {
        let computed = self.prefill.as_ref().map(|p| p.until);
        let ended = self.answering.keys().next().map(|(end, _)| *end);
        computed.into_iter().chain(ended).min()
    }

    /// Takes a request. One that does not fit, by [`Model::fits`], is never served, nor is what comes after it.
    pub fn submit(&mut self, now: Duration, job: Job, happened: &mut Vec<Happening>) {
        let expected = self.expected(&job.chain, job.tokens);
        self.waiting.push_back(Waiting { job, expected });
        self.admit(now, happened);
    }

    /// Tells what happened up to `now`, which is not after [`Clocked::next`].
    pub fn advance(&mut self, now: Duration, happened: &mut Vec<Happening>) {
        while self.next().is_some_and(|due| due <= now) {
            if self.prefill.as_ref().is_some_and(|p| p.until <= now) {
                self.computed(now, happened);
            } else if let Some(((_, id), blocks)) = self.answering.pop_first() {
                self.cache.release(&blocks);
                happened.push(Happening::Ends(id));
            }
            self.admit(now, happened);
        }
    }

    /// How long a prompt would wait for its answer if it came now, provided that no blocks have to be waited for.
    pub fn forecast(&self, now: Duration, chain: &[u64], tokens: usize) -> Duration {
        let running = self.prefill.as_ref().map_or(Duration::ZERO, |p| {
            p.until.saturating_sub(now) + self.model.time(p.job.tokens - p.computed - p.step)
        });
        let before: usize = self.waiting.iter().map(|w| w.expected).sum();
        running + self.model.time(before + self.expected(chain, tokens))
    }

    /// Tokens of a prompt that have to be computed once its turn comes: what waits before it will be held by then.
    fn expected(&self, chain: &[u64], tokens: usize) -> usize {
        let chain = reusable(chain, tokens);
        let before = self.prefill.iter().map(|p| &p.job).chain(self.waiting.iter().map(|w| &w.job));
        let alike = |job: &Job| shared(chain, &job.chain);
        let held = before.map(alike).max().unwrap_or(0).max(self.cache.longest_prefix(chain).len());
        tokens - held * BLOCK
    }

    fn admit(&mut self, now: Duration, happened: &mut Vec<Happening>) {
        let Some(first) = self.waiting.front().filter(|_| self.prefill.is_none()) else { return };
        let (chain, tokens) = (&first.job.chain, first.job.tokens);
        let mut blocks = self.cache.longest_prefix(reusable(chain, tokens));
        let (hit, needed) = (blocks.len(), (tokens + first.job.answer).div_ceil(BLOCK));
        if !self.cache.fits(&blocks, needed - hit) {
            return;
        }
        self.cache.retain(&blocks);
        let mut evicted = Vec::new();
        let Some(fresh) = self.cache.allocate(needed - hit, &mut evicted) else { return };
        let Some(Waiting { job, .. }) = self.waiting.pop_front() else { return };
        blocks.extend(fresh);
        if !evicted.is_empty() {
            happened.push(Happening::Removed(evicted));
        }
        let cached = hit * BLOCK;
        let step = self.model.step_tokens.max(1).min(job.tokens - cached);
        let until = now + self.model.time(step);
        self.prefill = Some(Prefill { job, blocks, cached, computed: cached, step, stored: hit, until });
    }

    /// A step is over.
    fn computed(&mut self, now: Duration, happened: &mut Vec<Happening>) {
        let Some(mut p) = self.prefill.take() else { return };
        p.computed += p.step;
        let full = p.computed / BLOCK;
        for (block, name) in p.blocks.iter().zip(p.job.chain.iter()).take(full).skip(p.stored) {
            self.cache.store(*block, *name);
        }
        if full > p.stored {
            happened.push(Happening::Stored(p.job.id, p.stored..full));
            p.stored = full;
        }
        if p.computed < p.job.tokens {
            p.step = p.step.min(p.job.tokens - p.computed);
            p.until = now + self.model.time(p.step);
            self.prefill = Some(p);
        } else {
            happened.push(Happening::Answers(p.job.id, p.cached));
            self.answering.insert((now + p.job.generate, p.job.id), p.blocks);
        }
    }
}

/// How many names two chains begin with alike: bisected, as a name stands for all before it too.
fn shared(a: &[u64], b: &[u64]) -> usize {
    let (mut alike, mut most) = (0, a.len().min(b.len()));
    while alike < most {
        let middle = alike.midpoint(most);
        match a.get(middle) == b.get(middle) {
            true => alike = middle + 1,
            false => most = middle,
        }
    }
    alike
}

/// The part of a chain that may be found in the cache: the prompt's last token is computed in any case.
fn reusable(chain: &[u64], tokens: usize) -> &[u64] {
    chain.get(..tokens.saturating_sub(1) / BLOCK).unwrap_or(chain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Happening::{Answers, Ends, Removed, Stored};

    const MODEL: Model = Model { blocks: 11, prefill_rate: 16.0, step_tokens: 32 };

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    /// A request for the blocks of these names.
    fn job(id: usize, names: &[u64], rest: usize, generate: u64) -> Job {
        let tokens = names.len() * BLOCK + rest;
        Job { id, chain: names.into(), tokens, answer: 1, generate: secs(generate) }
    }

    /// Everything that happens, with its second.
    fn run(engine: &mut Clocked, jobs: Vec<(u64, Job)>) -> Vec<(u64, Happening)> {
        let (mut jobs, mut log, mut happened) = (VecDeque::from(jobs), Vec::new(), Vec::new());
        loop {
            let due = jobs.front().map(|(at, _)| secs(*at));
            let own = engine.next().filter(|own| due.is_none_or(|due| *own <= due));
            let now = match (own, due) {
                (Some(own), _) => {
                    engine.advance(own, &mut happened);
                    own
                }
                (None, Some(due)) => {
                    let (_, job) = jobs.pop_front().unwrap();
                    engine.submit(due, job, &mut happened);
                    due
                }
                (None, None) => return log,
            };
            log.extend(happened.drain(..).map(|h| (now.as_secs(), h)));
        }
    }

    #[test]
    fn prompts_are_computed_in_steps_one_after_the_other_and_what_is_cached_is_not() {
        let mut engine = Clocked::new(MODEL);
        let jobs = vec![(0, job(0, &[1, 2, 3], 2, 2)), (1, job(1, &[1, 2, 7], 8, 1))];
        let log = run(&mut engine, jobs);
        assert_eq!(
            log,
            [
                (2, Stored(0, 0..2)),
                (3, Stored(0, 2..3)), // at 3.125
                (3, Answers(0, 0)),
                (4, Stored(1, 2..3)), // 24 tokens more: 4.625
                (4, Answers(1, 32)),
                (5, Ends(0)),
                (5, Ends(1)),
            ]
        );
    }

    #[test]
    fn a_prompt_of_full_blocks_computes_its_last_one_again() {
        let mut engine = Clocked::new(MODEL);
        let log = run(&mut engine, vec![(0, job(0, &[1, 2], 0, 0)), (9, job(1, &[1, 2], 0, 0))]);
        assert_eq!(log[3..], [(10, Stored(1, 1..2)), (10, Answers(1, 16)), (10, Ends(1))]);
    }

    #[test]
    fn whoever_finds_no_room_waits_and_evicts_later() {
        let mut engine = Clocked::new(MODEL);
        // ten blocks: the first takes six, the second needs as many
        let jobs = vec![(0, job(0, &[1, 2, 3, 4, 5], 0, 100)), (6, job(1, &[11, 12, 13, 14, 15], 0, 0))];
        let log = run(&mut engine, jobs);
        assert_eq!(log[4], (105, Ends(0)));
        assert_eq!(log[5], (105, Removed(vec![5])), "the deepest, after the five that hold nothing");
        assert_eq!(log.last(), Some(&(110, Ends(1))));
        assert!(MODEL.fits(160) && !MODEL.fits(161));
    }

    #[test]
    fn the_forecast_is_what_happens() {
        let mut engine = Clocked::new(MODEL);
        let mut happened = Vec::new();
        assert_eq!(engine.forecast(secs(0), &[1, 2], 40), Duration::from_millis(2500));
        engine.submit(secs(0), job(0, &[1, 2], 8, 50), &mut happened);
        // half a second is left of the first, whose two blocks will be held
        assert_eq!(engine.forecast(secs(2), &[1, 2, 9], 50), Duration::from_millis(500 + 18_000 / 16));
        engine.submit(secs(2), job(1, &[1, 2, 9], 2, 50), &mut happened);
        assert_eq!(engine.depth(), (2, 0));
        let third = engine.forecast(secs(2), &[1, 2, 9], 49);
        let mut answered = Duration::ZERO;
        engine.submit(secs(2), job(2, &[1, 2, 9], 1, 50), &mut happened);
        while engine.depth().0 > 0 {
            answered = engine.next().unwrap();
            engine.advance(answered, &mut happened);
        }
        assert_eq!(answered, secs(2) + third);
        assert_eq!(engine.depth(), (0, 3));
    }
}
