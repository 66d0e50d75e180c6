//! The engine's prefix cache: reference-counted blocks, a free list that is also the eviction order.
//!
//! Reproduces vLLM's block pool (V1 engine, read on 0.32): only full blocks carry a hash; one hash may be held
//! in several copies; a released block keeps its content until the block is taken for something else.
//! Sans-IO: events are the caller's business, evicted hashes are handed back.

use std::collections::HashMap;
use std::hash::Hash;

/// A block's number in the pool.
pub type BlockId = u32;

#[derive(Clone, Copy)]
struct Link {
    previous: BlockId,
    next: BlockId,
}

#[derive(Clone)]
struct Block<H> {
    hash: Option<H>,
    users: u32,
}

/// A pool of blocks keyed by the hash of the token chain that each full one holds.
pub struct Cache<H> {
    blocks: Vec<Block<H>>,
    /// The free list; the entry after the last block is its head and tail.
    links: Vec<Link>,
    free: usize,
    held: HashMap<H, Vec<BlockId>>,
}

impl<H: Copy + Eq + Hash> Cache<H> {
    /// A cache of `blocks` blocks, of which the engine keeps one for itself: `blocks - 1` can hold tokens.
    pub fn new(blocks: usize) -> Self {
        let usable = u32::try_from(blocks.saturating_sub(1)).unwrap_or(u32::MAX - 1);
        let mut cache = Self {
            blocks: vec![Block { hash: None, users: 0 }; usable as usize],
            links: vec![Link { previous: usable, next: usable }; usable as usize + 1],
            free: 0,
            held: HashMap::new(),
        };
        (0..usable).for_each(|block| cache.push_back(block));
        cache
    }

    /// Blocks that can hold tokens.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block can hold tokens.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks in use by running requests.
    pub fn used(&self) -> usize {
        self.blocks.len() - self.free
    }

    /// The blocks that hold the longest held prefix of the chain `hashes`; of several copies the oldest.
    pub fn longest_prefix(&self, hashes: &[H]) -> Vec<BlockId> {
        hashes
            .iter()
            .map_while(|hash| self.held.get(hash).and_then(|copies| copies.first()).copied())
            .collect()
    }

    /// Whether `count` more blocks can be had once the blocks of `hit` are in use.
    pub fn fits(&self, hit: &[BlockId], count: usize) -> bool {
        let idle = hit.iter().filter(|block| self.blocks[**block as usize].users == 0).count();
        count + idle <= self.free
    }

    /// Takes the blocks of a hit into use: they can't be evicted until released.
    pub fn retain(&mut self, hit: &[BlockId]) {
        for &block in hit {
            if self.blocks[block as usize].users == 0 {
                self.unlink(block);
            }
            self.blocks[block as usize].users += 1;
        }
    }

    /// Takes `count` blocks from the front of the free list; the hash each held is pushed to `evicted`, in that order.
    /// `None`, and nothing changes, when there are fewer.
    pub fn allocate(&mut self, count: usize, evicted: &mut Vec<H>) -> Option<Vec<BlockId>> {
        (count <= self.free).then(|| {
            (0..count)
                .map(|_| {
                    let block = self.links[self.blocks.len()].next;
                    self.unlink(block);
                    evicted.extend(self.forget(block));
                    self.blocks[block as usize].users = 1;
                    block
                })
                .collect()
        })
    }

    /// Notes that `block`, in use, is now full and holds the chain that ends in `hash`.
    pub fn store(&mut self, block: BlockId, hash: H) {
        self.forget(block);
        self.blocks[block as usize].hash = Some(hash);
        self.held.entry(hash).or_default().push(block);
    }

    /// Gives a request's blocks back, in chain order. The deepest becomes free first, so that it is evicted first;
    /// blocks without content go to the very front.
    pub fn release(&mut self, chain: &[BlockId]) {
        for &block in chain.iter().rev() {
            let entry = &mut self.blocks[block as usize];
            entry.users = entry.users.saturating_sub(1);
            match (entry.users, entry.hash.is_some()) {
                (0, true) => self.push_back(block),
                (0, false) => self.push_front(block),
                _ => {}
            }
        }
    }

    /// Forgets all content. Refused, with `false`, while any block is in use.
    pub fn clear(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        self.held.clear();
        self.blocks.iter_mut().for_each(|block| block.hash = None);
        true
    }

    fn forget(&mut self, block: BlockId) -> Option<H> {
        let hash = self.blocks[block as usize].hash.take()?;
        if let Some(copies) = self.held.get_mut(&hash) {
            copies.retain(|copy| *copy != block);
            if copies.is_empty() {
                self.held.remove(&hash);
            }
        }
        Some(hash)
    }

    fn push_back(&mut self, block: BlockId) {
        let last = self.links[self.blocks.len()].previous;
        self.link(last, block);
    }

    fn push_front(&mut self, block: BlockId) {
        let head = self.blocks.len() as BlockId;
        self.link(head, block);
    }

    fn link(&mut self, previous: BlockId, block: BlockId) {
        let next = self.links[previous as usize].next;
        self.links[block as usize] = Link { previous, next };
        self.links[previous as usize].next = block;
        self.links[next as usize].previous = block;
        self.free += 1;
    }

    fn unlink(&mut self, block: BlockId) {
        let Link { previous, next } = self.links[block as usize];
        self.links[previous as usize].next = next;
        self.links[next as usize].previous = previous;
        self.free -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// One request's life: what it hit, what it evicted, the blocks it ended with.
    fn run(cache: &mut Cache<u32>, chain: &[u32], partial: bool) -> (usize, Vec<u32>) {
        let hit = cache.longest_prefix(&chain[..chain.len().saturating_sub(1)]);
        let new = chain.len() - hit.len() + usize::from(partial);
        assert!(cache.fits(&hit, new));
        cache.retain(&hit);
        let mut evicted = Vec::new();
        let fresh = cache.allocate(new, &mut evicted).unwrap();
        for (block, hash) in fresh.iter().zip(&chain[hit.len()..]) {
            cache.store(*block, *hash);
        }
        cache.release(&[hit.clone(), fresh].concat());
        (hit.len(), evicted)
    }

    #[test]
    fn a_repeated_exact_multiple_stores_its_last_block_again() {
        let mut cache = Cache::new(24);
        assert_eq!(run(&mut cache, &[1, 2, 3, 4], false), (0, vec![]));
        assert_eq!(run(&mut cache, &[1, 2, 3, 4], false), (3, vec![]));
        assert_eq!(cache.held[&4].len(), 2);
    }

    #[test]
    fn the_deepest_block_goes_first_and_each_copy_is_evicted_by_itself() {
        let mut cache = Cache::new(7);
        run(&mut cache, &[1, 2, 3], false);
        run(&mut cache, &[1, 2, 3], false);
        assert_eq!(run(&mut cache, &[11, 12, 13, 14, 15], false), (0, vec![3, 3, 2]));
        assert_eq!(cache.longest_prefix(&[1, 2, 3]).len(), 1);
    }

    #[test]
    fn a_block_without_content_is_taken_first() {
        let mut cache = Cache::new(6);
        run(&mut cache, &[1, 2, 3, 4], true);
        assert_eq!(run(&mut cache, &[9], false), (0, vec![]));
        assert_eq!(run(&mut cache, &[8], false), (0, vec![4]));
    }

    #[test]
    fn blocks_in_use_are_neither_evicted_nor_cleared() {
        let mut cache = Cache::<u32>::new(4);
        let mut evicted = Vec::new();
        let blocks = cache.allocate(2, &mut evicted).unwrap();
        cache.store(blocks[0], 1);
        cache.store(blocks[1], 2);
        assert!(!cache.clear());
        assert!(cache.allocate(2, &mut evicted).is_none());
        assert_eq!((cache.used(), evicted.as_slice()), (2, [].as_slice()));
        cache.release(&blocks);
        assert!(cache.clear());
        assert!(cache.longest_prefix(&[1]).is_empty());
    }

    /// The same rules over plain lists.
    struct Naive {
        free: VecDeque<BlockId>,
        users: Vec<u32>,
        hash: Vec<Option<u32>>,
        order: Vec<BlockId>,
    }

    impl Naive {
        fn hit(&self, chain: &[u32]) -> Vec<BlockId> {
            let oldest =
                |hash: &u32| self.order.iter().find(|b| self.hash[**b as usize] == Some(*hash)).copied();
            chain.iter().map_while(oldest).collect()
        }
    }

    proptest! {
        #[test]
        fn agrees_with_plain_lists(
            blocks in 1usize..12,
            steps in prop::collection::vec((prop::collection::vec(0u32..3, 0..5), any::<bool>(), any::<bool>()), 1..60),
        ) {
            let mut cache = Cache::new(blocks + 1);
            let mut naive = Naive {
                free: (0..blocks as u32).collect(),
                users: vec![0; blocks],
                hash: vec![None; blocks],
                order: vec![],
            };
            let mut open: VecDeque<Vec<BlockId>> = VecDeque::new();
            for (values, partial, close) in steps {
                // a chain never holds one hash twice
                let chain: Vec<u32> = values.iter().zip(0..).map(|(value, depth)| depth * 10 + value).collect();
                let hit = naive.hit(&chain);
                prop_assert_eq!(&cache.longest_prefix(&chain), &hit);
                let new = chain.len() - hit.len() + usize::from(partial);
                let left = naive.free.iter().filter(|b| !hit.contains(b)).count();
                prop_assert_eq!(cache.fits(&hit, new), new <= left);
                if new <= left {
                    cache.retain(&hit);
                    naive.free.retain(|b| !hit.contains(b));
                    hit.iter().for_each(|b| naive.users[*b as usize] += 1);
                    let (mut evicted, mut expected) = (Vec::new(), Vec::new());
                    let fresh = cache.allocate(new, &mut evicted).unwrap();
                    let taken: Vec<BlockId> = naive.free.drain(..new).collect();
                    for block in &taken {
                        naive.users[*block as usize] = 1;
                        expected.extend(naive.hash[*block as usize].take());
                        naive.order.retain(|b| b != block);
                    }
                    prop_assert_eq!(&fresh, &taken);
                    prop_assert_eq!(evicted, expected);
                    for (block, hash) in fresh.iter().zip(&chain[hit.len()..]) {
                        cache.store(*block, *hash);
                        naive.hash[*block as usize] = Some(*hash);
                        naive.order.push(*block);
                    }
                    open.push_back([hit, fresh].concat());
                }
                if close && let Some(blocks) = open.pop_front() {
                    cache.release(&blocks);
                    for block in blocks.iter().rev() {
                        naive.users[*block as usize] -= 1;
                        match (naive.users[*block as usize], naive.hash[*block as usize]) {
                            (0, Some(_)) => naive.free.push_back(*block),
                            (0, None) => naive.free.push_front(*block),
                            _ => {}
                        }
                    }
                }
                prop_assert_eq!(cache.used(), naive.users.iter().filter(|users| **users > 0).count());
            }
        }
    }
}
