//! The decision for a chat, part by part and whole, beside a naive pipeline that gives the same answers.
//!
//! Cold: the gateway has seen no message of the chat. Warm: all but the last one. Both pipelines run in turn on the
//! same chats; times are CPU time of the thread, medians.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod gateway;
mod naive;

use std::process::ExitCode;
use std::sync::Arc;

use bytes::Bytes;
use kvgate_bench::{Chat, Samples};
use kvgate_core::conformance::Known;
use kvgate_core::{Random, Tokens};
use kvgate_kv::hash::Namespace;
use kvgate_prompt::Fields;

use gateway::{Gateway, PATH};
use naive::Naive;

const ENDPOINTS: usize = 8;
const BLOCK: usize = 16;
const SEED: &str = "0";
const MESSAGES: usize = 40;
/// Blocks of other prompts on every endpoint.
const OTHERS: usize = 20_000;
const RUNS: u64 = 21;
/// How many times as fast as the naive pipeline the decision has to be, from chats of this many KiB on.
const TARGETED: usize = 128;
const COLD_TARGET: f64 = 12.0;
const WARM_TARGET: f64 = 50.0;

#[derive(Default)]
struct Times {
    naive: [Samples; 7],
    cold: [Samples; 7],
    warm: [Samples; 3],
}

fn main() -> ExitCode {
    let folder = kvgate_tests::tokenizers().join("tiny-qwen3");
    let mut naive = Naive::load(&folder, SEED, ENDPOINTS);
    let mut gateway = Gateway::load(&folder, SEED, BLOCK as u32, ENDPOINTS);
    fill(&mut naive, &mut gateway);
    let mut met = true;
    for kib in [32, 128] {
        let (mut times, mut tokens) = (Times::default(), 0);
        for seed in 0..RUNS {
            tokens = run(&mut naive, &mut gateway, seed << 20 | kib as u64, kib << 10, &mut times);
        }
        println!(
            "\n{kib} KiB chat, {MESSAGES} messages, {tokens} tokens, {ENDPOINTS} endpoints; microseconds"
        );
        met &= report(&times) || kib < TARGETED;
    }
    if met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Every endpoint holds blocks of other prompts.
fn fill(naive: &mut Naive, gateway: &mut Gateway) {
    let mut random = Random::new(7);
    for endpoint in 0..ENDPOINTS {
        for _ in 0..OTHERS / 500 {
            let tokens: Vec<u32> = (0..500 * BLOCK).map(|_| random.below(150_000) as u32).collect();
            store(naive, gateway, endpoint, &tokens);
        }
    }
}

fn store(naive: &mut Naive, gateway: &mut Gateway, endpoint: usize, tokens: &[u32]) {
    let names = naive.hashes(tokens, BLOCK);
    gateway.stored(endpoint, &names, tokens);
    naive.held[endpoint].extend(names);
}

/// One chat through both; its number of tokens.
fn run(naive: &mut Naive, gateway: &mut Gateway, seed: u64, bytes: usize, times: &mut Times) -> usize {
    let chat = Chat::new(seed, bytes, MESSAGES);
    // the same conversation with another last message
    let mut next = chat.clone();
    next.0[MESSAGES - 1].1 = Chat::new(!seed, bytes, MESSAGES).0[1].1.clone();
    let (body, next) = (Bytes::from(chat.body(MESSAGES)), Bytes::from(next.body(MESSAGES)));
    let owner = seed as usize % ENDPOINTS;
    let tokens = hold(naive, gateway, owner, &body);
    hold(naive, gateway, owner, &next);

    let [whole, again, parts @ ..] = &mut times.naive;
    let (at, blocks) = whole.time(|| naive.decide(&body, BLOCK)).unwrap();
    let answer = times.cold[0].time(|| gateway.decide(&body));
    assert_eq!(answer, (at, (blocks * BLOCK) as u64), "both hold the same, both must choose the same");
    let (at, blocks) = again.time(|| naive.decide(&next, BLOCK)).unwrap();
    assert_eq!(times.warm[0].time(|| gateway.decide(&next)), (at, (blocks * BLOCK) as u64));
    assert_eq!((at, blocks), (owner, blocks));

    naive_parts(naive, &body, parts);
    gateway_parts(naive, gateway, seed, bytes, times);
    tokens
}

/// The owner holds all of the prompt, its neighbour the first half.
fn hold(naive: &mut Naive, gateway: &mut Gateway, owner: usize, body: &[u8]) -> usize {
    let tokens = naive.encode(&naive.render(&naive.parse(body)));
    store(naive, gateway, owner, &tokens);
    store(naive, gateway, (owner + 1) % ENDPOINTS, &tokens[..tokens.len() / 2]);
    tokens.len()
}

fn naive_parts(naive: &Naive, body: &[u8], parts: &mut [Samples]) {
    let [parse, render, encode, hash, lookup] = parts else { unreachable!() };
    let json = parse.time(|| naive.parse(body));
    let text = render.time(|| naive.render(&json));
    let tokens = encode.time(|| naive.encode(&text));
    let hashes = hash.time(|| naive.hashes(&tokens, BLOCK));
    lookup.time(|| naive.lookup(&hashes));
}

/// On chats of their own, which no cache has seen: part by part, with what the parts give compared.
fn gateway_parts(naive: &mut Naive, gateway: &mut Gateway, seed: u64, bytes: usize, times: &mut Times) {
    let Times { cold: [_, fields, render, encode, own, strict, ladder], warm, .. } = times;
    let chat = Chat::new(seed ^ 1 << 40, bytes, MESSAGES);
    let body = Bytes::from(chat.body(MESSAGES));
    let read = fields.time(|| Fields::read(&body)).unwrap();
    let prompt = render.time(|| kvgate_prompt::prompt(&gateway.model, PATH, &read)).unwrap();
    warm[1].time(|| kvgate_prompt::prompt(&gateway.model, PATH, &read)).unwrap();
    let tokens = Arc::clone(&prompt.sequences[0].tokens);
    assert_eq!(naive.encode(&naive.render(&naive.parse(&body))), *tokens, "both must tokenise alike");
    hold(naive, gateway, 0, &body);

    let unseen = naive.render(&naive.parse(&Chat::new(seed ^ 1 << 41, bytes, MESSAGES).body(MESSAGES)));
    encode.time(|| gateway.model.encode(&unseen, false)).unwrap();
    warm[2].time(|| gateway.model.encode(&unseen, false)).unwrap();

    let plain = Namespace::default();
    own.time(|| gateway.holdings.hasher().chain(&tokens, BLOCK, &plain));
    let hashes = strict.time(|| gateway.hasher.blocks(&tokens, &plain));
    let hashes: Vec<u64> = hashes.iter().map(|d| d.u64()).collect();
    assert_eq!(naive.hashes(&tokens, BLOCK), hashes, "both must hash alike");
    let request = gateway.request(&body);
    let ready =
        Arc::new(Known { tokens: Ok(Arc::new(Tokens { sequences: vec![tokens] })), ..Known::default() });
    ladder.time(|| gateway.route(request, ready));
}

fn report(times: &Times) -> bool {
    let Times { naive, cold, warm } = times;
    let [whole, again, parse, render, encode, hashes, lookup] = naive.each_ref().map(Samples::median);
    let [cold, fields, prompt, encode_cold, own, strict, ladder] = cold.each_ref().map(Samples::median);
    let [warm, prompt_warm, encode_warm] = warm.each_ref().map(Samples::median);
    let row = |name: &str, naive: f64, cold: f64, warm: f64| {
        println!("  {name:<42} {naive:>9.1} {cold:>9.1} {warm:>9.1}");
    };
    println!("  {:<42} {:>9} {:>9} {:>9}", "", "naive", "cold", "warm");
    row("read the body", parse, fields, fields);
    row("render and tokenise", render + encode, prompt, prompt_warm);
    row("  of it tokenise", encode, encode_cold, encode_warm);
    row("hash blocks (own; naive: sha256_cbor)", hashes, own, own);
    row("  the engine's sha256_cbor, under strict", hashes, strict, strict);
    row("ladder: hash, look up, choose, lease", hashes + lookup, ladder, ladder);
    row("whole decision", whole, cold, warm);
    let (times_cold, times_warm) = (whole / cold, again / warm);
    let met = times_cold >= COLD_TARGET && times_warm >= WARM_TARGET;
    println!(
        "  naive over kvgate: cold {times_cold:.1}x (target {COLD_TARGET}x), warm {times_warm:.1}x (target \
         {WARM_TARGET}x): {}",
        if met { "met" } else { "MISSED" }
    );
    met
}
