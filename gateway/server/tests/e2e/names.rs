//! Model names that are no names: passed on as they are, and never the way to another model's tokenizer.

use std::path::Path;

use serde_json::json;

use crate::support::{MODEL, Request, Rule, Setup, engine, prompt, served, until};

const MISSES: &str = "loxilb_pd_kv_tier15_miss_reason_total";

/// Puts a model into a store, under the name of a folder.
fn stage(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    for file in std::fs::read_dir(kvgate_tests::tokenizers().join(MODEL)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
}

/// Names in the body, and whether they can be read there.
fn names() -> Vec<(String, bool)> {
    let long = "m".repeat(1 << 20);
    let escaped = "\\u006d".repeat(100_000);
    [
        "..",
        ".",
        "/",
        "../..",
        "../../etc/passwd",
        "/etc/passwd",
        "a/../org/model",
        "./org/model",
        "org//model",
        "org/model/",
        "/org/model",
        "org__model",
        "org/__model",
        "org__/model",
        "%2e%2e",
        "org%2fmodel",
        "org\\\\model",
        "ORG/MODEL",
        "org/model ",
        " org/model",
        "org/mod\\u0000el",
        "org/model\\u0000",
        "\\u0000",
        "..\\u002f..",
        "mod\u{e8}le",
        "\\ud83d\\ude00",
        "\u{202e}ledom",
        "linked",
        "up",
        "self",
        "inside/../linked",
        "tokenizers",
        &long,
        &escaped,
    ]
    .iter()
    .map(|name| ((*name).to_owned(), true))
    .chain(["", "\\ud800"].map(|name| (name.to_owned(), false)))
    .collect()
}

/// The names that have a tokenizer now.
async fn loaded(gateway: &crate::support::Gateway) -> Vec<String> {
    let ready = gateway.ready().await;
    let models = ready["tokenizers"].as_array().unwrap().iter();
    models.map(|t| t["model"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_names_are_passed_on_and_lead_to_no_tokenizer() {
    let engine = engine().await;
    let setup = Setup::new(&[Rule::new("any", &["kv-exact", "round-robin"]).engine(&engine)]).tokenizers();
    let (store, outside) = (setup.folder().join("tokenizers"), setup.folder().join("outside"));
    stage(&store.join("org__model"));
    stage(&outside);
    for (target, link) in [("../outside", "linked"), ("..", "up"), (".", "self")] {
        std::os::unix::fs::symlink(target, store.join(link)).unwrap();
    }
    let gateway = setup.spawn().await;
    let (mut unknown, mut unnamed) = (0.0, 0.0);
    let ids = json!(prompt(1, 40));
    for (name, readable) in names() {
        let shown: String = name.chars().take(40).collect();
        let body = format!("{{\"model\": \"{name}\", \"prompt\": {ids}, \"max_tokens\": 1}}");
        let answer = gateway.send(&Request::post("/v1/completions", body.clone())).await;
        // what the engine makes of the name is its own affair
        assert!(answer.complete && matches!(answer.status, 200 | 400 | 404), "{shown}: {answer:?}");
        let served = served(&engine, answer.id()).unwrap();
        assert_eq!(served.body_hash, xxhash_rust::xxh3::xxh3_64(body.as_bytes()), "{shown}");
        *(if readable { &mut unknown } else { &mut unnamed }) += 1.0;
        gateway.until_metric(MISSES, &["reason=\"tokenize\""], unknown).await;
        gateway.until_metric(MISSES, &["reason=\"model_empty\""], unnamed).await;
        assert_eq!(loaded(&gateway).await, [""; 0], "{shown}");
    }
    // the one name that has that folder
    let request = Request::json(
        "/v1/completions",
        &json!({"model": "org/model", "prompt": prompt(1, 40), "max_tokens": 1}),
    );
    gateway.send(&request).await;
    until("the tokenizer is loaded", async || loaded(&gateway).await == ["org/model"]).await;
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

/// The header that names a model is heard first, and trusted no more.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_in_the_header_is_no_better() {
    let engine = engine().await;
    let setup = Setup::new(&[Rule::new("any", &["kv-exact", "round-robin"]).engine(&engine)]).tokenizers();
    stage(&setup.folder().join("tokenizers/org__model"));
    let gateway = setup.spawn().await;
    let body = json!({"model": MODEL, "prompt": prompt(1, 40), "max_tokens": 1});
    let long = "m".repeat(8 << 10);
    let names = ["..", "../../etc/passwd", "org__model", "org%2fmodel", "mod\u{e8}le", "ORG/MODEL", &long];
    for (at, name) in names.into_iter().enumerate() {
        let answer = gateway.send(&Request::json("/v1/completions", &body).field("x-model", name)).await;
        assert_eq!((answer.status, answer.complete), (200, true), "{name}");
        // a header that is no text names nothing: the body does
        gateway.until_metric(MISSES, &["reason=\"tokenize\""], 1.0 + at as f64).await;
    }
    assert_eq!(loaded(&gateway).await, [""; 0]);
}
