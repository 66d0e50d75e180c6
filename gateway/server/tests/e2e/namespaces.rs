//! Equal tokens that are not the same to an engine.

use serde_json::{Value, json};

use crate::support::{
    BLOCK, Gateway, MODEL, Publisher, Request, Rule, Setup, completion, engine_with, model, prompt, served,
    stored,
};

async fn tier(gateway: &Gateway, body: &Value) -> String {
    let answer = gateway.send(&Request::json("/v1/completions", body)).await;
    assert_eq!((answer.status, answer.complete), (200, true), "{answer:?}");
    answer.tier().to_owned()
}

/// The base model, two adapters and two salts: what is cached for one serves no other.
#[tokio::test(flavor = "multi_thread")]
async fn adapters_and_salts_share_nothing() {
    for contract in ["mode = \"auto\"", "mode = \"strict\"\nalgorithm = \"sha256_cbor\"\nblock_size = 16"] {
        let engine = engine_with(|c| {
            c.lora = ["sql=/adapters/sql", "poems=/adapters/poems"].map(|l| l.parse().unwrap()).into();
        })
        .await;
        let rule = Rule::new("words", &["kv-exact"])
            .matching(&format!("models = [{MODEL:?}, \"sql\", \"poems\"]"))
            .table("tier.kv-exact.lora", "sql = \"/adapters/sql\"\npoems = \"/adapters/poems\"")
            .table("tier.kv-exact.contract", contract)
            .engine(&engine);
        let gateway = Setup::new(&[rule]).start_unready().await;
        gateway.until_metric("loxilb_kv_subscriber_connected", &[], 1.0).await;
        gateway.until_metric("kvgate_tokenizer_ready", &[&format!("model={MODEL:?}")], 1.0).await;
        let ids = prompt(1, 70);
        let bodies =
            [(MODEL, None), ("sql", None), ("poems", None), (MODEL, Some("pepper")), (MODEL, Some("salt"))]
                .map(|(model, salt)| {
                    let mut body = completion(model, &ids);
                    if let Some(salt) = salt {
                        body["cache_salt"] = salt.into();
                    }
                    body
                });
        for (at, body) in bodies.iter().enumerate() {
            assert_eq!(
                tier(&gateway, body).await,
                "min-load",
                "{contract}: {at} finds nothing of the others'"
            );
            gateway.until_blocks("words", 0, (at + 1) * 4).await;
        }
        for (at, body) in bodies.iter().enumerate() {
            let answer = gateway.send(&Request::json("/v1/completions", body)).await;
            assert_eq!(answer.tier(), "kv-exact", "{contract}: {at} finds its own");
            assert_eq!(served(&engine, answer.id()).unwrap().cached_tokens, 64);
        }
    }
}

/// One text, two models: what counts is the tokens of the model that is asked for.
#[tokio::test(flavor = "multi_thread")]
async fn models_with_other_tokenizers_share_nothing() {
    const OTHER: &str = "tiny-qwen3";
    let text = "The quick brown fox jumps over the lazy dog, and the question is who else holds this text: "
        .repeat(4);
    let (engine, mut publisher) = (
        engine_with(|c| {
            c.models.push(OTHER.into());
            c.events = false;
        })
        .await,
        Publisher::bind().await,
    );
    let rule = Rule::new("both", &["kv-exact"])
        .matching(&format!("models = [{MODEL:?}, {OTHER:?}]"))
        .followed(&engine, &publisher.endpoint());
    let gateway = Setup::new(&[rule]).start().await;
    publisher.subscribed().await;
    let ask = |model: &str| json!({"model": model, "prompt": text, "max_tokens": 1});
    for (at, (holds, other)) in [(MODEL, OTHER), (OTHER, MODEL)].into_iter().enumerate() {
        let tokens = model(holds).encode(&text, true).unwrap();
        let hashes = [1, 2];
        publisher
            .publish(
                at as u64,
                &[json!({"type": "AllBlocksCleared"}), stored(&hashes, None, &tokens[..2 * BLOCK])],
            )
            .await;
        gateway.until_held("both", 0, &hashes).await;
        if at > 0 {
            // the hashes are those of before: only the credit tells
            crate::support::until("the second is known", async || {
                tier(&gateway, &ask(holds)).await == "kv-exact"
            })
            .await;
        }
        assert_eq!(tier(&gateway, &ask(holds)).await, "kv-exact");
        assert_eq!(tier(&gateway, &ask(other)).await, "min-load", "{other} finds nothing of {holds}'s");
    }
}

/// Engines of different block sizes, hashes and event forms in one rule, which says nothing of any of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_may_be_mixed() {
    let mut engines = Vec::new();
    for (size, array, bytes, seed) in
        [(16, false, false, None), (32, true, true, Some("7")), (8, true, false, Some(""))]
    {
        engines.push(
            engine_with(|c| {
                c.block_size = size;
                c.none_hash_seed = seed.map(str::to_owned);
                c.event_encoding =
                    if array { kvgate_sim::EventEncoding::Array } else { kvgate_sim::EventEncoding::Map };
                c.hash_form = if bytes { kvgate_sim::HashForm::Bytes } else { kvgate_sim::HashForm::Int };
            })
            .await,
        );
    }
    let gateway = Setup::new(&[Rule::kv("words").engines(&engines)]).start().await;
    for (seed, blocks) in [(1, 4), (2, 2), (3, 8)] {
        let cold = gateway.complete(&prompt(seed, 64)).await;
        let holder = engines.iter().position(|e| e.address().to_string() == cold.endpoint()).unwrap();
        assert_eq!(holder, seed as usize - 1, "in turn");
        gateway.until_blocks("words", holder, blocks).await;
    }
    for seed in [3, 1, 2, 2] {
        let warm = gateway.complete(&prompt(seed, 70)).await;
        let engine = &engines[seed as usize - 1];
        assert_eq!((warm.tier(), warm.endpoint()), ("kv-exact", &*engine.address().to_string()));
        assert_eq!(served(engine, warm.id()).unwrap().cached_tokens, 64);
    }
}

/// One engine under two rules, one of which goes by the engine's own hashes: each looks at it in its way.
#[tokio::test(flavor = "multi_thread")]
async fn two_rules_may_look_at_one_engine_in_two_ways() {
    let engine = engine_with(|c| c.none_hash_seed = Some("17".into())).await;
    let contract = "mode = \"strict\"\nalgorithm = \"sha256_cbor\"\nblock_size = 16\nnone_hash_seed = \"17\"";
    let strict = |host: &str, contract: &str| {
        Rule::new(host, &["kv-exact"])
            .matching(&format!("hosts = [{host:?}]\nmodels = [{MODEL:?}]"))
            .table("tier.kv-exact.contract", contract)
            .engine(&engine)
    };
    let rules = [Rule::kv("auto").engine(&engine), strict("strict", contract)];
    let wrong = strict("wrong", &contract.replace("17", "18"));
    let gateway = Setup::new(&[rules.as_slice(), &[wrong]].concat()).start().await;
    let ask = Request::json("/v1/completions", &completion(MODEL, &prompt(1, 40)));
    gateway.send(&ask).await;
    for rule in ["auto", "strict", "wrong"] {
        gateway.until_blocks(rule, 0, 2).await;
    }
    assert_eq!(gateway.inventory("auto", 0).await["hash_algo"], "auto");
    assert_eq!(gateway.inventory("strict", 0).await["hash_algo"], "sha256_cbor");
    assert_eq!(gateway.send(&ask).await.tier(), "kv-exact");
    assert_eq!(gateway.send(&ask.clone().host("strict")).await.tier(), "kv-exact");
    assert_eq!(
        gateway.send(&ask.clone().host("wrong")).await.tier(),
        "min-load",
        "by another seed nothing matches"
    );
    let hits = async |service: &str| {
        gateway.metric("loxilb_pd_kv_tier15_hits_total", &[&format!("service={service:?}")]).await
    };
    assert_eq!((hits("auto").await, hits("strict").await, hits("wrong").await), (1.0, 1.0, 0.0));
}
