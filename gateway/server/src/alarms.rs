//! The alarm about events that do not come.

use std::collections::HashMap;
use std::time::Instant;

use crate::plan::{Plan, Rule};
use crate::world::World;

/// Watches rules with KV-exact routing: requests flow, and no engine publishes.
#[derive(Default)]
pub struct NoEvents {
    seen: HashMap<String, Seen>,
}

/// What a rule looked like when an event was last seen.
struct Seen {
    messages: u64,
    requests: u64,
    since: Instant,
}

impl NoEvents {
    /// Looks once.
    pub fn look(&mut self, plan: &Plan, world: &World, now: Instant) {
        self.seen
            .retain(|name, _| plan.rules.iter().any(|rule| rule.config.name == *name && rule.kv.is_some()));
        for rule in &plan.rules {
            self.rule(rule, plan, world, now);
        }
    }

    fn rule(&mut self, rule: &Rule, plan: &Plan, world: &World, now: Instant) {
        let Some(alarm) = &rule.no_events else { return };
        let limits = &plan.gateway.alarms;
        let feeds = || rule.endpoints.iter().filter_map(|e| world.feed(e.engine.id()));
        let messages: u64 = feeds().map(|status| status.messages_total.get()).sum();
        // what is held counts only while it can be trusted
        let blocks: u64 =
            feeds().filter(|status| status.settled.get()).map(|status| status.blocks.get()).sum();
        let requests = rule.counts.chosen.get();
        let name = rule.config.name.clone();
        let seen = self.seen.entry(name).or_insert(Seen { messages, requests, since: now });
        // a fleet that holds what it is asked for has nothing to announce
        if messages != seen.messages || blocks > 0 || requests < seen.requests {
            *seen = Seen { messages, requests, since: now };
            if alarm.clear() {
                tracing::info!(rule = rule.config.name, alarm = "kv_no_events", "events arrive again");
            }
            return;
        }
        if requests == seen.requests {
            seen.since = now;
            return;
        }
        let limit = limits.events_missing_requests;
        let due = limit > 0
            && requests - seen.requests >= limit
            && now.saturating_duration_since(seen.since) >= limits.events_missing_after;
        if !due {
            return;
        }
        let connected = feeds().filter(|status| status.connected.get()).count();
        let detail = format!(
            "{} requests and not one KV event from {} endpoints, {connected} of which accept the connection: {}",
            requests - seen.requests,
            rule.endpoints.len(),
            if connected == 0 {
                "check [events].port and that the engines publish there (--kv-events-config)"
            } else {
                "check that the engines run with enable_kv_cache_events and prefix caching, and that prompts fill a block"
            },
        );
        if alarm.raise(detail.clone()) {
            tracing::warn!(rule = rule.config.name, alarm = "kv_no_events", "{detail}");
        }
    }
}
