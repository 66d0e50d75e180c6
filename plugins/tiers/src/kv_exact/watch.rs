//! Notices that nothing ever matches: what else would show as a slow fleet and nothing more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvgate_core::{Alarm, BuildContext, Counter};

use super::config::{Config, ContractConfig};
use super::counters;
use super::score::Overlaps;

pub struct Watch {
    /// Scored requests in a row without overlap from which on something is wrong; 0 never.
    limit: u64,
    in_vain: Arc<AtomicU64>,
    zero_hits: Arc<Counter>,
    /// Whether this tier raised the alarm: one before it may have done so under other settings.
    raised: AtomicBool,
    alarm: Arc<Alarm>,
    contract: ContractConfig,
    rule: String,
}

impl Watch {
    pub fn new(config: &Config, context: &BuildContext<'_>) -> Self {
        Self {
            limit: config.zero_hit_requests,
            in_vain: Arc::default(),
            zero_hits: counters::zero_hits(context),
            raised: AtomicBool::new(false),
            alarm: context.alarm("kv_zero_hits"),
            contract: config.contract.clone(),
            rule: context.rule.to_owned(),
        }
    }

    /// A request was looked up.
    pub fn saw(&self, overlaps: &Overlaps) {
        if overlaps.any_held() {
            self.in_vain.store(0, Ordering::Relaxed);
            self.raised.store(false, Ordering::Relaxed);
            if self.alarm.clear() {
                tracing::info!(rule = self.rule, "kv-exact: prompts match the inventory again");
            }
        } else if overlaps.scored && self.limit > 0 {
            let in_vain = self.in_vain.fetch_add(1, Ordering::Relaxed) + 1;
            if in_vain < self.limit {
                return;
            }
            self.zero_hits.inc();
            if self.raised.swap(true, Ordering::Relaxed) {
                return;
            }
            let (contract, count) = (self.contract.clone(), Arc::clone(&self.in_vain));
            if self.alarm.raise_with(move || contract.likely_fault(count.load(Ordering::Relaxed))) {
                let detail = self.contract.likely_fault(in_vain);
                tracing::warn!(rule = self.rule, alarm = "kv_zero_hits", "{detail}");
            }
        }
    }
}
