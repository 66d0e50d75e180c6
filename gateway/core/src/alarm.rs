//! Conditions an operator has to know of.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A named condition of a rule that is on or off, with what to do about it.
#[derive(Debug, Default)]
pub struct Alarm {
    detail: Mutex<Option<String>>,
}

impl Alarm {
    /// Turns it on. True if it was off: the moment to write one log line.
    pub fn raise(&self, detail: impl Into<String>) -> bool {
        let mut now = self.detail.lock().unwrap_or_else(PoisonError::into_inner);
        now.replace(detail.into()).is_none()
    }

    /// Turns it off. True if it was on.
    pub fn clear(&self) -> bool {
        self.detail.lock().unwrap_or_else(PoisonError::into_inner).take().is_some()
    }

    /// What is wrong, and the fix, while it is on.
    pub fn detail(&self) -> Option<String> {
        self.detail.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

type Key = (String, &'static str);

/// The alarms of the process by rule and name. Same rule and name give the same alarm, as long as it is held.
#[derive(Debug, Default)]
pub struct Alarms(Mutex<BTreeMap<Key, Weak<Alarm>>>);

impl Alarms {
    /// The alarm `name` of `rule`, off if it is new.
    pub fn get(&self, rule: &str, name: &'static str) -> Arc<Alarm> {
        let mut alarms = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = alarms.entry((rule.to_owned(), name)).or_default();
        place.upgrade().unwrap_or_else(|| {
            let alarm = Arc::new(Alarm::default());
            *place = Arc::downgrade(&alarm);
            alarm
        })
    }

    /// All that are held: rule, name, and the detail of those that are on.
    pub fn all(&self) -> Vec<(String, &'static str, Option<String>)> {
        let mut alarms = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        alarms.retain(|_, alarm| alarm.strong_count() > 0);
        let held = alarms.iter().filter_map(|((rule, name), alarm)| {
            alarm.upgrade().map(|alarm| (rule.clone(), *name, alarm.detail()))
        });
        held.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_says_when_it_changes_and_vanishes_with_its_holder() {
        let alarms = Alarms::default();
        let alarm = alarms.get("qwen3", "kv_zero_hits");
        assert!(alarm.raise("wrong seed"));
        assert!(!alarms.get("qwen3", "kv_zero_hits").raise("wrong seed"));
        assert_eq!(alarms.all(), [("qwen3".into(), "kv_zero_hits", Some("wrong seed".into()))]);
        assert!(alarm.clear());
        assert!(!alarm.clear());
        drop(alarm);
        assert!(alarms.all().is_empty());
    }
}
