//! Prefill and decode engines over real sockets: what is handed over is not paid for again.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use bytes::Bytes;
use common::{Answer, eventually, post, start};
use kvgate_engines::EngineKind;
use kvgate_engines::pd::{Next, PrefillAnswer};
use kvgate_sim::{Ended, Fault, Role, Sim, SimConfig};
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";

fn config(role: Role) -> SimConfig {
    SimConfig { none_hash_seed: Some("0".into()), role, ..SimConfig::default() }
}

async fn pair() -> (Sim, Sim) {
    (start(config(Role::Prefill)).await, start(config(Role::Decode)).await)
}

/// The prefill leg of a prompt of `count` ids, as gateways send it.
fn prefill(count: u32) -> Value {
    let params = json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
        "remote_host": null, "remote_port": null,
    });
    json!({ "prompt": (0..count).collect::<Vec<_>>(), "max_tokens": 1, "stream": false, "kv_transfer_params": params })
}

fn decode(count: u32, params: &Value) -> Value {
    json!({ "prompt": (0..count).collect::<Vec<_>>(), "max_tokens": 4, "kv_transfer_params": params })
}

async fn params(sim: &Sim, count: u32) -> Value {
    let answer = post(sim.address(), COMPLETIONS, &prefill(count)).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "length");
    answer.json()["kv_transfer_params"].clone()
}

fn received(sim: &Sim) -> (usize, usize) {
    let served = sim.log().pop().unwrap();
    (served.cached_tokens, served.received_tokens)
}

#[tokio::test]
async fn a_decode_engine_pays_for_no_prompt_that_was_prefilled() {
    let (one, other) = pair().await;
    let params = params(&one, 100).await;
    for (name, value) in [
        ("do_remote_prefill", json!(true)),
        ("do_remote_decode", json!(false)),
        ("remote_host", json!("127.0.0.1")),
        ("remote_port", json!(one.address().port())),
        ("remote_num_tokens", json!(100)),
        ("transfer_mode", json!("pull")),
    ] {
        assert_eq!(params[name], value, "{name}");
    }
    assert_eq!(params["remote_block_ids"][0].as_array().unwrap().len(), 7);
    assert_eq!(params.as_object().unwrap().len(), 14);

    let answer = post(other.address(), COMPLETIONS, &decode(100, &params)).await;
    assert_eq!((answer.status, received(&other)), (200, (99, 99)));
    assert_eq!(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], 99);
    assert_eq!(other.stats().cached_tokens, 0, "not from its own cache");
    assert_eq!(received(&one), (0, 0));

    // streams too; and what the decode engine holds by now it need not fetch
    let params = self::params(&one, 100).await;
    let mut body = decode(100, &params);
    body["stream"] = json!(true);
    let answer = post(other.address(), COMPLETIONS, &body).await;
    assert_eq!((answer.complete, received(&other)), (true, (99, 3)));
}

#[tokio::test]
async fn without_parameters_the_decode_engine_prefills() {
    let (one, other) = pair().await;
    for none in [Value::Null, json!({}), json!({ "do_remote_prefill": true }), params(&one, 15).await] {
        assert_eq!(post(other.address(), COMPLETIONS, &decode(100, &none)).await.status, 200);
        assert_eq!(received(&other), (if other.log().len() == 1 { 0 } else { 96 }, 0), "{none}");
    }
    assert_eq!(params(&one, 15).await, Value::Null, "no block is full");
    assert_eq!(params(&other, 100).await, Value::Null, "a decode engine hands nothing over");
    let given = params(&one, 100).await;
    let any = start(config(Role::Any)).await;
    assert_eq!(post(any.address(), COMPLETIONS, &decode(100, &given)).await.status, 200);
    assert_eq!((received(&any), params(&any, 100).await), ((0, 0), Value::Null));
    one.fault(Fault { no_params: true, ..Fault::default() }, 1);
    assert_eq!(params(&one, 100).await, Value::Null);
    assert!(params(&one, 100).await.is_object());
}

#[tokio::test]
async fn wrong_parameters_are_refused() {
    let (mut one, other) = pair().await;
    let refused = async |params: &Value, count: u32| -> bool {
        let answer = post(other.address(), COMPLETIONS, &decode(count, params)).await;
        let wording = json!({
            "message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500,
        });
        answer.status == 500 && answer.json()["error"] == wording
    };
    let good = params(&one, 100).await;
    let spoilt = |name: &str, value: Value| {
        let mut params = good.clone();
        params[name] = value;
        params
    };
    assert!(refused(&spoilt("remote_engine_id", json!("no such engine")), 100).await);
    assert!(refused(&spoilt("remote_request_id", json!("no such request")), 100).await);
    assert!(refused(&spoilt("remote_block_ids", json!([[1, 2, 3]])), 100).await);
    assert!(refused(&spoilt("remote_port", json!(other.address().port())), 100).await);
    assert!(refused(&good, 101).await, "another prompt");
    assert!(!refused(&good, 100).await);
    assert!(refused(&good, 100).await, "used already");

    let before = params(&one, 100).await;
    one.restart().await.unwrap();
    assert!(refused(&before, 100).await, "the blocks went with the process");
    let before = params(&one, 100).await;
    one.stop().await;
    assert!(refused(&before, 100).await, "nobody there");

    let hasty = start(SimConfig { transfer_lease_ms: 0, ..config(Role::Prefill) }).await;
    assert!(refused(&params(&hasty, 100).await, 100).await, "expired");
}

/// The gateway's own plan of the legs, against these engines.
#[tokio::test]
async fn the_planned_legs_hand_a_prompt_over() {
    let (one, other) = pair().await;
    let flow = EngineKind::by_name("vllm").unwrap().connector("nixl").unwrap().flow;
    let path = "/v1/chat/completions";
    let content =
        "Tell me of the long war between the river and the sea, and of those who lived to see its end.";
    let body = json!({
        "messages": [{ "role": "user", "content": content }], "stream": true, "min_tokens": 3, "max_tokens": 5,
        "stream_options": { "include_usage": true }, "max_completion_tokens": 5,
    });
    let body = Bytes::from(body.to_string());
    let send = async |sim: &Sim, body: &Bytes| {
        let text = std::str::from_utf8(body).unwrap();
        common::request(sim.address(), "POST", path, "content-type: application/json\r\n", text).await
    };
    let prefilled = send(&one, &flow.start(path, &body).unwrap()).await;
    let answer = PrefillAnswer::Answered { status: prefilled.status, body: prefilled.body.as_bytes() };
    let Next::Decode(planned) = flow.next(&body, answer) else { panic!("{prefilled:?}") };
    let decoded = send(&other, &planned).await;
    assert!(decoded.complete && decoded.body.ends_with("data: [DONE]\n\n"), "{decoded:?}");
    let (first, second) = (one.log().remove(0), other.log().remove(0));
    assert_eq!((first.output_tokens, first.received_tokens), (1, 0));
    assert_eq!((second.output_tokens, second.received_tokens), (5, second.prompt_tokens - 1));

    let refused = send(&other, &planned).await;
    assert_eq!(refused.status, 500, "the blocks are fetched already");
    assert!(send(&other, &flow.alone(&body)).await.complete);
}

async fn ask_for(sim: &Sim, fault: Value) {
    let answer = post(sim.address(), "/sim/faults", &fault).await;
    assert_eq!(answer.status, 204, "{answer:?}");
}

#[tokio::test]
async fn faults_and_the_log_are_had_over_http() {
    let sim = start(config(Role::Any)).await;
    let address = sim.address();
    let asked = json!({ "prompt": [1, 2, 3], "max_tokens": 8 });
    let mut streamed = asked.clone();
    streamed["stream"] = json!(true);
    let send = async |body: &Value| -> Answer { post(address, COMPLETIONS, body).await };

    ask_for(&sim, json!({ "fault": { "status": 503, "retry_after": 7 } })).await;
    let answer = send(&asked).await;
    assert!(answer.status == 503 && answer.head.contains("retry-after: 7"), "{answer:?}");
    for body in [&asked, &streamed] {
        ask_for(&sim, json!({ "fault": { "no_answer": true } })).await;
        let answer = send(body).await;
        assert_eq!((answer.status, answer.head.as_str()), (0, ""), "{answer:?}");
        ask_for(&sim, json!({ "fault": { "die_after_bytes": 10 }, "times": 1 })).await;
        let answer = send(body).await;
        assert_eq!((answer.status, answer.body.len(), answer.complete), (200, 10, false), "{answer:?}");
        // more than there is: nothing happens
        ask_for(&sim, json!({ "fault": { "die_after_bytes": 1_000_000 } })).await;
        assert!(send(body).await.complete);
    }
    ask_for(&sim, json!({ "fault": { "status": 400 }, "times": 1000 })).await;
    assert_eq!(send(&asked).await.status, 400);
    assert_eq!(common::request(address, "DELETE", "/sim/faults", "", "").await.status, 204);
    assert_eq!(send(&asked).await.status, 200);
    assert_eq!(post(address, "/sim/faults", &json!({ "fault": { "typo": 1 } })).await.status, 422);

    let log = common::get(address, "/sim/log").await.json();
    let ended = |index: usize| log[index]["ended"].as_str().unwrap();
    assert_eq!(log.as_array().unwrap().len(), 9);
    assert_eq!((ended(0), ended(1), ended(2), ended(3)), ("finished", "aborted", "aborted", "finished"));
    assert_eq!(serde_json::from_str::<Value>(log[3]["body"].as_str().unwrap()).unwrap(), asked);
    assert_eq!(log[3]["path"], COMPLETIONS);
}

#[tokio::test]
async fn an_answer_that_stalls_ends_with_its_client() {
    use tokio::io::AsyncReadExt;
    let sim = start(config(Role::Any)).await;
    let kind = "content-type: application/json\r\n";
    for (fault, body, part) in [
        (
            Fault { stall_after: Some(3), ..Fault::default() },
            json!({ "prompt": [1], "stream": true }),
            "data: ",
        ),
        (Fault { stall_after: Some(1), ..Fault::default() }, json!({ "prompt": [1] }), "{\"id\""),
        (Fault { delay_ms: 600_000, ..Fault::default() }, json!({ "prompt": [1] }), ""),
    ] {
        sim.fault(fault, 1);
        let mut client = common::send(sim.address(), "POST", COMPLETIONS, kind, &body.to_string()).await;
        let mut got = String::new();
        while !part.is_empty() && got.matches(part).count() < fault.stall_after.unwrap() {
            let mut piece = vec![0; 4096];
            let length = client.read(&mut piece).await.unwrap();
            assert!(length > 0, "{got}");
            got.push_str(std::str::from_utf8(&piece[..length]).unwrap());
        }
        eventually("it is served", async || sim.log().last().is_some_and(|last| last.ended == Ended::Open))
            .await;
        drop(client);
        let all = async || sim.log().iter().all(|served| served.ended == Ended::Aborted);
        eventually("the engine sees the client leave", all).await;
    }
    assert_eq!(sim.log().len(), 3);
}
