//! The API over real sockets, against answers captured from vLLM 0.32.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Answer, complete, eventually, get, post, request, send, start, start_qwen3};
use kvgate_sim::{Adapter, Ended, FAULT_HEADER, Fault, SimConfig};
use kvgate_tests::fixture;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn config() -> SimConfig {
    SimConfig { none_hash_seed: Some("0".into()), max_model_len: 8192, ..SimConfig::default() }
}

/// A captured answer's body.
fn captured(name: &str) -> String {
    let page = String::from_utf8(fixture(&format!("vllm/http/{name}"))).unwrap().replace('\r', "");
    page.split_once("\n\n").unwrap().1.to_owned()
}

/// Names, order and types of all members; what the members hold is left out.
fn shape(value: &Value) -> String {
    match value {
        Value::Object(members) => {
            let members: Vec<_> =
                members.iter().map(|(name, value)| format!("{name}:{}", shape(value))).collect();
            format!("{{{}}}", members.join(","))
        }
        Value::Array(items) => format!("[{}]", items.first().map(shape).unwrap_or_default()),
        Value::Null => "null".into(),
        Value::Bool(_) => "bool".into(),
        Value::Number(_) => "number".into(),
        Value::String(_) => "text".into(),
    }
}

fn shapes(stream: &str) -> Vec<String> {
    let data = stream.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    data.map(|data| serde_json::from_str(data).map_or(data.to_owned(), |value| shape(&value))).collect()
}

fn chat(content: &str) -> Value {
    json!({ "model": "tiny-qwen3", "messages": [{ "role": "user", "content": content }], "max_tokens": 4 })
}

#[tokio::test]
async fn answers_have_the_shapes_of_captured_ones() {
    let sim = start_qwen3(config()).await;
    let address = sim.address();
    let completion = json!({ "model": "tiny-qwen3", "prompt": "a", "max_tokens": 4 });
    let pairs = [
        (post(address, "/v1/completions", &completion).await, "post_completion.txt"),
        (post(address, "/v1/chat/completions", &chat("Hello")).await, "post_chat.txt"),
        (get(address, "/v1/models").await, "get_v1_models.txt"),
        (get(address, "/version").await, "get_version.txt"),
        (get(address, "/kv_event_sources").await, "get_kv_event_sources.txt"),
        (post(address, "/tokenize", &json!({ "prompt": "Hello, world" })).await, "post_tokenize_prompt.txt"),
        (post(address, "/reset_prefix_cache", &json!({})).await, "post_reset_prefix_cache.txt"),
    ];
    for (answer, name) in &pairs {
        assert_eq!(answer.status, 200, "{name}");
        assert_eq!(shape(&answer.json()), shape(&serde_json::from_str(&captured(name)).unwrap()), "{name}");
    }
    assert_eq!(pairs[3].0.body, captured("get_version.txt").trim_end());

    let mut asked = chat("Hello");
    asked["stream"] = json!(true);
    asked["stream_options"] = json!({ "include_usage": true });
    let stream = post(address, "/v1/chat/completions", &asked).await;
    assert!(stream.head.contains("content-type: text/event-stream; charset=utf-8"), "{}", stream.head);
    assert_eq!(shapes(&stream.body), shapes(&captured("post_chat_stream.txt")));
    assert_eq!(shapes(&stream.body).len(), 7);

    let record = kvgate_tests::fixture_json("vllm/e2e_bs16_sha256cbor_seed0.json");
    let record = record.as_array().unwrap().iter().find(|record| record["name"] == "comp_stream").unwrap();
    let mut asked = record["request"]["body"].clone();
    asked["return_token_ids"] = json!(true);
    let stream = post(address, "/v1/completions", &asked).await;
    assert_eq!(shapes(&stream.body), shapes(record["response"].as_str().unwrap()));
    sim.stop().await;
}

#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() {
    let sim = start(config()).await;
    let mut asked = chat("Tell me a story");
    let whole = post(sim.address(), "/v1/chat/completions", &asked).await.json();
    asked["stream"] = json!(true);
    asked["stream_options"] = json!({ "include_usage": true });
    let stream = post(sim.address(), "/v1/chat/completions", &asked).await;
    assert!(stream.complete && stream.body.ends_with("data: [DONE]\n\n"));
    let events = stream.events();
    let deltas = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
    let text: String = deltas.collect();
    assert_eq!(whole["choices"][0]["message"]["content"], text);
    assert_eq!(text.split_whitespace().count(), 4);
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], 4);

    let other = start(SimConfig { seed: 1, ..config() }).await;
    let twin = start(config()).await;
    let text = async |address| {
        post(address, "/v1/chat/completions", &chat("Tell me a story")).await.json()["choices"][0]["message"]
            .clone()
    };
    assert_eq!(text(twin.address()).await, whole["choices"][0]["message"]);
    assert_ne!(text(other.address()).await, whole["choices"][0]["message"]);
}

#[tokio::test]
async fn cached_tokens_are_told_counted_and_logged() {
    let sim = start(config()).await;
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!(cached(&complete(sim.address(), 1000, 64).await), 0);
    assert_eq!(cached(&complete(sim.address(), 1000, 64).await), 48);
    assert_eq!(cached(&complete(sim.address(), 1000, 65).await), 64);
    let served = sim.log();
    assert_eq!(served.iter().map(|served| served.cached_tokens).collect::<Vec<_>>(), [0, 48, 64]);
    assert!(served.iter().all(|served| served.ended == Ended::Finished && served.status == 200));
    assert_eq!(served[0].body_hash, served[1].body_hash);
    assert_ne!(served[0].body_hash, served[2].body_hash);
    let page = get(sim.address(), "/metrics").await.body;
    for line in [
        "vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"tiny-qwen3\"} 193.0",
        "vllm:prefix_cache_hits_total{engine=\"0\",model_name=\"tiny-qwen3\"} 112.0",
        "vllm:generation_tokens_total{engine=\"0\",model_name=\"tiny-qwen3\"} 3.0",
        "vllm:time_to_first_token_seconds_count{engine=\"0\",model_name=\"tiny-qwen3\"} 3.0",
    ] {
        assert!(page.contains(line), "{line}\n{page}");
    }
    assert!(page.contains("num_gpu_blocks=\"2000\",prefix_caching_hash_algo=\"sha256_cbor\""), "{page}");

    assert!(sim.reset_prefix_cache().await);
    assert_eq!(cached(&complete(sim.address(), 1000, 64).await), 0);
}

#[tokio::test]
async fn salts_and_adapters_keep_prompts_apart() {
    let lora = vec![Adapter { name: "sql".into(), path: "/adapters/sql".into() }];
    let sim = start(SimConfig { lora, ..config() }).await;
    let prompt: Vec<u32> = (0..64).collect();
    let cached = async |body: Value| {
        let answer = post(sim.address(), "/v1/completions", &body).await;
        answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    let bodies = [
        json!({ "prompt": prompt, "max_tokens": 1 }),
        json!({ "prompt": prompt, "max_tokens": 1, "cache_salt": "a" }),
        json!({ "prompt": prompt, "max_tokens": 1, "cache_salt": "b" }),
        json!({ "prompt": prompt, "max_tokens": 1, "model": "sql" }),
        json!({ "prompt": prompt, "max_tokens": 1, "model": "sql", "cache_salt": "a" }),
    ];
    for expected in [0, 48] {
        for body in &bodies {
            assert_eq!(cached(body.clone()).await, expected, "{body}");
        }
    }
    let models = get(sim.address(), "/v1/models").await.json();
    let captured: Value = serde_json::from_slice(&fixture("vllm/http/get_v1_models_lora.json")).unwrap();
    assert_eq!(shape(&models["data"][1]), shape(&captured["data"][1]));
    assert_eq!(
        (&models["data"][1]["id"], &models["data"][1]["parent"]),
        (&json!("sql"), &json!("tiny-qwen3"))
    );
}

#[tokio::test]
async fn several_prompts_and_choices_share_an_answer() {
    let sim = start(config()).await;
    let prompts: Vec<Vec<u32>> = vec![(0..40).collect(), (0..41).collect()];
    let asked = json!({ "prompt": prompts, "max_tokens": 3, "n": 2, "return_token_ids": true });
    let answer = post(sim.address(), "/v1/completions", &asked).await.json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|choice| &choice["index"]).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(choices[2]["prompt_token_ids"].as_array().unwrap().len(), 41);
    assert_ne!(choices[0]["token_ids"], choices[1]["token_ids"]);
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(81), &json!(12))
    );
    let mut asked = asked;
    asked["stream"] = json!(true);
    let stream = post(sim.address(), "/v1/completions", &asked).await;
    let events = stream.events();
    for choice in choices {
        let parts = events.iter().filter(|event| event["choices"][0]["index"] == choice["index"]);
        let text: String = parts.filter_map(|event| event["choices"][0]["text"].as_str()).collect();
        assert_eq!(choice["text"], text);
    }
}

#[tokio::test]
async fn what_vllm_refuses_is_refused() {
    let sim = start(config()).await;
    let message = |answer: &Answer| answer.json()["error"]["message"].as_str().unwrap().to_owned();
    let long: Vec<u32> = vec![1; 9000];
    let cases = [
        (
            json!({ "model": "nope", "prompt": "a" }),
            404,
            "The model `nope` does not exist. Valid aliases: tiny-qwen3.",
        ),
        (json!({ "prompt": long }), 400, "This model's maximum context length is 8192 tokens."),
        (
            json!({ "prompt": "a", "cache_salt": "" }),
            400,
            "Parameter 'cache_salt' must be a non-empty string",
        ),
        (json!({ "prompt": "a", "cache_salt": 5 }), 400, "Parameter 'cache_salt' must be a non-empty string"),
        (json!({ "prompt": "a", "n": 0 }), 400, "refused by the engine: n must be"),
        (json!({ "prompt": "a", "stream": 7 }), 400, "1 validation error:"),
    ];
    for (body, status, start) in cases {
        let answer = post(sim.address(), "/v1/completions", &body).await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert!(message(&answer).starts_with(start), "{answer:?}");
    }
    let json_type = "content-type: application/json\r\n";
    let broken = request(sim.address(), "POST", "/v1/completions", json_type, "{\"prompt\": ").await;
    assert_eq!(broken.status, 400);
    assert!(message(&broken).contains("JSON decode error"), "{broken:?}");
    let text = request(sim.address(), "POST", "/v1/completions", "content-type: text/plain\r\n", "{}").await;
    assert_eq!((text.status, text.body.as_str()), (400, captured("err_text_plain.txt").trim_end()));
    assert_eq!(get(sim.address(), "/no/such/path").await.status, 404);
    assert_eq!(get(sim.address(), "/v1/completions").await.status, 405);
    assert_eq!(get(sim.address(), "/health").await.status, 200);
    let logged: Vec<_> = sim.log().iter().map(|served| served.status).collect();
    assert_eq!(logged, [404, 400, 400, 400, 400, 400, 400, 400]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_its_place_and_blocks() {
    let sim = start(SimConfig { max_concurrency: 1, decode_us: 5000.0, ..config() }).await;
    let body =
        json!({ "prompt": (0..64).collect::<Vec<u32>>(), "max_tokens": 8000, "stream": true }).to_string();
    let json_type = "content-type: application/json\r\n";
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(send(sim.address(), "POST", "/v1/completions", json_type, &body).await);
    }
    eventually("one runs, two wait", async || (sim.stats().running, sim.stats().waiting) == (1, 2)).await;
    drop(clients);
    eventually("all are gone", async || (sim.stats().running, sim.stats().waiting) == (0, 0)).await;
    eventually("all are logged", async || sim.log().iter().all(|served| served.ended == Ended::Aborted))
        .await;
    assert_eq!((sim.stats().aborted, sim.stats().cache_usage), (3, 0.0));
    complete(sim.address(), 0, 64).await;
}

#[tokio::test]
async fn an_engine_that_refuses_finishes_what_it_began() {
    let mut sim = start(SimConfig { decode_us: 5000.0, ..config() }).await;
    let address = sim.address();
    let mut idle = TcpStream::connect(address).await.unwrap();
    idle.write_all(b"GET /health HTTP/1.1\r\nhost: sim\r\n\r\n").await.unwrap();
    let mut byte = [0];
    idle.read_exact(&mut byte).await.unwrap();
    let body = json!({ "prompt": [1, 2, 3], "max_tokens": 40 });
    let busy = tokio::spawn(async move { post(address, "/v1/completions", &body).await });
    eventually("it runs", async || sim.stats().running == 1).await;

    sim.refuse(true).await.unwrap();
    assert_eq!(TcpStream::connect(address).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    let mut rest = Vec::new();
    idle.read_to_end(&mut rest).await.unwrap();
    assert_eq!(busy.await.unwrap().status, 200);

    sim.refuse(false).await.unwrap();
    assert_eq!(sim.address(), address);
    complete(address, 0, 64).await;
    sim.stop().await;
    assert_eq!(TcpStream::connect(address).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn a_restart_breaks_connections_and_forgets_the_cache() {
    let mut sim = start(SimConfig { decode_us: 5000.0, ..config() }).await;
    let address = sim.address();
    complete(address, 0, 64).await;
    let body = json!({ "prompt": [1, 2, 3], "max_tokens": 8000, "stream": true });
    let busy = tokio::spawn(async move { post(address, "/v1/completions", &body).await });
    eventually("it streams", async || sim.log().last().is_some_and(|served| served.output_tokens > 1)).await;
    sim.restart().await.unwrap();
    let broken = busy.await.unwrap();
    assert!(broken.status == 200 && !broken.complete && !broken.body.contains("[DONE]"), "{broken:?}");
    let answer = complete(address, 0, 64).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let ended: Vec<_> = sim.log().iter().map(|served| served.ended).collect();
    assert_eq!(ended, [Ended::Finished, Ended::Aborted, Ended::Finished]);
}

#[tokio::test]
async fn faults_hit_the_requests_they_are_meant_for() {
    let sim = start(config()).await;
    let address = sim.address();
    let body = json!({ "prompt": [1, 2, 3], "max_tokens": 8 });
    sim.fault(Fault { status: Some(503), ..Fault::default() }, 2);
    for expected in [503, 503, 200] {
        assert_eq!(post(address, "/v1/completions", &body).await.status, expected);
    }
    let headers = format!("content-type: application/json\r\n{FAULT_HEADER}: {{\"die_after\": 3}}\r\n");
    let half = request(address, "POST", "/v1/completions", &headers, &body.to_string()).await;
    assert!(half.status == 200 && !half.complete, "{half:?}");
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let cut = request(address, "POST", "/v1/completions", &headers, &streamed.to_string()).await;
    assert!(cut.status == 200 && !cut.complete, "{cut:?}");
    assert_eq!(cut.events().len(), 3, "{cut:?}");
    let ended: Vec<_> = sim.log().iter().map(|served| served.ended).collect();
    assert_eq!(ended[2..], [Ended::Finished, Ended::Aborted, Ended::Aborted]);
    assert!(post(address, "/v1/completions", &streamed).await.complete);
}

/// How a connection ends is for the fault to say: by its close, or by a reset.
#[tokio::test]
async fn faults_close_reset_and_end_connections() {
    let sim = start(config()).await;
    let address = sim.address();
    let body = json!({ "prompt": [1, 2, 3], "max_tokens": 8, "stream": true });
    for (fault, reset) in [
        (Fault { die_after: Some(2), ..Fault::default() }, false),
        (Fault { die_after: Some(2), reset: true, ..Fault::default() }, true),
        (Fault { die_after_bytes: Some(100), reset: true, ..Fault::default() }, true),
        (Fault { no_answer: true, ..Fault::default() }, false),
        (Fault { no_answer: true, reset: true, ..Fault::default() }, true),
    ] {
        sim.fault(fault, 1);
        let headers = "content-type: application/json\r\n";
        let mut stream = send(address, "POST", "/v1/completions", headers, &body.to_string()).await;
        let mut read = Vec::new();
        let ended = stream.read_to_end(&mut read).await;
        assert_eq!(ended.is_err(), reset, "{fault:?}");
        assert!(!String::from_utf8_lossy(&read).contains("[DONE]"), "{fault:?}");
    }
    sim.fault(Fault { end_after: Some(2), ..Fault::default() }, 1);
    let ended = post(address, "/v1/completions", &body).await;
    assert!(ended.complete && !ended.body.contains("[DONE]"), "{ended:?}");
    assert_eq!(ended.events().len(), 2);
}

#[tokio::test]
async fn an_engine_is_slow_and_faulty_by_its_configuration() {
    let fault = "{\"status\": 429, \"retry_after\": 3}".parse().unwrap();
    let sim = start(SimConfig { decode_us: 100.0, slow: 300.0, fault: Some(fault), ..config() }).await;
    let body = json!({ "prompt": [1, 2, 3], "max_tokens": 8 });
    for _ in 0..3 {
        let refused = post(sim.address(), "/v1/completions", &body).await;
        assert_eq!(refused.status, 429);
        assert!(refused.head.contains("retry-after: 3"), "{refused:?}");
    }
    assert_eq!(request(sim.address(), "DELETE", "/sim/faults", "", "").await.status, 204);
    let timed = async || {
        let begun = std::time::Instant::now();
        assert_eq!(post(sim.address(), "/v1/completions", &body).await.status, 200);
        begun.elapsed()
    };
    let least = std::time::Duration::from_millis(7 * 30);
    assert!(timed().await >= least, "a step cannot end before its time");
    assert_eq!(post(sim.address(), "/sim/slow", &json!({ "factor": 600 })).await.status, 204);
    assert!(timed().await >= 2 * least);
    assert!("{\"no_such\": 1}".parse::<Fault>().is_err());
}

#[tokio::test]
async fn a_conversation_finds_its_earlier_turns_in_the_cache() {
    let sim = start_qwen3(config()).await;
    let mut messages =
        vec![json!({ "role": "user", "content": "Tell me of the long war between the river and the sea." })];
    let mut cached = Vec::new();
    for _ in 0..3 {
        let asked = json!({ "messages": messages, "max_tokens": 40 });
        let answer = post(sim.address(), "/v1/chat/completions", &asked).await.json();
        let usage = &answer["usage"];
        cached.push((
            usage["prompt_tokens"].as_u64().unwrap(),
            usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
        ));
        messages.push(answer["choices"][0]["message"].clone());
        messages.push(json!({ "role": "user", "content": "Go on, and say more of the sea." }));
    }
    // all but what the template changes about the last turn, in whole blocks
    for turn in 1..3 {
        assert!(cached[turn].1 + 80 > cached[turn - 1].0 && cached[turn].1 > 0, "{cached:?}");
    }
}

/// Bodies that a real engine got, with the ids it computed on and the tokens it found in its cache.
#[tokio::test]
async fn captured_requests_are_understood_as_the_engine_did() {
    let sim = start_qwen3(config()).await;
    let (mut served, mut refused) = (0, 0);
    for record in kvgate_tests::fixture_json("vllm/e2e_bs16_sha256cbor_seed0.json").as_array().unwrap() {
        let name = record["name"].as_str().unwrap();
        let mut body = record["request"]["body"].clone();
        if record["mode"] == "isolated" {
            assert!(sim.reset_prefix_cache().await);
        }
        body["return_token_ids"] = json!(true);
        let options = body.as_object_mut().unwrap();
        options.remove("stream");
        options.remove("stream_options");
        let answer = post(sim.address(), record["request"]["path"].as_str().unwrap(), &body).await;
        assert_eq!(answer.status, record["status"], "{name}: {answer:?}");
        if record["status"] != 200 {
            refused += 1;
            continue;
        }
        let answer = answer.json();
        let chat = answer["object"] == "chat.completion";
        let ids = |index: usize| {
            if chat { &answer["prompt_token_ids"] } else { &answer["choices"][index]["prompt_token_ids"] }
        };
        let expected = &record["prompt_token_ids"];
        if expected[0].is_array() {
            assert_eq!((ids(0), ids(1)), (&expected[0], &expected[1]), "{name}");
        } else {
            assert_eq!(ids(0), expected, "{name}");
        }
        // a conversation that goes on from what the real model said finds other blocks
        if record["usage"].is_object() && record["mode"] != "warm_followup" {
            let details = |usage: &Value| usage["prompt_tokens_details"].clone();
            assert_eq!(details(&answer["usage"]), details(&record["usage"]), "{name}");
        }
        served += 1;
    }
    assert_eq!((served, refused), (55, 2));
}
