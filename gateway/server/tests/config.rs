//! The configuration, through the same door as the gateway: files on disk.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use kvgate::config::{self, Config, Diagnostics, Shape};
use kvgate_core::{Role, TierKind};
use kvgate_tiers::TIERS;
use tempfile::TempDir;

/// A configuration folder under construction.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        fs::create_dir(folder.path("rules")).unwrap();
        folder.write("gateway.toml", "")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(self, name: &str, text: impl AsRef<[u8]>) -> Self {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
        self
    }

    fn load_with(&self, kinds: &[TierKind]) -> Result<Config, Diagnostics> {
        config::load(&self.path("gateway.toml"), kinds)
    }

    fn load(&self) -> Result<Config, Diagnostics> {
        self.load_with(TIERS)
    }

    /// What is wrong with it, a line each, without the folder's name.
    fn problems(&self) -> String {
        let text = match self.load() {
            Ok(config) => Diagnostics(config.warnings).to_string(),
            Err(problems) => problems.to_string(),
        };
        text.replace(&format!("{}/", self.0.path().display()), "")
    }
}

const RULE: &str = "tiers = [\"round-robin\"]\n[[endpoint]]\naddress = \"127.0.0.1:8001\"\n";

#[test]
fn an_empty_gateway_toml_is_complete() {
    let folder = Folder::new().write("rules/one.toml", RULE);
    let config = folder.load().unwrap();
    let gateway = &config.gateway;
    assert_eq!(gateway.listeners.len(), 1);
    assert_eq!(gateway.listeners[0].address.to_string(), "127.0.0.1:8080");
    assert_eq!(gateway.admin.address.to_string(), "127.0.0.1:11111");
    assert_eq!(gateway.server.rules, folder.path("rules"));
    assert_eq!(gateway.server.grace_period, Duration::from_secs(30));
    assert_eq!(gateway.limits.body, 16 << 20);
    let rule = &config.rules[0];
    assert_eq!((rule.name.as_str(), rule.engine.name, rule.shape), ("one", "vllm", Shape::Pool));
    assert_eq!(rule.endpoints[0].role, Role::Any);
    assert_eq!((rule.endpoints[0].kv_events.as_deref(), rule.endpoints[0].nixl_port), (None, 8001));
    assert_eq!(rule.timeouts, gateway.timeouts);
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
}

#[test]
fn problems_of_all_files_come_at_once() {
    let folder = Folder::new()
        .write("gateway.toml", "[server]\nthreds = 4\n[limits]\nbody = \"16MB\"\n")
        .write("rules/one.toml", "shape = \"pol\"\n[[endpoint]]\naddress = \"http://127.0.0.1:8001\"\n")
        .write("rules/two.toml", "name = = 1");
    insta::assert_snapshot!(folder.problems(), @r#"
    gateway.toml:2:1: server.threds: unknown key; found threds; allowed: rules, tokenizers, threads, grace_period, reload_debounce; did you mean `threads`?
    gateway.toml:4:8: limits.body: is not a size; found "16MB"; allowed: a size, "1KiB" to "1GiB"; write a whole number and B, KiB, MiB or GiB
    rules/one.toml:1:1: tiers: kv-exact can never hit: no tokenizer is staged; found tokenizers; put the model's tokenizer.json into <slug>/ there; the slug is its name with / written as __
    rules/one.toml:1:9: shape: is not one of the words allowed here; found "pol"; allowed: "pool", "prefill-decode"; did you mean "pool"?
    rules/one.toml:3:11: endpoint[0].address: does not have the right form; found "http://127.0.0.1:8001"; allowed: a host and a port, "10.0.0.7:8000" or "engine-0.svc:8000"; write "127.0.0.1:8001"
    rules/two.toml:1:8: TOML: extra `=`, expected nothing
    rules/two.toml:1:10: TOML: unexpected key or value, expected newline, `#`
    "#);
}

#[test]
fn rendered() {
    let folder = Folder::new().write("gateway.toml", "[server]\nthreds = 4\n[limits]\nbody = \"16MB\"\n");
    let text = folder.load().unwrap_err().render(false);
    insta::assert_snapshot!(text.replace(&folder.0.path().display().to_string(), ""), @r#"
     × /gateway.toml:2: server.threds: unknown key
      ╭─[/gateway.toml:2:1]
    1 │ [server]
    2 │ threds = 4
      · ───┬──
      ·    ╰── found
    3 │ [limits]
      ╰────
     help: allowed: rules, tokenizers, threads, grace_period, reload_debounce
           did you mean `threads`?
     × /gateway.toml:4: limits.body: is not a size
      ╭─[/gateway.toml:4:8]
    3 │ [limits]
    4 │ body = "16MB"
      ·        ───┬──
      ·           ╰── found
      ╰────
     help: allowed: a size, "1KiB" to "1GiB"
           write a whole number and B, KiB, MiB or GiB
    "#);
}
