//! Who gets a request, and what is counted of it.

use std::sync::Arc;

use crate::support::{
    Gateway, MODEL, Request, Rule, Setup, completion, engine, engine_with, engines, free_port, prompt,
    served, until,
};

const HITS: &str = "loxilb_pd_kv_tier15_hits_total";
const MISSES: &str = "loxilb_pd_kv_tier15_miss_reason_total";
const FALLTHROUGH: &str = "loxilb_pd_kv_tier15_fallthrough_total";
const REASONS: [&str; 9] = [
    "mode_off",
    "warmup",
    "text_empty",
    "model_empty",
    "tokenize",
    "hashes",
    "no_worker",
    "excluded",
    "shallow",
];

/// Hits by `ep_idx`.
async fn hits(gateway: &Gateway, endpoints: usize) -> Vec<f64> {
    let metrics = gateway.metrics().await;
    (0..endpoints).map(|n| metrics.get(HITS, &[&format!("ep_idx=\"{n}\"")])).collect()
}

/// Misses by reason, and those that fell through.
async fn misses(gateway: &Gateway) -> (Vec<f64>, f64) {
    let metrics = gateway.metrics().await;
    let reasons = REASONS.iter().map(|reason| metrics.get(MISSES, &[&format!("reason=\"{reason}\"")]));
    (reasons.collect(), metrics.get(FALLTHROUGH, &[]))
}

#[tokio::test(flavor = "multi_thread")]
async fn warm_requests_go_to_the_holder() {
    let engines = engines(3).await;
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    let mut holders = Vec::new();
    for seed in 0..3 {
        let cold = gateway.complete(&prompt(seed, 64)).await;
        assert_eq!(cold.tier(), "round-robin");
        let holder = engines.iter().position(|e| e.address().to_string() == cold.endpoint()).unwrap();
        holders.push(holder);
        gateway.until_blocks("words", holder, 4).await;
    }
    let (cold, fallen) = misses(&gateway).await;
    assert_eq!(cold, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0], "all for want of a worker");
    assert_eq!(fallen, 3.0);
    assert_eq!(hits(&gateway, 3).await, [0.0; 3]);
    let mut expected = [0.0; 3];
    for (seed, holder) in [0, 1, 2, 2, 0].map(|seed| (seed, holders[seed as usize])) {
        // longer than what is held, and no multiple of a block
        let warm = gateway.complete(&prompt(seed, 75)).await;
        assert_eq!((warm.tier(), warm.endpoint()), ("kv-exact", &*engines[holder].address().to_string()));
        expected[holder] += 1.0;
        assert_eq!(hits(&gateway, 3).await, expected, "the decision");
        let found: Vec<_> = engines.iter().map(|engine| served(engine, warm.id())).collect();
        assert_eq!(found.iter().flatten().count(), 1, "the delivery: {found:?}");
        let delivered = found[holder].as_ref().unwrap();
        assert_eq!((delivered.status, delivered.cached_tokens), (200, 64));
    }
    assert_eq!(misses(&gateway).await, (cold, fallen));
}

#[tokio::test(flavor = "multi_thread")]
async fn chats_and_streams_are_counted_like_completions() {
    let engines = engines(2).await;
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    let mut messages = vec![serde_json::json!({
        "role": "user",
        "content": "every good question wants an answer that was thought about before it is given to the world, \
                    and so does this one, which is long enough to fill some blocks of sixteen words each",
    })];
    let chat = |messages: &Vec<serde_json::Value>| serde_json::json!({"model": MODEL, "messages": messages, "stream": true, "max_tokens": 4});
    let cold = gateway.send(&Request::json("/v1/chat/completions", &chat(&messages))).await;
    assert_eq!((cold.status, cold.complete, cold.tier()), (200, true, "round-robin"));
    let first = engines.iter().position(|e| e.address().to_string() == cold.endpoint()).unwrap();
    until("the chat is held", async || !gateway.held("words", first).await.is_empty()).await;
    messages.push(serde_json::json!({"role": "assistant", "content": "so it is said"}));
    messages.push(serde_json::json!({"role": "user", "content": "who said that?"}));
    let warm = gateway.send(&Request::json("/v1/chat/completions", &chat(&messages))).await;
    assert_eq!((warm.tier(), warm.endpoint()), ("kv-exact", cold.endpoint()));
    assert_eq!(hits(&gateway, 2).await[first], 1.0);
    assert!(served(&engines[first], warm.id()).unwrap().cached_tokens > 0);
    assert!(warm.body.ends_with(b"data: [DONE]\n\n"));
}

/// Four rules told apart by host; each request misses for one reason.
#[tokio::test(flavor = "multi_thread")]
async fn every_miss_has_its_reason() {
    let words = engine().await;
    let unstaged = engine_with(|c| {
        (c.models, c.tokenizer) = (vec!["not/staged".into()], Some(MODEL.into()));
    })
    .await;
    let on = |host: &str, model: &str| format!("hosts = [{host:?}]\nmodels = [{model:?}]");
    let strict = "mode = \"strict\"\nalgorithm = \"xxhash_cbor\"\nblock_size = 16";
    let gateway = Setup::new(&[
        Rule::kv("words").engine(&words),
        Rule::new("unstaged", &["kv-exact"]).matching(&on("unstaged", "not/staged")).engine(&unstaged),
        Rule::new("plain", &["round-robin"]).matching(&on("plain", MODEL)).engine(&words),
        Rule::new("strict", &["kv-exact"])
            .matching(&on("strict", MODEL))
            .table("tier.kv-exact.contract", strict)
            .engine(&words),
    ])
    .start()
    .await;
    let mut expected = (vec![0.0; REASONS.len()], 0.0);
    assert_eq!(misses(&gateway).await, expected, "all of them exist from the start");
    let long = prompt(1, 40);
    let json = |body: serde_json::Value| Request::json("/v1/completions", &body);
    for (reason, status, request) in [
        ("mode_off", 200, json(completion(MODEL, &long)).host("plain")),
        ("text_empty", 400, json(serde_json::json!({"model": MODEL}))),
        ("text_empty", 404, Request::json("/v1/unheard/of", &completion(MODEL, &long))),
        ("model_empty", 200, json(serde_json::json!({"prompt": long, "max_tokens": 1}))),
        ("model_empty", 400, Request::text("/v1/completions", "no JSON at all")),
        ("model_empty", 200, Request::get("/v1/models")),
        ("tokenize", 200, json(completion("not/staged", &long)).host("unstaged")),
        ("tokenize", 400, json(serde_json::json!({"model": MODEL, "prompt": [5, 999_999]}))),
        ("shallow", 200, json(completion(MODEL, &prompt(1, 15)))),
        ("hashes", 200, json(completion(MODEL, &long)).host("strict")),
        ("no_worker", 200, json(completion(MODEL, &prompt(2, 16)))),
    ] {
        let answer = gateway.send(&request).await;
        assert_eq!((answer.status, answer.complete), (status, true), "{reason}: {answer:?}");
        let at = REASONS.iter().position(|r| *r == reason).unwrap();
        expected.0[at] += 1.0;
        expected.1 += f64::from(reason != "mode_off");
        until(&format!("one more {reason}"), async || misses(&gateway).await == expected).await;
    }
    // the text passed through untouched, and so did what the engine has to say about it
    let text = words.log().into_iter().find(|s| s.body_bytes == "no JSON at all".len()).unwrap();
    assert_eq!(text.body_hash, xxhash_rust::xxh3::xxh3_64(b"no JSON at all"));
}

/// A tokenizer that is staged while the gateway runs is used from then on.
#[tokio::test(flavor = "multi_thread")]
async fn a_tokenizer_may_come_later() {
    let engine =
        engine_with(|c| (c.models, c.tokenizer) = (vec!["org/late".into()], Some(MODEL.into()))).await;
    let rule = Rule::new("late", &["kv-exact"]).matching("models = [\"org/late\"]").engine(&engine);
    let setup = Setup::new(&[rule]).tokenizers();
    let staged = setup.folder().join("tokenizers/org__late");
    let gateway = setup.start_unready().await;
    gateway.until_metric("loxilb_kv_subscriber_connected", &[], 1.0).await;
    let ask = Request::json("/v1/completions", &completion("org/late", &prompt(1, 40)));
    assert_eq!(gateway.send(&ask).await.tier(), "min-load");
    assert_eq!(gateway.metric(MISSES, &["reason=\"tokenize\""]).await, 1.0);
    std::fs::create_dir_all(&staged).unwrap();
    for file in ["tokenizer_config.json", "tokenizer.json"] {
        std::fs::copy(kvgate_tests::tokenizers().join(MODEL).join(file), staged.join(file)).unwrap();
    }
    until("it is used", async || gateway.send(&ask).await.tier() == "kv-exact").await;
}

/// Many at once: each answer comes from where it says, by the tier that it says, and is counted there.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_said_is_true_under_load_too() {
    let engines = engines(3).await;
    let gateway = Arc::new(Setup::new(&[Rule::kv("words").engines(&engines)]).start().await);
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..12_u32 {
        let gateway = gateway.clone();
        clients.spawn(async move {
            let mut answers = Vec::new();
            for at in 0..15 {
                answers.push(gateway.complete(&prompt((client * 7 + at * 11) % 30, 64)).await);
            }
            answers
        });
    }
    let answers: Vec<_> = clients.join_all().await.into_iter().flatten().collect();
    assert_eq!(answers.len(), 180);
    let mut expected = [0.0; 3];
    for answer in &answers {
        let at = engines.iter().position(|e| e.address().to_string() == answer.endpoint()).unwrap();
        assert!(served(&engines[at], answer.id()).is_some(), "delivered elsewhere: {answer:?}");
        expected[at] += f64::from(answer.tier() == "kv-exact");
    }
    assert_eq!(engines.iter().map(|e| e.log().len()).sum::<usize>(), 180);
    // a hit is a choice of who held some of it; who relieved another, or was about to hold some, may have held none
    let metrics = gateway.metrics().await;
    for (n, chosen) in expected.iter().enumerate() {
        let of = |name| metrics.get(name, &[&format!("ep_idx=\"{n}\"")]);
        let certain = of(HITS) + of("kvgate_kv_speculative_picks_total");
        let perhaps = of("loxilb_pd_kv_tier15_spills_total") + of("loxilb_pd_kv_tier15_cold_seeds_total");
        assert!(certain <= *chosen && *chosen <= certain + perhaps, "{certain} {chosen} {perhaps}");
    }
    let (reasons, fallen) = misses(&gateway).await;
    let fell = answers.iter().filter(|answer| answer.tier() == "round-robin").count() as f64;
    assert_eq!((reasons.iter().sum::<f64>(), fallen), (fell, fell));
    assert!(expected.iter().sum::<f64>() > 60.0, "{expected:?}");
    gateway.until_idle().await;
}

/// Long texts are tokenised apart from the threads that serve.
#[tokio::test(flavor = "multi_thread")]
async fn long_texts_are_routed_like_short_ones() {
    let engines = engines(2).await;
    let rule = Rule::kv("words").table("timeouts", "prepare = \"10s\"").engines(&engines);
    let gateway = Setup::new(&[rule]).start().await;
    let text =
        |n: usize| (0..n).map(|at| format!("the {at} words of a long story are told, ")).collect::<String>();
    let ask = |n| serde_json::json!({"model": MODEL, "prompt": text(n), "max_tokens": 1});
    let cold = gateway.send(&Request::json("/v1/completions", &ask(700))).await;
    assert_eq!((cold.status, cold.tier()), (200, "round-robin"));
    let holder = engines.iter().position(|e| e.address().to_string() == cold.endpoint()).unwrap();
    let blocks = served(&engines[holder], cold.id()).unwrap().prompt_tokens / 16;
    assert!(blocks > 500, "{blocks}");
    gateway.until_blocks("words", holder, blocks).await;
    let warm = gateway.send(&Request::json("/v1/completions", &ask(900))).await;
    assert_eq!((warm.tier(), warm.endpoint()), ("kv-exact", cold.endpoint()));
    assert!(served(&engines[holder], warm.id()).unwrap().cached_tokens > 7000);
}

/// The smallest rule file: all else is as most have it, and where the events are follows from the address.
#[tokio::test(flavor = "multi_thread")]
async fn an_address_is_enough() {
    let (events, replay) = loop {
        let (a, b) = (free_port().port(), free_port().port());
        if a < b {
            break (a, b);
        }
    };
    let engine = engine_with(|c| {
        (c.address, c.event_port, c.replay_port) = (([127, 0, 0, 1], 0).into(), events, replay);
    })
    .await;
    let setup = Setup::new(&[]);
    let (port, offset) = (engine.address().port(), replay - events);
    setup.write_text(
        "words",
        &format!(
            "[events]\nport = {events}\nreplay_port_offset = {offset}\n[[endpoint]]\naddress = \"localhost:{port}\"\n"
        ),
    );
    let gateway = setup.start().await;
    until("the prompt is held, and its tokenizer loaded", async || {
        gateway.complete(&prompt(1, 40)).await.tier() == "kv-exact"
    })
    .await;
    assert_eq!(gateway.held("words", 0).await.len(), 2);
}

/// The decision is shown to whom the rule allows it.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_may_ask_why() {
    let engines = engines(2).await;
    let open = Rule::kv("open").top("explain = true").engines(&engines);
    let closed = Rule::new("closed", &["kv-exact"]).matching("hosts = [\"closed\"]").engines(&engines);
    let gateway = Setup::new(&[open, closed]).start().await;
    let ask = || Request::json("/v1/completions", &completion(MODEL, &prompt(1, 40)));
    let asked = || ask().field("x-kvgate-explain", "1");
    let told = |answer: &crate::support::Answer| -> serde_json::Value {
        serde_json::from_str(answer.field("x-kvgate-decision").unwrap()).unwrap()
    };
    let cold = gateway.send(&asked()).await;
    let why = told(&cold);
    assert_eq!(why["attempts"][0]["steps"][0], serde_json::json!({"tier": "kv-exact", "miss": "no_worker"}));
    assert_eq!(why["attempts"][0]["winner"]["address"], cold.endpoint());
    let holder = engines.iter().position(|e| e.address().to_string() == cold.endpoint()).unwrap();
    gateway.until_blocks("open", holder, 2).await;
    let why = told(&gateway.send(&asked()).await);
    assert_eq!(why["attempts"][0]["winner"]["tier"], "kv-exact");
    assert_eq!(why["attempts"][0]["candidates"][0]["overlap"], 32);
    for silent in [ask(), ask().field("x-kvgate-explain", "0"), asked().host("closed")] {
        assert_eq!(gateway.send(&silent).await.field("x-kvgate-decision"), None, "{silent:?}");
    }
}
