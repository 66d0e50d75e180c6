//! The trie beside a list of texts.
#![allow(clippy::indexing_slicing)]

use super::*;
use proptest::prelude::*;

const ENGINES: u64 = 4;

fn service(generation: u64, engines: impl IntoIterator<Item = u64>, nodes: usize, bytes: usize) -> Service {
    Service {
        generation,
        engines: engines.into_iter().map(EngineId).collect(),
        limits: Limits { nodes, bytes },
    }
}

fn roomy() -> Trie {
    let mut trie = Trie::default();
    trie.serve(&service(1, 0..ENGINES, usize::MAX, usize::MAX));
    trie
}

fn trim(trie: &mut Trie) -> u64 {
    let mut all = 0;
    loop {
        all += trie.trim();
        if !trie.is_over() && trie.unswept.is_empty() {
            return all;
        }
    }
}

/// What the trie says that one engine saw of a text.
fn seen(trie: &Trie, namespace: u64, text: &[u8], engine: u64) -> usize {
    trie.longest(namespace, text, |e| e == EngineId(engine)).bytes
}

/// Counts everything anew from the tops and compares it with what the trie keeps count of.
fn audit(trie: &Trie) {
    let (mut nodes, mut bytes) = (0, 0);
    let mut left: Vec<(Up, NodeId)> =
        trie.tops.iter().map(|(namespace, id)| (Up::Namespace(*namespace), *id)).collect();
    while let Some((up, id)) = left.pop() {
        let node = trie.nodes.peek(&id).expect("a child that is there");
        assert_eq!(node.up, up);
        assert_eq!(node.edge.is_empty(), matches!(up, Up::Namespace(_)));
        assert!(node.engines.is_sorted() && node.children.is_sorted());
        nodes += 1;
        bytes += node.bytes();
        for (first, child) in &node.children {
            let below = trie.nodes.peek(child).expect("a child that is there");
            assert_eq!(below.edge.first(), Some(first));
            left.push((Up::Node(id), *child));
        }
    }
    assert_eq!((nodes, bytes), (trie.nodes(), trie.bytes()));
    // nobody is used later than what is above it: the least recently used one is a leaf
    let order: Vec<NodeId> = trie.nodes.iter().map(|(id, _)| *id).collect();
    let place = |id: NodeId| order.iter().position(|other| *other == id);
    if order.len() < 200 {
        for id in &order {
            if let Some(Up::Node(above)) = trie.nodes.peek(id).map(|node| node.up) {
                assert!(place(above) < place(*id), "a node is used later than the one above it");
            }
        }
    }
}

fn naive(all: &[(u64, Vec<u8>, u64)], namespace: u64, text: &[u8], engine: u64) -> usize {
    let own = all.iter().filter(|(n, _, e)| (*n, *e) == (namespace, engine));
    own.map(|(_, known, _)| known.iter().zip(text).take_while(|(a, b)| a == b).count()).max().unwrap_or(0)
}

fn texts() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0u8..3, 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    #[test]
    fn knows_what_a_list_knows(
        inserts in prop::collection::vec((0u64..2, texts(), 0..ENGINES), 0..40),
        asked in prop::collection::vec((0u64..2, texts()), 20),
    ) {
        let mut trie = roomy();
        for (namespace, text, engine) in &inserts {
            trie.insert(*namespace, text, EngineId(*engine));
            audit(&trie);
        }
        prop_assert_eq!(trim(&mut trie), 0);
        let own = inserts.iter().map(|(namespace, text, _)| (*namespace, text.clone()));
        for (namespace, text) in asked.into_iter().chain(own) {
            let each: Vec<_> = (0..ENGINES).map(|e| naive(&inserts, namespace, &text, e)).collect();
            for engine in 0..ENGINES {
                prop_assert_eq!(seen(&trie, namespace, &text, engine), each[engine as usize]);
            }
            // and of a choice of engines, the ones that saw the most
            for wanted in 0u64..1 << ENGINES {
                let is = |e: u64| wanted & 1 << e != 0;
                let most = (0..ENGINES).filter(|e| is(*e)).map(|e| each[e as usize]).max().unwrap_or(0);
                let found = trie.longest(namespace, &text, |e| is(e.0));
                prop_assert_eq!(found.bytes, most);
                let best = (0..ENGINES).filter(|e| is(*e) && most > 0 && each[*e as usize] == most);
                prop_assert_eq!(found.engines, best.map(EngineId).collect::<Vec<_>>());
                if most == 0 {
                    let others = (0..ENGINES).any(|e| !is(e) && each[e as usize] > 0);
                    prop_assert_eq!(found.others, others);
                }
            }
        }
    }

    /// With little room it forgets, but never says more than is true, nor forgets what it was told last.
    #[test]
    fn stays_within_its_limits_and_says_nothing_false(
        inserts in prop::collection::vec((0u64..2, texts(), 0..ENGINES), 1..60),
        nodes in 3usize..30,
    ) {
        let mut trie = roomy();
        trie.serve(&service(2, 0..ENGINES, nodes, usize::MAX));
        for (at, (namespace, text, engine)) in inserts.iter().enumerate() {
            trie.insert(*namespace, text, EngineId(*engine));
            trim(&mut trie);
            audit(&trie);
            prop_assert!(trie.nodes() <= nodes);
            for engine in 0..ENGINES {
                let known = naive(&inserts[..=at], *namespace, text, engine);
                prop_assert!(seen(&trie, *namespace, text, engine) <= known);
            }
        }
        // no text has more nodes than bytes, and a top
        let (namespace, text, engine) = inserts.last().unwrap();
        if nodes >= 12 {
            prop_assert_eq!(seen(&trie, *namespace, text, *engine), text.len());
        }
    }

    /// Engines that are served no more leave nothing behind, the others lose nothing.
    #[test]
    fn engines_go_with_all_they_saw(
        before in prop::collection::vec((0u64..2, texts(), 0..ENGINES), 0..40),
        stay in prop::collection::btree_set(0..ENGINES, 0..4),
        after in prop::collection::vec((0u64..2, texts(), 0..ENGINES), 0..10),
    ) {
        let mut trie = roomy();
        let mut known = Vec::new();
        for (namespace, text, engine) in before {
            trie.insert(namespace, &text, EngineId(engine));
            known.push((namespace, text, engine));
        }
        trie.serve(&service(2, stay.iter().copied(), usize::MAX, usize::MAX));
        // an answer of the plan before may come late
        trie.serve(&service(1, 0..ENGINES, usize::MAX, usize::MAX));
        for (namespace, text, engine) in after {
            trie.insert(namespace, &text, EngineId(engine));
            known.push((namespace, text, engine));
        }
        known.retain(|(_, _, engine)| stay.contains(engine));
        trim(&mut trie);
        audit(&trie);
        for (namespace, text, engine) in &known {
            prop_assert_eq!(seen(&trie, *namespace, text, *engine), text.len());
        }
        let named = trie.nodes.iter().flat_map(|(_, node)| &node.engines);
        prop_assert!(named.into_iter().all(|engine| stay.contains(&engine.0)));
        prop_assert!(trie.nodes.iter().all(|(_, node)| !node.engines.is_empty()));
    }

    #[test]
    fn common_prefixes(at in 0usize..2000, a in 0usize..600, b in 0usize..600) {
        let (mut left, mut right) = (vec![7u8; at + a], vec![7u8; at + b]);
        let expected = if a > 0 && b > 0 {
            (left[at], right[at]) = (1, 2);
            at
        } else {
            at + a.min(b)
        };
        prop_assert_eq!(common_prefix(&left, &right), expected);
    }
}

/// Memory comes back: after any number of prompts the trie holds no more than it may, and nothing once its engines
/// are gone.
#[test]
fn memory_comes_back_after_churn() {
    const BYTES: usize = 1 << 20;
    let mut trie = Trie::default();
    trie.serve(&service(1, 0..ENGINES, 500, BYTES));
    let mut random = kvgate_core::Random::new(1);
    let mut evicted = 0;
    for turn in 0..5000u64 {
        let mut text = vec![b's'; random.below(200)];
        text.extend((0..random.below(400)).map(|_| random.below(256) as u8));
        text.push(0);
        trie.insert(turn % 3, &text, EngineId(random.below(ENGINES as usize) as u64));
        evicted += trim(&mut trie);
        assert!(trie.nodes() <= 500 && trie.bytes() <= BYTES);
    }
    audit(&trie);
    assert!(trie.nodes() > 250 && evicted > 3000, "{} {evicted}", trie.nodes());
    trie.serve(&service(2, [], 500, BYTES));
    assert_eq!(trim(&mut trie), 0, "nothing is given up for want of room");
    assert_eq!((trie.nodes(), trie.bytes(), trie.tops.len(), trie.unswept.len()), (0, 0, 0, 0));
}

/// However much there is to give up, each answer does a little of it.
#[test]
fn a_lower_limit_is_reached_by_and_by() {
    let mut trie = roomy();
    let text = |n: u32| [&n.to_be_bytes()[..], b"text"].concat();
    (0..3000).for_each(|n| trie.insert(0, &text(n), EngineId(0)));
    let nodes = trie.nodes();
    trie.serve(&service(2, 0..ENGINES, 64, usize::MAX));
    assert!(trie.unswept.is_empty(), "the same engines: there is nothing to look for");
    assert_eq!(trie.trim(), BATCH as u64);
    trie.insert(0, b"new", EngineId(0));
    assert_eq!(trie.nodes(), nodes - BATCH, "nothing is added before there is room");
    trim(&mut trie);
    trie.insert(0, b"new", EngineId(0));
    assert_eq!(seen(&trie, 0, b"new", 0), 3);
    audit(&trie);
    trie.serve(&service(3, 1..ENGINES, 64, usize::MAX));
    assert!(!trie.unswept.is_empty());
    trie.trim();
    assert_eq!((trie.nodes(), trie.bytes()), (0, 0), "the only one that saw anything is gone");
}

#[test]
fn one_conversation_on_one_engine_is_one_node() {
    let mut trie = roomy();
    let text: Vec<u8> = (0..100_000u32).map(|at| (at % 251) as u8).collect();
    for end in (1000..=text.len()).step_by(1000) {
        trie.insert(0, &text[..end], EngineId(1));
    }
    assert_eq!(trie.nodes(), 2, "the top and the conversation");
    assert!(trie.bytes() < text.len() + 1000, "{}", trie.bytes());
    assert_eq!(seen(&trie, 0, &text, 1), text.len());
    audit(&trie);
}

/// A client that makes prompts part at every byte cannot make the walk, which is made under a lock, any longer.
#[test]
fn walks_are_bounded() {
    let mut trie = roomy();
    let mut text = Vec::new();
    for _ in 0..DEPTH + 50 {
        trie.insert(0, &[&text[..], b"b"].concat(), EngineId(0));
        text.push(b'a');
    }
    trie.insert(0, &text, EngineId(1));
    audit(&trie);
    assert_eq!(trie.walk(0, &text).len(), DEPTH);
    for engine in [0, 1] {
        let seen = seen(&trie, 0, &text, engine);
        assert!((DEPTH - 2..=DEPTH).contains(&seen), "{seen}");
    }
}
