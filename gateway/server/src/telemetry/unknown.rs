//! The alarm about engines whose capacity is not known.

use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

use kvgate_core::{Endpoint, EngineId};
use kvgate_engines::metrics::Family;

use super::families::FamilyState;
use crate::plan::{Plan, Rule};
use crate::world::World;

/// Engines that are named in an alarm, at most.
const NAMED: usize = 8;

/// Watches rules that go by capacity.
#[derive(Default)]
pub(super) struct Unknown {
    /// By rule, the engines that were told of.
    told: HashMap<String, BTreeSet<EngineId>>,
}

impl Unknown {
    /// Looks once.
    pub fn look(&mut self, plan: &Plan, world: &World, now: Instant) {
        self.told.retain(|name, _| plan.rules.iter().any(|rule| rule.config.name == *name));
        for rule in &plan.rules {
            self.rule(rule, world, now);
        }
    }

    fn rule(&mut self, rule: &Rule, world: &World, now: Instant) {
        let Some(alarm) = &rule.capacity_unknown else { return };
        let name = rule.config.name.as_str();
        let reasons =
            |e: &Endpoint| Some((e.engine.id(), e.engine.address().to_owned(), why(rule, e, world, now)?));
        let weighed = || rule.endpoints.iter().filter(|e| rule.config.weighs_capacity(e.role));
        let unknown: Vec<_> = weighed().filter_map(reasons).collect();
        if unknown.is_empty() {
            self.told.remove(name);
            if alarm.clear() {
                tracing::info!(
                    rule = name,
                    alarm = "capacity_unknown",
                    "there is no engine any more whose capacity is not known"
                );
            }
            return;
        }
        let named = unknown.iter().take(NAMED).map(|(_, address, why)| format!("{address} {why}"));
        let mut named: Vec<_> = named.collect();
        if unknown.len() > NAMED {
            named.push(format!("and {} more", unknown.len() - NAMED));
        }
        let mut detail = format!(
            "the capacity of {} of {} engines is not known, all are taken by their weights alone: {}",
            unknown.len(),
            weighed().count(),
            named.join(", "),
        );
        let reason = |id: EngineId| world.scraper(id).and_then(|status| status.reason());
        // an engine that cannot be reached says nothing of how it was started
        if unknown.iter().any(|(id, ..)| !matches!(reason(*id), Some("connect" | "timeout"))) {
            detail.push_str("; ");
            detail.push_str(rule.config.engine.metrics.hint);
        }
        alarm.raise(detail.clone());
        let now: BTreeSet<_> = unknown.into_iter().map(|(id, ..)| id).collect();
        let told = self.told.entry(name.to_owned()).or_default();
        if !now.is_subset(told) {
            tracing::warn!(rule = name, alarm = "capacity_unknown", "{detail}");
        }
        *told = now;
    }
}

/// Why nothing is known of an engine's capacity; `None` if it is, or may yet come to be in time: an engine may say so
/// from its first request on only.
fn why(rule: &Rule, endpoint: &Endpoint, world: &World, now: Instant) -> Option<String> {
    let status = world.scraper(endpoint.engine.id())?;
    match endpoint.engine.telemetry(now) {
        Some(told) if told.blocks.is_some() => None,
        // not looked for, or not yet to be found
        Some(_) if !matches!(status.family(Family::Blocks), Some(FamilyState::Missing)) => None,
        Some(_) => Some("does not say how many KV blocks it has".into()),
        None if status.age(now) < rule.config.telemetry.max_age => None,
        None => Some(status.problem().unwrap_or_else(|| "has not been heard".into())),
    }
}
