//! Notices that nothing ever matches: what else would show as a slow fleet and nothing more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvgate_core::{Alarm, BuildContext, Counter};

use super::config::Config;
use super::counters;
use super::score::Overlaps;

pub struct Watch {
    /// Scored requests in a row without overlap from which on something is wrong; 0 never.
    limit: u64,
    in_vain: AtomicU64,
    zero_hits: Arc<Counter>,
    alarm: Arc<Alarm>,
    rule: String,
}

impl Watch {
    pub fn new(config: &Config, context: &BuildContext<'_>) -> Self {
        Self {
            limit: config.zero_hit_requests,
            in_vain: AtomicU64::new(0),
            zero_hits: counters::zero_hits(context),
            alarm: context.alarm("kv_zero_hits"),
            rule: context.rule.to_owned(),
        }
    }

    /// A request was looked up.
    pub fn saw(&self, overlaps: &Overlaps, config: &Config) {
        if overlaps.tokens.iter().any(|overlap| *overlap > 0) {
            self.in_vain.store(0, Ordering::Relaxed);
            if self.alarm.clear() {
                tracing::info!(rule = self.rule, "kv-exact: prompts match the inventory again");
            }
        } else if overlaps.scored && self.limit > 0 {
            let in_vain = self.in_vain.fetch_add(1, Ordering::Relaxed) + 1;
            if in_vain < self.limit {
                return;
            }
            self.zero_hits.inc();
            let detail = config.contract.likely_fault(in_vain);
            if self.alarm.raise(detail.clone()) {
                tracing::warn!(rule = self.rule, alarm = "kv_zero_hits", "{detail}");
            }
        }
    }
}
