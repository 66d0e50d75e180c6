//! The engine's scheduler, step by step, as vLLM's (V1 engine, read on 0.32) does it.
//!
//! A step first serves the running requests in order, then admits waiting ones while concurrency, the step's token
//! budget and the cache allow. Blocks are stored (and their events recorded) when the step that fills them is
//! scheduled: prompts in chunks of the budget, decoded blocks one by one. The last sampled token never has KV.
//! Sans-IO: time, token choice and publishing are the caller's.

use crate::cache::{BlockId, Cache};
use crate::event::{Event, Stored};
use kvgate_kv::hash::{Digest, ExtraKey, Hasher, Namespace, Scratch};
use std::collections::VecDeque;

/// What bounds a step.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Blocks of the cache, the engine's own one included.
    pub cache_blocks: usize,
    /// Requests that run at a time.
    pub max_concurrency: usize,
    /// Tokens of one step.
    pub max_step_tokens: usize,
}

/// A request to generate `max_tokens` tokens (at least one) after a prompt (of at least one).
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Tokens to generate.
    pub max_tokens: usize,
    /// What keeps its blocks apart from those of equal tokens.
    pub namespace: Namespace,
    /// The adapter's number within the engine, as events give it.
    pub lora_id: Option<u32>,
    /// Its `session_id`, as events give it.
    pub session: Option<String>,
    /// Whether another engine hands its prompt's blocks over: all but the last token is there at the first admission.
    pub received: bool,
}

/// A request on its way.
struct Sequence {
    id: u64,
    request: Request,
    prompt: usize,
    hashes: Vec<Digest>,
    blocks: Vec<BlockId>,
    stored: usize,
    computed: usize,
    /// Prompt tokens that were there at the first admission, and those of them that were received.
    cached: Option<usize>,
    received: usize,
}

/// One scheduled step, to be handed to [`Scheduler::complete`] when its time is over.
#[derive(Debug, Default)]
pub struct Step {
    scheduled: Vec<(u64, usize)>,
    /// Prompt tokens computed.
    pub prefill_tokens: usize,
    /// Requests that decode.
    pub decodes: usize,
    /// Prompt tokens of the requests admitted for the first time, and those found in the cache.
    pub queried: (usize, usize),
    /// Requests that lost their blocks and start over.
    pub preempted: usize,
}

/// A token that a step produced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// The first is 0.
    pub position: usize,
    /// Whether it is the request's last.
    pub last: bool,
    /// Prompt tokens that were not computed: found in the cache, or received.
    pub cached_tokens: usize,
    /// Those of them that were received.
    pub received_tokens: usize,
}

/// Waiting and running requests, and the cache they share.
pub struct Scheduler {
    limits: Limits,
    hasher: Hasher,
    scratch: Scratch,
    cache: Cache<Digest>,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    events: Vec<Event>,
}

impl Scheduler {
    /// An idle engine with an empty cache.
    pub fn new(hasher: Hasher, limits: Limits) -> Self {
        Self {
            cache: Cache::new(limits.cache_blocks),
            limits,
            hasher,
            scratch: Scratch::default(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests that run.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// The share of the cache's blocks in use by running requests, 0 to 1.
    pub fn cache_usage(&self) -> f64 {
        self.cache.used() as f64 / self.cache.len().max(1) as f64
    }

    /// Puts a request at the end of the queue; `id` is the caller's number for it.
    pub fn submit(&mut self, id: u64, request: Request) {
        let mut sequence = Sequence {
            id,
            prompt: request.tokens.len(),
            request,
            hashes: Vec::new(),
            blocks: Vec::new(),
            stored: 0,
            computed: 0,
            cached: None,
            received: 0,
        };
        self.extend_hashes(&mut sequence);
        self.waiting.push_back(sequence);
    }

    /// Drops the requests that `gone` names and frees their blocks.
    pub fn cancel(&mut self, gone: impl Fn(u64) -> bool) {
        self.waiting.retain(|sequence| !gone(sequence.id));
        let cache = &mut self.cache;
        self.running.retain(|sequence| {
            let stays = !gone(sequence.id);
            if !stays {
                cache.release(&sequence.blocks);
            }
            stays
        });
    }

    /// Forgets all cached content; the event comes with the next step. Refused, with `false`, while requests run.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let cleared = self.cache.clear();
        if cleared {
            self.events.push(Event::Cleared);
        }
        cleared
    }

    /// What happened to the cache since this was last asked.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Plans the next step; `None` when there is nothing to do.
    pub fn schedule(&mut self) -> Option<Step> {
        let mut step = Step::default();
        let mut budget = self.limits.max_step_tokens.max(1);
        self.serve_running(&mut step, &mut budget);
        while step.preempted == 0
            && budget > 0
            && self.running.len() < self.limits.max_concurrency.max(1)
            && self.admit(&mut step, &mut budget)
        {}
        (!step.scheduled.is_empty()).then_some(step)
    }

    /// Ends a step and returns the tokens it produced, by request; `next` chooses the token of a request at a position.
    /// Requests that vanished meanwhile are skipped.
    pub fn complete(&mut self, step: &Step, mut next: impl FnMut(u64, usize) -> u32) -> Vec<(u64, Sampled)> {
        let mut sampled = Vec::new();
        for &(id, count) in &step.scheduled {
            let Some(index) = self.running.iter().position(|sequence| sequence.id == id) else { continue };
            let sequence = &mut self.running[index];
            sequence.computed += count;
            if sequence.computed < sequence.request.tokens.len() {
                continue;
            }
            let position = sequence.request.tokens.len() - sequence.prompt;
            let token = next(id, position);
            let last = position + 1 >= sequence.request.max_tokens;
            let cached_tokens = sequence.cached.unwrap_or(0);
            let received_tokens = sequence.received;
            sampled.push((id, Sampled { token, position, last, cached_tokens, received_tokens }));
            if last {
                let sequence = self.running.remove(index);
                self.cache.release(&sequence.blocks);
            } else {
                sequence.request.tokens.push(token);
            }
        }
        sampled
    }

    fn serve_running(&mut self, step: &mut Step, budget: &mut usize) {
        let mut index = 0;
        while index < self.running.len() && *budget > 0 {
            let sequence = &self.running[index];
            let count = (sequence.request.tokens.len() - sequence.computed).min(*budget);
            let need = self.blocks_for(sequence.computed + count).saturating_sub(sequence.blocks.len());
            while !self.cache.fits(&[], need) && index + 1 < self.running.len() {
                self.preempt(step);
            }
            if !self.cache.fits(&[], need) {
                self.preempt(step);
                return;
            }
            let mut sequence = self.running.remove(index);
            self.compute(&mut sequence, count, need);
            *budget -= count;
            self.note(step, &sequence, count);
            self.running.insert(index, sequence);
            index += 1;
        }
    }

    /// Takes the blocks of the running request that came last; it goes back to the head of the queue.
    fn preempt(&mut self, step: &mut Step) {
        let Some(mut sequence) = self.running.pop() else { return };
        self.cache.release(&sequence.blocks);
        sequence.blocks.clear();
        (sequence.computed, sequence.stored) = (0, 0);
        step.preempted += 1;
        self.waiting.push_front(sequence);
    }

    /// Admits the head of the queue; `false` when there is none or the cache has no room for it.
    fn admit(&mut self, step: &mut Step, budget: &mut usize) -> bool {
        let Some(sequence) = self.waiting.front() else { return false };
        let block_size = self.hasher.block_size();
        let length = sequence.request.tokens.len();
        // the last token is always computed: its logits are needed
        let hit = self.cache.longest_prefix(&sequence.hashes[..length.saturating_sub(1) / block_size]);
        let found = hit.len() * block_size;
        // what was received is lost when the request is preempted
        let handed = sequence.request.received && sequence.cached.is_none();
        let computed = if handed { found.max(length.saturating_sub(1)) } else { found };
        let count = (length - computed).min(*budget);
        let need = self.blocks_for(computed + count) - hit.len();
        if !self.cache.fits(&hit, need) {
            return false;
        }
        let Some(mut sequence) = self.waiting.pop_front() else { return false };
        if sequence.cached.is_none() {
            sequence.cached = Some(computed);
            sequence.received = computed - found;
            step.queried.0 += length;
            step.queried.1 += found;
        }
        self.cache.retain(&hit);
        sequence.computed = computed;
        sequence.stored = hit.len();
        sequence.blocks = hit;
        self.compute(&mut sequence, count, need);
        *budget -= count;
        self.note(step, &sequence, count);
        self.running.push(sequence);
        true
    }

    fn note(&self, step: &mut Step, sequence: &Sequence, count: usize) {
        step.scheduled.push((sequence.id, count));
        if sequence.computed < sequence.prompt {
            step.prefill_tokens += count;
        } else {
            step.decodes += 1;
        }
    }

    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.hasher.block_size())
    }

    /// Gives `sequence` `need` more blocks and stores those that `count` more tokens fill.
    fn compute(&mut self, sequence: &mut Sequence, count: usize, need: usize) {
        let mut evicted = Vec::new();
        sequence.blocks.extend(self.cache.allocate(need, &mut evicted).unwrap_or_default());
        self.events.extend(evicted.into_iter().map(Event::Removed));
        self.extend_hashes(sequence);
        let block_size = self.hasher.block_size();
        let (first, full) = (sequence.stored, (sequence.computed + count) / block_size);
        if full <= first {
            return;
        }
        for index in first..full {
            self.cache.store(sequence.blocks[index], sequence.hashes[index]);
        }
        sequence.stored = full;
        let namespace = &sequence.request.namespace;
        self.events.push(Event::Stored(Stored {
            hashes: sequence.hashes[first..full].to_vec(),
            parent: first.checked_sub(1).map(|index| sequence.hashes[index]),
            tokens: sequence.request.tokens[first * block_size..full * block_size].to_vec(),
            block_size: block_size as u32,
            lora: sequence.request.lora_id.zip(namespace.lora.as_ref().map(|lora| lora.name.clone())),
            extra_keys: (first..full).map(|index| untagged(namespace, index)).collect(),
            session: sequence.request.session.clone(),
        }));
    }

    fn extend_hashes(&mut self, sequence: &mut Sequence) {
        let block_size = self.hasher.block_size();
        for index in sequence.hashes.len()..sequence.request.tokens.len() / block_size {
            let parent = sequence.hashes.last().copied().unwrap_or_else(|| self.hasher.none_hash());
            let tokens = &sequence.request.tokens[index * block_size..(index + 1) * block_size];
            let keys = sequence.request.namespace.extra_keys(index);
            sequence.hashes.push(self.hasher.block(&parent, tokens, &keys, &mut self.scratch));
        }
    }
}

/// A block's extra keys as events give them: the values alone, an adapter without its path.
fn untagged(namespace: &Namespace, index: usize) -> Option<Vec<String>> {
    let keys = namespace.extra_keys(index);
    let values = keys.iter().filter_map(|key| match key {
        ExtraKey::Lora { name, .. } => Some((*name).to_owned()),
        ExtraKey::Salt(salt) => Some((*salt).to_owned()),
        ExtraKey::Mm { .. } | ExtraKey::Embeds(_) => None,
    });
    Some(values.collect()).filter(|values: &Vec<String>| !values.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvgate_kv::hash::{Algorithm, Contract, ExtraKeys};
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn scheduler(limits: Limits) -> Scheduler {
        let contract = Contract {
            algorithm: Algorithm::XxhashCbor,
            block_size: 4,
            seed: Some("0".into()),
            extra_keys: ExtraKeys::Tagged,
        };
        Scheduler::new(contract.hasher().unwrap(), limits)
    }

    fn request(tokens: Vec<u32>, max_tokens: usize) -> Request {
        Request { tokens, max_tokens, ..Request::default() }
    }

    /// Runs until idle; the tokens that each request got.
    fn drain(scheduler: &mut Scheduler) -> HashMap<u64, usize> {
        let mut got = HashMap::new();
        while let Some(step) = scheduler.schedule() {
            for (id, _) in scheduler.complete(&step, |_, position| position as u32) {
                *got.entry(id).or_insert(0) += 1;
            }
        }
        got
    }

    #[test]
    fn the_last_that_runs_gives_way_and_starts_over() {
        let mut scheduler = scheduler(Limits { cache_blocks: 7, max_concurrency: 4, max_step_tokens: 64 });
        scheduler.submit(1, request(vec![1; 8], 16));
        scheduler.submit(2, request(vec![2; 8], 16));
        let mut preempted = 0;
        let mut got: HashMap<u64, usize> = HashMap::new();
        while let Some(step) = scheduler.schedule() {
            preempted += step.preempted;
            assert!(step.preempted == 0 || scheduler.running() == 1);
            for (id, token) in scheduler.complete(&step, |_, _| 9) {
                assert_eq!(token.position, got.get(&id).copied().unwrap_or(0));
                *got.entry(id).or_insert(0) += 1;
            }
        }
        assert!(preempted > 0);
        assert_eq!(got, HashMap::from([(1, 16), (2, 16)]));
        assert_eq!(scheduler.cache_usage(), 0.0);
    }

    #[test]
    fn a_received_prompt_is_computed_but_for_its_last_token() {
        let mut scheduler = scheduler(Limits { cache_blocks: 7, max_concurrency: 4, max_step_tokens: 64 });
        scheduler.submit(1, Request { received: true, ..request(vec![1; 10], 2) });
        let step = scheduler.schedule().unwrap();
        assert_eq!((step.prefill_tokens, step.queried), (1, (10, 0)));
        let sampled = scheduler.complete(&step, |_, _| 9);
        assert_eq!((sampled[0].1.cached_tokens, sampled[0].1.received_tokens), (9, 9));
        let stored = |event: &Event| matches!(event, Event::Stored(stored) if stored.hashes.len() == 2);
        assert!(scheduler.take_events().iter().any(stored), "received blocks are announced");
        drain(&mut scheduler);
        // what is in the cache is not received again
        scheduler.submit(2, Request { received: true, ..request(vec![1; 10], 1) });
        let step = scheduler.schedule().unwrap();
        let sampled = scheduler.complete(&step, |_, _| 9);
        assert_eq!((sampled[0].1.cached_tokens, sampled[0].1.received_tokens), (9, 1));
        scheduler.submit(3, Request { received: true, ..request(vec![7], 1) });
        assert_eq!(scheduler.schedule().unwrap().prefill_tokens, 1);
    }

    #[test]
    fn a_preempted_request_loses_what_it_received() {
        let mut scheduler = scheduler(Limits { cache_blocks: 7, max_concurrency: 4, max_step_tokens: 64 });
        scheduler.submit(1, request(vec![1; 8], 16));
        scheduler.submit(2, Request { received: true, ..request(vec![2; 8], 16) });
        let mut prefilled = 0;
        while let Some(step) = scheduler.schedule() {
            prefilled += step.prefill_tokens;
            scheduler.complete(&step, |_, _| 9);
        }
        assert!(prefilled > 8 + 1, "{prefilled}");
    }

    #[test]
    fn a_cancelled_request_frees_its_blocks_and_its_step_is_void() {
        let mut scheduler = scheduler(Limits { cache_blocks: 50, max_concurrency: 1, max_step_tokens: 64 });
        scheduler.submit(1, request(vec![1; 40], 100));
        scheduler.submit(2, request(vec![2; 40], 1));
        let step = scheduler.schedule().unwrap();
        assert_eq!((scheduler.running(), scheduler.waiting()), (1, 1));
        assert!(!scheduler.reset_prefix_cache());
        scheduler.cancel(|id| id == 1);
        assert_eq!(scheduler.cache_usage(), 0.0);
        assert!(scheduler.complete(&step, |_, _| 0).is_empty());
        assert_eq!(drain(&mut scheduler), HashMap::from([(2, 1)]));
    }

    /// What a follower of the events knows.
    #[derive(Default)]
    struct Mirror(HashMap<Digest, usize>);

    impl Mirror {
        fn follow(&mut self, event: &Event) {
            match event {
                Event::Stored(stored) => {
                    assert!(
                        stored.parent.is_none_or(|parent| self.0.contains_key(&parent)),
                        "an unknown parent"
                    );
                    assert_eq!(stored.tokens.len(), stored.hashes.len() * stored.block_size as usize);
                    stored.hashes.iter().for_each(|hash| *self.0.entry(*hash).or_default() += 1);
                }
                Event::Removed(hash) => {
                    let copies = self.0.get_mut(hash).expect("a block that is held");
                    *copies -= 1;
                    if *copies == 0 {
                        self.0.remove(hash);
                    }
                }
                Event::Cleared => self.0.clear(),
            }
        }

        fn prefix(&self, hashes: &[Digest]) -> usize {
            hashes.iter().take_while(|hash| self.0.contains_key(hash)).count()
        }
    }

    proptest! {
        /// Whoever follows the events knows what the cache holds: the next hit is what the mirror says.
        #[test]
        fn events_tell_what_the_cache_holds(
            cache_blocks in 12usize..40,
            max_concurrency in 1usize..5,
            max_step_tokens in 3usize..40,
            rounds in prop::collection::vec(
                (prop::collection::vec((0u32..3, 1usize..30, 1usize..12), 1..5), any::<bool>()), 1..12),
        ) {
            let mut scheduler = scheduler(Limits { cache_blocks, max_concurrency, max_step_tokens });
            let mut mirror = Mirror::default();
            for (requests, reset) in rounds {
                let mut wanted = HashMap::new();
                for (id, (family, length, max_tokens)) in requests.iter().enumerate() {
                    // families share a start; some prompts are exact multiples of the block size
                    let tokens: Vec<u32> = (0..*length as u32).map(|i| if i < 6 { i } else { i * 10 + family }).collect();
                    if id == 0 {
                        let hashes = scheduler.hasher.blocks(&tokens, &Namespace::default());
                        let expected = mirror.prefix(&hashes[..(length - 1) / 4]) * 4;
                        scheduler.submit(99, request(tokens.clone(), 1));
                        while let Some(step) = scheduler.schedule() {
                            scheduler.take_events().iter().for_each(|event| mirror.follow(event));
                            for (_, token) in scheduler.complete(&step, |_, _| 7) {
                                prop_assert_eq!(token.cached_tokens, expected);
                            }
                        }
                    }
                    scheduler.submit(id as u64, request(tokens, *max_tokens));
                    wanted.insert(id as u64, *max_tokens);
                }
                let mut got = HashMap::new();
                while let Some(step) = scheduler.schedule() {
                    scheduler.take_events().iter().for_each(|event| mirror.follow(event));
                    for (id, _) in scheduler.complete(&step, |id, position| id as u32 * 100 + position as u32) {
                        *got.entry(id).or_insert(0) += 1;
                    }
                }
                prop_assert_eq!(got, wanted);
                prop_assert_eq!(scheduler.cache_usage(), 0.0);
                if reset {
                    prop_assert!(scheduler.reset_prefix_cache());
                    // published with the next step; known here before it
                    scheduler.take_events().iter().for_each(|event| mirror.follow(event));
                }
            }
        }
    }
}
