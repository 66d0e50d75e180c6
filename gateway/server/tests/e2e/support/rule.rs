//! Rule files.

use std::fmt::Display;

use kvgate_sim::Sim;

use super::MODEL;

/// A rule file.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Also the file's, without `.toml`.
    pub name: String,
    top: String,
    tables: String,
    endpoints: String,
}

impl Rule {
    /// With this ladder, for requests of any kind.
    pub fn new(name: &str, tiers: &[&str]) -> Self {
        let top = format!("name = {name:?}\ntiers = {tiers:?}\n");
        Self { name: name.into(), top, tables: String::new(), endpoints: String::new() }
    }

    /// KV-aware, else in turn; for the model of most tests.
    pub fn kv(name: &str) -> Self {
        Self::new(name, &["kv-exact", "round-robin"]).matching(&format!("models = [{MODEL:?}]"))
    }

    /// With a key at the top.
    pub fn top(mut self, line: &str) -> Self {
        self.top.push_str(&format!("{line}\n"));
        self
    }

    /// With a table.
    pub fn table(mut self, name: &str, lines: &str) -> Self {
        self.tables.push_str(&format!("[{name}]\n{lines}\n"));
        self
    }

    /// For these requests.
    pub fn matching(self, lines: &str) -> Self {
        self.table("match", lines)
    }

    /// With an endpoint.
    pub fn endpoint(mut self, address: impl Display, keys: &str) -> Self {
        self.endpoints.push_str(&format!("[[endpoint]]\naddress = \"{address}\"\n{keys}\n"));
        self
    }

    /// With an engine and its events.
    pub fn engine(self, engine: &Sim) -> Self {
        self.part(engine, "any")
    }

    /// With an engine for this part of a request, and its events.
    pub fn part(self, engine: &Sim, role: &str) -> Self {
        let role = format!("role = {role:?}\n");
        let keys = match (engine.events_endpoint(), engine.replay_endpoint()) {
            (Some(events), Some(replay)) => format!("kv_events = {events:?}\nkv_replay = {replay:?}"),
            _ => String::new(),
        };
        self.endpoint(engine.address(), &format!("{role}{keys}"))
    }

    /// With these engines and their events.
    pub fn engines<'a>(self, engines: impl IntoIterator<Item = &'a Sim>) -> Self {
        engines.into_iter().fold(self, Self::engine)
    }

    /// With an engine whose events come from elsewhere, and cannot be replayed.
    pub fn followed(self, engine: &Sim, events: &str) -> Self {
        let unreplayed = |rule: Self| rule.table("events", "replay_port_offset = 0");
        let rule = if self.tables.contains("[events]") { self } else { unreplayed(self) };
        rule.endpoint(engine.address(), &format!("kv_events = {events:?}"))
    }

    /// What is in the file.
    pub fn toml(&self) -> String {
        [self.top.as_str(), &self.tables, &self.endpoints].concat()
    }
}
