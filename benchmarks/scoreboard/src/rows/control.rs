//! Rows 27 to 29: configurations that change, break, and are asked for in storms.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::{Lab, MODEL, engines, pool};
use crate::Result;
use crate::board::Board;
use crate::client::{completion, get, once};
use crate::engine::{Engine, Script};
use crate::gateway::{Gateway, Setup, free};
use crate::load::{Load, Outcome, send};
use crate::metrics::Metrics;

const LINES: &str = "tiers = [\"session\", \"least-connections\"]";

/// What a rule's file must not say, each with the key that the complaint has to name; `TOML` where there is none.
const BROKEN: &[(&str, &str)] = &[
    ("tiers = 7", "tiers"),
    ("tiers = [7]", "tiers"),
    ("tiers = [\"no-such\"]", "tiers"),
    ("tiers = [\"session\"", "TOML"),
    ("tiers = \"session\"", "tiers"),
    ("tierz = []", "tierz"),
    ("= 1", "TOML"),
    ("a b = 1", "TOML"),
    ("[match", "TOML"),
    ("[match]]", "TOML"),
    ("[[match]]", "match"),
    ("[match]\nmodels = 1", "models"),
    ("[match]\nmodels = [1]", "models"),
    ("[match]\nhosts = [\"a:80\"]", "hosts"),
    ("[match]\nhosts = [\"*.a\"]", "hosts"),
    ("[match]\npath_prefix = \"v1\"", "path_prefix"),
    ("[match]\nlistener = \"none\"", "listener"),
    ("[match]\nlistener = 5", "listener"),
    ("[match]\nmodel = \"m\"", "model"),
    ("engine = \"no-such\"", "engine"),
    ("engine = true", "engine"),
    ("shape = \"round\"", "shape"),
    ("shape = \"prefill-decode\"", "endpoint"),
    ("id = 0", "id"),
    ("id = -1", "id"),
    ("id = \"1\"", "id"),
    ("id = 4294967296", "id"),
    ("name = \"\"", "name"),
    ("name = \"a b\"", "name"),
    ("name = 1", "name"),
    ("explain = \"yes\"", "explain"),
    ("explain = 1", "explain"),
    ("[limits]\nbody = \"1XB\"", "body"),
    ("[limits]\nbody = -1", "body"),
    ("[limits]\nbody = \"2GiB\"", "body"),
    ("[retry]\nattempts = 0", "attempts"),
    ("[retry]\nattempts = 17", "attempts"),
    ("[retry]\nattempts = 1.5", "attempts"),
    ("[limits]\nnone = 1", "none"),
    ("[timeouts]\nidle = 5", "idle"),
    ("[timeouts]\nidle = \"5\"", "idle"),
    ("[timeouts]\nidle = \"0s\"", "idle"),
    ("[timeouts]\nidle = \"25h\"", "idle"),
    ("[timeouts]\nconnect = \"2m\"", "connect"),
    ("[timeouts]\nfirst = \"1s\"", "first"),
    ("[tier.session]\nttl = \"1ms\"", "ttl"),
    ("[tier.session]\nttl = 300", "ttl"),
    ("[tier.session]\nmax_sessions = 0", "max_sessions"),
    ("[tier.none]\na = 1", "none"),
    ("[events]\nport = 65536", "port"),
    ("[events]\nport = \"5557\"", "port"),
    ("[[endpoint]]", "address"),
    ("[[endpoint]]\naddress = \"nowhere\"", "address"),
    ("[[endpoint]]\naddress = \"127.0.0.1:0\"", "address"),
    ("[[endpoint]]\naddress = \"127.0.0.1:9\"\nweight = 0", "weight"),
    ("[[endpoint]]\naddress = \"127.0.0.1:9\"\nrole = \"boss\"", "role"),
];

/// Every broken file is refused with its place and key, and what was in force serves on.
pub async fn broken(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(2, Script::default()).await?;
    let gateway = lab.pool("", LINES, &engines).await?;
    let refused = |m: &Metrics| m.sum("kvgate_config_reloads_total", &["result=\"refused\""]);
    let (mut taken, mut vague) = (Vec::new(), Vec::new());
    let (stop, address) = (Arc::new(AtomicBool::new(false)), gateway.address);
    let told = stop.clone();
    let loading = tokio::spawn(async move {
        let (mut outcome, mut open) = (Outcome::default(), None);
        while !told.load(Relaxed) {
            outcome.add(&send(&mut open, address, &completion(MODEL, "a", false, 1)).await);
            sleep(Duration::from_millis(5)).await;
        }
        outcome
    });
    for (lines, key) in BROKEN {
        let (before, length) = (refused(&gateway.metrics().await), gateway.log().len());
        // nothing else is wrong with the file
        let own = pool("", &engines).replacen("name = \"pool\"\n", "", 1);
        let name = if lines.starts_with("name") { "" } else { "name = \"pool\"\n" };
        let tiers = if lines.starts_with("tiers") { "" } else { LINES };
        gateway.setup.rule("pool", &format!("{name}{tiers}\n{lines}\n{own}"))?;
        if gateway.until("refused", Duration::from_secs(5), |m| refused(m) > before).await.is_err() {
            taken.push(*lines);
            continue;
        }
        let problem = readiness(&gateway).await["config_problem"].as_str().unwrap_or_default().to_owned();
        let said = gateway.log().get(length..).unwrap_or_default().to_owned() + &problem;
        if !places(&said, key) {
            vague.push((*lines, said));
        }
    }
    gateway.setup.rule("pool", &pool(LINES, &engines))?;
    stop.store(true, Relaxed);
    let outcome = loading.await?;
    for what in &taken {
        eprintln!("was taken: {what}");
    }
    for (what, said) in &vague {
        eprintln!("was refused without file, line and key: {what}: {said}");
    }
    board.least("broken files", BROKEN.len() as f64, "", 50.0);
    board.exactly("taken all the same", taken.len() as f64, 0.0);
    board.exactly("refused without file, line and key", vague.len() as f64, 0.0);
    let healthy = |m: &Metrics| m.sum("kvgate_config_last_reload_successful", &[]) == 1.0;
    gateway.until("the good file is in force", Duration::from_secs(10), healthy).await?;
    board.least("requests meanwhile", outcome.sent as f64, "", 100.0);
    board.exactly("requests lost", (outcome.lost + outcome.failed) as f64, 0.0);
    board.exactly(
        "second gateways on a port in use that start, or end without its key",
        f64::from(u8::from(!refuses_port(lab, &gateway)?)),
        0.0,
    );
    gateway.settle(board, Some(outcome.sent)).await;
    Ok(())
}

/// Whether a gateway does not start where one listens, and says where that is configured.
fn refuses_port(lab: &Lab, first: &Gateway) -> Result<bool> {
    let other: Setup = lab.setup()?;
    other.rule("pool", "name = \"pool\"\n[[endpoint]]\naddress = \"127.0.0.1:9\"\n")?;
    let file = other.folder().join("gateway.toml");
    std::fs::write(
        &file,
        format!("[[listener]]\naddress = \"{}\"\n[admin]\naddress = \"{}\"\n", first.address, free()?),
    )?;
    let child = std::process::Command::new(&lab.kvgate)
        .args(["run", "--config"])
        .arg(&file)
        .stderr(std::fs::File::create(other.folder().join("log"))?)
        .spawn();
    let mut child = child?;
    for _ in 0..600 {
        if let Some(status) = child.try_wait()? {
            let said = std::fs::read_to_string(other.folder().join("log"))?;
            return Ok(!status.success() && said.contains("listener[0].address"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    child.kill()?;
    child.wait()?;
    Ok(false)
}

/// Whether this names the file, a line of it, and this key as the complaint's subject: `pool.toml:3:10: match.models: …`.
fn places(said: &str, key: &str) -> bool {
    said.split("pool.toml:").skip(1).any(|rest| {
        let mut parts = rest.split(": ");
        let (line, path) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let last = path.rsplit('.').next().unwrap_or_default();
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        line.split(':').all(is_number) && last.split('[').next() == Some(key)
    })
}

async fn readiness(gateway: &Gateway) -> serde_json::Value {
    serde_json::from_slice(&gateway.page("/readyz").await.body).unwrap_or_default()
}

/// Fifty reloads under 1,000 requests per second: none is lost, and what is known stays known.
pub async fn reloads(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(8, Script::default()).await?;
    let gateway = lab.pool("", LINES, &engines).await?;
    let good = |m: &Metrics| m.sum("kvgate_config_reloads_total", &["result=\"good\""]);
    for number in 0..200 {
        let body = format!(r#"{{"model":"m","user":"u{number}","prompt":"one","max_tokens":1}}"#);
        once(
            gateway.address,
            &crate::client::post("/v1/completions", &format!("X-Session-Id: s{number}\r\n"), body.as_bytes()),
        )
        .await;
    }
    let sessions = |m: &Metrics| m.sum("loxilb_pd_sessions_active", &[]);
    let before = sessions(&gateway.metrics().await);
    let count = lab.scaled(50);
    let time = Duration::from_millis(400) * u32::try_from(count)?;
    let load = Load { address: gateway.address, rate: 1000.0, time, connections: 64 };
    let reloading = async {
        let mut late = 0;
        for number in 0..count {
            let start = Instant::now();
            let seen = good(&gateway.metrics().await);
            let text = pool(&format!("{LINES}\n[retry]\nattempts = {}", 2 + number % 2), &engines);
            gateway.setup.rule("pool", &text)?;
            late += u32::from(
                gateway.until("reloaded", Duration::from_secs(5), |m| good(m) > seen).await.is_err(),
            );
            sleep(Duration::from_millis(400).saturating_sub(start.elapsed())).await;
        }
        Ok::<_, crate::Error>(late)
    };
    let (outcome, late) = futures::future::join(load.run(|_| get("/v1/models"), |_, _| ()), reloading).await;
    load.offered(board, "under reloads", &outcome);
    board.exactly("reloads that did not come into force", late?.into(), 0.0);
    board.exactly("requests lost", outcome.lost as f64, 0.0);
    board.exactly("answers 5xx", outcome.failed as f64, 0.0);
    let metrics = gateway.metrics().await;
    board.exactly("conversations known before", before, 200.0);
    board.exactly("conversations forgotten", before - sessions(&metrics), 0.0);
    gateway.settle(board, Some(outcome.sent + 200)).await;
    drop::<Vec<Engine>>(engines);
    Ok(())
}

/// 200 signals in two seconds: few reloads, the process lives, the last file wins.
pub async fn storm(lab: &Lab, board: &mut Board) -> Result {
    let engines = engines(2, Script::default()).await?;
    let mut gateway = lab.pool("", LINES, &engines).await?;
    let good = |m: &Metrics| m.sum("kvgate_config_reloads_total", &["result=\"good\""]);
    let before = good(&gateway.metrics().await);
    for number in 0..20 {
        let text = pool(&format!("{LINES}\n[match]\nmodels = [\"m{number}\"]"), &engines);
        gateway.setup.rule("pool", &text)?;
        gateway.signal("HUP", 10)?;
        sleep(Duration::from_millis(100)).await;
    }
    let last = completion("m19", "one", false, 1);
    let start = Instant::now();
    while once(gateway.address, &last).await.status != 200 && start.elapsed() < Duration::from_secs(10) {
        sleep(Duration::from_millis(50)).await;
    }
    board.exactly("processes that died", f64::from(u8::from(gateway.ended().is_some())), 0.0);
    let reloads = good(&gateway.metrics().await) - before;
    board.within("reloads of 200 signals", reloads, "", 1.0, 100.0);
    let answer = once(gateway.address, &last).await;
    board.exactly("status by the last configuration", answer.status.into(), 200.0);
    let other = once(gateway.address, &completion("m18", "one", false, 1)).await;
    board.exactly("status by the one before", other.status.into(), 503.0);
    gateway.settle(board, None).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::places;

    #[test]
    fn a_place_is_a_file_a_line_and_a_key() {
        for said in
            ["/a/pool.toml:3:1: id: is", "/a/pool.toml:12:7: match.id: is", "pool.toml:1: endpoint[2].id: is"]
        {
            assert!(places(said, "id"), "{said}");
        }
        for said in
            ["pool.toml: id: is", "pool.toml:1: valid: is", "pool.toml:1:9: name: no id: is", "id", ""]
        {
            assert!(!places(said, "id"), "{said}");
        }
        assert!(places("pool.toml:1: TOML: unclosed table", "TOML"));
    }
}
