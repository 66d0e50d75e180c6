//! The alarm about events that do not come.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvgate_core::EngineId;
use kvgate_feed::plane::FeedStatus;

use crate::config::AlarmsConfig;
use crate::plan::{Plan, Rule};
use crate::world::World;

/// Watches rules with KV-exact routing: requests flow, and engines do not publish. All of a rule together, whatever
/// they are asked; and each by itself, as far as it computes prompts of which it held nothing.
#[derive(Default)]
pub struct NoEvents {
    seen: HashMap<(String, Option<EngineId>), Seen>,
}

/// What a rule, or an engine of it, looked like when an event was last seen.
struct Seen {
    messages: u64,
    requests: u64,
    since: Instant,
}

/// What it looks like now.
struct Now {
    messages: u64,
    requests: u64,
    /// It is known to hold blocks: who is asked for what it holds has nothing to announce.
    holds: bool,
}

impl Seen {
    /// The requests that should have led to events, if that is alarming.
    fn missing(&mut self, now: &Now, at: Instant, limits: &AlarmsConfig) -> Option<u64> {
        if now.messages != self.messages || now.holds || now.requests < self.requests {
            *self = Self { messages: now.messages, requests: now.requests, since: at };
        } else if now.requests == self.requests {
            self.since = at;
        }
        let (requests, limit) = (now.requests - self.requests, limits.events_missing_requests);
        let waited: Duration = at.saturating_duration_since(self.since);
        (limit > 0 && requests >= limit && waited >= limits.events_missing_after).then_some(requests)
    }
}

impl NoEvents {
    /// Looks once.
    pub fn look(&mut self, plan: &Plan, world: &World, at: Instant) {
        let known = |name: &str, engine: Option<EngineId>| {
            let mut rules = plan.rules.iter().filter(|rule| rule.kv.is_some() && rule.config.name == name);
            rules.any(|rule| engine.is_none_or(|id| rule.endpoints.iter().any(|e| e.engine.id() == id)))
        };
        self.seen.retain(|(name, engine), _| known(name, *engine));
        for rule in &plan.rules {
            self.rule(rule, &plan.gateway.alarms, world, at);
        }
    }

    fn rule(&mut self, rule: &Rule, limits: &AlarmsConfig, world: &World, at: Instant) {
        let Some(alarm) = &rule.no_events else { return };
        let name = rule.config.name.as_str();
        let mut missing = |engine: Option<EngineId>, now: Now| {
            let first = || Seen { messages: now.messages, requests: now.requests, since: at };
            let seen = self.seen.entry((name.to_owned(), engine)).or_insert_with(first);
            seen.missing(&now, at, limits)
        };
        let (mut all, mut silent, mut connected) =
            (Now { messages: 0, requests: rule.counts.chosen.get(), holds: false }, Vec::new(), 0);
        for endpoint in &rule.endpoints {
            let Some(feed) = world.feed(endpoint.engine.id()) else { continue };
            let now = now(&feed, rule.counts.cold(endpoint.index));
            all.messages += now.messages;
            all.holds |= now.holds;
            connected += usize::from(feed.connected.get());
            if let Some(requests) = missing(Some(endpoint.engine.id()), now) {
                silent.push(format!("{} ({requests} requests)", endpoint.engine.address()));
            }
        }
        let detail = match missing(None, all) {
            Some(requests) => {
                let of = rule.endpoints.len();
                let advice = if connected == 0 { UNREACHED } else { SILENT };
                format!(
                    "{requests} requests and not one KV event from {of} endpoints, {connected} of which accept the \
                     connection: {advice}"
                )
            }
            None if !silent.is_empty() => {
                let silent = silent.join(", ");
                format!(
                    "not one KV event for prompts of which nothing was held from {silent}: {UNREACHED}; {SILENT}"
                )
            }
            None => {
                if alarm.clear() {
                    tracing::info!(rule = name, alarm = "kv_no_events", "events arrive again");
                }
                return;
            }
        };
        if alarm.raise(detail.clone()) {
            tracing::warn!(rule = name, alarm = "kv_no_events", "{detail}");
        }
    }
}

const UNREACHED: &str = "check `kv_events` of the endpoints, or [events].port, and that the engines publish there \
                         (--kv-events-config)";
const SILENT: &str = "check that the engines run with enable_kv_cache_events and prefix caching, and that prompts \
                      fill a block";

fn now(feed: &Arc<FeedStatus>, requests: u64) -> Now {
    // what is held counts only while it can be trusted
    let holds = feed.settled.get() && feed.blocks.get() > 0;
    Now { messages: feed.messages_total.get(), requests, holds }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_without_events_are_missing_some_time_later() {
        let start = Instant::now();
        let limits =
            AlarmsConfig { events_missing_requests: 3, events_missing_after: Duration::from_secs(10) };
        let mut seen = Seen { messages: 5, requests: 100, since: start };
        let mut look = |messages, requests, holds, after| {
            let at = start + Duration::from_secs(after);
            seen.missing(&Now { messages, requests, holds }, at, &limits)
        };
        assert_eq!(look(5, 100, false, 60), None, "no requests, however long");
        assert_eq!(look(5, 200, false, 61), None, "the time starts with the first of them");
        assert_eq!(look(5, 102, false, 80), None, "too few");
        assert_eq!(look(5, 103, false, 80), Some(3));
        assert_eq!(look(6, 103, false, 81), None, "an event");
        assert_eq!(look(6, 200, true, 200), None, "all of it may be held");
        assert_eq!(look(6, 203, false, 201), None, "and is no more");
        assert_eq!(look(6, 204, false, 215), Some(4));
        assert_eq!(look(6, 2, false, 216), None, "counted anew");
        assert_eq!(look(6, 9, false, 300), Some(7));
        let off = AlarmsConfig { events_missing_requests: 0, ..limits };
        let all = Now { messages: 6, requests: u64::MAX, holds: false };
        assert_eq!(seen.missing(&all, start + Duration::from_secs(999), &off), None);
    }
}
