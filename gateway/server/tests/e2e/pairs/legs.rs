//! What each leg sends.

use kvgate_sim::{Ended, Fault};
use serde_json::{Value, json};

use super::{Pair, attempts, body, request, rule, sent};
use crate::support::{MODEL, Request, prompt};

/// Everything that a prefill must not be asked, in forms that a reader of JSON may lose.
fn written() -> String {
    let prompt: Vec<_> = prompt(1, 64).iter().map(ToString::to_string).collect();
    format!(
        r#"{{ "model":"{MODEL}", "prompt":[{}],
 "max_completion_tokens": 6, "min_tokens":2, "n":1, "logprobs":null, "stream" : true, "stream_options":{{"include_usage":true}},
 "user":"\u00e9 max_tokens \"stream\":true", "metadata":{{"max_tokens":7,"stream":true}}, "temperature":1.0E0 }}"#,
        prompt.join(",")
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn each_leg_is_sent_what_it_needs_and_nothing_else() {
    let pair = Pair::small().await;
    let written = written();
    let asked = Request::post("/v1/completions", written.as_str())
        .field("x-request-id", "one")
        .field("x-own", "kept");
    let answer = pair.gateway.send(&asked.field("accept-encoding", "gzip")).await;
    assert_eq!((answer.status, answer.complete, answer.id()), (200, true, "one"), "{answer:?}");
    assert_eq!(answer.field("content-type"), Some("text/event-stream; charset=utf-8"));
    assert!(String::from_utf8_lossy(&answer.body).ends_with("data: [DONE]\n\n"));
    assert_eq!(answer.endpoint(), pair.decode[0].address().to_string());
    assert_eq!(answer.field("x-kvgate-prefill-endpoint"), Some(&*pair.prefill[0].address().to_string()));

    let (prefill, decode) = (pair.prefill[0].log(), pair.decode[0].log());
    let ([first], [second]) = (prefill.as_slice(), decode.as_slice()) else {
        panic!("{prefill:?} {decode:?}")
    };
    assert_eq!((first.request_id.as_deref(), second.request_id.as_deref()), (Some("one"), Some("one")));
    let params = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
    let expected = written
        .replace("\"max_completion_tokens\": 6", "\"max_completion_tokens\": 1")
        .replace(" \"min_tokens\":2,", "")
        .replace("\"stream\" : true", "\"stream\" : false")
        .replace(" \"stream_options\":{\"include_usage\":true},", "")
        .replace("1.0E0 ", &format!("1.0E0,\"max_tokens\":1,\"kv_transfer_params\":{params} "));
    assert_eq!(sent(first), expected);
    // the answer's parameters stand in the untouched body
    let decode = sent(second);
    let (start, rest) = decode.split_once(",\"kv_transfer_params\":").unwrap();
    let (given, end) = rest.rsplit_once('}').unwrap();
    assert_eq!(format!("{start} }}{end}"), written);
    let given: Value = serde_json::from_str(given.trim_end()).unwrap();
    assert_eq!((&given["do_remote_prefill"], &given["do_remote_decode"]), (&json!(true), &json!(false)));
    assert_eq!((first.output_tokens, second.received_tokens), (1, 63), "no prompt is computed twice");

    pair.is_idle().await;
    assert_eq!(pair.handed_over().await, (1.0, 0.0));
    for phase in ["prefill", "decode", "complete"] {
        assert_eq!(pair.legs(phase).await, [1.0, 0.0, 0.0], "{phase}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_record_shows_both_legs() {
    let pair = Pair::small().await;
    let answer = pair.gateway.send(&request(&body(1)).field("x-kvgate-explain", "1")).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    pair.is_idle().await;
    let decisions = pair.gateway.ask("/decisions").await.json();
    let record = decisions.as_array().unwrap().last().unwrap();
    let [prefill] = attempts(record, "prefill")[..] else { panic!("{record}") };
    let [decode] = attempts(record, "decode")[..] else { panic!("{record}") };
    assert_eq!(prefill["winner"]["address"], pair.prefill[0].address().to_string());
    assert_eq!(decode["winner"]["address"], pair.decode[0].address().to_string());
    for leg in [prefill, decode] {
        assert_eq!(leg["outcome"]["cause"], "complete", "{record}");
        let (first, total) = (&leg["first_byte_us"], &leg["total_us"]);
        assert!(first.as_u64().unwrap() > 0 && total.as_u64() >= first.as_u64(), "{record}");
    }
    assert_eq!(record["transfer"], true);
    let told: Value = serde_json::from_str(answer.field("x-kvgate-decision").unwrap()).unwrap();
    assert_eq!(attempts(&told, "prefill").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_runs_without_parameters_where_there_are_none() {
    let pair = Pair::small().await;
    pair.prefill[0].fault(Fault { no_params: true, ..Fault::default() }, 1);
    let asked = body(1);
    let answer = pair.send(&asked).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    // too short to fill a block: nothing to hand over
    let short = json!({"model": MODEL, "prompt": prompt(2, 9), "max_tokens": 2});
    assert_eq!(pair.send(&short).await.status, 200);
    let log = pair.decode[0].log();
    assert_eq!(log.iter().map(sent).collect::<Vec<_>>(), [asked.to_string(), short.to_string()], "untouched");
    assert!(log.iter().all(|served| served.received_tokens == 0 && served.ended == Ended::Finished));
    pair.is_idle().await;
    assert_eq!(pair.handed_over().await, (0.0, 2.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_have_no_say_in_what_is_handed_over() {
    let pair = Pair::small().await;
    let mut asked = body(1);
    asked["kv_transfer_params"] =
        json!({"do_remote_prefill": true, "remote_host": "10.0.0.1", "remote_port": 1});
    assert_eq!(pair.send(&asked).await.status, 200);
    // several prompts are not split
    asked["prompt"] = json!([prompt(1, 64), prompt(2, 64)]);
    assert_eq!(pair.send(&asked).await.status, 200);
    let bodies: Vec<_> = pair.prefill.iter().chain(&pair.decode).flat_map(kvgate_sim::Sim::log).collect();
    assert_eq!(bodies.len(), 3);
    assert!(bodies.iter().all(|served| !sent(served).contains("10.0.0.1")), "{bodies:?}");
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_hide_what_they_ask_are_refused() {
    let pair = Pair::small().await;
    let mut asked = body(1);
    asked["kv_transfer_params"] = json!({"remote_host": "10.0.0.1"});
    let text = asked.to_string();
    let wide: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let marked = [&[0xff, 0xfe][..], &wide].concat();
    let half =
        text.replace("\"max_tokens\"", "\"zz\":\"?\",\"max_tokens\"").replace('?', "\u{fffd}").into_bytes();
    let half = String::from_utf8_lossy(&half).into_owned().into_bytes();
    let half: Vec<u8> = {
        let at = half.windows(3).position(|w| w == [0xef, 0xbf, 0xbd]).unwrap();
        [&half[..at], &[0xed, 0xa0, 0x80], &half[at + 3..]].concat()
    };
    for bytes in [wide, marked, half] {
        let request = Request::post("/v1/completions", bytes).field("x-model", MODEL);
        let answer = pair.gateway.send(&request).await;
        assert_eq!((answer.status, &*answer.code()), (400, "unreadable_body"));
    }
    let ids = ["___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_00"];
    let answer = pair.gateway.send(&request(&body(1)).field("x-request-id", ids[0])).await;
    assert!(answer.status == 200 && answer.id() != ids[0], "{answer:?}");
    // names written over and over do not multiply what the prefill gives
    let many = format!(
        "{}{}}}",
        body(2).to_string().trim_end_matches('}'),
        ",\"kv_transfer_params\":0".repeat(1000)
    );
    assert_eq!(pair.gateway.send(&Request::post("/v1/completions", many.clone())).await.status, 200);
    let log = pair.decode[0].log();
    assert_eq!(log.len(), 2);
    assert!(log[1].body_bytes < many.len(), "{}", log[1].body_bytes);
    assert!(log[1].received_tokens > 0);
    pair.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_split_is_served_by_decode_alone() {
    let pair = Pair::small().await;
    let models = Request::get("/v1/models").field("x-model", MODEL);
    let answer = pair.gateway.send(&models).await;
    assert_eq!(
        (answer.status, answer.endpoint()),
        (200, &*pair.decode[0].address().to_string()),
        "{answer:?}"
    );
    let broken = Request::post("/v1/completions", "{\"prompt\": ").field("x-model", MODEL);
    assert_eq!(pair.gateway.send(&broken).await.status, 400, "the engine's own word");
    pair.is_idle().await;
    assert_eq!(pair.prefill[0].log().len(), 0);
    assert_eq!((pair.legs("prefill").await, pair.handed_over().await), ([0.0; 3], (0.0, 0.0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_find_each_other_by_the_id_are_given_both_addresses() {
    let rule = rule(&["round-robin"]).table("legs", "connector = \"p2p-nccl\"");
    let pair = Pair::new(1, 1, rule).await;
    let answer = pair.gateway.send(&request(&body(1)).field("x-request-id", "mine")).await;
    assert_eq!((answer.status, answer.id()), (200, "mine"), "{answer:?}");
    let (prefill, decode) = (pair.prefill[0].log(), pair.decode[0].log());
    let id = prefill[0].request_id.clone().unwrap();
    assert_eq!(decode[0].request_id.as_ref(), Some(&id));
    let (from, to) = (pair.prefill[0].address(), pair.decode[0].address());
    let unique = id.strip_prefix(&format!("___prefill_addr_{from}___decode_addr_{to}_"));
    assert!(unique.is_some_and(|u| u.len() == 32 && u.bytes().all(|b| b.is_ascii_hexdigit())), "{id}");
    assert!(!sent(&prefill[0]).contains("kv_transfer_params"));
    assert_eq!(sent(&decode[0]), body(1).to_string());
    // who computes the prompt itself must not wait for blocks
    pair.prefill[0].fault(Fault { status: Some(500), ..Fault::default() }, 2);
    assert_eq!(pair.gateway.send(&request(&body(2)).field("x-request-id", "other")).await.status, 200);
    assert_eq!(pair.decode[0].log()[1].request_id.as_deref(), Some("other"));
    pair.is_idle().await;
}
