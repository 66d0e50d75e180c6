//! Which rule serves a request.

use serde_json::json;

use crate::support::{
    Answer, Connection, Gateway, Request, Rule, Setup, completion, engine_with, free_port, prompt, served,
};

/// An engine that goes by this name only.
async fn named(model: &str) -> kvgate_sim::Sim {
    engine_with(|c| {
        (c.models, c.tokenizer) = (vec![model.into()], Some(crate::support::MODEL.into()));
        c.events = false;
    })
    .await
}

fn rule(name: &str, matching: &str, engine: &kvgate_sim::Sim) -> Rule {
    Rule::new(name, &["round-robin"]).matching(matching).engine(engine)
}

async fn models(gateway: &Gateway, request: Request) -> String {
    let answer = gateway.send(&request).await;
    match answer.status {
        200 => answer.json()["data"][0]["id"].as_str().unwrap().to_owned(),
        _ => answer.code(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn listener_before_host_before_path() {
    let mut engines = Vec::new();
    for name in ["any", "by-path", "by-longer-path", "by-host", "by-listener"] {
        engines.push(named(name).await);
    }
    let second = free_port();
    let gateway = Setup::new(&[
        rule("a", "path_prefix = \"/v1\"", &engines[1]),
        rule("b", "path_prefix = \"/v1/models\"", &engines[2]),
        rule("c", "hosts = [\"LLM.example\"]", &engines[3]),
        rule("d", "listener = \"inner\"", &engines[4]),
        rule("e", "path_prefix = \"/other\"", &engines[0]),
    ])
    .process(&format!("[[listener]]\nname = \"inner\"\naddress = \"{second}\"\n"))
    .start()
    .await;
    let get = Request::get;
    assert_eq!(models(&gateway, get("/v1/models")).await, "by-longer-path");
    assert_eq!(models(&gateway, get("/v1/models?x=/other")).await, "by-longer-path");
    assert_eq!(models(&gateway, get("/v1/models").host("llm.EXAMPLE:80")).await, "by-host");
    assert_eq!(models(&gateway, get("/v1/models").host("xllm.example")).await, "by-longer-path");
    let inner = crate::support::fetch(second, &get("/v1/models").host("llm.example")).await;
    assert_eq!(inner.json()["data"][0]["id"], "by-listener");
    assert_eq!(inner.field("x-kvgate-endpoint"), None, "this listener keeps that to itself");
    for path in ["/", "/v2", "/v1x", "/otherwise", "/%76%31/models"] {
        let refused = gateway.send(&get(path)).await;
        assert_eq!((refused.status, refused.complete), (503, true), "{path}");
        assert_eq!(refused.code(), "no_route");
        assert!(!refused.id().is_empty());
    }
    assert_eq!(gateway.metric("kvgate_errors_total", &["service=\"\"", "code=\"no_route\""]).await, 5.0);
    let unheard = gateway.send(&get("/v1/elsewhere")).await;
    assert_eq!(unheard.status, 404, "the engine's own word");
    assert_eq!(unheard.endpoint(), engines[1].address().to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_chooses_among_rules_that_fit() {
    let (a, b, rest) = (named("org/A").await, named("b").await, named("rest").await);
    let ask = |model: &str| Request::json("/v1/completions", &completion(model, &prompt(1, 20)));
    let gateway =
        Setup::new(&[rule("1", "models = [\"org/A\"]", &a), rule("2", "models = [\"b\", \"c\"]", &b)])
            .start()
            .await;
    let at = |answer: &Answer| answer.endpoint().to_owned();
    let (to_a, to_b) = (a.address().to_string(), b.address().to_string());
    // one connection: each request goes its own way
    let mut client = Connection::open(gateway.address).await;
    for (request, endpoint, status) in [
        (ask("org/A"), &to_a, 200),
        (ask("b"), &to_b, 200),
        (ask("c"), &to_b, 404),
        (ask("b").field("X-Model", "org/A"), &to_a, 404),
        (ask("nobody's").field("x-model", "b"), &to_b, 404),
        (ask("org/A"), &to_a, 200),
    ] {
        client.send(&request).await;
        let answer = client.answer().await;
        assert_eq!((at(&answer), answer.status), (endpoint.clone(), status), "{request:?}");
    }
    for model in ["org/a", "org", "d", "org/A ", ""] {
        client.send(&ask(model)).await;
        let answer = client.answer().await;
        if model.is_empty() {
            assert_eq!(at(&answer), to_a, "an empty name is none");
            continue;
        }
        assert_eq!(
            (answer.status, answer.complete, answer.code().as_str()),
            (503, true, "model_unavailable")
        );
        assert!(answer.json()["error"]["message"].as_str().unwrap().contains(model));
    }
    let huge = gateway.send(&ask(&"m".repeat(1 << 20))).await;
    assert_eq!((huge.code().as_str(), huge.body.len() < 1000), ("model_unavailable", true));
    // who names no model gets the most specific rule there is
    for request in [Request::get("/v1/models"), Request::json("/v1/completions", &json!({"prompt": "hello"}))]
    {
        assert_eq!(at(&gateway.send(&request).await), to_a, "{request:?}");
    }
    drop(gateway);
    let gateway = Setup::new(&[rule("1", "models = [\"org/A\"]", &a), rule("0", "", &rest)]).start().await;
    assert_eq!(at(&gateway.send(&ask("org/A")).await), to_a);
    assert_eq!(at(&gateway.send(&ask("whatever")).await), rest.address().to_string());
    assert_eq!(at(&gateway.send(&Request::get("/v1/models")).await), rest.address().to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_keep_their_ids_or_get_one() {
    let engine = named("m").await;
    let gateway = Setup::new(&[rule("1", "", &engine)]).start().await;
    let ask = || Request::json("/v1/completions", &completion("m", &prompt(1, 20)));
    let kept = gateway.send(&ask().field("X-Request-ID", "client's own: 7")).await;
    assert_eq!(kept.id(), "client's own: 7");
    assert!(served(&engine, kept.id()).is_some());
    let (first, second) = (gateway.send(&ask()).await, gateway.send(&ask()).await);
    assert_ne!(first.id(), second.id());
    for made in [first, second] {
        assert!(made.id().len() == 32 && made.id().bytes().all(|b| b.is_ascii_hexdigit()), "{}", made.id());
        assert!(served(&engine, made.id()).is_some());
    }
    for unfit in ["", &"x".repeat(300)] {
        let replaced = gateway.send(&ask().field("x-request-id", unfit)).await;
        assert_eq!(replaced.id().len(), 32);
        assert!(served(&engine, replaced.id()).is_some());
    }
    let refused = gateway.send(&Request::text("/v1/completions", "?").field("x-request-id", "seen")).await;
    assert_eq!((refused.status, refused.id()), (400, "seen"), "the engine's errors too");
}
