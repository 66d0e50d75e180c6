//! vLLM: the prefill first, then the decode with what the prefill said.
//!
//! Read on vLLM 0.33, whose own example proxies do the same. The prefill leg is the client's request cut down to one
//! token; its answer's `kv_transfer_params` tell the decode engine where the blocks are and go there as they stand.
//!
//! Clients have no say in the hand-over: the `kv_transfer_params` of a request would let it name hosts, engines and
//! blocks, and so read what others asked. They reach neither leg.
//!
//! `n` is left as it is. vLLM runs such a prefill `n` times over the same cached blocks and gives the parameters of one
//! of them; the others' lease on the blocks runs out by itself. A request with several prompts is not split at all: the
//! answer holds parameters for one of them, and the decode engine would take its blocks for every prompt.

use bytes::Bytes;
use kvgate_prompt::json::{self, Items, Json, Members};

use super::splice::{Edit, splice};
use super::{Connector, Next, PdFlow, PrefillAnswer, generates};

/// The connectors of vLLM that need a gateway.
pub const CONNECTORS: &[Connector] = &[
    Connector {
        name: "nixl",
        doc: "NixlConnector: the decode engine learns from the prefill's answer where the blocks are.",
        flow: &Nixl,
    },
    Connector {
        name: "p2p-nccl",
        doc: "P2pNcclConnector (vLLM up to 0.22): both engines learn each other's address from X-Request-Id.",
        flow: &P2pNccl,
    },
];

/// The member that carries the hand-over, in requests and answers.
const PARAMS: &str = "kv_transfer_params";

/// What asks an engine to keep the prompt's blocks for another one.
const REMOTE_DECODE: &str = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

/// The prefill leg's body: one token, at once, and the least number of tokens no longer asked for.
fn one_token(body: &Bytes, params: Edit<'_>) -> Option<Bytes> {
    splice(
        body,
        &[
            ("max_tokens", Edit::Put("1")),
            ("max_completion_tokens", Edit::Replace("1")),
            ("min_tokens", Edit::Drop),
            ("min_completion_tokens", Edit::Drop),
            ("stream", Edit::Put("false")),
            ("stream_options", Edit::Drop),
            (PARAMS, params),
        ],
    )
}

fn start(path: &str, body: &Bytes, params: Edit<'_>) -> Option<Bytes> {
    if !generates(path) || prompts(body)? > 1 {
        return None;
    }
    one_token(body, params)
}

/// How many prompts a request has, as far as that matters: texts or lists of ids in `prompt`, and `prompt_embeds`.
/// `None` if it is no JSON object.
fn prompts(body: &[u8]) -> Option<usize> {
    let (mut prompt, mut embeds) = (0, 0);
    for member in Members::new(json::text(body)?) {
        let member = member.ok()?;
        match member.key.as_deref() {
            Some("prompt") => prompt = several(member.value),
            Some("prompt_embeds") => embeds = several(member.value),
            _ => (),
        }
    }
    Some(prompt + embeds)
}

/// 0 for none, 1 for one, 2 for more. An array of numbers is one prompt.
fn several(value: &str) -> usize {
    let mut items = Items::new(value);
    match items.next() {
        _ if value == "null" => 0,
        Some(Ok(first)) if first.starts_with(['"', '[']) => 1 + items.take(1).count(),
        _ => 1,
    }
}

/// The body without what the client wrote of [`PARAMS`]; untouched where it wrote nothing.
fn alone(body: &Bytes) -> Bytes {
    let written = |text| Members::new(text).flatten().any(|member| member.key.as_deref() == Some(PARAMS));
    if !json::text(body).is_some_and(written) {
        return body.clone();
    }
    splice(body, &[(PARAMS, Edit::Drop)]).unwrap_or_else(|| body.clone())
}

/// The prefill's parameters as written; `None` where it gives none that are of use: an answer that is no JSON, `null`,
/// no object, an empty one, or nested deeper than any engine's.
fn given(answer: &[u8]) -> Option<&str> {
    let mut given = None;
    for member in Members::new(json::text(answer)?) {
        let member = member.ok()?;
        if member.key.as_deref() == Some(PARAMS) {
            given = Some(member.value);
        }
    }
    given.filter(|raw| matches!(Json::parse(raw), Ok(params @ Json::Dict(_)) if params.is_truthy()))
}

/// What follows from a prefill's answer; `decode` makes the decode leg of a good one.
fn next(answer: PrefillAnswer<'_>, decode: impl FnOnce(&[u8]) -> Next) -> Next {
    match answer {
        PrefillAnswer::Answered { status: 200..=299, body } => decode(body),
        PrefillAnswer::Answered { status: 400..=499, .. } => Next::Relay,
        PrefillAnswer::Answered { .. } | PrefillAnswer::Failed => Next::RetryPrefill,
    }
}

/// The pull flow of NixlConnector.
#[derive(Debug)]
struct Nixl;

impl PdFlow for Nixl {
    fn start(&self, path: &str, body: &Bytes) -> Option<Bytes> {
        start(path, body, Edit::Put(REMOTE_DECODE))
    }

    fn next(&self, body: &Bytes, answer: PrefillAnswer<'_>) -> Next {
        next(answer, |answer| {
            given(answer)
                .and_then(|params| splice(body, &[(PARAMS, Edit::Put(params))]))
                .map_or(Next::Alone, Next::Decode)
        })
    }

    fn alone(&self, body: &Bytes) -> Bytes {
        alone(body)
    }

    fn request_id(&self, _: &str, _: &str, _: u128) -> Option<String> {
        None
    }
}

/// P2pNcclConnector: no parameters; the request's id says who sends to whom.
#[derive(Debug)]
struct P2pNccl;

impl PdFlow for P2pNccl {
    fn start(&self, path: &str, body: &Bytes) -> Option<Bytes> {
        start(path, body, Edit::Drop)
    }

    fn next(&self, body: &Bytes, answer: PrefillAnswer<'_>) -> Next {
        next(answer, |_| Next::Decode(alone(body)))
    }

    fn alone(&self, body: &Bytes) -> Bytes {
        alone(body)
    }

    fn request_id(&self, prefill: &str, decode: &str, unique: u128) -> Option<String> {
        Some(format!("___prefill_addr_{prefill}___decode_addr_{decode}_{unique:032x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};

    const CHAT: &str = "/v1/chat/completions";
    const ANSWER: &str = r#"{"choices":[],"kv_transfer_params" : { "do_remote_prefill":true, "remote_port" : 5.60e3 } ,"x":{"kv_transfer_params":1}}"#;

    fn prefill(flow: &dyn PdFlow, path: &str, body: &str) -> Option<String> {
        let prefill = flow.start(path, &Bytes::copy_from_slice(body.as_bytes()))?;
        Some(String::from_utf8(prefill.to_vec()).unwrap())
    }

    fn after(flow: &dyn PdFlow, body: &str, answer: &str) -> (String, bool) {
        let answer = PrefillAnswer::Answered { status: 200, body: answer.as_bytes() };
        let body = Bytes::copy_from_slice(body.as_bytes());
        let text = |body: Bytes| String::from_utf8(body.to_vec()).unwrap();
        match flow.next(&body, answer) {
            Next::Decode(body) => (text(body), true),
            Next::Alone => (text(flow.alone(&body)), false),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_prefill_asks_for_one_token() {
        let body = r#"{"model": "m", "stream":true,"stream_options":{"include_usage":true}, "min_tokens":8, "max_completion_tokens": 64, "n":2, "logprobs":true,
 "messages":[{"role":"user","content":"\u00e9 \"stream\": true, max_tokens","max_tokens":5,"stream":true}], "temperature":1.0, "seed":12345678901234567890123 }"#;
        let want = r#"{"model": "m", "stream":false, "max_completion_tokens": 1, "n":2, "logprobs":true,
 "messages":[{"role":"user","content":"\u00e9 \"stream\": true, max_tokens","max_tokens":5,"stream":true}], "temperature":1.0, "seed":12345678901234567890123,"max_tokens":1,"kv_transfer_params":PARAMS }"#;
        assert_eq!(prefill(&Nixl, CHAT, body), Some(want.replace("PARAMS", REMOTE_DECODE)));
        assert_eq!(prefill(&P2pNccl, CHAT, body), Some(want.replace(r#","kv_transfer_params":PARAMS"#, "")));
    }

    #[test]
    fn names_written_twice_or_with_escapes_do_not_slip_through() {
        let body = r#"{"max_tokens":9,"max\u005ftokens":8,"str\u0065am":true,"kv\u005ftransfer_params":{"remote_host":"h"},"min\u005ftokens":4,"max_tokens":7}"#;
        let want = r#"{"max_tokens":1,"str\u0065am":false,"kv\u005ftransfer_params":PARAMS}"#;
        assert_eq!(prefill(&Nixl, CHAT, body), Some(want.replace("PARAMS", REMOTE_DECODE)));
    }

    #[test]
    fn what_cannot_be_split_is_not() {
        for body in ["", "[]", "{\"a\":1", "\"{}\"", "null"] {
            assert_eq!(prefill(&Nixl, CHAT, body), None, "{body}");
        }
        for path in ["/v1/embeddings", "/v1/responses", "/v1/models", "/v1/completions/", "/"] {
            assert_eq!(prefill(&Nixl, path, "{}"), None, "{path}");
        }
        for (one, prompt) in [
            (true, r#""a""#),
            (true, r#"["a"]"#),
            (true, "[1, 2, 3]"),
            (true, "[ [1, 2] ]"),
            (true, "[]"),
            (true, "null"),
            (true, "7"),
            (false, r#"["a", "b"]"#),
            (false, "[[1], [2]]"),
            (false, r#""a","prompt_embeds":"QUJD""#),
            (false, r#"null,"prompt_embeds":["QUJD","QUJD"]"#),
            (true, r#"null,"prompt_embeds":["QUJD"]"#),
            (true, r#"["a","b"],"\u0070rompt":"last""#),
        ] {
            let body = format!("{{\"prompt\":{prompt}}}");
            assert_eq!(prefill(&Nixl, "/v1/completions", &body).is_some(), one, "{body}");
        }
    }

    #[test]
    fn parameters_go_on_as_they_stand() {
        let params = r#"{ "do_remote_prefill":true, "remote_port" : 5.60e3 }"#;
        let body = " {\"max_tokens\": 5,\n\"stream\":true , \"x\":{\"kv_transfer_params\":2}} ";
        let want = format!("{},\"kv_transfer_params\":{params}}} ", &body[..body.len() - 2]);
        assert_eq!(after(&Nixl, body, ANSWER), (want, true));
        let theirs = r#"{"kv_transfer_params":{"remote_host":"h"},"a":1,"kv\u005ftransfer_params":null}"#;
        let want = format!(r#"{{"kv_transfer_params":{params},"a":1}}"#);
        assert_eq!(after(&Nixl, theirs, ANSWER), (want, true));
        assert_eq!(after(&P2pNccl, r#"{"a":1}"#, ANSWER), (r#"{"a":1}"#.to_owned(), true));
    }

    #[test]
    fn without_parameters_the_decode_gets_what_the_client_sent() {
        let deep = format!("{{\"kv_transfer_params\":{{\"a\":{}{}}}}}", "[".repeat(500), "]".repeat(500));
        for answer in [
            "",
            "{}",
            "no json",
            &ANSWER[..60],
            r#"{"kv_transfer_params":null}"#,
            r#"{"kv_transfer_params":{}}"#,
            r#"{"kv_transfer_params":"x"}"#,
            r#"{"kv_transfer_params":[1]}"#,
            r#"{"kv_transfer_params":{"a":[}]}}"#,
            r#"{"kv_transfer_params":{"a":1},"kv_transfer_params":null}"#,
            &deep,
        ] {
            let body = "{ \"max_tokens\": 5,\"x\":{\"kv_transfer_params\":2} }\n";
            assert_eq!(after(&Nixl, body, answer), (body.to_owned(), false), "{answer}");
            let theirs = r#"{ "kv_transfer_params":{"remote_host":"h"}, "max_tokens": 5 }"#;
            assert_eq!(after(&Nixl, theirs, answer), (r#"{ "max_tokens": 5 }"#.to_owned(), false));
        }
        let body = Bytes::from_static(b"{\"a\":1}");
        assert_eq!(Nixl.alone(&body).as_ptr(), body.as_ptr(), "not copied");
        for flow in [&Nixl as &dyn PdFlow, &P2pNccl] {
            let theirs = Bytes::from_static(b"{\"kv_transfer_params\":{\"remote_host\":\"h\"},\"a\":1}");
            assert_eq!(flow.alone(&theirs), "{\"a\":1}");
        }
    }

    #[test]
    fn only_a_good_answer_leads_to_the_decode() {
        let next =
            |status| Nixl.next(&Bytes::from_static(b"{}"), PrefillAnswer::Answered { status, body: b"" });
        assert_eq!(next(200), Next::Alone);
        for status in [400, 401, 404, 422, 429] {
            assert_eq!(next(status), Next::Relay);
        }
        for status in [500, 503, 302, 600, 0] {
            assert_eq!(next(status), Next::RetryPrefill);
        }
        assert_eq!(Nixl.next(&Bytes::new(), PrefillAnswer::Failed), Next::RetryPrefill);
    }

    #[test]
    fn only_p2p_writes_the_request_id() {
        assert_eq!(Nixl.request_id("a:1", "b:2", 7), None);
        let id = P2pNccl.request_id("10.0.0.1:14579", "[::1]:14580", 0xAB);
        let want =
            "___prefill_addr_10.0.0.1:14579___decode_addr_[::1]:14580_000000000000000000000000000000ab";
        assert_eq!(id.as_deref(), Some(want));
    }

    /// The edit on a tree.
    fn model(body: &Map<String, Value>) -> Map<String, Value> {
        let mut body = body.clone();
        for name in ["min_tokens", "min_completion_tokens", "stream_options"] {
            body.remove(name);
        }
        if let Some(limit) = body.get_mut("max_completion_tokens") {
            *limit = json!(1);
        }
        body.insert("max_tokens".into(), json!(1));
        body.insert("stream".into(), json!(false));
        body.insert(PARAMS.into(), serde_json::from_str(REMOTE_DECODE).unwrap());
        body
    }

    fn request() -> impl Strategy<Value = Map<String, Value>> {
        let names = [
            "max_tokens",
            "max_completion_tokens",
            "min_tokens",
            "min_completion_tokens",
            "stream",
            "stream_options",
            PARAMS,
            "n",
            "messages",
            "temperature",
        ];
        let value = prop_oneof![
            any::<i64>().prop_map(Value::from),
            any::<bool>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            prop::sample::select(names.to_vec()).prop_map(|name| json!([{ name: { name: null } }, name])),
        ];
        let key = prop_oneof![4 => prop::sample::select(names.to_vec()).prop_map(str::to_owned), 1 => any::<String>()];
        prop::collection::vec((key, value), 0..10).prop_map(|members| members.into_iter().collect())
    }

    proptest! {
        #[test]
        fn both_legs_are_the_edited_tree(body in request(), pretty in any::<bool>()) {
            let text = if pretty { serde_json::to_string_pretty(&body) } else { serde_json::to_string(&body) }.unwrap();
            let leg: Map<String, Value> = serde_json::from_str(&prefill(&Nixl, CHAT, &text).unwrap()).unwrap();
            prop_assert_eq!(leg, model(&body));

            let (leg, handed_over) = after(&Nixl, &text, ANSWER);
            prop_assert!(handed_over);
            let mut want = body.clone();
            want.insert(PARAMS.into(), json!({ "do_remote_prefill": true, "remote_port": 5600.0 }));
            prop_assert_eq!(serde_json::from_str::<Map<String, Value>>(&leg).unwrap(), want);
        }

        #[test]
        fn any_bytes_are_survived(
            body in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..80),
                "\\{[\\[\\]{}:,\"\\\\0-9 ]{0,40}\\}".prop_map(String::into_bytes),
            ],
            answer in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..80),
                "\\{\"kv_transfer_params\":[\\[\\]{}:,\"\\\\0-9 ]{0,24}\\}".prop_map(String::into_bytes),
            ],
            status in any::<u16>(),
        ) {
            let body = Bytes::from(body);
            for Connector { flow, .. } in CONNECTORS {
                let _ = flow.start("/v1/completions", &body);
                let _ = flow.next(&body, PrefillAnswer::Answered { status, body: &answer });
                let _ = flow.alone(&body);
            }
            // whatever the answer holds, a body that was JSON is JSON
            let (leg, _) = after(&Nixl, "{\"a\":1}", &String::from_utf8_lossy(&answer));
            prop_assert!(Json::parse(&leg).is_ok(), "{}", leg);
        }
    }
}
