//! The prompts seen, as a radix trie of bytes with the engines that saw them.
//!
//! A node's engines are those that were given a text that holds the node's whole edge, so that the engines of a node
//! are among those of its parent. A text that ends within an edge needs no node of its own there as long as its engine
//! holds the edge: what is left of a match is counted within edges, too. A conversation that stays on one engine is
//! one node that grows.
//!
//! Touching a text makes its nodes the most recently used, the deepest first: the least recently used node of all is
//! always a leaf, and gives way first.

use std::collections::HashMap;
use std::sync::Arc;

use kvgate_core::EngineId;
use lru::LruCache;

/// Nodes from the top that a text is followed through; what lies beyond is not remembered. Bounds the time of a walk.
const DEPTH: usize = 1024;
/// Nodes given up, or looked through, at a time: some hundred microseconds.
const BATCH: usize = 512;
/// What a node takes beside its vectors: itself, its links in the order of use and its place in the table.
const NODE_BYTES: usize = size_of::<Node>() + 80;

/// A node's number, never used again.
type NodeId = u64;

/// What is above a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Up {
    /// Nothing: it is the top of a namespace, and its edge is empty.
    Namespace(u64),
    Node(NodeId),
}

#[derive(Debug)]
struct Node {
    up: Up,
    edge: Vec<u8>,
    /// By the first byte of their edges, ascending.
    children: Vec<(u8, NodeId)>,
    /// Ascending.
    engines: Vec<EngineId>,
}

impl Node {
    fn child(&self, first: u8) -> Option<NodeId> {
        let at = self.children.binary_search_by_key(&first, |(byte, _)| *byte).ok()?;
        self.children.get(at).map(|(_, id)| *id)
    }

    /// Puts a child in the place of the one with the same first byte.
    fn adopt(&mut self, first: u8, child: NodeId) {
        match self.children.binary_search_by_key(&first, |(byte, _)| *byte) {
            Ok(at) => self.children.iter_mut().skip(at).take(1).for_each(|known| known.1 = child),
            Err(at) => self.children.insert(at, (first, child)),
        }
    }

    fn mark(&mut self, engine: EngineId) {
        if let Err(at) = self.engines.binary_search(&engine) {
            self.engines.insert(at, engine);
        }
    }

    fn bytes(&self) -> usize {
        NODE_BYTES
            + self.edge.capacity()
            + self.children.capacity() * size_of::<(u8, NodeId)>()
            + self.engines.capacity() * size_of::<EngineId>()
    }
}

/// How much a trie may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Nodes.
    pub nodes: usize,
    /// Bytes of text and nodes.
    pub bytes: usize,
}

/// What a trie is for at the moment.
#[derive(Clone, Debug)]
pub struct Service {
    /// The one with the highest number counts.
    pub generation: u64,
    /// Those whose texts are kept, ascending.
    pub engines: Arc<[EngineId]>,
    /// How much it may hold.
    pub limits: Limits,
}

/// The longest match of a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// Its bytes; 0 if there is none.
    pub bytes: usize,
    /// The wanted engines that saw all of it, ascending.
    pub engines: Vec<EngineId>,
    /// Whether an engine that is not wanted saw the text's first byte.
    pub others: bool,
}

/// The trie. Its operations are bounded: a lock may be held over each of them.
#[derive(Debug)]
pub struct Trie {
    /// In the order of their use.
    nodes: LruCache<NodeId, Node>,
    tops: HashMap<u64, NodeId>,
    next: NodeId,
    bytes: usize,
    service: Service,
    /// Nodes that may still name engines that are served no more.
    unswept: Vec<NodeId>,
}

impl Default for Trie {
    fn default() -> Self {
        let limits = Limits { nodes: 0, bytes: 0 };
        Self {
            nodes: LruCache::unbounded(),
            tops: HashMap::new(),
            next: 0,
            bytes: 0,
            service: Service { generation: 0, engines: Arc::new([]), limits },
            unswept: Vec::new(),
        }
    }
}

impl Trie {
    /// Nodes held.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Bytes held, of text and nodes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The longest part of `text`, from its start, that a wanted engine saw.
    pub fn longest(&self, namespace: u64, text: &[u8], wanted: impl Fn(EngineId) -> bool) -> Match {
        let mut found = Match::default();
        let walk = self.walk(namespace, text);
        for (depth, id) in walk.iter().rev().filter(|(depth, _)| *depth > 0) {
            let Some(node) = self.nodes.peek(id) else { continue };
            found.engines = node.engines.iter().copied().filter(|engine| wanted(*engine)).collect();
            found.others |= found.engines.len() < node.engines.len();
            if !found.engines.is_empty() {
                found.bytes = *depth;
                break;
            }
        }
        found
    }

    /// The nodes on the way of `text`, from the top, each with the bytes matched up to its end, or to the end of what
    /// matches of its edge.
    fn walk(&self, namespace: u64, text: &[u8]) -> Vec<(usize, NodeId)> {
        let (mut path, mut depth) = (Vec::new(), 0);
        let mut next = self.tops.get(&namespace).copied();
        while let Some((id, node)) = next.and_then(|id| Some((id, self.nodes.peek(&id)?))) {
            let rest = text.get(depth..).unwrap_or_default();
            let common = common_prefix(&node.edge, rest);
            depth += common;
            path.push((depth, id));
            if common < node.edge.len() || path.len() >= DEPTH {
                break;
            }
            next = text.get(depth).and_then(|first| node.child(*first));
        }
        path
    }

    /// Sets what the trie is for, if that is newer than what it knows.
    pub fn serve(&mut self, service: &Service) {
        if service.generation > self.service.generation {
            let known = std::mem::replace(&mut self.service, service.clone());
            if known.engines != service.engines {
                self.unswept = self.tops.values().copied().collect();
            }
        }
    }

    /// Remembers that `engine` saw `text`. Not if it is served no more, nor while the limits are exceeded. They may be
    /// after that: [`Trie::trim`] is next.
    pub fn insert(&mut self, namespace: u64, text: &[u8], engine: EngineId) {
        if self.service.engines.binary_search(&engine).is_err() || text.is_empty() || self.is_over() {
            return;
        }
        let mut path = self.walk(namespace, text);
        if path.is_empty() {
            let top = self.add(Up::Namespace(namespace), Vec::new(), Vec::new());
            self.tops.insert(namespace, top);
            path.push((0, top));
        }
        self.split_last(&mut path, text, engine);
        for (_, id) in &path {
            self.change(*id, |node| node.mark(engine));
        }
        if let Some((depth, last)) = path.last().copied()
            && path.len() < DEPTH
            && let Some((first, rest)) = text.get(depth..).and_then(|rest| Some((*rest.first()?, rest)))
        {
            self.append(last, first, rest, engine);
        }
        for (_, id) in path.iter().rev() {
            self.nodes.promote(id);
        }
    }

    /// Cuts the last node of a path in two where the text leaves its edge, and puts the upper part in its place.
    fn split_last(&mut self, path: &mut Vec<(usize, NodeId)>, text: &[u8], engine: EngineId) {
        let Some((depth, last)) = path.pop() else { return };
        let before = path.last().map_or(0, |(depth, _)| *depth);
        let at = depth.saturating_sub(before);
        let Some(node) = self.nodes.peek(&last) else { return };
        let known = depth == text.len() && node.engines.binary_search(&engine).is_ok();
        if at == node.edge.len() || known {
            path.push((depth, last));
        } else if let Some(upper) = self.split(last, at) {
            path.push((depth, upper));
        }
    }

    /// Adds what is left of a text below the node that it left the trie at.
    fn append(&mut self, below: NodeId, first: u8, rest: &[u8], engine: EngineId) {
        let grows = |node: &Node| {
            matches!(node.up, Up::Node(_)) && node.children.is_empty() && node.engines == [engine]
        };
        if self.nodes.peek(&below).is_some_and(grows) {
            self.change(below, |node| {
                node.edge.reserve_exact(rest.len());
                node.edge.extend_from_slice(rest);
            });
        } else {
            let leaf = self.add(Up::Node(below), rest.to_vec(), vec![engine]);
            self.change(below, |node| node.adopt(first, leaf));
        }
    }

    /// Gives up to a fixed number of the least recently used leaves while the limits are exceeded, and takes engines
    /// that are served no more out of as many nodes. How many nodes were given up for the limits. Where there is more
    /// to do, the next ones do it.
    pub fn trim(&mut self) -> u64 {
        self.sweep();
        let mut evicted = 0;
        for _ in 0..BATCH {
            if !self.is_over() {
                break;
            }
            let Some((id, node)) = self.nodes.pop_lru() else { break };
            self.forget(id, &node);
            evicted += 1;
        }
        evicted
    }

    fn is_over(&self) -> bool {
        let Limits { nodes, bytes } = self.service.limits;
        !self.nodes.is_empty() && (self.nodes.len() > nodes || self.bytes > bytes)
    }

    /// Takes engines that are served no more out of some nodes, and those nodes that only they saw with them.
    fn sweep(&mut self) {
        for _ in 0..BATCH {
            let Some(id) = self.unswept.pop() else { return };
            let served = Arc::clone(&self.service.engines);
            let children = self.change(id, |node| {
                node.engines.retain(|engine| served.binary_search(engine).is_ok());
                node.engines.shrink_to_fit();
                node.children.iter().map(|(_, child)| *child).collect::<Vec<_>>()
            });
            self.unswept.extend(children.unwrap_or_default());
            self.prune(id);
        }
    }

    /// Takes a leaf away that nobody saw, and what above it is then such a leaf.
    fn prune(&mut self, leaf: NodeId) {
        let mut next = Some(leaf);
        while let Some(id) = next.take() {
            let idle = |node: &Node| node.children.is_empty() && node.engines.is_empty();
            if self.nodes.peek(&id).is_some_and(idle)
                && let Some(node) = self.nodes.pop(&id)
            {
                self.forget(id, &node);
                if let Up::Node(up) = node.up {
                    next = Some(up);
                }
            }
        }
    }

    /// A new node, the most recently used.
    fn add(&mut self, up: Up, edge: Vec<u8>, engines: Vec<EngineId>) -> NodeId {
        let node = Node { up, edge, children: Vec::new(), engines };
        self.next += 1;
        self.bytes += node.bytes();
        self.nodes.put(self.next, node);
        self.next
    }

    /// Takes a node that is gone out of what is above it.
    fn forget(&mut self, id: NodeId, node: &Node) {
        self.bytes = self.bytes.saturating_sub(node.bytes());
        match node.up {
            Up::Namespace(namespace) => {
                self.tops.remove(&namespace);
            }
            Up::Node(up) => {
                self.change(up, |above| {
                    above.children.retain(|(_, child)| *child != id);
                    above.children.shrink_to_fit();
                });
            }
        }
    }

    /// Cuts a node in two after `at` bytes of its edge; the new upper part. The lower one keeps its number, and its
    /// place in the order of use.
    fn split(&mut self, lower: NodeId, at: usize) -> Option<NodeId> {
        let node = self.nodes.peek(&lower)?;
        let (up, engines, first) = (node.up, node.engines.clone(), *node.edge.get(at)?);
        let edge = node.edge.get(..at)?.to_vec();
        let top = *edge.first()?;
        let served = &self.service.engines;
        let engines = engines.into_iter().filter(|engine| served.binary_search(engine).is_ok()).collect();
        let upper = self.add(up, edge, engines);
        self.change(upper, |node| node.adopt(first, lower));
        self.change(lower, |node| {
            node.up = Up::Node(upper);
            node.edge.drain(..at);
            node.edge.shrink_to_fit();
        });
        if let Up::Node(above) = up {
            self.change(above, |node| node.adopt(top, upper));
        }
        Some(upper)
    }

    /// Changes a node and keeps the count of bytes.
    fn change<R>(&mut self, id: NodeId, edit: impl FnOnce(&mut Node) -> R) -> Option<R> {
        let node = self.nodes.peek_mut(&id)?;
        let before = node.bytes();
        let result = edit(node);
        self.bytes = (self.bytes + node.bytes()).saturating_sub(before);
        Some(result)
    }
}

/// How many bytes two texts have in common at their start.
fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    const STEP: usize = 256;
    let steps = a.chunks_exact(STEP).zip(b.chunks_exact(STEP));
    let whole = steps.take_while(|(x, y)| x == y).count() * STEP;
    let tail = a.iter().skip(whole).zip(b.iter().skip(whole));
    whole + tail.take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
