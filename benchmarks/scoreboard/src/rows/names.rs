//! Rows 23 and 24: what clients name.

use std::path::Path;
use std::time::Instant;

use super::{Lab, MODEL, engines};
use crate::Result;
use crate::board::Board;
use crate::client::{completion, once, post};
use crate::engine::Script;
use crate::load::send;

/// Names that lead out of a folder, where a name leads anywhere.
const OUTSIDE: &[&str] = &[
    "",
    "..",
    ".",
    "/",
    "../..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../etc/passwd",
    "..\\\\..\\\\etc",
    "%2e%2e",
    "%2e%2e%2fetc%2fpasswd",
    "..%2f..%2fetc",
    "a\\u0000b",
    "\\u0000",
    "a\\n",
    "CON",
    "~",
    "~root",
    "$HOME",
    "`id`",
    "a b",
    "ä/ö",
    "\\u202e",
    "a//b",
    "a/./b",
    "./a",
    "a/",
    "/a",
    "file:///etc/passwd",
    "\\\\\\\\host\\\\share",
    "linked",
    "outside/secret",
    "tiny-words/../tiny-words",
    "tiny-words/.",
];

/// Odd names are passed on, and no file outside of the folder of tokenizers is opened for them.
pub async fn models(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(2, Script::default()).await?;
    let mut setup = lab.setup()?;
    let store = setup.folder().join("tokenizers");
    std::fs::create_dir(&store)?;
    let staged = setup.tokenizers.join(MODEL);
    let secret = setup.folder().join("secret");
    for (from, to) in [(&staged, store.join(MODEL)), (&staged, store.join("a__b")), (&staged, secret.clone())]
    {
        std::fs::create_dir(&to)?;
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(from.join(file), to.join(file))?;
        }
    }
    std::os::unix::fs::symlink(&secret, store.join("linked"))?;
    setup.tokenizers = store.clone();
    // kv-exact, or no tier asks for tokens
    let events = "tiers = [\"kv-exact\", \"least-connections\"]\n[events]\nport = 0";
    let publisher = crate::publisher::Publisher::start().await?;
    let mut rule = super::pool(events, &[]);
    for engine in &engines {
        rule.push_str(&format!("[[endpoint]]\naddress = \"{}\"\n", engine.address));
    }
    rule.push_str(&format!("kv_events = {:?}\n", publisher.address));
    setup.rule("pool", &rule)?;
    let trace = setup.folder().join("trace");
    let traced =
        std::process::Command::new("strace").arg("-V").output().is_ok_and(|out| out.status.success());
    if traced {
        // as the gateway's grandchild, so that the process we know is the gateway; with what links led to
        setup.under = format!("strace -D -f -qq -y -e trace=open,openat,openat2 -o '{}'", trace.display());
    }
    let gateway = setup.start().await?;
    let names: Vec<_> = OUTSIDE
        .iter()
        .map(|name| (*name).to_owned())
        .chain(["m".repeat(1 << 20), "../".repeat(1 << 18)])
        .collect();
    let (mut lost, mut sent, mut open) = (0u32, 0u64, None);
    for name in &names {
        for wire in [completion(name, "one two three four five six", false, 1), header(name)] {
            let answer = send(&mut open, gateway.address, &wire).await;
            sent += 1;
            lost += u32::from(!answer.kept() || answer.status != 200);
        }
    }
    board.exactly("odd names not passed on", lost.into(), 0.0);
    // a name and what it would be as a folder's are two models: only one of them is staged
    let page = gateway.page("/readyz").await;
    let told: serde_json::Value = serde_json::from_slice(&page.body)?;
    let ready = told["tokenizers"].as_array().into_iter().flatten().filter(|t| t["state"] == "ready");
    let wrong = ready.filter(|t| !matches!(t["model"].as_str(), Some(MODEL | "a/b"))).count();
    board.exactly("tokenizers loaded for a name that is not theirs", wrong as f64, 0.0);
    if traced {
        let opened = std::fs::read_to_string(&trace)?;
        // folders are listed for what changed in them
        let within = format!("{}/", secret.display());
        let outside: Vec<_> =
            opened.lines().filter(|line| line.contains("passwd") || line.contains(&*within)).collect();
        outside.iter().take(3).for_each(|line| eprintln!("outside: {line}"));
        board.least("files opened in the folder", inside(&opened, &store), "", 1.0);
        board.exactly("files opened outside of the folder", outside.len() as f64, 0.0);
    } else {
        board.broken("files opened outside of the folder: strace is not installed");
    }
    gateway.settle(board, Some(sent)).await;
    Ok(())
}

/// How many: none, and nothing was traced.
fn inside(opened: &str, store: &Path) -> f64 {
    let staged = store.join(MODEL);
    opened.lines().filter(|line| line.contains(&*staged.to_string_lossy())).count() as f64
}

/// The name in `X-Model`, where a header can hold it.
fn header(name: &str) -> Vec<u8> {
    let printable = name.bytes().all(|b| (0x20..0x7f).contains(&b)) && name.len() < 4096;
    let named = if printable { format!("X-Model: {name}\r\n") } else { String::new() };
    post("/v1/completions", &named, br#"{"prompt":"one two three four five six","max_tokens":1}"#)
}

/// 10,000 unknown models and conversations: no new series, a quick page, a bounded table.
pub async fn cardinality(lab: &Lab, board: &mut Board) -> Result {
    const SESSIONS: f64 = 2000.0;
    let engines = engines(8, Script::default()).await?;
    let rule =
        format!("tiers = [\"session\", \"least-connections\"]\n[tier.session]\nmax_sessions = {SESSIONS}");
    let gateway = lab.pool("", &rule, &engines).await?;
    once(gateway.address, &completion(MODEL, "one two three", false, 1)).await;
    let before = gateway.metrics().await.count();
    let (mut lost, mut open) = (0u32, None);
    let count = lab.scaled(10_000).max(3000);
    for number in 0..count {
        let body = format!(
            r#"{{"model":"model-{number}","user":"user-{number}","prompt":"one two three","max_tokens":1}}"#
        );
        let session = format!("X-Session-Id: session-{number}\r\n");
        let answer =
            send(&mut open, gateway.address, &post("/v1/completions", &session, body.as_bytes())).await;
        lost += u32::from(!answer.kept() || answer.status != 200);
    }
    board.exactly("requests lost", lost.into(), 0.0);
    let start = Instant::now();
    let metrics = gateway.metrics().await;
    let scrape = start.elapsed();
    board.exactly("new series", metrics.count() as f64 - before as f64, 0.0);
    board.most("scrape", scrape.as_secs_f64() * 1e3, "ms", 50.0);
    board.within("conversations kept", metrics.sum("loxilb_pd_sessions_active", &[]), "", 1.0, SESSIONS);
    board.most("memory", gateway.memory("VmRSS") / 1e6, "MB", 150.0);
    gateway.settle(board, Some(count + 1)).await;
    Ok(())
}
