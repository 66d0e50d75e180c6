//! Prompts that start alike go to one prefill endpoint.

use kvgate_sim::Fault;
use serde_json::json;

use super::{Pair, request, rule};
use crate::support::{Connection, MODEL, Request, fetch, until};

const PICKS: &str = "kvgate_tier_picks_total";

fn text(prompt: &str) -> Request {
    request(&json!({"model": MODEL, "prompt": prompt, "max_tokens": 2}))
}

/// As it is known, up to so many bytes, and others to make it 500.
fn common(known: &str, bytes: usize, other: char) -> String {
    let others: String = std::iter::repeat_n(other, 500 - bytes).collect();
    known[..bytes].to_owned() + &others
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fifth_of_the_prompt_is_enough_and_less_is_not() {
    let pair = Pair::new(3, 1, rule(&["radix-trie", "round-robin"])).await;
    let known = "known words ".repeat(50);
    let first = pair.went(&text(&known)).await;
    assert_eq!(first.tiers[0], "round-robin");
    assert_eq!(pair.misses("radix-trie", "unseen").await, 1.0);
    let little = pair.went(&text(&common(&known, 99, 'x'))).await;
    assert_eq!(little.tiers[0], "round-robin");
    assert_eq!(pair.misses("radix-trie", "shallow").await, 1.0);
    let enough = pair.went(&text(&common(&known, 105, 'y'))).await;
    assert_eq!((&*enough.tiers[0], enough.prefill), ("radix-trie", first.prefill));
    assert_eq!(pair.gateway.metric(PICKS, &["tier=\"radix-trie\""]).await, 1.0);
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn too_much_on_one_endpoint_is_left_to_the_load() {
    let pair = Pair::new(2, 1, rule(&["radix-trie"])).await;
    let known = "known words ".repeat(30);
    let home = pair.went(&text(&known)).await.prefill;
    pair.prefill[home].fault(Fault { delay_ms: 600_000, ..Fault::default() }, 4);
    let mut held = Vec::new();
    // up to a difference of three they go on coming
    for n in 2..=5 {
        let mut client = Connection::open(pair.gateway.address).await;
        client.send(&text(&known)).await;
        until("it is at the endpoint", async || pair.prefill[home].log().len() == n).await;
        held.push(client);
    }
    let spilled = pair.went(&text(&known)).await;
    assert_eq!((&*spilled.tiers[0], spilled.prefill), ("min-load", 1 - home));
    assert_eq!(pair.misses("radix-trie", "imbalance").await, 1.0);
    assert_eq!(pair.gateway.metric(PICKS, &["tier=\"radix-trie\""]).await, 4.0);
    drop(held);
    pair.is_idle().await;
    // what it was spilled to has seen it by now, too
    super::set(&pair.gateway, &pair.prefill[home], "disabled").await;
    let went = pair.went(&text(&known)).await;
    assert_eq!((&*went.tiers[0], went.prefill), ("radix-trie", 1 - home));
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_any_tier_chose_is_remembered() {
    let ladder = ["session", "radix-trie", "kv-exact"];
    let pair = Pair::new(3, 2, rule(&ladder).top("decode_tiers = [\"radix-trie\"]")).await;
    let prompts: Vec<String> =
        ["first", "second", "third"].map(|word| format!("{word} word ").repeat(40)).into();
    let longer = |prompt: &str| text(&format!("{prompt} and more"));
    // by load
    let by_load = pair.went(&text(&prompts[0]).field("x-conversation-id", "talk")).await;
    assert_eq!(by_load.tiers, ["min-load", "min-load"]);
    // by session
    let pinned = pair.went(&text(&prompts[1]).field("x-conversation-id", "talk")).await;
    assert_eq!((&*pinned.tiers[0], pinned.prefill), ("session", by_load.prefill));
    for prompt in &prompts[..2] {
        let went = pair.went(&longer(prompt)).await;
        assert_eq!((&*went.tiers[0], went.prefill), ("radix-trie", by_load.prefill), "{prompt}");
    }
    // by what it holds
    let holder = (by_load.prefill + 1) % 3;
    assert_eq!(fetch(pair.prefill[holder].address(), &text(&prompts[2])).await.status, 200);
    until("the blocks are known", async || !pair.gateway.held("pair", holder).await.is_empty()).await;
    let held = pair.went(&text(&prompts[2])).await;
    assert_eq!((&*held.tiers[0], held.prefill), ("kv-exact", holder));
    let went = pair.went(&longer(&prompts[2])).await;
    assert_eq!((&*went.tiers[0], went.prefill), ("radix-trie", holder));
    pair.is_idle().await;
    assert_eq!(pair.misses("radix-trie", "decode").await, 6.0, "prompts do not count there");
    assert_eq!(pair.gateway.metric(PICKS, &["tier=\"radix-trie\""]).await, 3.0);
}
