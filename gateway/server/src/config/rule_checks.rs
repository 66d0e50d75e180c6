//! What must agree within a rule.

use std::path::Path;

use kvgate_core::{Miss, Role, TierKind};
use kvgate_edge::pem::Certificate;
use kvgate_engines::ENGINES;
use kvgate_kv::hash::Contract;
use kvgate_prompt::Slug;
use serde::Deserialize;
use serde_json::Value;

use super::document::Document;
use super::rule::KV_EXACT;
use super::types::{EndpointConfig, RuleConfig};
use crate::transport::Transport;

/// The tier whose place is the first.
const ADMISSION: &str = "admission";

/// Checks a rule; `tokenizers` is the folder of tokenizers.
pub(super) fn check(document: &mut Document, rule: &RuleConfig, kinds: &[TierKind], tokenizers: &Path) {
    name(document, rule);
    roles(document, rule);
    endpoints(document, rule);
    tls(document, rule);
    ladders(document, rule, kinds);
    if document.origin.has("telemetry") {
        super::gateway::telemetry(document, &rule.telemetry);
    }
    if document.origin.has("probe") {
        super::gateway::probe(document, &rule.probe);
    }
    if rule.pair.is_none() && document.origin.has("retry") {
        super::gateway::retry(document, &rule.retry);
    }
    if rule.uses(KV_EXACT) && rule.engine.announces_blocks {
        contract(document, rule);
        silent(document, rule);
        models(document, rule, tokenizers);
    }
}

fn name(document: &mut Document, rule: &RuleConfig) {
    if document.origin.has("name") {
        return;
    }
    let form = super::table::Form::Name;
    if form.check(&rule.name).is_err() {
        let error = document
            .error("name", "is taken from the file's name, which does not have the right form")
            .found(format!("\"{}\"", rule.name))
            .allowed(form.allowed())
            .hint("add `name`, or rename the file");
        document.report(error);
    }
}

fn roles(document: &mut Document, rule: &RuleConfig) {
    if document.is_broken("shape") || document.is_broken("endpoint") {
        return;
    }
    if document.given.get("shape").is_some_and(|shape| shape == "prefill-decode") {
        return pair(document, rule);
    }
    for key in ["decode_tiers", "legs"] {
        if !document.origin.has(key) {
            continue;
        }
        let unused = document
            .error(key, "is not used: the rule is a pool")
            .hint("remove it, or write shape = \"prefill-decode\"");
        document.report(unused.warning());
    }
    for (at, endpoint) in rule.endpoints.iter().enumerate().filter(|(_, e)| e.role != Role::Any) {
        let word = endpoint.role.name();
        let error = document
            .error(&format!("endpoint[{at}].role"), "is a part of a pair, and this rule is a pool")
            .found(format!("\"{word}\""))
            .allowed("\"any\"")
            .hint("leave `role` out, or write shape = \"prefill-decode\"");
        document.report(error);
    }
}

fn pair(document: &mut Document, rule: &RuleConfig) {
    for role in [Role::Prefill, Role::Decode] {
        let word = role.name();
        if rule.endpoints.is_empty() || rule.endpoints.iter().any(|e| e.role == role) {
            continue;
        }
        let error = document
            .error("endpoint", format!("none has the role \"{word}\", and the rule is \"prefill-decode\""))
            .allowed("at least one endpoint of each role")
            .hint(format!("write role = \"{word}\" at the endpoints that do that part"));
        document.report(error);
    }
}

fn endpoints(document: &mut Document, rule: &RuleConfig) {
    if rule.endpoints.is_empty() && !document.is_broken("endpoint") {
        let error = document
            .error("endpoint", "the rule has no endpoint")
            .allowed("at least one [[endpoint]]")
            .hint("add [[endpoint]] with an `address`");
        document.report(error);
    }
    for (at, endpoint) in rule.endpoints.iter().enumerate() {
        let before = rule.endpoints.iter().take(at).position(|other| other.address == endpoint.address);
        if let Some(before) = before.filter(|_| !document.is_broken("endpoint")) {
            let error = document
                .error(&format!("endpoint[{at}].address"), format!("is also that of endpoint[{before}]"))
                .found(format!("\"{}\"", endpoint.address))
                .hint("remove one; `weight` gives an endpoint a larger share");
            document.report(error);
        }
    }
}

/// The files of `[tls]`.
fn tls(document: &mut Document, rule: &RuleConfig) {
    if document.is_broken("tls") || !document.origin.has("tls") {
        return;
    }
    if rule.endpoints.iter().all(|endpoint| endpoint.tls.is_none()) && !document.is_broken("endpoint") {
        let unused = document
            .error("tls", "is not used: no endpoint has a `tls` name")
            .hint("give the endpoints `tls`, the name in their certificates, or remove the table");
        document.report(unused.warning());
    }
    if rule.tls.client_key.is_some() && rule.tls.client_certificate.is_none() {
        let error = document
            .error("tls.client_key", "is the key of no certificate")
            .found(document.origin.text("tls.client_key"))
            .hint("add `client_certificate`");
        document.report(error);
    }
    for (key, problem) in Transport::load(&rule.tls).err().unwrap_or_default() {
        let key = format!("tls.{key}");
        let error = document.error(&key, problem.problem).found(problem.file.display().to_string());
        document.report(error.hint("name a PEM file; the path is relative to this one"));
    }
    let pair = rule.tls.certificate();
    let certificate =
        pair.and_then(|(chain, key)| Certificate::load(chain, key).ok().map(|read| (read, key)));
    if let Some((certificate, key)) = certificate {
        let shown = if rule.tls.client_key.is_some() { "tls.client_key" } else { "tls.client_certificate" };
        super::listener_checks::certificate(document, "tls.client_certificate", &certificate, (shown, key));
    }
}

fn ladders(document: &mut Document, rule: &RuleConfig, kinds: &[TierKind]) {
    if !document.is_broken("tiers") && document.origin.has("tiers") {
        ladder(document, rule, kinds);
    }
    if let Some(pair) = rule.pair.as_ref().filter(|_| !document.is_broken("decode_tiers")) {
        never_asked(document, "decode_tiers", &pair.tiers, kinds);
        admission_first(document, "decode_tiers", &pair.tiers);
    }
    caps(document, rule);
    if rule.engine.announces_blocks || document.is_broken("engine") {
        return;
    }
    let own = (0..rule.endpoints.len()).map(|at| format!("endpoint[{at}].kv_events"));
    let given: Vec<_> = own.chain(["events".to_owned()]).filter(|key| document.origin.has(key)).collect();
    for key in given {
        let error = document
            .error(&key, format!("cannot be read: {} announces no blocks", rule.engine.name))
            .hint("remove it");
        document.report(error);
    }
}

/// Tiers behind one that always decides.
fn never_asked(document: &mut Document, key: &str, tiers: &[&str], kinds: &[TierKind]) {
    for (at, name) in tiers.iter().enumerate() {
        let always =
            kinds.iter().any(|k| k.name == *name && k.misses.iter().all(|m| m.reason == Miss::NO_ENDPOINT.0));
        if always && at + 1 < tiers.len() {
            let later = document
                .error(
                    &format!("{key}[{}]", at + 1),
                    format!("is never asked: \"{name}\" before it always decides"),
                )
                .hint(format!("put \"{name}\" last"));
            document.report(later.warning());
            break;
        }
    }
}

/// Caps that do not hold for what is chosen before they are asked.
fn admission_first(document: &mut Document, key: &str, tiers: &[&str]) {
    let Some(at) = tiers.iter().position(|name| *name == ADMISSION).filter(|at| *at > 0) else { return };
    let late = document
        .error(&format!("{key}[{at}]"), "is not asked about requests that a tier before it chose for")
        .found(format!("\"{ADMISSION}\""))
        .hint("put \"admission\" first: its caps hold whichever tier chooses after it");
    document.report(late.warning());
}

/// Caps that do not hold for one of a pair's parts, and a queue that nobody ever waits in.
fn caps(document: &mut Document, rule: &RuleConfig) {
    let table = format!("tier.{ADMISSION}");
    let Some(tier) = rule.tier.get(ADMISSION).filter(|_| !document.is_broken(&table)) else { return };
    let caps = ["max_in_flight", "prefill_max_in_flight", "decode_max_in_flight"];
    let [all, prefill, decode] = caps.map(|key| tier.0.get(key).is_some_and(|cap| !cap.is_null()));
    let decode_tiers = rule.pair.as_ref().map(|pair| &pair.tiers);
    for (key, tiers, part, capped) in [
        ("tiers", Some(&rule.tiers), "prefill", all || prefill),
        ("decode_tiers", decode_tiers, "decode", all || decode),
    ] {
        let lacks = tiers.is_some_and(|tiers| !tiers.contains(&ADMISSION));
        if lacks && capped && document.origin.has(key) && !document.is_broken(key) {
            let warning = document
                .error(key, format!("lacks \"{ADMISSION}\": the caps of [{table}] do not hold for {part}"))
                .hint(format!("put \"{ADMISSION}\" first, as in the other ladder"));
            document.report(warning.warning());
        }
    }
    let queue = format!("{table}.queue_depth");
    let waits = tier.0.get("queue_depth").and_then(Value::as_u64).is_some_and(|depth| depth > 0);
    if waits && !(all || prefill || decode) && document.origin.has(&queue) {
        let unused = document
            .error(&queue, "is not used: without a cap nobody waits")
            .found(document.origin.text(&queue))
            .hint("add `max_in_flight`");
        document.report(unused.warning());
    }
}

fn ladder(document: &mut Document, rule: &RuleConfig, kinds: &[TierKind]) {
    never_asked(document, "tiers", &rule.tiers, kinds);
    admission_first(document, "tiers", &rule.tiers);
    let exact = rule.tiers.iter().position(|name| *name == KV_EXACT);
    if let Some(at) = exact.filter(|_| !rule.engine.announces_blocks && !document.is_broken("engine")) {
        let others = kinds.iter().map(|k| k.name).filter(|name| *name != KV_EXACT);
        let error = document
            .error(&format!("tiers[{at}]"), format!("cannot work: {} announces no blocks", rule.engine.name))
            .found(format!("\"{KV_EXACT}\""))
            .allowed(others.collect::<Vec<_>>().join(", "))
            .hint("leave it out: min-load ends every ladder");
        document.report(error);
    }
}

fn contract(document: &mut Document, rule: &RuleConfig) {
    let Some(contract) = rule.tier.get(KV_EXACT).and_then(|tier| tier.0.get("contract")) else { return };
    let table = format!("tier.{KV_EXACT}.contract");
    let strict = contract.get("mode").and_then(Value::as_str) == Some("strict");
    if !strict || document.is_broken(&table) || document.is_broken("engine") {
        return;
    }
    if !rule.engine.hashes {
        let able: Vec<_> = ENGINES.iter().filter(|kind| kind.hashes).map(|kind| kind.name).collect();
        let error = document
            .error(&format!("{table}.mode"), format!("\"strict\" is for {} only", able.join(", ")))
            .found(format!("\"strict\", and engine = \"{}\"", rule.engine.name))
            .allowed("\"auto\"")
            .hint("write mode = \"auto\", or correct `engine`");
        return document.report(error);
    }
    for key in ["algorithm", "block_size"] {
        if contract.get(key).is_none() {
            let error = document
                .error(
                    &format!("{table}.{key}"),
                    "is missing: mode = \"strict\" compares with the engine's own hashes",
                )
                .hint(format!("add `{key}` as the engine is started with, or write mode = \"auto\""));
            document.report(error);
        }
    }
    let usable = strict_contract(rule).filter(|contract| contract.hasher().is_ok());
    if let Some(caveat) = usable.and_then(|contract| contract.caveat()) {
        let warning = document.error(&format!("{table}.none_hash_seed"), caveat.to_string()).hint(SEED);
        document.report(warning.warning());
    }
}

/// What to do about a seed that is not given.
pub(super) const SEED: &str = "start the engines with a fixed PYTHONHASHSEED and give it here";

/// What a rule compares hashes by; `None` under `auto`, or when a part is missing.
pub(super) fn strict_contract(rule: &RuleConfig) -> Option<Contract> {
    let contract = rule.tier.get(KV_EXACT)?.0.get("contract")?;
    let strict = contract.get("mode")?.as_str() == Some("strict");
    if strict { Contract::deserialize(contract).ok() } else { None }
}

/// Whether a model's tokenizer lies in the folder of tokenizers.
pub(super) fn is_staged(tokenizers: &Path, slug: &str) -> bool {
    tokenizers.join(slug).join("tokenizer.json").is_file()
}

/// Endpoints of whose blocks nobody hears.
fn silent(document: &mut Document, rule: &RuleConfig) {
    let broken = ["endpoint", "events", "engine"].iter().any(|key| document.is_broken(key));
    // what decode holds is not asked for
    let holds = |e: &EndpointConfig| e.role != Role::Decode;
    let silent = |at: &usize| rule.endpoints.get(*at).is_some_and(|e| e.kv_events.is_none() && holds(e));
    let all: Vec<usize> = (0..rule.endpoints.len()).filter(silent).collect();
    if broken || all.is_empty() {
        return;
    }
    if all.len() == rule.endpoints.iter().filter(|e| holds(e)).count() {
        let key = if document.origin.has("events.port") { "events.port" } else { "tiers" };
        let warning = document
            .error(key, format!("{KV_EXACT} can never hit: no endpoint says where it publishes its blocks"))
            .hint("give `events.port`, or `kv_events` of each endpoint");
        return document.report(warning.warning());
    }
    for at in all {
        let warning = document
            .error(
                &format!("endpoint[{at}].kv_events"),
                format!("is missing, and there is no `events.port`: {KV_EXACT} never chooses this endpoint"),
            )
            .hint("add `kv_events`");
        document.report(warning.warning());
    }
}

fn models(document: &mut Document, rule: &RuleConfig, tokenizers: &Path) {
    let staged = |slug: &str| is_staged(tokenizers, slug);
    let base = rule.base_model();
    if rule.matches.models.is_empty() {
        let entries = std::fs::read_dir(tokenizers).into_iter().flatten().flatten();
        if !entries.map(|e| e.file_name()).any(|name| staged(&name.to_string_lossy())) {
            let warning = document
                .error("tiers", format!("{KV_EXACT} can never hit: no tokenizer is staged"))
                .found(tokenizers.display().to_string())
                .hint("put the model's tokenizer.json into <slug>/ there; the slug is its name with / written as __");
            document.report(warning.warning());
        }
    }
    for (at, model) in rule.matches.models.iter().enumerate() {
        if base.is_some_and(|base| base != model) {
            continue; // an adapter: it shares the base's tokenizer, whose absence is told there
        }
        let key = format!("match.models[{at}]");
        match Slug::new(model) {
            Err(why) => {
                let error = document
                    .error(&key, format!("can have no tokenizer: {why}"))
                    .found(format!("\"{model}\""))
                    .hint(format!("serve the model under another name, or leave {KV_EXACT} out of `tiers`"));
                document.report(error);
            }
            Ok(slug) if !staged(slug.as_str()) => {
                let folder = tokenizers.join(slug.as_str());
                let warning = document
                    .error(&key, format!("has no tokenizer: {KV_EXACT} passes on its requests"))
                    .found(format!("\"{model}\""))
                    .hint(format!(
                        "put its tokenizer.json and tokenizer_config.json into {}",
                        folder.display()
                    ));
                document.report(warning.warning());
            }
            Ok(_) => {}
        }
    }
}
